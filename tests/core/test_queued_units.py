"""A limit on what those that wait want together: tokens and steps, where requests differ in length."""

from __future__ import annotations

from math import inf, nan
from random import Random
from typing import Any

import pytest

from reflex_runtime.core.batch import More
from reflex_runtime.core.cost import TokenCost
from reflex_runtime.core.errors import ConfigError, QueueFull
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import Cached, UnitPool, ask, finish, scheduler_of, take


def engine(limit: float = 10.0, budget: int = 64, **config: Any) -> Scheduler:
    return scheduler_of(flush=FlushPolicy.every_step(budget), cost=TokenCost, max_queued_units=limit, **config)


def test_a_submit_beyond_the_limit_is_refused_and_told_which() -> None:
    scheduler = engine(name="llm")
    ask(scheduler, group="llm", wants=7.0)
    with pytest.raises(QueueFull, match="limit of units") as refused:
        ask(scheduler, group="llm", wants=4.0)
    assert refused.value.details == {"policy_id": "llm", "max_queued_units": 10.0, "queued_units": 7.0}
    assert refused.value.retry_after == 1.0
    ask(scheduler, group="llm", wants=3.0)
    assert scheduler.queued("llm") == 2


def test_the_limit_of_requests_is_told_as_ever() -> None:
    scheduler = engine(capacity=1)
    ask(scheduler)
    with pytest.raises(QueueFull, match="policy runtime queue at capacity") as refused:
        ask(scheduler, wants=50.0)
    assert refused.value.details == {"policy_id": "default", "max_queue": 1}


def test_an_empty_queue_admits_whatever_comes() -> None:
    scheduler = engine()
    ask(scheduler, wants=50.0)
    with pytest.raises(QueueFull):
        ask(scheduler, wants=1.0)
    take(scheduler, 0.0)  # it runs, and waits no more
    ask(scheduler, wants=50.0)


def test_who_gives_its_place_in_the_queue_gives_its_units_too() -> None:
    scheduler = engine(latest_only=True)
    ask(scheduler, client="a", wants=6.0)
    ask(scheduler, client="b", wants=4.0)
    ask(scheduler, client="a", wants=6.0)
    with pytest.raises(QueueFull):
        ask(scheduler, client="a", wants=7.0)
    scheduler = engine(capacity=3, share_room=True)
    for wants in (2.0, 2.0, 6.0):
        ask(scheduler, client="a", wants=wants)
    with pytest.raises(QueueFull, match="limit of units"):
        ask(scheduler, client="b", wants=7.0)
    assert scheduler.queued("default") == 3
    ask(scheduler, client="b", wants=6.0)
    assert scheduler.queued("default") == 3


def test_preempted_tickets_count_with_what_they_want_then() -> None:
    scheduler = engine(resources=UnitPool(6))
    for client in "abc":
        ask(scheduler, client=client, wants=2.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    take(scheduler, 0.0)
    assert scheduler._groups["default"].queued_units == 3.0  # c, its next token included


def test_the_units_kept_are_those_summed_again() -> None:
    random = Random(7)
    scheduler = engine(inf, budget=9, resources=Cached(40, 2.0))
    group = scheduler._groups["default"]
    tickets: list[Ticket] = []
    empty = 0
    for _ in range(1500):
        if random.random() < 0.5:
            tickets.append(ask(scheduler, client=random.randrange(4), wants=random.choice([1.1, 2.3, 5.7, 11.9])))
        elif tickets and random.random() < 0.2:
            scheduler.cancel(random.choice(tickets), 0.0)
        batch = scheduler.next_batch(0.0)
        if batch is not None:
            left = [t.wants - u for t, u in batch.grants.items()]
            scheduler.complete(batch, [More(None, n if n > 0.0 else 1.0) for n in left], 0.001, 0.0)
        tickets = [t for t in tickets if t.state is not TicketState.SETTLED]
        for ticket in [t for t in tickets if t.computed > 20.0]:
            scheduler.cancel(ticket, 0.0)
        waiting = [t for t in tickets if t.state is TicketState.WAITING]
        assert abs(group.queued_units - sum(t.wants for t in waiting)) < 1e-6  # pytest.approx is slow in a loop
        if not waiting:
            empty += 1
            assert group.queued_units == 0.0
    assert 10 < empty < 1400


def test_no_rounding_is_carried_on_beyond_the_moment_when_nobody_waits() -> None:
    scheduler = engine()
    for ticket in [ask(scheduler, client=i, wants=wants) for i, wants in enumerate((0.1, 0.2, 0.3))]:
        scheduler.cancel(ticket, 0.0)
    assert scheduler._groups["default"].queued_units == 0.0


@pytest.mark.parametrize("limit", [0.0, -1.0, nan])
def test_a_limit_that_lets_nothing_wait_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"GroupConfig\.max_queued_units"):
        GroupConfig(max_queued_units=limit)
