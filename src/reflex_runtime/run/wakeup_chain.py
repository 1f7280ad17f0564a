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
from math import inf
from typing import Final

from reflex_runtime.run.device import Clock

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

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
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
