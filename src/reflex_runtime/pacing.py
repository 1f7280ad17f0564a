"""Back-off between attempts, and limits on how often a failure is reported. Callers pass the time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf


def doubled(first: float, longest: float, times: int) -> float:
    """`first`, doubled so many times, and `longest` at most."""
    return min(longest, first * 2.0 ** min(times, 64))  # 2**64 of anything is longer, and no overflow


class Restarts:
    """Waits before the starts of a process: longer after each failure, and a rest after many.

    A failure is a start that failed or a life shorter than `steady` seconds. After `most` of them in a row the breaker
    is open: one trial every `rest` seconds, until one lives that long. jitter: returns numbers in [0, 1); waits are
    shortened by up to half, so that processes that were lost together do not come back together.
    """

    def __init__(
        self, first: float, longest: float, steady: float, most: int, rest: float, jitter: Callable[[], float]
    ) -> None:
        self.first, self.longest, self.steady, self.most, self.rest = first, longest, steady, most, rest
        self.failures = 0
        self._jitter = jitter

    def failed(self) -> None:
        self.failures += 1

    def lived(self, seconds: float) -> None:
        """A process was lost after it was ready for so many seconds."""
        self.failures = 0 if seconds >= self.steady else self.failures + 1

    @property
    def open(self) -> bool:
        """Whether the breaker is open: the next start is a trial."""
        return self.failures >= self.most

    def wait(self) -> float:
        """Seconds until the next start."""
        if self.open:
            return self.rest
        return doubled(self.first, self.longest, max(0, self.failures - 1)) * (1 - self._jitter() / 2)


class Throttle:
    """Limits reports of a count: the first at once, then at most one per `every` seconds.

    Methods return the count to report now, 0 for none. These and `held` add up to the occurrences. A recovery reports
    the held count early, at most once between two regular reports: a source that fails and recovers thirty times a
    second causes two reports per `every` seconds.
    """

    __slots__ = ("_early", "_next", "every", "held")

    def __init__(self, every: float = 1.0) -> None:
        self.every = every
        self.held = 0
        self._next = -inf  # no regular report before this time
        self._early = False  # the last report was early

    def count(self, now: float) -> int:
        self.held += 1
        return self.due(now)

    def due(self, now: float) -> int:
        """The held count, if a report is due."""
        return self._tell(now) if now >= self._next else 0

    def recover(self, now: float) -> int:
        """The held count, early, after a success."""
        if now >= self._next or not self._early:
            early = now < self._next
            told = self._tell(now)
            self._early = early and told > 0
            return told
        return 0

    def flush(self, now: float) -> int:
        """The held count, at the end."""
        return self._tell(now)

    def quiet(self, now: float) -> bool:
        """Whether a new one would behave the same."""
        return not self.held and now >= self._next

    def _tell(self, now: float) -> int:
        told, self.held = self.held, 0
        if told:
            self._next = now + self.every
            self._early = False
        return told
