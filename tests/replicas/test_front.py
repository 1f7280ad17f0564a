"""The front and its channels without processes: slow callers, lost channels, and what is kept for those who watch."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import msgspec
import pytest

from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.frames import Codec, Notification
from reflex_runtime.ipc.spawn import StartFailed
from reflex_runtime.placing import Begun, begun
from reflex_runtime.policies.rollout.breaker import Breaker
from reflex_runtime.policies.rollout.following import FollowingRollout
from reflex_runtime.policies.rollout.rollout import EPISODES
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.replicas import arriving
from reflex_runtime.replicas import replica as replica_module
from reflex_runtime.replicas.arriving import ArrivingConnection
from reflex_runtime.replicas.exchanging import ReplicaExchanges
from reflex_runtime.replicas.fair_table import Caller
from reflex_runtime.replicas.front import FrontRuntime
from reflex_runtime.replicas.inside import ReplicaProcess, settings_of
from reflex_runtime.replicas.messages import (
    BACK,
    DROP,
    PLACED,
    SETTLE,
    SWITCH,
    AskReplica,
    ReplicaAnswer,
    ReplicaReport,
    Serve,
    SlotOf,
)
from reflex_runtime.replicas.placing_table import ReplicaTable
from reflex_runtime.replicas.replica import Replica, ReplicaPlan, answers
from reflex_runtime.replicas.views import recorded
from reflex_runtime.replicas.watching import MergedLive
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.app import App
from reflex_runtime.web.connection import HttpConnection
from reflex_runtime.web.errors import Conflict, NotReady
from reflex_runtime.web.handover import HandedOver, HandoverChannel, hand_on
from serving.harness import STATE
from serving.in_process import connected, with_app


def made(changed: Any = lambda replica: None) -> Replica:
    """A replica that takes requests, without its process."""
    plan = ReplicaPlan("replica-0", "cpu", Serve("replica-0", {}, {}, []), {})
    found = Replica(plan, lambda *_: None, lambda *_: None, changed)
    found.client.state = "ready"
    return found


def run(main: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await main()

    asyncio.run(bounded())


def test_x7_a_caller_that_sends_one_byte_at_a_time_does_not_keep_the_front_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are read again when there are twice as many, or enough; not with each of them."""
    looks: list[int] = []

    def counted(data: bytes) -> Begun | None:
        looks.append(len(data))
        return begun(data)

    monkeypatch.setattr(arriving, "begun", counted)
    head = b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: 3000\r\n\r\n"
    given: list[bytes] = []

    async def main() -> None:
        def give(known: Begun, peer: str, file: int, data: bytes) -> bool:
            socket.socket(fileno=file).close()
            given.append(data)
            return True

        connections = SimpleNamespace(enter=lambda *_: None, leave=lambda *_: None, move=lambda *_: None)
        app = cast(Any, SimpleNamespace(connections=connections, closing=False))
        ours, theirs = socket.socketpair()
        connection = ArrivingConnection(app, give)
        with theirs:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
            connection.data_received(head)
            for _ in range(3000):
                assert given == []
                connection.data_received(b"x")

    run(main)
    assert given == [head + b"x" * 3000]  # with its last byte, and not later
    assert len(looks) < 12


def test_x7_a_connection_that_cannot_be_sent_takes_no_other_with_it() -> None:
    async def main() -> None:
        taken: asyncio.Queue[str] = asyncio.Queue()
        ended = asyncio.Event()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def take(sock: socket.socket, said: HandedOver) -> None:
            sock.close()
            taken.put_nowait(said.identity)

        here, there = HandoverChannel(ours, take, ended.set), HandoverChannel(theirs, take)
        room = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for name, slots in (("long", {"p" * 2 * room: "a"}), ("next", {})):
            given, kept = socket.socketpair()
            with kept:
                here.send(given.detach(), HandedOver(name, slots=slots))
                if name == "long":
                    assert await asyncio.get_running_loop().run_in_executor(None, kept.recv, 1) == b""  # it is closed
        assert await taken.get() == "next"
        assert not ended.is_set()
        there.close()
        await ended.wait()

    run(main)


def test_x7_no_caller_is_lost_in_a_channel_that_closes() -> None:
    """What was sent to it before is taken, and a request that came since is answered where it is."""

    async def main() -> None:
        taken: list[str] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def take(sock: socket.socket, said: HandedOver) -> None:
            sock.close()
            taken.append(said.identity)

        here, there = HandoverChannel(ours, take), HandoverChannel(theirs, take)
        carrier = Mock(spec=HttpConnection)
        exchange = cast(Any, SimpleNamespace(carrier=carrier))
        for name in ("one", "two"):
            given, kept = socket.socketpair()
            kept.close()
            carrier.give_away.return_value = given.detach(), b""
            assert hand_on(exchange, b"", there, name)
        here.close()
        assert taken == ["one", "two"]
        there.close()
        carrier.give_away.reset_mock()
        assert not hand_on(exchange, b"", there, "three")
        carrier.give_away.assert_not_called()

    run(main)


def test_x7_a_replica_whose_channel_has_ended_is_given_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may take longer to be gone, and every connection given to it until then would be lost."""

    async def opened(handler: Any) -> None:
        return None

    monkeypatch.setattr(replica_module, "spawned", lambda *_: opened)

    async def main() -> None:
        told = asyncio.Event()
        replica = made(lambda _: told.set())
        await replica._open(cast(Any, None))  # no process has the other end
        assert replica.live
        await told.wait()
        assert not replica.live
        assert replica.told()["state"] == "leaving"

    run(main)


def test_x7_nothing_is_kept_of_those_who_no_longer_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuntimeClient, "pid", 7)

    async def main() -> None:
        replica = made()
        for _ in range(3):
            merged = MergedLive([replica], [])
            merged.watch()
            assert len(replica._watching) == 1
            merged.end()
            assert replica._watching == {}

    run(main)


def test_x7_an_answer_of_a_replica_that_has_ended_meanwhile_does_not_count() -> None:
    """Its counters are already among those of earlier lives: the page would have them twice."""

    async def main() -> None:
        replica, goes = made(), asyncio.Event()

        async def ask(asked: AskReplica, timeout: float) -> ReplicaAnswer:
            await goes.wait()
            return ReplicaAnswer(200, [], b"")

        replica.ask = ask  # type: ignore[method-assign]
        for state, found in (("ready", ["replica-0"]), ("restarting", [])):
            asking = asyncio.create_task(answers([replica], AskReplica("GET", "/metrics"), 1.0))
            await asyncio.sleep(0)
            replica.client.state = state  # type: ignore[assignment]
            goes.set()
            assert list(await asking) == found
            goes.clear()

    run(main)


def test_x7_a_replica_that_starts_while_what_it_serves_changes_starts_again() -> None:
    """It would be ready with an earlier version, or without the faults of a drill."""
    told = {"name": "default", "sources": {"a": "v1", "b": "v2"}, "config": {"inject_fault": []}}
    plan = ReplicaPlan("replica-0", "cpu", Serve("replica-0", {}, {}, [told]), {})
    replica = Replica(plan, lambda *_: None, lambda *_: None, lambda *_: None)
    asked: list[Serve] = []
    changes: list[dict[str, Any]] = [{"sources": {"b": "v3"}}, {"faults": ["b:raise:1"]}, {"sources": {"b": "v3"}}]

    async def request(method: str, serve: Serve) -> None:
        asked.append(serve)
        if changes:
            replica.serves("another policy", sources={"a": "wrong"})
            replica.serves("default", **changes.pop(0))

    client = cast(Any, SimpleNamespace(request=request))

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(StartFailed, match="changed while it started"):
                await replica._prepare(client)
        await replica._prepare(client)  # the third change is none

    run(main)
    assert asked[-1].asked == [
        {"name": "default", "sources": {"a": "v1", "b": "v3"}, "config": {"inject_fault": ["b:raise:1"]}}
    ]
    assert asked[0].asked == [told]


@pytest.mark.parametrize("decided", [SETTLE, BACK])
def test_v12_x7_what_a_guard_decides_of_an_earlier_version_ends_no_load(decided: str) -> None:
    """The slot is exchanged again, one replica has loaded and waits for another, and the first watch ends."""

    async def main() -> None:
        process, served, beside = ReplicaProcess(Mock()), Mock(), Mock()
        process._runtime = cast(Any, SimpleNamespace(policies={"p": served}))
        process._beside["p", "prod"] = beside
        process._exchange(decided, SlotOf("p", "prod"))
        process._exchange(SWITCH, SlotOf("p", "prod"))
        served.switch.assert_called_once_with("prod", beside)
        assert not process._stop.is_set()
        assert process._beside == {}
        process._beside["p", "prod"] = beside
        process._exchange(DROP, SlotOf("p", "prod"))
        assert process._beside == {}

    run(main)


def test_x7_a_connection_that_is_given_tells_whether_its_episode_was_moved() -> None:
    """The replicas were told too, but that message may come after the connection."""
    table = ReplicaTable()
    table.began_with(["r0", "r1"])
    for episode in ("e", "f"):
        table.runs(episode, "r0", Caller("h", "n"))
    given: list[HandedOver] = []
    replicas = [SimpleNamespace(name=name, give=lambda file, said: given.append(said)) for name in ("r0", "r1")]
    slots = {"p": "b"}
    front = cast(Any, SimpleNamespace(table=table, _started=True, replicas=replicas, _slots_of=lambda episode: slots))
    assert FrontRuntime.give(front, Begun(True, "episode:e", "e"), None, 0, b"")
    table.leave("r0")
    for _ in range(2):
        assert FrontRuntime.give(front, Begun(True, "episode:e", "e"), None, 0, b"")
    assert [said.moved for said in given] == [False, True, False]
    assert given[1].slots == slots


def test_x7_the_front_learns_whose_an_episode_is_that_begins_on_a_kept_connection(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table of episodes is shared between callers, wherever it hears of them."""
    said: list[tuple[str, ReplicaReport]] = []

    async def check(app: App, runtime: PolicyRuntime) -> None:
        process = ReplicaProcess(Mock())
        monkeypatch.setattr(process, "_say", lambda method, report: said.append((method, report)))
        rollout = FollowingRollout(process, "default", ("prod",), Breaker(("prod",), 5, 1.0))
        monkeypatch.setattr(runtime.first.rollout, "place", rollout.place)
        connection, wire = connected(app)
        for fields in ({"episode_id": "e", "robot_id": "arm"}, {"episode_id": "f"}):
            body = json.dumps(fields | {"state": STATE}).encode()
            head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.data_received(head + body)
            app.read()
            await wire.written.get()

    with_app(tiny, check)
    table = ReplicaTable()
    table.began_with(["r0"])
    front = cast(Any, SimpleNamespace(table=table, _reports=dict.fromkeys((PLACED,), Mock()), policies=MagicMock()))
    for method, report in said:
        note = Notification(method, msgspec.Raw(msgspec.msgpack.encode(report)))
        FrontRuntime._noted(front, cast(Any, SimpleNamespace(name="r0")), note, Codec.MSGPACK)
    whose = {episode: caller for episode, (_, caller) in table._runs._values.items()}
    assert whose == {"e": Caller("127.0.0.1", "robot:arm"), "f": Caller("127.0.0.1", "1")}


def test_x7_where_no_replica_is_left_a_load_says_to_restart_the_server() -> None:
    """Each has failed to start, so that none could say whether the policy fits."""
    replicas = [SimpleNamespace(name=f"r{n}", live=False, client=Mock(start_failed=True, pid=None)) for n in range(2)]
    exchanges = ReplicaExchanges(MagicMock(), cast(Any, replicas))
    loads = Mock(side_effect=NotReady("no replica answers", retry_after=1.0))
    with pytest.raises(Conflict, match="no replica is left that could load the policy: restart the server with it"):
        asyncio.run(exchanges.exchange("prod", "dir", loads))
    assert not loads.called


@pytest.mark.parametrize("slots", [("prod",), ("a", "b")])
def test_x7_an_episode_that_arrives_is_told_once_and_again_where_its_answer_fails(slots: tuple[str, ...]) -> None:
    rollout = FollowingRollout(Mock(), "default", slots, Breaker(slots, 5, 1.0))
    rollout.arrives("e")
    assert not rollout.place("other", "r0", 0.0).changed
    first = rollout.place("e", "r1", 1.0)
    assert first.changed
    rollout.untold(first)
    assert [rollout.place("e", "r2", 2.0).changed for _ in range(2)] == [True, False]
    for number in range(EPISODES + 5):
        rollout.arrives(f"e{number}")
    assert len(rollout._arriving) == EPISODES


@pytest.mark.parametrize(
    ("asked", "own"),
    [("t.jsonl", "t-1.jsonl"), ("./t", "./t-1"), ("/a.d/t", "/a.d/t-1"), ("/a.d/t.x.jsonl", "/a.d/t.x-1.jsonl")],
)
def test_x7_each_replica_traces_to_a_file_of_its_own(asked: str, own: str) -> None:
    assert settings_of(ServeConfig(trace=asked), 1)["trace"] == own


def test_x7_health_counts_the_recordings_of_all_replicas() -> None:
    one = {"recorded": 3, "dropped": 0, "cpu_s": 0.5, "file": "r0", "error": None}
    other = {"recorded": 4, "dropped": 2, "cpu_s": 0.25, "file": "r1", "error": "full"}
    both = {"recorded": 7, "dropped": 2, "cpu_s": 0.75, "file": "r0", "error": "full"}
    assert recorded([one, other]) == {"recording": both}
    assert recorded([]) == {}
