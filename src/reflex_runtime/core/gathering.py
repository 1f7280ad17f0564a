"""Whether callers that come back are gathered into one batch, or left in several that take turns: what answers sooner.

A batch of n requests takes T(n) = a + b·n, and callers come back ρ after their answer. N callers in one group have a
cycle of a + b·N + ρ. In two groups that take turns it is 2a + b·N: while one runs, the other comes back. So one group
is better if ρ < a. That holds where coming back costs the device nothing. If one processor decodes the pictures of one
group and runs the other, each makes the other slower, and one group is better for a longer ρ. Neither a nor ρ tells
these cases apart. So what `returns` counts as worth gathering (clients that come within a, and pictures that are being
decoded) is tried now and then, for a few batches, and kept if requests were answered sooner. In the same way it is
tried to stop.

It is tried only where it makes a difference (`differs`): a lone caller, and clients that are not expected, never wait.
"""

from __future__ import annotations

from collections import deque
from math import sqrt

WINDOW = 6  # batches that are compared
SETTLING = 2  # batches after a change that do not count
SOON, LONGEST = 8, 512  # batches until the first trial of the other way, and most between two
AGAIN = 32  # batches from a change to the next trial
BY_CHANCE = 2.0  # standard errors by which gathering must be better to begin with it
CLEARLY = 0.99  # and the share of the other latency
WORSE = 1.25  # times the other latency: ends a trial early


class Gathering:
    """The choice for one partition. on: whether callers are gathered now; differs: whether that mattered lately."""

    __slots__ = ("_answers", "_before", "_latencies", "_left", "_pause", "_seconds", "differs", "on")

    def __init__(self) -> None:
        self.on = self.differs = False
        self._latencies: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # (sum, answers) of the last batches
        self._seconds, self._answers = 0.0, 0  # of the batch that was answered last
        self._before: tuple[float, float] | None = None  # mean and standard error of the usual way, during a trial
        self._pause = self._left = SOON  # batches from trial to trial, and until the next change

    def answered(self, seconds: float) -> None:
        """A request was answered so long after it was admitted."""
        self._seconds += seconds
        self._answers += 1

    def left(self) -> None:
        """A batch leaves: what was answered since the last one did is the outcome of an earlier batch."""
        if not self._answers:
            return
        self._latencies.append((self._seconds, self._answers))
        self._seconds, self._answers = 0.0, 0
        self._left -= 1
        if self._before is None:
            if self._left <= 0 and self.differs:
                self._before = self._measured()
                self._change(SETTLING + WINDOW)
            return
        if self._left == WINDOW:
            self._latencies.clear()
        if self._left >= WINDOW - 1:
            return
        latency, error = self._measured()
        before, its_error = self._before
        if self._left > 0 and latency < WORSE * before:
            return
        self._before = None
        noise = BY_CHANCE * sqrt(error * error + its_error * its_error) if self.on else 0.0
        if latency < CLEARLY * before and latency + noise < before:
            self._pause, self._left, self.differs = AGAIN, AGAIN, False
        else:
            self._pause = min(2 * self._pause, LONGEST)
            self._change(self._pause)

    def _change(self, batches: int) -> None:
        self.on, self.differs, self._left = not self.on, False, batches

    def _measured(self) -> tuple[float, float]:
        """Mean latency, and its standard error by the spread between batches."""
        sums = self._latencies
        mean = sum(seconds for seconds, _ in sums) / sum(n for _, n in sums)
        spread = sum((seconds / n - mean) ** 2 for seconds, n in sums)
        return mean, sqrt(spread / (len(sums) * max(1, len(sums) - 1)))
