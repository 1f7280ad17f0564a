"""Who goes first: partitions, groups, tiers, clients (contract B10, B21, F7, G3)."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from reflex_runtime.core.batch import Cause, Done, More
from reflex_runtime.core.cost import TokenCost, UnitCost
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.order import IDLE_CLIENTS, ByArrival, Clients
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, ask_many, finish, ids, measure, scheduler_of, serve, take, trained

ONE = FlushPolicy(max_batch_size=1)
FOUR = FlushPolicy(max_batch_size=4)


def order_of(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Ids in the order they are served, one batch after the other."""
    return [t.id for _, batch in serve(scheduler, lambda batch: 0.001, now) for t in batch.grants]


# -- tiers -----------------------------------------------------------------------------------------------------------


def test_g3_tiers_are_served_in_order_and_first_in_first_out_within() -> None:
    scheduler = scheduler_of(flush=ONE, cost=UnitCost)
    for i, priority in enumerate((2, 1, 0, 2, 1, 0)):
        ask(scheduler, id=str(i), priority=Priority(priority))
    assert order_of(scheduler) == ["2", "5", "1", "4", "0", "3"]


def test_g3_background_fills_free_places() -> None:
    scheduler = scheduler_of(flush=FOUR)
    ask(scheduler, id="background", priority=Priority.BACKGROUND)
    ask_many(scheduler, 2, id="default")
    assert ids(take(scheduler, 0.0).grants) == ["default", "default", "background"]


def test_g3_background_counts_as_default_after_promote_after_and_is_counted() -> None:
    scheduler = scheduler_of(flush=ONE, promote_after=0.5)
    old = ask(scheduler, 0.0, id="old", client="a", priority=Priority.BACKGROUND)
    scheduler.pause("default", 0.5, 0.0)
    ask(scheduler, 0.4, id="new", client="b")
    batch = take(scheduler, 0.5)
    assert list(batch.grants) == [old]
    assert old.tier is Priority.DEFAULT
    assert old.request.priority is Priority.BACKGROUND
    assert scheduler.snapshot()["groups"]["default"]["promoted"] == 1


def test_background_is_promoted_after_half_its_time_limit_when_that_is_sooner() -> None:
    scheduler = scheduler_of(flush=ONE, promote_after=10.0)
    old = ask(scheduler, 0.0, client="a", priority=Priority.BACKGROUND, time_limit=1.0)
    scheduler.pause("default", 0.5, 0.0)
    ask(scheduler, 0.4, client="b")
    assert list(take(scheduler, 0.5).grants) == [old]


def test_promotion_takes_the_elders_of_the_same_client_along() -> None:
    scheduler = scheduler_of(flush=ONE, promote_after=10.0)
    ask(scheduler, 0.0, id="elder", client="a", priority=Priority.BACKGROUND)
    ask(scheduler, 0.0, id="hurried", client="a", priority=Priority.BACKGROUND, time_limit=1.0)
    ask(scheduler, 0.0, id="younger", client="a", priority=Priority.BACKGROUND)
    scheduler.pause("default", 0.5, 0.0)
    ask(scheduler, 0.4, id="default", client="b")
    order = order_of(scheduler, 0.5)
    assert order.index("elder") < order.index("hurried") < order.index("younger")
    assert order[-1] == "younger"


def test_a_promoted_ticket_and_a_default_one_of_the_same_client_are_charged_together_within_a_fill() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=6), cost=UnitCost, promote_after=0.5)
    for _ in range(3):
        ask(scheduler, 0.0, id="a", client="a", priority=Priority.BACKGROUND)
    scheduler.pause("default", 0.5, 0.0)
    for _ in range(3):
        ask(scheduler, 0.1, id="a", client="a")
    for _ in range(3):
        ask(scheduler, 0.2, id="b", client="b")
    assert ids(take(scheduler, 0.5).grants) == ["a", "b", "a", "b", "a", "b"]


# -- fair shares -----------------------------------------------------------------------------------------------------


def test_b21_one_greedy_client_cannot_starve_the_others() -> None:
    scheduler = scheduler_of(flush=FOUR, cost=UnitCost)
    ask_many(scheduler, 100, client="greedy", id="greedy")
    ask(scheduler, client="modest", id="modest")
    assert "modest" in ids(take(scheduler, 0.0).grants)


def test_b21_shares_within_one_batch_are_already_fair() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=6), cost=UnitCost)
    for client in "abc":
        ask_many(scheduler, 10, client=client, id=client)
    assert sorted(ids(take(scheduler, 0.0).grants)) == ["a", "a", "b", "b", "c", "c"]


def test_b21_shares_are_by_weight() -> None:
    scheduler = scheduler_of(flush=ONE, cost=UnitCost)
    ask_many(scheduler, 60, client="heavy", id="heavy", weight=3.0)
    ask_many(scheduler, 60, client="light", id="light")
    first = order_of(scheduler)[:40]
    assert first.count("heavy") == 30


def test_b21_shares_are_in_cost_units_not_requests() -> None:
    model = trained(0.0, 0.010)
    for n in (1, 2, 3) * 10:
        measure(model, ["dear"] * n, 0.040 * n)
    scheduler = scheduler_of(flush=ONE, cost=lambda: model)
    ask_many(scheduler, 100, client="cheap", id="cheap")
    ask_many(scheduler, 100, client="dear", id="dear", cost_class="dear")
    log = serve(scheduler, lambda batch: sum(0.040 if t.id == "dear" else 0.010 for t in batch.grants))
    first = [t.id for _, batch in log for t in batch.grants][:50]
    assert first.count("cheap") / first.count("dear") == pytest.approx(4.0, rel=0.1)


def test_b21_a_returning_client_is_lifted_to_the_active_minimum() -> None:
    scheduler = scheduler_of(flush=ONE, cost=UnitCost)
    ask_many(scheduler, 20, client="a", id="a")
    for _ in range(10):
        finish(scheduler, take(scheduler, 0.0), 0.0)
    ask_many(scheduler, 20, client="b", id="b")  # no credit for the time it was away
    first = order_of(scheduler)[:10]
    assert first.count("a") == 5


def test_b21_nobody_is_charged_for_having_had_an_idle_device_to_himself() -> None:
    scheduler = scheduler_of(flush=ONE, cost=UnitCost)
    for _ in range(1000):  # alone all morning
        ask(scheduler, client="a", id="a")
        finish(scheduler, take(scheduler, 0.0), 0.0)
    ask_many(scheduler, 500, client="b", id="b")
    ask(scheduler, client="a", id="a")
    assert "a" in order_of(scheduler)[:2]


def test_f7_shares_of_backlogged_clients_are_equal() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=3), cost=UnitCost)
    clients = "abcde"
    for i, client in enumerate(clients):
        ask_many(scheduler, 40 * (i + 1), client=client, id=client)
    first = order_of(scheduler)[:150]
    shares = [first.count(c) for c in clients]
    jain = sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))
    assert jain >= 0.99


def test_counters_of_clients_long_gone_are_forgotten() -> None:
    clients = Clients()
    for i in range(2 * IDLE_CLIENTS):
        client = clients.enter(i)
        clients.shares.charge(client, 1.0)
        clients.leave(client, float(i))
    assert len(clients._known) <= IDLE_CLIENTS + 1
    assert len(clients) == 0


def test_the_oldest_waiting_ticket_is_known_whoever_comes_back_and_leaves() -> None:
    random = Random(7)
    line = ByArrival()
    tickets = [Ticket(Request(), i, 0.0) for i in range(600)]
    here: set[int] = set()
    for i in range(600):
        for again in {i, random.randrange(i + 1)} - here:  # somebody new, and often somebody who was here before
            line.add(tickets[again])
            here.add(again)
        for gone in random.sample(sorted(here), min(len(here), random.randrange(4))):
            here.discard(gone)
            del line[tickets[gone]]
        assert list(line) == [tickets[number] for number in sorted(here)]
        assert line.first is (tickets[min(here)] if here else None)


def test_f7_first_in_first_out_within_a_client_whatever_it_costs() -> None:
    model = trained(0.0, 0.010)
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_cost=0.045), cost=lambda: model)
    for i, client in enumerate("abababab"):
        ask(scheduler, client=client, id=f"{client}{i}")
    seen = order_of(scheduler)
    for client in "ab":
        own = [s for s in seen if s.startswith(client)]
        assert own == sorted(own)


# -- what does not fit -------------------------------------------------------------------------------------------------


def dear_and_cheap() -> Scheduler:
    model = trained(0.0, 0.010)
    for n in (1, 2, 3) * 10:
        measure(model, ["dear"] * n, 0.080 * n)
    return scheduler_of(flush=FlushPolicy(max_batch_cost=0.100), cost=lambda: model)


def test_b4_what_does_not_fit_is_passed_over_with_its_clients_later_tickets_and_keeps_its_place() -> None:
    scheduler = dear_and_cheap()
    ask(scheduler, id="a dear", client="a", cost_class="dear")
    ask(scheduler, id="b dear", client="b", cost_class="dear")
    ask(scheduler, id="b cheap", client="b")
    ask(scheduler, id="c cheap", client="c")
    first = take(scheduler, 0.0)
    assert ids(first.grants) == ["a dear", "c cheap"]
    assert first.cause is Cause.FULL
    finish(scheduler, first, 0.09, elapsed=0.09)
    assert ids(take(scheduler, 0.09).grants) == ["b dear", "b cheap"]


def test_at_most_16_are_passed_over_per_fill() -> None:
    scheduler = dear_and_cheap()
    for i in range(17):
        ask(scheduler, id=f"dear {i}", client=i, cost_class="dear")
    ask(scheduler, id="cheap", client="cheap")
    assert ids(take(scheduler, 0.0).grants) == ["dear 0"]
    scheduler = dear_and_cheap()
    for i in range(16):
        ask(scheduler, id=f"dear {i}", client=i, cost_class="dear")
    ask(scheduler, id="cheap", client="cheap")
    assert ids(take(scheduler, 0.0).grants) == ["dear 0", "cheap"]


# -- partitions ------------------------------------------------------------------------------------------------------


def test_b10_partitions_never_share_a_batch_and_never_block_each_other() -> None:
    scheduler = scheduler_of(flush=FOUR)
    for i in range(6):
        ask(scheduler, partition=("shape", i % 2), id=str(i))
    batches = [batch for _, batch in serve(scheduler, lambda batch: 0.001)]
    assert [ids(b.grants) for b in batches] == [["0", "2", "4"], ["1", "3", "5"]]


def test_b10_urgent_goes_before_an_older_partition() -> None:
    scheduler = scheduler_of(flush=FOUR)
    ask(scheduler, partition="p", id="old")
    ask(scheduler, partition="q", id="urgent", priority=Priority.URGENT)
    batch = take(scheduler, 0.0)
    assert ids(batch.grants) == ["urgent"]
    assert batch.cause is Cause.URGENT


def test_b10_a_deadline_at_risk_goes_before_an_older_partition() -> None:
    for limit, first in ((0.105, "hurried"), (0.5, "old")):
        scheduler = scheduler_of(flush=FlushPolicy(max_batch_cost=0.100), cost=lambda: trained(0.010, 0.001))
        ask(scheduler, partition="p", id="old")
        ask(scheduler, partition="q", id="hurried", time_limit=limit)
        assert ids(take(scheduler, 0.0).grants) == [first]


def test_b10_least_laxity_first_where_deadlines_are_at_risk() -> None:
    model = trained(0.010, 0.001)
    for n in (1, 2, 4) * 10:
        measure(model, ["dear"] * n, 0.010 + 0.040 * n)
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_cost=0.100), cost=lambda: model)
    ask(scheduler, partition="p", id="earlier deadline", time_limit=0.070)  # laxity 59 ms
    ask(scheduler, partition="q", id="less laxity", time_limit=0.080, cost_class="dear")  # laxity 30 ms
    assert ids(take(scheduler, 0.0).grants) == ["less laxity"]


def test_b10_else_the_oldest_head_counting_residents() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.every_step(8, 8), cost=TokenCost)
    ask(scheduler, partition="p", id="p")
    finish(scheduler, take(scheduler, 0.0), 0.0, outcome=More())
    ask(scheduler, partition="q", id="q")
    assert ids(take(scheduler, 0.0).grants) == ["p"]


def test_b10_what_runs_has_no_say_in_the_order() -> None:
    scheduler = scheduler_of(max_batches=2, flush=FlushPolicy(max_batch_cost=0.1, max_batch_size=1))
    ask(scheduler, partition="q", id="running", time_limit=0.050)
    take(scheduler, 0.0)
    ask(scheduler, partition="p", id="old")
    ask(scheduler, partition="q", id="young")
    assert ids(take(scheduler, 0.0).grants) == ["old"]


# -- groups ----------------------------------------------------------------------------------------------------------


def two_groups(*weights: float, **config: object) -> Scheduler:
    return Scheduler(
        [
            GroupConfig(name=n, weight=w, flush=ONE, cost=UnitCost, **config)
            for n, w in zip("abc", weights, strict=False)
        ]  # type: ignore[arg-type]
    )


def groups_of(scheduler: Scheduler, n: int, elapsed: float = 0.01) -> str:
    out, now = "", 0.0
    for _ in range(n):
        batch = take(scheduler, now)
        out += batch.group
        now += elapsed
        finish(scheduler, batch, now, elapsed)
    return out


def test_b10_groups_take_turns_by_device_time_and_weight() -> None:
    scheduler = two_groups(2.0, 1.0)
    for group in "ab":
        ask_many(scheduler, 60, group=group)
    assert groups_of(scheduler, 30).count("a") == 20


def tenants(*groups: tuple[str, str, float]) -> Scheduler:
    """Groups of (name, tenant, weight)."""
    configs = [GroupConfig(name=n, tenant=t, weight=w, flush=ONE, cost=UnitCost) for n, t, w in groups]
    return Scheduler(configs)


def turns_of(scheduler: Scheduler, busy: str, turns: int) -> list[int]:
    """How many turns each of these groups gets if all of them have work."""
    for name in busy:
        ask_many(scheduler, turns, group=name)
    ran = groups_of(scheduler, turns)
    return [ran.count(name) for name in busy]


def test_p35_groups_of_one_tenant_share_its_weight() -> None:
    assert turns_of(tenants(("a", "arm", 1.0), ("b", "arm", 1.0), ("h", "", 1.0)), "abh", 80) == [20, 20, 40]
    assert turns_of(tenants(("a", "arm", 3.0), ("b", "arm", 3.0), ("h", "", 1.0)), "abh", 80) == [30, 30, 20]


def test_p35_a_group_whose_mates_have_nothing_has_all_of_its_tenants_share() -> None:
    scheduler = tenants(("a", "arm", 1.0), ("b", "arm", 1.0), ("h", "", 1.0))
    assert turns_of(scheduler, "ah", 40) == [20, 20]
    assert turns_of(scheduler, "bah", 40) == [10, 10, 20]  # b owes nothing and has no credit


def test_p35_groups_of_one_tenant_name_the_same_weight() -> None:
    with pytest.raises(ConfigError, match=r"weight=2\.0: is 1\.0 in another group of tenant 'arm'"):
        tenants(("a", "arm", 1.0), ("b", "arm", 2.0))


def test_b10_device_time_is_what_was_measured_not_turns() -> None:
    scheduler = two_groups(1.0, 1.0)
    for group in "ab":
        ask_many(scheduler, 100, group=group)
    turns, now = {"a": 0, "b": 0}, 0.0
    for _ in range(60):
        batch = take(scheduler, now)
        turns[batch.group] += 1
        elapsed = 0.010 if batch.group == "a" else 0.050
        now += elapsed
        finish(scheduler, batch, now, elapsed)
    assert turns["a"] == pytest.approx(5 * turns["b"], abs=6)


def test_a_group_of_weight_0_runs_only_when_nothing_else_waits() -> None:
    scheduler = two_groups(1.0, 0.0)
    ask_many(scheduler, 3, group="b")
    ask_many(scheduler, 3, group="a")
    assert groups_of(scheduler, 6) == "aaabbb"


def test_a_group_of_weight_0_takes_a_free_place_beside_what_runs() -> None:
    scheduler = Scheduler(
        [GroupConfig(name=n, weight=w, flush=ONE, cost=UnitCost) for n, w in (("a", 1.0), ("b", 0.0))], max_batches=2
    )
    ask(scheduler, group="a")
    ask(scheduler, group="b")
    assert take(scheduler, 0.0).group == "a"
    assert take(scheduler, 0.0).group == "b"


def test_a_returning_group_has_no_credit_for_the_time_it_was_away() -> None:
    scheduler = two_groups(1.0, 1.0)
    ask_many(scheduler, 60, group="a")
    groups_of(scheduler, 20)
    ask_many(scheduler, 60, group="b")
    assert groups_of(scheduler, 20).count("a") == 10


def test_no_group_is_charged_for_having_had_an_idle_device_to_itself() -> None:
    scheduler = two_groups(1.0, 1.0)
    for _ in range(300):
        ask(scheduler, group="a")
        groups_of(scheduler, 1)
    ask_many(scheduler, 60, group="b")
    ask(scheduler, group="a")
    assert "a" in groups_of(scheduler, 3)


def test_a_group_of_weight_0_lifts_nobody_else() -> None:
    scheduler = two_groups(1.0, 1.0, 0.0)
    ask_many(scheduler, 60, group="c")  # always there, hardly ever served
    ask_many(scheduler, 90, group="a")
    groups_of(scheduler, 30)
    ask_many(scheduler, 60, group="b")
    assert groups_of(scheduler, 20).count("a") == 10


def test_a_group_has_its_own_queue_caps_and_pause() -> None:
    scheduler = two_groups(1.0, 1.0, capacity=1)
    ask(scheduler, group="a")
    ask(scheduler, group="b")
    scheduler.pause("a", inf, 0.0)
    assert groups_of(scheduler, 1) == "b"
    assert scheduler.queued("a") == 1


# -- determinism -------------------------------------------------------------------------------------------------------


def test_a_weight_so_large_that_its_charge_vanishes_is_served_all_the_same() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.every_step(4, 4), cost=TokenCost)
    random = Random(7)
    now = 0.0
    for i in range(60):
        ask(scheduler, now, client=i % 3, weight=1e300, wants=float(random.randint(1, 6)))
    for _ in range(400):
        batch = scheduler.next_batch(now)
        if batch is None:
            break
        outcomes = [Done() if u >= t.wants else More(None, t.wants - u) for t, u in batch.grants.items()]
        scheduler.complete(batch, outcomes, 0.001, now)
    assert scheduler.idle
