"""Which partition takes the next turn: shares of device time, deadlines within them, and what a turn costs."""

from __future__ import annotations

import gc
from math import inf

import pytest

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import IDLE_PARTITIONS, GroupConfig
from reflex_runtime.core.order import AT_ONCE, CREDIT, NEAREST, Partition
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim.run import Affine, Run, simulate
from reflex_runtime.sim.workload import Open, Poisson

from .helpers import ask, finish, scheduler_of, take, trained

FIXED, MARGINAL = 0.020, 0.002  # seconds: 400 requests a second at batches of 80


def beside_deadlines(rate: float, limit: float = 0.100) -> Run:
    """A partition whose requests have deadlines beside one that asks five times a second and has none."""
    hurried = [Request(id="hurried", partition="hurried", client=i, time_limit=limit) for i in range(40)]
    modest = [Request(id="modest", partition="modest", client="modest")]
    scheduler = Scheduler([GroupConfig(flush=FlushPolicy.window(0.100))])
    workload = (Open(Poisson(rate), hurried), Open(Poisson(5.0), modest))
    return simulate(scheduler, workload, Affine(FIXED, MARGINAL), duration=40.0, seed=1)


@pytest.mark.parametrize("rate", [200.0, 300.0])
def test_b10_a_partition_without_deadlines_waits_no_longer_than_its_share(rate: float) -> None:
    run = beside_deadlines(rate)
    waits = [a.latency for a in run.answers if a.request.id == "modest" and a.outcome == "ok"]
    assert len(waits) > 150
    assert max(waits) < CREDIT + 2 * 0.100 + 0.025  # the other's credit, the batch that runs and another, and its own
    on_time = [a.on_time for a in run.answers if a.request.id == "hurried"]
    assert sum(on_time) / len(on_time) > (0.9 if rate == 200.0 else 0.5)


@pytest.mark.parametrize("clients", [("one", "one"), ("cheap", "dear")], ids=["one client", "two clients"])
def test_b10_backlogged_partitions_of_different_cost_get_equal_device_time(clients: tuple[str, str]) -> None:
    def seconds(batch: Batch) -> float:
        return (0.010 if batch.partition == "cheap" else 0.190) * len(batch)

    scheduler = scheduler_of(flush=FlushPolicy.window(0.4, 0.0, 4), capacity=10**6)
    for _ in range(4000):
        for partition, client in zip(("cheap", "dear"), clients, strict=True):
            ask(scheduler, partition=partition, client=client, shape=partition)
    device, now = {"cheap": 0.0, "dear": 0.0}, 0.0
    while now < 60.0:
        batch = take(scheduler, now)
        elapsed = seconds(batch)
        device[str(batch.partition)] += elapsed
        now += elapsed
        finish(scheduler, batch, now, elapsed)
    assert 0.49 < device["cheap"] / now < 0.51


@pytest.mark.parametrize(("had", "first"), [(0.5 * CREDIT, "hurried"), (1.5 * CREDIT, "modest")])
def test_b10_a_deadline_at_risk_goes_first_within_the_share_of_its_partition(had: float, first: str) -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.2, 0.0, 1), cost=lambda: trained(0.010, 0.001))
    ask(scheduler, partition="modest")
    ask(scheduler, partition="hurried", priority=Priority.URGENT)
    ask(scheduler, partition="hurried")
    finish(scheduler, take(scheduler, 0.0), had, elapsed=had)  # the urgent one
    ask(scheduler, had, partition="hurried", time_limit=0.100)
    assert take(scheduler, had).partition == first


def test_b10_a_partition_that_comes_back_is_lifted_and_one_alone_owes_nothing() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.1, 0.0, 1), cost=UnitCost)
    ask(scheduler, partition="p")
    finish(scheduler, take(scheduler, 0.0), 5.0, elapsed=5.0)
    for _ in range(3):
        ask(scheduler, 5.0, partition="q")
        ask(scheduler, 5.0, partition="p")
    turns = []
    for i in range(6):
        batch = take(scheduler, 5.0 + i)
        turns.append(batch.partition)
        finish(scheduler, batch, 6.0 + i, elapsed=1.0)
    assert turns == ["q", "p"] * 3


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Partition]:
    """Partitions looked at, one entry a look."""
    found: list[Partition] = []
    original = Partition.oldest

    def counted(self: Partition) -> Ticket | None:
        found.append(self)
        return original(self)

    monkeypatch.setattr(Partition, "oldest", counted)
    return found


@pytest.mark.parametrize("limit", [None, 1e6], ids=["no deadlines", "deadlines"])
def test_cost_a_turn_looks_at_few_partitions_however_many_wait(looks: list[Partition], limit: float | None) -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.1, 0.0), capacity=10**6)
    for i in range(2000):
        ask(scheduler, partition=i, time_limit=limit, priority=Priority(i % 3))
    take(scheduler, 0.0)
    looks.clear()
    now = 0.0
    for i in range(100):
        now += 0.01
        ask(scheduler, now, partition=i, time_limit=limit)
        finish(scheduler, next(iter(scheduler._in_flight)), now)
        scheduler.wake_at()
        take(scheduler, now)
    assert len(looks) <= 100 * (NEAREST + 12)


def tickets_alive() -> int:
    """By type, not isinstance: that would wake lazy objects of other libraries."""
    return sum(type(found) is Ticket for found in gc.get_objects())


def test_settled_tickets_are_forgotten_by_partitions_that_stay_and_by_those_that_empty() -> None:
    scheduler = scheduler_of(flush=FlushPolicy.window(0.1, 0.0, 16), capacity=10**6)
    gc.collect()
    before = tickets_alive()
    stay = [ask(scheduler, partition=i, client="stays", time_limit=1e9) for i in range(100)]
    now = 0.0
    for turn in range(40):
        for i in range(200):
            priority = Priority.BACKGROUND if turn % 2 else Priority.DEFAULT
            ticket = ask(scheduler, now, partition=i, client=turn, time_limit=1e6, priority=priority)
            scheduler.cancel(ticket, now)
        now += 1.0
    scheduler.take_events()
    del ticket
    gc.collect()
    alive = tickets_alive() - before
    assert alive <= len(stay) + 100 * 24, "a few of each partition that has others; 8,000 were settled"
    assert len(scheduler._groups["default"].partitions) <= IDLE_PARTITIONS + len(stay)
    assert scheduler.wake_at() < inf


def test_ten_thousand_new_partitions_are_sorted_as_they_come() -> None:
    """Not by the next question: it would keep the lock for 50 ms."""
    scheduler = scheduler_of(capacity=10**5)
    turns = scheduler._groups["default"].turns
    for i in range(10_000):
        ask(scheduler, partition=i, client=i)
        assert len(turns.touched) <= AT_ONCE
    assert take(scheduler, 0.0).partition == 0
