"""GR00T's protocol over real ZeroMQ sockets, as clients of three releases speak it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from reflex_runtime.cli import main
from reflex_runtime.observe.journal import read_journal
from robots.wires.groot_clients import BLOCK, PICTURE, GrootRobot, as_nd, as_npy, nested, port_of, want
from serving.exports import ACTIONS, CHUNK, write_tiny
from serving.harness import STATE, Server, refusal
from serving.requests import WAITING, busy, loads_after, marked, recorded

HERE = ("--gr00t", "tcp://127.0.0.1:0")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("seeing") / "export", cameras=("image",), wires={"gr00t": BLOCK})


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[Server]:
    with Server(seeing, *HERE) as server:
        yield server


@pytest.fixture
def robot(server: Server) -> Iterator[GrootRobot]:
    with GrootRobot(port_of(server)) as robot:
        yield robot


def flat(i: int) -> dict[str, Any]:
    """What N1.5 sends of one robot."""
    return {
        "video.ego_view": PICTURE[None],
        "state.arm": np.array([[0.1 * i]]),
        "state.gripper": np.array([[-0.1 * i]]),
        "annotation.human.action.task_description": ["open the door"],
    }


def tiny_state(*rows: int) -> dict[str, Any]:
    """For a policy of state alone, without a block."""
    return {"state": {"all": np.array([[[0.1 * i, -0.1 * i]] for i in rows])}}


def right(answer: Any, i: int = 0, seed: int = 5) -> bool:
    """For an answer without groups."""
    assert isinstance(answer, list), answer
    return bool(np.allclose(answer[0]["actions"], want(i, seed)[None], atol=1e-5))


@pytest.mark.parametrize("write", [as_npy, as_nd])
def test_w30_clients_of_n16_and_n17_get_the_answer_of_act(seeing: Path, server: Server, write: Any) -> None:
    picture = {"dtype": "|u1", "shape": [6, 8, 3], "data": PICTURE.tobytes()}
    body = msgpack.packb({"image": picture, "state": [0.3, -0.3], "seed": 5})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/json"}
    act = np.float32(server.ask("POST", "/act", body, headers).json["actions"])
    with GrootRobot(port_of(server), write) as robot:
        actions, info = robot.act(nested(3), seed=5)
    assert set(actions) == {"arm", "gripper"}
    assert all(group.shape == (1, CHUNK, 1) and group.dtype == np.float32 for group in actions.values())
    assert (np.concatenate([actions["arm"], actions["gripper"]], 2)[0] == act).all()
    assert info["reflex"][0]["timing"]["batch_ms"] > 0
    assert server.metrics()("reflex_requests_total", outcome="ok", wire="gr00t") > 0


def test_w30_clients_of_n15_get_flat_names_without_a_batch_axis(robot: GrootRobot) -> None:
    actions = robot.act_flat(flat(3) | {"options": {"seed": 5}})
    assert set(actions) == {"action.arm", "action.gripper"}
    assert actions["action.arm"].shape == (CHUNK, 1)
    both = np.concatenate([actions["action.arm"], actions["action.gripper"]], 1)
    np.testing.assert_allclose(both, want(3, 5), atol=1e-5)


def test_w30_the_sim_wrapper_has_flat_names_and_a_batch_axis(robot: GrootRobot) -> None:
    sent = nested(1, 2)
    seen = {"video.ego_view": sent["video"]["ego_view"], **{f"state.{k}": v for k, v in sent["state"].items()}}
    actions, _ = robot.act(seen | {"annotation.human.task_description": ["a", "b"]}, seed=5)
    assert set(actions) == {"action.arm", "action.gripper"}
    np.testing.assert_allclose(actions["action.arm"][..., 0], [want(i, 5)[:, 0] for i in (1, 2)], atol=1e-5)


def test_w31_ping_and_modality_config(server: Server, robot: GrootRobot, seeing: Path) -> None:
    pong = robot.call("ping")
    assert (pong["status"], pong["reflex"]) == ("ok", json.loads(server.get("/config").body)["wires"]["gr00t"])
    told = robot.call("get_modality_config")
    assert told == {
        name: {"__ModalityConfig_class__": True, "as_json": {"delta_indices": steps, "modality_keys": keys}}
        for name, steps, keys in [
            ("video", [0], ["ego_view"]),
            ("state", [0], ["arm", "gripper"]),
            ("action", list(range(CHUNK)), ["arm", "gripper"]),
        ]
    }
    with Server(seeing, *HERE, "--gr00t-config", "n1.5") as old, GrootRobot(port_of(old)) as client:
        told = client.call("get_modality_config")["action"]["as_json"]
        wanted = {"delta_indices": list(range(CHUNK)), "modality_keys": ["action.arm", "action.gripper"]}
        assert json.loads(told) == wanted


def test_w31_kill_is_refused_and_the_server_lives(robot: GrootRobot) -> None:
    assert robot.call("kill")["error"] == "kill is not served"
    assert robot.call("ping")["status"] == "ok"


def test_w32_the_rows_of_an_observation_are_requests_and_are_answered_stacked(tiny: Path) -> None:
    with Server(tiny, *HERE, held=True) as server, busy(server), GrootRobot(port_of(server)) as robot:
        robot.send("get_action", {"observation": tiny_state(*range(8)), "options": {"seed": 5}})
        server.reach(lambda m: m(WAITING) == 8)
        server.release()
        actions, info = robot.answer()
        np.testing.assert_allclose(actions["actions"], [want(i, 5) for i in range(8)], atol=1e-5)
        assert {row["batch"]["size"] for row in info["reflex"]} == {8}
        assert len({row["request_id"] for row in info["reflex"]}) == 8


def test_w32_one_bad_row_is_the_error_of_all(tiny: Path) -> None:
    bad = tiny_state(0, 1)
    bad["state"]["all"][1] = np.nan
    with Server(tiny, *HERE) as server, GrootRobot(port_of(server)) as robot:
        answer = robot.act(bad)
        assert set(answer) == {"error", "code", "field", "request_id", "retry_safe", "row"}
        assert (answer["code"], answer["field"], answer["row"]) == ("invalid_request", "state", 1)
        assert "NaN" in answer["error"]
        assert right(robot.act(tiny_state(1), seed=5), 1)


ARM, GRIPPER = nested(0)["state"]["arm"], nested(0)["state"]["gripper"]
O_KIND = {"nd": True, "type": "|O", "kind": b"O", "shape": [1], "data": b"\x80\x04N."}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"video": {"front": nested(0)["video"]["ego_view"]}}, "video.ego_view: missing; came: video.front, state."),
        ({"state": {"arm": ARM}}, "state.gripper: missing"),
        ({"state": {"arm": ARM, "gripper": np.zeros((1, 1, 2))}}, "state.gripper: must be 1 numbers, came 2"),
        ({"state": {"arm": ARM, "gripper": np.zeros((1, 1, 2, 1))}}, "state.gripper: has shape"),
        ({"state": {"arm": ARM, "gripper": np.zeros((2, 1, 1))}}, "has another leading axis"),
        ({"state": {"arm": ARM, "gripper": np.zeros((1, 2))}}, "state.gripper: has another leading axis"),
        ({"state": {"arm": ARM, "gripper": np.zeros((1, 0, 1))}}, "state.gripper: has no step"),
        ({"state": {"arm": ARM, "gripper": [["x", 1]]}}, "state.gripper: must be an array of numbers"),
        ({"state": {"arm": ARM, "gripper": GRIPPER * np.nan}}, "NaN"),
        ({"state": {"arm": ARM, "gripper": O_KIND}}, "kind O or V"),
        ({"video": {"ego_view": np.zeros((1, 1, 6, 8, 4), np.uint8)}}, "[height, width, 3], is uint8 [6, 8, 4]"),
        ({"language": {"task": [["a"], ["b"]]}}, "annotation.human.task_description: has another leading axis"),
    ],
)
def test_w33_what_is_wrong_is_an_error_that_says_so(robot: GrootRobot, change: dict[str, Any], why: str) -> None:
    answer = robot.act(nested(0) | change)
    assert why in answer["error"]
    assert answer["code"] == "invalid_request"
    assert answer["request_id"]
    assert len(robot.act(nested(0))) == 2


@pytest.mark.parametrize(
    "frames",
    [(b"",), (b"nonsense",), (b"\xc1",), (b"\x80",), (b"\x01",), (b"", b"", b""), (b"\x81\xa8endpoint\xa4ping", b"")]
    + [(msgpack.packb(sent),) for sent in ([], {"endpoint": 5}, {"endpoint": "get_action"}, {"data": 3}, {1: 2})],
)  # fmt: skip
def test_w33_every_message_is_answered(robot: GrootRobot, frames: tuple[bytes, ...]) -> None:
    assert robot.raw(*frames)["error"]
    assert robot.call("ping")["status"] == "ok"


def test_w33_a_dealer_without_an_empty_frame_is_answered_as_it_asked(server: Server) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port_of(server)}")
        for frames in ([msgpack.packb({"endpoint": "ping"})], [b"tag", b"", msgpack.packb({"endpoint": "ping"})]):
            dealer.send_multipart(frames)
            *before, answer = dealer.recv_multipart()
            assert before == frames[:-1]
            assert msgpack.unpackb(answer)["status"] == "ok"


def test_w34_a_message_that_is_too_large_is_answered_or_ends_its_connection(tiny: Path) -> None:
    with Server(tiny, *HERE, "--max-body-bytes", "4096") as server:
        port = port_of(server)
        with GrootRobot(port) as robot:
            assert robot.raw(bytes(5000))["code"] == "too_large"
        with GrootRobot(port) as other, GrootRobot(port) as huge:
            huge.socket.setsockopt(zmq.RCVTIMEO, 300)
            huge.socket.send(bytes(9000))
            with pytest.raises(zmq.Again):
                huge.answer()
            assert other.call("ping")["status"] == "ok"


def test_w34_the_bytes_of_messages_count_among_bodies(tiny: Path) -> None:
    with Server(tiny, *HERE, "--max-bodies-mb", "1", held=True) as server, busy(server):
        port, much = port_of(server), tiny_state(1) | {"more": {"x": bytes(600_000)}}
        with GrootRobot(port) as first, GrootRobot(port) as second:
            first.send("get_action", {"observation": much, "options": {"seed": 5}})
            server.reach(lambda m: m(WAITING) == 1)
            assert second.act(much)["code"] == "overloaded"
            server.release()
            assert right(first.answer(), 1)
            assert right(second.act(much, seed=5), 1)


def test_w35_the_key_is_needed_where_there_is_one(tiny: Path) -> None:
    with Server(tiny, *HERE, "--api-key", "secret") as server:
        port = port_of(server)
        for token in ("", "wrong", "sécret"):
            with GrootRobot(port, token=token) as robot:
                for endpoint in ("ping", "get_action", "reset", "kill"):
                    assert robot.call(endpoint, {})["error"] == "Unauthorized: Invalid API token"
        with GrootRobot(port, token="secret") as robot:
            assert right(robot.act(tiny_state(2), seed=5), 2)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://0.0.0.0:5555", "with a loopback address, because ZeroMQ is not encrypted"),
        ("tcp://*:5555", "with a loopback address, because ZeroMQ is not encrypted"),
        ("5555", "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:99999", "a port up to 65535"),
    ],
)
def test_w35_an_address_that_is_none_or_open_to_others_is_refused_at_the_start(
    tiny: Path, address: str, why: str
) -> None:
    line = refusal(tiny, "--gr00t", address, "--api-key", "secret")
    assert address in line
    assert why in line


def test_w35_an_address_in_use_is_one_line(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with Server(tiny, "--gr00t", address, until="cannot be bound") as server:
            assert server.wait() == 2
            assert server.log[-2] == f"reflex serve: --gr00t={address}: cannot be bound: Address already in use"


def test_w35_without_its_package_one_line_names_the_extra(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setattr("reflex_runtime.web.supervisor.bind", None)
    assert main(["serve", str(tiny), "--no-supervise", *HERE]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "reflex serve: --gr00t needs pyzmq: in a clone, pip install '.[gr00t]'"


def test_w36_a_connection_is_a_robot_and_reset_begins_its_episode_alone(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, *HERE, "--record", str(tmp_path)) as server:
        port = port_of(server)
        with GrootRobot(port) as first, GrootRobot(port) as second:
            for client in (first, second, first):
                client.act(tiny_state(0))
            assert first.call("reset", {"options": None}) == {}
            for client in (first, second):
                client.act(tiny_state(0))
        server.stop()
    found = recorded(tmp_path)
    one, other = found[0].robot_id, found[1].robot_id
    assert one is not None
    assert one.startswith("gr00t-")
    assert [asked.robot_id for asked in found] == [one, other, one, one, other]
    assert [asked.episode_id for asked in found] == [one, other, one, f"{one}#1", other]


def test_w36_options_name_robot_episode_and_environment(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, *HERE, "--record", str(tmp_path)) as server, GrootRobot(port_of(server)) as robot:
        robot.call("reset", {"options": {"robot_id": "arm", "episode_id": 7}})
        robot.act(tiny_state(0))
        robot.act(tiny_state(0, 1), env_id=[4, 5])
        robot.call("reset", {"options": {"robot_id": "arm", "episode_id": 7, "env_id": 5}})
        robot.act(tiny_state(0, 1), env_id=[4, 5], priority="urgent", request_id="r")
        assert robot.act(tiny_state(0, 1), env_id=[4])["field"] == "env_id"
        assert robot.act(tiny_state(0), env_id=[4, 5])["field"] == "env_id"
        assert robot.act(tiny_state(0), deadline_ms=-1)["field"] == "deadline_ms"
        server.stop()
    found = recorded(tmp_path)
    assert [(asked.robot_id, asked.episode_id) for asked in found] == [
        ("arm", "7"), ("arm/4", "7/4"), ("arm/5", "7/5"), ("arm/4", "7/4"), ("arm/5", "7/5#1"),
    ]  # fmt: skip


def test_w36_a_request_keeps_its_id_and_several_rows_get_their_numbers(tiny: Path) -> None:
    def ids(answer: Any) -> list[str]:
        return [row["request_id"] for row in answer[1]["reflex"]]

    with Server(tiny, *HERE) as server, GrootRobot(port_of(server)) as robot:
        assert ids(robot.act(tiny_state(0), request_id="r", env_id=4)) == ["r"]
        assert ids(robot.act(tiny_state(0, 1), request_id="r", env_id=[4, 4])) == ["r.0", "r.1"]
        assert ids(robot.act(tiny_state(0, 1), request_id="r")) == ["r.0", "r.1"]


def test_w36_a_restarted_server_knows_its_clients_as_others(tiny: Path, tmp_path: Path) -> None:
    names = []
    for run in ("one", "two"):
        with Server(tiny, *HERE, "--record", str(tmp_path / run)) as server, GrootRobot(port_of(server)) as robot:
            robot.act(tiny_state(0))
            server.stop()
        names.append(recorded(tmp_path / run)[0].robot_id)
    assert names[0] != names[1]


def test_w37_a_message_without_a_deadline_has_one(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, *HERE, "--record", str(tmp_path)) as server:
        port = port_of(server)
        for write, more in ((as_npy, {}), (as_nd, {}), (as_npy, {"deadline_ms": 9000})):
            with GrootRobot(port, write) as robot:
                robot.act(tiny_state(0), **more)
        server.stop()
    (file,) = tmp_path.iterdir()
    assert [found.deadline for found in read_journal(file).requests] == [15_000, 15_000, 9_000]


def test_w37_what_is_late_and_what_finds_the_queue_full_is_answered(tiny: Path) -> None:
    with Server(tiny, *HERE, "--max-queue", "1", "--deadline-ms", "200", held=True) as server, busy(server):
        port = port_of(server)
        with GrootRobot(port) as late, GrootRobot(port) as full:
            with server.burst([{"state": STATE, "deadline_ms": 60_000}]) as first:
                first.send()
                server.reach(lambda m: m(WAITING) == 1)
                assert full.act(tiny_state(0))["code"] == "queue_full"
                first.hang_up(range(1))
                server.reach(lambda m: m(WAITING) == 0)
            assert late.act(tiny_state(0))["code"] == "deadline_exceeded"
            server.release()
            assert right(full.act(tiny_state(1), seed=5, deadline_ms=60_000), 1)


def test_w37_rows_beside_one_that_is_refused_are_not_computed(tiny: Path) -> None:
    with Server(tiny, *HERE, "--max-queue", "2", held=True) as server, busy(server):
        with GrootRobot(port_of(server)) as robot:
            assert robot.act(tiny_state(0, 1, 2))["code"] == "queue_full"
            server.reach(lambda m: m("reflex_requests_total", outcome="cancelled", wire="gr00t") == 2)
            server.release()
            assert right(robot.act(tiny_state(1), seed=5), 1)


def test_w37_a_model_that_fails_is_an_error_for_its_request_alone(tiny: Path) -> None:
    ids = [f"request-{i}" for i in range(100)]
    bad = min(marked("raise", 0.05, ids))
    fine = min(set(ids) - marked("raise", 0.05, ids))
    with Server(tiny, *HERE, "--inject-fault", "prod:raise:0.05") as server, GrootRobot(port_of(server)) as robot:
        answer = robot.act(tiny_state(0), request_id=bad)
        assert (answer["code"], answer["request_id"], answer["retry_safe"]) == ("processor_failed", bad, False)
        assert right(robot.act(tiny_state(1), request_id=fine, seed=5), 1)


def test_w38_sixteen_robots_share_a_batch(tiny: Path) -> None:
    with Server(tiny, *HERE, held=True, takes="0.001 * len(batch)") as server, busy(server):
        with contextlib.ExitStack() as stack:
            port = port_of(server)
            robots = [stack.enter_context(GrootRobot(port, as_npy if i % 2 else as_nd)) for i in range(16)]
            for i, robot in enumerate(robots):
                robot.send("get_action", {"observation": tiny_state(i), "options": {"seed": i}})
            server.reach(lambda m: m(WAITING) == 16)
            server.release()
            answers = [robot.answer() for robot in robots]
        assert all(right(answer, i, seed=i) for i, answer in enumerate(answers))
        assert {(info["reflex"][0]["batch"]["id"], info["reflex"][0]["batch"]["size"]) for _, info in answers} == {
            (answers[0][1]["reflex"][0]["batch"]["id"], 16)
        }


def test_w39_a_server_that_ends_answers_what_it_took(tiny: Path) -> None:
    with Server(tiny, *HERE, held=True) as server:
        port = port_of(server)
        with GrootRobot(port) as first, GrootRobot(port) as late:
            first.send("get_action", {"observation": tiny_state(1), "options": {"seed": 5, "request_id": "plug"}})
            server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("draining")
            for answer in (late.act(tiny_state(0)), late.call("ping"), late.call("reset", {})):
                assert answer["code"] == "shutting_down"
            server.release()
            assert right(first.answer(), 1)
            assert server.wait() == 0


def test_w39_what_comes_before_the_policy_is_ready_waits_for_it(tiny: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Server(tiny, *HERE, before=loads_after(gate), until="http://") as server:
        with GrootRobot(port_of(server)) as robot, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(robot.act, tiny_state(1), seed=5)
            assert server.get("/health").json["state"] in ("initializing", "loading")
            assert not answer.done()
            gate.write_text("go")
            assert right(answer.result(), 1)


def test_w30_a_policy_that_cannot_be_started_is_an_error(tiny: Path) -> None:
    broken = "import reflex_runtime.robots.serving.runtime as r\nr.PolicyRuntime._load = lambda self: 1 / 0"
    with Server(tiny, *HERE, before=broken, until="http://") as server, GrootRobot(port_of(server)) as robot:
        for answer in (robot.call("ping"), robot.act(tiny_state(0)), robot.call("get_modality_config")):
            assert answer["code"] == "not_ready"


def test_w30_without_a_block_names_decide(tmp_path: Path) -> None:
    root = write_tiny(tmp_path / "export", cameras=("front",))
    with Server(root, *HERE) as server, GrootRobot(port_of(server)) as robot:
        sent = {"video.front": PICTURE[None], "state.joints": np.array([[0.1, -0.1]]), "options": {"seed": 5}}
        actions = robot.act_flat(sent)
        np.testing.assert_allclose(actions["action.actions"], want(1, 5), atol=1e-5)
        assert actions["action.actions"].shape == (CHUNK, ACTIONS)


def test_w30_the_only_camera_is_the_only_video_under_any_name(tmp_path: Path) -> None:
    root = write_tiny(tmp_path / "export", cameras=("front",))
    with Server(root, *HERE) as server, GrootRobot(port_of(server)) as robot:
        video = nested(0)["video"]["ego_view"]
        sent = nested(1) | {"state": {"arm": np.array([[[0.1, -0.1]]])}}
        actions, _ = robot.act(sent, seed=5)
        np.testing.assert_allclose(actions["actions"][0], want(1, 5), atol=1e-5)
        two = robot.act(sent | {"video": {"left": video, "right": video}})
        assert two["error"].startswith("video.front: missing; came: video.left, video.right, ")
        assert "expected: video.front, " in two["error"]


@pytest.mark.parametrize("named", ["robot_id", "episode_id", "env_id"])
def test_w36_names_are_not_kept_without_a_bound(robot: GrootRobot, named: str) -> None:
    assert f"{named}: longer than 256 bytes" in robot.call("reset", {"options": {named: "n" * 257}})["error"]
