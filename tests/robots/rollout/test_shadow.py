"""Who is sampled, and how far apart two answers are."""

from __future__ import annotations

import time
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.batch import SchedulerPaused
from reflex_runtime.robots.serving.shadow import ShadowDivergence, Shadowing, difference, sampled


def test_v10_the_sample_is_the_share_asked_for_and_the_same_every_time() -> None:
    ids = [f"req-{i}" for i in range(20_000)]
    taken = {i for i in ids if sampled(i, 0.1)}
    assert 0.092 < len(taken) / len(ids) < 0.108
    assert taken == {i for i in ids if sampled(i, 0.1)}
    assert taken < {i for i in ids if sampled(i, 0.5)}  # a larger share keeps those it had
    assert not any(sampled(i, 0.0) for i in ids)
    assert all(sampled(i, 1.0) for i in ids)


def test_v10_divergence_is_told_per_joint_and_per_step() -> None:
    served = np.zeros((2, 3), np.float32)
    shadow = np.array([[1, 0, 0], [3, 0, -2]], np.float32)
    found = difference(served, shadow)
    assert found is not None
    assert (found["mean"], found["largest"]) == (1.0, 3.0)
    assert found["per_joint"] == [2.0, 0.0, 1.0]
    assert found["per_step"] == pytest.approx([1 / 3, 5 / 3])


def test_v10_means_run_over_all_that_compare_and_the_others_are_counted() -> None:
    divergence, one = ShadowDivergence(), np.zeros((1, 2), np.float32)
    for shadow in (np.array([[2, 4]], np.float32), one):
        divergence.add(difference(one, shadow))
    told = divergence.snapshot()
    assert (told["compared"], told["unpaired"]) == (2, 0)
    assert told["per_joint"] == [1.0, 2.0]
    assert (told["largest"], told["mean"]) == (4.0, 1.5)
    assert difference(one, np.full((1, 2), np.nan, np.float32)) is None
    divergence.add(None)
    assert (divergence.compared, divergence.unpaired) == (2, 1)


def test_v10_policies_of_other_dimensions_are_compared_where_they_meet() -> None:
    found = difference(np.ones((4, 3), np.float32), np.zeros((2, 2), np.float32))
    assert found is not None
    assert (len(found["per_step"]), len(found["per_joint"]), found["mean"]) == (2, 2, 1.0)


def test_v10_means_begin_again_where_another_policy_has_other_dimensions() -> None:
    divergence = ShadowDivergence()
    for joints, apart in ((2, 9.0), (2, 9.0), (3, 2.0), (3, 4.0)):
        divergence.add(difference(np.zeros((1, joints), np.float32), np.full((1, joints), apart, np.float32)))
    told = divergence.snapshot()
    assert told["per_joint"] == [3.0, 3.0, 3.0]
    assert told["per_step"] == [6.0]


def test_v10_a_shadow_that_was_late_is_stopped_until_its_rest_is_over() -> None:
    slot: Any = SimpleNamespace(group="shadow")
    none: Any = None
    said: list[str] = []
    shadow = Shadowing(slot, none, none, none, 1.0, none, said.append)
    now = time.monotonic()
    shadow(SchedulerPaused(now, "shadow", None, inf))
    assert shadow.verdict == "stopped"
    shadow(SchedulerPaused(now, "shadow", None, now + 60.0))  # its thread came back
    assert shadow.verdict == "stopped"
    shadow(SchedulerPaused(now - 60.0, "shadow", None, now - 0.001))
    assert shadow.verdict == "ok"
    shadow(SchedulerPaused(now, "prod", None, inf))
    assert shadow.verdict == "ok"
    assert said == ["stopped: its thread was lost", *["was late and rests for 60 s"] * 2]
