"""Rules of other systems: small schedulers for comparisons in the simulator only.

They have one queue in order of arrival, without clients, tiers or cancelling. A rule that predicts batch times gets
the device's true mean, which the real scheduler has to learn: the comparison favours the rivals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Cause,
    Event,
    More,
    Outcome,
    RequestQueued,
    RequestSettled,
)
from reflex_runtime.core.batch import Done as _Done
from reflex_runtime.core.batch import Failed as _Failed
from reflex_runtime.core.errors import ReflexError, Shed
from reflex_runtime.core.request import Request, Ticket, TicketState

Predict = Callable[[int], float]  # batch size → seconds


class Rival:
    """A first-in-first-out scheduler; a subclass says how many go now and who is dropped."""

    def __init__(self) -> None:
        self.queue: deque[Ticket] = deque()
        self.free_since = 0.0
        self.wake = inf
        self._events: list[Event] = []
        self._running: Batch | None = None
        self._tickets = self._batches = 0

    def choose(self, now: float) -> int:
        """How many of the queue's head go now; 0 to wait, with `self.wake` set. The queue is not empty."""
        raise NotImplementedError

    def left(self, batch: Batch, elapsed: float) -> None:
        """A batch came back."""

    def drop_head(self, now: float) -> None:
        self._settle(self.queue.popleft(), _Failed(Shed("its deadline can no longer be met")), now)

    # -- what the loop asks ------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, ready: bool = True) -> Ticket:
        ticket = Ticket(request, self._tickets, now)
        self._tickets += 1
        if ready:
            self.queue.append(ticket)
        self._events.append(RequestQueued(now, ticket))
        return ticket

    def prepared(self, ticket: Ticket, made: Request | ReflexError, now: float) -> None:
        ticket.arrived = now
        self.queue.append(ticket)

    def next_batch(self, now: float) -> Batch | None:
        self.wake = inf
        if self._running is not None or not self.queue:
            return None
        size = self.choose(now)
        if size < 1:
            return None
        self.wake = inf
        self._batches += 1
        grants = {self.queue.popleft(): 1.0 for _ in range(size)}
        for ticket in grants:
            ticket.state, ticket.started = TicketState.RUNNING, now
        batch = Batch(self._batches, "default", "", "", Cause.IDLE, now, float(size), 0.0, grants, tuple(grants))
        self._running = batch
        self._events.append(BatchScheduled(now, batch, len(self.queue)))
        return batch

    def complete(self, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
        self._running = None
        self.free_since = now
        self.left(batch, elapsed)
        self._events.append(BatchFinished(now, batch, elapsed, False))
        for ticket in batch.grants:
            ticket.shared = elapsed / len(batch)
            self._settle(ticket, _Done(), now)

    def wake_at(self) -> float:
        return self.wake

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _settle(self, ticket: Ticket, outcome: _Done | _Failed, now: float) -> None:
        ticket.state, ticket.outcome = TicketState.SETTLED, outcome
        self._events.append(RequestSettled(now, ticket))


@dataclass(slots=True)
class _Limits:
    predict: Predict
    max_batch_size: int


class EarlyDrop(Rival):
    """Nexus: the longest run of queued requests, in order, whose first can still make its deadline at that run's
    predicted time; what stands before it is dropped."""

    def __init__(self, predict: Predict, max_batch_size: int = 64) -> None:
        super().__init__()
        self._limits = _Limits(predict, max_batch_size)

    def choose(self, now: float) -> int:
        predict, most = self._limits.predict, self._limits.max_batch_size
        tickets = list(self.queue)
        best = start = 0
        for i, first in enumerate(tickets):
            size = min(most, len(tickets) - i)
            if size <= best:
                break
            while size > best and now + predict(size) > first.deadline:
                size -= 1
            if size > best:
                best, start = size, i
        for _ in range(start if best else len(tickets)):
            self.drop_head(now)
        return best


class MarginalWait(Rival):
    """BentoML: wait while n · (youngest's wait + tick + b) ≤ 0.95 × the mean past wait, where b is what one more member
    adds; drop the head when its wait plus the predicted time exceeds the goal."""

    TICK, DECAY, REMEMBERED = 0.001, 0.95, 1000

    def __init__(self, predict: Predict, goal: float, max_batch_size: int = 64) -> None:
        super().__init__()
        self._limits = _Limits(predict, max_batch_size)
        self._goal = goal
        self._waits: deque[float] = deque(maxlen=self.REMEMBERED)
        self._total = 0.0

    def choose(self, now: float) -> int:
        predict, most = self._limits.predict, self._limits.max_batch_size
        while self.queue and now - self.queue[0].arrived + predict(min(most, len(self.queue))) > self._goal:
            self.drop_head(now)
        n = len(self.queue)
        if not n:
            return 0
        mean = self._total / len(self._waits) if self._waits else 0.0
        marginal = predict(2) - predict(1)
        if n < most and n * (now - self.queue[-1].arrived + self.TICK + marginal) <= self.DECAY * mean:
            self.wake = now + self.TICK
            return 0
        return min(n, most)

    def left(self, batch: Batch, elapsed: float) -> None:
        wait = batch.scheduled_at - next(iter(batch.grants)).arrived
        if len(self._waits) == self.REMEMBERED:
            self._total -= self._waits[0]
        self._waits.append(wait)
        self._total += wait


class HoldAlways(Rival):
    """Every batch waits `hold` seconds once the device is free and a request waits, expected callers or not."""

    def __init__(self, hold: float, max_batch_size: int = 64) -> None:
        super().__init__()
        self._hold, self._most = hold, max_batch_size

    def choose(self, now: float) -> int:
        n = min(len(self.queue), self._most)
        due = max(self.queue[0].arrived, self.free_since) + self._hold
        if n == self._most or now >= due:
            return n
        self.wake = due
        return 0


class WholeGroup(Rival):
    """Every batch waits until all callers are back, whose number it knows."""

    def __init__(self, callers: int) -> None:
        super().__init__()
        self._callers = callers

    def choose(self, now: float) -> int:
        return self._callers if len(self.queue) >= self._callers else 0


class AlwaysJoin(Rival):
    """Work in stages: waiting requests always run their first stage before the residents' next step."""

    def __init__(self) -> None:
        super().__init__()
        self._residents: dict[Ticket, None] = {}

    def next_batch(self, now: float) -> Batch | None:
        if self._running is not None or not (self.queue or self._residents):
            return None
        grants = dict.fromkeys(self.queue or self._residents, 1.0)
        admitted = tuple(self.queue)
        self.queue.clear()
        self._batches += 1
        stage = next(iter(grants)).stage
        cause = Cause.IDLE if admitted else Cause.STEP
        batch = Batch(self._batches, "default", "", stage, cause, now, len(grants), 0.0, grants, admitted)
        self._running = batch
        self._events.append(BatchScheduled(now, batch, 0))
        return batch

    def complete(self, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
        self._running = None
        self._events.append(BatchFinished(now, batch, elapsed, False))
        for ticket, outcome in zip(batch.grants, outcomes, strict=True):
            ticket.shared += elapsed / len(batch)
            if isinstance(outcome, More):
                ticket.wants, ticket.stage = outcome.wants, outcome.stage or ticket.stage
                self._residents[ticket] = None
            else:
                self._residents.pop(ticket, None)
                self._settle(ticket, _Done(), now)
