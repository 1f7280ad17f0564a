"""The asyncio driver for work that is awaited, not run: calls to another process, and coroutine functions.

Everything happens on the loop: no thread, no lock. What comes in one turn of the loop is decided on at the end of that
turn, so that what came together leaves together. In between one timer waits for `wake_at`; nothing is polled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TypeVar

from reflex_runtime.core.batch import Batch, Failed, Outcome
from reflex_runtime.core.errors import CutShort, ProcessorError, ReflexError, Rejected, ResultCountMismatch
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.audience import Audience, Cancels, Idle, Sink
from reflex_runtime.run.device import Clock, complete

T = TypeVar("T")
Send = Callable[[Batch], Awaitable[Sequence[Outcome]]]

_TICK = 0.00051  # s; uvloop counts whole milliseconds, and half of one would be now, again and again


class Dispatcher:
    """Batches requests of one event loop into calls that are answered elsewhere.

        dispatcher = Dispatcher(groups, send)
        dispatcher.start()
        value = await dispatcher.submit(Request(payload)).waiter

    send: called on the loop with a batch, which it puts on its way before it returns; what it returns is awaited: one
        outcome per ticket, in the order of the batch's grants. What it raises fails the whole batch: a `ReflexError` as
        it is, anything else as a `ProcessorError`. Cancelled when the dispatcher closes before the answer.
    sinks: see `Audience`. max_batches: calls out at a time.
    """

    def __init__(
        self,
        groups: Iterable[GroupConfig],
        send: Send,
        sinks: Iterable[Sink] = (),
        max_batches: int = 64,
        clock: Clock = time.monotonic,
    ) -> None:
        self.scheduler = Scheduler(groups, max_batches)
        self._send = send
        self._audience = Audience(sinks)
        self.scheduler.unheard = self._audience.unheard
        self._cancels = Cancels(self.input)
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shortest = 0.0
        self._turn_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._out: dict[Batch, asyncio.Future[Sequence[Outcome]]] = {}
        self._idle = Idle(lambda: self.scheduler.idle)

    def start(self) -> None:
        """Bind to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._shortest = _TICK if type(self._loop).__module__.startswith("uvloop") else 0.0

    def add_sink(self, sink: Sink) -> None:
        """One more sink, for the events from now on."""
        self._audience.add(sink)

    def remove_sink(self, sink: Sink) -> None:
        """It gets no more events. ValueError if it is none of the sinks."""
        self._audience.remove(sink)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, settled: Callable[[Ticket], None] | None = None) -> Ticket:
        """Admit a request; `ticket.waiter` is a future of its value. Raises `Rejected`.

        settled: called with the settled ticket, in place of the future, where no coroutine waits.
        """
        assert self._loop is not None, "Dispatcher.start was not called"
        try:
            ticket = self.scheduler.submit(request, self._clock())
        except Rejected:
            self._turn_soon()  # the refusal is an event
            raise
        ticket.waiter = settled or self._loop.create_future()
        self._turn_soon()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request. A waiting one is not sent; its future ends with `Cancelled` at once, or in one of the
        loop's next turns if many are cancelled together, so that other work gets its turn. If its call is out, the
        answer is awaited and dropped."""
        assert self._loop is not None, "Dispatcher.start was not called"
        self._cancels.add(ticket, self._loop)

    def input(self, action: Callable[[Scheduler, float], T]) -> T:
        """Any other input, such as a pause: action gets the scheduler and the time. It takes effect in this turn."""
        result = action(self.scheduler, self._clock())
        self._turn_soon()
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
            self._turn(all=True)
            self._wake_at(inf)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        if not self._turn_due and self._loop is not None:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self, all: bool = False) -> None:
        """Form batches, send them, publish events; with very many events, in several turns."""
        self._turn_due = False  # first, so that later events ask for another turn
        scheduler, now = self.scheduler, self._clock()
        # a batch that was formed now could hold a request that is about to be cancelled
        while not self._cancels.pending and (batch := scheduler.next_batch(now)) is not None:
            self._begin(batch)
        if self._audience.tell(scheduler.take_events(), all):
            self._turn_soon()
        self._idle.look()
        if not self._turn_due:
            self._wake_at(scheduler.wake_at())

    def _wake_at(self, at: float) -> None:
        """Let the next turn begin at that time, if nothing comes before."""
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < inf:
            assert self._loop is not None
            self._timer = self._loop.call_later(max(self._shortest, at - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._turn()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        began = self._clock()
        assert self._loop is not None
        call: asyncio.Future[Sequence[Outcome]]
        try:
            call = asyncio.ensure_future(self._send(batch))
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
        self._turn_soon()


def _known(error: BaseException) -> ReflexError:
    if isinstance(error, ReflexError):
        return error.with_traceback(None)  # otherwise error, batch and tickets are a reference cycle
    wrapped = ProcessorError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
