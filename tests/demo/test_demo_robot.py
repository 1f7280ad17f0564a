"""The robot's loop, and what it says and hears over HTTP, against a real server on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from demo_support import BundledPolicy, Stub, seen_in
from numpy.typing import NDArray

from reflex_runtime.demo.robot import Event, HttpPolicy, NoAnswer, run_robot
from reflex_runtime.demo.tasks import MAX_STEPS, Observation
from reflex_runtime.demo.world import World


@pytest.fixture
def seen() -> Observation:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (64, 64, 3), np.uint8)
    return Observation(image, np.array([0.1, 0.6, 0.2, 1.0], np.float32), "close the drawer", "drawer-close-v3/7/0")


@pytest.fixture
def policies(stub: Stub) -> Iterator[Any]:
    made: list[HttpPolicy] = []

    def make(**options: Any) -> HttpPolicy:
        made.append(HttpPolicy(stub.url, "r0", **options))
        return made[-1]

    yield make
    for policy in made:
        policy.close()


def test_bundled_v2_solves_a_task_in_closed_loop(v2: BundledPolicy) -> None:
    (episode,) = run_robot(v2, World("drawer-close-v3", seed=7), episodes=1)
    assert episode.success
    assert episode.steps < MAX_STEPS
    assert episode.error is None


def test_random_actions_do_not_solve_it() -> None:
    """So that the test above measures the policy and not the task."""
    rng = np.random.default_rng(0)

    def flail(seen: Observation) -> NDArray[np.float32]:
        return rng.uniform(-1, 1, (16, 4)).astype(np.float32)

    (episode,) = run_robot(flail, World("drawer-close-v3", seed=7), episodes=1)
    assert not episode.success
    assert episode.steps == MAX_STEPS


def test_part_of_each_chunk_is_executed() -> None:
    asked: list[str] = []

    def still(seen: Observation) -> NDArray[np.float32]:
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
    def refuse(seen: Observation) -> NDArray[np.float32]:
        raise NoAnswer("HTTP 500: broken")

    episodes = run_robot(refuse, World("door-open-v3"), episodes=2)
    assert [(e.success, e.steps, e.error) for e in episodes] == [(False, 0, "HTTP 500: broken")] * 2


@pytest.mark.parametrize("options", [{}, {"png": True}, {"wire": "json"}], ids=["raw", "png", "json"])
def test_the_server_gets_what_the_robot_sees(
    stub: Stub, policies: Any, seen: Observation, options: dict[str, Any]
) -> None:
    policy = policies(deadline_ms=250.0, **options)
    assert policy(seen).shape == (16, 4)
    policy(seen)
    first, second = stub.requests
    received = seen_in(first)
    np.testing.assert_array_equal(received.image, seen.image)
    np.testing.assert_allclose(received.state, seen.state)
    assert received.instruction == seen.instruction
    assert first["robot_id"] == "r0"
    assert first["episode_id"] == "r0:drawer-close-v3/7/0"
    assert first["request_id"] != second["request_id"]
    assert first["deadline_ms"] == 250.0
    assert stub.connections == 1, "the connection is kept"


def test_actions_may_be_a_wire_array_or_lists(stub: Stub, policies: Any, seen: Observation) -> None:
    chunk = np.arange(64, dtype="<f4").reshape(16, 4)
    forms = [chunk.tolist(), {"dtype": "<f4", "shape": [16, 4], "data": chunk.tobytes()}]
    policy = policies()
    for form in forms:
        stub.answer = lambda request, form=form: (200, {}, {"actions": form})
        np.testing.assert_array_equal(policy(seen), chunk)


def test_a_refusal_with_retry_after_is_asked_again_and_reported(stub: Stub, policies: Any, seen: Observation) -> None:
    answers = [
        (503, {"Retry-After": "0"}, {"error": "queue_full"}),
        (429, {"Retry-After": "0"}, {"error": "too_many_requests"}),
        (200, {}, {"actions": [[1.0] * 4], "batch": {"size": 3}}),
    ]
    stub.answer = lambda request: answers[len(stub.requests) - 1]
    events: list[Event] = []
    assert policies(on_event=events.append)(seen).shape == (1, 4)
    assert [e["status"] for e in events] == [503, 429, 200]
    assert events[-1]["refusals"] == 2
    assert events[-1]["batch_size"] == 3
    assert events[-1]["waited_ms"] >= events[0]["latency_ms"]
    assert {r["request_id"] for r in stub.requests} == {stub.requests[0]["request_id"]}, "one question, one id"


def test_patience_ends_before_the_wait_that_would_exceed_it(stub: Stub, policies: Any, seen: Observation) -> None:
    stub.answer = lambda request: (503, {"Retry-After": "60"}, {"error": "degraded"})
    with pytest.raises(NoAnswer, match="HTTP 503"):
        policies(patience=30.0)(seen)
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, {}, {"error": "processor_failed"}), "HTTP 500"),
        ((503, {}, {"error": "shutting_down"}), "HTTP 503"),
        ((503, {"Retry-After": "soon"}, {"error": "queue_full"}), "HTTP 503"),
        ((200, {}, {"actions": []}), "usable"),
        ((200, {}, {"actions": [[float("nan")] * 4]}), "usable"),
        ((200, {}, {"no": "actions"}), "usable"),
        ((200, {}, [1, 2]), "no object"),
    ],
)
def test_anything_else_is_no_answer(stub: Stub, policies: Any, seen: Observation, answer: Any, said: str) -> None:
    stub.answer = lambda request: answer
    with pytest.raises(NoAnswer, match=said):
        policies()(seen)
    assert len(stub.requests) == 1


def test_a_kept_connection_that_was_closed_is_opened_again(stub: Stub, policies: Any, seen: Observation) -> None:
    stub.hang_up = True
    policy = policies()
    for _ in range(3):
        policy(seen)
    assert (len(stub.requests), stub.connections) == (3, 3)


def test_an_unreachable_server_is_no_answer(seen: Observation) -> None:
    with pytest.raises(NoAnswer, match=r"no answer from http://127\.0\.0\.1:9"):
        HttpPolicy("http://127.0.0.1:9", "r0")(seen)
