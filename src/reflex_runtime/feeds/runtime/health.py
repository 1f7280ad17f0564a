"""Health: events about feeds and coordinators for an operator, rate-limited.

The first event of a kind and source is emitted at once, then at most one a second; the counts in the events add up to
what happened. `pacing.Throttle` is that rule, and `Health` the fold over a coordinator's events that applies it. A feed
and its runtime emit the other events themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from typing import Any, ClassVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Closed, Displaced, InFlightCapReached, ProcessorError
from reflex_runtime.core.events import (
    DeviceLost,
    Event,
    RequestAbandoned,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.request import Ticket
from reflex_runtime.pacing import Throttle
from reflex_runtime.run.modules import in_one_line

FEEDS = 4096  # feeds that a coordinator's health remembers


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """Something that an operator should know. at: seconds, monotonic. source: the feed's id, or the coordinator's."""

    at: float
    source: str
    level: ClassVar[int] = logging.ERROR  # of its log line
    says: ClassVar[str] = "{error}"

    def words(self) -> tuple[int, str]:
        """(level, text) for the log."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return self.level, self.says.format(**values, frames=frames(values.get("count", 0)))


@dataclass(frozen=True, slots=True)
class _FramesLost(HealthEvent):
    """`count` frames of a feed were not answered."""

    count: int
    coordinator: str = ""
    level = logging.WARNING


@dataclass(frozen=True, slots=True)
class BatchSubmissionRejected(_FramesLost):
    """`count` frames of a feed met a full queue, or were displaced from it by a feed with fewer in it."""

    says = "{frames} refused, the queue of {coordinator} was full"


@dataclass(frozen=True, slots=True)
class BatchInFlightExceeded(_FramesLost):
    """`count` frames of a feed exceeded its in-flight limit: the processor is too slow for it."""

    says = "{frames} refused, {coordinator} had not answered the one before"


@dataclass(frozen=True, slots=True)
class BatchTimeout(_FramesLost):
    """A feed stopped waiting for `count` answers."""

    says = "{frames} not answered by {coordinator} in time"


@dataclass(frozen=True, slots=True)
class BatchError(HealthEvent):
    """`count` batches of a coordinator failed in whole or in part. error: message of the last failure."""

    count: int
    error: str

    def words(self) -> tuple[int, str]:
        return self.level, f"{self.count} batch{'es' if self.count > 1 else ''} failed: {self.error}"


@dataclass(frozen=True, slots=True)
class StageError(HealthEvent):
    """A feed's coordinator died. Once for each feed, never at an ordinary stop."""

    error: str
    coordinator: str = ""


@dataclass(frozen=True, slots=True)
class FeedStageError(HealthEvent):
    """A stage or a sink of a feed failed on `count` frames. error: message of the last failure."""

    error: str
    count: int = 1

    def words(self) -> tuple[int, str]:
        return self.level, self.error + (f" ({self.count} times)" if self.count > 1 else "")


@dataclass(frozen=True, slots=True)
class FeedConnected(HealthEvent):
    """A feed's source was opened."""

    level, says = logging.INFO, "connected"


@dataclass(frozen=True, slots=True)
class FeedDisconnected(HealthEvent):
    """A feed's source was lost or could not be opened. retry_in: seconds until it is tried again; None: never."""

    error: str
    retry_in: float | None = None

    def words(self) -> tuple[int, str]:
        if self.retry_in is None:
            return self.level, self.error
        return logging.WARNING, f"{self.error}; trying again in {self.retry_in:.1f} s"


@dataclass(frozen=True, slots=True)
class FeedFrozen(HealthEvent):
    """A source is open and sends nothing."""

    level, says = logging.WARNING, "connected, but sends nothing"


@dataclass(frozen=True, slots=True)
class FeedEnded(HealthEvent):
    """A feed reached the end of its source."""

    level, says = logging.INFO, "came to its end"


@dataclass(frozen=True, slots=True)
class FeedFailed(HealthEvent):
    """A feed ended with an error."""

    error: str
    says = "given up: {error}"


@dataclass(frozen=True, slots=True)
class ThreadDetached(HealthEvent):
    """A thread did not end within its time limit and was abandoned."""

    name: str
    says = "thread {name} did not end in time and is abandoned"


_Counted = type[_FramesLost]


class Health:
    """A sink that reports the health of one coordinator and of the feeds that use it (a request's `client`).

        health = Health("detector", print)

    emit: gets each `HealthEvent`, on the thread and under the lock that the sink is called with; must be quick.
    every: seconds between two events of one kind and source. Held counts are reported within twice that, by a recovery
    (an admission, for refusals; an answer, for the rest), and by `flush`.

    Beyond `FEEDS` feeds the oldest is forgotten, but never its held counts. A forgotten feed gets the event of a lost
    coordinator when it submits again.
    """

    events = frozenset({RequestQueued, RequestRejected, RequestAbandoned, RequestSettled, DeviceLost})

    def __init__(self, source: str, emit: Callable[[HealthEvent], None], every: float = 1.0) -> None:
        self.source = source
        self._emit, self._every = emit, every
        self._feeds: dict[Any, bool] = {}  # those that were seen: whether the coordinator's loss was reported
        self._throttles: dict[tuple[Any, _Counted], Throttle] = {}  # of what failed lately
        self._batches = Throttle(every)
        self._batch = 0  # the last one counted in it
        self._error = ""
        self._sweep_at = inf
        self._lost: str | None = None

    def __call__(self, event: Event) -> None:
        now = event.at
        if isinstance(event, RequestQueued):
            client = event.ticket.request.client
            if client not in self._feeds:
                self._know(client)
            if self._throttles:
                self._recovered(client, BatchSubmissionRejected, now)
                self._recovered(client, BatchInFlightExceeded, now)
        elif isinstance(event, RequestSettled):
            if type(event.ticket.outcome) is not Done:
                self._failed(now, event.ticket)
            elif self._throttles or self._batches.held:
                self._tell_batches(now, self._batches.recover(now))
                if not event.ticket.abandoned:  # an answer after the caller gave up is no recovery
                    self._recovered(event.ticket.request.client, BatchTimeout, now)
        elif isinstance(event, RequestRejected):
            self._rejected(event)
        elif isinstance(event, RequestAbandoned):
            self._count(event.ticket.request.client, BatchTimeout, now)
        elif isinstance(event, DeviceLost):
            self._lost = str(event.error)
            for client in list(self._feeds):
                self._tell_lost(client, now)
        if now >= self._sweep_at:
            self._sweep(now)

    def flush(self, now: float) -> None:
        """Report all held counts; to be called at the stop."""
        for key, throttle in self._throttles.items():
            self._tell(key, now, throttle.flush(now))
        self._tell_batches(now, self._batches.flush(now))

    def _rejected(self, event: RequestRejected) -> None:
        client = event.request.client
        if not isinstance(event.error, Closed):
            kind = BatchInFlightExceeded if isinstance(event.error, InFlightCapReached) else BatchSubmissionRejected
            self._count(client, kind, event.at)
        elif self._lost is not None and (client in self._feeds or len(self._feeds) < FEEDS):
            self._tell_lost(client, event.at)  # reported once: so it is remembered, and no feed is forgotten now

    def _failed(self, now: float, ticket: Ticket) -> None:
        admission = ticket.admission
        if isinstance(ticket.outcome.error, Displaced):  # a late refusal
            self._count(ticket.request.client, BatchSubmissionRejected, now)
        if not isinstance(ticket.outcome.error, ProcessorError) or admission is None:
            return
        self._error = ticket.outcome.error.logged()
        if admission.id != self._batch:  # the first of its batch; the others follow it at once
            self._batch = admission.id
            self._tell_batches(now, self._batches.count(now))
            self._sweep_at = min(self._sweep_at, now + self._every)

    def _count(self, client: Any, kind: _Counted, now: float) -> None:
        self._know(client)
        throttle = self._throttles.setdefault((client, kind), Throttle(self._every))
        self._tell((client, kind), now, throttle.count(now))
        self._sweep_at = min(self._sweep_at, now + self._every)

    def _recovered(self, client: Any, kind: _Counted, now: float) -> None:
        if (throttle := self._throttles.get((client, kind))) is not None:
            self._tell((client, kind), now, throttle.recover(now))

    def _sweep(self, now: float) -> None:
        """Report what is due; check the rest again, at most once per `every`."""
        self._tell_batches(now, self._batches.due(now))
        for key, throttle in list(self._throttles.items()):
            self._tell(key, now, throttle.due(now))
            if throttle.quiet(now):
                del self._throttles[key]
        self._sweep_at = now + self._every if self._throttles or self._batches.held else inf

    def _know(self, client: Any) -> None:
        if self._feeds.setdefault(client, False) or len(self._feeds) <= FEEDS:
            return
        del self._feeds[next(iter(self._feeds))]

    def _tell(self, key: tuple[Any, _Counted], now: float, count: int) -> None:
        if count:
            client, kind = key
            self._emit(kind(now, str(client), count, self.source))

    def _tell_batches(self, now: float, count: int) -> None:
        if count:
            self._emit(BatchError(now, self.source, count, self._error))

    def _tell_lost(self, client: Any, now: float) -> None:
        if not self._feeds.get(client):
            self._feeds[client] = True
            self._emit(StageError(now, str(client), self._lost or "", self.source))


# -- in words ----------------------------------------------------------------------------------------------------------


def words_of(event: HealthEvent) -> tuple[int, str]:
    """(level, text) of a health event for the log."""
    level, text = event.words()
    return level, in_one_line(f"{event.source}: {text}")


def frames(count: int) -> str:
    """1 frame, 2 frames."""
    return f"{count} frame{'s'[: count != 1]}"
