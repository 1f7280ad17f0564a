"""Real processes: how they start and end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.watching import LOOPS, PATIENCE, Watch, alive, child, children, failure, nothing_left, run
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.client import ClientConfig
from reflex_runtime.ipc.messages import INFO
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.ipc.spawn import Process, StartFailed, spawned


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


class Nobody:
    """A handler."""

    def __init__(self) -> None:
        self.ended: list[Exception | None] = []

    def called(self, *_: Any) -> None:
        pass

    notified = called

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self.ended.append(error)


def started(*command: str) -> Process:
    return Process(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, process_group=0))


async def gone(pid: int) -> None:
    """Until a process that is not a child of this one has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), PATIENCE)
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_a_process_has_one_end_of_a_socket_pair_and_nothing_of_it_stays(loop: str) -> None:
    async def test() -> None:
        handler = Nobody()
        link = await child("well")(handler)
        assert link.process is not None
        assert link.process.pid in children()
        await link.peer.call(INFO, {})
        await link.kill()
        assert link.process.ended.result() == -signal.SIGKILL
        assert link.process.ending == "was ended by SIGKILL"
        assert link.process.pid not in children()
        assert handler.ended == [None]
        await link.kill()  # again

    run(test(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_what_a_process_started_ends_with_it(loop: str) -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("parent"))
        await client.start()
        grandchild = await client.request("grandchild", {})
        assert alive(grandchild)
        os.kill(client.pid or 0, signal.SIGKILL)
        await gone(grandchild)
        await watch.until(lambda: watch.losses)
        await client.close()

    run(test(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_a_process_that_ended_is_noticed_though_another_holds_its_connection(loop: str) -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("leaves_one_behind"), ClientConfig(backoff_s=1000, backoff_max_s=1000))  # only one
        await client.start()
        grandchild = await client.request("grandchild", {})
        try:
            os.kill(client.pid or 0, signal.SIGKILL)
            await watch.until(lambda: watch.losses)
            assert "SIGKILL" in str(watch.losses[0])
            assert alive(grandchild)
            await client.close()
        finally:
            os.kill(grandchild, signal.SIGKILL)

    run(test(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_a_process_is_reaped_where_it_cannot_be_looked_at_before(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "waitid")

    async def test() -> None:
        process = started(sys.executable, "-c", "raise SystemExit(5)")
        assert process.ending == "still runs" or process.ended.done()
        assert await asyncio.wait_for(process.ended, PATIENCE) == 5
        assert process.ending == "exited with status 5"
        other = started("sleep", "1000")
        await other.kill()
        assert other.ended.result() == -signal.SIGKILL

    run(test(), loop)


def test_g14_killing_ends_also_when_who_kills_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.ipc.spawn.KILL_LIMIT", 10 * PATIENCE)

    async def test() -> None:
        process = started("sleep", "1000")
        killing = asyncio.ensure_future(process.kill())
        await asyncio.sleep(0)
        killing.cancel()
        await asyncio.wait({killing})
        assert killing.cancelled()
        assert process.ended.done()

    run(test())


def test_g14_grace_is_for_a_process_that_ends_by_itself() -> None:
    async def test() -> None:
        link = await child("well")(Nobody())
        await link.kill(grace=PATIENCE)  # the end of its connection is its end
        assert link.process is not None
        assert link.process.ended.result() == 0

    run(test())


def test_g14_what_a_process_prints_goes_to_stderr_and_its_stdin_is_empty(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        print_ = "import sys; print('words', repr(sys.stdin.read()))"
        process = started(sys.executable, "-c", print_)
        await asyncio.wait_for(process.ended, PATIENCE)

    run(test())
    out, err = capfd.readouterr()
    assert (out, err) == ("", "words ''\n")


def test_g14_a_command_that_cannot_be_run_is_a_failed_start() -> None:
    for command in (["/nowhere/reflex"], ["\0"]):
        error = run(failure(spawned(command)(Nobody())))
        assert isinstance(error, StartFailed)
        assert repr(command[0]) in str(error)


@pytest.mark.parametrize("command", ["reflex worker", [], ()])
def test_a_wrong_command_is_refused_at_once(command: Any) -> None:
    with pytest.raises(ConfigError, match="command="):
        spawned(command)


def test_a_process_has_the_environment_that_was_given(tmp_path: Path) -> None:
    script, told = tmp_path / "tell.py", tmp_path / "told"
    script.write_text("from os import environ as e; print(e['MINE'], e['PATH'])")

    async def test() -> None:
        command = ["/bin/sh", "-c", f"{sys.executable} {script} >> {told}"]
        link = await spawned(command, {"MINE": "yes"})(Nobody())
        assert link.process is not None
        await asyncio.wait_for(asyncio.shield(link.process.ended), PATIENCE)
        await link.kill()

    run(test())
    assert told.read_text() == f"yes {os.environ['PATH']}\n"
