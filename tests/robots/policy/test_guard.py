"""The action guard: inside the ranges, finite, and never made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import Batch, Done, More
from reflex_runtime.core.errors import NonFiniteResult
from reflex_runtime.robots import ActionChunk, Embodiment, load_policy, served_by
from reflex_runtime.robots.policy.processors import ActionGuard, GuardedProcessor
from reflex_runtime.run.processor import BaseProcessor
from robots.tiny import Bench, asked, value, write_export

NAN, INF = float("nan"), float("inf")
ARM = Embodiment("arm", action_ranges=np.array([[-1, 1], [0, 2]], np.float32), action_names=("shoulder", "gripper"))


def chunk(*rows: Any) -> ActionChunk:
    return ActionChunk(np.array(rows, np.float32), 5)


def test_e3_values_inside_pass_unchanged_and_say_so() -> None:
    checked = ActionGuard(ARM).check(chunk([1.0, 0.0], [-1.0, 2.0]), "e")
    assert checked.actions.tolist() == [[1.0, 0.0], [-1.0, 2.0]]
    assert checked.guard == {"clamped": 0, "joints": [], "held": False}


def test_e3_values_outside_are_clamped_with_a_report() -> None:
    guard = ActionGuard(ARM)
    sent = chunk([0.5, -3.0], [0.25, 9.0])
    checked = guard.check(sent, "e")
    assert checked.actions.tolist() == [[0.5, 0.0], [0.25, 2.0]]
    assert checked.guard == {"clamped": 2, "joints": ["gripper"], "held": False}
    assert sent.actions.tolist() == [[0.5, -3.0], [0.25, 9.0]]


def test_e3_without_ranges_nothing_is_clamped_and_joints_are_numbers() -> None:
    guard = ActionGuard(Embodiment())
    assert guard.check(chunk([1e9, -1e9]), "e").actions.tolist() == [[1e9, -1e9]]
    with pytest.raises(NonFiniteResult, match=r"not finite \(joints 1\)"):
        guard.check(chunk([0.0, NAN]), "e")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_e3_not_finite_is_an_error_and_never_clamped(bad: float) -> None:
    guard = ActionGuard(ARM)
    guard.check(chunk([0.5, 0.5]), "e")
    with pytest.raises(NonFiniteResult, match=r"not finite \(joints shoulder\)"):
        guard.check(chunk([bad, 0.5]), "e")


def test_e3_hold_repeats_the_episodes_last_good_action() -> None:
    guard = ActionGuard(ARM, on_bad_action="hold")
    guard.check(chunk([0.25, 0.5], [0.5, 5.0]), "e")
    held = guard.check(chunk([NAN, 0.0], [0.0, 0.0]), "e")
    assert held.actions.tolist() == [[0.5, 2.0], [0.5, 2.0]]  # the last one, as clamped
    assert held.guard == {"clamped": 1, "joints": ["shoulder"], "held": True}
    again = guard.check(chunk([INF, 0.0], [0.0, 0.0]), "e")
    assert again.actions.tolist() == held.actions.tolist()


@pytest.mark.parametrize("episode", ["", "other"])
def test_e3_hold_without_a_last_good_action_is_an_error(episode: str) -> None:
    guard = ActionGuard(ARM, on_bad_action="hold")
    guard.check(chunk([0.25, 0.5]), "e")
    guard.check(chunk([0.25, 0.5]), "")
    with pytest.raises(NonFiniteResult, match="the episode has no good action to hold"):
        guard.check(chunk([NAN, 0.0]), episode)


def test_e3_hold_remembers_a_bounded_number_of_episodes() -> None:
    guard = ActionGuard(ARM, on_bad_action="hold", max_episodes=2)
    for episode in ("a", "b", "a", "c"):
        guard.check(chunk([0.25, 0.5]), episode)
    for episode in ("a", "c"):
        assert guard.check(chunk([NAN, 0.0]), episode).guard is not None
    with pytest.raises(NonFiniteResult):
        guard.check(chunk([NAN, 0.0]), "b")


def test_e3_hold_forgets_an_episode_that_ended_and_no_other() -> None:
    guard = ActionGuard(ARM, on_bad_action="hold")
    for episode in "abc":
        guard.check(chunk([0.25, 0.5]), episode)
    guard.forget("a")
    guard.forget("unknown")
    with pytest.raises(NonFiniteResult, match="no good action to hold"):
        guard.check(chunk([NAN, 0.0]), "a")
    assert guard.check(chunk([NAN, 0.0]), "b").guard is not None
    guard.forget()
    for episode in "bc":
        with pytest.raises(NonFiniteResult):
            guard.check(chunk([NAN, 0.0]), episode)


def test_e3_guards_of_two_slots_know_nothing_of_each_other() -> None:
    a, b = (ActionGuard(ARM, "hold") for _ in "ab")
    a.check(chunk([0.25, 0.5]), "e")
    with pytest.raises(NonFiniteResult):
        b.check(chunk([NAN, 0.0]), "e")


class Poisoned(BaseProcessor):
    """A policy whose actions are NaN for the requests named."""

    def __init__(self, inner: Any, bad: set[str]) -> None:
        self.inner, self.bad = inner, bad

    def run(self, batch: Batch) -> Any:
        results = list(self.inner.run(batch))
        for i, ticket in enumerate(batch.grants):
            if isinstance(results[i], Done) and ticket.id in self.bad:
                results[i] = Done(ActionChunk(results[i].value.actions * NAN, 5))
        return results

    def drop(self, tickets: Any) -> None:
        self.inner.drop(tickets)


@pytest.mark.parametrize("kind", ["monolithic", "decomposed"])
def test_b18_non_finite_actions_are_that_items_fault(tmp_path: Path, kind: str) -> None:
    policy = load_policy(write_export(tmp_path, kind))
    guarded = GuardedProcessor(Poisoned(policy, {"request-1"}), ActionGuard(policy.spec.embodiment))
    bench = Bench(policy, guarded)
    tickets = [bench.submit(asked(policy, i)) for i in range(3)]
    bench.drain()
    assert {len(b) for b in bench.batches} == {3}
    assert all("bisect_calls" not in b.notes for b in bench.batches)
    with pytest.raises(NonFiniteResult):
        value(tickets[1])
    assert [value(tickets[i]).guard["held"] for i in (0, 2)] == [False, False]


def test_e3_served_policies_are_guarded_by_their_embodiment(tmp_path: Path) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["action_norm"]["std"] = [0.5, 50.0]

    policy = load_policy(write_export(tmp_path, change=change))
    answer = Bench(policy, served_by(policy)).answer(asked(policy, 0))
    assert answer.guard is not None
    assert answer.guard["joints"] == ["gripper"]
    assert np.abs(answer.actions[:, 1]).max() == 0.5


def test_the_guard_leaves_everything_but_chunks_alone() -> None:
    class Odd(BaseProcessor):
        def run(self, batch: Batch) -> Any:
            return odd

    guarded = GuardedProcessor(Odd(), ActionGuard(ARM))
    odd: list[Any] = [More(), ValueError("x"), Done("text")]

    class Ticket:
        class request:  # noqa: N801
            payload = None

    batch: Any = type("B", (), {"grants": {Ticket(): 1.0, Ticket(): 1.0, Ticket(): 1.0}})()
    assert guarded.run(batch) == odd
    odd.pop()
    assert guarded.run(batch) == odd  # a wrong number of results is for run_batch to judge
