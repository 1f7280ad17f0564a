"""The asyncio driver: an event loop submits, cancels and awaits; device work runs in a separate thread.

Futures are resolved and sinks are called on the loop, once per batch. Brief batches run on the loop too: one after each
turn, with the requests submitted in it. While the device is busy, one loop timer handles expiry and the watchdog; while
it is free, its thread sleeps until the next deadline. The loop never waits for the device thread.

`Dispatcher` is for calls that are awaited on the loop. It needs no thread and no lock, and decides at the end of each
turn of the loop, so that requests of one turn share a call. Between turns one timer waits for `wake_at`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from reflex_runtime.core.batch import Batch, Failed, Outcome
from reflex_runtime.core.errors import ConfigError, CutShort, ProcessorError, ReflexError, Rejected, ResultCountMismatch
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.audience import Audience, Cancels, Idle
from reflex_runtime.run.audience import Sink as Sink
from reflex_runtime.run.device import BRIEF, Clock, Device, complete
from reflex_runtime.run.processor import Processor, Value, kind_of, reflex_error

T = TypeVar("T")


_TICK: Final = 0.00051  # seconds; uvloop rounds to milliseconds: a shorter timer would fire at once, again and again


class LoopDriver:
    """Base of the drivers on an event loop: sinks, cancels and one timer.

    input: calls an action with the scheduler and the time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sinks: Iterable[Sink] | Audience,
        clock: Clock,
        input: Callable[[Callable[[Scheduler, float], Any]], Any],
    ) -> None:
        self.scheduler, self._clock = scheduler, clock
        self._audience = sinks if isinstance(sinks, Audience) else Audience(sinks)
        scheduler.unheard = self._audience.unheard
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shortest = 0.0
        self._pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._cancels = Cancels(input)
        self._idle = Idle(lambda: scheduler.idle)

    def _bind(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._shortest = _TICK if type(self._loop).__module__.startswith("uvloop") else 0.0

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with every event from now on."""
        self._audience.add(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Call the sink no more. ValueError if it is none of the sinks."""
        self._audience.remove(sink)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request. Its future ends with `Cancelled` unless it is already done. Only on the loop.

        A few are cancelled at once; very many in the next turns of the loop, with other work in between.
        """
        assert self._loop is not None
        self._cancels.add(ticket, self._loop)

    def _pump_soon(self) -> None:
        if not self._pump_due and self._loop is not None:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self, all: bool = False) -> None:
        """Call the sinks and resolve the futures; with very many events, in several turns."""
        raise NotImplementedError

    def _arm(self, at: float) -> None:
        """Set the timer to `at`, unless it is set to an earlier time: when that comes, it is set anew."""
        if at >= self._timer_at:
            return
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(self._shortest, at - self._clock()), self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf

    def _on_timer(self) -> None:
        raise NotImplementedError


class Batcher(LoopDriver, Generic[Value]):
    """Batches requests of one event loop on one device; Value is the type of the processors' values.

        async with Batcher({"default": processor}) as batcher:
            value = await batcher.run(Request(payload))

    processors: one per group. watchdog: seconds a batch may run before it fails with `ProcessorHung`; 0 is off.
    sinks: called on the loop, see `Audience`; or an `Audience`, for a server that publishes events of its own.
    on_fatal: called on the loop when the device is given up. expendable, one_thread: see `Device`.
    brief: batches that take at most so many seconds run on the loop if their processor has `any_thread` and many before
        them were as brief (`BriefBatches`); 0: none do. The watchdog cannot answer for one that hangs there: it is
        logged, and on_stuck is called, on the device thread.
    """

    def __init__(
        self,
        processors: Mapping[str, Processor[Value]],
        groups: Iterable[GroupConfig] = (GroupConfig(),),
        sinks: Iterable[Sink] | Audience = (),
        watchdog: float = 10.0,
        clock: Clock = time.monotonic,
        on_fatal: Callable[[], None] | None = None,
        expendable: Collection[str] = (),
        one_thread: bool = False,
        brief: float = BRIEF,
        on_stuck: Callable[[], None] | None = None,
    ) -> None:
        configs = list(groups)
        _check(processors, [config.name for config in configs])
        scheduler = Scheduler(configs)
        self._replaces = any(config.latest_only for config in configs)
        self.device = Device(
            scheduler, processors, self._notified, clock, self._fatal_from_thread, watchdog=watchdog or inf,
            expendable=expendable, one_thread=one_thread, ahead=True, brief=brief, on_stuck=on_stuck,
        )  # fmt: skip
        super().__init__(scheduler, sinks, clock, self.device.input)
        self._on_fatal = on_fatal
        self._wake_due = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain=kind is None)

    async def start(self, prepare: Callable[[], object] | None = None) -> None:
        """Bind to the running loop and start the device thread.

        prepare: called on that thread first, such as a warm-up. `start` waits for it and raises its error; close the
        batcher then.
        """
        self._bind()
        await asyncio.wrap_future(self.device.start(prepare))

    def submit(
        self,
        request: Request,
        settled: Callable[[Ticket], None] | None = None,
        ready: bool = True,
        held: bool = False,
    ) -> Ticket:
        """Admit a request; `ticket.waiter` is a future of its value. Raises `Rejected`. Only on the loop.

        settled: called on the loop with the settled ticket, instead of a future. ready: False if no batch may take it
        before `prepared`. held: it gets nothing until `Scheduler.resume`.
        """
        loop = self._loop
        if loop is None:
            raise RuntimeError("Batcher: not started; use `async with Batcher(…) as batcher`, or await batcher.start()")
        try:
            ticket = self.device.submit(request, settled or loop.create_future(), wake=False, ready=ready, held=held)
        except Rejected:
            self._pump_soon()
            raise
        if self._replaces:  # a replaced request is answered at once
            self._pump_soon()
        if not self._wake_due and (ready or ticket.deadline < inf):  # the device thread sleeps until the next deadline
            self._wake_soon(loop)
        if ticket.deadline < self._timer_at:
            self._arm(ticket.deadline)
        return ticket

    def prepared(self, ticket: Ticket, made: Request | ReflexError) -> None:
        """Make a ticket ready with the request `made`, or end it with that error. Only on the loop."""
        assert self._loop is not None
        self.device.prepared(ticket, made)
        if isinstance(made, ReflexError):
            self._pump_soon()
        else:
            self._wake_soon(self._loop)

    async def run(self, request: Request) -> Value:
        """Submit and wait for the value; cancelling the awaiting task cancels the request."""
        if not isinstance(request, Request):
            raise TypeError(f"Batcher.run: takes a Request, not {kind_of(request)}: run(Request(payload))")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError("Batcher.run: called in another event loop than the one that the batcher was started in")
        return await self.value(self.submit(request))

    async def value(self, ticket: Ticket) -> Value:
        """Wait for the value of a submitted request; cancelling the awaiting task cancels the request."""
        waiter = ticket.waiter
        try:
            value: Value = await waiter
            return value
        except asyncio.CancelledError:
            if not waiter.cancelled():
                waiter.exception()  # it failed in the same turn: mark the error as retrieved
            self.cancel(ticket)
            raise
        finally:
            ticket.waiter = waiter = None  # its exception holds this frame

    def flush(self) -> None:
        """Call the sinks with the events so far, as many as fit into a turn of the loop. Without it, events that answer
        nothing are delivered with the next answer."""
        self._pump()

    async def close(self, drain: bool = True, timeout: float = 10.0) -> bool:
        """Admit no more requests, finish those queued within `timeout` seconds, end the rest, stop the thread.

        Every future is done when it returns. Returns whether the thread ended.
        """
        if self._loop is None:
            return True
        self.device.close(drain)
        try:
            if drain:
                await self._idle.wait(timeout)
            while self.device.close(drain=False):
                self._pump()
                await asyncio.sleep(0)
            self._pump(all=True)
            stop = self._loop.run_in_executor(None, self.device.stop, max(0.1, min(timeout, 2.0)))
            ended = await asyncio.shield(stop)
        except asyncio.CancelledError:  # cancelled: settle every request nevertheless
            self.device.stop(0.0)
            raise
        finally:
            self._pump(all=True)
            self._disarm()
        return ended

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _wake_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._wake_due:  # requests of one turn of the loop wake the device once
            self._wake_due = True
            loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._wake_due = False
        if self.device.turn():
            self._pump()
            if not self.scheduler.idle:  # the next batch, after a turn of the loop
                assert self._loop is not None
                self._wake_soon(self._loop)
        else:  # a batch may start
            self._arm(self._clock() + self.device.soonest)

    def _notified(self) -> None:
        """Deliver events soon: an answer is among them. Called on any thread."""
        if self._pump_due or self._loop is None:
            return
        self._pump_due = True
        self._from_thread(self._pump)

    def _pump(self, all: bool = False) -> None:
        self._pump_due = False  # first, so that later events cause another turn
        if self._audience.tell(self.device.take_events(), all):
            self._pump_soon()
        self._idle.look()
        if self.device.running_since is not None or (self.device.expendable and not self.scheduler.idle):
            self._arm(self.device.look_at())

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        at = self.device.look()
        if not self._pump_due:  # else it is called in this turn anyway, and one call is enough for a turn
            self._pump()
        self._arm(at)

    def _fatal_from_thread(self) -> None:
        if self._on_fatal is not None:
            self._from_thread(self._on_fatal)

    def _from_thread(self, call: Callable[[], None]) -> None:
        """Call it on the loop, unless that is closed: then nothing waits any more."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)


def _check(processors: Mapping[str, Processor], groups: Collection[str]) -> None:
    """Raise unless there is exactly one processor for each group, under the group's name."""
    if not isinstance(processors, Mapping):
        name = next(iter(groups), "default")
        raise TypeError(f"Batcher: processors must be a mapping of group names, such as {{{name!r}: processor}}")
    for name, processor in processors.items():
        complete = all(callable(getattr(processor, method, None)) for method in ("start", "run", "drop", "stop"))
        if isinstance(processor, type) or not complete:
            hint = "; wrap a function in FunctionProcessor" if inspect.isroutine(processor) else ""
            raise TypeError(f"Batcher: processors[{name!r}] is no Processor, it is {kind_of(processor)}{hint}")
    if set(processors) != set(groups):
        raise ConfigError(f"Batcher: processors for {sorted(processors)}, but the groups are {sorted(groups)}")


# -- calls that are answered elsewhere ---------------------------------------------------------------------------------


Send = Callable[[Batch], Awaitable[Sequence[Outcome]]]


class Dispatcher(LoopDriver):
    """Batches requests of one event loop into calls that are answered elsewhere.

        dispatcher = Dispatcher(groups, send)
        dispatcher.start()
        value = await dispatcher.submit(Request(payload)).waiter

    send: called on the loop with a batch, and awaited: one outcome per ticket, in the order of the batch's grants. Its
        exception fails the whole batch: a `ReflexError` as it is, any other as a `ProcessorError`. Cancelled when the
        dispatcher closes before the answer.
    sinks: see `Audience`. max_batches: calls out at a time.

    A cancelled request that waits is not sent. If its call is out, the answer is awaited and dropped.
    """

    def __init__(
        self,
        groups: Iterable[GroupConfig],
        send: Send,
        sinks: Iterable[Sink] = (),
        max_batches: int = 64,
        clock: Clock = time.monotonic,
    ) -> None:
        scheduler = Scheduler(groups, max_batches)
        super().__init__(scheduler, sinks, clock, self.input)
        self._send = send
        self._out: dict[Batch, asyncio.Future[Sequence[Outcome]]] = {}

    def start(self) -> None:
        """Bind to the running loop."""
        self._bind()

    def submit(self, request: Request, settled: Callable[[Ticket], None] | None = None) -> Ticket:
        """Admit a request; `ticket.waiter` is a future of its value. Raises `Rejected`.

        settled: called with the settled ticket, instead of a future.
        """
        assert self._loop is not None, "Dispatcher.start was not called"
        try:
            ticket = self.scheduler.submit(request, self._clock())
        finally:
            self._pump_soon()  # a refusal is an event
        ticket.waiter = settled or self._loop.create_future()
        return ticket

    def input(self, action: Callable[[Scheduler, float], T]) -> T:
        """Any other input: the result of `action(scheduler, now)`. It takes effect in this turn of the loop."""
        result = action(self.scheduler, self._clock())
        self._pump_soon()
        return result

    async def close(self, drain: bool = True, timeout: float = 10.0) -> None:
        """Admit nothing more. With `drain` waiting requests and calls have `timeout` seconds; calls that are out then
        are cut short. Every ticket has settled when it returns."""
        if self._loop is None:
            return
        self.input(lambda scheduler, now: scheduler.close(now, drain))
        try:
            if drain:
                await self._idle.wait(timeout)
        finally:  # also when the close is cancelled: every request is settled
            while self.input(lambda scheduler, now: scheduler.close(now, drain=False)):
                pass
            for batch, call in list(self._out.items()):
                if call.done():
                    self._returned(batch, batch.scheduled_at, call)
                else:
                    self._complete(batch, CutShort("its call was still out when the time to shut down was over"))
                    call.cancel()
            self._pump(all=True)
            self._disarm()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _pump(self, all: bool = False) -> None:
        """Form batches, send them, publish events; with very many events, in several turns."""
        self._pump_due = False  # first, so that later events cause another turn
        now = self._clock()
        # a batch formed now could hold a request that is about to be cancelled
        while not self._cancels.pending and (batch := self.scheduler.next_batch(now)) is not None:
            self._begin(batch)
        if self._audience.tell(self.scheduler.take_events(), all):
            self._pump_soon()
        self._idle.look()
        if not self._pump_due and (at := self.scheduler.wake_at()) != self._timer_at:
            self._disarm()
            self._arm(at)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        self._pump()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        began = self._clock()
        assert self._loop is not None
        call: asyncio.Future[Sequence[Outcome]]
        try:
            call = Context().run(lambda: asyncio.ensure_future(self._send(batch)))  # a batch has no caller's variables
        except Exception as error:
            call = self._loop.create_future()
            call.set_exception(reflex_error(error).with_traceback(None))  # a future keeps it, and its frame the future
        self._out[batch] = call
        call.add_done_callback(partial(self._returned, batch, began))

    def _returned(self, batch: Batch, began: float, call: asyncio.Future[Sequence[Outcome]]) -> None:
        if call.cancelled():
            self._complete(batch, ProcessorError("its call was cancelled"), began)
        elif (error := call.exception()) is not None:
            self._complete(batch, reflex_error(error).with_traceback(None), began)  # else error and batch are a cycle
        else:
            self._complete(batch, call.result(), began)

    def _complete(self, batch: Batch, result: Sequence[Outcome] | ReflexError, began: float | None = None) -> None:
        """Settle a batch, once."""
        if self._out.pop(batch, None) is None:
            return  # it was cut short
        now = self._clock()
        if not isinstance(result, ReflexError) and len(result) != len(batch):
            result = ResultCountMismatch(f"the call returned {len(result)} outcomes for {len(batch)} requests")
        outcomes = [Failed(result)] * len(batch) if isinstance(result, ReflexError) else result
        complete(self.scheduler, batch, outcomes, now - (batch.scheduled_at if began is None else began), now)
        self._pump_soon()
