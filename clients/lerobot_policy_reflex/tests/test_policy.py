"""The policy against a real `reflex serve`."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from lerobot_policy_reflex import ReflexConfig, ReflexPolicy, connection, make_reflex_pre_post_processors
from lerobot_policy_reflex.connection import ReflexError
from reflex_runtime.demo import POLICY
from serving.exports import ACTIONS, CHUNK, WEIGHTS, write_tiny
from serving.harness import PATIENCE, Server
from serving.place import Place
from serving.requests import WAITING, busy, loads_after, recorded

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 6, 8), np.uint8)


def config(server: Server, **more: Any) -> ReflexConfig:
    return ReflexConfig(url=f"http://127.0.0.1:{server.port}", timeout_s=PATIENCE, **more)


def policy(server: Server, **more: Any) -> closing[ReflexPolicy]:
    return closing(ReflexPolicy(config(server, **more)))


def seen(*states: list[float], **more: Any) -> dict[str, Any]:
    return {"observation.state": torch.tensor(states), "task": ["go"] * len(states)} | more


def right(*states: list[float]) -> Any:
    """The chunk of each state, [rows, steps, dim]."""
    chunk = np.tanh(np.array(states, np.float32) @ WEIGHTS)
    return np.repeat(chunk[:, None], CHUNK, 1)


def refused(ask: Any, code: str, match: str) -> None:
    with pytest.raises(ReflexError, match=match) as info:
        ask()
    assert info.value.code == code
    assert "\n" not in str(info.value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("plain"), noise=False)


@pytest.fixture(scope="module")
def server(plain: Path) -> Iterator[Server]:
    with Server(plain) as running:
        yield running


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cameras = ("image", "image_wrist")
    return write_tiny(tmp_path_factory.mktemp("seeing"), cameras=cameras, noise=False, wires="openpi/libero")


def test_w52_a_chunk_has_the_actions_of_the_server(server: Server) -> None:
    with policy(server) as robot:
        chunk = robot.predict_action_chunk(seen([0.1, -0.2]))
        assert chunk.dtype is torch.float32
        assert chunk.shape == (1, CHUNK, ACTIONS)
        np.testing.assert_allclose(chunk, right([0.1, -0.2]), atol=1e-6)


def test_w52_actions_come_one_by_one_out_of_a_queue_of_each_policy(server: Server) -> None:
    before = server.metrics()("reflex_requests_total")
    with policy(server) as one, policy(server, n_action_steps=2) as other:
        for step in range(4):
            state = [0.1 * step, 0.0]
            first, second = one.select_action(seen(state)), other.select_action(seen([1.0, -0.1 * step]))
            assert first.shape == second.shape == (1, ACTIONS)
            np.testing.assert_allclose(first, right([0.1 * (step // CHUNK * CHUNK), 0.0])[:, 0], atol=1e-6)
            np.testing.assert_allclose(second, right([1.0, -0.1 * (step // 2 * 2)])[:, 0], atol=1e-6)
    assert server.metrics()("reflex_requests_total") == before + 4


def test_w52_rows_of_a_batch_are_requests_of_their_own_and_share_a_batch(plain: Path) -> None:
    states = [[0.1 * row, -0.1] for row in range(5)]
    with Server(plain, held=True) as server, policy(server) as robots, ThreadPoolExecutor(1) as thread:
        assert robots.select_action(seen(*states)).shape == (5, ACTIONS)
        before = server.metrics()("reflex_batch_size_per_flush_count")
        with busy(server) as plug:
            asking = thread.submit(robots.predict_action_chunk, seen(*states))
            server.reach(lambda m: m(WAITING) == 5)
            server.release()
            np.testing.assert_allclose(asking.result(PATIENCE), right(*states), atol=1e-6)
            plug.answers()
        assert server.metrics()("reflex_batch_size_per_flush_count") == before + 2  # the plug, and all rows


def test_w52_more_rows_than_a_frame_may_have_go_in_several(server: Server) -> None:
    states = [[0.001 * row, -0.1] for row in range(300)]
    with policy(server) as robots:
        np.testing.assert_allclose(robots.predict_action_chunk(seen(*states)), right(*states), atol=1e-6)
    rows = [{"state": np.zeros(2, np.float32), "picture": np.zeros(1_000_000, np.uint8)}] * 30
    assert [len(frame) for frame in connection._frames(rows)] == [11, 11, 8]
    assert [len(frame) for frame in connection._frames([{"picture": np.zeros(20_000_000, np.uint8)}] * 2)] == [1, 1]


def test_w53_a_row_that_is_refused_is_the_error_of_all(server: Server) -> None:
    with policy(server) as robots:
        refused(lambda: robots.predict_action_chunk(seen([0.0, 0.0], [float("nan"), 0.0])), "invalid_request", "/1.1")
        assert robots.predict_action_chunk(seen([0.0, 0.0], [0.1, 0.0])).shape == (2, CHUNK, ACTIONS)


def test_w53_an_observation_that_is_too_large_is_told(plain: Path) -> None:
    with Server(plain, "--max-body-bytes", "1024") as server, policy(server) as robots:
        refused(lambda: robots.predict_action_chunk(seen(*[[0.0, 0.0]] * 20)), "too_large", "--max-body-bytes")
        assert robots.predict_action_chunk(seen([0.0, 0.0])).shape == (1, CHUNK, ACTIONS)


def test_w52_a_robot_has_a_name_and_a_reset_begins_an_episode(plain: Path, tmp_path: Path) -> None:
    with Server(plain, "--record", str(tmp_path)) as server:
        with policy(server, robot_id="arm 1", n_action_steps=2) as robot:
            for _ in range(3):
                robot.select_action(seen([0.0, 0.0]))
            robot.reset()
            robot.select_action(seen([0.0, 0.0]))
            robot._action_queue.clear()  # as LeRobot's `drop_queued_actions` does
            robot.select_action(seen([0.5, 0.5]))
            robot.predict_action_chunk(seen([0.0, 0.0], [0.0, 0.0]))
        server.stop()
    found = recorded(tmp_path)
    one, _, two, _, first, second = [asked.episode_id for asked in found]
    assert one != two
    assert [asked.episode_id for asked in found] == [one, one, two, two, f"{two}/0", f"{two}/1"]
    assert (first, second) == (f"{two}/0", f"{two}/1")
    assert [asked.robot_id for asked in found] == ["arm 1"] * 4 + ["arm 1/0", "arm 1/1"]
    assert [asked.executed for asked in found] == [None, 2, None, 1, None, None]
    assert [asked.request_id for asked in found] == [
        f"{one}.1", f"{one}.2", f"{two}.1", f"{two}.2", f"{two}/0.3", f"{two}/1.3",
    ]  # fmt: skip


def test_w52_the_task_is_the_instruction(tmp_path: Path) -> None:
    camera = {"observation.images.front": torch.zeros(2, 3, 64, 64)}
    state = {"observation.state": torch.zeros(2, 4)}
    with Server(POLICY, "--record", str(tmp_path)) as server:
        with policy(server) as robot:
            for task in (["open", "close"], ["both"], "text"):
                robot.predict_action_chunk(camera | state | {"task": task})
            wrong = camera | state | {"task": ["a", "b", "c"]}
            refused(lambda: robot.predict_action_chunk(wrong), "invalid_request", "a text for each of 2 rows")
        server.stop()
    told = [asked.instruction for asked in recorded(tmp_path)]
    assert sorted(told) == sorted(["open", "close", "both", "both", "text", "text"])


@pytest.mark.parametrize("form", ["uint8", "float32", "float16"])
def test_w52_pictures_arrive_as_the_camera_gave_them(seeing: Path, tmp_path: Path, form: str) -> None:
    sent = torch.from_numpy(PIXELS)
    sent = sent if form == "uint8" else (sent / 255).to(getattr(torch, form))
    pictures = {"observation.images.image": sent[:1], "observation.images.left": sent[1:]}
    names = {"observation.images.left": "observation/wrist_image"}
    with Server(seeing, "--record", str(tmp_path), "--record-images", "full") as server:
        with policy(server, names=names) as robot:
            chunk = robot.predict_action_chunk(seen([0.2, 0.1], **pictures))
            np.testing.assert_allclose(chunk, right([0.2, 0.1]), atol=1e-6)
        server.stop()
    (asked,) = recorded(tmp_path)
    for name, place in (("image", 0), ("image_wrist", 1)):
        picture = np.asarray(PIL.Image.open(io.BytesIO(asked.images()[name])))
        np.testing.assert_array_equal(picture, PIXELS[place].transpose(1, 2, 0))


def test_w53_what_an_observation_lacks_is_told_with_what_came_and_what_is_expected(seeing: Path) -> None:
    pixels = torch.from_numpy(PIXELS[:1])
    with Server(seeing) as server, policy(server) as robot:

        def ask(**more: Any) -> Any:
            both = {"observation.images.image": pixels, "observation.images.wrist_image": pixels}
            return lambda: robot.predict_action_chunk(seen([0.0, 0.0]) | both | more)

        ask()()
        one = {"observation.images.image": pixels, "observation.images.front": pixels}
        refused(
            lambda: robot.predict_action_chunk(seen([0.0, 0.0], **one)),
            "invalid_request",
            r"observation/wrist_image: no picture of this name; came: observation.images.image, "
            r"observation.images.front; expected: .*; give --policy.names='\{\"observation.images.",
        )  # fmt: skip
        refused(ask(**{"observation.state": torch.zeros(1, 3)}), "invalid_request", r"\[rows, 2\], came \[1, 3\]")
        refused(ask(**{"observation.state": torch.zeros(2, 2)}), "invalid_request", "different numbers of rows")
        refused(ask(**{"observation.state": "far"}), "invalid_request", "must be a tensor of numbers")
        refused(ask(**{"observation.images.image": pixels * 2.0}), "invalid_request", "is it normalised")
        refused(ask(**{"observation.images.image": pixels[:, :2]}), "invalid_request", r"3, height, width\], came")
        refused(ask(**{"observation.state": torch.tensor([[float("nan"), 0.0]])}), "invalid_request", "state")
        state = {"observation.images.image": pixels, "observation.images.wrist_image": pixels}
        refused(lambda: robot.predict_action_chunk(state), "invalid_request", "observation.state: missing; came")
        assert ask()().shape == (1, CHUNK, ACTIONS)  # the connection goes on


def test_w52_a_state_comes_in_the_parts_of_the_export(tmp_path: Path) -> None:
    parts = {"openpi": {"state": ["joints", "gripper"]}}
    with Server(write_tiny(tmp_path, noise=False, wires=parts)) as server, policy(server) as robot:
        np.testing.assert_allclose(robot.predict_action_chunk(seen([0.1, 0.9])), right([0.1, 0.9]), atol=1e-6)


def test_w53_another_number_of_motors_is_told_before_anything_moves(server: Server) -> None:
    motors = {"action": SimpleNamespace(shape=(6,), type="ACTION")}
    given = config(server)
    given.output_features = motors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReflexConfig, "action_feature", property(lambda self: self.output_features.get("action")))
        refused(lambda: ReflexPolicy(given), "invalid_request", "actions of tiny have 2 numbers, those here have 6")
        motors["action"].shape = (ACTIONS,)
        ReflexPolicy(given).close()


def test_w53_the_key_comes_from_the_environment(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFLEX_API_KEY", raising=False)
    with Server(plain, "--api-key", "secret") as server:
        refused(lambda: policy(server), "unauthorized", "key")
        monkeypatch.setenv("REFLEX_API_KEY", "secret")
        with policy(server) as robot:
            assert "secret" not in repr(robot.config)
            assert robot.predict_action_chunk(seen([0.0, 0.0])).shape == (1, CHUNK, ACTIONS)


def test_w53_nothing_listens_and_a_policy_that_is_not_ready_are_told_in_one_line(plain: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Server(plain, before=loads_after(gate), until="listening on") as server:
        late = config(server, connect_timeout_s=0.2)
        refused(lambda: ReflexPolicy(late), "timed_out", "the policy was not ready within 0.2 s")
        with gate.open("wb"):
            pass
        ReflexPolicy(config(server)).close()  # waits until it is
        gone = config(server)
    refused(lambda: ReflexPolicy(gone), "unreachable", r"is `reflex serve` running there\?")


def test_w53_a_deadline_goes_to_the_server_and_late_requests_are_not_repeated(plain: Path) -> None:
    with Server(plain, held=True) as server, policy(server, deadline_ms=200.0, retries=5) as robot:
        with busy(server) as plug:
            refused(lambda: robot.predict_action_chunk(seen([0.0, 0.0])), "deadline_exceeded", r"\[request lerobot-")
            assert server.metrics()("reflex_requests_total", outcome="expired") == 1
            server.release()
            plug.answers()


def test_w53_what_was_refused_without_having_run_is_asked_again(plain: Path) -> None:
    with Server(plain, "--max-queue", "1", held=True) as server:
        with policy(server, retries=0) as robot, policy(server, retries=50) as patient, busy(server) as plug:
            with server.burst([{"state": [0.0, 0.0]}]) as waiting:
                waiting.send()
                server.reach(lambda m: m(WAITING) == 1)
                refused(lambda: robot.predict_action_chunk(seen([0.0, 0.0])), "queue_full", "capacity")
                found: list[Any] = []
                asking = threading.Thread(target=lambda: found.append(patient.predict_action_chunk(seen([0.3, 0.3]))))
                asking.start()
                server.reach(lambda m: m("reflex_requests_total", outcome="rejected") >= 2)
                server.release()
                asking.join(PATIENCE)
                np.testing.assert_allclose(found[0], right([0.3, 0.3]), atol=1e-6)
                waiting.answers()
                plug.answers()


def test_w53_a_server_that_was_started_again_is_found_again(plain: Path) -> None:
    with Place() as place, Server(plain, "--port", str(place.port)) as server:
        with policy(server) as robot:
            robot.predict_action_chunk(seen([0.0, 0.0]))
            assert server.stop(signal.SIGTERM) == 0
            refused(lambda: robot.predict_action_chunk(seen([0.0, 0.0])), "unreachable", "running there")
            with Server(plain, "--port", str(place.port)):
                assert robot.predict_action_chunk(seen([0.0, 0.0])).shape == (1, CHUNK, ACTIONS)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"url": "127.0.0.1:8000"}, "--policy.url=127.0.0.1:8000: must be as http://"),
        ({"priority": "high"}, "--policy.priority=high: must be one of urgent, default, background"),
        ({"n_action_steps": 0}, "--policy.n_action_steps=0: must be 1 or more"),
        ({"deadline_ms": 0.0}, "--policy.deadline_ms=0.0: must be more than 0"),
        ({"timeout_s": 0.0}, "--policy.timeout_s=0.0: must be more than 0"),
        ({"connect_timeout_s": -1.0}, "--policy.connect_timeout_s=-1.0: must be more than 0"),
        ({"retries": -1}, "--policy.retries=-1: must be 0 or more"),
    ],
)
def test_w53_a_wrong_option_is_named(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        ReflexConfig(**wrong)


def test_w52_processors_change_nothing_and_nothing_can_be_trained(server: Server) -> None:
    before, after = make_reflex_pre_post_processors(config(server), dataset_stats=None)
    batch = seen([0.1, 0.2])
    assert torch.equal(before(batch)["observation.state"], batch["observation.state"])
    assert before(batch)["task"] == ["go"]
    actions = torch.ones(1, ACTIONS)
    assert torch.equal(after(actions), actions)
    with closing(ReflexPolicy.from_pretrained(None, config=config(server), revision=None)) as robot:
        assert not robot.training
        for train in (lambda: robot.forward(batch), robot.get_optim_params, robot.config.get_optimizer_preset):
            with pytest.raises(ValueError, match="cannot be trained"):
                train()
    with pytest.raises(ValueError, match=r"--policy\.type=reflex"):
        ReflexPolicy.from_pretrained("lab/checkpoint")


@pytest.mark.parametrize("answer", [{"actions": np.array([[np.nan]])}, {"actions": np.zeros(3)}, {}, [], None])
def test_w53_actions_that_are_not_safe_to_execute_are_an_error(answer: Any) -> None:
    refused(lambda: connection._actions(answer), "bad_answer", "actions")


@pytest.mark.parametrize("frame", [b"\x80", b"\x81\xa6reflex\x80", b"\xc1", "text", b"\xa4text"])
def test_w53_a_server_that_does_not_say_what_it_expects_is_an_error(frame: bytes | str) -> None:
    refused(lambda: connection._announced(frame, "ws://h:1/"), "bad_answer", "bad_answer: ")
