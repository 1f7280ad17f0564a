"""Policies that see several observations of an episode: which ones, in what order, and what is not kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots import InvalidRequest, Policy, load_policy, served_by
from reflex_runtime.robots.analysis.replay import replay_model
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.observation import Observation, ObservationHistory
from robots.analysis.recorded import Served, serve
from robots.plain import plain
from robots.tiny import Bench, picture, value

KINDS = [False, True]


def states(row: Any) -> Any:
    """The first number of every state that the model sees, as the columns of an action."""
    return row.row("state")[:, 0]


def history_policy(steps: int = 3, staged: bool = False, **changes: Any) -> Policy:
    sizes = {"action_dim": steps, "x_dim": steps}
    return load_policy(plain(states, observation_steps=steps, staged=staged, **(sizes | changes)))


def ask(policy: Policy, number: float, request_id: str = "", **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "images": {"front": picture(int(number))},
        "state": [number, 0.0],
        "episode_id": "e",
        "request_id": request_id or f"r{number:g}",
        "received": number,
    }
    return policy.request(policy.prepare(**(fields | changes)))


def seen(chunk: Any) -> list[float]:
    """What the model saw, oldest first."""
    return [float(v) for v in np.round(chunk.actions[0], 4)]


@pytest.mark.parametrize("staged", KINDS)
def test_p21_a_policy_sees_the_last_observations_of_the_episode_and_the_first_repeated(staged: bool) -> None:
    bench = Bench(policy := history_policy(staged=staged))
    answers = [seen(bench.answer(ask(policy, float(i)))) for i in range(1, 5)]
    assert answers == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert seen(bench.answer(ask(policy, 9.0, episode_id="other"))) == [9, 9, 9]
    assert seen(bench.answer(ask(policy, 8.0, episode_id=None))) == [8, 8, 8]
    assert seen(bench.answer(ask(policy, 7.0, episode_id=None))) == [7, 7, 7]


def test_p21_images_have_the_axis_too_and_belong_to_the_states() -> None:
    def look(row: Any) -> Any:
        assert row.row("front").shape == (2, 4, 6, 3)
        assert row.row("state").shape == (2, 2)
        return [image.mean() for image in row.row("front")]

    bench = Bench(policy := load_policy(plain(look, observation_steps=2)))
    first = bench.answer(ask(policy, 1.0)).actions[0]
    second = bench.answer(ask(policy, 2.0)).actions[0]
    means = [picture(1).mean(), picture(2).mean()]
    assert first == pytest.approx([means[0]] * 2, rel=1e-6)
    assert second == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("staged", KINDS)
def test_p22_what_gets_no_chunk_leaves_nothing_behind(staged: bool) -> None:
    bench = Bench(policy := history_policy(2, staged=staged))
    bench.answer(ask(policy, 1.0))
    shed = ask(policy, 2.0)  # prepared, never submitted
    left = bench.submit(ask(policy, 3.0))
    bench.scheduler.cancel(left, bench.now)
    running = bench.submit(ask(policy, 4.0))
    batch = bench.scheduler.next_batch(bench.now)
    assert batch is not None
    bench.scheduler.cancel(running, bench.now)  # its caller leaves while it runs
    while batch is not None:
        bench.scheduler.complete(batch, list(policy.run(batch)), 0.01, bench.now)
        batch = bench.scheduler.next_batch(bench.now)
    assert seen(bench.answer(ask(policy, 5.0))) == [1, 5]
    assert shed.payload.past == ("r1",)


@pytest.mark.parametrize("staged", KINDS)
def test_p22_a_request_asked_again_sees_the_same_past(staged: bool) -> None:
    bench = Bench(policy := history_policy(2, staged=staged))
    bench.answer(ask(policy, 1.0))
    first = bench.answer(ask(policy, 2.0, "same"))
    again = bench.answer(ask(policy, 2.0, "same", received=2.5))
    assert seen(first) == seen(again) == [1, 2]
    assert seen(bench.answer(ask(policy, 3.0))) == [2, 3]  # and it counts once


def test_p22_the_order_is_that_of_arrival_whatever_is_decoded_or_answered_first() -> None:
    bench = Bench(policy := history_policy(3))
    bench.answer(ask(policy, 1.0))
    late = ask(policy, 3.0)
    assert late.payload.past == ("r1",)
    bench.answer(late)
    assert seen(bench.answer(ask(policy, 2.0))) == [1, 1, 2]  # it came before the one answered meanwhile
    assert seen(bench.answer(ask(policy, 4.0))) == [2, 3, 4]


def test_p22_a_step_that_is_run_again_keeps_an_observation_once() -> None:
    policy = history_policy(2)
    ticket = Ticket(ask(policy, 1.0), 0, 0.0)
    bench = Bench(policy)
    ticket = bench.submit(ticket.request)
    batch = bench.scheduler.next_batch(bench.now)
    assert batch is not None
    policy.run(batch)  # its thread hung, say
    bench.scheduler.complete(batch, list(policy.run(batch)), 0.01, bench.now)
    assert seen(value(ticket)) == [1, 1]
    assert policy.history is not None
    assert policy.history.snapshot()["bytes"] == ticket.request.payload.moment.nbytes


@pytest.mark.parametrize("forget", [lambda policy: policy.forget("e"), lambda policy: policy.forget()])
def test_p23_a_moved_episode_begins_anew(forget: Callable[[Policy], None]) -> None:
    bench = Bench(policy := history_policy(2))
    bench.answer(ask(policy, 1.0))
    forget(policy)
    assert seen(bench.answer(ask(policy, 2.0))) == [2, 2]
    other = Bench(beside := history_policy(2))  # another slot, or the version that was exchanged for it
    assert seen(other.answer(ask(beside, 3.0))) == [3, 3]


def moment(name: str, received: float, size: int = 100) -> Observation:
    images = {"front": np.zeros((size, 10, 3), np.uint8)}
    return Observation(images, request_id=name, received=received, present={"front": True})


def test_p23_history_is_bounded_in_bytes_and_episodes_and_the_longest_unused_goes() -> None:
    each = moment("x", 0.0).nbytes
    history = ObservationHistory(2, max_bytes=3 * each, episodes=10)
    for episode in "abc":
        history.remember(episode, moment(episode, 1.0))
    assert history.before("a", moment("new", 2.0))  # asked for: now b is the longest unused
    history.remember("d", moment("d", 1.0))
    assert not history.before("b", moment("new", 2.0))
    assert all(history.before(episode, moment("new", 2.0)) for episode in "acd")
    assert history.snapshot() | {"max_bytes": 0} == {
        "steps": 2, "episodes": 3, "bytes": 3 * each, "max_bytes": 0, "evictions": 1,
    }  # fmt: skip
    few = ObservationHistory(2, episodes=1)
    few.remember("a", moment("a", 1.0))
    few.remember("b", moment("b", 1.0))
    assert (few.snapshot()["episodes"], few.snapshot()["evictions"]) == (1, 1)
    few.remember("", moment("c", 1.0))
    assert few.snapshot()["episodes"] == 1
    large = ObservationHistory(2, max_bytes=10)
    large.remember("a", moment("a", 1.0))
    assert large.snapshot()["bytes"] == 0


def test_p23_pictures_of_another_size_within_an_episode_are_refused() -> None:
    bench = Bench(policy := history_policy(2, resize="none"))
    bench.answer(ask(policy, 1.0))
    with pytest.raises(InvalidRequest, match=r"images\.front: another size than earlier in this episode"):
        ask(policy, 2.0, images={"front": picture(2, 8, 8)})
    assert seen(bench.answer(ask(policy, 3.0, images={"front": picture(2, 8, 8)}, episode_id="f"))) == [3, 3]


def test_p21_the_prefix_cache_knows_the_past() -> None:
    policy = history_policy(2, staged=True)
    assert isinstance(policy, DecomposedPolicy)
    bench = Bench(policy)
    same = {"images": {"front": picture(0)}}
    caches = [bench.answer(ask(policy, float(i), **same, state=[0.0, 0.0])).cache for i in (1, 2, 3)]
    assert caches == ["miss", "hit", "hit"]
    other = [bench.answer(ask(policy, float(i), images={"front": picture(7)})).cache for i in (4, 5, 6)]
    assert other == ["miss", "miss", "hit"]  # (0, 7), (7, 7), (7, 7)


@pytest.mark.parametrize("compose", ["alone", "recorded"])
@pytest.mark.parametrize("staged", KINDS)
def test_p24_a_recorded_episode_gives_the_same_answers_again(tmp_path: Path, staged: bool, compose: Any) -> None:
    def fresh() -> Policy:
        return history_policy(3, staged)

    async def robot(served: Served) -> None:
        policy = served.policies["prod"]
        for i in range(1, 6):
            give_up = i == 3
            fields = {"images": {"front": picture(i)}, "state": [float(i), 0.0], "episode_id": "e"}
            await served.ask(request_id=f"r{i}", give_up=give_up, **fields)
        assert policy.history is not None
        assert [m.request_id for m in policy.history.before("e", moment("new", 1e18))] == ["r4", "r5"]

    recording = read_journal(serve(Served(tmp_path, [fresh()]), robot))
    pasts = {line.request.request_id: line.request.past for line in recording.requests}
    assert {name: pasts[name] for name in ("r1", "r2", "r4", "r5")} == {
        "r1": None, "r2": ["r1"], "r4": ["r1", "r2"], "r5": ["r2", "r4"],
    }  # fmt: skip

    def make(slot: str) -> Any:
        policy = fresh()
        return policy, served_by(policy)

    replayed = replay_model(recording, make, compose=compose)
    assert [item.error for item in replayed.items] == [""] * 4
    assert all(item.equal for item in replayed.items)
    last = replay_model(recording, make, compose=compose, limit=None)
    assert not last.failed("actions")
    recording.requests[:] = [line for line in recording.requests if line.request.request_id != "r2"]
    cut = replay_model(recording, make, compose=compose)
    assert {item.request_id: bool(item.error) for item in cut.items} == {"r1": False, "r4": True, "r5": True}
    assert "looks back to request r2" in next(item.error for item in cut.items if item.error)
