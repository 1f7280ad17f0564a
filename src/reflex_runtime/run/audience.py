"""Delivers events to sinks, and answers to callers.

Thousands of requests, cancels or answers are done in slices: a turn of the loop each, with other work in between.
`Idle` waits until a driver has nothing left to do.

Threads that were answered are woken one after another: each lets the next one run as soon as it runs itself. Python
runs one of them at a time. Woken all at once they take the interpreter's lock from each other on every core, and each
of them sleeps a second time to get it: twice the CPU, and half the items a second. Where there is no such lock, all are
woken at once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from math import inf
from typing import Any, Final, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestQueued, RequestSettled
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.scheduler import Scheduler

TURN: Final = 0.004  # seconds after which the rest of the events is for the next turn of the loop
SLICE: Final = 64  # requests queued or cancelled, and answers delivered, in one turn of the loop: a few milliseconds


class Slices:
    """Of one caller that makes or queues its requests one after the other."""

    def __init__(self) -> None:
        self._done = 0  # in this turn of the loop

    async def next(self, count: int = 1) -> bool:
        """So many requests are next: in this turn of the loop, or in the next one where it has a slice of them. Whether
        others had their turn."""
        full = self._done > 0 and self._done + count > SLICE
        if full:
            self._done = 0
            await asyncio.sleep(0)
        self._done += count
        return full


def in_order(lock: asyncio.Lock, count: int) -> AbstractAsyncContextManager[None]:
    """While it is open, so many requests are queued. Of those with more than a slice one goes after the other, or two
    that do not fit together would both be refused. lock: of the queue."""
    return lock if count > SLICE else nullcontext()


class Cancels:
    """Cancels requests at once, as long as there are few in a turn of the loop; the others in its next turns.

    input: the driver's way to make an input to its scheduler. Called on the loop.
    """

    def __init__(self, input: Callable[[Callable[[Scheduler, float], None]], object]) -> None:
        self._input = input
        self._cancelled = 0  # in this turn of the loop
        self._later: deque[Ticket] = deque()

    @property
    def pending(self) -> bool:
        """Whether some were added that are not cancelled yet."""
        return bool(self._later)

    def add(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel it now or soon, after those that were added before. loop: the running one."""
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
    """For a coroutine that waits until there is nothing left. idle: whether that is so now."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        self._idle = idle
        self._reached: asyncio.Event | None = None  # made when something waits: most of the time nothing does

    def look(self) -> None:
        """To be called when it may have become so."""
        if self._reached is not None and self._idle():
            self._reached.set()

    async def wait(self, timeout: float) -> bool:
        """Wait until it is so, `timeout` seconds at most. Returns whether it is."""
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

TOGETHER: Final = 16  # answers after which `then` is called: what one turn of the loop takes is checked in between

T = TypeVar("T")
Sink = Callable[[Event], None]


class Audience:
    """Calls the sinks with every event, in order, and resolves the waiter of every ticket that settled.

    sinks: one with an attribute `events` (a set of event types) gets those only. One that raises is logged and called
        again with the next event. No sink may depend on the order of sinks, and none publishes an event itself.
    name: begins its log lines.
    unheard: of the events of every request and batch those that no sink takes, for `Scheduler.unheard`.
    """

    def __init__(
        self, sinks: Iterable[Sink] = (), name: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sinks: list[Sink] = list(sinks)
        self.unheard: set[type[Any]] = set()
        self._sinks_of: dict[type[Any], list[Sink]] = {}
        self._untold: deque[Event] = deque()
        self._then: list[Callable[[], None]] = []
        self._prefix = f"{name}: " if name else ""
        self._clock = clock
        self._changed()

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple(self._sinks)

    def add(self, sink: Sink) -> None:
        """Add a sink for the events from now on."""
        self._sinks.append(sink)
        self._changed()

    def remove(self, sink: Sink) -> None:
        """It gets no more events. ValueError if it is none of the sinks."""
        self._sinks.remove(sink)
        self._changed()

    def _changed(self) -> None:
        self._sinks_of.clear()
        for kind in (RequestQueued, BatchScheduled, BatchFinished):
            (self.unheard.discard if self._listening(kind) else self.unheard.add)(kind)

    def tell(self, events: Iterable[Event], all: bool = False) -> bool:
        """Call the sinks and resolve `ticket.waiter`: a future, or a function of the settled ticket.

        Without `all` it tells as many events as one turn of the loop has time for. Returns whether some are left, which
        the next call tells first.
        """
        self._untold.extend(events)
        while self._untold:
            self._tell_some()
            if not all:
                break
        return bool(self._untold)

    def _tell_some(self) -> None:
        """The next events of one turn, by count and by time: answers cost much more than others, large ones most."""
        untold, sinks_of, clock = self._untold, self._sinks_of, self._clock
        answers, end = 0, clock() + TURN
        for _ in range(16 * SLICE):
            event = untold.popleft()
            kind = type(event)
            if sinks_of.get(kind, True):
                self.publish(event)
            elif isinstance(event, RequestSettled):
                resolve(event.ticket)
            if kind is RequestSettled:
                answers += 1
                if answers % TOGETHER == 0:
                    self._finish()
            if not untold or answers == SLICE or clock() >= end:
                break
        self._finish()

    def then(self, action: Callable[[], None]) -> None:
        """Call it once, soon after the event that is told now: at most `TOGETHER` answers later.

        For a `waiter` that answers its callers together.
        """
        self._then.append(action)

    def _finish(self) -> None:
        then, self._then = self._then, []
        for action in then:
            try:
                action()
            except Exception:
                log.exception("%sanswers could not be delivered", self._prefix)

    def publish(self, event: Event) -> None:
        """Call the sinks with one event now, before those that wait in `tell`. For servers; not from a sink."""
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


class Delivery:
    """Takes events and passes them to an audience, on the threads that cause them.

    One thread delivers at a time, so events stay in order. Other threads do not wait: that thread delivers their events
    too. take: returns the events since the last call. If a sink or callback ends its thread, the next delivery has the
    rest.
    """

    def __init__(self, take: Callable[[], Iterable[Event]], audience: Audience) -> None:
        self._take, self._audience = take, audience
        self._lock = threading.RLock()  # a callback may ask for `after`
        self._thread: int | None = None
        self._news = False

    @property
    def current(self) -> bool:
        """Whether the caller is a sink or a callback of this delivery."""
        return self._thread == threading.get_ident()

    def deliver(self) -> None:
        """Deliver the new events, or leave them to the thread that is delivering."""
        self._news = True
        while self._news and not self.current and self._lock.acquire(blocking=False):
            try:
                self._tell()
            finally:
                self._lock.release()

    def after(self, action: Callable[[], T]) -> T:
        """Deliver everything up to now, then call `action` before anything else is delivered. Returns its result."""
        try:
            with self._lock:
                if not self.current:
                    self._news = True
                    self._tell()
                return action()
        finally:
            if self._news:  # of threads that found the lock taken meanwhile
                self.deliver()

    def _tell(self) -> None:
        """Deliver until there are no new events. The lock is held."""
        self._thread = threading.get_ident()
        try:
            while self._news:
                self._news = False  # first: what comes from now on is another round
                self._audience.tell(self._take(), all=True)
        finally:
            self._thread = None


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
        ticket.waiter = None  # it may hold the ticket: this breaks the reference cycle
        try:
            waiter(ticket)
        except Exception:
            log.exception("request %s: its answer could not be delivered", ticket.id)


# -- threads that wait for answers -------------------------------------------------------------------------------------


STALLED: Final = 0.02  # seconds without a sign of the thread that is to run, after which the others do not wait for it
FIRST_LOOK: Final = 0.1  # seconds until a thread that waits looks whether one is stalled, and then after twice as long

_one_at_a_time = getattr(sys, "_is_gil_enabled", lambda: True)()


class Sleeper:
    """A thread that waits for an answer. asleep: a lock that is free when it may run. left: it does not wait any
    more."""

    __slots__ = ("asleep", "left")

    def __init__(self) -> None:
        self.asleep = threading.Lock()
        self.asleep.acquire()
        self.left = False


class Relay:
    """The threads that were answered and do not run yet.

    wake: wakes the device; called on any thread when the last of them runs, if items came meanwhile.
    """

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._unseen = False  # items came that the device was not woken for
        self._lock = threading.Lock()
        self._waiting: deque[Sleeper] = deque()
        self._woken: Sleeper | None = None  # it is to run, and then to wake the next one
        self._since = 0.0  # when it was woken

    @property
    def going(self) -> bool:
        """Whether a thread that was answered does not run yet. An item that comes now need not wake the device: see
        `came`."""
        return self._woken is not None

    def came(self) -> None:
        """An item was admitted without waking the device: it is woken when all threads run that were answered."""
        self._unseen = True
        if not self.going:  # the last one ran before it could know of this item
            self._over()

    def _over(self) -> None:
        if self._unseen:
            self._unseen = False
            self._wake()

    def answered(self, sleeper: Sleeper) -> None:
        """Its answer is there. It runs after those that were answered before, from the next `go` on."""
        with self._lock:
            if not sleeper.left:
                self._waiting.append(sleeper)

    def go(self) -> None:
        """Let the answered threads run. One that was woken long ago and does not run holds up no others."""
        with self._lock:
            stalled = self._woken is not None and self._clock() - self._since > STALLED
            if stalled or not _one_at_a_time:
                self._wake_all()
            elif self._woken is None and self._waiting:
                self._wake_next()
        if stalled:
            self._over()

    def wait(self, sleeper: Sleeper, timeout: float, at: float = inf, look: Callable[[], float] | None = None) -> bool:
        """Wait for the answer, at most `timeout` seconds; returns whether it came. On the thread that asked.

        look: called at the time `at`, if no answer came before; returns when to call it again.
        """
        try:
            began = self._clock()
            until, at = began + timeout, min(at, began + FIRST_LOOK)
            while not sleeper.asleep.acquire(timeout=max(0.0, min(until, at) - self._clock())):
                now = self._clock()
                if now >= at:
                    self.go()
                    at = min(2.0 * now - began, inf if look is None else look())
                elif now >= until:
                    return False
            return True
        finally:
            self.runs(sleeper)

    def runs(self, sleeper: Sleeper) -> None:
        """The thread runs, with or without its answer. To be called as soon as it does, whatever happened."""
        with self._lock:
            sleeper.left = True
            if sleeper is not self._woken:
                if sleeper in self._waiting:
                    self._waiting.remove(sleeper)
                return
            self._wake_next()
            over = self._woken is None
        if over:
            self._over()

    def _wake_next(self) -> None:
        if self._waiting:
            self._woken, self._since = self._waiting.popleft(), self._clock()
            self._woken.asleep.release()
        else:
            self._woken = None

    def _wake_all(self) -> None:
        self._woken = None
        while self._waiting:
            self._waiting.popleft().asleep.release()
