"""A group that only uses gaps: it starts when nobody of the others is likely to ask before its batch ends."""

from __future__ import annotations

import random
from math import exp, inf, log

import pytest

from reflex_runtime.core.batch import Done
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler

TAU = 0.5
STEP = 0.050  # the estimate of a batch nobody has measured


def _scheduler(chance: float = 0.5) -> Scheduler:
    flush = FlushPolicy.window(0.1, 0.0, 1)
    return Scheduler(
        [GroupConfig(name="prod", flush=flush), GroupConfig(name="shadow", flush=flush, weight=0.0, gap_chance=chance)]
    )


def _serve(scheduler: Scheduler, now: float) -> None:
    """Everything of prod that waits, in no time."""
    while (batch := scheduler.next_batch(now)) is not None and batch.group == "prod":
        scheduler.complete(batch, [Done()] * len(batch), 0.0, now)
    assert batch is None


def test_v10_a_shadow_starts_at_once_when_nobody_has_asked_lately() -> None:
    scheduler = _scheduler()
    scheduler.submit(Request(group="shadow"), 0.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert batch.group == "shadow"


def test_v10_it_waits_while_a_gap_is_unlikely_and_wake_says_how_long() -> None:
    scheduler = _scheduler()
    for i in range(40):  # 100 a second: five are expected within a step of 50 ms
        scheduler.submit(Request(group="prod"), i * 0.01)
        _serve(scheduler, i * 0.01)
    now = 0.39
    scheduler.submit(Request(group="shadow"), now)
    assert scheduler.next_batch(now) is None
    count = sum(exp((i * 0.01 - now) / TAU) for i in range(40))
    expected = now + TAU * log(count * STEP / TAU / log(2))
    assert scheduler.wake_at() == pytest.approx(expected)
    assert scheduler.next_batch(scheduler.wake_at() - 1e-6) is None
    batch = scheduler.next_batch(scheduler.wake_at())
    assert batch is not None
    assert batch.group == "shadow"


def test_v10_who_is_served_goes_first_whenever_it_comes() -> None:
    scheduler = _scheduler()
    scheduler.submit(Request(group="shadow"), 0.0)
    scheduler.submit(Request(group="prod"), 0.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert batch.group == "prod"


def test_v10_a_drain_runs_what_is_left_without_waiting_for_a_gap() -> None:
    scheduler = _scheduler()
    for i in range(100):
        scheduler.submit(Request(group="prod"), i * 0.001)
        _serve(scheduler, i * 0.001)
    scheduler.submit(Request(group="shadow"), 0.1)
    assert scheduler.next_batch(0.1) is None
    scheduler.close(0.1)
    assert scheduler.next_batch(0.1) is not None


@pytest.mark.parametrize("seed", range(20))
def test_v10_every_shadow_batch_had_a_likely_gap(seed: int) -> None:
    """Random histories against the rule written slowly: at most ln(1/chance) arrivals expected in the step."""
    rng = random.Random(seed)
    chance = rng.choice([0.3, 0.5, 0.9])
    scheduler = _scheduler(chance)
    now, asked, ran, put_off = 0.0, [], 0, 0
    for i in range(300):
        now += rng.expovariate((3.0, 300.0, 30.0)[i // 25 % 3])
        if rng.random() < 0.3:
            scheduler.submit(Request(group="shadow"), now)
        else:
            asked.append(now)
            scheduler.submit(Request(group="prod"), now)
        while True:
            batch = scheduler.next_batch(now)
            rate = sum(exp((t - now) / TAU) for t in asked) / TAU
            if batch is None:
                if scheduler.queued("shadow"):
                    put_off += 1
                    assert not scheduler.queued("prod")
                    assert now < scheduler.wake_at() < inf
                break
            if batch.group == "shadow":
                ran += 1
                assert not scheduler.queued("prod")
                assert rate * batch.expected <= log(1 / chance) * (1 + 1e-9)
            now += batch.expected if batch.group == "shadow" else 0.001
            scheduler.complete(batch, [Done()] * len(batch), STEP, now)
    assert ran
    assert put_off


def test_v10_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gap_chance=0\.5: must be in"):
        GroupConfig(gap_chance=0.5)
    with pytest.raises(ConfigError, match=r"gap_chance=1\.0"):
        GroupConfig(weight=0.0, gap_chance=1.0)


def test_v10_where_costs_are_no_times_there_is_nothing_to_predict() -> None:
    flush = FlushPolicy.by_size(1, 0.0)
    shadow = GroupConfig(name="shadow", flush=flush, cost=UnitCost, weight=0.0, gap_chance=0.5)
    scheduler = Scheduler([GroupConfig(name="prod"), shadow])
    scheduler.submit(Request(group="shadow"), 0.0)
    assert scheduler.next_batch(0.0) is not None
