"""What the drivers of threads share: callers wait for answers, and whichever thread causes events delivers them.

Answered threads are woken one after another: each wakes the next as soon as it runs. Woken together they would contend
for the interpreter's lock: twice the CPU, and half the items a second. In an interpreter without that lock all are
woken at once.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Rejected, WaitTimeout
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.audience import Audience, Sink
from reflex_runtime.run.device import Clock, Device
from reflex_runtime.run.processor import Processor

log = logging.getLogger("reflex.threads")

T = TypeVar("T")


# -- threads that wait for answers -------------------------------------------------------------------------------------


STALLED: Final = 0.02  # seconds for a woken thread to run; then the others no longer wait for it
FIRST_LOOK: Final = 0.1  # seconds until a waiting thread checks for a stalled one; doubles each time

_one_at_a_time = getattr(sys, "_is_gil_enabled", lambda: True)()


class Sleeper:
    """A thread that waits for an answer. asleep: a lock that is released when it may run. left: it no longer waits."""

    __slots__ = ("asleep", "left")

    def __init__(self) -> None:
        self.asleep = threading.Lock()
        self.asleep.acquire()
        self.left = False


class Relay:
    """Wakes the threads that were answered, one after another.

    wake: wakes the device; called on any thread when the last of them runs, if items came meanwhile.
    woken: the one that runs next, and then wakes the next one; meanwhile new items do not wake the device: see `came`.
    """

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._unseen = False  # items came that the device was not woken for
        self._lock = threading.Lock()
        self._waiting: deque[Sleeper] = deque()
        self.woken: Sleeper | None = None
        self._since = 0.0  # when it was woken

    def came(self) -> None:
        """Note an item that was admitted without waking the device: that is woken once all answered threads run."""
        self._unseen = True
        if self.woken is None:  # the last one ran before this item was noted
            self._over()

    def _over(self) -> None:
        if self._unseen:
            self._unseen = False
            self._wake()

    def answered(self, sleeper: Sleeper) -> None:
        """Queue an answered thread: from the next `go` on it runs after those that were answered before it."""
        with self._lock:
            if not sleeper.left:
                self._waiting.append(sleeper)

    def go(self) -> None:
        """Let the answered threads run. One that was woken long ago and does not run holds up no others."""
        with self._lock:
            stalled = self.woken is not None and self._clock() - self._since > STALLED
            if stalled or not _one_at_a_time:
                self._wake_all()
            elif self.woken is None and self._waiting:
                self._wake_next()
        if stalled:
            self._over()

    def wait(self, sleeper: Sleeper, timeout: float) -> bool:
        """Wait for the answer, at most `timeout` seconds; returns whether it came. On the thread that waits."""
        until, look = self._clock() + timeout, FIRST_LOOK
        try:
            while not sleeper.asleep.acquire(timeout=max(0.0, min(look, until - self._clock()))):
                if self._clock() >= until:
                    return False
                self.go()
                look *= 2.0
            return True
        finally:
            self.runs(sleeper)

    def runs(self, sleeper: Sleeper) -> None:
        """Note that the thread runs, with or without its answer. Call it as soon as it does, whatever happened."""
        with self._lock:
            sleeper.left = True
            if sleeper is not self.woken:
                if sleeper in self._waiting:
                    self._waiting.remove(sleeper)
                return
            self._wake_next()
            over = self.woken is None
        if over:
            self._over()

    def _wake_next(self) -> None:
        if self._waiting:
            self.woken, self._since = self._waiting.popleft(), self._clock()
            self.woken.asleep.release()
        else:
            self.woken = None

    def _wake_all(self) -> None:
        self.woken = None
        while self._waiting:
            self._waiting.popleft().asleep.release()


# -- the driver --------------------------------------------------------------------------------------------------------


class ThreadDriver:
    """One group on one device, for callers on any thread.

    One thread at a time delivers events, so they stay in order; it delivers those of other threads too, which do not
    wait. If a sink or callback ends its thread, the next delivery has the rest.

    A second thread, the timekeeper, expires requests at their deadlines while the processor is busy, and gives up a
    batch that runs for `watchdog` seconds (inf: none). It starts with the first request, and ends with the device.

    name: of the threads. sinks, label: see `Audience`. one_thread: see `Device`.
    """

    def __init__(
        self,
        group: GroupConfig,
        processor: Processor,
        watchdog: float,
        clock: Clock,
        name: str,
        sinks: Iterable[Sink] = (),
        label: str = "",
        one_thread: bool = False,
    ) -> None:
        self.group, self.clock = group.name, clock
        self._name = name
        self._audience = Audience(sinks, label)
        scheduler = Scheduler([group])
        scheduler.unheard = self._audience.unheard
        self.device = Device(
            scheduler, {group.name: processor}, self.deliver, clock, self.died, name, watchdog, one_thread=one_thread
        )
        self._delivering = threading.RLock()  # a callback may call `between`
        self._deliverer: int | None = None  # the thread that delivers
        self._news = False
        self.relay = Relay(clock, self.device.wake)
        self._setting = threading.Lock()  # of what follows
        self._started = False
        self._alarm = inf  # when the timekeeper looks next
        self._bell = SimpleQueue[Literal["alarm", "stop", "end"]]()  # for the timekeeper; safe in the garbage collector

    def admit(self, request: Request, settled: Callable[[Ticket], None], wake: bool = True) -> Ticket:
        """Admit a request, or raise `Rejected`. Requests of threads that were answered together wake the device
        together.

        settled: called with the settled ticket, on any thread. wake: False leaves it to a later `Device.wake`.
        """
        if not self._started:
            self._start()
        later = wake and self.relay.woken is not None
        try:
            ticket = self.device.submit(request, settled, wake and not later)
        except Rejected:
            self.deliver()
            raise
        if later:
            self.relay.came()
        if self._alarm == inf or ticket.deadline < self._alarm:
            self._set_alarm(min(ticket.deadline, ticket.arrived + self.device.watchdog))
        return ticket

    def ask(self, request: Request, timeout: float, name: str) -> Any:
        """The value of a request; this thread waits for it, at most `timeout` seconds. name: begins a `WaitTimeout`."""
        sleeper, relay, ticket = Sleeper(), self.relay, None
        try:
            ticket = self.admit(request, lambda _: relay.answered(sleeper))
            came = relay.wait(sleeper, timeout)
        except BaseException:  # refused, or interrupted: the answer has no reader
            relay.runs(sleeper)
            if ticket is not None:
                self.device.cancel(ticket)
            raise
        if not came and not self.device.abandon(ticket):
            raise WaitTimeout(f"{name}: no answer within {timeout:g} s")
        outcome = ticket.outcome
        if isinstance(outcome, Done):
            return outcome.value
        try:
            raise outcome.error.with_traceback(None)  # shared by the callers of a failed batch
        finally:  # it holds this call, whose variables hold it and the item: a cycle
            del request, ticket, outcome

    @property
    def answers_here(self) -> bool:
        """Whether the calling thread delivers answers, and so must not wait for one."""
        return self.device.current or self._deliverer == threading.get_ident()

    def deliver(self) -> None:
        """Deliver the new events and answers, or leave them to the thread that is delivering; then wake the threads
        that have theirs."""
        self._news = True
        while self._news and self._deliverer != threading.get_ident() and self._delivering.acquire(blocking=False):
            try:
                self._deliver_all()
            finally:
                self._delivering.release()
        self.relay.go()

    def between(self, action: Callable[[], T]) -> T:
        """Deliver every event up to now, then call `action` before the next one. Returns its result."""
        try:
            with self._delivering:
                if self._deliverer != threading.get_ident():
                    self._news = True
                    self._deliver_all()
                return action()
        finally:
            self.deliver()  # events of threads that found the lock taken; and wake the threads answered so far

    def _deliver_all(self) -> None:
        """Deliver until there are no new events. The lock is held."""
        self._deliverer = threading.get_ident()
        try:
            while self._news:
                self._news = False  # first: what comes from now on is another round
                self._audience.tell(self.device.take_events(), all=True)
        finally:
            self._deliverer = None

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with every event from now on, in order, on any thread. It must be quick."""
        self.between(lambda: self._audience.add(sink))

    def remove_sink(self, sink: Sink) -> None:
        """Call the sink no more. ValueError if it is none of the sinks."""
        self.between(lambda: self._audience.remove(sink))

    def look(self) -> float:
        """Expire requests past their deadline, and give up a batch that hangs. Returns when to look again."""
        at = self.device.look()
        self.deliver()
        return at

    def stop_threads(self, timeout: float) -> bool:
        """Stop the device and the timekeeper. Returns whether the device's thread ended within `timeout` seconds."""
        ended = self.device.stop(timeout)
        self._bell.put("end")
        return ended

    def release(self) -> None:
        """Let the timekeeper stop both threads: no callers are left. The garbage collector may call it."""
        self._bell.put("stop")

    def died(self) -> None:
        """The device was given up, and every request is answered."""
        self._bell.put("end")

    # -- the timekeeper ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._setting:
            if not self._started:
                self._start_threads()
                self._started = True

    def _start_threads(self) -> None:
        threading.Thread(target=self._keep_time, name=f"{self._name}-timekeeper", daemon=True).start()

    def _set_alarm(self, at: float) -> None:
        with self._setting:
            if at < self._alarm:
                self._alarm = at
                self._bell.put("alarm")

    def _keep_time(self) -> None:
        """Wake at the next deadline, or when a running batch has taken too long; sleep while nothing is in flight."""
        while True:
            delay = max(0.0, self._alarm - self.clock())
            with suppress(Empty):
                rung = self._bell.get(timeout=None if delay == inf else min(delay, threading.TIMEOUT_MAX))
                if rung == "alarm":  # an earlier one
                    continue
                if rung == "stop":
                    self.device.stop(0.0)
                return
            with self._setting:
                self._alarm = inf  # first, so that later inputs set it again
            at = self.clock() + self.device.watchdog
            try:
                at = self.look()
            except Exception:  # go on: batches and deadlines depend on it
                log.exception("%s: the timekeeper failed", self._name)
            self._set_alarm(at)
