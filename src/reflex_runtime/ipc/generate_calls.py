"""The requests of a batch as one message to the runtime, the outcome of each, and the batcher's statistics.

What was written is not sent again: the runtime may have started it.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Cause,
    Done,
    Event,
    Failed,
    Outcome,
    RequestQueued,
    RequestSettled,
    SchedulerPaused,
)
from reflex_runtime.core.errors import ProcessorHung, ReflexError
from reflex_runtime.core.request import PRIORITIES, Ticket
from reflex_runtime.core.statistics import percentile
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.frames import INTERNAL_ERROR, ProtocolError, Reader, RpcError, raised
from reflex_runtime.ipc.messages import BATCH_GENERATE, GENERATE, BatchResult, GenerateParams, Item, Started
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.streams import StreamHandle
from reflex_runtime.observe.metrics import GENERATE_BATCHER, SeriesSet

MOST_PARTITIONS = 256  # in the statistics; the least recently used without waiting requests is dropped
RECENT = 512  # requests of a partition whose waits are shown
FALLBACKS = ("capability", "disabled", "environment", "options", "oversize")
UNSENT: Final = "unsent"  # a key of `Batch.notes`: there was no runtime when the batch was formed
LOST: Final = "lost"  # a key of `Batch.notes`: the message failed as a whole
_RESULT, _STARTED = Reader(BatchResult), Reader(Started)
_UNEXPLAINED = RpcError(INTERNAL_ERROR, "the runtime did not start the request, and gave no reason")


class Call:
    """One request from `enqueue` to the answer of its message.

    params: dropped when it has settled. answer: for a caller that waits for it; None once it was answered. out: it was
    put into a message. refused: the runtime answered that it did not start. timer: of its time limit, once it is out.
    """

    __slots__ = ("answer", "handle", "out", "params", "priority", "refused", "ticket", "timer")

    def __init__(
        self, params: GenerateParams, handle: StreamHandle, answer: asyncio.Future[dict[str, Any]] | None
    ) -> None:
        self.params, self.handle = params, handle
        self.priority: str = params.priority
        self.answer = answer
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.out = self.refused = False

    def answered(self, result: dict[str, Any] | ReflexError) -> None:
        """Give its caller the answer, once."""
        answer, self.answer = self.answer, None
        if answer is None or answer.done():
            return
        if isinstance(result, ReflexError):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def sent(client: RuntimeClient, batch: Batch) -> asyncio.Future[Raw]:
    """Send a batch as one message; returns the future of its answer."""
    requests = [ticket.request.payload.params for ticket in batch.grants]  # only one if they go alone: see `StepHold`
    single = alone(batch.partition)
    return client.call(*((GENERATE, requests[0]) if single else (BATCH_GENERATE, {"requests": requests})))


async def outcomes(client: RuntimeClient, batch: Batch, answer: asyncio.Future[Raw], limit: float) -> list[Outcome]:
    """The outcome of each request of a batch that was sent. limit: seconds for the answer."""
    calls: list[Call] = [ticket.request.payload for ticket in batch.grants]
    single = bool(alone(batch.partition))
    error: ReflexError
    try:
        async with asyncio.timeout(limit):
            raw = await answer
    except TimeoutError:
        error = ProcessorHung(f"the runtime did not answer within {1000.0 * limit:g} ms")
    except ConnectionLost as lost:  # a retry is safe if nothing was written
        error = copy.copy(lost) if lost.written else client.unavailable()
    except ReflexError as failed:
        error = copy.copy(failed)  # the traceback of `failed` refers to this frame: avoid a reference cycle
        calls[0].refused = single
    else:
        try:
            return [_outcome(calls[0], _STARTED.read(raw))] if single else _each(calls, _RESULT.read(raw).results)
        except ProtocolError as wrong:
            error = copy.copy(wrong)
    finally:
        del answer  # its error refers to this frame, too
    batch.notes[LOST] = not calls[0].refused
    return [Failed(error)] * len(calls)


def _each(calls: list[Call], results: list[Item]) -> list[Outcome]:
    if len(results) != len(calls):
        raise ProtocolError(f"the runtime answered {len(results)} requests of {len(calls)}", INTERNAL_ERROR)
    return [
        _outcome(call, item.result if item.success else item.error or _UNEXPLAINED)
        for call, item in zip(calls, results, strict=True)
    ]


def _outcome(call: Call, answer: Started | RpcError | None) -> Outcome:
    """The outcome of one request. answer: the runtime's, None if it gave none."""
    if isinstance(answer, RpcError):
        call.refused = True
        return Failed(raised(answer))
    if answer is None or answer.stream_id != call.handle.id:
        other = "nothing" if answer is None else f"stream {answer.stream_id!r:.220}"
        return Failed(ProtocolError(f"the answer to stream {call.handle.id!r} is about {other}"))
    return Done({"stream_id": answer.stream_id, "prompt_tokens": answer.prompt_tokens})


@dataclass(frozen=True, slots=True)
class BatchDispatched:
    """A message that was answered or failed.

    hold_ms: from the arrival of its oldest request until it was sent. priority_mix: number of requests by priority.
    duration_ms: from then until its answer. rejections: requests that failed.
    """

    size: int
    hold_ms: float
    priority_mix: Mapping[str, int]
    duration_ms: float
    rejections: int


class _PartitionStats:
    def __init__(self) -> None:
        self.pending: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self.mix: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self.fallbacks: Counter[str] = Counter()
        self.batches = self.requests = self.last = 0
        self.waits: deque[float] = deque(maxlen=RECENT)


class BatcherStats:
    """A sink: counters of one batcher, in all and by partition. on_batch: called for every message."""

    events = frozenset({RequestQueued, RequestSettled, BatchScheduled, BatchFinished, SchedulerPaused})

    def __init__(self, series: SeriesSet | None, on_batch: Callable[[BatchDispatched], None] | None) -> None:
        self.enqueued = dict.fromkeys(PRIORITIES, 0)
        self.fallbacks: Counter[str] = Counter()
        self.batches = self.urgent_flushes = self.pauses = self.rejections = self.errors = 0
        self._on_batch = on_batch
        self._series = of = series or SeriesSet(GENERATE_BATCHER, CollectorRegistry())
        self._size = of.histogram("reflex_generate_batcher_batch_size")
        self._wait = of.histogram("reflex_generate_batcher_queue_wait_ms")
        for priority in PRIORITIES:
            of.counter("reflex_generate_batcher_priority_mix_total", priority)
        for reason in FALLBACKS:
            of.counter("reflex_generate_batcher_fallback_total", reason)
        self._lanes: OrderedDict[Hashable, _PartitionStats] = OrderedDict()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            request = event.ticket.request
            self.enqueued[request.payload.priority] += 1
            lane = self._lane(request.partition)
            lane.pending[request.payload.priority] += 1
            if reason := alone(request.partition):
                self.fallbacks[reason] += 1
                lane.fallbacks[reason] += 1
                self._series.counter("reflex_generate_batcher_fallback_total", reason).inc()
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
        self._size.observe(len(batch))
        for ticket in batch.grants:
            priority = ticket.request.payload.priority
            lane.mix[priority] += 1
            self._series.counter("reflex_generate_batcher_priority_mix_total", priority).inc()
            lane.waits.append(batch.scheduled_at - ticket.arrived)
            self._wait.observe(1000.0 * lane.waits[-1])

    def _finished(self, event: BatchFinished) -> None:
        batch = event.batch
        self.errors += bool(batch.notes.get(UNSENT) or batch.notes.get(LOST))
        rejections = sum(isinstance(ticket.outcome, Failed) for ticket in batch.grants)
        self.rejections += rejections
        if self._on_batch is not None and not batch.notes.get(UNSENT):
            hold = 1000.0 * (batch.scheduled_at - min(ticket.arrived for ticket in batch.grants))
            mix = dict(Counter[str](ticket.request.payload.priority for ticket in batch.grants))
            self._on_batch(BatchDispatched(len(batch), hold, mix, 1000.0 * event.elapsed, rejections))

    def lanes(self) -> list[dict[str, Any]]:
        """The statistics of every partition."""
        return [_shown(key, lane) for key, lane in self._lanes.items()]

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


def _shown(key: Any, lane: _PartitionStats) -> dict[str, Any]:
    model, draft, guidance, *single = key
    waits = sorted(lane.waits)
    return {
        "model_id": model,
        "draft_model": draft,
        "guidance": guidance,
        "single": bool(single),
        "pending": dict(lane.pending),
        "batches": lane.batches,
        "last_batch": lane.last,
        "mean_batch": round(lane.requests / lane.batches, 3) if lane.batches else 0.0,
        "queue_wait_p50_ms": round(1000.0 * percentile(waits, 0.5), 3) if waits else None,
        "queue_wait_p95_ms": round(1000.0 * percentile(waits, 0.95), 3) if waits else None,
        "priority_mix": dict(lane.mix),
        "fallbacks": dict(lane.fallbacks),
    }


def alone(partition: Hashable) -> str:
    """Why the requests of a partition are sent alone; "" if they share messages."""
    return str(partition[3]) if isinstance(partition, tuple) and len(partition) == 4 else ""
