"""Runtime processes: a real child with a stub engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipc import engines
from ipc.engines import EVENT, Front, params, play
from reflex_runtime.ipc.frames import Reader
from reflex_runtime.ipc.peer import Peer

PATIENCE = 60.0
ANY = Reader(Any)


@dataclass
class Child:
    process: asyncio.subprocess.Process
    peer: Peer
    front: Front

    async def call(self, method: str, params: Any) -> Any:
        answer = await self.peer.call(method, params)
        return ANY.read(answer)

    async def talk(self, words: str) -> list[Any]:
        """What it says to a prompt."""
        await self.call("load_model", {"model_id": "m"})
        await self.call("generate", params("s", prompt=words))
        await self.front.until(lambda: self.front.ended("s"))
        return self.front.of("s")


@contextlib.asynccontextmanager
async def child() -> AsyncIterator[Child]:
    """A process that is killed at the end, if it has not ended."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    front = Front()
    _, peer = await loop.create_connection(lambda: Peer(front), sock=ours)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(engines.__file__)), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE):
            yield Child(process, peer, front)
    finally:
        peer.abort()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.communicate()


def test_a_process_serves_its_connection_until_it_is_told_to_end() -> None:
    async def main() -> None:
        async with child() as worker:
            assert (await worker.call("runtime/info", {}))["pid"] == worker.process.pid
            assert await worker.talk("3 words") == ["w0", "w1", "w2", "|", "stats", "<completed>"]
            assert await worker.call("shutdown", {}) == {"clean": True}
            assert await worker.process.wait() == 0
            await worker.front.until(lambda: bool(worker.front.lost_with))
            assert worker.front.lost_with == [None]

    play(main())


def test_what_a_library_prints_or_reads_does_not_touch_the_connection() -> None:
    async def main() -> None:
        async with child() as worker:
            said = await worker.talk("4 words")
            assert said[-1] == "<completed>"
            await worker.call("generate", params("t", prompt="print"))
            await worker.call("cancel", {"stream_id": "t"})
            await worker.call("shutdown", {})
            assert worker.process.stdout is not None
            printed = await worker.process.stdout.read()
            assert b"loading" in printed
            assert b"a library says hello" in printed
            assert b"and so does its C code" in printed
            assert b"it reads b''" in printed
            assert worker.front.lost_with in ([], [None])

    play(main())


def test_g14_a_process_ends_with_its_connection() -> None:
    async def main() -> None:
        async with child() as worker:
            await worker.call("load_model", {"model_id": "m"})
            await worker.call("generate", params("s", prompt="wait"))
            worker.peer.abort()
            assert await worker.process.wait() == 1

    play(main())


def test_g14_a_killed_process_is_noticed_at_once() -> None:
    async def main() -> None:
        async with child() as worker:
            await worker.call("load_model", {"model_id": "m"})
            await worker.call("generate", params("s", prompt="wait"))
            worker.process.send_signal(signal.SIGSTOP)  # it does not answer, so that the calls wait
            calls = [worker.peer.call("runtime/info", {}) for _ in range(3)]
            worker.peer.flush()
            worker.process.kill()
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert {getattr(error, "code", None) for error in found} == {"worker_lost"}

    play(main())


def test_g8_a_reader_that_was_too_slow_is_told() -> None:
    async def main() -> None:
        async with child() as worker:
            assert await worker.talk("leave") == ["<slowConsumer>", "stats", "<error>"]
            assert worker.front.last(EVENT, "s").error.message == "for its reader"

    play(main())


def test_a_process_without_a_socket_as_stdin_says_what_it_needs() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "reflex_runtime", "worker"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert found.returncode == 2
    assert b"stdin is no socket" in found.stderr
    assert b"Traceback" not in found.stderr


def test_a_runtime_process_serves_no_http() -> None:
    code = "import sys, reflex_runtime.ipc.worker, reflex_runtime.llm.server.local_model; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in found if name.startswith("reflex_runtime.web")}
