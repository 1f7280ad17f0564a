"""What the generate batcher did, in numbers: a fold over its scheduler's events."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import Batch, Cause, Failed
from reflex_runtime.core.events import (
    BatchFinished,
    BatchScheduled,
    Event,
    RequestQueued,
    RequestSettled,
    SchedulerPaused,
)
from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.observe.series import SeriesSet
from reflex_runtime.observe.series_table import GENERATE_BATCHER

MOST_PARTITIONS = 256  # kept; the least recently used is dropped
FALLBACKS = ("capability", "disabled", "environment", "options", "oversize")
UNSENT: Final = "unsent"  # notes of a batch: the runtime was gone when it was formed
FALLBACK: Final = "fallback"  # why each of its requests went by itself although they were to share a message



@dataclass(frozen=True, slots=True)
class BatchDispatched:
    """One message and its answer, or the failure of both.

    hold_ms: from the oldest request's arrival to the message. priority_mix: requests by priority. duration_ms: from
    the message to its answer. rejections: requests that did not start.
    """

    size: int
    hold_ms: float
    priority_mix: Mapping[str, int]
    duration_ms: float
    rejections: int


class Series:
    """The series of all generate batchers that share a Prometheus registry; see `series_in`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        of = SeriesSet(GENERATE_BATCHER, registry)
        self.size = of.histogram("reflex_generate_batcher_batch_size")
        self.wait = of.histogram("reflex_generate_batcher_queue_wait_ms")
        self.mix = {p: of.counter("reflex_generate_batcher_priority_mix_total", p) for p in PRIORITIES}
        self.fallback = {reason: of.counter("reflex_generate_batcher_fallback_total", reason) for reason in FALLBACKS}


_SERIES: WeakKeyDictionary[CollectorRegistry, Series] = WeakKeyDictionary()


def series_in(registry: CollectorRegistry | None) -> Series:
    """The series in a registry, made once. None: a registry that is not collected."""
    if registry is None:
        return Series(CollectorRegistry())
    found = _SERIES.get(registry)
    if found is None:
        found = _SERIES[registry] = Series(registry)
    return found


class _PartitionStats:
    __slots__ = ("batches", "fallbacks", "last", "mix", "pending", "requests")

    def __init__(self) -> None:
        self.pending: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self.mix: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self.fallbacks: Counter[str] = Counter()
        self.batches = self.requests = self.last = 0


class BatcherStats:
    """A sink: counters of one batcher, by partition and in all. The payload of a request has its `priority` by name.

    told: called with a `BatchDispatched` for every message.
    """

    events = frozenset({RequestQueued, RequestSettled, BatchScheduled, BatchFinished, SchedulerPaused})

    def __init__(self, registry: CollectorRegistry | None, told: Callable[[BatchDispatched], None] | None) -> None:
        self.enqueued = dict.fromkeys(PRIORITIES, 0)
        self.fallbacks: Counter[str] = Counter()
        self.batches = self.urgent_flushes = self.pauses = self.rejections = 0
        self._told = told
        self._series = series_in(registry)
        self._lanes: OrderedDict[Hashable, _PartitionStats] = OrderedDict()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            request = event.ticket.request
            self.enqueued[request.payload.priority] += 1
            self._lane(request.partition).pending[request.payload.priority] += 1
            if reason := alone(request.partition):
                self._fell_back(request.partition, reason, 1)
        elif isinstance(event, RequestSettled):
            if event.ticket.started is None:
                request = event.ticket.request
                self._lane(request.partition).pending[request.payload.priority] -= 1
        elif isinstance(event, BatchScheduled):
            self._scheduled(event.batch)
        elif isinstance(event, BatchFinished):
            self._finished(event)
        else:
            self.pauses += 1

    def _scheduled(self, batch: Batch) -> None:
        lane = self._lane(batch.partition)
        for ticket in batch.grants:
            lane.pending[ticket.request.payload.priority] -= 1
        if batch.notes.get(UNSENT):
            return
        self.batches += 1
        self.urgent_flushes += batch.cause is Cause.URGENT
        lane.batches += 1
        lane.last = len(batch)
        lane.requests += len(batch)
        self._series.size.observe(len(batch))
        for ticket in batch.grants:
            priority = ticket.request.payload.priority
            lane.mix[priority] += 1
            self._series.mix[priority].inc()
            self._series.wait.observe(1000.0 * (batch.scheduled_at - ticket.arrived))

    def _finished(self, event: BatchFinished) -> None:
        batch = event.batch
        if reason := batch.notes.get(FALLBACK):
            self._fell_back(batch.partition, reason, len(batch))
        rejections = sum(isinstance(ticket.outcome, Failed) for ticket in batch.grants)
        self.rejections += rejections
        if self._told is not None and not batch.notes.get(UNSENT):
            hold = 1000.0 * (batch.scheduled_at - min(ticket.arrived for ticket in batch.grants))
            mix = dict(Counter[str](ticket.request.payload.priority for ticket in batch.grants))
            self._told(BatchDispatched(len(batch), hold, mix, 1000.0 * event.elapsed, rejections))

    def _fell_back(self, partition: Hashable, reason: str, requests: int) -> None:
        self.fallbacks[reason] += requests
        self._lane(partition).fallbacks[reason] += requests
        self._series.fallback[reason].inc(requests)

    def lanes(self, target: Callable[[Hashable], int], waits: Callable[[Hashable], Any]) -> list[dict[str, Any]]:
        """Every partition. target, waits: of the controller."""
        return [self._shown(key, lane, target(key), waits(key)) for key, lane in self._lanes.items()]

    @staticmethod
    def _shown(key: Any, lane: _PartitionStats, target: int, waits: tuple[float, float] | None) -> dict[str, Any]:
        model, draft, guidance, *single = key
        p50, p95 = waits or (None, None)
        return {
            "model_id": model,
            "draft_model": draft,
            "guidance": guidance,
            "single": bool(single),
            "pending": dict(lane.pending),
            "target_size": 1 if single else target,
            "batches": lane.batches,
            "last_batch": lane.last,
            "mean_batch": round(lane.requests / lane.batches, 3) if lane.batches else 0.0,
            "queue_wait_p50_ms": _ms(p50),
            "queue_wait_p95_ms": _ms(p95),
            "priority_mix": dict(lane.mix),
            "fallbacks": dict(lane.fallbacks),
        }

    def _lane(self, key: Hashable) -> _PartitionStats:
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= MOST_PARTITIONS:
                idle = next((k for k, known in self._lanes.items() if not any(known.pending.values())), None)
                if idle is not None:
                    del self._lanes[idle]
            lane = self._lanes[key] = _PartitionStats()
        else:
            self._lanes.move_to_end(key)
        return lane


def alone(partition: Hashable) -> str:
    """Why each request of a partition is sent alone; "" if they share messages."""
    return str(partition[3]) if isinstance(partition, tuple) and len(partition) == 4 else ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000.0 * seconds, 3)
