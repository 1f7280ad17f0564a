"""LeRobot's asynchronous clients: their calls over real gRPC, their pickles byte for byte."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from reflex_runtime.observe.journal import JournalRequest
from reflex_runtime.robots.policy.base import seed_of
from reflex_runtime.robots.wires.lerobot import LerobotSetup, read
from reflex_runtime.web.errors import InvalidRequest
from serving.exports import CHUNK, WEIGHTS, expected, write_tiny
from serving.harness import PATIENCE, Server
from serving.requests import busy, loads_after, queued, recorded, traced

from . import lerobot_robot
from .lerobot_robot import Robot, features, lerobot, load, message

PROGRAM = Path(lerobot_robot.__file__)
ASKS = "a robot asks for actions"
# For `serving(before=…)`: GetActions waits as long as a test does, and the log has a line for each.
PATIENT = f"""
import sys
import reflex_runtime.robots.wires.lerobot as wire
wire.WAIT = {PATIENCE}
_turn = wire.LerobotRobot.turn
def _told(self, peer):
    print({ASKS!r}, file=sys.stderr, flush=True)
    return _turn(self, peer)
wire.LerobotRobot.turn = _told
"""


@pytest.fixture(autouse=True)
def tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are loaded with arrays for tensors, except by the program."""
    torch = types.ModuleType("torch")
    torch.tensor = lambda values: np.array(values, np.float32)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


@contextmanager
def serving(export: Path | str, *options: str, **more: Any) -> Iterator[tuple[Server, Callable[..., Robot]]]:
    """A server, and what makes robots that are connected to it."""
    robots = []
    with Server(export, "--lerobot", "127.0.0.1:0", *options, **more) as server:
        address = server.wait_log("clients of LeRobot: ").rpartition(" ")[2]

        def robot(started: bool = True, key: str = "", name: str = "", own: bool = False, **setup: Any) -> Robot:
            robots.append(Robot(address, key, name, own))
            if started:
                robots[-1].start(**setup)
            return robots[-1]

        try:
            yield server, robot
        finally:
            for one in robots:
                one.close()


@contextmanager
def refused(status: grpc.StatusCode) -> Iterator[dict[str, Any]]:
    """A call that ends with this status; what our JSON says comes into the map."""
    found: dict[str, Any] = {}
    with pytest.raises(grpc.RpcError) as info:
        yield found
    assert info.value.code() is status, info.value
    found |= json.loads(dict(info.value.trailing_metadata())["reflex-error"])


@pytest.mark.long  # its robot imports PyTorch; `make test-lerobot` has LeRobot itself
def test_w40_a_robot_gets_its_actions_as_lerobot_and_torch_load_them(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", cameras=("front",), model_type="act")
    record = tmp_path / "record"
    with serving(export, "--record", str(record)) as (server, _):
        address = server.wait_log("clients of LeRobot: ").rpartition(" ")[2]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, PROGRAM, address], env=environment, capture_output=True, timeout=PATIENCE, check=False
        )
        assert run.returncode == 0, run.stderr.decode()
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="lerobot") == 3
        server.stop()
    chunks, asked = json.loads(run.stdout), recorded(record)
    assert len(chunks) == len(asked) == 3
    for step, (chunk, one) in enumerate(zip(chunks, asked, strict=True)):
        assert [(at, place, kind) for at, place, kind, _ in chunk] == [
            (1000.0 + step + i / 30, step + i, "torch.float32") for i in range(2)
        ]
        assert np.allclose([values for *_, values in chunk], right(one)[:2], atol=1e-5)
    assert len({(one.robot_id, one.episode_id) for one in asked}) == 1


def right(asked: JournalRequest) -> Any:
    """The answer to a request, computed the plain way: that of /act with the same id and state."""
    assert asked.request_id is not None
    return expected(list(asked.state), seed_of(asked.request_id))


def test_p32_the_checkpoint_of_the_instructions_names_the_policy(tmp_path: Path) -> None:
    exports = {
        name: write_tiny(tmp_path / name, weights=weights, noise=False, model_type="act")
        for name, weights in (("arm", WEIGHTS), ("other", -WEIGHTS))
    }
    first, second = (f"--policy={name}={export}" for name, export in exports.items())
    with serving(first, second) as (server, robot):
        for name, weights in (("other", -WEIGHTS), ("arm", WEIGHTS)):
            one = robot(checkpoint=name, name=name)
            one.see([0.3, -0.1])
            (action, *_) = one.act()
            want = np.tanh(np.float32([0.3, -0.1]) @ weights)
            assert np.allclose(action.action, want, atol=1e-5)
        assert server.metrics()("reflex_requests_total", policy="other", outcome="ok", wire="lerobot") == 1
        for wrong in ("lab/checkpoint", ["arm"], 7):
            with refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
                robot(started=False, name="new").start(checkpoint=wrong)
            assert "served are arm, other" in error["message"]


def test_w41_the_instructions_are_checked_and_nothing_is_loaded(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", cameras=("front",), model_type="act")
    robot_file = {"name": "so101", "state_names": ["shoulder", "elbow"], "control_rate_hz": 10}
    (export / "embodiment.json").write_text(json.dumps(robot_file))
    with serving(export) as (server, robot):
        one = robot(started=False)
        for setup, field in [
            ({"policy_type": "smolvla", "features": features(("front",))}, "policy_type"),
            ({"features": features()}, "front"),
            ({"features": features(("front",), ("elbow.pos", "shoulder.pos"))}, "lerobot_features"),
            ({"features": {}}, "lerobot_features"),
            ({"features": 5}, "lerobot_features"),
            ({"features": features(("front",)), "steps": 0}, "actions_per_chunk"),
            ({"features": features(("front",)), "rename_map": {"a": [1]}}, "rename_map"),
        ]:
            with refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
                one.start(**setup)
            assert (error["error"], error["field"]) == ("invalid_request", field)
        with refused(grpc.StatusCode.FAILED_PRECONDITION) as error:
            one.see([0.0, 0.0])
        renamed = {"observation.images.top": "observation.images.front"}
        one.start(features=features(("top",)), rename_map=renamed)
        one.see([0.0, 0.0], 7, top=np.zeros((6, 8, 3), np.uint8))
        chunk = one.act()
        assert [(step.timestamp, step.timestep) for step in chunk] == [(1007.0 + i / 10, 7 + i) for i in range(CHUNK)]
        assert server.metrics()("reflex_requests_total", outcome="client_error", wire="lerobot") == 8


def test_w41_what_a_setup_names_is_bounded_however_often_a_pickle_repeats_it() -> None:
    def sent(names: list[str], n: int) -> dict[str, Any]:
        shared = {"dtype": "float32", "names": names}
        return {
            "policy_type": "act", "actions_per_chunk": 5, "lerobot_features": {f"f{i}": shared for i in range(n)},
        }  # fmt: skip

    assert len(read(LerobotSetup, sent(["a.pos", "b.pos"], 512)).motors) == 512
    for names, n in ((["a.pos", "b.pos"], 513), (["a"] * 2000, 1), (["a" * 257], 1)):
        with pytest.raises(InvalidRequest, match="at most 1024 motors may be named, each in 256 characters"):
            read(LerobotSetup, sent(names, n))


def test_w42_the_newest_observation_wins(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--record", str(tmp_path), before=PATIENT) as (server, robot):
        one, other = robot(name="one"), robot(name="other")
        for step in range(3):
            one.see([0.1 * step, 0.0], step)
        waiting = other.begin("GetActions")
        assert [step.timestep for step in one.act()] == [2, 3, 4]
        other.see([0.5, 0.0], 9)
        assert [step.timestep for step in load(waiting.result(PATIENCE))] == [9, 10, 11]
        one.see([0.3, 0.0], 3)
        other.call("Ready")
        other.see([0.6, 0.0], 10)
        assert [robot.act()[0].timestep for robot in (one, other)] == [3, 10]
        server.stop()
    first, second, third, fourth = recorded(tmp_path)
    assert np.float32([one.state[0] for one in (first, second, third, fourth)]).tolist() == [
        *np.float32([0.2, 0.5, 0.3, 0.6])
    ]
    assert first.robot_id == third.robot_id != second.robot_id == fourth.robot_id
    assert first.episode_id == third.episode_id  # another robot's Ready is no new episode of this one
    assert second.episode_id != fourth.episode_id


def test_w43_what_is_wrong_has_its_status(tiny: Path) -> None:
    with serving(tiny, "--max-body-bytes", "100000") as (server, robot):
        one = robot()
        for wrong, field in [
            ({"elbow.pos": None}, "elbow.pos"), ({"elbow.pos": np.zeros(2)}, "elbow.pos"), ({"task": 5}, "task"),
        ]:  # fmt: skip
            with refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
                one.see([0.0, 0.0], **wrong)
            assert error["field"] == field
        one.see([float("nan"), 0.0])
        with refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
            one.act()
        assert error["field"] == "state"
        with pytest.raises(grpc.RpcError) as info:  # gRPC's own answer
            one.see([0.0, 0.0], more=bytes(200_000))
        assert info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):  # over the bound in all, and each part is not
            one.send(iter([b"\x08\x01\x12\xd0\x86\x03" + bytes(50_000)] * 3))
        for broken in ([], [b"\x08\x09"], [b"\x08\x01\x12\x01."], [b"\x12"]):
            with refused(grpc.StatusCode.INVALID_ARGUMENT):
                one.send(iter(broken))
        one.see([0.0, 0.0])
        assert len(one.act()) == CHUNK
        assert server.metrics()("reflex_requests_total", outcome="client_error", wire="lerobot") == 10
        server.reach(lambda m: m("reflex_in_flight_requests") == 0)


def test_w43_full_late_and_failing_have_their_status(tiny: Path) -> None:
    with serving(tiny, "--deadline-ms", "200", held=True) as (server, robot), busy(server, deadline_ms=60_000):
        one = robot()
        one.see([0.0, 0.0])
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED) as error:
            one.act()
        assert error["error"] == "deadline_exceeded"
    options = ("--max-queue", "1", "--inject-fault", "prod:raise:1")
    with serving(tiny, *options, held=True) as (server, robot), busy(server) as plug:
        one, two = robot(name="one"), robot(name="two")
        one.see([0.0, 0.0])
        failing = one.begin("GetActions")
        server.reach(queued(1))
        two.see([0.0, 0.0])
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as error:
            two.act()
        assert error["error"] == "queue_full"
        server.release()
        assert plug.answers()[0].status == 500
        with refused(grpc.StatusCode.INTERNAL) as error:
            failing.result(PATIENCE)
        assert error["error"] == "processor_failed"


def test_w43_who_leaves_while_queued_is_never_computed(tiny: Path) -> None:
    with serving(tiny, held=True) as (server, robot), busy(server) as plug:
        one = robot()
        one.see([0.0, 0.0])
        waiting = one.begin("GetActions")
        server.reach(queued(1))
        waiting.cancel()
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled", wire="lerobot") == 1)
        server.release()
        assert plug.answers()[0].status == 200
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="lerobot") == 0


def test_w43_a_server_that_ends_answers_what_it_took_and_refuses_the_rest(tiny: Path) -> None:
    with serving(tiny, before=PATIENT, held=True) as (server, robot), busy(server):
        one, idle = robot(name="one"), robot(name="idle")
        one.see([0.0, 0.0])
        waiting, nothing = one.begin("GetActions"), idle.begin("GetActions")
        server.reach(queued(1))
        server.wait_log_while_fewer(ASKS, 2)
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        with refused(grpc.StatusCode.UNAVAILABLE) as error:
            nothing.result(PATIENCE)
        assert (error["error"], error["retry_safe"]) == ("shutting_down", True)
        with refused(grpc.StatusCode.UNAVAILABLE):
            idle.see([0.0, 0.0])
        server.release()
        assert len(load(waiting.result(PATIENCE))) == CHUNK
        assert server.wait() == 0
        assert not any("Traceback" in line or " ERROR " in line for line in server.log)


def test_w43_sixteen_robots_share_a_batch(tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with serving(tiny, "--trace", str(trace), held=True, takes="0.001 * len(batch)") as (server, robot), busy(server):
        robots = [robot(name=f"arm-{i}") for i in range(16)]
        for i, one in enumerate(robots):
            one.see([0.1 * i, 0.0], i)
        waiting = [one.begin("GetActions") for one in robots]
        server.reach(queued(16))
        server.release()
        assert [load(answer.result(PATIENCE))[0].timestep for answer in waiting] == list(range(16))
        assert max(batch.size for batch in traced(server, trace)) == 16


def test_w42_an_observation_that_must_go_goes_first(tiny: Path, tmp_path: Path) -> None:
    options = ("--max-batch-size", "1", "--record", str(tmp_path))
    with serving(tiny, *options, held=True) as (server, robot), busy(server):
        waiting = []
        for place, must_go in enumerate((False, True), 1):
            one = robot(name=f"arm-{place}")
            one.see([0.1 * place, 0.0], must_go=must_go)
            waiting.append(one.begin("GetActions"))
            server.reach(queued(place))
        server.release()
        for answer in waiting:
            answer.result(PATIENCE)
        assert server.stop() == 0
    assert [round(one.state[0], 1) for one in recorded(tmp_path)[1:]] == [0.2, 0.1]


def test_w44_a_key_is_metadata_and_without_one_it_is_loopback_alone(tiny: Path) -> None:
    with serving(tiny, "--api-key", "secret") as (_, robot):
        for key in ("", "wrong"):
            with refused(grpc.StatusCode.UNAUTHENTICATED):
                robot(key=key)
        one = robot(key="secret")
        one.see([0.0, 0.0])
        assert len(one.act()) == CHUNK
    for address, message_ in [
        ("0.0.0.0:0", "needs --api-key"), ("8080", "must be ADDRESS:PORT"), ("localhost:99999", "must be ADDRESS:PORT"),
    ]:  # fmt: skip
        with pytest.raises(AssertionError, match=message_), Server(tiny, "--lerobot", address):
            pass


def test_w44_an_address_in_use_is_one_line(tiny: Path) -> None:
    with serving(tiny) as (server, _):
        address = server.wait_log("clients of LeRobot: ").rpartition(" ")[2]
        with Server(tiny, "--lerobot", address, until="cannot be bound") as second:
            assert second.wait() == 2
            assert not any("Traceback" in line for line in second.log)
            assert not any(".cc:" in line for line in second.log)  # gRPC tells where in its sources
            assert any("choose another address or port" in line for line in second.log)


def test_w44_a_robot_that_comes_early_waits_for_the_policy(tiny: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wait = loads_after(gate)
    with serving(tiny, before=wait, until="http://") as (server, robot):
        one = robot(started=False)
        one.call("Ready")
        setup = lerobot().RemotePolicyConfig("act", "lab/checkpoint", features(), 50)
        waiting = one.begin("SendPolicyInstructions", message(pickle.dumps(setup)))
        assert server.get("/healthz").status == 503
        assert not waiting.done()
        gate.write_text("go")
        assert waiting.result(PATIENCE) == b""
