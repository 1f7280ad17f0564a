"""Requests admitted before they can run (contract B13, B16, B17, B20, B21, B22, X2)."""

from __future__ import annotations

import pytest

from reflex_runtime.core.batch import Done, RequestSettled
from reflex_runtime.core.errors import Closed, InFlightCapReached, ProcessorError, QueueFull
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, finish, measure, outcome_of, scheduler_of, settled, take, trained

GREEDY = FlushPolicy(max_batch_size=4)


def reserve(scheduler: Scheduler, now: float = 0.0, **request: object) -> Ticket:
    return scheduler.submit(Request(**request), now, ready=False)  # type: ignore[arg-type]


def test_no_batch_takes_what_is_not_prepared_and_others_go_by() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    unready = reserve(scheduler, id="unready")
    assert scheduler.next_batch(0.0) is None
    other = ask(scheduler, id="other")
    batch = take(scheduler, 0.0)
    assert list(batch.grants) == [other]
    finish(scheduler, batch, 0.1)
    made = Request(id="unready", payload="pixels", cost_class="hit", stage="denoise", wants=3.0)
    scheduler.prepared(unready, made, 0.2)
    assert (unready.arrived, unready.ready_at) == (0.2, 0.2)
    batch = take(scheduler, 0.2)
    assert list(batch.grants) == [unready]
    assert (unready.request, unready.stage, unready.wants, batch.stage) == (made, "denoise", 3.0, "denoise")


def test_b13_a_place_is_taken_before_it_is_prepared() -> None:
    scheduler = scheduler_of(flush=GREEDY, capacity=2)
    first = reserve(scheduler)
    ask(scheduler)
    with pytest.raises(QueueFull):
        ask(scheduler)
    with pytest.raises(QueueFull):
        reserve(scheduler)
    assert (scheduler.queued("default"), scheduler.unsettled("default")) == (2, 2)
    scheduler.prepared(first, first.request, 0.0)
    assert (scheduler.queued("default"), scheduler.unsettled("default")) == (2, 2)
    finish(scheduler, take(scheduler, 0.0), 0.1)
    assert (scheduler.queued("default"), scheduler.idle) == (0, True)


def test_one_whose_client_is_forgotten_while_it_is_prepared_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many others that have come meanwhile nothing is known of its habits."""
    monkeypatch.setattr("reflex_runtime.core.holding.REMEMBERED", 2)
    scheduler = scheduler_of(cost=lambda: trained(0.020, 0.002))
    unready = reserve(scheduler, client="one")
    for client in ("others", "that", "came"):
        ask(scheduler, client=client)
    finish(scheduler, take(scheduler, 1.0), 1.1)
    scheduler.prepared(unready, unready.request, 1.2)
    finish(scheduler, take(scheduler, 2.0), 2.1)
    assert isinstance(unready.outcome, Done)
    assert scheduler.idle


def test_b21_the_cap_counts_what_is_prepared() -> None:
    scheduler = scheduler_of(flush=GREEDY, max_in_flight_per_client=1)
    first = reserve(scheduler, client="robot")
    with pytest.raises(InFlightCapReached):
        ask(scheduler, client="robot")
    scheduler.cancel(first, 0.0)
    ask(scheduler, client="robot")


def test_b22_a_newer_request_replaces_one_that_is_prepared() -> None:
    scheduler = scheduler_of(flush=GREEDY, latest_only=True)
    old, other = reserve(scheduler, client="robot"), reserve(scheduler, client="other")
    new = reserve(scheduler, client="robot")
    assert outcome_of(old) == "superseded"
    scheduler.prepared(old, old.request, 0.0)  # comes too late, and changes nothing
    assert old.state is TicketState.SETTLED
    assert (new.state, other.state) == (TicketState.PREPARING, TicketState.PREPARING)


def test_b17_its_deadline_runs_from_its_arrival() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    late, early = reserve(scheduler, 1.0, time_limit=0.5), reserve(scheduler, 1.0, time_limit=9.0)
    assert scheduler.expires_at() == 1.5
    scheduler.expire(1.5)
    assert outcome_of(late) == "deadline_exceeded"
    scheduler.prepared(early, Request(), 2.0)
    assert (early.deadline, early.request.time_limit) == (10.0, 8.0)


def test_b17_what_turns_out_too_dear_for_its_deadline_is_refused_when_it_is_ready() -> None:
    """It was admitted as the cheapest that it could be."""
    model = trained(0.010, 0.001)
    for n in (1, 2, 4) * 4:
        measure(model, ["miss"] * n, 0.040 + 0.010 * n)
    scheduler = scheduler_of(flush=GREEDY, cost=lambda: model)
    ticket = reserve(scheduler, time_limit=0.030)
    scheduler.prepared(ticket, Request(cost_class="miss"), 0.001)
    assert outcome_of(ticket) == "deadline_unreachable"
    assert (scheduler.queued("default"), scheduler.idle, ticket.started) == (0, True, None)
    early = reserve(scheduler, 1.0, time_limit=0.500)
    scheduler.prepared(early, Request(cost_class="miss"), 1.001)
    assert list(take(scheduler, 1.001).grants) == [early]


def test_b16_cancelled_or_abandoned_while_it_is_prepared() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    gone, left, stays = reserve(scheduler), reserve(scheduler), reserve(scheduler)
    scheduler.cancel(gone, 0.0)
    scheduler.abandon(left, 0.0)
    scheduler.next_batch(0.0)
    for ticket in (gone, left, stays):
        scheduler.prepared(ticket, ticket.request, 0.1)
    assert [outcome_of(gone), outcome_of(left)] == ["cancelled", "cancelled"]
    assert list(take(scheduler, 0.1).grants) == [stays]


def test_what_cannot_be_prepared_ends_with_its_error_once() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    ticket = reserve(scheduler)
    scheduler.prepared(ticket, ProcessorError("no picture"), 0.1)
    scheduler.prepared(ticket, ProcessorError("again"), 0.2)
    scheduler.cancel(ticket, 0.3)
    events = [event for event in scheduler.take_events() if isinstance(event, RequestSettled)]
    assert [(event.at, event.ticket) for event in events] == [(0.1, ticket)]
    assert str(ticket.outcome.error) == "no picture"
    assert scheduler.idle


def test_b20_draining_waits_for_what_is_prepared_and_closing_ends_it() -> None:
    scheduler = scheduler_of(flush=GREEDY)
    kept, lost = reserve(scheduler), reserve(scheduler)
    scheduler.close(0.0, drain=True)
    with pytest.raises(Closed):
        reserve(scheduler)
    scheduler.prepared(kept, kept.request, 0.1)
    finish(scheduler, take(scheduler, 0.1), 0.2)
    assert isinstance(kept.outcome, Done)
    assert not scheduler.idle
    scheduler.close(0.3, drain=False)
    assert [ticket for ticket in settled(scheduler) if ticket is not kept] == [lost]
    assert outcome_of(lost) == "shutting_down"
    assert scheduler.idle


def test_b21_being_prepared_earns_no_credit_against_other_groups_or_clients() -> None:
    """Its turn counts from when it could run: the time before is not saved up."""
    one = FlushPolicy(max_batch_size=1)
    scheduler = Scheduler([GroupConfig("a", flush=one), GroupConfig("b", flush=one)])
    slow = reserve(scheduler, group="b", client="slow")
    for i in range(20):
        ask(scheduler, i / 10, group="a")
        finish(scheduler, take(scheduler, i / 10), (i + 1) / 10, elapsed=0.1)
    for _ in range(3):
        ask(scheduler, 2.0, group="a")
    scheduler.prepared(slow, Request(group="b", client="slow"), 2.0)
    for _ in range(3):
        ask(scheduler, 2.0, group="b", client="slow")
    turns = []
    for i in range(6):
        batch = take(scheduler, 2.0 + i / 10)
        turns.append(batch.group)
        finish(scheduler, batch, 2.1 + i / 10, elapsed=0.1)
    assert sorted(turns[:4]) == ["a", "a", "b", "b"]
