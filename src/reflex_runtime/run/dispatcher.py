"""Drivers without a thread of their own: an asyncio driver for calls that are awaited, not run; its streams; a stepper.

`Dispatcher`: everything happens on the loop, without a lock. What comes in one turn of the loop is decided on at the
end of that turn, so that what came together leaves together. In between one timer waits for `wake_at`; nothing is
polled.

`Stream`: the outputs of one request over time, for one reader. Producers push on the event loop and never wait. A
subclass bounds the memory: its hooks are called when outputs were pushed and when they were taken, and it holds the
producer of this stream alone.

`Stepper`: one step per call, in the calling thread: form a batch, run it, complete it. Tests, offline generation and
tracing use it: nothing happens between two calls.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import Context
from functools import partial
from math import inf
from typing import Any, Generic, Self, TypeVar

from reflex_runtime.core.batch import Batch, Failed, Outcome
from reflex_runtime.core.errors import Cancelled, CutShort, ProcessorError, ReflexError, ResultCountMismatch
from reflex_runtime.core.events import Event
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.batcher import LoopDriver
from reflex_runtime.run.device import Clock, complete
from reflex_runtime.run.processor import Processor, run_batch, wrapped

T = TypeVar("T")
Send = Callable[[Batch], Awaitable[Sequence[Outcome]]]


class Dispatcher(LoopDriver[Any]):
    """Batches requests of one event loop into calls that are answered elsewhere.

        dispatcher = Dispatcher(groups, send)
        dispatcher.start()
        value = await dispatcher.submit(Request(payload)).waiter

    send: called on the loop with a batch, which it puts on its way before it returns; what it returns is awaited: one
        outcome per ticket, in the order of the batch's grants. What it raises fails the whole batch: a `ReflexError` as
        it is, anything else as a `ProcessorError`. Cancelled when the dispatcher closes before the answer.
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

        settled: called with the settled ticket, in place of the future, where no coroutine waits.
        """
        assert self._loop is not None, "Dispatcher.start was not called"
        try:
            ticket = self.scheduler.submit(request, self._clock())
        finally:
            self._pump_soon()  # a refusal is an event
        ticket.waiter = settled or self._loop.create_future()
        return ticket

    def input(self, action: Callable[[Scheduler, float], T]) -> T:
        """Any other input, such as a pause: action gets the scheduler and the time. It takes effect in this turn."""
        result = action(self.scheduler, self._clock())
        self._pump_soon()
        return result

    async def close(self, drain: bool = True, timeout: float = 10.0) -> None:
        """Admit nothing more; with `drain` let what waits and what is out be answered within `timeout` seconds. Calls
        that are still out then are cut short. Every ticket has settled when it returns."""
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
        # a batch that was formed now could hold a request that is about to be cancelled
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
            call.set_exception(_known(error))
        self._out[batch] = call
        call.add_done_callback(partial(self._returned, batch, began))

    def _returned(self, batch: Batch, began: float, call: asyncio.Future[Sequence[Outcome]]) -> None:
        if call.cancelled():
            self._complete(batch, ProcessorError("its call was cancelled"), began)
        elif (error := call.exception()) is not None:
            self._complete(batch, _known(error), began)
        else:
            self._complete(batch, call.result(), began)

    def _complete(self, batch: Batch, result: Sequence[Outcome] | ReflexError, began: float | None = None) -> None:
        """Settle a batch, the first time that something is known of it."""
        if self._out.pop(batch, None) is None:
            return  # it was cut short
        now = self._clock()
        if not isinstance(result, ReflexError) and len(result) != len(batch):
            result = ResultCountMismatch(f"the call returned {len(result)} outcomes for {len(batch)} requests")
        outcomes = [Failed(result)] * len(batch) if isinstance(result, ReflexError) else result
        complete(self.scheduler, batch, outcomes, now - (batch.scheduled_at if began is None else began), now)
        self._pump_soon()


def _known(error: BaseException) -> ReflexError:
    if isinstance(error, ReflexError):
        return error.with_traceback(None)  # otherwise error, batch and tickets are a reference cycle
    return wrapped(error)


# -- outputs of a request ----------------------------------------------------------------------------------------------

_CLOSED = "closed before all of it was read"


class Stream(Generic[T]):
    """An async iterator of outputs. One that ends with an error raises it here, after what had come until then.

    A reader that stops before the end calls `close`. bell: set whenever there is something to read, for a reader of
    several streams. ended: whether no more will come; what came may still be unread.
    """

    __slots__ = ("_bell", "_closed", "_error", "_outputs", "ended")

    def __init__(self, bell: asyncio.Event | None = None) -> None:
        self._bell = bell or asyncio.Event()
        self._outputs: deque[T] = deque()
        self._error: ReflexError | None = None
        self._closed = self.ended = False

    # -- for the reader ------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Outputs that wait for the reader."""
        return len(self._outputs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._outputs and not await self._more():
            raise StopAsyncIteration
        output = self._outputs.popleft()
        self._taken(1)
        return output

    async def read(self) -> list[T]:
        """Everything that has come, at least one output; empty at the end."""
        return self.take() if self._outputs or await self._more() else []

    def take(self, most: int | None = None) -> list[T]:
        """What has come, at most so many, without waiting. Raises the error of a stream that ended with one and is
        read."""
        if not self._outputs and self._error is not None:
            raise copy.copy(self._error)  # the traceback of a raised error holds this stream: avoid a reference cycle
        if most is None or most >= len(self._outputs):
            outputs = list(self._outputs)
            self._outputs.clear()
        else:
            outputs = [self._outputs.popleft() for _ in range(most)]
        if outputs:
            self._taken(len(outputs))
        return outputs

    def close(self) -> None:
        """Take the request back unless it has ended. Reading afterwards raises `Cancelled`, so a truncated answer does
        not pass for a complete one."""
        if self._closed:
            return
        self._closed = True
        if self._error is None and (self._outputs or not self.ended):
            self._error = Cancelled(_CLOSED)
        self._outputs.clear()
        if not self.ended:
            self._left()
        self._bell.set()

    async def _more(self) -> bool:
        """Wait for an output; False at the end."""
        while not self._outputs:
            if self._error is not None:
                raise copy.copy(self._error)
            if self.ended:
                return False
            self._bell.clear()
            await self._bell.wait()
        return True

    # -- for the producer ----------------------------------------------------------------------------------------------

    def push(self, outputs: list[T]) -> None:
        """Outputs came. Dropped after `close`."""
        if not self._closed:
            self._outputs += outputs
            self._bell.set()
            self._pushed(len(outputs))

    def end(self, error: ReflexError | None = None) -> None:
        """It has ended; called exactly once."""
        assert not self.ended
        self.ended = True
        if error is not None and self._error is None:
            self._error = error
        self._bell.set()

    # -- hooks of a subclass that bounds it ----------------------------------------------------------------------------

    def _pushed(self, n: int) -> None:
        """So many outputs came."""

    def _taken(self, n: int) -> None:
        """So many outputs were read."""

    def _left(self) -> None:
        """The reader closed it before its end."""


# -- one step per call -------------------------------------------------------------------------------------------------


class Stepper:
    """Runs a scheduler's batches one by one. Not thread-safe.

    processors: one per group. sinks: called with every event, in order; what they raise reaches the caller of `step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processors: Mapping[str, Processor],
        sinks: Iterable[Callable[[Event], object]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.sinks = list(sinks)
        self._processors = processors

    def step(self) -> Batch | None:
        """One batch, formed, run and completed; None when the scheduler has none now."""
        batch = self.scheduler.next_batch(self.clock())
        self.deliver()
        if batch is None:
            self._drop()
            return None
        start = self.clock()
        outcomes = run_batch(self._processors[batch.group], batch)
        end = self.clock()
        complete(self.scheduler, batch, outcomes, end - start, end)
        self.deliver()
        return batch

    def deliver(self) -> None:
        """Call the sinks with what has happened since the last call, such as an input of the caller."""
        for event in self.scheduler.take_events():
            for sink in self.sinks:
                sink(event)

    def _drop(self) -> None:
        """Drop residents that left, where no next batch names them."""
        for name, processor in self._processors.items():
            if left := self.scheduler.take_left(name):
                processor.drop(left)
