"""Thousands of tickets leave in slices: no call settles more than `AT_ONCE`, and a batch has none that must not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reflex_runtime.core.admission import AT_ONCE
from reflex_runtime.core.batch import RequestSettled
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Request, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import finish, outcome_of, scheduler_of, take

MANY = 1000
GREEDY = FlushPolicy.window(10.0, 0.0, 8)


def _many(partitions: int = 1, limit: float | None = 5.0, ready: bool = True) -> tuple[Scheduler, list[Ticket]]:
    scheduler = scheduler_of(flush=GREEDY, capacity=MANY + 10)
    asked = [Request(client=i, partition=i % partitions, time_limit=limit) for i in range(MANY)]
    tickets = [scheduler.submit(request, 0.0, ready) for request in asked]
    scheduler.take_events()
    return scheduler, tickets


def _in_slices(scheduler: Scheduler, call: Callable[[], object], now: float) -> list[int]:
    """How many tickets each call settles, until none is due."""
    counts: list[int] = []
    while not counts or scheduler.behind:
        call()
        counts.append(sum(isinstance(event, RequestSettled) for event in scheduler.take_events()))
        assert not scheduler.behind or scheduler.wake_at() <= now
    return counts


@pytest.mark.parametrize("partitions", [1, 100])
@pytest.mark.parametrize("ready", [True, False], ids=["waiting", "prepared"])
@pytest.mark.parametrize("busy", [False, True], ids=["free", "busy"])
def test_b14_a_thousand_expire_in_slices(partitions: int, ready: bool, busy: bool) -> None:
    scheduler, tickets = _many(partitions, ready=ready)
    call = scheduler.expire if busy else scheduler.next_batch
    counts = _in_slices(scheduler, lambda: call(6.0), 6.0)
    assert max(counts) == AT_ONCE
    assert sum(counts) == MANY
    assert {outcome_of(ticket) for ticket in tickets} == {"deadline_exceeded"}
    assert scheduler.idle


def test_b14_no_batch_has_a_ticket_that_expired_and_has_not_settled() -> None:
    scheduler, tickets = _many()
    late = scheduler.submit(tickets[0].request, 5.5)
    assert scheduler.next_batch(6.0) is None
    assert sum(ticket.state is TicketState.SETTLED for ticket in tickets) == AT_ONCE
    assert scheduler.wake_at() <= 6.0
    while (batch := scheduler.next_batch(6.0)) is None:
        assert scheduler.behind
    assert list(batch.grants) == [late]


def test_b15_a_thousand_are_shed_in_slices_and_a_batch_does_not_wait_for_it() -> None:
    scheduler, _ = _many(limit=None)
    for n in (8, 4, 2, 1) * 10:  # what batches take is known: 20 ms and 1 ms a ticket
        scheduler.set_room("default", n, 0.0)
        finish(scheduler, take(scheduler, 0.0), 0.0, 0.020 + 0.001 * n)
    scheduler.set_room("default", None, 0.0)
    while not scheduler.idle:
        finish(scheduler, take(scheduler, 0.0), 0.0, 0.028)
    tickets = [scheduler.submit(Request(client=i, time_limit=5.0), 0.0) for i in range(MANY)]
    scheduler.take_events()
    batch = take(scheduler, 4.975)
    assert scheduler.behind
    settled = sum(isinstance(event, RequestSettled) for event in scheduler.take_events())
    assert settled <= 2 * AT_ONCE
    counts = _in_slices(scheduler, lambda: scheduler.expire(4.975), 4.975)
    assert max(counts) == AT_ONCE
    assert settled + sum(counts) == MANY - len(batch)
    assert {outcome_of(ticket) for ticket in tickets if ticket not in batch.grants} == {"deadline_unreachable"}


def test_f9_a_thousand_abandoned_leave_in_slices_before_a_batch_is_formed() -> None:
    scheduler, tickets = _many(limit=None)
    for ticket in tickets[:-1]:
        scheduler.abandon(ticket, 0.0)
    scheduler.take_events()
    batches = []
    counts = _in_slices(scheduler, lambda: batches.append(scheduler.next_batch(0.0)), 0.0)
    assert max(counts) == AT_ONCE
    assert sum(counts) == MANY - 1
    assert [list(batch.grants) for batch in batches if batch is not None] == [[tickets[-1]]]


@pytest.mark.parametrize("ready", [True, False], ids=["waiting", "prepared"])
def test_b20_a_hard_close_settles_a_thousand_in_slices(ready: bool) -> None:
    scheduler, tickets = _many(limit=None, ready=ready)
    more: list[bool] = []
    counts = _in_slices(scheduler, lambda: more.append(scheduler.close(0.0, drain=False)), 0.0)
    assert max(counts) == AT_ONCE
    assert sum(counts) == MANY
    assert more == [True] * (len(more) - 1) + [False]
    assert {outcome_of(ticket) for ticket in tickets} == {"shutting_down"}
    assert scheduler.idle


def test_b20_after_a_hard_close_no_batch_is_formed_of_what_has_not_settled_yet() -> None:
    scheduler, _ = _many(limit=None)
    scheduler.close(0.0, drain=False)
    assert not scheduler.idle
    while scheduler.behind:
        assert scheduler.next_batch(0.0) is None
    assert scheduler.idle
