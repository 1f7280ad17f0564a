"""What the generate batcher did, in numbers: for `get_stats`, for Prometheus, and for who asks to be told."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from reflex_runtime.core.request import Priority
from reflex_runtime.telemetry import series

MOST_PARTITIONS = 256  # remembered; the least recently used goes
PRIORITIES = tuple(priority.name.lower() for priority in Priority)
FALLBACKS = ("capability", "disabled", "environment", "options", "oversize")

_SIZES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 24, 32, 64)
_WAITS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 50.0, 100.0, 1000.0)


@dataclass(frozen=True, slots=True)
class BatchDispatched:
    """What became of one message, once its answer came or could come no more.

    hold_ms: from the oldest request's arrival to the write. priority_mix: requests by priority. duration_ms: from the
    write to the answer. rejections: requests that did not start.
    """

    size: int
    hold_ms: float
    priority_mix: Mapping[str, int]
    duration_ms: float
    rejections: int


class Series:
    """The series of all generate batchers that share a Prometheus registry; see `series_in`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.size = series.Histogram(
            "reflex_generate_batcher_batch_size", "Requests per generate message", (), _SIZES, registry
        ).labels()
        self.wait = series.Histogram(
            "reflex_generate_batcher_queue_wait_ms", "From arrival to the write of the message", (), _WAITS, registry
        ).labels()
        mix = series.Counter(
            "reflex_generate_batcher_priority_mix", "Requests in generate messages", ("priority",), registry
        )
        fallback = series.Counter(
            "reflex_generate_batcher_fallback_total", "Requests that went by themselves", ("reason",), registry
        )
        self.mix = {priority: mix.labels(priority) for priority in PRIORITIES}
        self.fallback = {reason: fallback.labels(reason) for reason in FALLBACKS}


_SERIES: WeakKeyDictionary[CollectorRegistry, Series] = WeakKeyDictionary()


def series_in(registry: CollectorRegistry | None) -> Series:
    """Those of a registry, made when nobody has; None: in one that nobody collects."""
    if registry is None:
        return Series(CollectorRegistry())
    found = _SERIES.get(registry)
    if found is None:
        found = _SERIES[registry] = Series(registry)
    return found


class _PartitionStats:
    """One partition."""

    __slots__ = ("batches", "fallbacks", "last", "mix", "pending", "requests")

    def __init__(self) -> None:
        self.pending: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self.mix: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self.fallbacks: Counter[str] = Counter()
        self.batches = self.requests = self.last = 0


class BatcherStats:
    """Counters of one batcher, by partition and in all."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.enqueued = dict.fromkeys(PRIORITIES, 0)
        self.fallbacks: Counter[str] = Counter()
        self.batches = self.urgent_flushes = self.aborted = self.expired = 0
        self.pauses = self.rejections = self.refused = 0  # refused: not admitted here
        self._series = series_in(registry)
        self._lanes: OrderedDict[Hashable, _PartitionStats] = OrderedDict()

    def queued(self, partition: Hashable, priority: str) -> None:
        """A request was admitted."""
        self.enqueued[priority] += 1
        self._lane(partition).pending[priority] += 1

    def left(self, partition: Hashable, priority: str) -> None:
        """It waits no more."""
        self._lane(partition).pending[priority] -= 1

    def fell_back(self, partition: Hashable, reason: str) -> None:
        """A request goes by itself."""
        self.fallbacks[reason] += 1
        self._lane(partition).fallbacks[reason] += 1
        self._series.fallback[reason].inc()

    def written(self, partition: Hashable, priorities: Sequence[str], waits: Sequence[float], urgent: bool) -> None:
        """A message was written. waits: seconds, of each request in it."""
        lane = self._lane(partition)
        self.batches += 1
        self.urgent_flushes += urgent
        lane.batches += 1
        lane.last = len(priorities)
        lane.requests += len(priorities)
        self._series.size.observe(len(priorities))
        for priority, wait in zip(priorities, waits, strict=True):
            lane.mix[priority] += 1
            self._series.mix[priority].inc()
            self._series.wait.observe(1000.0 * wait)

    def lanes(self, target: Callable[[Hashable], int], waits: Callable[[Hashable], Any]) -> list[dict[str, Any]]:
        """What is known of every partition. target, waits: as the controller has them."""
        return [self._told(key, lane, target(key), waits(key)) for key, lane in self._lanes.items()]

    def pending(self) -> int:
        """Requests that wait."""
        return sum(sum(lane.pending.values()) for lane in self._lanes.values())

    @staticmethod
    def _told(key: Any, lane: _PartitionStats, target: int, waits: tuple[float, float] | None) -> dict[str, Any]:
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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000.0 * seconds, 3)
