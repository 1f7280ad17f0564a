"""Who gives way to whom where there is memory: a more urgent ticket that waits comes before less urgent residents."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from random import Random
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, More, RequestPreempted
from reflex_runtime.core.cost import TokenCost, UnitCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.forming import Filling
from reflex_runtime.core.group import Resources
from reflex_runtime.core.request import Priority, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler
from thinned import thinned

from .helpers import Cached, Generation, UnitPool, ask, finish, ids, scheduler_of, take, trained
from .histories import SCENARIOS, Play

URGENT, DEFAULT, BACKGROUND = Priority


def engine(
    seqs: int = 4, budget: int = 64, memory: float = 1000, pool: Any = None, threshold: float = inf, **config: Any
) -> Scheduler:
    return scheduler_of(
        flush=FlushPolicy.every_step(budget, seqs),
        cost=lambda: TokenCost(threshold),
        resources=pool or UnitPool(memory),
        promote_after=inf,
        **config,
    )


def step(scheduler: Scheduler, now: float = 0.0) -> Batch:
    """A step in which nobody ends."""
    batch = take(scheduler, now)
    scheduler.complete(batch, [More(None, max(1.0, t.wants - u)) for t, u in batch.grants.items()], 0.001, now)
    return batch


def residents(
    scheduler: Scheduler, n: int = 4, priority: Priority = BACKGROUND, name: str = "r", **fields: Any
) -> list[Ticket]:
    """So many residents that want one unit each, of a client each."""
    names = [f"{name}{i}" for i in range(n)]
    tickets = [ask(scheduler, id=name, client=name, priority=priority, **fields) for name in names]
    while any(t.batches == 0 or t.wants > 1.0 for t in tickets):
        step(scheduler)
    scheduler.take_events()
    return tickets


def preempted(scheduler: Scheduler) -> list[str]:
    return [e.ticket.id for e in scheduler.take_events() if isinstance(e, RequestPreempted)]


# -- places ------------------------------------------------------------------------------------------------------------


def test_l5_the_newest_of_the_lowest_tier_gives_its_place_to_a_more_urgent_ticket() -> None:
    scheduler = engine()
    background = residents(scheduler, 3)
    (default,) = residents(scheduler, 1, DEFAULT, "d")
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT, wants=5.0)
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == ["r2"]
    assert batch.left == (background[2],)
    assert list(batch.grants) == [default, *background[:2], urgent]
    assert (batch.admitted, batch.grants[urgent]) == ((urgent,), 5.0)
    assert (background[2].state, background[2].recomputed) == (TicketState.WAITING, background[2].granted)


@pytest.mark.parametrize("waits", list(Priority))
@pytest.mark.parametrize("runs", list(Priority))
def test_l5_only_a_less_urgent_resident_gives_way(waits: Priority, runs: Priority) -> None:
    scheduler = engine(seqs=1)
    residents(scheduler, 1, runs)
    ask(scheduler, id="new", client="new", priority=waits)
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == (["r0"] if waits < runs else [])
    assert ids(batch.grants) == (["new"] if waits < runs else ["r0"])
    assert batch.short_of == "places"


def test_l5_one_gives_way_for_each_that_enters() -> None:
    scheduler = engine()
    residents(scheduler)
    for i in range(2):
        ask(scheduler, id=f"u{i}", client=i, priority=URGENT)
    ask(scheduler, id="default", client="default")
    assert ids(take(scheduler, 0.0).grants) == ["r0", "u0", "u1", "default"]
    assert preempted(scheduler) == ["r3", "r2", "r1"]


def test_l5_while_a_place_is_free_nobody_gives_way() -> None:
    scheduler = engine()
    residents(scheduler, 3)
    ask(scheduler, id="urgent", client="urgent", priority=URGENT)
    take(scheduler, 0.0)
    assert preempted(scheduler) == []


def test_l5_a_held_resident_gives_its_place_first() -> None:
    scheduler = engine()
    tickets = residents(scheduler)
    scheduler.hold(tickets[1], 0.0)
    ask(scheduler, id="urgent", client="urgent", priority=URGENT)
    take(scheduler, 0.0)
    assert preempted(scheduler) == ["r1"]


def test_l5_who_runs_in_another_batch_is_left_alone() -> None:
    scheduler = engine(seqs=2, max_batches=2)
    residents(scheduler, 2)
    take(scheduler, 0.0)
    ask(scheduler, id="urgent", client="urgent", priority=URGENT)
    assert scheduler.next_batch(0.0) is None
    assert preempted(scheduler) == []


def test_work_in_stages_without_memory_is_not_displaced() -> None:
    """A denoising policy cannot start a resident over: it finishes, and the urgent one waits for a place."""
    scheduler = scheduler_of(flush=FlushPolicy.every_step(64, 2), cost=UnitCost)
    for i in range(2):
        ask(scheduler, client=i, priority=BACKGROUND)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 1.0))
    urgent = ask(scheduler, client="urgent", priority=URGENT)
    batch = take(scheduler, 0.0)
    assert urgent not in batch.grants
    assert preempted(scheduler) == []


def test_room_is_somebody_elses_limit_and_is_not_displaced() -> None:
    scheduler = engine(seqs=2)
    residents(scheduler, 2)
    scheduler.set_room("default", 1, 0.0)
    for i in range(2):
        ask(scheduler, id=f"u{i}", client=i, priority=URGENT)
    batch = take(scheduler, 0.0)
    assert ids(batch.grants) == ["r0", "u0"]
    assert batch.short_of == "room"


def test_shares_of_places_hold_between_equals_only() -> None:
    """A client beyond its even part waits for a place, unless what it asks is more urgent than what runs."""
    scheduler = engine(seqs=2)
    mine = [ask(scheduler, id=f"mine{i}", client="me", priority=BACKGROUND) for i in range(2)]
    step(scheduler)
    ask(scheduler, id="other", client="other", priority=BACKGROUND)
    urgent = ask(scheduler, id="urgent", client="me", priority=URGENT)
    assert list(take(scheduler, 0.0).grants) == [mine[0], urgent]


def test_what_has_aged_moves_up_the_queue_and_throws_nobody_out() -> None:
    """Else a backlog of background work would throw out its own kind as soon as it counts as default."""
    flush = FlushPolicy.every_step(64, 2)
    scheduler = scheduler_of(flush=flush, cost=TokenCost, resources=UnitPool(1000), promote_after=0.5)
    tickets = [ask(scheduler, id=f"b{i}", client=i, priority=BACKGROUND) for i in range(6)]
    step(scheduler, 0.0)
    batch = step(scheduler, 1.0)
    assert tickets[2].tier is DEFAULT
    assert list(batch.grants) == tickets[:2]
    assert preempted(scheduler) == []
    ask(scheduler, 1.0, id="urgent", client="urgent", priority=URGENT)
    step(scheduler, 1.0)
    step(scheduler, 1.0)  # b1 has aged; it does not pass its loss on to b0
    assert preempted(scheduler) == ["b1"]


@pytest.mark.parametrize("prompt", [1.0, 30.0])
@pytest.mark.parametrize("wants", [1.0, 7.0, 40.0])
@pytest.mark.parametrize("memory", [16 * 60.0, 16 * 40.0, 16 * 10.0])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_l5_an_urgent_request_on_a_full_engine_gets_its_first_token_within_three_steps(
    budget: int, memory: float, wants: float, prompt: float
) -> None:
    """All places taken by background work, in the midst of its prompts or past them, memory short or not."""
    scheduler = engine(seqs=16, budget=budget, memory=memory)
    for i in range(24):
        ask(scheduler, client=i, priority=BACKGROUND, wants=prompt)
    for _ in range(16):
        step(scheduler)
    urgent = ask(scheduler, client="urgent", priority=URGENT, wants=wants)
    steps = 0
    while urgent.computed < wants:
        step(scheduler)
        steps += 1
    # At worst one unit in the first step, then all of the budget: a prompt longer than that takes as long as it takes.
    assert steps <= max(3, 1 + -(-(wants - 1.0) // budget))
    assert urgent.batches == steps


# -- memory ------------------------------------------------------------------------------------------------------------


def test_l5_less_urgent_residents_give_way_until_the_more_urgent_one_fits() -> None:
    pool = UnitPool(20)
    scheduler = engine(seqs=8, pool=pool)
    tickets = residents(scheduler, 4, wants=4.0)
    assert pool.used == 16.0
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT, wants=10.0)
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == ["r3", "r2"]
    assert ids(batch.grants) == ["r0", "r1", "urgent"]
    assert pool.used == 20.0
    assert set(batch.left) == {tickets[2], tickets[3]}
    assert batch.short_of == "memory"
    assert urgent.granted == 10.0


def test_l5_nobody_gives_way_when_all_of_them_were_not_enough() -> None:
    pool = UnitPool(20)
    scheduler = engine(seqs=8, pool=pool)
    residents(scheduler, 1, URGENT, wants=12.0)
    residents(scheduler, 2, wants=2.0)
    ask(scheduler, id="large", client="large", priority=URGENT, wants=12.0)
    batch = take(scheduler, 0.0)
    assert preempted(scheduler) == []
    assert (len(batch.grants), batch.short_of) == (3, "memory")


def test_l5_nor_a_place_when_the_memory_would_not_do() -> None:
    scheduler = engine(seqs=3, memory=20)
    residents(scheduler, 1, URGENT, wants=12.0)
    residents(scheduler, 2, wants=2.0)
    ask(scheduler, id="large", client="large", priority=URGENT, wants=12.0)
    take(scheduler, 0.0)
    assert preempted(scheduler) == []


def test_l5_nor_to_a_resident_that_would_not_fit_then_and_may_not_give_way_itself() -> None:
    pool = UnitPool(100)
    scheduler = engine(seqs=8, budget=10, pool=pool)
    ask(scheduler, id="small", client="small", priority=BACKGROUND)
    step(scheduler)
    large = ask(scheduler, id="large", client="large", wants=50.0)
    step(scheduler)
    large.lost = 100.0  # it was thrown out with much, and has not come as far again
    pool.capacity = pool.used + 3
    first = ask(scheduler, id="first", client="first", priority=URGENT)
    assert ids(step(scheduler).grants) == ["small", "first"]
    assert preempted(scheduler) == []
    assert (large.state, first.granted) == (TicketState.RESIDENT, 1.0)


# -- budget ------------------------------------------------------------------------------------------------------------


def test_l2_a_less_urgent_partial_prefill_leaves_the_budget_to_a_more_urgent_ticket() -> None:
    scheduler = engine(budget=8)
    (decode,) = residents(scheduler, 1)
    long = ask(scheduler, id="long", client="long", priority=BACKGROUND, wants=100.0)
    step(scheduler)
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT, wants=5.0)
    assert step(scheduler).grants == {decode: 1.0, long: 2.0, urgent: 5.0}
    equal = ask(scheduler, id="equal", client="equal", priority=BACKGROUND, wants=5.0)
    batch = step(scheduler)
    assert batch.grants == {urgent: 1.0, decode: 1.0, long: 6.0}
    assert (equal.granted, batch.short_of) == (0.0, "budget")


def test_l2_less_urgent_decodes_go_first_as_long_as_that_leaves_one_unit() -> None:
    scheduler = engine(seqs=16, budget=6)
    decodes = residents(scheduler, 4)
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT, wants=5.0)
    assert step(scheduler).grants == {**dict.fromkeys(decodes, 1.0), urgent: 2.0}
    assert step(scheduler).grants == {urgent: 3.0, **dict.fromkeys(decodes[:3], 1.0)}
    scheduler = engine(seqs=16, budget=4)
    decodes = residents(scheduler, 4)
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT, wants=5.0)
    assert step(scheduler).grants == {**dict.fromkeys(decodes[:3], 1.0), urgent: 1.0}


def test_l2_who_gives_way_needs_no_budget_any_more() -> None:
    scheduler = engine(seqs=4, budget=5)
    decodes = residents(scheduler)
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT, wants=5.0)
    assert step(scheduler).grants == {**dict.fromkeys(decodes[:3], 1.0), urgent: 2.0}


# -- no thrash ---------------------------------------------------------------------------------------------------------


def test_l5_nobody_gives_way_again_before_it_holds_more_than_it_lost() -> None:
    scheduler = engine(seqs=2, threshold=4.0)
    first, second = residents(scheduler, 2, wants=30.0)
    told = []
    for i in range(3):
        urgent = ask(scheduler, id=f"u{i}", client=i, priority=URGENT)
        step(scheduler)
        told.append((preempted(scheduler), urgent.granted))
        scheduler.cancel(urgent, 0.0)
        step(scheduler)  # whoever gave way is back, with a part of what it had
    assert told == [(["r1"], 1.0), (["r0"], 1.0), ([], 0.0)]
    lost = second.lost
    urgent = ask(scheduler, id="last", client="last", priority=URGENT)
    while not urgent.granted:
        step(scheduler)
    assert preempted(scheduler) == ["r1"]
    assert (first.state, second.lost) == (TicketState.RESIDENT, lost + 1.0)


def test_l5_unless_nothing_could_run_at_all_otherwise() -> None:
    scheduler = engine(seqs=1, budget=4)
    (held,) = residents(scheduler, 1, wants=9.0)
    scheduler.hold(held, 0.0)
    held.lost = 100.0
    urgent = ask(scheduler, id="urgent", client="urgent", priority=URGENT)
    assert list(take(scheduler, 0.0).grants) == [urgent]


MEMORY = [name for name, scenario in SCENARIOS.items() if scenario.groups[0].pool is not None]


@pytest.mark.parametrize("scenario", thinned(MEMORY, ["memory", "stages_memory"]))
def test_l5_between_two_preemptions_a_ticket_came_further_than_before(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random histories, in which every ticket settles in the end; but when nothing else ran in that step."""
    lost: defaultdict[Ticket, list[float]] = defaultdict(list)
    preempt = Filling._preempt

    def noted(filling: Filling, ticket: Ticket, resources: Resources, for_memory: bool) -> None:
        runs = bool(filling.base or filling._entered.grants)
        assert not runs or all(ticket.computed > before for before in lost[ticket]), "thrash"
        if runs:
            lost[ticket].append(ticket.computed)
        preempt(filling, ticket, resources, for_memory)

    monkeypatch.setattr(Filling, "_preempt", noted)
    random = Random(f"thrash {scenario}")
    for _ in range(20):
        Play(SCENARIOS[scenario], random.randbytes(900)).run()
    # In the other scenarios no ticket is preempted twice while others run.
    assert sum(len(often) > 1 for often in lost.values()) >= {"stages_memory": 8, "memory_of_many": 1}.get(scenario, 0)


def test_l5_background_work_ends_after_a_burst_of_urgent_work() -> None:
    """Under the burst it may wait; what it is made to repeat is bounded, and everything ends."""
    scheduler = engine(seqs=4, budget=16, memory=120)
    prompts = {f"b{i}": 10 + i for i in range(8)}
    bursts = {f"u{i}": 6 for i in range(40)}
    generation = Generation(prompts | bursts, 12)
    requests = {r.id: r for r in generation.requests()}
    low = [scheduler.submit(r, 0.0) for r in generation.requests(priority=BACKGROUND) if r.id in prompts]
    urgent = [r for r in generation.requests(priority=URGENT) if r.id in bursts]
    steps = 0
    while not scheduler.idle:
        if steps % 3 == 0 and urgent:
            scheduler.submit(urgent.pop(), 0.0)
        batch = take(scheduler, 0.0)
        scheduler.complete(batch, generation.outcomes(batch), 0.001, 0.0)
        steps += 1
        assert steps < 1000
    assert len(requests) == 48
    assert sum(t.recomputed for t in low) > 0
    for ticket in low:
        assert ticket.granted - ticket.recomputed == generation.total[ticket.id]
        assert ticket.recomputed <= generation.total[ticket.id] ** 2 / 2


# -- what a batch tells ------------------------------------------------------------------------------------------------


def test_a_batch_tells_what_was_short() -> None:
    def told(scheduler: Scheduler) -> str:
        return take(scheduler, 0.0).short_of

    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=2), cost=UnitCost)
    for i in range(5):
        ask(scheduler, client=i)
    scheduler.set_room("default", 1, 0.0)
    batch = take(scheduler, 0.0)
    assert batch.short_of == "room"
    scheduler.set_room("default", None, 0.0)
    finish(scheduler, batch, 0.0)
    finish(scheduler, batch := take(scheduler, 0.0), 0.0)
    assert batch.short_of == "places"
    assert told(scheduler) == ""  # the last two

    scheduler = engine(budget=4)
    for i in range(2):
        ask(scheduler, client=i, wants=4.0)
    assert told(scheduler) == "budget"

    scheduler = engine(memory=5)
    for i in range(2):
        ask(scheduler, client=i, wants=4.0)
    assert told(scheduler) == "memory"

    scheduler = engine(seqs=4)
    for client in "aab":
        ask(scheduler, client=client)
    step(scheduler)
    ask(scheduler, client="a")
    assert told(scheduler) == ""

    scheduler = engine(seqs=4)
    residents(scheduler, 1, DEFAULT, wants=2.0)
    for client in ["r0", "r0", "r0", "x"]:
        ask(scheduler, client=client)
    batch = take(scheduler, 0.0)
    assert (len(batch.admitted), batch.short_of) == (2, "share")


def test_a_batch_that_left_some_out_for_its_deadlines_was_short_of_budget() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(1.0), cost=lambda: trained(0.020, 0.010))
    for i in range(4):
        ask(scheduler, client=i, time_limit=0.070, priority=URGENT)
    for i in range(20):
        ask(scheduler, client=10 + i, time_limit=5.0)
    batch = take(scheduler, 0.0)
    assert 0 < len(batch) < 24
    assert (scheduler.queued("default") > 0, batch.short_of) == (True, "budget")


def test_a_batch_was_short_of_nothing_when_those_it_left_out_are_shed() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.035), cost=lambda: trained(0.020, 0.010))
    for i in range(2):
        ask(scheduler, client=i, time_limit=0.050)
    batch = take(scheduler, 0.0)
    assert (len(batch), scheduler.queued("default"), batch.short_of) == (1, 0, "")


@pytest.mark.parametrize("pool", [None, UnitPool(100)])
def test_a_batch_tells_that_another_stage_was_waiting(pool: UnitPool | None) -> None:
    scheduler = scheduler_of(flush=FlushPolicy.every_step(8, 8), cost=UnitCost, resources=pool)
    ask(scheduler, client="a", stage="prefix", wants=3.0)
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More(None, 2.0, "denoise"))
    ask(scheduler, client="b", stage="prefix", wants=3.0)
    assert take(scheduler, 0.0).short_of == "stage"


def test_a_step_that_threw_somebody_out_and_lets_nobody_in_was_short_of_memory() -> None:
    scheduler = engine(memory=6)
    residents(scheduler, 3, DEFAULT, wants=2.0)
    batch = take(scheduler, 0.0)
    assert (preempted(scheduler), batch.admitted, batch.short_of) == (["r2"], (), "memory")


def test_a_batch_tells_what_those_that_enter_found_already_done() -> None:
    scheduler = engine(pool=Cached(9, 3.0), budget=16)
    a, b = (ask(scheduler, id=name, client=name, wants=wants) for name, wants in (("a", 5.0), ("b", 1.0)))
    batch = step(scheduler)
    assert (batch.cached, batch.grants) == ({a: 3.0}, {a: 2.0, b: 1.0})
    seen = []
    for _ in range(12):
        batch = step(scheduler)
        seen += [(t.id, units, t in batch.admitted) for t, units in batch.cached.items()]
        if a.computed > 8:
            scheduler.cancel(a, 0.0)
    assert seen
    assert all(entry == ("b", 3.0, True) for entry in seen)  # it was thrown out, and found what it knew


@pytest.mark.long
def test_the_histories_displace() -> None:
    """A history in which nobody ever gives way would prove nothing."""
    short: defaultdict[str, int] = defaultdict(int)
    entered_over = cached = 0
    for name in [*MEMORY, "tokens", "stages"]:
        random = Random(f"displace {name}")
        for _ in range(8):
            play = Play(SCENARIOS[name], random.randbytes(1000))
            step = play.step

            def noted(step: Any = step) -> Batch | None:
                nonlocal entered_over, cached
                batch = step()
                if batch is not None:
                    short[batch.short_of] += 1
                    cached += bool(batch.cached)
                    entered_over += bool(batch.admitted) and any(t.state is TicketState.WAITING for t in batch.left)
                return batch

            play.step = noted  # type: ignore[method-assign]
            play.run()
    for reason in ("", "budget", "places", "memory", "share", "room", "stage"):
        assert short[reason] >= 5, reason
    assert entered_over >= 20
    assert cached >= 50
