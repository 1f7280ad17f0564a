"""Figures of a coordinator: a fold over its events, and the snapshot for callers.

Every submission is counted once, by its refusal or its end, so that in every snapshot, per feed and summed,

    submitted == rejected + in_flight_exceeded + closed + processed + failed + dropped + pending

An event costs a dictionary look-up and a few additions. Percentiles are over the last 512 values; counts, means and
buckets over all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from reflex_runtime.core.batch import (
    BatchFinished,
    BatchScheduled,
    Done,
    Event,
    Failed,
    RequestAbandoned,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import Closed, Dropped, InFlightCapReached
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.statistics import percentile

WINDOW = 512  # values that percentiles are taken from
FEEDS = 4096  # feeds with figures of their own; a value costs 32 bytes in the window: 64 MB at the very most
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, inf)  # seconds


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations in seconds; None if nothing was measured.

    mean: over all `count` values. p50, p95, p99: nearest rank over the last 512. total: their sum. buckets: how many
    values are in each of `BOUNDS` (upper bounds, inclusive; not cumulative).
    """

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    total: float = field(default=0.0, repr=False)
    buckets: tuple[int, ...] = field(default=(0,) * len(BOUNDS), repr=False)


class Times:
    """Collects durations. Not thread-safe."""

    __slots__ = ("buckets", "count", "total", "window")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.buckets = [0] * len(BOUNDS)
        self.window: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.window.append(seconds)

    def take(self) -> Callable[[], Durations]:
        """Copy the values. The result computes the figures, and needs no lock."""
        count, total, buckets, window = self.count, self.total, tuple(self.buckets), list(self.window)

        def durations() -> Durations:
            if not count:
                return Durations()
            ranked = sorted(window)
            p50, p95, p99 = (percentile(ranked, share) for share in (0.5, 0.95, 0.99))
            return Durations(count, total / count, p50, p95, p99, total, buckets)

        return durations


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    """Submissions by their end.

    submitted: all of them. rejected: the queue was full, or the request cannot run here. closed: the coordinator admits
    nothing any more. in_flight_exceeded: the feed had its most items in flight. processed: answered. failed: ran and
    failed. dropped: never ran, such as after `timed_out` or at the stop. pending: neither refused nor ended yet.
    timed_out: callers that stopped waiting; their items end like any other.
    """

    submitted: int = 0
    rejected: int = 0
    in_flight_exceeded: int = 0
    closed: int = 0
    processed: int = 0
    failed: int = 0
    dropped: int = 0
    timed_out: int = 0
    pending: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-safe."""
        found: dict[str, Any] = plain(self)
        return found


def plain(value: Any) -> Any:
    """Figures as JSON can hold them: dataclasses and mappings become dicts, of durations without total and buckets."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.repr} if is_dataclass(value) else value


COUNTERS = tuple(f.name for f in fields(_Counters))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedBatchMetrics(_Counters):
    """One feed's share. latency: from its submission to its answer, of what was processed."""

    latency: Durations = Durations()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMetrics(_Counters):
    """A coordinator's figures at one moment.

    batches_dispatched: batches formed. batch_sizes: how many of them had each size. fill_ratio: their items over what
    they could have held; None before the first. formation: from the arrival of a batch's oldest item until it was
    formed. processing: of the calls that came back, or were given up. consecutive_errors: batches in a row without any
    result; a batch whose frames were all too old does not count. feeds: by feed; those idle for longest
    are left out beyond 4096, and stay in the sums.
    """

    batches_dispatched: int = 0
    processing: Durations = Durations()
    formation: Durations = Durations()
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    fill_ratio: float | None = None
    consecutive_errors: int = 0
    feeds: Mapping[str, FeedBatchMetrics] = field(default_factory=dict)


@dataclass(slots=True)
class _FeedCounters:
    """Counters of one feed. seen: when an item of it was last admitted."""

    seen: float
    queued: int = 0
    rejected: int = 0
    in_flight_exceeded: int = 0
    closed: int = 0
    processed: int = 0
    failed: int = 0
    dropped: int = 0
    timed_out: int = 0
    latency: Times = field(default_factory=Times)

    @property
    def pending(self) -> int:
        return self.queued - self.processed - self.failed - self.dropped

    @property
    def submitted(self) -> int:
        return self.queued + self.rejected + self.in_flight_exceeded + self.closed

    def counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTERS}


class BatchMeter:
    """A sink that keeps the figures of one coordinator. A feed is the `client` of a request.

    It is called with one event at a time. Call `snapshot` and `take` under the same lock: then every figure is of the
    same moment. max_batch_size: for the fill ratio. errors_in_a_row: the last batches without any result.
    """

    events = frozenset(
        {RequestQueued, RequestRejected, RequestAbandoned, RequestSettled, BatchScheduled, BatchFinished}
    )

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._feeds: dict[Any, _FeedCounters] = {}
        self._limit = FEEDS
        self._forgotten = dict.fromkeys(COUNTERS, 0)
        self._batches = self.errors_in_a_row = 0
        self._sizes: dict[int, int] = {}
        self._processing, self._formation = Times(), Times()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            at, ticket = event
            client = ticket.request.client
            feed = self._feeds.get(client) or self._feed(client, at)
            feed.queued += 1
            feed.seen = at
        elif isinstance(event, RequestSettled):
            self._settled(event.at, event.ticket)
        elif isinstance(event, BatchScheduled):
            batch = event.batch
            size = len(batch.grants)
            self._batches += 1
            self._sizes[size] = self._sizes.get(size, 0) + 1
            self._formation.add(batch.scheduled_at - min([ticket.arrived for ticket in batch.grants]))
        elif isinstance(event, BatchFinished):
            self._processing.add(event.elapsed)
            if event.crashed:
                self.errors_in_a_row += 1
            elif not event.apart and not all(_left(ticket) for ticket in event.batch.grants):
                self.errors_in_a_row = 0  # apart: its members have not ended yet
        elif isinstance(event, RequestRejected):
            self._rejected(event)
        elif isinstance(event, RequestAbandoned):
            self._feed(event.ticket.request.client, event.at).timed_out += 1

    def snapshot(self) -> BatchMetrics:
        return self.take()()

    def take(self) -> Callable[[], BatchMetrics]:
        """Copy the counters, in a few microseconds a feed. The result computes the figures, and needs no lock."""
        feeds = [(str(name), feed.counters(), feed.latency.take()) for name, feed in self._feeds.items()]
        forgotten, sizes = dict(self._forgotten), dict(self._sizes)
        batches, errors, places = self._batches, self.errors_in_a_row, self._batches * self._max_batch_size
        processing, formation = self._processing.take(), self._formation.take()

        def metrics() -> BatchMetrics:
            sums = {name: sum(counters[name] for _, counters, _ in feeds) + forgotten[name] for name in COUNTERS}
            return BatchMetrics(
                **sums,
                batches_dispatched=batches,
                processing=processing(),
                formation=formation(),
                batch_sizes=MappingProxyType(dict(sorted(sizes.items()))),
                fill_ratio=sum(size * count for size, count in sizes.items()) / places if batches else None,
                consecutive_errors=errors,
                feeds=MappingProxyType({name: FeedBatchMetrics(**c, latency=t()) for name, c, t in feeds}),
            )

        return metrics

    # -- events --------------------------------------------------------------------------------------------------------

    def _settled(self, now: float, ticket: Ticket) -> None:
        client = ticket.request.client
        feed = self._feeds.get(client) or self._feed(client, now)
        outcome = ticket.outcome
        if type(outcome) is Done:
            feed.processed += 1
            feed.latency.add(now - ticket.arrived)
        elif isinstance(outcome.error, Dropped):
            feed.dropped += 1
        else:
            feed.failed += 1

    def _rejected(self, event: RequestRejected) -> None:
        feed = self._feed(event.request.client, event.at)
        if isinstance(event.error, InFlightCapReached):
            feed.in_flight_exceeded += 1
        elif isinstance(event.error, Closed):
            feed.closed += 1
        else:
            feed.rejected += 1

    # -- feeds ---------------------------------------------------------------------------------------------------------

    def _feed(self, client: Any, now: float) -> _FeedCounters:
        feed = self._feeds.get(client)
        if feed is None:
            if len(self._feeds) >= self._limit:
                self._forget()
            feed = self._feeds[client] = _FeedCounters(now)
        return feed

    def _forget(self) -> None:
        """Forget the feeds that were idle for longest, a quarter of the limit at a time, so that this is rare."""
        idle = [name for name, feed in self._feeds.items() if not feed.pending]
        idle.sort(key=lambda name: self._feeds[name].seen)
        for name in idle[: FEEDS // 4]:
            for counter, count in self._feeds.pop(name).counters().items():
                self._forgotten[counter] += count
        self._limit = max(FEEDS, len(self._feeds) + FEEDS // 4)  # a feed with pending items is never forgotten


def _left(ticket: Ticket) -> bool:
    """Whether an item left without a call, such as a frame that was too old when its batch began."""
    return isinstance(ticket.outcome, Failed) and isinstance(ticket.outcome.error, Dropped)
