"""Delivers events to sinks, and answers to callers.

Thousands of cancels or answers take several turns of the loop, with other work in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, Done, Event, RequestQueued, RequestSettled
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.scheduler import Scheduler

TURN: Final = 0.004  # seconds of events in one turn of the loop
SLICE: Final = 64  # requests queued or cancelled, and answers delivered, in one turn of the loop: a few milliseconds


class Cancels:
    """Cancels the first few requests of a turn of the loop at once, the others in its next turns.

    input: calls an action with the driver's scheduler and the time. Used on the loop only.
    """

    def __init__(self, input: Callable[[Callable[[Scheduler, float], None]], object]) -> None:
        self._input = input
        self._cancelled = 0  # in this turn of the loop
        self._later: deque[Ticket] = deque()

    @property
    def pending(self) -> bool:
        """Whether some requests are still to be cancelled."""
        return bool(self._later)

    def add(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel a request now, or after those that are pending. loop: the running one."""
        if not self._cancelled:
            loop.call_soon(self._next_turn, loop)
        self._cancelled += 1
        if self._cancelled <= SLICE and not self._later:
            self._cancel([ticket])
        else:
            self._later.append(ticket)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cancelled = min(SLICE, len(self._later))
        if self._cancelled:
            loop.call_soon(self._next_turn, loop)
            self._cancel([self._later.popleft() for _ in range(self._cancelled)])

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        def cancel(scheduler: Scheduler, now: float) -> None:
            for ticket in tickets:
                scheduler.cancel(ticket, now)

        self._input(cancel)


# -- until nothing is left to do ---------------------------------------------------------------------------------------


class Idle:
    """A coroutine can wait here until a driver has nothing left to do. idle: returns whether that is so."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        self._idle = idle
        self._reached: asyncio.Event | None = None  # made when a coroutine waits

    def look(self) -> None:
        """Call it when the driver may have become idle."""
        if self._reached is not None and self._idle():
            self._reached.set()

    async def wait(self, timeout: float) -> bool:
        """Wait until the driver is idle, `timeout` seconds at most. Returns whether it is."""
        if timeout > 0 and not self._idle():
            self._reached = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await self._reached.wait()
            except TimeoutError:
                pass
        return self._idle()


# -- sinks and callers -------------------------------------------------------------------------------------------------


log = logging.getLogger("reflex.batcher")

Sink = Callable[[Event], None]


class Audience:
    """Calls the sinks with every event, in order, and resolves the waiter of every ticket that settled.

    sinks: must be quick, and publish no event. A sink with an attribute `events` (a set of event types) gets those
        only. One that raises is logged and called again with the next event. Their order is not promised.
    name: begins its log lines. unheard: types of events that no sink takes, for `Scheduler.unheard`.
    """

    def __init__(
        self, sinks: Iterable[Sink] = (), name: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sinks: list[Sink] = list(sinks)
        self.unheard: set[type[Any]] = set()
        self._sinks_of: dict[type[Any], list[Sink]] = {}
        self._untold: deque[Event] = deque()
        self._prefix = f"{name}: " if name else ""
        self._clock = clock
        self._changed()

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(self._sinks)

    def add(self, sink: Sink) -> None:
        """Call the sink with every event from now on."""
        if not callable(sink):
            raise ConfigError(f"add_sink({sink!r:.80}): must be a function of one event")
        self._sinks.append(sink)
        self._changed()

    def remove(self, sink: Sink) -> None:
        """Call the sink no more. ValueError if it is none of the sinks."""
        self._sinks.remove(sink)
        self._changed()

    def _changed(self) -> None:
        self._sinks_of.clear()
        for kind in (RequestQueued, BatchScheduled, BatchFinished):
            (self.unheard.discard if self._listening(kind) else self.unheard.add)(kind)

    def tell(self, events: Iterable[Event], all: bool = False) -> bool:
        """Call the sinks and resolve `ticket.waiter`: a future, or a function of the settled ticket.

        Without `all` only as many events as fit in a turn of the loop. Returns whether some are left for the next call.
        """
        self._untold.extend(events)
        while self._untold:
            self._tell_some()
            if not all:
                break
        return bool(self._untold)

    def _tell_some(self) -> None:
        """Deliver the events of one turn. It is bounded by count and by time: answers take longest, large ones most."""
        untold, sinks_of, clock = self._untold, self._sinks_of, self._clock
        answers, end = 0, clock() + TURN
        for _ in range(16 * SLICE):
            event = untold.popleft()
            kind = type(event)
            if sinks_of.get(kind, True):
                self.publish(event)
            elif isinstance(event, RequestSettled):
                resolve(event.ticket)
            answers += kind is RequestSettled
            if not untold or answers == SLICE or clock() >= end:
                break

    def publish(self, event: Event) -> None:
        """Call the sinks with one event now, before those that wait in `tell`. Not from a sink."""
        kind = type(event)
        sinks = self._sinks_of.get(kind)
        if sinks is None:
            sinks = self._listening(kind)
        try:
            for sink in sinks:
                try:
                    sink(event)
                except Exception:
                    log.exception("%sa sink failed on %s", self._prefix, kind.__name__)
        finally:  # also when a sink ends the thread
            if isinstance(event, RequestSettled):
                resolve(event.ticket)

    def _listening(self, kind: type[Any]) -> list[Sink]:
        found = [s for s in self._sinks if (wanted := getattr(s, "events", None)) is None or kind in wanted]
        self._sinks_of[kind] = found
        return found


def resolve(ticket: Ticket) -> None:
    """Give a settled ticket's outcome to its waiter."""
    waiter, outcome = ticket.waiter, ticket.outcome
    if isinstance(waiter, asyncio.Future):
        if waiter.done():
            return
        if isinstance(outcome, Done):
            waiter.set_result(outcome.value)
        else:
            waiter.set_exception(outcome.error)
    elif waiter is not None:
        ticket.waiter = None  # it may refer to the ticket: this breaks the reference cycle
        try:
            waiter(ticket)
        except Exception:
            log.exception("request %s: its answer could not be delivered", ticket.id)
