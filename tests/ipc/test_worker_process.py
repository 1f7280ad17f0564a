"""Runtime processes: a real child with a stub engine, on every kind of connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ipc import engines
from ipc.engines import EVENT, Front, params, play
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.connect import connected
from reflex_runtime.ipc.frames import Codec, Reader
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.ipc.worker import Worker, serve

PATIENCE = 60.0
ANY = Reader(Any)


@dataclass
class Child:
    process: asyncio.subprocess.Process
    peer: Peer
    front: Front

    async def call(self, method: str, params: Any) -> Any:
        answer = await self.peer.call(method, params)
        return ANY.read(answer.raw, answer.codec)

    async def talk(self, words: str) -> list[Any]:
        """What it says to a prompt."""
        await self.call("load_model", {"model_id": "m"})
        await self.call("generate", params("s", prompt=words))
        await self.front.until(lambda: self.front.ended("s"))
        return self.front.of("s")


@contextlib.asynccontextmanager
async def child(kind: str, directory: Path) -> AsyncIterator[Child]:
    """A process that connects in that way; killed at the end, if it has not ended."""
    loop = asyncio.get_running_loop()
    front, made = Front(), loop.create_future()
    streams: dict[str, Any] = {}
    theirs: list[socket.socket] = []

    def peer() -> Peer:
        made.set_result(Peer(front, Codec.MSGPACK))
        found: Peer = made.result()
        return found

    server: asyncio.Server | None = None
    address = kind
    if kind == "unix":
        address = f"unix:{directory / 'socket'}"
        server = await loop.create_unix_server(peer, str(directory / "socket"))
    elif kind == "tcp":
        server = await loop.create_server(peer, "127.0.0.1", 0)
        address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    elif kind == "stdio":
        ours, end = socket.socketpair()
        theirs.append(end)
        streams = {"stdin": end, "stdout": end}
        await loop.create_connection(peer, sock=ours)
    else:
        address = "stdio"
        streams = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "REFLEX_WORKER_TOKEN": "secret"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(engines.__file__)), address, env=env, stderr=asyncio.subprocess.PIPE, **streams
    )
    for sock in theirs:
        sock.close()
    relay = loop.create_task(_relayed(process, peer())) if kind == "pipes" else None
    try:
        async with asyncio.timeout(PATIENCE):
            yield Child(process, await made, front)
    finally:
        if made.done():
            made.result().abort()
        if server is not None:
            server.close()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if relay is not None:  # two may not read one pipe
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
        await process.communicate()


async def _relayed(process: asyncio.subprocess.Process, peer: Peer) -> None:
    """The two pipes of a process as the connection of a peer."""
    assert process.stdin is not None
    assert process.stdout is not None
    peer.write_to(process.stdin.transport)
    while data := await process.stdout.read(1 << 16):
        peer.data_received(data)
    peer.connection_lost(None)


@pytest.mark.parametrize("kind", ["unix", "tcp", "stdio", "pipes"])
def test_a_process_serves_its_connection_until_it_is_told_to_end(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with child(kind, tmp_path) as worker:
            told = await worker.call("runtime/info", {})
            assert (told["token"], told["pid"]) == ("secret", worker.process.pid)
            assert await worker.talk("3 words") == ["w0", "w1", "w2", "|", "stats", "<completed>"]
            assert await worker.call("shutdown", {}) == {"clean": True}
            assert await worker.process.wait() == 0
            await worker.front.until(lambda: bool(worker.front.lost_with))
            assert worker.front.lost_with == [None]

    play(main())


@pytest.mark.parametrize("kind", ["stdio", "pipes"])
def test_what_a_library_prints_does_not_tear_the_protocol(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with child(kind, tmp_path) as worker:
            said = await worker.talk("4 words")
            assert said[-1] == "<completed>"
            await worker.call("generate", params("t", prompt="print"))
            await worker.call("cancel", {"stream_id": "t"})
            await worker.call("shutdown", {})
            assert worker.process.stderr is not None
            errors = await worker.process.stderr.read()
            assert b"loading" in errors
            assert b"a library says hello" in errors
            assert b"and so does its C code" in errors
            assert b"it reads b''" in errors
            assert worker.front.lost_with in ([], [None])

    play(main())


@pytest.mark.parametrize("kind", ["unix", "stdio", "pipes"])
def test_g14_a_process_ends_with_its_connection(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with child(kind, tmp_path) as worker:
            await worker.call("load_model", {"model_id": "m"})
            await worker.call("generate", params("s", prompt="wait"))
            worker.peer.abort()
            assert await worker.process.wait() == 1

    play(main())


def test_g14_a_killed_process_is_noticed_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with child("unix", tmp_path) as worker:
            await worker.call("load_model", {"model_id": "m"})
            await worker.call("generate", params("s", prompt="wait"))
            worker.process.send_signal(signal.SIGSTOP)  # it does not answer, so that the calls wait
            calls = [worker.peer.call("runtime/info", {}) for _ in range(3)]
            worker.peer.flush()
            worker.process.kill()
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert {getattr(error, "code", None) for error in found} == {"worker_lost"}

    play(main())


def test_g8_a_reader_that_was_too_slow_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with child("unix", tmp_path) as worker:
            assert await worker.talk("leave") == ["<slowConsumer>", "stats", "<error>"]
            assert worker.front.last(EVENT, "s").error.message == "for its reader"

    play(main())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "tcp:1",
        "tcp:127.0.0.1:",
        "tcp:127.0.0.1:65536",
        "tcp:10.0.0.1:99",
        "tcp:example.org:99",
        "stdio:",
        "ftp:x",
    ],
)
def test_an_address_that_is_none_is_a_wrong_setting(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="must be unix:PATH"):
            await connected(address, Worker(engines.StubEngine))  # type: ignore[arg-type]

    play(main())


def test_nobody_at_the_address_is_an_exit_status(tmp_path: Path) -> None:
    async def main() -> None:
        assert await serve(f"unix:{tmp_path / 'nobody'}", engines.StubEngine) == (1, True)  # type: ignore[arg-type]

    play(main())
