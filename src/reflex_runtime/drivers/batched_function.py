"""`@batched` on a `def`: a function over a list that threads and coroutines call with one item.

The function runs on one thread of its own and needs no lock. That thread answers the callers: it wakes the first of the
threads that wait, each of which wakes the next one (`Relay`), and makes one call into a loop per batch for coroutines.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ConfigError, Rejected, WaitTimeout
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import DEFAULT, Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.audience import Audience, Delivery, Sink, resolve
from reflex_runtime.drivers.batched_item import Handle, TaskClients, forget_closed
from reflex_runtime.drivers.device import Device
from reflex_runtime.drivers.relay import Relay, Sleeper
from reflex_runtime.drivers.slices import Cancels
from reflex_runtime.processors.function import FunctionProcessor

Item = TypeVar("Item")
Result = TypeVar("Result")

_LATE = 0.001  # seconds; a loop's timer may fire this early, when nothing has expired yet


class BatchedFunction(Handle, Generic[Item, Result]):
    """A function over a list that is called with single items; `batched` makes it. `Handle` lists its errors."""

    def __init__(
        self,
        function: Callable[[list[Item]], Sequence[Result]],
        config: GroupConfig,
        repeatable: bool,
        watchdog: float,
    ) -> None:
        super().__init__(function)
        self._driver = _Driver(function, config, repeatable, watchdog, self._name)

    def __call__(
        self,
        item: Item,
        /,
        *,
        timeout: float | None = None,
        priority: Priority = DEFAULT,
        time_limit: float | None = None,
    ) -> Result:
        """The result for one item; this thread waits for it.

        timeout: seconds that it waits at most, then WaitTimeout. time_limit: seconds from now after which the result
        has no use, then Expired. RuntimeError in a thread that runs an event loop: there, await `aio`.
        """
        driver = self._driver
        if driver.device.current:
            raise ConfigError("@batched: the function calls itself with a single item, and would wait for itself")
        if _loop_runs():
            raise RuntimeError(f"{self._name}(item) would block the running event loop: await {self._name}.aio(item)")
        if timeout is not None and not timeout >= 0.0:
            raise ConfigError(f"timeout={timeout!r}: must be >= 0 seconds, or None to wait for ever")
        caller = threading.get_ident()
        request = Request(item, group=driver.group, client=caller, priority=priority, time_limit=time_limit)
        sleeper, ticket = Sleeper(), None
        try:
            ticket = driver.ask(request, sleeper)
            came = driver.wait(sleeper, ticket, timeout)
        except BaseException:  # refused, or interrupted: the answer has no reader
            driver.relay.runs(sleeper)
            if ticket is not None:
                driver.device.cancel(ticket)
            raise
        if not came and not driver.device.abandon(ticket):
            raise WaitTimeout(f"{self._name}: no answer within {timeout:g} s")
        outcome = ticket.outcome
        if isinstance(outcome, Done):
            return outcome.value  # type: ignore[no-any-return]
        try:
            raise outcome.error.with_traceback(None)  # shared by the callers of a failed batch
        finally:  # it holds this call, whose variables hold it and the item: a cycle
            del ticket, outcome

    async def aio(self, item: Item, /, *, priority: Priority = DEFAULT, time_limit: float | None = None) -> Result:
        """The result for one item, without blocking the loop; cancelling the task cancels the item."""
        driver, loop = self._driver, asyncio.get_running_loop()
        inbox = driver.inbox(loop)
        client = inbox.clients.current()
        request = Request(item, group=driver.group, client=client, priority=priority, time_limit=time_limit)
        future: asyncio.Future[Result] = loop.create_future()
        ticket = driver.submit(request, partial(inbox.put, future), wake=False)
        inbox.wake_soon()
        alarm = None if time_limit is None else loop.call_later(time_limit + _LATE, driver.look)
        try:
            return await future
        except asyncio.CancelledError:
            inbox.cancels.add(ticket, loop)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with every event from now on, in order, on any thread. It must be quick, and call no handle."""
        driver = self._driver
        driver.delivery.after(lambda: driver.audience.add(sink))
        driver.deliver()  # answers that were told meanwhile have woken nobody

    def close(self, drain: bool = True, timeout: float = 5.0) -> bool:
        """Accept no more items, finish or drop those queued, stop the thread. Returns whether it ended in `timeout`.

        Every caller is answered: without a result by then it gets Drained, or CutShort if the function still runs.
        """
        self._driver.device.input(lambda scheduler, now: scheduler.close(now, drain))
        return self._driver.device.stop(timeout)

    def expect_deletion(self) -> None:
        if _stopper.acquire(blocking=False):
            threading.Thread(target=_stop_ownerless, name="reflex-ownerless", daemon=True).start()

    def owner_deleted(self) -> None:
        _ownerless.put(self._driver.device)


class _Driver:
    """The thread of one batched function and its callers; it starts with the first item."""

    def __init__(
        self, function: Callable[[list[Any]], Any], config: GroupConfig, repeatable: bool, watchdog: float, name: str
    ) -> None:
        processors = {config.name: FunctionProcessor(function, repeatable)}
        self.group = config.name
        self.watchdog = watchdog or inf
        self.audience = Audience()
        self.delivery = Delivery(lambda: self.device.take_events(), self.audience)
        scheduler = Scheduler([config])
        scheduler.unheard = self.audience.unheard
        self.device = Device(scheduler, processors, self.deliver, name=name)
        self._inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}
        self.relay = Relay(self.device.clock, self.device.wake)
        self._starting = threading.Lock()
        self._started = False

    def submit(self, request: Request, waiter: Callable[..., None], wake: bool = True) -> Ticket:
        """Admit an item. waiter: called with the settled ticket, on any thread. wake: see `Device.submit`."""
        if not self._started:
            with self._starting:
                if not self._started:
                    self.device.start()
                    self._started = True
        try:
            return self.device.submit(request, waiter, wake)
        except Rejected:
            self.deliver()
            raise

    def ask(self, request: Request, sleeper: Sleeper) -> Ticket:
        """Admit an item of a thread. The items of threads that were answered together wake the device together."""
        relay = self.relay
        later = relay.going
        ticket = self.submit(request, lambda _: relay.answered(sleeper), wake=not later)
        if later:
            relay.came()
        return ticket

    def deliver(self) -> None:
        """Deliver the new events and answers, then wake the threads, one by one, and the loops that have answers: each
        once for all of them."""
        self.delivery.deliver()
        self.relay.go()
        for inbox in tuple(self._inboxes.values()):
            inbox.call()

    def wait(self, sleeper: Sleeper, ticket: Ticket, timeout: float | None) -> bool:
        """Wait for the answer; returns whether it came within `timeout`. Handles deadlines and hanging calls."""
        clock, due = self.device.clock, ticket.deadline

        def look() -> float:
            at = self.look()
            return at if clock() >= due else min(at, due)

        first = min(due, clock() + self.watchdog)
        return self.relay.wait(sleeper, inf if timeout is None else timeout, first, look)

    def look(self) -> float:
        """Expire items past their deadline, and give up a call that hangs. Returns when to look again."""
        self.device.expire()
        at = self.device.check(self.watchdog)
        self.deliver()
        return self.device.clock() + self.watchdog if at is None else at

    def inbox(self, loop: asyncio.AbstractEventLoop) -> _Inbox:
        """The inbox for answers to coroutines of this loop."""
        found = self._inboxes.get(loop)
        if found is None:
            forget_closed(self._inboxes)
            found = self._inboxes.setdefault(loop, _Inbox(loop, self))
        return found


class _Inbox:
    """The items of one loop's coroutines. Those of one turn wake the device once, and so do answers the loop.

    clients: of its tasks. cancels: its cancelled items.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: _Driver) -> None:
        self._loop, self._driver = loop, driver
        self.clients = TaskClients(driver.device.clock)
        self.cancels = Cancels(driver.device.input)
        self._wake_due = self._watching = self._called = False
        self._come: deque[Ticket] = deque()

    def wake_soon(self) -> None:
        """Let the device look at what was submitted in this turn of the loop."""
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._wake_due = False
        self._driver.device.wake()
        self._watch()

    def put(self, future: asyncio.Future[Any], ticket: Ticket) -> None:
        """Keep an answer for the loop until `call`; on any thread."""
        ticket.waiter = future
        self._come.append(ticket)

    def call(self) -> None:
        """Let the loop take its answers, if there are any; on any thread."""
        if self._come and not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop is closed: its coroutines are gone
                self._come.clear()

    def _empty(self) -> None:
        self._called = False  # first, so that later answers call again
        while self._come:
            resolve(self._come.popleft())

    def _watch(self) -> None:
        """Watch the running call for deadlines and hangs, as long as callers wait."""
        if not self._watching and self._driver.watchdog < inf:
            self._watching = True
            self._loop.call_later(self._driver.watchdog, self._look)

    def _look(self) -> None:
        driver = self._driver
        at = driver.look()
        self._watching = not driver.device.scheduler.idle
        if self._watching:
            self._loop.call_later(max(0.0, at - driver.device.clock()) + _LATE, self._look)


# Devices whose objects were deleted. Stopping a device takes its lock, which the thread that collects garbage may hold.
# So the collector only appends them here, without a lock, and another thread stops them.
_ownerless: SimpleQueue[Device] = SimpleQueue()
_stopper = threading.Lock()  # held from when the thread is there


def _stop_ownerless() -> None:
    while True:
        _ownerless.get().stop(0.0)


def _loop_runs() -> bool:
    """Whether this thread is inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
