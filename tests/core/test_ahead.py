"""Batches formed ahead: which may be, that they are those of the boundary, and what takes one back."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest

from core.helpers import ask, ask_many, finish, ids, outcome_of, scheduler_of, settled, take, trained
from reflex_runtime.core.batch import Apart, Batch, BatchFinished, BatchScheduled, Done, Failed, More
from reflex_runtime.core.cost import TimeCost, UnitCost
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, TicketState
from reflex_runtime.core.scheduler import Scheduler
from thinned import thinned


def known(size: int = 2, **config: Any) -> Scheduler:
    """A scheduler of full batches of so many, whose cost model has learned 10 ms + 1 ms a request."""
    flush = config.pop("flush", FlushPolicy.window(1.0, 0.005, size))
    return scheduler_of(flush=flush, cost=lambda: trained(0.010, 0.001), **config)


def busy(scheduler: Scheduler, waiting: int = 4, **request: Any) -> Batch:
    """A batch that runs from time 0, with so many requests waiting behind it: r0, r1, ..."""
    ask_many(scheduler, scheduler._groups["default"].config.flush.max_batch_size, id="first", client="first")
    batch = take(scheduler, 0.0)
    for i in range(waiting):
        ask(scheduler, 0.001, **{"id": f"r{i}", "client": f"c{i}", **request})
    return batch


def next_start(scheduler: Scheduler, running: Batch, now: float) -> Batch:
    """What a driver does when the running batch ends: start the one formed ahead, then complete the other."""
    batch = scheduler.start_ahead(now)
    assert batch is not None
    finish(scheduler, running, now, now)
    return batch


def test_a_full_batch_is_formed_ahead_and_published_when_it_starts() -> None:
    scheduler = known()
    running = busy(scheduler)
    scheduler.take_events()
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    assert ids(ahead.grants) == ["r0", "r1"]
    assert (scheduler.queued("default"), scheduler.take_events()) == (4, [])  # until it starts its members wait
    assert scheduler.form_ahead(0.010) is None  # one at a time
    assert scheduler.next_batch(0.010) is None
    assert next_start(scheduler, running, 0.012) is ahead
    order = [type(e) for e in scheduler.take_events() if isinstance(e, BatchScheduled | BatchFinished)]
    assert order == [BatchFinished, BatchScheduled]
    assert (ahead.scheduled_at, ahead.expected) == (0.012, pytest.approx(0.012, rel=1e-3))
    assert all(t.started == 0.012 for t in ahead.grants)


@pytest.mark.parametrize(
    "why",
    ["not full", "steps", "shadow", "resources", "unmeasured", "offender", "at risk", "closed", "paused", "free"],
)
def test_what_waiting_could_change_is_not_formed_ahead(why: str) -> None:
    more: dict[str, Any] = {"weight": 0.0, "gap_chance": 0.5} if why == "shadow" else {}
    scheduler = known(**more)
    if why == "unmeasured":
        scheduler = scheduler_of(flush=FlushPolicy.by_size(2, 0.0), cost=UnitCost)
    if why == "steps":
        batch = (ask_many(scheduler, 2), take(scheduler, 0.0))[1]
        scheduler.complete(batch, [More(), More()], 0.010, 0.0)
        finish(scheduler, take(scheduler, 0.0), 0.0)
    if why == "offender":
        ask(scheduler, client="bad")
        finish(scheduler, take(scheduler, 0.0), 0.0, outcome=Failed(ProcessorError("bad")))
    running = busy(scheduler, 1 if why == "not full" else 4, **({"time_limit": 0.020} if why == "at risk" else {}))
    if why == "closed":
        scheduler.close(0.001)
    if why == "paused":
        scheduler.pause("default", 1.0, 0.001)
    if why == "free":
        finish(scheduler, running, 0.001)
    if why == "resources":
        object.__setattr__(scheduler._groups["default"].config, "resources", object())
    assert scheduler.form_ahead(0.010) is None


LEAVE: dict[str, Callable[[Scheduler, Batch], object]] = {
    "cancel": lambda s, b: s.cancel(next(iter(b.grants)), 0.011),
    "abandon": lambda s, b: s.abandon(next(iter(b.grants)), 0.011),
    "urgent": lambda s, b: ask(s, 0.011, id="urgent", priority=Priority.URGENT),
    "pause": lambda s, b: s.pause("default", 0.012, 0.011),
    "room": lambda s, b: s.set_room("default", 1, 0.011),
    "close": lambda s, b: s.close(0.011),
    "end": lambda s, b: s.close(0.011, drain=False),
    "deadline": lambda s, b: s.expire(0.501),
}


@pytest.mark.parametrize(
    ("what", "then"),
    [
        ("cancel", ["r1", "r2"]),
        ("abandon", ["r1", "r2"]),
        ("urgent", ["urgent", "r0"]),
        ("pause", ["r0", "r1"]),
        ("room", ["r0"]),
        ("close", ["r0", "r1"]),
        ("end", []),
        ("deadline", ["r1", "r2"]),
    ],
)
def test_b16_what_changes_the_next_batch_takes_it_back(what: str, then: list[str]) -> None:
    scheduler = known()
    running = busy(scheduler, 0)
    for i in range(4):
        ask(scheduler, 0.001, id=f"r{i}", client=f"c{i}", time_limit=0.5 if i == 0 and what == "deadline" else None)
    charged = scheduler._groups["default"].counter
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    assert what != "deadline" or scheduler.wake_at() == 0.501
    LEAVE[what](scheduler, ahead)
    assert scheduler.start_ahead(scheduler._now) is None
    assert scheduler._groups["default"].counter == charged
    left = [t for t in ahead.grants if t.outcome is None]
    assert all((t.state, t.batches, t.started) == (TicketState.WAITING, 0, None) for t in left)
    finish(scheduler, running, 0.600)
    batch = scheduler.next_batch(0.600)
    assert ([] if batch is None else ids(batch.grants)) == then


def test_a_newer_request_replaces_a_member_of_the_batch_formed_ahead() -> None:
    scheduler = known(latest_only=True)
    running = busy(scheduler)
    scheduler.take_events()
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    ask(scheduler, 0.010, id="another", client="another")
    assert scheduler._ahead.batch is ahead
    ask(scheduler, 0.011, id="newer", client="c0")
    assert scheduler.start_ahead(0.011) is None
    assert [(t.request.id, outcome_of(t)) for t in settled(scheduler)] == [("r0", "superseded")]
    finish(scheduler, running, 0.012)
    assert ids(take(scheduler, 0.012).grants) == ["r1", "r2"]


@pytest.mark.parametrize(("now", "starts"), [(0.036, True), (0.042, False), (0.060, False)])
def test_a_batch_formed_ahead_does_not_start_when_its_deadline_cannot_be_met_any_more(now: float, starts: bool) -> None:
    """It was formed in time for 0.051, and takes 12 ms. The running batch took longer than predicted."""
    scheduler = known()
    busy(scheduler, 2, time_limit=0.050)
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    assert scheduler.start_ahead(now) is (ahead if starts else None)
    assert all((t.state is TicketState.RUNNING) is starts for t in ahead.grants)


def test_what_is_taken_back_gives_its_room_back() -> None:
    scheduler = known()
    running = busy(scheduler)
    scheduler.set_room("default", 2, 0.002)
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    scheduler.cancel(next(iter(ahead.grants)), 0.011)
    finish(scheduler, running, 0.012)
    assert ids(take(scheduler, 0.012).grants) == ["r1", "r2"]


@pytest.mark.parametrize("priority", [Priority.DEFAULT, Priority.BACKGROUND])
def test_an_arrival_that_comes_after_the_members_changes_nothing(priority: Priority) -> None:
    scheduler = known()
    busy(scheduler)
    ahead = scheduler.form_ahead(0.010)
    ask(scheduler, 0.011, id="late", priority=priority)
    assert scheduler.start_ahead(0.011) is ahead


def test_b21_the_first_request_of_another_group_does_not_wait_for_a_batch_formed_ahead() -> None:
    """A group of weight 0 runs only if nothing else waits."""
    flush = FlushPolicy.window(1.0, 0.005, 2)
    scheduler = Scheduler([
        GroupConfig(name=name, flush=flush, cost=lambda: trained(0.010, 0.001), weight=weight)
        for name, weight in (("prod", 1.0), ("shadow", 0.0))
    ])
    ask_many(scheduler, 2, group="prod")
    running = take(scheduler, 0.0)
    ask_many(scheduler, 4, group="shadow", now=0.001)
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    ask(scheduler, 0.011, id="more", group="shadow")
    assert scheduler._ahead.batch is ahead
    ask(scheduler, 0.011, id="real", group="prod")
    assert scheduler.start_ahead(0.012) is None
    finish(scheduler, running, 0.012)
    assert ids(take(scheduler, 0.012).grants) == ["real"]


@pytest.mark.parametrize("limit", [0.025, None])
def test_b10_a_deadline_in_another_partition_does_not_wait_for_a_batch_formed_ahead(limit: float | None) -> None:
    scheduler = known()
    running = busy(scheduler)
    ahead = scheduler.form_ahead(0.010)
    assert ahead is not None
    ask(scheduler, 0.011, id="other", partition="other", time_limit=limit)
    if limit is None:
        assert scheduler.start_ahead(0.012) is ahead
        return
    assert scheduler.start_ahead(0.012) is None
    finish(scheduler, running, 0.012)
    assert ids(take(scheduler, 0.012).grants) == ["other"]


def test_residents_that_left_are_named_by_the_next_batch_although_one_was_taken_back() -> None:
    scheduler = known()
    failed = [ask(scheduler, id=name) for name in ("x", "y")]
    scheduler.complete(take(scheduler, 0.0), [Apart(ProcessorError("one of them"))] * 2, 0.010, 0.010)
    ask_many(scheduler, 2, now=0.010, partition="other")
    running = take(scheduler, 0.010)
    while running.partition != "other":
        finish(scheduler, running, 0.011)
        running = take(scheduler, 0.011)
    gone = next(t for t in failed if t.outcome is None)
    ask_many(scheduler, 4, now=0.012, partition="other")
    scheduler.cancel(gone, 0.012)
    ahead = scheduler.form_ahead(0.013)
    assert ahead is not None
    assert ahead.left == (gone,)
    ask(scheduler, 0.014, priority=Priority.URGENT)
    finish(scheduler, running, 0.015)
    assert take(scheduler, 0.015).left == (gone,)


def test_a_member_that_is_prepared_meanwhile_is_let_in_if_it_goes_first() -> None:
    scheduler = known()
    busy(scheduler)
    urgent = scheduler.submit(Request(id="urgent", priority=Priority.URGENT), 0.001, ready=False)
    assert scheduler.form_ahead(0.010) is not None
    scheduler.prepared(urgent, urgent.request, 0.011)
    assert scheduler.start_ahead(0.011) is None


def test_the_end_of_the_running_batch_may_be_a_failure() -> None:
    scheduler = known()
    running = busy(scheduler)
    scheduler.form_ahead(0.010)
    ahead = scheduler.start_ahead(0.012)
    assert ahead is not None
    scheduler.complete(running, [Failed(ProcessorError("it broke"))] * 2, 0.012, 0.012)
    finish(scheduler, ahead, 0.024)
    assert [outcome_of(t) for t in settled(scheduler)] == ["processor_failed"] * 2 + ["ok"] * 2


@pytest.mark.parametrize("histories", thinned([15, 60], [15]))
def test_ahead_and_at_the_boundary_are_the_same_batches(histories: int) -> None:
    """Random loads on two schedulers, one of which forms ahead and at times takes it back: the same batches at the same
    times, and the same shares."""
    formed = 0
    for seed in range(histories):
        runs = [_history(seed, ahead) for ahead in (False, True)]
        assert runs[0][:2] == runs[1][:2], seed
        assert runs[1][2] > 0 or seed, "nothing was formed ahead"
        formed += runs[1][2]
    assert formed > 3.3 * histories


def _learned() -> TimeCost:
    """A cost model that learns nothing more: what it learns from a batch comes too late for one formed ahead."""
    model = trained(0.010, 0.001)
    model.observe = lambda batch, elapsed: None  # type: ignore[method-assign]
    return model


def _history(seed: int, ahead: bool) -> tuple[list[tuple[float, list[str]]], list[float], int]:
    """(batches, counters of the clients, how many batches were formed ahead)."""
    random = Random(seed)
    scheduler = Scheduler([
        GroupConfig(name=name, flush=FlushPolicy.window(1.0, 0.0, 3), cost=_learned)
        for name in ("a", "b")
    ])
    now, made, began, formed = 0.0, 0, [], 0
    running: Batch | None = None
    for _ in range(80):
        for _ in range(random.randrange(6)):
            group, client, tier = random.choice("aab"), random.randrange(5), random.choice(list(Priority)[1:])
            scheduler.submit(Request(id=str(made), group=group, client=client, priority=tier), now)
            made += 1
        spoiled = random.random() < 0.2
        found: Batch | None = None
        if running is not None:
            if ahead:
                found = scheduler.form_ahead(now)
                formed += found is not None
            if spoiled:
                scheduler.set_room("a", None, now)
            found = scheduler.start_ahead(now)
            now += 0.010
            finish(scheduler, running, now, running.expected, Done())
        running = found or scheduler.next_batch(now)
        if running is not None:
            began.append((running.scheduled_at, ids(running.grants)))
    counters = [share.counter for g in scheduler._groups.values() for share in g.clients._known.values()]
    assert scheduler.wake_at() == inf
    return began, counters, formed
