"""The health of feeds and coordinators for an operator: events as something happens, and figures at any time.

The first event of a kind and source is emitted at once, then at most one a second; their counts add up to what happened
(`pacing.Throttle`). `Health` makes those of a coordinator from its scheduler's events; a feed and its runtime emit the
others. A feed's threads write its figures into a `Ledger`; callers get frozen copies, in which

    frames == processed + the sum of drops + waiting
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

from reflex_runtime.core.batch import (
    DeviceLost,
    Done,
    Event,
    RequestAbandoned,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import Closed, Displaced, InFlightCapReached, ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.feeds.runtime.pipeline import Frame
from reflex_runtime.observe.batch_metrics import BatchMetrics, Durations, Times, plain
from reflex_runtime.pacing import Throttle
from reflex_runtime.run.modules import in_one_line

FEEDS = 4096  # most feeds that a coordinator's health remembers


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """Something that happened to a feed or a coordinator.

    at: monotonic seconds. source: the id of the feed or of the coordinator. count: frames or batches since the last
    event of its kind. coordinator: the one that the event is about. error: the last message, or the name of a thread.
    retry_in: seconds until the source is opened again; None: never.
    """

    at: float
    source: str
    count: int = 1
    coordinator: str = ""
    error: str = ""
    retry_in: float | None = None
    level: ClassVar[int] = logging.ERROR  # of its log line
    template: ClassVar[str] = "{0.error}"

    def words(self) -> tuple[int, str]:
        """(level, text) for the log."""
        batches = f"{self.count} batch{'es'[: 2 * (self.count > 1)]}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        return self.level, self.template.format(self, frames=frames(self.count), batches=batches, times=times)


class BatchSubmissionRejected(HealthEvent):
    """`count` frames of a feed met a full queue, or were displaced from it by a feed with fewer frames there."""

    level, template = logging.WARNING, "{frames} refused, the queue of {0.coordinator} was full"


class BatchInFlightExceeded(HealthEvent):
    """`count` frames of a feed exceeded its in-flight limit."""

    level, template = logging.WARNING, "{frames} refused, {0.coordinator} had not answered the earlier ones"


class BatchTimeout(HealthEvent):
    """A feed stopped waiting for `count` answers."""

    level, template = logging.WARNING, "{frames} not answered by {0.coordinator} in time"


class BatchError(HealthEvent):
    """`count` batches of a coordinator failed in whole or in part."""

    template = "{batches} failed: {0.error}"


class StageError(HealthEvent):
    """A feed's coordinator died. Emitted once for each feed, never at an ordinary stop."""


class FeedStageError(HealthEvent):
    """A stage or a sink of a feed failed on `count` frames."""

    template = "{0.error}{times}"


class FeedConnected(HealthEvent):
    """A feed's source was opened."""

    level, template = logging.INFO, "connected"


class FeedDisconnected(HealthEvent):
    """A feed's source was lost or could not be opened."""

    def words(self) -> tuple[int, str]:
        if self.retry_in is None:
            return self.level, self.error
        return logging.WARNING, f"{self.error}; trying again in {self.retry_in:.1f} s"


class FeedEnded(HealthEvent):
    """A feed reached the end of its source."""

    level, template = logging.INFO, "came to its end"


class FeedFailed(HealthEvent):
    """A feed ended with an error."""

    template = "given up: {0.error}"


class ThreadDetached(HealthEvent):
    """A thread did not end within its time limit and was abandoned."""

    template = "thread {0.error} did not end in time and is abandoned"


class Health:
    """A sink that reports the health of one coordinator and of the feeds that use it (a request's `client`).

    emit: gets each `HealthEvent`, on the thread and under the lock that the sink is called with; must be quick.
    every: seconds between two events of one kind and source. While the scheduler has events, held counts are reported
    within twice that; also by a recovery (an admission after refusals; an answer after other failures) and by `flush`.

    Beyond `FEEDS` feeds the oldest is forgotten, but never its held counts. A forgotten feed gets the event of a lost
    coordinator at its next submission.
    """

    events = frozenset({RequestQueued, RequestRejected, RequestAbandoned, RequestSettled, DeviceLost})

    def __init__(self, source: str, emit: Callable[[HealthEvent], None], every: float = 1.0) -> None:
        self.source = source
        self._emit, self._every = emit, every
        self._feeds: dict[Any, bool] = {}  # known feeds: whether the coordinator's loss was reported
        self._throttles: dict[tuple[Any, type[HealthEvent]], Throttle] = {}  # of what failed lately
        self._batch = 0  # the last failed batch
        self._error = ""
        self._sweep_at = inf
        self._lost: str | None = None

    def __call__(self, event: Event) -> None:
        now = event.at
        if isinstance(event, RequestQueued):
            client = event.ticket.request.client
            if client not in self._feeds:
                self._remember(client)
            if self._throttles:
                self._recovered(client, BatchSubmissionRejected, now)
                self._recovered(client, BatchInFlightExceeded, now)
        elif isinstance(event, RequestSettled):
            if type(event.ticket.outcome) is not Done:
                self._failed(now, event.ticket)
            elif self._throttles:
                self._recovered(self.source, BatchError, now)
                if not event.ticket.abandoned:  # an answer after the caller gave up is no recovery
                    self._recovered(event.ticket.request.client, BatchTimeout, now)
        elif isinstance(event, RequestRejected):
            self._rejected(event)
        elif isinstance(event, RequestAbandoned):
            self._count_refused(event.ticket.request.client, BatchTimeout, now)
        elif isinstance(event, DeviceLost):
            self._lost = str(event.error)
            for client in list(self._feeds):
                self._report_loss(client, now)
        if now >= self._sweep_at:
            self._sweep(now)

    def flush(self, now: float) -> None:
        """Report all held counts; to be called at the stop."""
        for key, throttle in self._throttles.items():
            self._report(key, now, throttle.flush(now))

    def _rejected(self, event: RequestRejected) -> None:
        client = event.request.client
        if not isinstance(event.error, Closed):
            kind = BatchInFlightExceeded if isinstance(event.error, InFlightCapReached) else BatchSubmissionRejected
            self._count_refused(client, kind, event.at)
        elif self._lost is not None and (client in self._feeds or len(self._feeds) < FEEDS):
            self._report_loss(client, event.at)  # once for each feed, so long as there is room to remember it

    def _failed(self, now: float, ticket: Ticket) -> None:
        admission = ticket.admission
        if isinstance(ticket.outcome.error, Displaced):  # refused after it was admitted
            self._count_refused(ticket.request.client, BatchSubmissionRejected, now)
        if not isinstance(ticket.outcome.error, ProcessorError) or admission is None:
            return
        self._error = ticket.outcome.error.logged()
        if admission.id != self._batch:  # the first failure of its batch; the others follow at once
            self._batch = admission.id
            self._count((self.source, BatchError), now)

    def _count_refused(self, client: Any, kind: type[HealthEvent], now: float) -> None:
        self._remember(client)
        self._count((client, kind), now)

    def _count(self, key: tuple[Any, type[HealthEvent]], now: float) -> None:
        throttle = self._throttles.setdefault(key, Throttle(self._every))
        self._report(key, now, throttle.count(now))
        self._sweep_at = min(self._sweep_at, now + self._every)

    def _recovered(self, client: Any, kind: type[HealthEvent], now: float) -> None:
        if (throttle := self._throttles.get((client, kind))) is not None:
            self._report((client, kind), now, throttle.recover(now))

    def _sweep(self, now: float) -> None:
        """Report what is due; sweep again after `every` seconds."""
        for key, throttle in list(self._throttles.items()):
            self._report(key, now, throttle.due(now))
            if throttle.quiet(now):
                del self._throttles[key]
        self._sweep_at = now + self._every if self._throttles else inf

    def _remember(self, client: Any) -> None:
        if not self._feeds.setdefault(client, False) and len(self._feeds) > FEEDS:
            del self._feeds[next(iter(self._feeds))]

    def _report(self, key: tuple[Any, type[HealthEvent]], now: float, count: int) -> None:
        if count:
            client, kind = key
            self._emit(kind(now, str(client), count, self.source, self._error if kind is BatchError else ""))

    def _report_loss(self, client: Any, now: float) -> None:
        if not self._feeds.get(client):
            self._feeds[client] = True
            self._emit(StageError(now, str(client), coordinator=self.source, error=self._lost or ""))


# -- in words ----------------------------------------------------------------------------------------------------------


def words_of(event: HealthEvent) -> tuple[int, str]:
    """(level, text) of a health event for the log."""
    level, text = event.words()
    return level, in_one_line(f"{event.source}: {text}")


def frames(count: int) -> str:
    """The words 1 frame, 2 frames."""
    return f"{count} frame{'s'[: count != 1]}"


# -- figures ----------------------------------------------------------------------------------------------------------

DROPS = {
    "overrun": "a newer frame replaced it before its batch began",
    "slow_stage": "the same, while a stage of the feed worked on an earlier frame",
    "stale": "it was older than max_age before its batch began",
    "queue_full": "the coordinator's queue was full",
    "in_flight": "the feed had as many frames in flight as it may",
    "timeout": "no answer came in time",
    "failed": "the processor or a stage of the feed failed on it",
    "skipped": "--every or --fps left it out",
    "closed": "the coordinator was gone",
    "stopped": "the feed was stopped before its turn came",
}
OUTPUT_DROPS = {
    "overrun": "newer results replaced it in the queue of the output",
    "lost": "the connection was lost while it was sent, or it was tried as often as it may be",
    "refused": "the receiver did not take it",
    "unsent": "the end came before it was sent",
}
RATE_S = 2.0  # seconds over which a feed's fps is measured


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage of a feed. runs: frames that it got. errors: on which it failed. seconds: the sum of its time."""

    runs: int = 0
    errors: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSnapshot:
    """One feed at one moment.

    mode: live (newest wins) or file (nothing is lost). source: its name, without credentials.
    state: connecting, running, reconnecting; then ended (by itself), failed (given up) or stopped.
    frames: read from the source. processed: answered and through every stage. waiting: neither processed nor dropped
    yet. in_flight: of these, at the batch point. drops: by reason, see `DROPS`.
    fps: answers a second, over the last 2 s. age: seconds since the last answered frame was captured; None before one.
    latency: from a frame's capture to its answer. restarts: how often the source was opened again. error: the last one.
    sink_errors: results on which a sink failed; they count as processed. total: frames that the source expects, or
    None. position: pts of the last answered frame. resolution: width and height of the last frame read. corrupt:
    packets and pictures that could not be decoded; no other figure has them. stages: by name. zones: boxes in each, in
    the last frame. lines: objects that crossed each, `in` and `out`.
    """

    name: str
    mode: str
    source: str
    state: str
    frames: int = 0
    processed: int = 0
    waiting: int = 0
    in_flight: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    fps: float = 0.0
    age: float | None = None
    latency: Durations = field(default_factory=Durations)
    restarts: int = 0
    error: str | None = None
    sink_errors: int = 0
    total: int | None = None
    position: float | None = None
    resolution: tuple[int, int] | None = None
    corrupt: int = 0
    stages: Mapping[str, StageFigures] = field(default_factory=dict)
    zones: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSnapshot:
    """One output at one moment, with taken == sent + the sum of drops + waiting.

    where: its address, without secrets. state: connecting, connected, away or closed. taken: results given to it.
    waiting: not sent yet. drops: by reason, see `OUTPUT_DROPS`. retries: how often it tried again. error: the last one.
    """

    name: str
    where: str
    state: str
    taken: int = 0
    sent: int = 0
    waiting: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSnapshot:
    """A runtime at one moment. state: new, starting, running, stopping or stopped. uptime: seconds since `start`."""

    state: str
    uptime: float
    feeds: Mapping[str, FeedSnapshot]
    coordinators: Mapping[str, BatchMetrics]
    outputs: Mapping[str, OutputSnapshot] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-safe."""
        found: dict[str, Any] = plain(self)
        return found


class Ledger:
    """Where each frame of a feed is. Thread-safe. A frame is `read` once, then `drop`ped or `answered` once.

    read_so_far: number of frames; also the number of the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_so_far = self._processed = self._sink_errors = 0
        self._drops = dict.fromkeys(DROPS, 0)
        self._latency = Times()
        self._began: float | None = None  # capture of the first frame
        self._answers: deque[float] = deque()  # times of the answers of the last RATE_S
        self._last: tuple[float, float | None] | None = None  # capture and pts of the last answered frame
        self._resolution: tuple[int, int] | None = None
        self._error: str | None = None
        self._stages: dict[str, StageFigures] = {}
        self._in_stage = False

    def read(self, frame: Frame) -> None:
        """Count a frame from the source."""
        with self._lock:
            self.read_so_far += 1
            self._resolution = frame.size
            if self._began is None:
                self._began = frame.captured

    def passed_over(self) -> None:
        """Count a picture that `every` or `fps` left out."""
        with self._lock:
            self.read_so_far += 1
            self._drops["skipped"] += 1

    def drop(self, reason: str, count: int = 1) -> None:
        """Count dropped frames. reason: one of `DROPS`."""
        with self._lock:
            self._drops[reason] += count

    def overrun(self) -> None:
        """Count a frame that a newer one replaced."""
        self.drop("slow_stage" if self._in_stage else "overrun")

    @contextmanager
    def stage(self, name: str, clock: Callable[[], float]) -> Iterator[None]:
        """Inside, a stage works on a frame. Counts its time, and an exception as its error."""
        began, failed, self._in_stage = clock(), True, True
        try:
            yield
            failed = False
        finally:
            self._in_stage = False
            with self._lock:
                was = self._stages.get(name, StageFigures())
                self._stages[name] = StageFigures(was.runs + 1, was.errors + failed, was.seconds + clock() - began)

    def answered(self, frame: Frame, now: float) -> None:
        """Count a frame that has its answer and went through every stage."""
        with self._lock:
            self._processed += 1
            self._latency.add(now - frame.captured)
            self._last = frame.captured, frame.pts
            self._answers.append(now)
            self._forget(now)

    def sink_failed(self) -> None:
        """Count a result on which a sink failed."""
        with self._lock:
            self._sink_errors += 1

    def note(self, error: str) -> None:
        """Keep the last error."""
        self._error = error

    def figures(self, now: float) -> dict[str, Any]:
        """The ledger's part of a `FeedSnapshot`, all of one moment."""
        with self._lock:
            self._forget(now)
            # At the start over fewer seconds, but not so few that the rate jumps.
            span = RATE_S if self._began is None else min(RATE_S, max(0.5, now - self._began))
            figures = {
                "frames": self.read_so_far,
                "processed": self._processed,
                "waiting": self.read_so_far - self._processed - sum(self._drops.values()),
                "drops": dict(self._drops),
                "fps": len(self._answers) / span,
                "age": None if self._last is None else now - self._last[0],
                "sink_errors": self._sink_errors,
                "position": None if self._last is None else self._last[1],
                "resolution": self._resolution,
                "error": self._error,
                "stages": dict(self._stages),
            }
            latency = self._latency.take()
        return figures | {"latency": latency()}

    def _forget(self, now: float) -> None:
        while self._answers and self._answers[0] <= now - RATE_S:
            self._answers.popleft()
