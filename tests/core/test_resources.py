"""Memory of residents: reserve, preempt, commit, roll back (contract L5, and the identity of L4 under preemption)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Done, Failed, More, RequestPreempted
from reflex_runtime.core.cost import TokenCost, UnitCost
from reflex_runtime.core.errors import ConfigError, ProcessorError, TooLarge
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority, Request, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import Cached, Generation, UnitPool, ask, finish, ids, outcome_of, scheduler_of, take


def engine(pool: Any, budget: int = 64, seqs: int = 16, **config: Any) -> Scheduler:
    return scheduler_of(flush=FlushPolicy.every_step(budget, seqs), cost=TokenCost, resources=pool, **config)


def preempted(scheduler: Scheduler) -> list[str]:
    return [e.ticket.id for e in scheduler.take_events() if isinstance(e, RequestPreempted)]


def start(scheduler: Scheduler, wants: dict[str, float], now: float = 0.0, **fields: Any) -> dict[str, Ticket]:
    """Submit, run one step and leave everyone resident, wanting one more unit."""
    tickets = {name: ask(scheduler, now, id=name, client=name, wants=w, **fields) for name, w in wants.items()}
    finish(scheduler, take(scheduler, now), now, outcome=More(None, 1.0))
    return tickets


def test_l5_the_newest_resident_is_preempted_when_memory_is_short() -> None:
    scheduler = engine(UnitPool(6))
    tickets = start(scheduler, {"a": 2.0, "b": 2.0, "c": 2.0})
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == ["c"]
    assert ids(batch.grants) == ["a", "b"]
    assert batch.left == (tickets["c"],)
    assert tickets["c"].state is TicketState.WAITING
    assert (tickets["c"].wants, tickets["c"].computed, tickets["c"].recomputed) == (3.0, 0.0, 2.0)


def test_l5_the_lowest_tier_is_preempted_before_a_newer_one() -> None:
    scheduler = engine(UnitPool(4))
    background = ask(scheduler, id="background", wants=2.0, priority=Priority.BACKGROUND)
    ask(scheduler, id="default", wants=2.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    take(scheduler, 0.0)
    assert preempted(scheduler) == ["background"]
    assert background.state is TicketState.WAITING


def test_l5_a_held_resident_is_preempted_first() -> None:
    scheduler = engine(UnitPool(6))
    tickets = start(scheduler, {"a": 2.0, "b": 2.0, "c": 2.0})
    scheduler.hold(tickets["a"], 0.0)
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == ["a"]
    assert ids(batch.grants) == ["b", "c"]


def test_a_held_resident_gets_no_grants_and_keeps_its_memory() -> None:
    pool = UnitPool(64)
    scheduler = engine(pool)
    tickets = start(scheduler, {"a": 2.0, "b": 2.0})
    scheduler.hold(tickets["a"], 0.0)
    batch = take(scheduler, 0.0)
    assert ids(batch.grants) == ["b"]
    assert pool.used == 5.0
    finish(scheduler, batch, 0.0, outcome=More(None, 1.0))
    scheduler.resume(tickets["a"], 0.0)
    assert ids(take(scheduler, 0.0).grants) == ["a", "b"]


def test_a_held_ticket_that_was_preempted_gets_no_grants_either() -> None:
    scheduler = engine(UnitPool(6))
    tickets = start(scheduler, {"a": 2.0, "b": 2.0, "c": 2.0})
    scheduler.hold(tickets["a"], 0.0)
    batch = take(scheduler, 0.0)
    finish(scheduler, batch, 0.0, outcome=Done())
    assert scheduler.next_batch(0.0) is None
    assert scheduler.wake_at() == float("inf")
    other = ask(scheduler, id="other", client="a")  # a held ticket does not hold up its client's others
    assert list(take(scheduler, 0.0).grants) == [other]
    scheduler.resume(tickets["a"], 0.0)


def test_l5_nobody_enters_in_a_step_that_threw_somebody_out() -> None:
    scheduler = engine(UnitPool(5))
    start(scheduler, {"a": 2.0, "b": 3.0})
    ask(scheduler, id="new", client="new")
    batch = take(scheduler, 0.0)
    assert ids(batch.grants) == ["a"]
    assert not batch.admitted


def test_l5_a_preempted_ticket_restarts_from_the_front_of_its_queue() -> None:
    scheduler = engine(UnitPool(4))
    for name in ("a", "b"):
        ask(scheduler, id=name, wants=2.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    ask(scheduler, id="later", wants=1.0)  # the same client
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=Done())  # throws b out, finishes a
    assert ids(take(scheduler, 0.0).grants) == ["b", "later"]


def test_l5_preempted_tickets_of_one_client_keep_their_order() -> None:
    scheduler = engine(UnitPool(6))
    tickets = [ask(scheduler, id=name, wants=2.0) for name in "abc"]
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    scheduler.hold(tickets[1], 0.0)
    batch = take(scheduler, 0.0)  # b was held: it goes first
    assert preempted(scheduler) == ["b"]
    finish(scheduler, batch, 0.0, outcome=More(None, 1.0))
    scheduler.resume(tickets[1], 0.0)
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == ["c"]
    finish(scheduler, batch, 0.0, outcome=Done())
    order = []
    while not scheduler.idle:
        batch = take(scheduler, 0.0)
        order += ids(batch.grants)
        finish(scheduler, batch, 0.0, outcome=Done())
    assert order == ["b", "c"]


def test_l5_not_twice_without_progress_between() -> None:
    scheduler = engine(UnitPool(8), budget=4)
    old = ask(scheduler, id="old", client="old", wants=2.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    new = ask(scheduler, id="new", client="new", wants=6.0)
    thrown_out = []
    for _ in range(12):
        batch = take(scheduler, 0.0)
        for name in preempted(scheduler):
            assert name not in thrown_out[-1:]
            thrown_out.append(name)
        if new in batch.grants:
            thrown_out.append("progress")
        outcomes = [More(None, max(1.0, t.wants - u)) for t, u in batch.grants.items()]
        scheduler.complete(batch, outcomes, 0.001, 0.0)
        if old.granted >= 7.0:
            scheduler.cancel(old, 0.0)
    assert "new" in thrown_out


def test_a_request_larger_than_the_pool_is_refused_at_the_door() -> None:
    scheduler = engine(UnitPool(6))
    with pytest.raises(TooLarge):
        ask(scheduler, wants=7.0)
    ask(scheduler, wants=6.0)


def test_everything_is_free_again_when_everyone_has_left() -> None:
    pool = UnitPool(8)
    scheduler = engine(pool)
    tickets = start(scheduler, {"a": 2.0, "b": 2.0, "c": 2.0, "d": 1.0})
    scheduler.cancel(tickets["a"], 0.0)
    assert pool.used == 5.0
    batch = take(scheduler, 0.0)
    scheduler.complete(batch, [Done(), Failed(ProcessorError("bad")), More(None, 1.0)], 0.001, 0.0)
    assert pool.used == 2.0
    scheduler.close(0.0, drain=False)
    assert pool.used == 0.0


def test_a_crashed_call_gives_back_what_was_reserved_for_it() -> None:
    pool = UnitPool(8)
    scheduler = engine(pool)
    start(scheduler, {"a": 2.0, "b": 2.0})
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=Failed(ProcessorError("crash")))
    assert pool.used == 0.0
    assert scheduler.idle


def test_l4_identity_holds_under_preemption() -> None:
    pool = UnitPool(20)
    scheduler = engine(pool, budget=6)
    generation = Generation({"A": 7, "B": 9, "C": 5, "D": 3}, {"A": 8, "B": 6, "C": 7, "D": 9})
    tickets = [scheduler.submit(r, 0.0) for r in generation.requests()]
    steps, lost = 0, 0
    while not scheduler.idle:
        batch = take(scheduler, 0.0)
        assert sum(batch.grants.values()) <= 6
        assert pool.used <= 20
        lost += len(preempted(scheduler))
        scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.0)
        steps += 1
        assert steps < 500
    assert lost > 0
    for ticket in tickets:
        assert ticket.granted - ticket.recomputed == generation.total[ticket.id] - ticket.cached
    assert pool.used == 0.0


def test_l4_identity_with_cached_units() -> None:
    scheduler = engine(Cached(9, 3.0), budget=5)
    generation = Generation({"A": 7, "B": 6}, {"A": 4, "B": 5})
    tickets = [scheduler.submit(r, 0.0) for r in generation.requests()]
    lost = 0
    while not scheduler.idle:
        batch = take(scheduler, 0.0)
        lost += len(preempted(scheduler))
        scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.0)
    assert lost > 0
    for ticket in tickets:
        assert ticket.cached >= 3.0
        assert ticket.granted - ticket.recomputed == generation.total[ticket.id] - ticket.cached


def test_what_does_not_fit_the_memory_changes_nothing() -> None:
    scheduler = engine(Cached(6, 2.0))
    first = ask(scheduler, id="first", client="1", wants=5.0)
    second = ask(scheduler, id="second", client="2", wants=6.0)
    assert list(take(scheduler, 0.0).grants) == [first]
    assert (second.wants, second.cached, second.computed) == (6.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "flush",
    [
        FlushPolicy.window(8.0),
        FlushPolicy.by_size(8, 0.010),
        FlushPolicy(hold_max=(0.0, 0.001, 0.001)),
        FlushPolicy(shed=True),
    ],
)
def test_memory_needs_a_policy_that_neither_holds_nor_sheds(flush: FlushPolicy) -> None:
    with pytest.raises(ConfigError, match=r"GroupConfig\.resources"):
        scheduler_of(flush=flush, resources=UnitPool(4))


def test_a_preempted_background_ticket_still_ages() -> None:
    scheduler = engine(UnitPool(4), promote_after=1.0)
    old = ask(scheduler, id="old", client="old", wants=2.0, priority=Priority.BACKGROUND)
    ask(scheduler, id="vip", client="vip", wants=2.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=Done())
    assert preempted(scheduler) == ["old"]
    scheduler.pause("default", 2.0, 0.0)
    ask(scheduler, 1.5, id="new", client="new")
    assert ids(take(scheduler, 2.0).grants) == ["old", "new"]
    assert old.tier is Priority.DEFAULT


def test_work_in_stages_never_keeps_memory_reserved_for_a_batch_that_did_not_take_it() -> None:
    pool = UnitPool(100)
    scheduler = scheduler_of(flush=FlushPolicy.every_step(64, 8), cost=UnitCost, resources=pool)
    ask(scheduler, id="a", client="a", stage="prefix", wants=3.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 2.0, "denoise"))
    ask(scheduler, id="b", client="b", stage="prefix", wants=3.0)
    for _ in range(2):
        batch = take(scheduler, 0.0)
        outcomes = [More(None, 2.0, "denoise") if t.stage == "prefix" else More(None, t.wants) for t in batch.grants]
        scheduler.complete(batch, outcomes, 0.001, 0.0)
    granted = sum(t.granted for t in _residents(scheduler))
    assert pool.used == granted


def _residents(scheduler: Scheduler) -> Iterable[Ticket]:
    group = scheduler._groups["default"]
    return [t for p in group.active.values() for t in p.unsettled]


def test_a_batch_of_residents_that_crashed_settles_them_and_tells_the_processor_to_drop_them() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.every_step(64, 8), cost=TokenCost)
    tickets = [scheduler.submit(Request(id=name, wants=2.0), 0.0) for name in "ab"]
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    batch: Batch = take(scheduler, 0.0)
    scheduler.complete(batch, [Done(), Failed(ProcessorError("bad"))], 0.001, 0.0)
    assert [outcome_of(t) for t in tickets] == ["ok", "processor_failed"]
    assert scheduler.take_left("default") == (tickets[1],)


class Recorder(UnitPool):
    """A pool that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(64)
        self.told: list[str] = []

    def commit(self, batch: Batch) -> None:
        self.told.append(f"commit {len(batch)}")

    def rollback(self, batch: Batch) -> None:
        self.told.append(f"rollback {len(batch)}")
        super().rollback(batch)


def test_a_step_is_committed_when_anything_succeeded_and_rolled_back_when_nothing_did() -> None:
    pool = Recorder()
    scheduler = engine(pool)
    for outcomes in ([Done(), Failed(ProcessorError("bad"))], [Failed(ProcessorError("crash"))] * 2):
        for name in "ab":
            ask(scheduler, client=name)
        scheduler.complete(take(scheduler, 0.0), outcomes, 0.001, 0.0)
    assert pool.told == ["commit 2", "rollback 2"]
