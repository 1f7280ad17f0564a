"""Callers that wait for their answers and do not fit into one batch together: batches of equal size, and longer ones.

If 40 fit and 128 come back again and again, batches of 40 leave 8 over: each caller waits for three batches, and now
and then for four. With batches of 43 all wait equally long. And each of them waits for all batches of a round, so fewer
and longer ones are sooner through for everybody: a round takes as many fixed parts as it has batches. Two are needed:
while one runs, those who were answered come back.
"""

from __future__ import annotations

from collections import deque
from math import ceil

WINDOW = 0.25  # seconds of which the most is taken
WINDOWS = 4  # that must agree
STEADY = 0.9  # least of them over the largest
OVER = 1.1  # times the budget that a batch may take if that makes them fewer


class Crowd:
    """How many requests are here at most, if that stays the same: callers that come back make it so."""

    __slots__ = ("_most", "_peaks", "_until")

    def __init__(self) -> None:
        self._peaks: deque[int] = deque(maxlen=WINDOWS)
        self._most, self._until = 0, 0.0

    def seen(self, count: int, now: float) -> None:
        """So many are here."""
        if now >= self._until:
            if self._most:
                self._peaks.append(self._most)
            self._most, self._until = 0, now + WINDOW
        if count > self._most:
            self._most = count

    @property
    def callers(self) -> int:
        """Their number, 0 if it varies."""
        peaks = self._peaks
        most = max(peaks, default=0)
        return most if len(peaks) == WINDOWS and min(peaks) >= STEADY * most else 0


def even_size(callers: int, budget: float, longest: float, fixed: float, marginal: float) -> int:
    """How many of the callers share a batch, if not all of them do; otherwise 0.

    budget: of a batch, if nobody comes back. longest: of a batch of such a crowd. These, fixed and marginal: seconds;
    marginal above 0.
    """
    if fixed + marginal * callers <= budget:
        return 0
    if fixed + marginal * callers <= OVER * budget:
        return callers
    most = (max(longest, OVER * budget) - fixed) / marginal
    return ceil(callers / max(2, ceil(callers / most))) if most >= 1.0 else 0
