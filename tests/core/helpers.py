"""Small verbs for tests of the core. Time is a number that the test moves; nothing here waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from reflex_runtime.core.batch import Batch, Cause, Done, Failed, More, Outcome, RequestSettled
from reflex_runtime.core.cost import CostModel, TimeCost
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler


class UnitPool:
    """A pool of `capacity` units: a ticket holds one for each unit it was granted, until it leaves."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self._held: dict[Ticket, float] = {}
        self.used = 0.0

    def fits(self, request: Request) -> bool:
        return request.wants <= self.capacity

    def begin(self, ticket: Ticket) -> float:
        return 0.0

    def reserve(self, ticket: Ticket, units: float) -> bool:
        if self.used + units > self.capacity:
            return False
        self._held[ticket] = self._held.get(ticket, 0.0) + units
        self.used += units
        return True

    def extend(self, ticket: Ticket, units: float, more: float) -> float:
        more = min(more, self.capacity - self.used)
        return more if more > 0.0 and self.reserve(ticket, more) else 0.0

    def would_fit(self, ticket: Ticket, units: float, released: Collection[Ticket]) -> bool:
        return self.used - sum(self._held.get(t, 0.0) for t in released) + units <= self.capacity

    def commit(self, batch: Batch) -> None:
        return

    def rollback(self, batch: Batch) -> None:
        for ticket, units in batch.grants.items():
            if ticket in self._held:
                self._held[ticket] -= units
                self.used -= units

    def release(self, ticket: Ticket) -> None:
        self.used -= self._held.pop(ticket, 0.0)


def scheduler_of(max_batches: int = 1, **config: Any) -> Scheduler:
    """A scheduler with one group."""
    return Scheduler([GroupConfig(**config)], max_batches=max_batches)


def ask(scheduler: Scheduler, now: float = 0.0, **request: Any) -> Ticket:
    return scheduler.submit(Request(**request), now)


def ask_many(scheduler: Scheduler, n: int, now: float = 0.0, **request: Any) -> list[Ticket]:
    return [ask(scheduler, now, **request) for _ in range(n)]


def take(scheduler: Scheduler, now: float) -> Batch:
    """The batch that must come now."""
    batch = scheduler.next_batch(now)
    assert batch is not None, f"no batch at {now}; wake_at says {scheduler.wake_at()}"
    return batch


def finish(
    scheduler: Scheduler, batch: Batch, now: float, elapsed: float = 0.010, outcome: Outcome | None = None
) -> None:
    """Complete a batch with the same outcome for all."""
    scheduler.complete(batch, [Done() if outcome is None else outcome] * len(batch), elapsed, now)


def outcome_of(ticket: Ticket) -> str:
    """`ok`, or the wire code of its error."""
    if isinstance(ticket.outcome, Done):
        return "ok"
    assert isinstance(ticket.outcome, Failed), ticket
    return ticket.outcome.error.code if hasattr(ticket.outcome.error, "code") else "failed"


def settled(scheduler: Scheduler) -> list[Ticket]:
    return [e.ticket for e in scheduler.take_events() if isinstance(e, RequestSettled)]


def ids(tickets: Iterable[Ticket]) -> list[str]:
    return [t.request.id for t in tickets]


def measure(
    model: CostModel, classes: Sequence[Any], seconds: float, shape: Any = "", stage: str = "", wants: float = 1.0
) -> list[Ticket]:
    """Show a cost model one measured batch whose members have these cost classes."""
    tickets = [
        Ticket(Request(shape=shape, cost_class=k, stage=stage, wants=wants), i, 0.0) for i, k in enumerate(classes)
    ]
    grants = dict.fromkeys(tickets, 1.0)
    model.observe(Batch(1, "default", "", stage, Cause.IDLE, 0.0, 0.0, 0.0, grants), seconds)
    return tickets


def trained(fixed: float, marginal: float, sizes: Sequence[int] = (1, 2, 4, 8) * 8, **config: Any) -> TimeCost:
    """A cost model that has seen batches which really take fixed + marginal · n."""
    model = TimeCost(**config)
    for n in sizes:
        measure(model, [""] * n, fixed + marginal * n)
    return model


def serve(
    scheduler: Scheduler, seconds: Callable[[Batch], float], now: float = 0.0, until: float = 1e9
) -> list[tuple[float, Batch]]:
    """Run the device until nothing is left: (time, batch) of every batch, each answered with Done."""
    log: list[tuple[float, Batch]] = []
    while now < until:
        batch = scheduler.next_batch(now)
        if batch is None:
            now = scheduler.wake_at()
            if now == float("inf"):
                break
            continue
        log.append((now, batch))
        elapsed = seconds(batch)
        now += elapsed
        finish(scheduler, batch, now, elapsed)
    return log


class Generation:
    """Token work: prompts and numbers of outputs by id; answers a batch the way an engine would."""

    def __init__(self, prompts: dict[str, int], outputs: int | dict[str, int]) -> None:
        self.prompts = prompts
        self.total = {
            name: prompt + (outputs if isinstance(outputs, int) else outputs[name]) - 1
            for name, prompt in prompts.items()
        }

    def requests(self, **fields: Any) -> list[Request]:
        return [Request(id=name, wants=float(n), **{"client": name, **fields}) for name, n in self.prompts.items()]

    def outcomes(self, batch: Batch) -> list[Outcome]:
        return [self._one(ticket, units) for ticket, units in batch.grants.items()]

    def _one(self, ticket: Ticket, units: float) -> Outcome:
        done = ticket.computed + units
        if done >= self.total[ticket.id]:
            return Done("last")
        left = ticket.wants - units
        return More(None, left) if left > 0 else More("token", 1.0)


def steps_of(generation: Generation, scheduler: Scheduler, limit: int = 1000, **fields: Any) -> list[dict[str, float]]:
    """Submit every request at time 0 and step to the end: granted units by id, step by step."""
    for request in generation.requests(**fields):
        scheduler.submit(request, 0.0)
    steps: list[dict[str, float]] = []
    now = 0.0
    while not scheduler.idle:
        batch = take(scheduler, now)
        steps.append({t.id: units for t, units in batch.grants.items()})
        now += 0.001
        scheduler.complete(batch, generation.outcomes(batch), 0.001, now)
        assert len(steps) < limit, "does not end"
    return steps


class Cached(UnitPool):
    """A pool in which the first units of every ticket are already there."""

    def __init__(self, capacity: float, there: float) -> None:
        super().__init__(capacity)
        self.there = there

    def begin(self, ticket: Ticket) -> float:
        return min(self.there, ticket.wants - 1.0)
