"""When a runtime process is given up, and when it is started again. Pure: told what happened, it answers how long to
wait."""

from __future__ import annotations

from collections.abc import Callable


class Restarts:
    """How long to wait before each start: longer after each that came to nothing, and a rest when many did.

    A failure is a start that failed or a life shorter than `steady` seconds. After `most` of them in a row the breaker
    is open: one trial every `rest` seconds, until one of them lives that long. jitter: gives numbers in [0, 1); waits
    are shortened by up to half, so that processes that were lost together do not come back together.
    """

    def __init__(
        self, first: float, longest: float, steady: float, most: int, rest: float, jitter: Callable[[], float]
    ) -> None:
        self.first, self.longest, self.steady, self.most, self.rest = first, longest, steady, most, rest
        self.failures = 0
        self._jitter = jitter

    def failed(self) -> None:
        """A start came to nothing."""
        self.failures += 1

    def lived(self, seconds: float) -> None:
        """A process was lost that had been ready for so long."""
        self.failures = 0 if seconds >= self.steady else self.failures + 1

    @property
    def open(self) -> bool:
        """Whether the breaker is open: the next start is a trial."""
        return self.failures >= self.most

    def wait(self) -> float:
        """Seconds until the next start."""
        if self.open:
            return self.rest
        doublings = min(max(0, self.failures - 1), 64)  # 2**64 of anything is longer than `longest`, and no overflow
        return min(self.longest, self.first * 2.0**doublings) * (1 - self._jitter() / 2)


class Pulse:
    """Whether the other end is alive, by questions that it should answer: one every `every` seconds, and given up when
    one stays unanswered for `limit`.

    A tick that comes later than `every` after its time says that this process stood still, not the other: what it
    waited for is not counted.
    """

    def __init__(self, every: float, limit: float) -> None:
        self.every, self.limit = every, limit
        self.silent = 0.0
        self._delay = self._due = 0.0

    def next(self, now: float) -> float:
        """Seconds until the tick at which to look."""
        self._delay = min(self.every, self.limit - self.silent)
        self._due = now + self._delay
        return self._delay

    def tick(self, answered: bool, now: float) -> bool:
        """The tick came; answered: whether the question that was asked is. Returns whether to go on waiting."""
        if answered:
            self.silent = 0.0
        elif now - self._due <= self.every:
            self.silent += self._delay
        return not self.over

    @property
    def over(self) -> bool:
        """Whether it was given up."""
        return self.silent >= self.limit
