"""While a batch runs, requests that come do not interrupt it one by one.

A thread that wakes up usually interrupts the one that runs on its core. So each request that arrives stops the model,
if model and event loop share a core: two switches, and cold caches on both sides. It gains nothing, because the request
waits for the end of the batch. Under Linux's SCHED_BATCH the loop does not interrupt: it runs on a free core at once,
else after the model's time slice (about 3 ms), and then reads all requests that have come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, Generic, TypeVar

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.request import Ticket
from reflex_runtime.processors.base import Processor, may_run_anywhere

V = TypeVar("V")

MANY: Final = 4  # requests that came while the last batch ran: for fewer the loop may interrupt
LONG: Final = 0.002  # seconds: a shorter batch is not interrupted often


class EventLoopThread:
    """The event loop's thread, and whether it may interrupt other threads. Made on that thread.

    Linux only, and only if nobody has chosen another scheduling policy for it; elsewhere it does nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._id = threading.get_native_id()
        self._may: bool | None = None  # asked when it first matters: while a process starts it may have another policy
        self._free_since = -inf
        self._calm = False

    def started(self) -> None:
        """The calling thread is to run batches. One that replaces a lost one is started by the loop while that is calm,
        and has inherited it."""
        if self._may and os.sched_getscheduler(0) == os.SCHED_BATCH:
            self._set(0, "SCHED_OTHER")

    def begin(self, batch: Batch) -> bool:
        """A batch is about to run on the calling thread. Returns whether the loop does not interrupt it."""
        if self._may is False or batch.expected < LONG or threading.get_native_id() == self._id:
            return False
        if sum(ticket.arrived < self._free_since for ticket in batch.admitted) < MANY:
            return False
        if self._may is None:
            self._may = _may_change(self._id)
        self._calm = self._may and self._set(self._id, "SCHED_BATCH")
        return self._calm

    def end(self) -> None:
        """It has run. Also ends what a batch began that never came back: its thread was given up."""
        self._free_since = self._clock()
        if self._calm:
            self._calm = False
            self._set(self._id, "SCHED_OTHER")

    def _set(self, thread: int, policy: str) -> bool:
        try:  # threads that it starts meanwhile, such as for decoding, inherit this: they need not interrupt either
            os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))
        except OSError:  # forbidden in this container
            self._may = False
        return self._may is not False


class Uninterrupted(Generic[V]):
    """A processor whose batches the event loop does not interrupt. loop: the same for all processors of a device."""

    def __init__(self, inner: Processor[V], loop: EventLoopThread) -> None:
        self._inner, self._loop = inner, loop
        self.repeatable = inner.repeatable

    @property
    def any_thread(self) -> bool:
        """Whether calls may be made on any thread."""
        return may_run_anywhere(self._inner)

    def start(self) -> None:
        self._loop.started()
        self._inner.start()

    def run(self, batch: Batch) -> Sequence[Any]:
        self._loop.begin(batch)
        try:
            return self._inner.run(batch)
        finally:
            self._loop.end()

    def drop(self, tickets: Sequence[Ticket]) -> None:
        self._inner.drop(tickets)

    def stop(self) -> None:
        self._inner.stop()


def _may_change(thread: int) -> bool:
    try:
        return os.sched_getscheduler(thread) == os.SCHED_OTHER
    except (AttributeError, OSError):  # not on this system
        return False
