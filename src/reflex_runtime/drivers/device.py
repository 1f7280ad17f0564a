"""One device: a scheduler, the lock that guards it, and the thread that runs its batches.

The device thread completes a batch and takes the next itself; everybody else only submits, cancels and wakes it. It waits
on a condition until `wake_at`, never by polling. Drivers for callers (`Batcher`, `batched`) add how results get back.

A thread that hangs in a processor, or dies, is abandoned: its batch fails at once, and one replacement is started. The
second time the device is given up (`on_fatal`): what is left is answered with errors and nothing more is admitted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from reflex_runtime.core.batch import Batch, Failed, Outcome
from reflex_runtime.core.errors import ConfigError, ProcessorError, ProcessorHung
from reflex_runtime.core.events import Event
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.processors.base import Processor, run_batch

Clock = Callable[[], float]


class Device:
    """Runs a scheduler's batches on processors, one per group, on one thread.

    notify: called, never with the lock held, when there may be events to take; on the device thread or a caller's. Who
        takes them must do so in one place, so that they stay in order.
    on_fatal: called once, from any thread, when the device is given up.
    """

    RESTARTS = 1

    def __init__(
        self,
        scheduler: Scheduler,
        processors: Mapping[str, Processor],
        notify: Callable[[], None],
        clock: Clock = time.monotonic,
        on_fatal: Callable[[], None] | None = None,
        name: str = "reflex-device",
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._processors = processors
        self._notify = notify
        self._on_fatal = on_fatal
        self._name = name
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._waiting = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._generation = 0
        self._restarts = 0
        self._running: tuple[Batch, float] | None = None
        self.hung = 0
        self.fatal = False

    # -- callers -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the device thread."""
        with self._lock:
            if self._thread is not None:
                raise ConfigError("Device.start: already started")
            self._spawn()

    def submit(self, request: Request, waiter: Any = None, wake: bool = True) -> Ticket:
        """Admit a request; its end is in the events. Raises `Rejected` (also an event).

        wake: False leaves it to a later `wake`, so that requests that come together wake the device once.
        """
        with self._lock:
            ticket = self.scheduler.submit(request, self.clock())
            ticket.waiter = waiter
            if wake and self._waiting:
                self._wake.notify()
        return ticket

    def wake(self) -> None:
        """Let a free device look at what was submitted."""
        if self._waiting:
            with self._lock:
                self._wake.notify()

    def cancel(self, ticket: Ticket) -> None:
        """The caller takes it back."""
        self.input(lambda scheduler, now: scheduler.cancel(ticket, now))

    def input(self, action: Callable[[Scheduler, float], Any]) -> Any:
        """Any other input to the scheduler, under the lock."""
        with self._lock:
            result = action(self.scheduler, self.clock())
            if self._waiting:
                self._wake.notify()
        self._notify()
        return result

    def expire(self) -> None:
        """Let what is due take effect while the device is busy; a free device sees to it itself."""
        with self._lock:
            if self._running is not None:
                self.scheduler.next_batch(self.clock())  # forms nothing: one batch at a time

    def wake_at(self) -> float:
        """When the scheduler has something due."""
        with self._lock:
            return self.scheduler.wake_at()

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        with self._lock:
            return self.scheduler.take_events()

    @property
    def running_since(self) -> float | None:
        """When the batch now running was started; None when the device is free."""
        running = self._running
        return None if running is None else running[1]

    def check(self, limit: float) -> float | None:
        """Give up a batch that has run for `limit` seconds. Returns when to check again, None when nothing runs."""
        with self._lock:
            if self._running is None:
                return None
            batch, since = self._running
            if self.clock() - since < limit:
                return since + limit
            self.hung += 1
            error = ProcessorHung(f"the processor did not come back within {limit:g} s", limit_s=limit)
            self._abandon(batch, error)
        self._notify()
        return None

    def stop(self, timeout: float = 5.0) -> bool:
        """Stop the thread after its present batch. Returns whether it ended within `timeout` seconds."""
        with self._lock:
            self._stopping = True
            self._wake.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def give_up(self, error: ProcessorError) -> None:
        """Fail the batch that still runs and start no other: for a stop that cannot wait for it."""
        with self._lock:
            if self._running is None:
                return
            batch, since = self._running
            now = self.clock()
            self.scheduler.complete(batch, [Failed(error)] * len(batch), now - since, now)
            self._running = None
            self._generation += 1
        self._notify()

    # -- device thread ---------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._generation += 1
        self._thread = threading.Thread(
            target=self._main, args=(self._generation,), name=f"{self._name}-{self._generation}", daemon=True
        )
        self._thread.start()

    def _main(self, generation: int) -> None:
        batch: Batch | None = None
        try:
            for processor in self._processors.values():
                processor.start()
            while (batch := self._next(generation)) is not None:
                outcomes = run_batch(self._processors[batch.group], batch)
                if not self._complete(generation, batch, outcomes):
                    return
            for processor in self._processors.values():
                processor.stop()
        except BaseException as error:  # the thread is about to die: nobody else will answer for its batch
            self._died(generation, error)

    def _next(self, generation: int) -> Batch | None:
        """Wait for a batch; None when the device stops or this thread was replaced."""
        while True:
            with self._lock:
                if generation != self._generation or (self._stopping and self.scheduler.idle):
                    return None
                batch = self.scheduler.next_batch(self.clock())
                if batch is not None:
                    self._running = (batch, self.clock())
                elif self._stopping:
                    return None
                else:
                    self._drop_left()
            self._notify()
            if batch is not None:
                return batch
            with self._lock:
                if not self._stopping and generation == self._generation:
                    self._wait()

    def _wait(self) -> None:
        """Sleep until an input or until the scheduler has something to do. The lock is held."""
        wake = self.scheduler.wake_at()
        delay = wake - self.clock()
        if delay <= 0.0:
            return
        self._waiting = True
        self._wake.wait(None if wake == inf else min(delay, threading.TIMEOUT_MAX))
        self._waiting = False

    def _drop_left(self) -> None:
        for group, processor in self._processors.items():
            left = self.scheduler.take_left(group)
            if left:
                processor.drop(left)

    def _complete(self, generation: int, batch: Batch, outcomes: Sequence[Outcome]) -> bool:
        with self._lock:
            if generation != self._generation or self._running is None:
                return False  # given up in the meantime; its callers were answered
            now = self.clock()
            self.scheduler.complete(batch, outcomes, now - self._running[1], now)
            self._running = None
        return True

    def _died(self, generation: int, error: BaseException) -> None:
        with self._lock:
            if generation != self._generation:
                return
            cause = ProcessorError(f"the device thread died: {type(error).__name__}: {error}")
            self._abandon(self._running[0] if self._running is not None else None, cause)
        self._notify()

    def _abandon(self, batch: Batch | None, error: ProcessorError) -> None:
        """Answer for a lost thread and replace it once. The lock is held."""
        now = self.clock()
        if batch is not None and self._running is not None:
            self.scheduler.complete(batch, [Failed(error)] * len(batch), now - self._running[1], now)
        self._running = None
        self._waiting = False
        if self._restarts < self.RESTARTS:
            self._restarts += 1
            self._spawn()
            return
        self._generation += 1
        self.fatal = True
        self.scheduler.close(now, drain=False)
        if self._on_fatal is not None:
            self._on_fatal()
