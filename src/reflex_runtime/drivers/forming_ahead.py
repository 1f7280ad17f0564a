"""The thread that forms a device's next batch shortly before the running one ends.

It sleeps until the predicted end of the running batch, less the time that forming takes, and some for the error of the
prediction. It sleeps without a time while batches are not full: then each is formed when the device is free.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.wakeable import Wakeable

log = logging.getLogger("reflex.device")

WAKING = 0.0002  # seconds: from the time a thread sleeps until, to when it runs with the interpreter's lock
SLACK = 0.0002  # seconds by which it may form earlier, rather than sleep once more
ERROR = 0.05  # of a predicted time
PAYS = 0.01  # least share of a batch's time that forming takes
MISSES = 2  # batches in a row that could not be formed ahead, after which none is tried until one is full
FULL = frozenset({Cause.SIZE, Cause.BUDGET})


class FormingAhead:
    """Plans when to form, and does it. `lock` guards the scheduler and is held at every call.

    settle: completes what has ended, before a batch is formed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lock: threading.Lock,
        clock: Callable[[], float],
        settle: Callable[[], None],
        name: str,
    ) -> None:
        self._scheduler, self._lock, self._clock, self._settle = scheduler, lock, clock, settle
        self._name = name
        self._bell = Wakeable(lock)
        self._thread: threading.Thread | None = None
        self._at = inf  # when to form
        self._next = inf  # when the thread will probably be needed next
        self._misses = MISSES
        self._takes = 0.0
        self._ends = False

    def formed(self, batch: Batch, seconds: float) -> None:
        """The device thread formed a batch itself, in so many seconds."""
        if batch.cause in FULL:
            self._misses = 0
            self._took(seconds)

    def began(self, batch: Batch, now: float) -> None:
        """A batch was started: plan the next one, if that may pay."""
        expected = batch.expected
        if self._misses >= MISSES or self._ends or not expected * PAYS < self._takes:
            self._at = inf
            return
        self._at = now + expected - self._lead(expected)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # this process may have no more threads: batches are formed when the device is free
                log.exception("no batch is formed ahead")
                self.end()
        elif self._bell.waiting and self._at < self._bell.until:
            self._bell.ring()

    def rest(self) -> None:
        """Nothing runs on the device thread: form nothing before the next `began`."""
        self._at = inf

    def end(self) -> None:
        """The thread ends soon."""
        self._ends = True
        self._bell.ring()

    def _lead(self, expected: float) -> float:
        return WAKING + 2.0 * self._takes + ERROR * expected

    def _took(self, seconds: float) -> None:
        self._takes = seconds if self._takes == 0.0 else self._takes + 0.1 * (seconds - self._takes)

    def _main(self) -> None:
        with self._lock:
            while not self._ends:
                now = self._clock()
                if self._at <= now + SLACK:
                    try:
                        self._form(now)
                    except Exception:  # a cost model's: the device forms the batch itself, and has the error too
                        log.exception("a batch could not be formed ahead")
                    continue
                until = min(self._at, self._next if self._next > now else inf)
                self._bell.wait(until - now, until)

    def _form(self, now: float) -> None:
        planned, self._at, self._next = self._at, inf, inf
        self._settle()
        batch = self._scheduler.form_ahead(now)
        if batch is None:
            self._misses += 1
            return
        self._misses = 0
        self._took(self._clock() - now)
        # The thread is needed again when this batch is about to end: it need not be woken for that.
        self._next = planned + batch.expected
