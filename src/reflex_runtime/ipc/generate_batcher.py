"""Puts concurrent `generate` calls into few `batch_generate` messages, and tells each caller what became of its own.

The scheduler decides who leaves when, the dispatcher drives it, the registry says how many may be active; here is what
is particular to generating: what may share a message, when a message cannot be used, and how a request is taken back.

    enqueue ──▶ waits ──▶ out, in a message ──▶ answered: its stream has begun
                  │           │
                  └───────────┴──▶ taken back, expired, failed: its stream has ended, its place is free or will be
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from reflex_runtime.core.adapt import Affine, HoldTarget
from reflex_runtime.core.batch import Batch, Cause, Done, Failed, Outcome
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import (
    Cancelled,
    ConfigError,
    Expired,
    ReflexError,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import WAITING, Priority, Request, Ticket
from reflex_runtime.drivers.audience import Sink
from reflex_runtime.drivers.dispatcher import Dispatcher
from reflex_runtime.ipc.batcher_stats import PRIORITIES, BatchDispatched, BatcherStats
from reflex_runtime.ipc.generate_calls import Call, RuntimeConnection, RuntimeMessages, SentBatch
from reflex_runtime.ipc.generate_config import OPTIONS, GenerateBatcherConfig
from reflex_runtime.ipc.messages import BATCH_GENERATE, GenerateParams
from reflex_runtime.ipc.registry import StreamHandle, StreamRegistry

log = logging.getLogger("reflex.ipc")

GROUP = "generate"
OFF = "REFLEX_DISABLE_GENERATE_BATCHING"
CROWDED = 0.8  # of the places taken: no time to wait for more company

_SPENT = GenerateParams("")
_TOO_SOON = "it was cancelled before it came"
_PLAIN = GenerateBatcherConfig()
_NONE = (0.0, 0.0, 0.0)
_TIERS = {priority.name.lower(): priority for priority in Priority}


class _Targets(HoldTarget):
    """Knows the streams. Requests that go by themselves have nobody to wait for."""

    def __init__(self, registry: StreamRegistry, config: GenerateBatcherConfig) -> None:
        super().__init__(
            smallest=config.min_batch_size,
            largest=config.max_batch_size,
            target_batch_time=config.target_batch_time_ms / 1000.0,
            hold=config.max_hold_ms / 1000.0,
        )
        self._registry = registry
        self._single: FlushPolicy | None = None

    def left(self, partition: Hashable) -> Sequence[int]:
        return self._registry.left(partition)

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        if _alone(partition):
            if self._single is None:
                self._single = replace(base, max_batch_size=1, hold_min=_NONE, hold_max=_NONE)
            return self._single
        return super().policy(base, affine, now, partition)


class GenerateBatcher:
    """See the module. Only on one loop, that of its first `enqueue`.

    registry: of the streams towards the same runtime process; the batcher sets its hooks. sinks: see `Audience`.
    on_batch_dispatched: called with a `BatchDispatched` for every message. registry_of_series: where its series go;
    batchers that share one add up.
    """

    def __init__(
        self,
        client: RuntimeConnection,
        registry: StreamRegistry,
        config: GenerateBatcherConfig = _PLAIN,
        *,
        sinks: Iterable[Sink] = (),
        on_batch_dispatched: Callable[[BatchDispatched], None] | None = None,
        registry_of_series: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._client, self._registry, self._clock = client, registry, clock
        self._told = on_batch_dispatched
        self._stats = BatcherStats(registry_of_series)
        self._off = "environment" if os.environ.get(OFF) == "1" else "" if config.enabled else "disabled"
        self._targets = _Targets(registry, config)
        self._dispatcher = Dispatcher([_group(config, self._targets)], self._send, sinks, registry.limit + 64, clock)
        self._exchange = RuntimeMessages(client, config.call_timeout_ms / 1000.0, self._fell_back)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reserving = False
        registry.say = client.notify
        registry.on_room = self._room_changed
        registry.on_event = self._stream_event
        registry.on_completed = self._stream_completed

    # -- for callers ---------------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        params: Mapping[str, Any],
        priority: str = "default",
        cancel: asyncio.Event | None = None,
        timeout_ms: float | None = None,
        telemetry: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Start one stream: its own response, a `Started` as a dict.

        params: fields of `GenerateParams`. The stream of `stream_id` was registered before, or is registered now, and
        `StreamRegistry.get` finds it. priority: tier it is served in, here and at the runtime. cancel: set, at any
        time before the stream ends, takes it back, as does cancelling this task or closing the stream's handle.
        timeout_ms: for this response; by default that of params, which is until the first token. telemetry: its
        `request_id` goes along.

        Raises ConfigError for wrong params, `Rejected` for what was not admitted (a retry is safe), `Dropped` for what
        never reached the runtime or was taken back, and what befell the message or this request at the runtime. Its
        stream has ended then.
        """
        loop = self._started()
        request, tier, limit = self._read(params, priority, timeout_ms, telemetry)
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        call = Call(request, self._handle(request), answer)
        try:
            if cancel is not None:
                self._watch(cancel, call)
            self._submit(call, tier, limit, "timeout_ms" if timeout_ms is not None else "")
            return await answer
        except asyncio.CancelledError:
            self._abort(call, Cancelled("its caller was cancelled"))
            raise
        finally:
            del answer  # its error has this frame in its traceback: this breaks the circle

    def get_stats(self) -> dict[str, Any]:
        """What was done so far and what waits, JSON-safe."""
        stats, active = self._stats, self._registry.active_count()
        group = self._dispatcher.scheduler.snapshot()["groups"][GROUP]
        return {
            "enabled": not self._off,
            "batching": not self._off and BATCH_GENERATE in self._client.capabilities,
            "pending": stats.pending(),
            "messages_out": self._dispatcher.scheduler.snapshot()["in_flight_batches"],
            "active_streams": active,
            "stream_limit": self._registry.limit,
            "batches": stats.batches,
            "enqueued_by_priority": dict(stats.enqueued),
            "promoted_background": group["promoted"],
            "urgent_flushes": stats.urgent_flushes,
            "aborted_requests": stats.aborted,
            "expired_requests": stats.expired,
            "refused": stats.refused,
            "rejections": stats.rejections,
            "fallbacks": dict(stats.fallbacks),
            "transport_errors": self._exchange.errors,
            "backpressure_pauses": stats.pauses,
            "partitions": stats.lanes(self._targets.target, self._targets.waits),
        }

    async def close(self, drain: bool = True, timeout: float = 10.0) -> None:
        """Admit nothing more; with `drain` let what waits be sent and answered within `timeout` seconds. Every caller
        has its answer when this returns. Streams that have begun go on."""
        self._started()  # nothing is admitted after this, also where nothing was before
        await self._dispatcher.close(drain, timeout)

    # -- coming --------------------------------------------------------------------------------------------------------

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._dispatcher.start()
            self._room_changed()
        return self._loop

    def _read(
        self, params: Mapping[str, Any], priority: str, timeout_ms: float | None, telemetry: Mapping[str, Any] | None
    ) -> tuple[GenerateParams, Priority, float | None]:
        """The request, its tier, and seconds for its answer."""
        given = {"credits": self._registry.window, **params, "priority": priority}
        id = given.get("stream_id")
        handle = self._registry.find(id) if isinstance(id, str) else None
        if id is None:
            handle = self._registry.register(kept=True)
            given["stream_id"] = handle.id
        try:
            if priority not in _TIERS:
                raise ConfigError(f"priority={priority!r}: must be one of {', '.join(PRIORITIES)}")
            if telemetry and not given.get("request_id"):
                given["request_id"] = str(telemetry.get("request_id", ""))
            request = _params(given)
            limit = request.timeout_ms if timeout_ms is None else timeout_ms
            if limit is not None and not (limit >= 0.0 and isfinite(limit)):
                raise ConfigError(f"timeout_ms={limit!r}: must be finite and >= 0")
        except ConfigError as error:
            if handle is not None and handle.on_left is None and not handle.reserved:  # it is nobody else's
                self._registry.release(handle, copy.copy(error))
            raise
        urgent = limit is not None and limit <= self.config.max_hold_ms
        return request, Priority.URGENT if urgent else _TIERS[priority], None if limit is None else limit / 1000.0

    def _handle(self, request: GenerateParams) -> StreamHandle:
        handle = self._registry.find(request.stream_id)
        if handle is None:
            handle = self._registry.register(request.stream_id, kept=True)
        if handle.on_left is not None or handle.reserved or handle.closed:
            raise ConfigError(f"stream_id={request.stream_id!r}: in use by a stream that has not ended")
        handle.window, handle.most = request.credits, request.max_tokens
        return handle

    def _submit(self, call: Call, tier: Priority, limit: float | None, also: str) -> None:
        """Into the queue. also: an option in use beside those of the params."""
        params, handle = call.params, call.handle
        why = self._off or self._why_alone(params, also)
        guidance = params.guidance or {}
        key = (params.model_id, params.draft_model or "", str(guidance.get("mode", "")))
        handle.partition = (*key, "single") if why else key
        handle.on_left = lambda: self._abort(call, Cancelled("its stream was closed"))
        request = Request(
            payload=call,
            id=params.request_id or params.stream_id,
            group=GROUP,
            partition=handle.partition,
            priority=tier,
            time_limit=limit,
            wants=_prompt_units(params),
        )
        try:
            if not self._client.ready:
                raise self._client.unavailable()
            call.ticket = self._dispatcher.submit(request, self._settled)
        except ReflexError as error:
            self._stats.refused += 1
            self._registry.release(handle, copy.copy(error))
            raise
        self._stats.queued(handle.partition, call.priority)
        if why:
            self._stats.fell_back(handle.partition, why)

    def _why_alone(self, params: GenerateParams, also: str) -> str:
        """Why a request cannot share a message; "" when it can."""
        if BATCH_GENERATE not in self._client.capabilities:
            return "capability"
        for name in self.config.ungroupable_options:
            if name == also or getattr(params, name) != OPTIONS[name]:
                return "options"
        return ""

    def _watch(self, cancel: asyncio.Event, call: Call) -> None:
        """Take the request back when the event is set, until its stream has ended."""
        if cancel.is_set():
            self._registry.release(call.handle, Cancelled(_TOO_SOON))
            raise Cancelled(_TOO_SOON)

        async def wait() -> None:
            await cancel.wait()
            self._abort(call, Cancelled("its caller cancelled it"))

        call.handle.on_end = asyncio.get_running_loop().create_task(wait()).cancel

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _abort(self, call: Call, error: ReflexError) -> None:
        """Nobody wants it any more. Where it waits it goes; once it is out, the runtime is told to stop."""
        answer, call.answer = call.answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
        handle, ticket = call.handle, call.ticket
        self._stats.aborted += isinstance(error, Cancelled)
        self._stats.expired += isinstance(error, Expired)
        handle.on_left = None
        if ticket is not None and ticket.state is WAITING:
            self._dispatcher.cancel(ticket)
        if isinstance(error, Expired):  # its reader is still there
            self._registry.give_up(handle, copy.copy(error))
        else:
            handle.close()

    def _settled(self, ticket: Ticket) -> None:
        """The scheduler has done with it: answered, failed, or never sent."""
        call: Call = ticket.request.payload
        call.ticket = call.handle.on_left = None  # they hold the call: this breaks the circles
        call.params = _SPENT  # the scheduler may remember the ticket for a while, and prompts are large
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        answer, call.answer = call.answer, None
        outcome = ticket.outcome
        if not call.out:
            self._stats.left(call.handle.partition, call.priority)
            self._stats.expired += isinstance(outcome.error, Expired)
        if isinstance(outcome, Done):
            call.handle.prompt_tokens = outcome.value["prompt_tokens"]
            if answer is not None and not answer.done():
                answer.set_result(outcome.value)
            return
        error = outcome.error
        if call.out and not call.refused:
            self._registry.abandon(call.handle, copy.copy(error))
        else:
            self._registry.release(call.handle, copy.copy(error))
        if answer is not None and not answer.done():
            answer.set_exception(copy.copy(error))  # one each: a traceback grows with everybody who raises it

    # -- going ---------------------------------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> Awaitable[Sequence[Outcome]]:
        """Write a batch."""
        if not self._client.ready:
            self._exchange.errors += 1
            self._room_changed()  # nobody took the places that the scheduler counted
            raise self._client.unavailable()
        now = self._clock()
        message = SentBatch(batch, [self._departs(ticket, now) for ticket in batch.grants], _alone(batch.partition))
        self._exchange.write(message)
        assert self._loop is not None
        if next(iter(batch.grants)).request.priority is Priority.URGENT:  # tiers go in order
            self._client.flush()
            self._written(message)
        else:
            self._loop.call_soon(self._written, message)  # after the peer's flush, which the call has asked for
        answers = self._loop.create_task(self._answered(message))
        answers.add_done_callback(message.forget)
        return answers

    def _departs(self, ticket: Ticket, now: float) -> GenerateParams:
        """A request leaves the queue and takes its place. Returns it as the runtime is told."""
        call: Call = ticket.request.payload
        call.out = True
        self._reserving = True  # the scheduler has counted it already
        self._registry.reserve(call.handle)
        self._reserving = False
        self._stats.left(call.handle.partition, call.priority)
        if ticket.deadline < inf:
            assert self._loop is not None
            call.timer = self._loop.call_later(max(0.0, ticket.deadline - now), self._overdue, call)
        if call.params.timeout_ms is None:
            return call.params
        left = max(1.0, call.params.timeout_ms - 1000.0 * (now - ticket.arrived))
        return msgspec.structs.replace(call.params, timeout_ms=left)

    def _overdue(self, call: Call) -> None:
        self._abort(call, Expired("its time was over before the runtime answered"))

    def _written(self, message: SentBatch) -> None:
        batch = message.batch
        message.written(self._clock())
        priorities = [call.priority for call in message.calls]
        self._stats.written(batch.partition, priorities, message.waits, batch.cause is Cause.URGENT)

    async def _answered(self, message: SentBatch) -> list[Outcome]:
        """What became of each request of a message."""
        try:
            outcomes = await self._exchange.read(message)
        except ReflexError as error:
            self._dispatched(message, len(message.calls))
            failed = Failed(copy.copy(error))  # its traceback holds the message, and the tickets hold it: a circle
            return [failed] * len(message.calls)
        active, limit = self._registry.capacity()
        seconds = self._clock() - message.at
        self._targets.returned(message.batch.partition, message.waits, seconds, active >= CROWDED * limit)
        self._dispatched(message, sum(isinstance(outcome, Failed) for outcome in outcomes))
        return outcomes

    def _dispatched(self, message: SentBatch, rejections: int) -> None:
        self._stats.rejections += rejections
        if self._told is None:
            return
        mix = dict(Counter[str](call.priority for call in message.calls))
        duration = 1000.0 * (self._clock() - message.at)
        info = BatchDispatched(len(message.calls), 1000.0 * max(message.waits), mix, duration, rejections)
        try:
            self._told(info)
        except Exception:
            log.exception("on_batch_dispatched failed")

    def _fell_back(self, message: SentBatch, reason: str) -> None:
        for _ in message.calls:
            self._stats.fell_back(message.batch.partition, reason)

    # -- the registry's ------------------------------------------------------------------------------------------------

    def _room_changed(self) -> None:
        if self._loop is not None and not self._reserving:
            active, limit = self._registry.capacity()
            self._dispatcher.input(lambda scheduler, now: scheduler.set_room(GROUP, max(0, limit - active), now))

    def _stream_completed(self, handle: StreamHandle) -> None:
        """Its caller may ask again in a moment. The scheduler decides anew when the place is free."""
        if not handle.closed:
            self._targets.ended(handle.partition, self._clock(), handle.token_s)

    def _stream_event(self, handle: StreamHandle, event: str) -> None:
        """Its reader is slow: what its model would be sent next waits a little."""
        pause, key = self.config.pause_on_backpressure_ms / 1000.0, handle.partition
        if self._loop is not None and isinstance(key, tuple) and pause > 0.0:
            self._stats.pauses += 1
            self._dispatcher.input(lambda scheduler, now: scheduler.pause(GROUP, now + pause, now, key))


def _group(config: GenerateBatcherConfig, targets: HoldTarget) -> GroupConfig:
    longest = config.max_hold_ms / 1000.0
    policy = FlushPolicy.by_priority(
        config.max_batch_size,
        config.min_batch_size,
        config.min_hold_ms / 1000.0,
        longest,
        config.background_extra_ms / 1000.0,
    )
    return GroupConfig(
        name=GROUP,
        flush=policy,
        capacity=config.max_pending,
        max_queued_units=float(config.max_pending_tokens),
        displace_background=True,
        promote_after=10.0 * longest,
        cost=UnitCost,
        controller=targets,
    )


def _prompt_units(params: GenerateParams) -> float:
    """Tokens of a prompt; characters, where it is text: never fewer."""
    said = sum(len(str(message.get("content", ""))) for message in params.messages or ())
    return float(max(1, len(params.prompt_token_ids or ()) + len(params.prompt or "") + said))


def _alone(partition: Hashable) -> bool:
    """Whether its requests go by themselves."""
    return isinstance(partition, tuple) and len(partition) == 4


def _params(given: Mapping[str, Any]) -> GenerateParams:
    stray = next((name for name in given if name not in OPTIONS), None)
    if stray is not None:
        raise ConfigError(f"generate: {str(stray)[:100]!r}: no such field; there are {', '.join(OPTIONS)}")
    try:
        params = msgspec.convert(given, GenerateParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"generate: {error}") from None
    if not 1 <= params.credits <= 1_000_000:
        raise ConfigError(f"generate: credits={params.credits!r}: must be in [1, 1000000] tokens")
    return params
