"""The planner: whose requests it takes for greed, and that it plans for nothing else."""

from __future__ import annotations

from random import Random

import pytest

from reflex_runtime.core.adapt import Planner
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority, Request, Ticket

BASE = FlushPolicy.window(0.100)
DEVICE = (0.020, 0.002, 0.03)  # fixed, marginal, sigma: 400 requests a second at the budget


def budgets(rates: dict[str, float], seconds: float = 8.0, seed: int = 0, **request: object) -> list[float]:
    """The budget in force at each arrival of Poisson clients, by their rates."""
    rng, planner = Random(seed), Planner()
    coming = sorted((at, client) for client, rate in rates.items() for at in _poisson(rng, rate, seconds))
    found = []
    for i, (at, client) in enumerate(coming):
        planner.arrived(Ticket(Request(client=client, **{"time_limit": 0.150, **request}), i, at), at, 0)  # type: ignore[arg-type]
        found.append(planner.policy(BASE, lambda: DEVICE, at, "").max_batch_cost)
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
        planner.arrived(Ticket(request, i, at), at, 0)
        found.append(planner.policy(BASE, lambda: DEVICE, at, "").max_batch_cost)
    assert max(found[1000:]) < 0.5 * BASE.max_batch_cost
