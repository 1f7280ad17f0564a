"""Wakes threads that were answered one after another: each lets the next one run as soon as it runs itself.

Python runs one of them at a time. Woken all at once they take the interpreter's lock from each other on every core, and
each of them sleeps a second time to get it: twice the CPU, and half the items a second. Where there is no such lock,
all are woken at once.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

STALLED: Final = 0.02  # seconds without a sign of the thread that is to run, after which the others do not wait for it

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

    over: called on any thread when the last of them runs. clock: seconds.
    """

    def __init__(self, over: Callable[[], None], clock: Callable[[], float]) -> None:
        self._over, self._clock = over, clock
        self._lock = threading.Lock()
        self._waiting: deque[Sleeper] = deque()
        self._woken: Sleeper | None = None  # it is to run, and then to wake the next one
        self._since = 0.0  # when it was woken

    @property
    def going(self) -> bool:
        """Whether a thread that was answered does not run yet."""
        return self._woken is not None

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

    def runs(self, sleeper: Sleeper) -> None:
        """The thread runs, with or without its answer. To be called as soon as it does, once, whatever happened."""
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
