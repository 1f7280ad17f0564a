"""The promises of the core, over random histories, most of them against the oracle.

A history is a string of bytes (`histories.py`). Long ones come from seeded generators; short ones from hypothesis,
which shrinks what it finds. Both are the same on every machine and every run.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import defaultdict
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reflex_runtime.core import admission, forming, order
from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Done,
    Failed,
    More,
    RequestQueued,
    RequestSettled,
)
from reflex_runtime.core.cost import TimeCost, TokenCost, UnitCost
from reflex_runtime.core.errors import ProcessorError, Rejected, TooLate
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket, TicketState
from reflex_runtime.core.scheduler import Scheduler

from .helpers import ask, ask_many, finish, scheduler_of, take, trained
from .histories import SCENARIOS, Play

REPEATABLE = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# Long ones per scenario and way to sort. Most mutants fail one in four; the rarest, one in 300 of one scenario.
HISTORIES = pytest.mark.parametrize("histories", [4, pytest.param(40, marks=pytest.mark.long)])


# -- everything at once: batches, causes, outcomes, counters and wake times are what the oracle says -------------------


@HISTORIES
@pytest.mark.parametrize("shown", [order.SORTED, 0], ids=["sorted", "heaps"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_oracle_agrees_on_long_histories(
    scenario: str, shown: int, histories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few clients waiting a fill sorts their queues, with many it walks a heap: the same order both ways. And
    whether what must leave does so at once, or in slices of two: the same end."""
    monkeypatch.setattr(order, "SORTED", shown)
    if not shown:
        monkeypatch.setattr(admission, "AT_ONCE", 2)
    random = Random(f"{scenario} {shown} 0")
    for _ in range(histories):
        Play(SCENARIOS[scenario], random.randbytes(random.choice((100, 300, 1000)))).run()


@pytest.mark.parametrize("scenario", SCENARIOS)
@REPEATABLE
@given(st.binary(max_size=150))
def test_the_oracle_agrees_on_short_histories(scenario: str, data: bytes) -> None:
    Play(SCENARIOS[scenario], data).run()


def test_the_histories_reach_every_outcome_and_every_cause() -> None:
    """A history that only ever submits and serves would prove nothing."""
    outcomes: defaultdict[str, int] = defaultdict(int)
    causes: defaultdict[str, int] = defaultdict(int)
    preempted = 0
    for name, scenario in SCENARIOS.items():
        random = Random(name)
        for _ in range(2):
            play = Play(scenario, random.randbytes(600)).run()
            preempted += sum(t.recomputed > 0 for t, _ in play.pairs)
            for _, seen in play.pairs:
                outcomes[seen.result] += 1
            for cause in play.causes:
                causes[cause] += 1
    assert {"ok", "cancelled", "deadline_exceeded", "processor_failed", "superseded", "shutting_down"} <= set(outcomes)
    for cause in ("idle", "held", "step", "urgent", "drain", "size_reached", "full"):
        assert causes[cause] >= 5, cause
    assert causes["over_budget"] >= 5
    assert preempted >= 5


def test_the_histories_reach_every_way_a_refusal_is_tried() -> None:
    ends: defaultdict[str, int] = defaultdict(int)
    random = Random(3)
    for _ in range(60):
        play = Play(SCENARIOS["refused"], random.randbytes(600)).run()
        for ticket, seen in play.pairs:
            if seen.probe:
                in_time = seen.result == "ok" and seen.settled_at <= ticket.deadline
                ends["in time" if in_time else "late" if seen.result == "ok" else seen.result] += 1
        ends["refused"] += play.refused
    assert min(ends[end] for end in ("in time", "late", "deadline_exceeded", "processor_failed", "refused")) >= 3, ends


# -- the default rule: no oracle, but every promise --------------------------------------------------------------------


class Served:
    """A history under the window rule with deadlines, holds for returns, shedding and a planner."""

    def __init__(self, data: bytes, max_batches: int = 1, **config: object) -> None:
        self.random = Random(data)
        self.fixed, self.marginal = self.random.choice([(0.020, 0.002), (0.001, 0.010), (0.060, 0.0005)])
        self.budget = self.random.choice([0.030, 0.100])
        settings_ = {
            "flush": FlushPolicy.window(self.budget, 0.005, self.random.choice([4, 64])),
            "cost": lambda: trained(self.fixed, self.marginal, sizes=(1, 2, 4) * 10),
            "promote_after": 0.050,
        }
        self.scheduler = scheduler_of(max_batches, **{**settings_, **config})
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.running: list[tuple[float, Batch]] = []
        self.away: dict[int, float] = {}
        self.batches: list[Batch] = []
        self.settled: list[Ticket] = []
        self.size = self.scheduler._groups["default"].config.flush.max_batch_size

    def submit(self, client: int) -> None:
        roll = self.random.random
        try:
            self.tickets.append(
                ask(
                    self.scheduler,
                    self.now,
                    client=client,
                    partition=client % 2,
                    priority=Priority(self.random.choice([1, 1, 1, 0, 2])) if roll() < 0.3 else Priority.DEFAULT,
                    time_limit=self.random.uniform(0.02, 0.3) if roll() < 0.4 else None,
                )
            )
        except TooLate:
            return

    def step(self) -> bool:
        before = len(self.scheduler._events)
        batch = self.scheduler.next_batch(self.now)
        happened = batch is not None or len(self.scheduler._events) > before
        if batch is not None:
            self.batches.append(batch)
            self.check(batch)
            took = (self.fixed + self.marginal * len(batch)) * self.random.uniform(0.97, 1.03)
            self.running.append((self.now + took, batch))
        return happened

    def check(self, batch: Batch) -> None:
        assert len(batch) <= self.size
        if len(batch) > 1:
            alone = self.fixed + self.marginal
            measured = self.fixed + self.marginal * len(batch)
            assert measured <= 1.10 * max(self.budget, 1.25 * alone), "ceiling"

    def run(self, events: int = 120) -> Served:
        for client in range(6):
            self.submit(client)
        for _ in range(events):
            while self.step() and self.running:
                if len(self.running) >= self.scheduler._max_batches:
                    break
            arrival = self.now + self.random.expovariate(60.0)
            back = min(self.away.values(), default=inf)
            done = min((at for at, _ in self.running), default=inf)
            wake = self.scheduler.wake_at()
            ahead = min(arrival, back, done)
            if wake < ahead:
                self.at_wake(wake)
                continue
            self.before(ahead, wake)
            self.now = ahead
            if ahead == done:
                self.finish()
            elif ahead == back:
                client = min(self.away, key=lambda c: self.away[c])
                del self.away[client]
                self.submit(client)
            else:
                self.submit(10 + self.random.randrange(4))
                if self.random.random() < 0.15:
                    self.scheduler.cancel(self.random.choice(self.tickets), self.now)
            self.collect()
        self.scheduler.close(self.now)
        while not self.scheduler.idle:
            if not self.step() and self.running:
                self.now = max(self.now, min(at for at, _ in self.running))
                self.finish()
            self.collect()
        self.collect()
        return self

    def before(self, ahead: float, wake: float) -> None:
        """Nothing becomes possible before wake_at()."""
        between = self.now + self.random.random() * (min(ahead, wake) - self.now)
        if self.now < between < wake:
            self.now = between
            assert not self.step(), "something happened before wake_at()"

    def at_wake(self, wake: float) -> None:
        """At wake_at() something happens."""
        self.before(wake, wake)
        self.now = max(self.now, wake)
        assert self.step(), "nothing happened at wake_at()"
        self.collect()

    def finish(self) -> None:
        at, batch = min(self.running, key=lambda pair: pair[0])
        self.running.remove((at, batch))
        took = at - batch.scheduled_at
        failed = self.random.random() < 0.03
        outcome = Failed(ProcessorError("crash")) if failed else Done()
        finish(self.scheduler, batch, self.now, took, outcome)
        for ticket in batch.grants:
            if ticket.request.client < 6:  # these act and come back
                self.away.setdefault(ticket.request.client, self.now + self.random.choice([0.001, 0.001, 0.004, 0.2]))

    def collect(self) -> None:
        self.settled += [e.ticket for e in self.scheduler.take_events() if isinstance(e, RequestSettled)]


def windows(count: int = 60) -> list[Served]:
    played = []
    for seed in range(count):
        more = {"controller": Planner()} if seed % 3 == 0 else {}
        if seed % 5 == 0:
            more["latest_only"] = True
        played.append(Served(str(seed).encode(), max_batches=1 + (seed % 4 == 0), **more).run())
    return played


def test_wake_honesty_and_ceiling_of_the_default_rule() -> None:
    played = windows()  # asserts on the way
    assert sum(len(p.batches) for p in played) > 1000
    causes = {b.cause.value for p in played for b in p.batches}
    assert {"idle", "held", "urgent", "full", "drain"} <= causes
    outcomes = {type(t.outcome.error).__name__ for p in played for t in p.settled if isinstance(t.outcome, Failed)}
    assert {"Shed", "Cancelled", "ProcessorError", "Superseded"} <= outcomes


def test_conservation_every_admitted_ticket_settles_exactly_once() -> None:
    for played in windows(20):
        assert sorted(t.seq for t in played.settled) == [t.seq for t in played.tickets]
        assert all(t.state is TicketState.SETTLED for t in played.tickets)
        assert played.scheduler.queued("default") == 0


def test_order_first_in_first_out_within_partition_priority_and_client() -> None:
    for played in windows(20):
        served: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for batch in played.batches:
            for t in batch.grants:
                served[t.request.partition, t.request.priority, t.request.client].append(t.seq)
        for own in served.values():
            assert own == sorted(own)


def test_conservation_of_units_under_random_preemption() -> None:
    for seed in range(40):
        play = Play(SCENARIOS["memory"], Random(f"units {seed}").randbytes(800)).run()
        for ticket, _ in play.pairs:
            if isinstance(ticket.outcome, Done):
                total = ticket.request.wants + play.ends[ticket.seq] - 1
                assert ticket.granted - ticket.recomputed == total - ticket.cached


def test_every_batch_scheduled_is_finished_and_every_queued_ticket_settled_in_the_event_stream() -> None:
    for seed in range(10):
        played = Served(str(seed).encode())
        seen: list[object] = []
        take_events = played.scheduler.take_events

        def keep(take_events=take_events, seen=seen):  # type: ignore[no-untyped-def]
            events = take_events()
            seen.extend(events)
            return events

        played.scheduler.take_events = keep  # type: ignore[method-assign]
        played.run()
        counts = {kind: sum(isinstance(e, kind) for e in seen) for kind in (BatchScheduled, BatchFinished)}
        assert counts[BatchScheduled] == counts[BatchFinished] == len(played.batches)
        queued = [e.ticket for e in seen if isinstance(e, RequestQueued)]
        assert queued == played.tickets
        times = [e.at for e in seen]  # type: ignore[attr-defined]
        assert times == sorted(times)


# -- X1, X3: pure and deterministic ------------------------------------------------------------------------------------


def transcript() -> str:
    lines = []
    for name, scenario in SCENARIOS.items():
        lines += Play(scenario, Random(name).randbytes(400)).run().log
    for seed in range(4):
        for batch in Served(str(seed).encode(), controller=Planner()).run(60).batches:
            members = " ".join(f"{t.seq}:{u!r}" for t, u in batch.grants.items())
            lines.append(f"{batch.scheduled_at!r} {batch.cause} {batch.cost!r} {batch.expected!r} {members}")
    return "\n".join(lines)


def test_x1_one_core_serves_requests_seconds_and_tokens() -> None:
    """The same scheduler in three groups with three units, in one device's turns."""
    scheduler = Scheduler(
        [
            GroupConfig(name="feeds", flush=FlushPolicy.by_size(2, 0.0), cost=UnitCost),
            GroupConfig(name="act", flush=FlushPolicy.window(0.100), cost=TimeCost),
            GroupConfig(name="llm", flush=FlushPolicy.every_step(8, 4), cost=TokenCost),
        ]
    )
    for group in ("feeds", "act", "llm"):
        for i in range(4):
            ask(scheduler, group=group, client=i, wants=5.0 if group == "llm" else 1.0)
    costs = defaultdict(list)
    now = 0.0
    while not scheduler.idle:
        batch = take(scheduler, now)
        costs[batch.group].append(batch.cost)
        now += 0.010
        outcomes = [More(None, t.wants - u) if t.wants > u else Done() for t, u in batch.grants.items()]
        scheduler.complete(batch, outcomes if batch.group == "llm" else [Done()] * len(batch), 0.010, now)
    assert costs["feeds"] == [2.0, 2.0]
    assert costs["act"][0] == pytest.approx(0.100)
    assert max(costs["llm"]) == 8.0


def test_x3_same_inputs_at_the_same_times_give_the_same_batches_byte_for_byte() -> None:
    assert transcript() == transcript()


@pytest.mark.long  # other processes play the same
def test_x3_whatever_the_hash_seed_of_the_process() -> None:
    """Ids, partitions and clients are hashed everywhere; no order may come from it."""
    here = Path(__file__)
    package = ".".join(__name__.split(".")[:-1])
    root = here.parents[len(__name__.split(".")) - 1]
    code = f"from {package}.test_properties import text_transcript; print(text_transcript())"
    outputs = []
    for seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
        outputs.append(
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        )
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


def text_transcript() -> str:
    """Like `transcript`, with strings as keys: the hash of a string differs between processes, that of a number not."""
    random = Random(5)
    scheduler = scheduler_of(flush=FlushPolicy.window(0.100), cost=lambda: trained(0.010, 0.005), latest_only=False)
    now, lines = 0.0, []
    for _ in range(400):
        now += random.expovariate(100.0)
        try:
            scheduler.submit(
                Request(
                    client=random.choice("abcdefgh"),
                    partition=random.choice(["p", "q", "r"]),
                    shape=random.choice(["small", "large"]),
                    cost_class=random.choice(["hit", "miss"]),
                    priority=Priority(random.randrange(3)),
                    time_limit=random.choice([None, 0.05, 0.2]),
                ),
                now,
            )
        except Rejected as error:
            lines.append(error.code)
        batch = scheduler.next_batch(now)
        if batch is not None:
            took = 0.010 + 0.005 * len(batch)
            now += took
            finish(scheduler, batch, now, took)
            lines.append(f"{batch.scheduled_at!r} {batch.cause} {batch.cost!r} {[t.seq for t in batch.grants]}")
        lines += [f"{e.ticket.seq} {type(e.ticket.outcome).__name__}" for e in scheduler.take_events() if _ends(e)]
    return transcript() + "\n" + "\n".join(lines)


def _ends(event: object) -> bool:
    return isinstance(event, RequestSettled)


# -- nobody starves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 12])
def test_no_client_starves_beyond_one_round_of_the_others(n: int) -> None:
    """A client's head is served before any other client got two more requests than it, whatever they ask."""
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=1), cost=UnitCost)
    random = Random(n)
    ask_many(scheduler, 50, client="flood")
    served: defaultdict[object, int] = defaultdict(int)
    waiting: dict[object, dict[object, int]] = {}
    for _ in range(400):
        client = random.randrange(n)
        ask(scheduler, client=client)
        ask(scheduler, client="flood")
        waiting.setdefault(client, dict(served))
        batch = take(scheduler, 0.0)
        (ticket,) = batch.grants
        served[ticket.request.client] += 1
        finish(scheduler, batch, 0.0)
        waiting.pop(ticket.request.client, None)
        for since in waiting.values():
            for other, count in served.items():
                assert count - since.get(other, 0) <= 2


def test_background_does_not_starve_beyond_promote_after() -> None:
    """Under endless default load a background head is served once it counts as default and its share comes up."""
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=1), cost=UnitCost, promote_after=0.5)
    now = 0.0
    old = ask(scheduler, now, client="quiet", priority=Priority.BACKGROUND)
    for i in range(400):
        ask(scheduler, now, client=i % 3)
        batch = take(scheduler, now)
        now += 0.010
        finish(scheduler, batch, now)
        if old.state is TicketState.SETTLED:
            break
    assert 0.5 <= now <= 0.5 + 0.010 * (3 + 1 + 1)


def test_no_partition_starves_while_others_are_fed() -> None:
    """The oldest head goes first, so a ticket waits for at most what is older, whatever comes after it."""
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=4), cost=UnitCost)
    for i in range(30):
        ask(scheduler, partition=i % 3)
    lone = ask(scheduler, partition="lone")
    for batches in range(40):
        ask_many(scheduler, 8, partition=batches % 3)
        batch = take(scheduler, 0.0)
        finish(scheduler, batch, 0.0)
        if lone in batch.grants:
            assert batches <= 30 / 4 + 3
            return
    pytest.fail("starved")


def test_a_request_that_does_not_fit_beside_others_is_not_passed_over_for_ever() -> None:
    """What is passed over keeps its place: its client's counter stays behind until it heads the batch."""
    from .helpers import measure

    model = trained(0.0, 0.010)
    for n in (1, 2, 3) * 10:
        measure(model, ["dear"] * n, 0.095 * n)
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_cost=0.100), cost=lambda: model)
    for i in range(3):
        ask_many(scheduler, 5, client=i)
    dear = ask(scheduler, client="dear", cost_class="dear")
    now = 0.0
    for batches in range(20):
        for i in range(3):
            ask_many(scheduler, 5, now, client=i)
        batch = take(scheduler, now)
        took = sum(0.095 if t is dear else 0.010 for t in batch.grants)
        now += took
        finish(scheduler, batch, now, took)
        if dear in batch.grants:
            assert batches <= 2
            return
    pytest.fail("starved")


# -- cost: operations are counted, not seconds -------------------------------------------------------------------------


class Counter:
    """Counts heap operations and tickets looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module, names in ((order, ("heappush", "heappop")),):
            for name in names:
                monkeypatch.setattr(module, name, self.wrap(getattr(module, name)))
        monkeypatch.setattr(forming, "in_order", self.walk)

    def walk(self, *args):  # type: ignore[no-untyped-def]
        """As `in_order`, and counts the tickets."""
        for ticket in order.in_order(*args):
            self.count += 1
            yield ticket

    def wrap(self, function):  # type: ignore[no-untyped-def]
        def counted(*args):  # type: ignore[no-untyped-def]
            self.count += 1
            return function(*args)

        return counted

    def during(self, call) -> int:  # type: ignore[no-untyped-def]
        before = self.count
        call()
        return self.count - before


def operations(monkeypatch: pytest.MonkeyPatch, n: int, clients: int, limit: float | None) -> dict[str, float]:
    """Heap operations and tickets touched per call, at most or on average, with n waiting."""
    random = Random(n)
    counter = Counter(monkeypatch)
    scheduler = scheduler_of(
        flush=FlushPolicy.window(0.100, 0.005, 16), cost=lambda: trained(0.010, 0.002), capacity=10**9
    )
    tickets: list[Ticket] = []

    def submit() -> None:
        priority = Priority(random.randrange(3))
        tickets.append(ask(scheduler, client=random.randrange(clients), priority=priority, time_limit=limit))

    totals: defaultdict[str, list[int]] = defaultdict(list)
    for _ in range(n):
        totals["submit"].append(counter.during(submit))
    for ticket in random.sample(tickets, n // 4):
        totals["cancel"].append(counter.during(lambda t=ticket: scheduler.cancel(t, 0.0)))  # type: ignore[misc]
    members = 0
    for _ in range(n // 40):
        found: list[Batch] = []
        totals["next_batch"].append(counter.during(lambda f=found: f.append(take(scheduler, 0.0))))  # type: ignore[misc]
        members += len(found[0])
        scheduler.complete(found[0], [Done()] * len(found[0]), 0.042, 0.0)
    mean = {name: sum(counts) / len(counts) for name, counts in totals.items()}
    mean["per member"] = sum(totals["next_batch"]) / members
    mean["worst submit"] = max(totals["submit"])
    return mean


@pytest.mark.parametrize("limit", [None, 100.0])
@pytest.mark.parametrize("clients", [1, 40])
def test_cost_of_a_call_does_not_grow_with_the_queue(
    monkeypatch: pytest.MonkeyPatch, clients: int, limit: float | None
) -> None:
    small = operations(monkeypatch, 400, clients, limit)
    large = operations(monkeypatch, 6400, clients, limit)
    for name in ("submit", "cancel", "next_batch", "per member"):
        assert large[name] <= 1.5 * small[name] + 2, name
    assert large["worst submit"] <= 8


def test_cost_of_a_batch_does_not_grow_with_the_clients_that_were_served_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Counter(monkeypatch)
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=8), cost=UnitCost, capacity=10**9)
    for partition in ("there", "here"):
        for client in range(800):
            ask(scheduler, client=client, partition=partition)
    costs: dict[object, list[int]] = {"there": [], "here": []}
    scheduler.pause("default", 1.0, 0.0, "here")
    for now in (0.0, 1.0):
        for _ in range(100):
            found: list[Batch] = []
            count = counter.during(lambda f=found, n=now: f.append(take(scheduler, n)))  # type: ignore[misc]
            costs[found[0].partition].append(count)
            scheduler.complete(found[0], [Done()] * 8, 0.001, now)
    assert len(costs["there"]) == len(costs["here"]) == 100
    assert max(costs["here"][1:]) <= 2 * max(costs["there"])  # the first one puts all of them right


def test_cost_with_deadlines_at_risk_is_bounded_by_four_times_the_size_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    scheduler = scheduler_of(
        flush=FlushPolicy.window(1.0, 0.005, 16), cost=lambda: trained(0.010, 0.002), capacity=10**9
    )
    for i in range(2000):
        ask(scheduler, client=i % 50, time_limit=0.030)
    monkeypatch.setattr(order, "heappush", heappush)  # tickets are counted alone
    monkeypatch.setattr(order, "heappop", heappop)
    counter.count = 0
    batch = take(scheduler, 0.0)
    assert 1 <= len(batch) <= 10
    assert counter.count <= 4 * 16 + 16 + 1  # the candidates and the plain fill


def test_cost_forgotten_heap_entries_never_outnumber_the_living_for_long() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=4), cost=UnitCost, capacity=10**9)
    keep = ask(scheduler, client="keeper", time_limit=1e6)
    for i in range(3000):
        scheduler.cancel(ask(scheduler, client=i % 7, time_limit=1e6), 0.0)
    partition = scheduler._groups["default"].active[""]
    assert keep.state is TicketState.WAITING
    assert len(partition.deadlines._heap) <= 200
    assert len(partition.tiers[1].queues._heap) <= 200


@pytest.mark.parametrize("partitions", [1, 60])
def test_cost_nothing_is_kept_of_tickets_that_settled(partitions: int) -> None:
    """Kept ones would cost memory, and every collection of garbage would look through them."""
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=8), cost=UnitCost, capacity=10**9)
    for i in range(3000):
        ask(scheduler, client=i, partition=i % partitions)
        if i >= 600:
            scheduler.take_events()
            if i % 8 == 0:
                batch = take(scheduler, 0.0)
                scheduler.complete(batch, [Done()] * len(batch), 0.001, 0.0)
                del batch
    scheduler.take_events()
    assert tickets_held_by(scheduler) == scheduler.unsettled("default") >= 600


def tickets_held_by(scheduler: Scheduler) -> int:
    """Tickets that it refers to, directly or not."""
    seen: set[int] = set()
    todo: list[object] = [scheduler._groups]
    found = 0
    while todo:
        one = todo.pop()
        found += isinstance(one, Ticket)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                todo.append(other)
    return found
