"""The planner: whose requests it takes for greed, and that it plans for nothing else."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, finish, take, trained

BASE = FlushPolicy.window(0.100)
DEVICE = (0.020, 0.002, 0.03)  # fixed, marginal, sigma: 400 requests a second at the budget


def budgets(
    rates: dict[str, float],
    seconds: float = 8.0,
    seed: int = 0,
    base: FlushPolicy = BASE,
    device: tuple[float, float, float] = DEVICE,
    **request: object,
) -> list[float]:
    """The budget in force at each arrival of Poisson clients, by their rates."""
    rng, planner = Random(seed), Planner()
    coming = sorted((at, client) for client, rate in rates.items() for at in _poisson(rng, rate, seconds))
    found = []
    for i, (at, client) in enumerate(coming):
        planner.arrived(Ticket(Request(client=client, **{"time_limit": 0.150, **request}), i, at), at)  # type: ignore[arg-type]
        found.append(planner.policy(base, lambda: device, at, "").max_batch_cost)
    return found


def _poisson(rng: Random, rate: float, seconds: float) -> list[float]:
    times, at = [], rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times


@pytest.mark.parametrize("clients", [2, 8, 40, 200, 1000])
@pytest.mark.parametrize("offered", [100.0, 400.0, 1200.0])
def test_chance_is_not_greed(clients: int, offered: float) -> None:
    rates = {f"robot-{i}": offered / clients for i in range(clients)}
    assert set(budgets(rates)) == {BASE.max_batch_cost}


def test_clients_that_ask_once_are_not_greedy_however_many_they_are() -> None:
    planner, random, at, found = Planner(), Random(3), 0.0, []
    for i in range(6000):
        at += random.expovariate(600.0)
        planner.arrived(Ticket(Request(client=i, time_limit=0.100), i, at), at)
        found.append(planner.policy(BASE, lambda: DEVICE, at, "").max_batch_cost)
    assert set(found) == {BASE.max_batch_cost}


@pytest.mark.parametrize("greedy", [200.0, 600.0])
def test_a_greedy_client_shortens_the_batches_within_a_second(greedy: float) -> None:
    modest = {f"modest-{i}": 20.0 for i in range(7)}
    found = budgets({**modest, "greedy": greedy})
    planned = [budget < BASE.max_batch_cost for budget in found]
    assert all(planned[len(planned) // 8 :]), "after the first of eight seconds"
    assert not any(budget < BASE.max_batch_cost for budget in budgets({**modest, "greedy": 20.0}))


def test_urgent_requests_shorten_the_batches_of_others() -> None:
    planner, found = Planner(), []
    for i in range(4000):
        at = i / 800.0
        urgent = i % 10 == 0
        request = Request(
            client="urgent" if urgent else "usual",
            priority=Priority.URGENT if urgent else Priority.DEFAULT,
            time_limit=0.050 if urgent else 0.100,
        )
        planner.arrived(Ticket(request, i, at), at)
        found.append(planner.policy(BASE, lambda: DEVICE, at, "").max_batch_cost)
    assert max(found[1000:]) < 0.5 * BASE.max_batch_cost


def test_thousands_of_time_limits_count_roughly_and_few_as_they_are() -> None:
    """Callers that send the same deadline at different times have a limit each, and a plan looks at all of them."""
    planner = Planner()
    for i in range(3000):
        at = i / 1000.0
        planner.arrived(Ticket(Request(client=i, time_limit=5.0 - at), i, at), at)
    planner.policy(BASE, lambda: DEVICE, 3.0, "")
    assert len(planner._demand) <= Planner.KINDS
    assert sum(d.rates[-1] * d.seen for d in planner._demand.values()) > 2900.0, "each is counted"
    assert len(planner._counts) <= Planner.CLIENTS + Planner.KINDS
    few = Planner()
    for i, limit in enumerate((0.125, 1.25, inf)):
        few.arrived(Ticket(Request(client=i, time_limit=limit), i, 0.0), 0.0)
    few.policy(BASE, lambda: DEVICE, 0.5, "")
    assert [limit for _, limit in few._demand] == [0.125, 1.25, inf]


# -- models with a large fixed part ------------------------------------------------------------------------------------

DEFAULT = FlushPolicy.window(None)
SLOW = (0.040, 0.004, 0.03)
EQUALS = {f"robot-{i}": 2.0 for i in range(64)}


@pytest.mark.parametrize(
    ("fixed", "budget"), [(0.0, 0.100), (0.006, 0.100), (0.020, 0.320), (0.080, 1.280), (1.0, 2.0)]
)
def test_b4_by_default_a_batch_may_take_sixteen_times_its_fixed_part(fixed: float, budget: float) -> None:
    found = budgets(EQUALS, 1.0, base=DEFAULT, device=(fixed, 0.004, 0.03), time_limit=None)
    assert found[-1] == pytest.approx(budget)
    assert found[0] == 0.100  # nothing is known of its callers yet


def test_b4_a_budget_that_was_given_stays_a_ceiling() -> None:
    assert set(budgets(EQUALS, 1.0, device=SLOW, time_limit=None)) == {0.100}


def test_one_client_alone_gets_longer_batches_too() -> None:
    assert budgets({"bulk": 50.0}, 1.0, base=DEFAULT, device=SLOW, time_limit=None)[-1] == pytest.approx(0.640)


@pytest.mark.parametrize(("fixed", "budget"), [(0.040, 0.100), (0.200, 0.400)])
def test_b21_beside_a_greedy_client_batches_stay_short(fixed: float, budget: float) -> None:
    """They would only be filled with its requests, and the others wait for them."""
    modest = {f"modest-{i}": 3.0 for i in range(7)}
    found = budgets({**modest, "greedy": 400.0}, base=DEFAULT, device=(fixed, 0.004, 0.03), time_limit=None)
    assert set(found[len(found) // 8 :]) == {budget}


def test_beside_requests_of_another_priority_batches_stay_short() -> None:
    planner, found = Planner(), []
    for i in range(1200):
        at = i / 100.0
        urgent = 400 <= i < 600 and i % 50 == 0
        request = Request(client=i % 20, priority=Priority.URGENT if urgent else Priority.DEFAULT)
        planner.arrived(Ticket(request, i, at), at)
        found.append(planner.policy(DEFAULT, lambda: SLOW, at, "").max_batch_cost)
    assert found[399] == found[-1] == pytest.approx(0.640)
    assert set(found[420:800]) == {0.100}, "while they come, and for some seconds after"


def test_each_partition_has_its_own_fixed_part() -> None:
    planner = Planner()
    for i in range(100):
        planner.arrived(Ticket(Request(client=i % 20), i, i / 100.0), i / 100.0)
    for partition, fixed, budget in (("slow", 0.050, 0.800), ("brief", 0.001, 0.100), ("slow", 0.050, 0.800)):
        found = planner.policy(DEFAULT, lambda fixed=fixed: (fixed, 0.004, 0.03), 1.0, partition)  # type: ignore[misc]
        assert found.max_batch_cost == pytest.approx(budget)


def test_longer_batches_need_a_planner() -> None:
    with pytest.raises(ConfigError, match="times_fixed"):
        GroupConfig(flush=DEFAULT)


def test_b10_urgent_requests_share_a_batch_longer_than_planned_and_nobody_else_joins() -> None:
    """The plan is for urgent requests to come; without those that wait, it would make them late one after another."""
    planner = Planner()
    cost = trained(0.010, 0.010)
    group = GroupConfig(flush=BASE, controller=planner, cost=lambda: cost)
    scheduler = Scheduler([group])
    planner.policy = lambda base, affine, now, partition: replace(base, max_batch_cost=0.035)  # type: ignore[method-assign]
    for i in range(6):
        ask(scheduler, id="usual", client=i)
    batch = take(scheduler, 0.0)
    assert len(batch) == 2, "of 30 ms"
    finish(scheduler, batch, 0.030, 0.030)
    for i in range(6):
        ask(scheduler, 0.030, id="urgent", client=10 + i, priority=Priority.URGENT)
    assert [t.id for t in take(scheduler, 0.030).grants] == ["urgent"] * 6
