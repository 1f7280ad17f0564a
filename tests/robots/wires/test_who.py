"""Who is a robot: an answer goes to the one that asked, on shared, cut, silent and moved connections."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import zmq
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from zmq.utils.monitor import recv_monitor_message

from serving.exports import CHUNK, write_tiny
from serving.harness import PATIENCE, Server
from serving.relay import Relay, relay
from serving.requests import recorded

from .groot_clients import GrootRobot, as_npy, port_of
from .lerobot_robot import Robot, features, load
from .test_lerobot import ASKS, PATIENT, refused, right, serving, tensors

__all__ = ["tensors"]  # used by all tests here
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
CLOSED = grpc.StatusCode.FAILED_PRECONDITION
LISTENS = ("--lerobot", "127.0.0.1:0")
TURNED = features(motors=("elbow.pos", "shoulder.pos"))


def address_of(server: Server) -> str:
    return server.wait_log("clients of LeRobot: ").rpartition(" ")[2]


@contextmanager
def cut_off(server: Server, **setup: Any) -> Iterator[tuple[Relay, Robot]]:
    """A robot behind a relay."""
    with relay(address_of(server)) as between:
        robot = Robot(between.address)
        robot.start(**setup)
        try:
            yield between, robot
        finally:
            robot.close()


def after_cut(ask: Callable[[], Any]) -> Any:
    """What a robot is answered after a cut. What LeRobot's client does: it logs an error, and calls again."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        assert time.monotonic() < end, "it does not connect again"


def again(robot: Robot, state: list[float], timestep: int, **more: Any) -> Any:
    """Actions after a cut."""

    def ask() -> list[Any]:
        robot.see(state, timestep, **more)
        return robot.act()

    return after_cut(ask)


# -- LeRobot: a shared connection --------------------------------------------------------------------------------------


def test_w42_a_second_robot_of_one_connection_is_refused_by_name(tiny: Path) -> None:
    with serving(tiny) as (_, robot):
        one = robot()
        for setup in ({}, {"features": TURNED}, {"steps": 2}):
            with refused(CLOSED) as error:
                robot(**setup)
            assert "another robot was set up on this connection" in error["message"]
            assert "grpc.use_local_subchannel_pool" in error["message"]
            assert "x-reflex-robot" in error["message"]
        one.see([0.1, 0.0], 7)
        assert [step.timestep for step in one.act()] == [7, 8, 9]
        assert robot(own=True).act() == []


def test_w42_robots_with_names_share_a_connection(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--record", str(tmp_path), before=PATIENT) as (server, robot):
        robots = {name: robot(name=name) for name in ("10", "200")}
        for step in range(3):
            waiting = {name: one.begin("GetActions") for name, one in robots.items()}
            for name, one in reversed(robots.items()):
                one.see([float(name) / 1000, 0.1], int(name) + step)
            for name, answer in waiting.items():
                assert load(answer.result(PATIENCE))[0].timestep == int(name) + step
        server.stop()
    assert {(one.robot_id, round(one.state[0], 3)) for one in recorded(tmp_path)} == {("10", 0.01), ("200", 0.2)}


def test_w42_two_that_ask_on_one_connection_get_nothing(tiny: Path) -> None:
    """The second did not heed that it was refused."""
    with serving(tiny, before=PATIENT + "wire.PAUSE = 0.0\n") as (server, robot):
        one, other = robot(), robot(started=False)
        waiting = [client.begin("GetActions") for client in (one, other)]
        server.wait_log_while_fewer(ASKS, 2)
        one.see([0.1, 0.0])  # which ends the first of them
        found = sorted([answer.code() is CLOSED for answer in waiting])
        assert found == [False, True]
        for client in (one, other):
            with refused(CLOSED) as error:
                client.see([0.1, 0.0])
            assert "two robots use this connection" in error["message"]
            with refused(CLOSED):
                client.act()


def test_w42_a_robot_that_gives_up_a_call_is_no_second_robot(tiny: Path) -> None:
    with serving(tiny) as (_, robot):
        one = robot()
        for step in range(20):
            one.begin("GetActions").cancel()
            one.see([0.1, 0.0], step)
            one.begin("GetActions").cancel()
            one.see([0.1, 0.0], step)
            assert one.act()[0].timestep == step


def test_w42_a_silent_robot_leaves_its_connection_and_one_that_has_not_begun_does_not(tiny: Path) -> None:
    with serving(tiny, before="import reflex_runtime.robots.wires.lerobot as w; w.LEFT = 0.0\n") as (_, robot):
        one = robot()
        with refused(CLOSED):
            robot()
        one.see([0.1, 0.0], 7)
        assert one.act()[0].timestep == 7
        other = robot(features=TURNED)
        other.see([0.1, 0.0], 1)
        assert other.act()[0].timestep == 1


# -- LeRobot: cut, silent, moved, restarted ----------------------------------------------------------------------------


def test_w42_a_robot_whose_connection_is_cut_goes_on(tiny: Path, tmp_path: Path) -> None:
    """Its client sends no instructions again."""
    with Server(tiny, *LISTENS, "--record", str(tmp_path), before=PATIENT) as server:
        with cut_off(server, features=TURNED, steps=2) as (between, robot):
            robot.see([0.1, -0.2], 5)
            assert len(robot.act()) == 2
            waiting = robot.begin("GetActions")
            server.wait_log_while_fewer(ASKS, 2)
            between.cut()
            assert waiting.code() is grpc.StatusCode.UNAVAILABLE
            chunk = again(robot, [0.3, -0.4], 9)
            assert [step.timestep for step in chunk] == [9, 10]
        server.stop()
    *_, last = recorded(tmp_path)
    assert np.allclose(last.state, [-0.4, 0.3])  # the motors in the order of its instructions
    assert np.allclose([step.action for step in chunk], right(last)[:2], atol=1e-5)


def test_w42_a_cut_robot_of_one_of_two_kinds_is_refused(tiny: Path) -> None:
    with serving(tiny) as (server, robot), cut_off(server) as (between, one):
        robot(own=True, features=TURNED)
        between.cut()
        with refused(CLOSED) as error:
            again(one, [0.1, 0.0], 1)
        assert "robots of two kinds have these names" in error["message"]


def test_w42_robots_that_name_their_cameras_in_another_order_are_of_one_kind(tmp_path: Path) -> None:
    export, seen = write_tiny(tmp_path / "export", cameras=("front", "wrist")), np.zeros((6, 8, 3), np.uint8)
    with Server(export, *LISTENS) as server, cut_off(server, features=features(("front", "wrist"))) as (between, one):
        other = Robot(address_of(server), own_connection=True)
        other.start(features=features(("wrist", "front")))
        other.close()
        between.cut()
        assert again(one, [0.1, 0.0], 1, front=seen, wrist=seen)[0].timestep == 1


@pytest.mark.parametrize("named", [True, False])
def test_w42_after_a_restart_of_the_server_the_export_says_what_observations_hold(named: bool, tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", cameras=("front",), model_type="act")
    if named:
        (export / "embodiment.json").write_text(json.dumps({"name": "so101", "state_names": ["shoulder", "elbow"]}))
    picture = np.zeros((6, 8, 3), np.uint8)
    with Server(export, *LISTENS) as server, cut_off(server, features=features(("front",))) as (between, robot):
        server.stop()
        with Server(export, *LISTENS) as second:
            between.target = address_of(second)
            between.cut()
            after_cut(lambda: robot.call("Ready"))
            if not named:
                with refused(CLOSED) as error:
                    robot.see([0.1, -0.2], 30, front=picture)
                told = "the export names no motors (state_names in its embodiment.json). Start the client again"
                assert told in error["message"]
                return
            robot.see([0.1, -0.2], 30, front=picture)
            assert [step.timestep for step in robot.act()] == [*range(30, 30 + CHUNK)]


def test_w42_the_log_says_what_to_write_so_that_robots_go_on_after_a_restart(tmp_path: Path) -> None:
    """The order of an observation's motors is not that of the instructions: HopeJR's arm of LeRobot 0.6.1 differs."""
    export = write_tiny(tmp_path / "export", noise=False, model_type="act")
    with Server(export, *LISTENS) as server, cut_off(server, features=TURNED) as (between, robot):
        robot.see([0.1, -0.2], 0)  # the shoulder first
        before = [step.action.tolist() for step in robot.act()]
        line = server.wait_log('In its embodiment.json: "state_names": ')
        server.stop()
        robot_file = {"name": "so101", "state_names": json.loads(line.partition('"state_names": ')[2])}
        (export / "embodiment.json").write_text(json.dumps(robot_file))
        with Server(export, *LISTENS) as second:
            between.target = address_of(second)
            between.cut()
            assert [step.action.tolist() for step in again(robot, [0.1, -0.2], 30)] == before


def test_w42_a_robot_may_pause(tiny: Path) -> None:
    """Minutes long: what a robot is set up for does not pass, only an observation that is too old."""
    patch = "import reflex_runtime.robots.wires.lerobot as w; w.STALE = w.LEFT = 0.0\n"
    with serving(tiny, before=patch) as (_, robot):
        one, chunk = robot(), []
        one.see([0.1, 0.0], 4)
        assert one.act() == []
        while not chunk:
            waiting = one.begin("GetActions")
            one.see([0.1, 0.0], 5)
            chunk = load(waiting.result(PATIENCE))
        assert chunk[0].timestep == 5


# -- GR00T -------------------------------------------------------------------------------------------------------------

GROOT_HERE = ("--gr00t", "tcp://127.0.0.1:0")


def test_w36_clients_behind_a_broker_are_robots_of_their_own(tiny: Path, tmp_path: Path) -> None:
    """A broker sends the messages of all its clients on one connection, each with its client's routing id."""
    seen = {"endpoint": "get_action", "data": {"observation": {"state": {"all": np.zeros((1, 1, 2))}}}}
    with Server(tiny, *GROOT_HERE, "--record", str(tmp_path)) as server:
        with zmq.Context() as context, context.socket(zmq.DEALER) as broker:
            broker.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1e3))
            broker.connect(f"tcp://127.0.0.1:{port_of(server)}")
            for client in (b"one", b"two", b"one"):
                broker.send_multipart([client, b"", msgpack.packb(seen, default=as_npy)])
                assert broker.recv_multipart()[:2] == [client, b""]
        server.stop()
    first, second, third = recorded(tmp_path)
    assert first.robot_id == third.robot_id != second.robot_id
    assert first.episode_id == third.episode_id != second.episode_id


def test_w36_a_client_whose_connection_is_cut_is_another_robot_and_named_it_is_the_same(
    tiny: Path, tmp_path: Path
) -> None:
    seen = {"state": {"all": np.zeros((1, 1, 2))}}
    with Server(tiny, *GROOT_HERE, "--record", str(tmp_path)) as server:
        with relay(f"127.0.0.1:{port_of(server)}") as between:
            for named in ({}, {"robot_id": "arm", "episode_id": "e"}):
                with GrootRobot(int(between.address.rpartition(":")[2])) as robot:
                    robot.act(seen, **named)
                    with robot.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                        between.cut()
                        recv_monitor_message(monitor)
                        robot.socket.disable_monitor()
                    robot.act(seen, **named)
        server.stop()
    *plain, first, second = [(one.robot_id, one.episode_id) for one in recorded(tmp_path)]
    assert len(set(plain)) == 2
    assert first == second == ("arm", "e")


# -- websockets and HTTP -----------------------------------------------------------------------------------------------


def test_w10_a_socket_that_is_cut_is_another_robot_and_named_it_is_the_same(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server, relay(f"127.0.0.1:{server.port}") as between:
        for query in ("/", "/?robot_id=arm&episode_id=e"):
            for _ in range(2):
                with closing(WebsocketClientPolicy(f"ws://{between.address}{query}")._ws) as socket:
                    socket.send(msgpack_numpy.packb({"state": np.zeros(2)}))
                    assert isinstance(socket.recv(), bytes)
                    between.cut()
        server.stop()
    *plain, first, second = [(one.robot_id, one.episode_id) for one in recorded(tmp_path)]
    assert len(set(plain)) == 2
    assert first == second == ("arm", "e")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/act", {"state": [0, 0]}),
        ("/act", {"state": {"__numpy__": "AAAAAAAAAAAAAAAAAAAAAA==", "dtype": "<f8", "shape": [2]}}),
        ("/v2/models/tiny/infer", {"inputs": [{"name": "state", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}]}),
    ],
)
def test_h2_requests_are_who_they_say_on_any_connection(
    path: str, body: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    """A proxy mixes those of many robots on one; a robot comes on many."""
    with Server(tiny, "--record", str(tmp_path)) as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as shared:
            for connection in (shared, shared, http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)):
                for name in ("one", "two", ""):
                    said = {"robot_id": name, "episode_id": f"of-{name}"} if name else {}
                    sent = body | ({"parameters": said} if "/v2" in path else said)
                    connection.request("POST", path, json.dumps(sent))
                    assert connection.getresponse().read()
            connection.close()
        server.stop()
    found = [(one.robot_id, one.episode_id) for one in recorded(tmp_path)]
    assert found == [("one", "of-one"), ("two", "of-two"), (None, None)] * 3
