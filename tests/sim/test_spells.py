"""A device that is slow for a while, or stalls: who is refused meanwhile, and how soon everybody is served again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random

import pytest
from bench.sim.loads import Drifting

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim import (
    Affine,
    Callers,
    Fixed,
    Noisy,
    Open,
    Poisson,
    RequestEnd,
    Run,
    Service,
    WorkloadPart,
    simulate,
)
from thinned import thinned

DEVICE = Noisy(Affine(0.020, 0.002), 0.03)
BEGINS, SERVED = 4.0, 900  # when the spell begins, and how many requests the device is watched for after it


@dataclass(frozen=True)
class Slow:
    """The first `count` batches take so many seconds each."""

    inner: Service
    seconds_each: float
    count: int = 1

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        return self.seconds_each if batch.id <= self.count else self.inner.seconds(batch, now, rng)


def served(limit: float, rate: float = 150.0) -> list[WorkloadPart]:
    return [Open(Poisson(rate), [Request(client=i, time_limit=limit) for i in range(8)])]


def scheduler(cost: Callable[[], TimeCost] = TimeCost, flush: FlushPolicy | None = None) -> Scheduler:
    flush = FlushPolicy.window(0.100, 0.005) if flush is None else flush
    return Scheduler([GroupConfig(flush=flush, cost=cost, controller=Planner())])


def on_time(answers: Sequence[RequestEnd]) -> float:
    return sum(a.on_time for a in answers) / len(answers)


def since(run: Run, healthy: float) -> float:
    """The on-time share from two seconds after the device is healthy on."""
    after = [a for a in run.answers if healthy + 2.0 <= a.arrived < run.duration]
    assert len(after) >= 100
    return on_time(after)


@cache
def usual(limit: float, rate: float) -> float:
    """The same where nothing ever happens to the device."""
    return since(simulate(scheduler(), served(limit, rate), DEVICE, duration=BEGINS + 3000 / rate), BEGINS)


def healthy_from(run: Run, ends: float) -> float:
    """When the last slow batch came back."""
    return max([ends, *(b.started + b.seconds for b in run.batches if b.started < ends)])


@pytest.mark.parametrize("limit", thinned([0.030, 0.100, 0.150], [0.100]))
@pytest.mark.parametrize("length", thinned([0.3, 1.0, 20.0], [1.0]))
@pytest.mark.parametrize("factor", thinned([2.0, 5.0, 30.0, 200.0], [2.0, 30.0]))
def test_b17_after_a_slow_spell_everybody_is_served_again_within_two_seconds(
    factor: float, length: float, limit: float
) -> None:
    ends = BEGINS + length
    device = Drifting(DEVICE, factor, at=BEGINS, until=ends)
    rate = 150.0 if limit > 0.050 else 30.0
    run = simulate(scheduler(), served(limit, rate), device, duration=ends + 0.1 * factor + SERVED / rate)
    assert since(run, healthy_from(run, ends)) >= 0.95 * usual(limit, rate)


@pytest.mark.parametrize(
    "flush", [FlushPolicy.window(0.100, 0.005), FlushPolicy.by_cost(0.100, 0.005)], ids=["window", "by_cost"]
)
@pytest.mark.parametrize("affine", thinned([True, False], [True]), ids=["affine", "median"])
def test_b17_it_does_not_depend_on_the_rule_or_the_model(flush: FlushPolicy, affine: bool) -> None:
    device = Drifting(DEVICE, 10.0, at=BEGINS, until=BEGINS + 10.0)
    run = simulate(scheduler(partial(TimeCost, affine=affine), flush), served(0.100, 50.0), device, duration=40.0)
    assert since(run, healthy_from(run, BEGINS + 10.0) + 2.0) >= 0.9


@pytest.mark.parametrize("count", thinned([1, 3, 8], [3]))
def test_b17_slow_first_batches_lock_nobody_out(count: int) -> None:
    run = simulate(scheduler(), served(0.100), Slow(DEVICE, 5.0, count), duration=5.0 * count + 15.0)
    slow = [b for b in run.batches if b.seconds == 5.0]
    assert slow
    assert since(run, slow[-1].started + 5.0) >= 0.98


def test_b17_a_slow_spell_costs_callers_that_wait_little_more_than_its_length() -> None:
    device = Drifting(DEVICE, 10.0, at=BEGINS, until=BEGINS + 3.0)
    load: list[WorkloadPart] = [Callers(8, Fixed(0.020), Request(time_limit=0.100))]
    run = simulate(scheduler(), load, device, duration=20.0)
    assert since(run, healthy_from(run, BEGINS + 3.0)) >= 0.98


def test_b17_a_device_that_stays_too_slow_is_tried_once_a_second() -> None:
    device = Drifting(DEVICE, 6.0, at=BEGINS)  # 132 ms for one
    run = simulate(scheduler(), served(0.100), device, duration=65.0)
    late = [b for b in run.batches if b.started > BEGINS + 5.0]
    assert all(b.size == 1 for b in late)
    assert len(late) == pytest.approx(60.0 / 1.132, rel=0.1)
    refused = [a for a in run.answers if a.arrived > BEGINS + 5.0 and a.outcome != "ok"]
    assert all(a.latency == 0.0 for a in refused)  # at once, not after a wait


@pytest.mark.long
@pytest.mark.parametrize(("share", "times"), [(0.05, 50.0), (0.10, 10.0)])
def test_b17_stalls_do_not_end_in_refusing_everybody(share: float, times: float) -> None:
    """Compared with a scheduler that knows the usual times and never learns from a stall."""

    class Knowing(TimeCost):
        def observe(self, batch: Batch, elapsed: float) -> None:
            super().observe(batch, 0.020 + 0.002 * len(batch))

    device = Noisy(Affine(0.020, 0.002), 0.03, stalls=share, stall=times)
    learned, known = (
        sum(on_time(simulate(scheduler(cost), served(0.100), device, duration=20.0, seed=s).answers) for s in range(3))
        for cost in (TimeCost, Knowing)
    )
    assert learned >= 0.9 * known
    assert known > 0.6


def test_b17_one_shape_is_not_locked_out_beside_another_that_keeps_the_device_busy() -> None:
    slow = Request(client="slow", partition="slow", shape="slow", time_limit=0.150)
    busy = Request(client="busy", partition="busy", shape="busy")

    class Spell:
        def seconds(self, batch: Batch, now: float, rng: Random) -> float:
            spell = batch.partition == "slow" and BEGINS <= now < BEGINS + 3.0
            return DEVICE.seconds(batch, now, rng) * (20.0 if spell else 1.0)

    load = [Open(Poisson(20.0), [slow]), *[Callers(4, Fixed(0.0), busy)]]
    run = simulate(scheduler(), load, Spell(), duration=20.0)
    healthy = healthy_from(run, BEGINS + 3.0)
    run.answers = [a for a in run.answers if a.request.client == "slow"]
    assert any(a.outcome != "ok" for a in run.answers)
    assert since(run, healthy) >= 0.95
