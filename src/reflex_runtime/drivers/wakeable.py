"""One sleeping thread that others wake: what threading.Condition does, without its lock and queue per sleep.

On a cold cache those took 30 us. The lock that guards the sleeper's state is held at every call.
"""

from __future__ import annotations

import threading
from math import inf


class Wakeable:
    """One thread that sleeps. waiting: whether that sleeps; until: the time until which it does."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._rung = threading.Lock()  # held but for the moment between a ring and the thread waking up
        self._rung.acquire()
        self.waiting = False
        self.until = inf

    def ring(self) -> None:
        """Wake the thread if it sleeps."""
        if self.waiting:
            self.waiting = False
            self._rung.release()

    def wait(self, delay: float, until: float) -> None:
        """Sleep until a ring, for `delay` seconds at most, which end at `until`. The lock is released meanwhile."""
        if delay <= 0.0:
            return
        self.waiting, self.until = True, until
        self._lock.release()
        try:
            rung = self._rung.acquire(timeout=-1.0 if delay == inf else min(delay, threading.TIMEOUT_MAX))
        finally:
            self._lock.acquire()
        if not rung and not self.waiting:  # it was woken just as the time ran out
            self._rung.acquire()
        self.waiting = False
