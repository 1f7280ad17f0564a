"""Callers that wait for their answers, more than fit into 100 ms: batches are as long as their fixed part is worth."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from reflex_runtime.core.flush import BUDGET, FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim.run import Affine, Noisy, simulate
from reflex_runtime.sim.workload import Around, Callers, Fixed, Open, Poisson


def test_one_batch_of_all_where_they_are_back_within_the_fixed_part() -> None:
    """16 + 1.2n ms: 128 of them take 170 ms. One batch spares the second fixed part."""
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    callers = Callers(128, Around(0.002, 0.0002))
    done = simulate(Scheduler([config]), [callers], Affine(0.016, 0.0012), duration=4.0, warmup=2.0, seed=1)
    sizes = [ran.size for ran in done.batches if 2.0 <= ran.started < 3.5][-5:]
    assert sizes == [128] * 5


@pytest.mark.parametrize(("callers", "even"), [(128, 64), (200, 100), (250, 84), (330, 110)])
def test_callers_that_do_not_fit_into_one_batch_share_few_of_equal_size(callers: int, even: int) -> None:
    """35.5 + 4.45n ms: 119 fit. In batches of 119 the nine left over wait for two of 567 ms."""
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    crowd, device = Callers(callers, Fixed(0.002)), Noisy(Affine(0.0355, 0.00445), 0.03)
    done = simulate(Scheduler([config]), [crowd], device, duration=12.0, warmup=4.0, seed=1)
    assert {ran.size for ran in done.batches if 4.0 <= ran.started < 10.0} == {even}
    longest = max(end.latency for end in done.answers if end.arrived >= 4.0)
    assert longest < 1.1 * ceil(callers / even) * (0.0355 + 0.00445 * even)


def test_callers_of_a_model_in_steps_wait_where_they_do_not_fit_beside_residents() -> None:
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    crowd, device = Callers(60, Around(0.3, 0.1), Request(wants=5.0)), Affine(0.0355, 0.00445)
    done = simulate(Scheduler([config]), [crowd], device, duration=6.0, seed=1)
    assert len(done.answers) > 200


def test_a_batch_is_no_even_part_where_that_makes_others_late() -> None:
    """Three batches of 84 take 1.23 s, and of 119, 119 and 12 almost all are answered in 1.2 s."""
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    crowd, device = Callers(250, Fixed(0.002), Request(time_limit=1.2)), Noisy(Affine(0.0355, 0.00445), 0.03)
    done = simulate(Scheduler([config]), [crowd], device, duration=16.0, seed=1)
    refused = [end for end in done.answers if end.arrived >= 6.0 and end.outcome != "ok"]
    assert len(refused) < 400


def test_callers_that_were_served_before_anything_was_measured_wait_no_longer_for_it() -> None:
    """They are charged a guess of 50 ms, ten times what a request of a full batch costs."""
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    crowd, device = Callers(250, Fixed(0.002)), Noisy(Affine(0.0355, 0.00445), 0.03)
    done = simulate(Scheduler([config]), [crowd], device, duration=12.0, seed=1)
    assert max(end.latency for end in done.answers) < 2.5


def test_callers_that_come_once_fill_the_largest_batch() -> None:
    """Nobody is expected back: even parts of those that wait would cost the rate that they need."""
    config = GroupConfig(flush=FlushPolicy.window(None), controller=Planner())
    device = Noisy(Affine(0.0355, 0.00445), 0.03)
    done = simulate(Scheduler([config]), [Open(Poisson(300.0), strangers=True)], device, duration=6.0, seed=1)
    assert min(ran.size for ran in done.batches if 3.0 <= ran.started < 6.0) > 110


def planned(base: FlushPolicy, fixed: float, marginal: float, modest: bool = False) -> float:
    """The budget after three seconds in which 128 callers were here. modest: they are one client, beside another that
    asks ten times a second."""
    planner = Planner()
    for i in range(3000):
        client = i % 128 if not modest else "modest" if i % 100 == 0 else "greedy"
        planner.arrived(Ticket(Request(client=client), i, i / 1e3), i / 1e3)
    return planner.policy(base, lambda: (fixed, marginal, 0.03), 3.0, "").max_batch_cost


DEFAULT = FlushPolicy.window(None)
SHARED = replace(DEFAULT, times_fixed=Planner.SHARED)


@pytest.mark.parametrize(
    ("base", "fixed", "budget"),
    [
        (DEFAULT, 0.0125, 0.200),
        (DEFAULT, 0.005, BUDGET),
        (DEFAULT, 0.3, Planner.LONGEST),
        (SHARED, 0.0125, BUDGET),
        (SHARED, 0.060, 0.120),
        (FlushPolicy.window(0.150), 0.0125, 0.150),
    ],
    ids=["sixteen times", "brief", "two seconds", "other policies wait", "twice", "given"],
)
def test_batches_take_sixteen_times_the_fixed_part_unless_others_wait(
    base: FlushPolicy, fixed: float, budget: float
) -> None:
    assert planned(base, fixed, 0.0018) == pytest.approx(budget)


def test_a_client_that_asks_for_more_than_its_share_gets_no_longer_batches_while_another_waits() -> None:
    assert planned(DEFAULT, 0.0124, 0.0018, modest=True) == BUDGET
