"""`reflex serve --replicas`: real processes and sockets; who answers whom, and what is lost when one of them ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from openpi_client import msgpack_numpy
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from reflex_runtime.placing import identity_of
from reflex_runtime.policies.wires.vla_eval_codec import EvalMessage, decode, encode
from reflex_runtime.rendezvous import owner
from reflex_runtime.replicas.views import WITHIN
from serving.harness import PATIENCE, STATE, Server, parse_answers, refusal
from serving.pair import Pair, admin, rollout, two

NAMES = ("replica-0", "replica-1")


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Server]:
    """Two versions in two replicas. Tests may kill replicas: the next one waits until both are there."""
    with two(pair, "--replicas", "2", "--watchdog-s", "1", "--probe-cooldown-s", "0.05") as running:
        yield running


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> None:
    """Both replicas are ready."""
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.wait_until(lambda: [told["state"] for told in replicas(running)] == ["ready", "ready"])


def replicas(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/health").json["replicas"]
    return found


class Robot:
    """A kept connection that asks again, on a new one, when it is closed. lost: how often. gap: the longest time from a
    request to its answer."""

    def __init__(self, port: int, robot: str | None = None) -> None:
        self.port, self.robot = port, robot
        self.lost, self.gap, self.asked, self.answered = 0, 0.0, 0, 0
        self.enough, self.until = asyncio.Event(), 0  # set once it has so many answers
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def act(self, episode: str | None = None, **more: Any) -> tuple[str, dict[str, str], Any]:
        """The replica that answered, its headers, and its body."""
        self.asked += 1
        named = {"robot_id": self.robot} if self.robot else {}
        mine = f"{self.robot}/{episode}/{self.asked}"
        fields = {"state": STATE, "request_id": mine, **named, **({"episode_id": episode} if episode else {}), **more}
        body = json.dumps(fields).encode()
        began = time.perf_counter()
        while True:
            try:
                status, headers, answer = await self._ask(b"POST", b"/act", body)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.lost += 1
                self.close()
                continue
            if status == 200:
                break
            assert status == 503, answer  # a replica that ends
        self.gap = max(self.gap, time.perf_counter() - began)
        self.answered += 1
        if self.answered >= self.until:
            self.enough.set()
        assert answer["request_id"] == mine  # no answer of another request, nor one twice
        return headers["x-reflex-replica"], headers, answer

    async def _ask(self, method: bytes, path: bytes, body: bytes) -> tuple[int, dict[str, str], Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        writer.write(b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (method, path, len(body)))
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        (told,) = parse_answers(head)
        answer = await reader.readexactly(int(told.headers["content-length"]))
        if told.headers.get("connection") == "close":
            self.close()
        return told.status, told.headers, json.loads(answer)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


def slot_of(headers: dict[str, str]) -> str:
    return headers["x-reflex-policy-slot"]


def asked_by(server: Server) -> dict[str, int]:
    """Connections given to each replica so far."""
    return {told["name"]: told["connections_given"] for told in replicas(server)}


def test_x7_one_connection_asks_everything_in_turn(server: Server) -> None:
    """It moves to its replica, to the front, and to the replica of another episode; each answer is the right one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    before, given = server.metrics(), asked_by(server)

    def ask(method: str, path: str, fields: Any = None) -> tuple[int, Any]:
        connection.request(method, path, None if fields is None else json.dumps(fields))
        answer = connection.getresponse()
        return answer.status, answer.read()

    sock = None
    for turn in range(8):
        assert ask("GET", "/health")[0] == 200
        sock = sock or connection.sock
        assert connection.sock is sock  # one connection all the time
        status, body = ask("POST", "/act", {"state": STATE, "episode_id": f"turn-{turn}", "request_id": f"t{turn}"})
        assert (status, json.loads(body)["request_id"]) == (200, f"t{turn}")
        assert ask("GET", "/no/such/path")[0] == 404
        assert ask("GET", "/act")[0] == 405
    page = ask("GET", "/metrics")[1].decode()
    assert "reflex_replica_ready" in page
    connection.close()
    after = server.metrics()
    assert after("reflex_requests_total", outcome="ok") - before("reflex_requests_total", outcome="ok") == 8
    assert all(asked_by(server)[name] > given[name] for name in NAMES)


def test_x7_requests_in_a_row_on_one_connection_are_answered_in_their_order(server: Server) -> None:
    def act(episode: str) -> bytes:
        body = json.dumps({"state": STATE, "episode_id": episode, "request_id": episode}).encode()
        return b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = parse_answers(server.raw(b"".join(act(f"row-{i}") for i in range(6)) + last))
    assert [answer.status for answer in answers] == [200] * 7
    assert [answer.json["request_id"] for answer in answers[:6]] == [f"row-{i}" for i in range(6)]
    assert answers[6].json["status"] == "ok"


def test_x7_an_identity_behind_a_large_body_is_found_by_the_replica(server: Server) -> None:
    """The front does not look so far: the replica reads it, and passes the whole request on."""
    fields = json.dumps({"state": STATE, "episode_id": "far", "robot_id": "far"})[1:]
    body = b"{" + b" " * 200_000 + fields.encode()
    seen = {server.post(body).headers["x-reflex-replica"] for _ in range(12)}
    assert len(seen) == 1


def test_x7_a_robot_goes_where_its_name_hashes_to(server: Server) -> None:
    robots = [f"robot-{i}" for i in range(12)]
    found = [server.act(robot_id=robot).headers["x-reflex-replica"] for robot in robots]
    assert found == [owner(identity_of(robot, None), NAMES) for robot in robots]
    assert set(found) == set(NAMES)


def test_x7_a_thousand_episodes_keep_their_version_and_their_replica_while_one_is_killed(server: Server) -> None:
    """Except those of the one that was killed, which keep their version all the same; the first answer of each from
    another replica says that it was moved, and no other answer does."""
    names = [f"kept-{i}" for i in range(1000)]
    rounds: list[dict[str, tuple[str, str]]] = []
    told: list[set[str]] = []

    async def every(robots: list[Robot]) -> None:
        found: dict[str, tuple[str, str]] = {}
        told.append(set())

        async def one(robot: Robot, mine: list[str]) -> None:
            for episode in mine:
                process, headers, answer = await robot.act(episode)
                found[episode] = process, slot_of(headers)
                if answer["policy_changed"]:
                    told[-1].add(episode)

        await asyncio.gather(*(one(robot, names[i :: len(robots)]) for i, robot in enumerate(robots)))
        rounds.append(found)

    async def main() -> None:
        robots = [Robot(server.port) for _ in range(16)]
        await every(robots)
        assert admin(server, "split", split=0).status == 200  # what begins from here on has the other version
        os.kill(replicas(server)[0]["pid"], signal.SIGKILL)
        await every(robots)
        server.wait_until(lambda: [told["state"] for told in replicas(server)] == ["ready", "ready"])
        await every(robots)  # the new one takes over no running episode
        for robot in robots:
            robot.close()

    run(main)
    first, second, third = rounds
    assert len({process for process, _ in first.values()}) == 2
    (survivor,) = {process for process, _ in second.values()}
    moved = [episode for episode in names if first[episode][0] != survivor]
    assert 300 < len(moved) < 700
    assert told == [set(), set(moved), set()]
    assert [e for e in names if first[e][1] != second[e][1] or second[e] != third[e]] == []
    assert Counter(slot for _, slot in first.values())["a"] > 300
    assert admin(server, "split", split=50).status == 200


def test_x7_an_episode_on_a_websocket_learns_that_its_replica_was_lost(server: Server) -> None:
    """The front has never read whose it is: every replica was told of all episodes of the lost one. Versions stay."""
    robots: dict[str, ClientConnection] = {}
    lost: set[str] = set()

    def ask(episode: str) -> tuple[str, bool]:
        """The version that answers, and whether it says that the episode was moved."""
        for _ in range(1000):
            try:
                if episode not in robots:
                    url = f"ws://127.0.0.1:{server.port}/"
                    robots[episode] = stack.enter_context(connect(url, compression=None))
                    robots[episode].recv(PATIENCE)
                sent = {"observation/state": np.array(STATE), "prompt": "go", "reflex/seed": 3, "episode_id": episode}
                robots[episode].send(msgpack_numpy.packb(sent))
                answer = msgpack_numpy.unpackb(robots[episode].recv(PATIENCE))
                return answer["model_hash"], answer["policy_changed"]
            except ConnectionClosed:
                del robots[episode]
                lost.add(episode)
        raise AssertionError("never answered")

    names = [f"spoken-{number}" for number in range(16)]
    with ExitStack() as stack:
        first = {name: ask(name) for name in names}
        assert len({version for version, _ in first.values()}) == 2
        assert not any(changed for _, changed in first.values())
        assert admin(server, "split", split=0).status == 200  # what begins from here on has the other version
        os.kill(replicas(server)[1]["pid"], signal.SIGKILL)
        server.wait_log(": its connection ended")
        again = {name: ask(name) for name in names}
        assert 0 < len(lost) < len(names)
        assert again == {name: (version, name in lost) for name, (version, _) in first.items()}
        assert not any(ask(name)[1] for name in names)
    assert admin(server, "split", split=50).status == 200


def test_x7_a_killed_replica_loses_only_what_it_ran(server: Server) -> None:
    """64 robots that ask all the time: those of the other replica notice nothing, the others are answered at once."""
    robots = [Robot(server.port, f"busy-{i}") for i in range(64)]
    victims = {robot.robot for robot in robots if owner(identity_of(robot.robot, None), NAMES) == NAMES[0]}
    done = asyncio.Event()

    async def one(robot: Robot) -> None:
        while not done.is_set():
            await robot.act()
        robot.close()

    async def answered(more: int) -> None:
        for robot in robots:
            robot.until = robot.answered + more
            robot.enough.clear()
        await asyncio.gather(*(robot.enough.wait() for robot in robots))

    async def main() -> None:
        tasks = [asyncio.create_task(one(robot)) for robot in robots]
        await answered(5)
        pid = (await asyncio.to_thread(replicas, server))[0]["pid"]
        for robot in robots:
            robot.gap = 0.0
        os.kill(pid, signal.SIGKILL)
        await answered(3)
        done.set()
        await asyncio.gather(*tasks)

    run(main)
    assert {robot.robot for robot in robots if robot.lost} <= victims
    assert sum(robot.lost for robot in robots) >= 1
    print(f"longest wait for an answer: {max(robot.gap for robot in robots):.3f} s")
    assert max(robot.gap for robot in robots) < 5.0  # 0.1 s here; a busy machine may take longer


def test_x7_a_replica_that_hangs_is_found_and_replaced(server: Server) -> None:
    first = replicas(server)[1]
    psutil.Process(first["pid"]).suspend()
    server.wait_log("nothing was answered for 1 s")
    server.wait_until(lambda: replicas(server)[1]["state"] == "ready")
    found = replicas(server)[1]
    assert found["pid"] != first["pid"]
    assert found["restarts"] > first["restarts"]
    assert not psutil.pid_exists(first["pid"])


def test_x7_outcomes_split_and_rollback_are_of_all_replicas(server: Server) -> None:
    before = rollout(server)["outcomes"]
    names = [f"ended-{i}" for i in range(24)]
    slots = {name: server.act(episode_id=name).headers["x-reflex-policy-slot"] for name in names}
    for name in names:
        told = server.ask("POST", f"/episodes/{name}/outcome", b'{"success": true}')
        assert told.json == {
            "episode_id": name, "slot": slots[name], "success": True, "counted": True, "repeated": False,
        }  # fmt: skip
    after = rollout(server)["outcomes"]
    counted = {slot: after[slot]["episodes"] - before[slot]["episodes"] for slot in "ab"}
    assert counted == Counter(slots.values())
    assert server.ask("POST", "/episodes/nobody/outcome", b'{"success": true}').status == 404
    said = [("episode_start", {}), ("observation", {"states": np.array(STATE)}), ("episode_end", {"success": True})]
    for i in range(8):  # replicas get these themselves, and report them
        with connect(f"ws://127.0.0.1:{server.port}/vla-eval?robot_id=told-{i}", compression=None) as robot:
            for kind, fields in (*said, ("hello", {})):
                robot.send(encode(EvalMessage(kind, fields)))
            assert [decode(robot.recv(PATIENCE)).type for _ in range(2)] == ["action", "hello"]
    successes = sum(after[slot]["successes"] for slot in "ab") + 8
    server.wait_until(lambda: sum(told["successes"] for told in rollout(server)["outcomes"].values()) == successes)

    assert admin(server, "split", split=0).status == 200
    fresh = [server.act(episode_id=f"after-split-{i}") for i in range(8)]
    assert {answer.headers["x-reflex-policy-slot"] for answer in fresh} == {"b"}
    assert server.act(episode_id=names[0]).headers["x-reflex-policy-slot"] == slots[names[0]]  # a running one stays
    moved = admin(server, "rollback").json["episodes_moved"]
    assert moved >= Counter(slots.values())["b"]
    back = [server.act(episode_id=name) for name in names]
    assert {answer.headers["x-reflex-policy-slot"] for answer in back} == {"a"}
    assert [answer.json["policy_changed"] for answer in back] == [slots[name] == "b" for name in names]
    assert admin(server, "split", split=50).status == 200


def test_x7_a_version_that_crashes_is_drained_in_every_replica_and_comes_back(server: Server) -> None:
    assert admin(server, "faults", faults=["b:raise:1"]).json == {"faults": ["b:raise:1"]}
    end = time.monotonic() + PATIENCE
    asked = 0
    while server.get("/health").json["verdict"] != "drain-b":
        server.act(episode_id=f"crash-{asked}")
        asked += 1
        assert time.monotonic() < end
    answers = [server.act(episode_id=f"drained-{i}") for i in range(8)]  # some of them may be probes
    assert sum(answer.status == 200 for answer in answers) >= 6
    crashed = server.metrics()("reflex_slot_drained", policy_slot="b")
    assert crashed == 1.0
    assert admin(server, "faults", faults=[]).json == {"faults": []}
    while server.get("/health").json["verdict"] != "ok":
        server.act(episode_id=f"probe-{asked}")
        asked += 1
        assert time.monotonic() < end
    assert [change["kind"] for change in rollout(server)["changes"]][-1] in ("return", "mended")


def test_x7_the_dashboard_shows_all_replicas(server: Server) -> None:
    assert server.get("/dashboard").status == 200
    robots: set[str] = set()
    end = time.monotonic() + PATIENCE
    with server.connect() as sock, sock.makefile("rb") as lines:
        sock.sendall(b"GET /dashboard/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while len(robots) < 6:
            for robot in range(6):
                server.act(robot_id=f"shown-{robot}")
            line = lines.readline()
            if line.startswith(b"{"):
                told = json.loads(line)
                robots |= {client["name"] for client in told["clients"] if client["name"].startswith("shown-")}
                assert [replica["name"] for replica in told["server"]["replicas"]] == list(NAMES)
                assert set(told["server"]["policies"]["default"]["versions"]) <= {"a", "b"}
                processes = told["server"]["processes"]
                assert [process["name"] for process in processes] == ["server", *NAMES]
                assert all(process["memory"] > 0 for process in processes)
            assert time.monotonic() < end, robots


def test_x7_devices_is_a_replica_for_each(tiny: Path) -> None:
    """And a drain answers what was asked."""
    with Server(tiny, "--devices", "cpu,cpu", "--inject-latency-ms", "2000") as server:
        assert [told["device"] for told in replicas(server)] == ["cpu", "cpu"]
        pids = [told["pid"] for told in replicas(server)]
        psutil.Process(pids[0]).suspend()
        health = server.get("/health")  # one that hangs keeps no probe waiting
        psutil.Process(pids[0]).resume()
        assert health.status == 200
        assert health.seconds < WITHIN
        with server.burst([{"state": STATE, "robot_id": f"r{i}"} for i in range(8)]) as burst:
            burst.send()
            server.reach(lambda m: m("reflex_in_flight_requests") == 8)
            server.process.terminate()
            assert [answer.status for answer in burst.answers()] == [200] * 8
        assert server.wait() == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_x7_a_killed_front_leaves_no_replica_and_is_started_again(tiny: Path) -> None:
    with Server(tiny, "--replicas", "2", supervised=True) as server:
        (front,) = psutil.Process(server.process.pid).children()
        below = front.children()
        assert len(below) == 2
        below[0].suspend()  # one that could not leave by itself
        front.kill()
        gone, alive = psutil.wait_procs(below, PATIENCE)
        assert (len(gone), alive) == (2, [])
        server.wait_log_while_fewer("ready on", 2)
        assert server.act(robot_id="again").status == 200


def test_x7_what_does_not_go_with_replicas_is_refused_by_name(tiny: Path) -> None:
    assert "--devices=gpu" in refusal(tiny, "--devices", "gpu")
    assert "--replicas=3" in refusal(tiny, "--devices", "cpu,cpu", "--replicas", "3")
