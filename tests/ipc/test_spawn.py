"""Real processes: who comes in, who does not, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.watching import LOOPS, PATIENCE, Watch, alive, child, children, failure, nothing_left, run
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc import spawn
from reflex_runtime.ipc.messages import INFO
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.ipc.spawn import Process, StartFailed, from_socket, spawned

TRANSPORTS = ("unix", "tcp", "stdio")


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

    told = called

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self.ended.append(error)


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
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_g14_a_process_connects_by_each_transport_and_nothing_of_it_stays(
    transport: str, loop: str, tmp_path: Path
) -> None:
    def private_directories() -> list[Path]:
        return list(tmp_path.glob("reflex-*"))

    async def test() -> None:
        handler = Nobody()
        link = await child("well", transport)(handler)
        assert link.process is not None
        assert link.process.pid in children()
        assert not private_directories(), "the socket is in the file system no longer than it must be"
        await link.peer.call(INFO, {})
        await link.kill()
        assert link.process.ended.result() == -signal.SIGKILL
        assert link.process.ending == "was ended by SIGKILL"
        assert link.process.pid not in children()
        assert handler.ended == [None]
        await link.kill()  # again

    run(test(), loop)


def test_g14_the_socket_is_private_while_it_is_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)

    async def test() -> None:
        start = asyncio.ensure_future(child("silent", CHILD_LOG=str(log))(Nobody()))
        written = json.loads(await asyncio.to_thread(log.read_text))  # when the process tells its address
        path = Path(written["address"].removeprefix("unix:"))
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        assert os.stat(path.parent).st_mode & 0o777 == 0o700
        stranger, writer = await asyncio.open_unix_connection(str(path))
        await stranger.readexactly(1)  # it was asked who it is
        start.cancel()
        await asyncio.wait({start})
        assert start.cancelled()
        await asyncio.wait_for(stranger.read(), PATIENCE)  # until the end
        writer.close()
        assert not os.path.exists(path.parent)  # noqa: ASYNC240
        assert not alive(written["pid"])

    run(test())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_g14_a_process_that_exits_at_once_is_a_failed_start_that_says_how(transport: str) -> None:
    error = run(failure(child("exits", transport)(Nobody())))
    assert isinstance(error, StartFailed)
    assert "exited with status 3" in str(error) or transport == "stdio"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_g14_a_process_that_connects_and_leaves_is_a_failed_start(transport: str) -> None:
    error = run(failure(child("mute_at_once", transport)(Nobody())))
    assert isinstance(error, StartFailed)
    assert "exited with status 0 before" in str(error)


@pytest.mark.parametrize("behaviour", ["garbage", "stranger", "mute_at_once"])
def test_g14_who_does_not_say_its_token_on_the_only_connection_there_is_has_failed(behaviour: str) -> None:
    error = run(failure(child(behaviour, "stdio")(Nobody())))
    assert isinstance(error, StartFailed)
    assert "did not say who it is" in str(error)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("behaviour", ["garbage", "mute", "stranger", "silent"])
def test_g14_who_does_not_say_the_token_is_not_let_in(
    behaviour: str, transport: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the opener misbehaves, so that nobody ever comes."""
    knock = spawn._Door.knock

    async def test() -> None:
        knocked: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

        def knocks(door: Any) -> Peer:
            knocked.set_result(peer := knock(door))
            return peer

        monkeypatch.setattr(spawn._Door, "knock", knocks)
        start = asyncio.ensure_future(child(behaviour, transport)(Nobody()))
        if behaviour == "stranger":  # which ends when its connection does
            assert isinstance(await failure(start), StartFailed)
            return
        if behaviour != "silent":
            peer = await asyncio.wait_for(knocked, PATIENCE)
            if behaviour == "garbage":
                await asyncio.wait_for(asyncio.wait({peer.ended}), PATIENCE)
        await asyncio.sleep(0)
        assert not start.done()
        start.cancel()
        await asyncio.wait({start})
        assert start.cancelled()

    run(test(), loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_g14_strangers_that_come_first_are_turned_away_however_many(transport: str, loop: str) -> None:
    async def test() -> None:
        link = await child("crowd", transport)(Nobody())
        await link.peer.call(INFO, {})
        await link.kill()

    run(test(), loop)


def test_g14_a_stranger_may_not_send_large_frames() -> None:
    async def test() -> None:
        door = spawn._Door(Nobody(), "secret")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, peer = await asyncio.get_running_loop().connect_accepted_socket(door.knock, ours)
        with theirs:
            theirs.send(b"J" + (spawn.STRANGERS_FRAME + 1).to_bytes(4, "big"))
            await asyncio.wait_for(asyncio.wait({peer.ended}), PATIENCE)
        door.shut()

    run(test())


def test_g14_one_stranger_too_many_is_the_end_of_the_oldest() -> None:
    async def test() -> None:
        door = spawn._Door(Nobody(), "secret")
        peers, socks = [], []
        for _ in range(spawn.MOST_STRANGERS + 1):
            assert not any(peer.ended.done() for peer in peers)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            peers.append((await asyncio.get_running_loop().connect_accepted_socket(door.knock, ours))[1])
            socks.append(theirs)
        assert [peer.ended.done() for peer in peers] == [True] + [False] * spawn.MOST_STRANGERS
        door.shut()
        assert all(peer.ended.done() for peer in peers)
        for sock in socks:
            sock.close()

    run(test())


def test_g14_only_one_comes_in_by_a_door() -> None:
    async def test() -> None:
        handler = Nobody()
        door = spawn._Door(handler, "secret")
        peers, socks = [], []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            peers.append((await asyncio.get_running_loop().connect_accepted_socket(door.knock, ours))[1])
            socks.append(theirs)
        for sock in socks:
            body = b'{"jsonrpc":"2.0","id":1,"result":{"token":"secret","more":[]}}'
            sock.send(b"J" + len(body).to_bytes(4, "big") + body)
        await asyncio.wait_for(asyncio.wait({peers[1].ended}), PATIENCE)
        assert not peers[0].ended.done()
        assert not handler.ended
        late = door.knock()
        process = Process(["true"], dict(os.environ))
        assert await door.who_comes(process) is peers[0]
        assert late.ended.done(), "nobody is asked any more"
        door.shut()
        assert peers[0].ended.done()
        assert handler.ended == [None], "it belonged to the handler"
        for sock in socks:
            sock.close()
        await asyncio.wait_for(asyncio.shield(process.ended), PATIENCE)

    run(test())


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
        client = watch.client(child("leaves_one_behind"))
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
def test_g14_a_process_is_reaped_without_a_descriptor_of_it(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refused)

    async def test() -> None:
        process = Process([sys.executable, "-c", "raise SystemExit(5)"], dict(os.environ))
        assert process.ending == "still runs" or process.ended.done()
        assert await asyncio.wait_for(process.ended, PATIENCE) == 5
        assert process.ending == "exited with status 5"
        other = Process(["sleep", "1000"], dict(os.environ))
        await other.kill()
        assert other.ended.result() == -signal.SIGKILL

    run(test(), loop)


def test_g14_killing_ends_also_when_who_kills_is_cancelled() -> None:
    async def test() -> None:
        process = Process(["sleep", "1000"], dict(os.environ))
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
        process = Process([sys.executable, "-c", print_], dict(os.environ))
        await asyncio.wait_for(process.ended, PATIENCE)

    run(test())
    out, err = capfd.readouterr()
    assert (out, err) == ("", "words ''\n")


def test_g14_a_command_that_cannot_be_run_is_a_failed_start() -> None:
    for command in (["/nowhere/reflex"], ["\0"]):
        for transport in TRANSPORTS:
            error = run(failure(spawned(command, transport)(Nobody())))  # type: ignore[arg-type]
            assert isinstance(error, StartFailed)
            assert repr(command[0]) in str(error)


def test_g14_a_long_temporary_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(far))

    async def test() -> None:
        link = await child("well")(Nobody())
        await link.kill()

    run(test())


@pytest.mark.parametrize("command", ["reflex worker", [], ()])
def test_a_wrong_command_is_refused_at_once(command: Any) -> None:
    with pytest.raises(ConfigError, match="command="):
        spawned(command)


def test_a_wrong_transport_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="transport='udp': must be one of unix, tcp, stdio"):
        spawned(["true"], "udp")  # type: ignore[arg-type]


def test_a_connected_socket_is_used_once() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            opener = from_socket(ours)
            link = await opener(Nobody())
            assert link.process is None
            assert isinstance(await failure(opener(Nobody())), StartFailed)
            await link.kill()
            theirs.settimeout(PATIENCE)
            assert await asyncio.to_thread(theirs.recv, 1) == b""

    run(test())


def test_processes_have_different_tokens_and_the_environment_that_was_given(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text("from os import environ as e; print(e['REFLEX_WORKER_TOKEN'], e['MINE'], e['PATH'])")
    told = tmp_path / "told"

    async def test() -> None:
        for _ in range(2):
            await failure(
                spawned(["/bin/sh", "-c", f"{sys.executable} {script} >> {told}"], env={"MINE": "yes"})(Nobody())
            )

    run(test())
    lines = [line.split(" ", 2) for line in told.read_text().splitlines()]
    assert len({token for token, _, _ in lines}) == 2
    assert all(len(token) == 64 and mine == "yes" and path == os.environ["PATH"] for token, mine, path in lines)
