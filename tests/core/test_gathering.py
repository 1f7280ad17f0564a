"""Callers that come back soon are gathered into one batch (contract B6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim import Affine, Around, Arrival, Callers, Fixed, Noisy, RequestStream, simulate

from .helpers import ask, finish, scheduler_of, take, trained
from .one_core import OneCore


@pytest.mark.parametrize(
    ("callers", "decoding", "least"),
    [
        pytest.param(8, 0.0013, 7.5, id="8_png"),
        pytest.param(8, 0.00035, 7.5, id="8_jpeg", marks=pytest.mark.long),
        pytest.param(32, 0.00035, 28.0, id="32_jpeg", marks=pytest.mark.long),
    ],
)
def test_callers_with_pictures_share_one_batch_where_one_core_decodes_and_runs(
    callers: int, decoding: float, least: float
) -> None:
    run = OneCore(callers, decoding, fixed=0.009, marginal=0.0014).run(20.0)
    assert run.mean_batch >= least


class Late:
    """A caller whose first request comes at a given time."""

    waits = True

    def __init__(self, caller: RequestStream, at: float) -> None:
        self._caller, self._at = caller, at

    def next(self, now: float) -> Arrival | None:
        arrival, at, self._at = self._caller.next(now), self._at, -1.0
        return arrival if at < 0.0 or arrival is None else arrival._replace(at=at)


class TwoGroups:
    """Eight callers in two groups of four from the start."""

    def streams(self, seed: str) -> list[RequestStream]:
        callers = Callers(8, Around(0.008, 0.003)).streams(seed)
        return [Late(caller, 0.0001 * i + 0.030 * (i >= 4)) for i, caller in enumerate(callers)]


@pytest.mark.parametrize(
    ("fixed", "marginal"), [(0.002, 0.008), pytest.param(0.016, 0.0012, marks=pytest.mark.long)]
)
def test_callers_do_not_stay_in_two_groups_after_a_fixed_slow_down(fixed: float, marginal: float) -> None:
    """60 ms more from the first request on: until a batch of another size ran, nothing tells them from 15 ms a row."""
    usual = Affine(fixed, marginal)
    for seed in range(20):
        scheduler = scheduler_of(
            flush=FlushPolicy.window(None), controller=Planner(), cost=lambda: trained(fixed, marginal, sizes=(1, 2, 4))
        )
        run = simulate(
            scheduler, TwoGroups(), Noisy(replace(usual, fixed=fixed + 0.060), 0.03), duration=4.0, seed=seed
        )
        sizes = [batch.size for batch in run.batches if batch.started >= 1.0]
        assert sum(sizes) / len(sizes) >= 7.4, seed


@pytest.mark.parametrize(("callers", "least"), [(8, 1700.0), (32, 3900.0)])
def test_callers_that_come_back_one_by_one_are_one_group_only_if_that_is_faster(callers: int, least: float) -> None:
    """0.15 ms from one to the next, 2 ms of fixed part: for 8 one group is faster (1,860/s), for 32 two are (4,440)."""
    workload = [Callers(1, Fixed(0.0003 + 0.00015 * i), name=str(i)) for i in range(callers)]
    scheduler = scheduler_of(flush=FlushPolicy.window(None), controller=Planner())
    run = simulate(scheduler, workload, Affine(0.002, 0.0001), duration=4.0)
    assert sum(1.0 <= answer.ended < 4.0 for answer in run.answers) / 3.0 >= least


def test_one_caller_never_waits() -> None:
    run = OneCore(1, 0.0013, fixed=0.009, marginal=0.0014, noise=0.0).run(10.0)
    assert max(run.latencies) == pytest.approx(0.009 + 0.0014 + 0.0013, abs=1e-6)


def test_clients_of_small_batches_are_charged_as_others() -> None:
    """128 callers on a device with noise: none waits for two rounds while others are served."""
    run = OneCore(128, 0.0013, fixed=0.009, marginal=0.0014).run(20.0)
    latencies = sorted(run.latencies)
    assert latencies[int(0.99 * len(latencies))] <= 1.35 * latencies[len(latencies) // 2]


def four_that_come_back() -> tuple[Scheduler, float]:
    """A scheduler that knows four callers, and when they are due."""
    scheduler = scheduler_of(flush=FlushPolicy.window(0.1), cost=lambda: trained(0.020, 0.002))
    now = 0.0
    for _ in range(4):
        for client in range(4):
            ask(scheduler, now, client=client)
        batch = take(scheduler, now)
        finish(scheduler, batch, now + 0.028, 0.028)
        now += 0.030
    return scheduler, now


def test_an_expected_arrival_that_fills_the_room_changes_the_decision() -> None:
    scheduler, now = four_that_come_back()
    scheduler.set_room("default", 2, now)
    ask(scheduler, now, client=0)
    assert scheduler.next_batch(now) is None
    ask(scheduler, now + 0.0001, client=1)
    assert not scheduler.decision_current
    assert len(take(scheduler, now + 0.0001)) == 2


def test_arrivals_that_are_expected_do_not_change_the_decision() -> None:
    """So they need not wake the device: the hold is decided with the first one and ends with the last."""
    scheduler, now = four_that_come_back()
    current = []
    for client in range(4):
        ask(scheduler, now + 0.0001 * client, client=client)
        current.append(scheduler.decision_current)
        scheduler.next_batch(now + 0.0001 * client)
    assert current == [False, True, True, False]
