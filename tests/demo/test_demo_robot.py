"""The robot's loop, and what it says and hears over HTTP, against a real server on a real socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from demo_support import BundledPolicy, Stub, error, seen_in
from numpy.typing import NDArray

from demo.robot import Event, HttpPolicy, NoAnswer, run_robot
from demo.tasks import INSTRUCTIONS, MAX_STEPS, RobotView
from demo.world import World


@pytest.fixture
def seen() -> RobotView:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (64, 64, 3), np.uint8)
    return RobotView(image, np.array([0.1, 0.6, 0.2, 1.0], np.float32), "close the drawer", "drawer-close-v3/7/0")


@pytest.fixture
def policies(stub: Stub) -> Iterator[Any]:
    """Makes policies with an episode open, which nobody says how it ended."""
    with ExitStack() as stack:

        def make(**options: Any) -> HttpPolicy:
            policy = HttpPolicy(stub.url, "r0", "run7", **options)
            stack.callback(policy.close)
            stack.enter_context(policy.episode("drawer-close-v3/7/0"))
            return policy

        yield make


def test_bundled_v2_solves_a_task_in_closed_loop(v2: BundledPolicy) -> None:
    (episode,) = run_robot(v2, World("drawer-close-v3", seed=7), episodes=1)
    assert episode.success
    assert episode.steps < MAX_STEPS
    assert episode.error is None


@pytest.mark.long
def test_bundled_v2_solves_nearly_every_task(v2: BundledPolicy) -> None:
    """Of 600 situations it solved 598: tools/demo_policy/README.md."""
    solved = [run_robot(v2, World(task, seed=1000), episodes=1)[0].success for task in INSTRUCTIONS]
    assert sum(solved) >= len(INSTRUCTIONS) - 1


def test_random_actions_do_not_solve_it() -> None:
    """So that the test above measures the policy and not the task."""
    rng = np.random.default_rng(0)

    def flail(seen: RobotView) -> NDArray[np.float32]:
        return rng.uniform(-1, 1, (16, 4)).astype(np.float32)

    (episode,) = run_robot(flail, World("drawer-close-v3", seed=7), episodes=1)
    assert not episode.success
    assert episode.steps == MAX_STEPS


def test_part_of_each_chunk_is_executed() -> None:
    asked: list[str] = []

    def still(seen: RobotView) -> NDArray[np.float32]:
        asked.append(seen.episode_id)
        return np.zeros((16, 4), np.float32)

    world = World("door-open-v3")
    events: list[Event] = []
    episodes = run_robot(still, world, episodes=2, first_episode=4, execute=6, max_steps=20, on_event=events.append)
    assert [e.calls for e in episodes] == [4, 4], "6 + 6 + 6 + 2 steps"
    assert [e.steps for e in episodes] == [20, 20]
    assert asked == ["door-open-v3/0/4"] * 4 + ["door-open-v3/0/5"] * 4
    assert [e["event"] for e in events] == ["episode_start", "episode_end"] * 2


def test_an_unanswered_robot_ends_the_episode_and_goes_on() -> None:
    def refuse(seen: RobotView) -> NDArray[np.float32]:
        raise NoAnswer("HTTP 500: broken")

    episodes = run_robot(refuse, World("door-open-v3"), episodes=2)
    assert [(e.success, e.steps, e.error) for e in episodes] == [(False, 0, "HTTP 500: broken")] * 2


@pytest.mark.parametrize("options", [{}, {"png": True}], ids=["raw", "png"])
def test_the_server_gets_what_the_robot_sees(
    stub: Stub, policies: Any, seen: RobotView, options: dict[str, Any]
) -> None:
    policy = policies(deadline_ms=60_000.0, **options)
    assert policy(seen).shape == (16, 4)
    policy(replace(seen, executed=8))
    first, second = stub.requests
    received = seen_in(first)
    np.testing.assert_array_equal(received.image, seen.image)
    np.testing.assert_allclose(received.state, seen.state)
    assert received.instruction == seen.instruction
    assert first["robot_id"] == "r0"
    assert first["episode_id"] == "r0:run7:drawer-close-v3/7/0"
    assert "executed" not in first, "nothing was executed before the first look"
    assert first["request_id"] != second["request_id"]
    assert 30_000.0 < first["deadline_ms"] <= 60_000.0, "what is left of it"
    assert second["executed"] == 8
    assert stub.connections == 1, "the connection is kept"


def test_actions_may_be_a_wire_array_or_lists(stub: Stub, policies: Any, seen: RobotView) -> None:
    chunk = np.arange(64, dtype="<f4").reshape(16, 4)
    forms = [chunk.tolist(), {"dtype": "<f4", "shape": [16, 4], "data": chunk.tobytes()}]
    policy = policies()
    for form in forms:
        stub.answer = lambda request, form=form: (200, {}, {"actions": form})
        np.testing.assert_array_equal(policy(seen), chunk)


def test_a_refusal_with_retry_after_is_asked_again_and_reported(stub: Stub, policies: Any, seen: RobotView) -> None:
    answers = [
        error("queue_full", 503, retry_safe=True, retry_after="0"),
        error("too_many_requests", 429, retry_safe=True, retry_after="0"),
        (200, {}, {"actions": [[1.0] * 4], "batch": {"size": 3}}),
    ]
    stub.answer = lambda request: answers[len(stub.requests) - 1]
    events: list[Event] = []
    assert policies(on_event=events.append)(seen).shape == (1, 4)
    assert [e["event"] for e in events] == ["refused", "refused", "act"]
    assert events[-1]["status"] == 200
    assert events[-1]["refusals"] == 2
    assert events[-1]["batch_size"] == 3
    assert events[-1]["waited_ms"] >= events[0]["latency_ms"]
    assert {r["request_id"] for r in stub.requests} == {stub.requests[0]["request_id"]}, "one question, one id"


def test_patience_ends_before_the_wait_that_would_exceed_it(stub: Stub, policies: Any, seen: RobotView) -> None:
    stub.answer = lambda request: error("degraded", 503, retry_safe=True, retry_after="60")
    with pytest.raises(NoAnswer, match=r"degraded \(503\)"):
        policies(patience=30.0)(seen)
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (error("processor_failed", 500), r"processor_failed \(500\)"),
        (error("invalid_request", 422), r"invalid_request \(422\)"),
        ((503, {"Retry-After": "0"}, b"a proxy"), "http_503"),
        ((200, {}, {"actions": []}), "actions"),
        ((200, {}, {"actions": [[float("nan")] * 4]}), "actions"),
        ((200, {}, {"no": "actions"}), "actions"),
        ((200, {}, [1, 2]), "expected an object"),
    ],
)
def test_anything_else_is_no_answer(stub: Stub, policies: Any, seen: RobotView, answer: Any, said: str) -> None:
    stub.answer = lambda request: answer
    with pytest.raises(NoAnswer, match=said):
        policies()(seen)
    assert len(stub.requests) == 1


def test_a_kept_connection_that_was_closed_is_opened_again(stub: Stub, policies: Any, seen: RobotView) -> None:
    stub.hang_up = True
    policy = policies()
    for _ in range(3):
        policy(seen)
        assert stub.hung_up.acquire(timeout=60), "a request that crosses the end is lost: that is another case"
    assert (len(stub.requests), stub.connections) == (3, 3)


def test_a_failed_policy_is_asked_anew_as_often_as_the_robot_will(stub: Stub, policies: Any, seen: RobotView) -> None:
    stub.answer = lambda request: (
        error("processor_failed", 500) if len(stub.requests) <= 2 else (200, {}, {"actions": [[1.0] * 4]})
    )
    events: list[Event] = []
    assert policies(again=2, on_event=events.append)(seen).shape == (1, 4)
    assert [e["status"] for e in events] == [500, 500, 200]
    assert len({r["request_id"] for r in stub.requests}) == 3, "another question each time"
    stub.requests.clear()
    with pytest.raises(NoAnswer, match="processor_failed"):
        policies(again=1)(seen)
    assert len(stub.requests) == 2


def test_an_unreachable_server_is_no_answer_and_no_failure_of_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    policy = HttpPolicy("http://127.0.0.1:9", "r0", patience=0.2)
    (episode,) = run_robot(policy, World("door-open-v3"), episodes=1, opened=policy.episode)
    assert episode.error is not None
    assert "cannot connect to http://127.0.0.1:9" in episode.error
    assert {record.name for record in caplog.records} == {"reflex.client"}, "no outcome is reported"


def test_each_episode_is_told_how_it_ended(stub: Stub, v2: BundledPolicy, caplog: pytest.LogCaptureFixture) -> None:
    stub.answer = lambda request: (200, {}, {"actions": v2(seen_in(request)).tolist()})
    policy = HttpPolicy(stub.url, "r0", "run7")
    world = World("drawer-close-v3", seed=7)
    solved, cut = (
        *run_robot(policy, world, episodes=1, opened=policy.episode),
        *run_robot(policy, world, episodes=1, first_episode=1, max_steps=9, opened=policy.episode),
    )
    stub.answer = lambda request: error("internal", 500)
    run_robot(policy, world, episodes=1, first_episode=2, opened=policy.episode)
    assert (solved.success, cut.success) == (True, False)
    path = "/episodes/r0:run7:drawer-close-v3/7/{}/outcome"
    assert stub.outcomes == [(path.format(n), {"success": n == 0, "robot_id": "r0"}) for n in range(3)]
    assert [r.get("executed") for r in stub.requests][-3:] == [None, 8, None], "1 of 9 steps was left, and not reported"

    stub.outcome = error("not_found", 404)
    with caplog.at_level(logging.WARNING, "reflex.client"):
        (episode,) = run_robot(policy, world, episodes=1, opened=policy.episode)
    assert episode.error is not None, "of the policy, not of the report"
    assert "was not taken" in caplog.text
    policy.close()
