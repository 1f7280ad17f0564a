"""Requests that are sent on in company: tiers, holds and room (contract G3 and G6).

Times are literal, in seconds, at the documented defaults: max_hold 3 ms, background 2 ms more.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import Displaced, QueueFull
from reflex_runtime.core.flush import Affine, FlushPolicy
from reflex_runtime.core.request import Priority, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, ask_many, finish, ids, outcome_of, scheduler_of, settled, take

URGENT, DEFAULT, BACKGROUND = Priority
RULE = FlushPolicy(max_batch_size=16, hold_max=(0.0, 0.003, 0.005))


def calls(flush: FlushPolicy = RULE, **config: Any) -> Scheduler:
    """Several calls may be out at a time."""
    return scheduler_of(64, **{"flush": flush, "cost": UnitCost, "promote_after": 0.030, **config})


def held(scheduler: Scheduler, now: float, until: float) -> None:
    """Nothing leaves now, and the scheduler says until when."""
    assert scheduler.next_batch(now) is None
    assert scheduler.wake_at() == pytest.approx(until)


# -- G3: three tiers ---------------------------------------------------------------------------------------------------


def test_g3_urgent_goes_at_once_and_takes_company_along() -> None:
    scheduler = calls()
    ask(scheduler, id="background", priority=BACKGROUND)
    ask(scheduler, id="urgent", priority=URGENT)
    batch = take(scheduler, 0.0)
    assert ids(batch.grants) == ["urgent", "background"]
    assert batch.cause is Cause.URGENT


def test_g3_default_waits_max_hold_from_the_arrival_of_the_oldest() -> None:
    scheduler = calls()
    ask(scheduler, 1.0)
    ask(scheduler, 1.0025)
    held(scheduler, 1.0025, until=1.003)
    batch = take(scheduler, 1.003)
    assert (len(batch), batch.cause) == (2, Cause.HELD)


class Ends:
    """A controller by which holds end at 1.002."""

    def arrived(self, ticket: Ticket, now: float) -> None:
        pass

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        return replace(base, until=1.002)


def test_g3_a_controller_may_end_a_hold_and_not_lengthen_it() -> None:
    scheduler = calls(controller=Ends())
    ask(scheduler, 0.9985)
    held(scheduler, 0.9985, until=1.0015)
    assert len(take(scheduler, 1.0015)) == 1
    ask(scheduler, 1.0016)
    held(scheduler, 1.0016, until=1.002)
    ask(scheduler, 1.003)
    assert len(take(scheduler, 1.003)) == 2


def test_g3_background_alone_waits_max_hold_and_extra() -> None:
    scheduler = calls()
    ask(scheduler, 1.0, priority=BACKGROUND)
    held(scheduler, 1.0, until=1.005)
    ask(scheduler, 1.002, priority=BACKGROUND)
    held(scheduler, 1.002, until=1.005)
    assert len(take(scheduler, 1.005)) == 2


def test_g3_urgent_then_default_then_background_fills_the_free_places() -> None:
    scheduler = calls(replace(RULE, max_batch_size=5))
    for name, priority in zip("bdbudb", (BACKGROUND, DEFAULT, BACKGROUND, URGENT, DEFAULT, BACKGROUND), strict=True):
        ask(scheduler, id=name, priority=priority)
    assert ids(take(scheduler, 0.0).grants) == ["u", "d", "d", "b", "b"]


def test_g3_background_leaves_with_the_default_ones_it_waits_beside() -> None:
    scheduler = calls()
    ask(scheduler, 1.0, id="background", priority=BACKGROUND)
    ask(scheduler, 1.001, id="default")
    held(scheduler, 1.001, until=1.004)
    assert ids(take(scheduler, 1.004).grants) == ["default", "background"]


def test_g3_background_counts_as_default_after_ten_times_max_hold_and_is_counted() -> None:
    scheduler = calls(replace(RULE, max_batch_size=1))
    scheduler.set_room("default", 0, 0.0)
    old = ask(scheduler, 0.0, client="quiet", priority=BACKGROUND)
    scheduler.next_batch(0.029)
    assert (old.tier, scheduler.snapshot()["groups"]["default"]["promoted"]) == (BACKGROUND, 0)
    ask(scheduler, 0.030, client="busy")
    scheduler.set_room("default", None, 0.030)
    assert list(take(scheduler, 0.030).grants) == [old]
    assert scheduler.snapshot()["groups"]["default"]["promoted"] == 1


def out(scheduler: Scheduler) -> Batch:
    """A call is out since 0."""
    ask(scheduler, priority=URGENT)
    return take(scheduler, 0.0)


def test_g3_a_full_batch_and_an_urgent_one_leave_although_a_call_is_out() -> None:
    scheduler = calls(replace(RULE, max_batch_size=4))
    out(scheduler)
    ask_many(scheduler, 5, 0.001)
    assert take(scheduler, 0.001).cause is Cause.SIZE
    held(scheduler, 0.001, until=0.004)  # the fifth
    ask(scheduler, 0.002, priority=URGENT)
    assert take(scheduler, 0.002).cause is Cause.URGENT


def test_g3_a_paused_partition_leaves_when_its_pause_ends() -> None:
    scheduler = calls()
    ask(scheduler, 1.0, partition="slow")
    scheduler.pause("default", 1.020, 1.0, partition="slow")
    held(scheduler, 1.0, until=1.020)
    assert len(take(scheduler, 1.020)) == 1


def test_g3_a_drain_gathers_nobody() -> None:
    scheduler = calls()
    out(scheduler)
    ask(scheduler, 0.001)
    scheduler.close(0.001)
    assert len(take(scheduler, 0.001)) == 1


# -- G3: a full queue --------------------------------------------------------------------------------------------------


def full(**config: Any) -> tuple[Scheduler, list[Ticket]]:
    """Of the four places two are taken by background requests of two partitions, and there is no room."""
    scheduler = calls(capacity=4, displace_background=True, **config)
    scheduler.set_room("default", 0, 0.0)
    kinds = [(DEFAULT, "p"), (BACKGROUND, "q"), (BACKGROUND, "p"), (DEFAULT, "q")]
    tickets = [ask(scheduler, i * 0.001, id=str(i), priority=k, partition=p) for i, (k, p) in enumerate(kinds)]
    return scheduler, tickets


def test_g3_an_urgent_request_takes_the_place_of_the_newest_background_one() -> None:
    scheduler, tickets = full()
    for i in (2, 1):
        ask(scheduler, 0.010, priority=URGENT)
        assert settled(scheduler) == [tickets[i]]
        assert isinstance(tickets[i].outcome.error, Displaced)
        assert outcome_of(tickets[i]) == "queue_full"
        assert (scheduler.queued("default"), scheduler.unsettled("default")) == (4, 4)
    with pytest.raises(QueueFull):
        ask(scheduler, 0.010, priority=URGENT)


@pytest.mark.parametrize("priority", [DEFAULT, BACKGROUND])
def test_g3_nobody_else_takes_a_place(priority: Priority) -> None:
    scheduler, _ = full()
    with pytest.raises(QueueFull):
        ask(scheduler, 0.010, priority=priority)
    assert settled(scheduler) == []


def test_g3_background_that_counts_as_default_by_now_is_safe() -> None:
    scheduler, tickets = full()
    ask(scheduler, 0.0315, priority=URGENT)  # nobody has asked for a batch since it is old enough
    assert settled(scheduler) == [tickets[2]]
    with pytest.raises(QueueFull):
        ask(scheduler, 0.0315, priority=URGENT)
    assert tickets[1].state is TicketState.WAITING


def test_g3_sharing_the_room_comes_after_displacing_background() -> None:
    scheduler, tickets = full(share_room=True)
    for expected in (2, 1, 3):  # all of one client
        ask(scheduler, 0.010, priority=URGENT, client=f"another {expected}")
        assert settled(scheduler) == [tickets[expected]]


def test_g3_off_by_default() -> None:
    scheduler = calls(capacity=1)
    ask(scheduler, priority=BACKGROUND)
    with pytest.raises(QueueFull):
        ask(scheduler, priority=URGENT)


# -- G6: room ----------------------------------------------------------------------------------------------------------


def test_g6_the_room_of_a_group_is_shared_by_its_partitions_and_counts_down() -> None:
    scheduler = calls(FlushPolicy(max_batch_size=4))
    for partition in "pq":
        ask_many(scheduler, 3, partition=partition)
    scheduler.set_room("default", 5, 0.0)
    first, second = take(scheduler, 0.0), take(scheduler, 0.0)
    assert [(b.partition, len(b), b.short_of) for b in (first, second)] == [("p", 3, ""), ("q", 2, "room")]
    assert second.cause is Cause.SIZE
    held(scheduler, 0.0, until=inf)  # nothing but an input can change that
    finish(scheduler, first, 0.010)
    held(scheduler, 0.010, until=inf)
    scheduler.set_room("default", 1, 0.010)
    assert len(take(scheduler, 0.010)) == 1
    scheduler.set_room("default", None, 0.010)
    assert scheduler.next_batch(0.010) is None
    ask_many(scheduler, 4, 0.010)
    assert len(take(scheduler, 0.010)) == 4


def test_g6_the_next_free_place_is_for_an_urgent_request() -> None:
    scheduler = calls()
    scheduler.set_room("default", 0, 0.0)
    ask_many(scheduler, 3, 0.0, partition="p")
    urgent = ask(scheduler, 0.050, partition="q", priority=URGENT)
    held(scheduler, 0.050, until=inf)
    scheduler.set_room("default", 1, 0.060)
    assert list(take(scheduler, 0.060).grants) == [urgent]


def test_g6_who_fills_the_room_goes_although_others_were_held_for_company() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.by_size(4, 0.010), cost=UnitCost)
    scheduler.set_room("default", 2, 0.0)
    ask(scheduler, 0.0)
    held(scheduler, 0.0, until=0.010)
    ask(scheduler, 0.001)
    assert scheduler.wake_at() == 0.001
    assert len(take(scheduler, 0.001)) == 2
