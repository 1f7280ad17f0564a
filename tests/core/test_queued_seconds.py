"""A limit on the predicted device time that waits: what bounds the wait where capacity counts requests only."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from reflex_runtime.core.batch import Done
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError, QueueFull
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, scheduler_of, trained

FIXED, EACH, BUDGET = 0.02, 0.01, 0.1  # a full batch holds 8: 12.5 ms each


def learned(limit: float = 2.0, **config: Any) -> Scheduler:
    """An idle scheduler that has learned its device."""
    model = TimeCost()
    flush = FlushPolicy.window(BUDGET, 0.0)
    teaching, now = scheduler_of(flush=flush, cost=lambda: model), 0.0
    for size in (1, 2, 3, 4, 5, 6, 7, 8) * 4:
        for _ in range(size):
            ask(teaching, now=now)
        while (batch := teaching.next_batch(now)) is not None:
            took = FIXED + EACH * len(batch)
            now += took
            teaching.complete(batch, [Done()] * len(batch), took, now)
    return scheduler_of(flush=flush, cost=lambda: model, max_queued_seconds=limit, **config)


def admitted(scheduler: Scheduler, most: int = 1000, **request: Any) -> int:
    """How many of these wait until one is refused."""
    for count in range(most):
        try:
            ask(scheduler, now=10.0, **request)
        except QueueFull:
            return count
    return most


def test_b13_what_waits_is_bounded_in_seconds_at_the_size_of_full_batches() -> None:
    scheduler = learned(limit=1.0)
    assert admitted(scheduler) == pytest.approx(1.0 / 0.0125, rel=0.06)
    with pytest.raises(QueueFull, match="policy runtime queue at capacity") as refused:
        ask(scheduler, now=10.0)
    details = refused.value.details
    assert (details["policy_id"], details["max_queue"], details["max_queue_s"]) == ("default", 1000, 1.0)
    assert details["queued_s"] == pytest.approx(1.0, abs=0.02)
    assert refused.value.retry_after == 1.0
    assert scheduler.snapshot()["groups"]["default"]["queued_seconds"] == pytest.approx(1.0, abs=0.02)


def test_b13_retry_after_is_the_predicted_time_until_the_queue_is_empty() -> None:
    scheduler = learned(limit=3.0)
    admitted(scheduler)
    with pytest.raises(QueueFull) as refused:
        ask(scheduler, now=10.0)
    assert refused.value.retry_after == pytest.approx(3.0, abs=0.02)


def test_b13_what_waits_is_counted_at_the_size_of_the_batches_that_run() -> None:
    """40 + 4 n ms: 15 fit into 100 ms, 6.7 ms each; 150 into sixteen times the fixed part, 4.3 ms each."""
    model = trained(0.040, 0.004)
    flush = FlushPolicy.window(None, 0.0)
    scheduler = scheduler_of(flush=flush, cost=lambda: model, controller=Planner(), max_queued_seconds=1.0)
    for now in (0.0, 1.0):  # the first batch is formed before anything is planned
        ask(scheduler, now=now)
        batch = scheduler.next_batch(now)
        assert batch is not None
        scheduler.complete(batch, [Done()], 0.044, now + 0.044)
    assert admitted(scheduler) == pytest.approx(1.0 / (0.004 + 0.040 / 150), rel=0.05)


def test_b13_a_guess_refuses_nobody() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(BUDGET), cost=TimeCost, max_queued_seconds=0.2)
    assert admitted(scheduler, 500) == 500


def test_b13_batches_of_one_alone_say_nothing_of_full_ones() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(BUDGET, 0.0), cost=TimeCost, max_queued_seconds=0.2)
    for i in range(5):
        ask(scheduler, now=float(i))
        batch = scheduler.next_batch(float(i))
        assert batch is not None
        scheduler.complete(batch, [Done()], 0.03, i + 0.03)
    assert admitted(scheduler, 500) == 500


def test_b13_the_documented_median_bounds_it_where_it_is_the_cost_model() -> None:
    scheduler = scheduler_of(
        flush=FlushPolicy.window(BUDGET, 0.0), cost=lambda: TimeCost(affine=False), max_queued_seconds=0.9
    )
    for i in range(3):
        ask(scheduler, now=float(i))
        batch = scheduler.next_batch(float(i))
        assert batch is not None
        scheduler.complete(batch, [Done()], 0.03, i + 0.03)
    assert admitted(scheduler) == pytest.approx(30, abs=1)


def test_b13_background_work_is_not_refused_and_keeps_nobody_out() -> None:
    scheduler = learned(limit=0.5)
    assert admitted(scheduler, 200, priority=Priority.BACKGROUND) == 200
    assert admitted(scheduler) == pytest.approx(40, rel=0.06)
    assert admitted(scheduler, 50, priority=Priority.BACKGROUND) == 50


def test_b13_an_urgent_request_waits_for_urgent_ones_alone() -> None:
    scheduler = learned(limit=0.5)
    admitted(scheduler)
    assert admitted(scheduler, priority=Priority.URGENT) >= 20  # an even share of its client's at least


def test_b13_whoever_floods_the_queue_locks_nobody_out() -> None:
    scheduler = learned(limit=1.0)
    flooded = admitted(scheduler, client="greedy")
    assert flooded == pytest.approx(80, rel=0.06)
    assert admitted(scheduler, client="polite") == pytest.approx(40, rel=0.06)  # half of the bound
    assert admitted(scheduler, client="third") == pytest.approx(26, rel=0.06)  # a third
    assert admitted(scheduler, client="greedy") == 0


def test_b13_with_nothing_ahead_anything_may_wait() -> None:
    scheduler = learned(limit=0.001)
    assert admitted(scheduler) == 1


def test_b13_what_leaves_makes_room_however_it_leaves() -> None:
    scheduler = learned(limit=0.055)
    tickets: list[Ticket] = [ask(scheduler, now=10.0) for _ in range(3)]
    tickets.append(ask(scheduler, now=10.0, time_limit=5.0))
    assert admitted(scheduler) == 0
    scheduler.cancel(tickets[0], 10.0)
    assert admitted(scheduler) == 1
    scheduler.expire(15.1)
    assert admitted(scheduler) == 1
    batch = scheduler.next_batch(15.1)
    assert batch is not None
    assert scheduler.snapshot()["groups"]["default"]["queued_seconds"] == 0.0
    assert admitted(scheduler) == pytest.approx(4, abs=1)


def test_b13_one_that_is_prepared_counts_once() -> None:
    scheduler = learned(limit=0.05)
    ticket = scheduler.submit(Request(), 10.0, ready=False)
    waits = scheduler.snapshot()["groups"]["default"]["queued_seconds"]
    assert waits == pytest.approx(0.0125, abs=0.001)
    scheduler.prepared(ticket, ticket.request, 10.0)
    assert scheduler.snapshot()["groups"]["default"]["queued_seconds"] == waits


@pytest.mark.parametrize("value", [0.0, -1.0, nan])
def test_a_bound_that_admits_nothing_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"GroupConfig\.max_queued_seconds"):
        GroupConfig(max_queued_seconds=value)


def test_without_a_bound_nothing_is_counted() -> None:
    scheduler = learned(limit=inf)
    assert admitted(scheduler, 900) == 900
    assert scheduler.snapshot()["groups"]["default"]["queued_seconds"] == 0.0
