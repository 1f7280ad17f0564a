"""Puts concurrent `generate` calls into few `batch_generate` messages; each caller gets its own answer.

The scheduler decides which requests are sent when; the dispatcher drives it; the registry counts the free places. This
module has what is specific to generation: which requests may share a message, and how a request is cancelled.

    enqueue ──▶ waits ──▶ sent in a message ──▶ answered: its stream has begun
                  │           │
                  └───────────┴──▶ cancelled, expired, failed: its stream has ended, its place is free or will be
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import msgspec

from reflex_runtime.core.batch import Batch, Done, Outcome
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import Cancelled, ConfigError, Expired, ReflexError
from reflex_runtime.core.flush import Affine, FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import PRIORITIES, WAITING, Priority, Request, Ticket
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.frames import MAX_FRAME
from reflex_runtime.ipc.generate_calls import UNSENT, BatchDispatched, BatcherStats, Call, alone, outcomes, sent
from reflex_runtime.ipc.messages import BATCH_GENERATE, MOST_SCORES, WINDOW, GenerateParams
from reflex_runtime.ipc.spawn import unheard
from reflex_runtime.ipc.streams import StreamHandle, StreamRegistry
from reflex_runtime.observe.metrics import SeriesSet
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.batcher import Dispatcher
from reflex_runtime.settings.declare import option, validate

GROUP = "generate"
UNIT_BYTES = 16  # most bytes of a frame for a token or character of a prompt, with its part of the other fields
OFF = "REFLEX_DISABLE_GENERATE_BATCHING"
OPTIONS: dict[str, Any] = {f.name: f.default for f in msgspec.structs.fields(GenerateParams)}  # and their defaults

_EMPTY = GenerateParams()  # in place of the params of a request that has settled
_NONE = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GenerateBatcherConfig:
    """The section `generate_batcher` of the configuration file.

    enabled: False sends every request alone. max_batch_size: most requests in a message. min_hold_ms: no request is
    held for a shorter time. max_hold_ms: longest hold; background_extra_ms: added to it for background requests.
    pause_on_backpressure_ms: pause of a partition when one of its readers is slow. max_pending, max_pending_tokens:
    most requests that wait, and most of their prompt tokens (of a text: characters). stream_limit: most active streams.
    call_timeout_ms: for the answer to a message. ungroupable_options: a request that sets one of these is sent alone.
    """

    enabled: bool = True
    max_batch_size: int = option(16, within=(1, 1024))
    min_hold_ms: float = option(0.75, within=(0, 1000))
    max_hold_ms: float = option(3.0, within=(0, 1000))
    background_extra_ms: float = option(2.0, within=(0, 1000))
    pause_on_backpressure_ms: float = option(20.0, within=(0, 10_000))
    max_pending: int = option(1000, within=(1, 1_000_000))
    max_pending_tokens: int = option(1_000_000, within=(1, 1_000_000_000))
    stream_limit: int = option(64, within=(1, 1_000_000))
    call_timeout_ms: float = option(30_000.0, within=(1, 3_600_000))
    ungroupable_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validate(self, "generate_batcher")
        if self.min_hold_ms > self.max_hold_ms:
            rule = f"must be at most max_hold_ms, which is {self.max_hold_ms!r}"
            raise ConfigError(f"generate_batcher.min_hold_ms={self.min_hold_ms!r}: {rule}")
        for name in self.ungroupable_options:
            if name not in OPTIONS:
                rule = f"must be fields of a request: {sorted(OPTIONS)}"
                raise ConfigError(f"generate_batcher.ungroupable_options={name!r}: {rule}")


_PLAIN = GenerateBatcherConfig()


class StepHold:
    """Holds requests until half of the runtime's current step is over.

    No request can begin before that step has ended, so the hold delays no first token. Callers whose streams ended with
    the last step have sent their next requests by then, and these share a message. The other half of the step is left
    for the way to the runtime, late timers and shorter steps. Nothing is held in steps shorter than SHORT, between
    steps, or for less than `least` seconds.

    computes: whether the runtime has streams.
    """

    PART, GAIN = 0.5, 0.25  # of a step that holds may last; weight of the latest step in the mean
    SHORT = 0.006  # seconds; with holds in steps of 3 ms the first token came 1.5 times as late

    def __init__(self, computes: Callable[[], bool], least: float) -> None:
        self._computes, self._least = computes, least
        self._began, self._step = -inf, 0.0
        self._made: tuple[FlushPolicy, FlushPolicy, FlushPolicy] | None = None  # base, without a hold, of one request

    def begins(self, now: float) -> None:
        """A step begins: tokens of the last one came, or a request was sent to an idle runtime."""
        if now - self._began >= self.PART * self._step:
            self._began = now

    def took(self, seconds: float) -> None:
        """The mean step of a stream that has ended; 0 if it had one token."""
        if seconds:
            self._step += (self.GAIN if self._step else 1.0) * (seconds - self._step)

    def arrived(self, ticket: Ticket, now: float) -> None:
        """See `Controller`."""

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        if self._made is None or self._made[0] is not base:
            unheld = replace(base, hold_max=_NONE)
            self._made = base, unheld, replace(unheld, max_batch_size=1)
        if alone(partition):
            return self._made[2]
        until = self._began + self.PART * self._step
        if not self._computes() or self._step < self.SHORT or until - now < self._least:
            return self._made[1]
        return replace(base, until=until)


class GenerateBatcher:
    """See the module. Use it only on the event loop of its first request.

    registry: of the same runtime process; the batcher sets its hooks. on_batch_dispatched: called for every message
    that was answered or failed. series: of `GENERATE_BATCHER`; several batchers may share them.
    """

    def __init__(
        self,
        client: RuntimeClient,
        registry: StreamRegistry,
        config: GenerateBatcherConfig = _PLAIN,
        *,
        sinks: Iterable[Sink] = (),
        on_batch_dispatched: Callable[[BatchDispatched], None] | None = None,
        series: SeriesSet | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._client, self._registry, self._clock = client, registry, clock
        self._stats = BatcherStats(series, on_batch_dispatched)
        self._refused = self._aborted = self._expired = 0
        self._off = "environment" if os.environ.get(OFF) == "1" else "" if config.enabled else "disabled"
        self._steps = StepHold(lambda: registry.active_count() > 0, config.min_hold_ms / 1000.0)
        sinks = [self._stats, *sinks]
        self._dispatcher = Dispatcher([_group(config, self._steps)], self._send, sinks, registry.limit + 64, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reserving = False
        registry.say = client.notify
        registry.on_room = self._room_changed
        registry.on_event = self._stream_event
        registry.on_tokens = lambda: self._steps.begins(clock())
        registry.on_completed = lambda handle: self._steps.took(handle.token_s)

    # -- for callers ---------------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        params: GenerateParams,
        priority: str = "default",
        cancel: asyncio.Event | None = None,
        timeout_ms: float | None = None,
        telemetry: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Start one stream; returns its response, a `Started` as a dict.

        params: `stream_id` is that of a registered stream; `credits` are the registry's window unless set. priority: of
        the request here and in the runtime. cancel: cancels the stream if it is set before the stream ends; so does
        cancelling this task or closing the handle. timeout_ms: for this response; None: that of params, which is until
        the first token. telemetry: its `request_id` is sent if params have none.

        Raises ConfigError for wrong params, `Rejected` if not admitted (a retry is safe), `Dropped` if it was cancelled
        or never sent, else the error of the message or of the request. The stream has ended then.
        """
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if cancel is not None and cancel.is_set():
            why = "cancelled before it was queued"
            self._registry.release(self._handle(params.stream_id), Cancelled(why))
            raise Cancelled(why)  # no local variable for it: its traceback refers to this frame
        call = self.submit(params, priority, timeout_ms, telemetry, answer)
        try:
            if cancel is not None:
                call.handle.on_end = asyncio.create_task(self._watch(cancel, call)).cancel
            return await answer
        except asyncio.CancelledError:
            self._abort(call, Cancelled("its caller was cancelled"))
            raise
        finally:
            del answer  # the traceback of its error refers to this frame: break the reference cycle

    def submit(
        self,
        params: GenerateParams,
        priority: str = "default",
        timeout_ms: float | None = None,
        telemetry: Mapping[str, Any] | None = None,
        answer: asyncio.Future[dict[str, Any]] | None = None,
    ) -> Call:
        """As `enqueue`, but returns at once: for callers that only read the stream. Raises ConfigError and `Rejected`;
        later errors end the stream. answer: gets the response."""
        self._started()
        handle = self._handle(params.stream_id)
        try:
            call = Call(self._completed(params, handle, priority, telemetry), handle, answer)
            self._submit(call, timeout_ms)
        except ReflexError as error:
            self._registry.release(handle, copy.copy(error))
            raise
        return call

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with the scheduler's events."""
        self._dispatcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Stop calling the sink."""
        self._dispatcher.remove_sink(sink)

    def queue(self) -> dict[str, Any]:
        """The scheduler's snapshot of the waiting requests."""
        group: dict[str, Any] = self._dispatcher.scheduler.snapshot()["groups"][GROUP]
        return group

    def get_stats(self) -> dict[str, Any]:
        """Counters and waiting requests; JSON-safe."""
        stats, snapshot = self._stats, self._dispatcher.scheduler.snapshot()
        return {
            "enabled": not self._off,
            "batching": not self._off and BATCH_GENERATE in self._client.capabilities,
            "pending": self._dispatcher.scheduler.queued(GROUP),
            "messages_out": snapshot["in_flight_batches"],
            "active_streams": self._registry.active_count(),
            "stream_limit": self._registry.limit,
            "batches": stats.batches,
            "enqueued_by_priority": dict(stats.enqueued),
            "promoted_background": snapshot["groups"][GROUP]["promoted"],
            "urgent_flushes": stats.urgent_flushes,
            "aborted_requests": self._aborted,
            "expired_requests": self._expired,
            "refused": self._refused,
            "rejections": stats.rejections,
            "fallbacks": dict(stats.fallbacks),
            "transport_errors": stats.errors,
            "backpressure_pauses": stats.pauses,
            "partitions": stats.lanes(),
        }

    async def close(self, drain: bool = True, timeout: float = 10.0) -> None:
        """Admit nothing more. drain: send the waiting requests, and wait `timeout` seconds for the answers. When it
        returns, every caller has an answer or an error. Streams that have begun go on."""
        self._started()  # so that a batcher that had no request refuses, too
        await self._dispatcher.close(drain, timeout)

    # -- admission -----------------------------------------------------------------------------------------------------

    def _started(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._dispatcher.start()
            self._room_changed()

    def _handle(self, stream_id: str) -> StreamHandle:
        """The registered stream of a new request."""
        handle = self._registry.find(stream_id)
        if handle is None:
            raise ConfigError(f"stream_id={stream_id!r}: not registered, or it has ended")
        if handle.on_left is not None or handle.reserved or handle.closed:
            raise ConfigError(f"stream_id={stream_id!r}: in use by a stream that has not ended")
        return handle

    @staticmethod
    def _completed(
        params: GenerateParams, handle: StreamHandle, priority: str, telemetry: Mapping[str, Any] | None
    ) -> GenerateParams:
        """The request with its stream's id, its priority and its credits. Sets the handle's window and scores_left."""
        if params.credits != WINDOW:
            handle.window = params.credits
        handle.scores_left = 0 if params.prompt_logprobs is None else MOST_SCORES
        id = params.request_id or str((telemetry or {}).get("request_id", ""))
        own = {"stream_id": handle.id, "priority": priority, "request_id": id, "credits": handle.window}
        return msgspec.structs.replace(params, **own)

    def _submit(self, call: Call, timeout_ms: float | None) -> None:
        params, handle = call.params, call.handle
        limit = params.timeout_ms if timeout_ms is None else timeout_ms
        if limit is not None and not (limit >= 0.0 and isfinite(limit)):
            raise ConfigError(f"timeout_ms={limit!r}: must be finite and >= 0")
        urgent = limit is not None and limit <= self.config.max_hold_ms
        units = _prompt_units(params)
        why = self._off or self._why_alone(params, units, "timeout_ms" if timeout_ms is not None else "")
        guidance = params.guidance or {}
        key = (params.model_id, params.draft_model or "", str(guidance.get("mode", "")))
        handle.partition = self._leader_partition(params.follows, key) or ((*key, why) if why else key)
        request = Request(
            payload=call,
            id=params.request_id or params.stream_id,
            group=GROUP,
            partition=handle.partition,
            priority=Priority.URGENT if urgent else PRIORITIES[params.priority],
            time_limit=None if limit is None else limit / 1000.0,
            wants=units,
        )
        try:
            if not self._client.ready:
                raise self._client.unavailable()
            call.ticket = self._dispatcher.submit(request, self._settled)
        except ReflexError:
            self._refused += 1
            raise
        handle.on_left = lambda: self._abort(call, Cancelled("its stream was closed"))

    def _leader_partition(self, follows: str | None, key: tuple[str, str, str]) -> Hashable:
        """The partition of the stream that a request follows, if both have the same key; else None. The runtime must
        get that stream first, and only requests of the same partition are sent in order."""
        first = self._registry.find(follows) if follows else None
        same = first is not None and isinstance(first.partition, tuple) and first.partition[:3] == key
        return first.partition if first is not None and same else None

    def _why_alone(self, params: GenerateParams, units: float, also: str) -> str:
        """Why a request cannot share a message; "" if it can. also: a further option that the caller set."""
        if BATCH_GENERATE not in self._client.capabilities:
            return "capability"
        if units * min(self.config.max_batch_size, self._registry.limit) > MAX_FRAME / UNIT_BYTES:
            return "oversize"  # a message of such requests might not fit into a frame
        for name in self.config.ungroupable_options:
            if name == also or getattr(params, name) != OPTIONS[name]:
                return "options"
        return ""

    async def _watch(self, cancel: asyncio.Event, call: Call) -> None:
        """Cancel the request when the event is set."""
        await cancel.wait()
        self._abort(call, Cancelled("its caller cancelled it"))

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _abort(self, call: Call, error: ReflexError) -> None:
        """End a request: take it out of the queue, or cancel it at the runtime."""
        call.answered(error)
        handle, ticket = call.handle, call.ticket
        self._aborted += isinstance(error, Cancelled)
        self._expired += isinstance(error, Expired)
        handle.on_left = None
        if ticket is not None and ticket.state is WAITING:
            self._dispatcher.cancel(ticket)
        if isinstance(error, Expired):  # its reader still waits, and must get the error
            self._registry.give_up(handle, copy.copy(error))
        else:
            handle.close()

    def _settled(self, ticket: Ticket) -> None:
        """End a call whose ticket has settled: answered, failed, or not sent."""
        call: Call = ticket.request.payload
        call.ticket = call.handle.on_left = None  # both refer to the call: break the reference cycles
        call.params = _EMPTY  # the scheduler may remember the ticket for a while, and prompts are large
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        outcome = ticket.outcome
        if isinstance(outcome, Done):
            call.handle.prompt_tokens = outcome.value["prompt_tokens"]
            call.answered(outcome.value)
            return
        error = outcome.error
        self._expired += isinstance(error, Expired) and not call.out
        if call.out and not call.refused:
            self._registry.abandon(call.handle, copy.copy(error))
        else:
            self._registry.release(call.handle, copy.copy(error))
        call.answered(copy.copy(error))  # a copy: a traceback grows with each raise

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> Awaitable[Sequence[Outcome]]:
        if not self._client.ready:
            batch.notes[UNSENT] = True
            self._room_changed()  # frees the places that the scheduler counted for the batch
            raise self._client.unavailable()
        if not self._registry.active_count():
            self._steps.begins(batch.scheduled_at)
        for ticket in batch.grants:
            self._departs(ticket, batch.scheduled_at)
        answer = unheard(sent(self._client, batch))
        if next(iter(batch.grants)).request.priority is Priority.URGENT:  # urgent requests come first in a batch
            self._client.flush()
        reading = asyncio.ensure_future(outcomes(self._client, batch, answer, self.config.call_timeout_ms / 1000.0))
        reading.add_done_callback(lambda _: answer.cancel())  # even if `reading` was cancelled before it ran
        return reading

    def _departs(self, ticket: Ticket, now: float) -> None:
        """Reserve a place for a request that leaves the queue."""
        call: Call = ticket.request.payload
        call.out = True
        self._reserving = True  # the scheduler has counted the place already
        self._registry.reserve(call.handle)
        self._reserving = False
        if ticket.deadline < inf:
            assert self._loop is not None
            late = Expired("its deadline passed before the runtime answered")
            call.timer = self._loop.call_later(max(0.0, ticket.deadline - now), self._abort, call, late)
        if call.params.timeout_ms is not None:
            left = max(1.0, call.params.timeout_ms - 1000.0 * (now - ticket.arrived))
            call.params = msgspec.structs.replace(call.params, timeout_ms=left)

    # -- hooks of the registry -----------------------------------------------------------------------------------------

    def _room_changed(self) -> None:
        if self._loop is not None and not self._reserving:
            active, limit = self._registry.capacity()
            self._dispatcher.input(lambda scheduler, now: scheduler.set_room(GROUP, max(0, limit - active), now))

    def _stream_event(self, handle: StreamHandle, event: str) -> None:
        """Pause the partition of a stream whose reader is slow."""
        pause, key = self.config.pause_on_backpressure_ms / 1000.0, handle.partition
        if self._loop is not None and isinstance(key, tuple) and pause > 0.0:
            self._dispatcher.input(lambda scheduler, now: scheduler.pause(GROUP, now + pause, now, key))


def _group(config: GenerateBatcherConfig, steps: StepHold) -> GroupConfig:
    longest = config.max_hold_ms / 1000.0
    hold = (0.0, longest, longest + config.background_extra_ms / 1000.0)
    return GroupConfig(
        name=GROUP,
        flush=FlushPolicy(max_batch_size=config.max_batch_size, hold_max=hold),
        capacity=config.max_pending,
        max_queued_units=float(config.max_pending_tokens),
        displace_background=True,
        promote_after=10.0 * longest,
        cost=UnitCost,
        controller=steps,
    )


def _prompt_units(params: GenerateParams) -> float:
    """The prompt's tokens, or the characters of its text, which are at least as many."""
    characters = sum(len(str(message.get("content", ""))) for message in params.messages or ())
    return float(max(1, len(params.prompt_token_ids or ()) + len(params.prompt or "") + characters))
