"""The generate batcher's one rule, in virtual time: requests wait until half of the running step is over."""

from __future__ import annotations

from math import exp

import pytest

from ipc.closed_loop import ClosedLoop
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.ipc.generate_batcher import StepHold
from thinned import thinned

BASE = FlushPolicy(max_batch_size=16, hold_max=(0.0, 0.003, 0.005))
AT_ONCE = FlushPolicy(max_batch_size=16)
SHARED, ALONE = ("m", "", ""), ("m", "", "", "options")


def rule(steps: StepHold, now: float, partition: object = SHARED) -> FlushPolicy:
    return steps.policy(BASE, lambda: (0.0, 0.0, 0.0), now, partition)


def stepping(step: float = 0.008, computes: bool = True) -> StepHold:
    """A step of so many seconds begins at 1.0."""
    steps = StepHold(lambda: computes, 0.00075)
    steps.took(step)
    steps.begins(1.0)
    return steps


def test_requests_wait_until_half_of_the_step_is_over() -> None:
    steps = stepping()
    assert rule(steps, 1.0005).until == rule(steps, 1.003).until == pytest.approx(1.004)
    assert rule(steps, 1.0005).hold_max == BASE.hold_max
    assert rule(steps, 1.0034) == AT_ONCE, "too short a hold"
    assert rule(steps, 1.005) == AT_ONCE


def test_between_steps_before_the_first_step_and_alone_nothing_waits() -> None:
    assert rule(stepping(computes=False), 1.0005) == AT_ONCE
    assert rule(stepping(step=0.0059), 1.0) == AT_ONCE
    assert rule(StepHold(lambda: True, 0.00075), 1.0) == AT_ONCE
    assert rule(stepping(), 1.0005, ALONE) == FlushPolicy(max_batch_size=1)


def test_the_tokens_of_a_step_come_one_by_one_and_the_first_begins_the_next() -> None:
    steps = stepping()
    for late in (0.0, 0.0003, 0.0039):
        steps.begins(1.008 + late)
    assert rule(steps, 1.009).until == pytest.approx(1.012)


def test_the_length_of_a_step_is_a_mean_that_follows() -> None:
    steps = stepping()
    steps.took(0.016)
    assert rule(steps, 1.0).until == pytest.approx(1.005)  # half of 10 ms


@pytest.mark.parametrize("callers", [8, 16, 32])
@pytest.mark.parametrize("step", [0.008, 0.030])
def test_g12_real_lengths_save_what_can_be_saved_and_no_first_token_comes_later(callers: int, step: float) -> None:
    """Callers that come back when their own answer ends: as many share a message as begin in one step."""
    seconds = 500 * step
    batched = ClosedLoop(callers, step, (4, 40)).run(seconds)
    single = ClosedLoop(callers, step, (4, 40), batched=False).run(seconds)
    assert single.saved == 0.0
    assert batched.saved >= single.most - 0.03
    assert batched.first <= 1.03 * single.first
    together = callers / 23.5  # of 22 tokens in the mean, and a step and a half between answer and first token
    assert single.most == pytest.approx(1.0 - (1.0 - exp(-together)) / together, abs=0.04)


@pytest.mark.parametrize(("callers", "saved"), [(8, 0.7), (16, 0.8), (32, 0.8)])
def test_g12_callers_whose_answers_are_equally_long_share_most_messages(callers: int, saved: float) -> None:
    batched = ClosedLoop(callers, 0.008, (16, 16)).run(4.0)
    single = ClosedLoop(callers, 0.008, (16, 16), batched=False).run(4.0)
    assert batched.saved >= saved
    assert batched.first <= 1.05 * single.first


@pytest.mark.parametrize("tokens", [(16, 16), (4, 40)])
@pytest.mark.parametrize("callers", thinned([1, 2, 8, 32], [1, 8]))
def test_g12_where_steps_are_short_no_first_token_comes_later_either(callers: int, tokens: tuple[int, int]) -> None:
    batched = ClosedLoop(callers, 0.002, tokens).run(3.0)
    single = ClosedLoop(callers, 0.002, tokens, batched=False).run(3.0)
    assert batched.first <= 1.05 * single.first
