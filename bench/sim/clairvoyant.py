"""The most requests that any rule could answer in time, as a bound for the comparisons.

All arrivals are known in advance. With one time limit for all, there is an optimal schedule that serves accepted
requests in order of arrival and refuses only between batches. So it is enough to keep, before every request, the
earliest time at which the device can be free for each number of refusals so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def most_on_time(arrivals: Sequence[float], limit: float, fixed: float, marginal: float) -> int:
    """How many of the requests can be answered within `limit` seconds by batches of fixed + marginal · n seconds.

    arrivals: seconds, ascending. Exact for a device without noise; a second or two per 10,000 requests.
    """
    count, at = len(arrivals), np.asarray(arrivals, dtype=np.float64)
    largest = max(1, int((limit - fixed) / marginal + 1e-9)) if marginal > 0.0 else count
    free: dict[int, _Free] = {0: _Free(0, np.array([-inf]))}
    for i in range(count):
        now = free.pop(i)
        low, since = now.undominated()
        # Refusing more than arrive within one limit cannot pay: any schedule clears its backlog in that time.
        since = since[: int(np.searchsorted(at, at[i] + limit, side="right")) - i + 1]
        _reach(free, i + 1, low + 1, since)
        for n in range(1, min(largest, count - i) + 1):
            ends = np.maximum(since, at[i + n - 1]) + (fixed + marginal * n)
            # A larger batch ends later, and later states are free earlier: once the last is late, all are.
            late = int(np.count_nonzero(ends > at[i] + limit + 1e-12))
            if late == len(ends):
                break
            _reach(free, i + n, low + late, ends[late:])
    return count - free[count].undominated()[0]


class _Free:
    """When the device is free at the earliest, by the number of requests refused: the first entry has `low`."""

    __slots__ = ("low", "times")

    def __init__(self, low: int, times: Times) -> None:
        self.low, self.times = low, times

    def merge(self, low: int, times: Times) -> None:
        """Take the earlier one of each."""
        if low < self.low or low + len(times) > self.low + len(self.times):
            least = min(low, self.low)
            most = max(low + len(times), self.low + len(self.times))
            wider = np.full(most - least, inf)
            wider[self.low - least : self.low - least + len(self.times)] = self.times
            self.low, self.times = least, wider
        part = self.times[low - self.low : low - self.low + len(times)]
        np.minimum(part, times, out=part)

    def undominated(self) -> tuple[int, Times]:
        """(least number refused, times from there on), each no later than the one before it."""
        first = int(np.argmax(self.times < inf))
        return self.low + first, np.minimum.accumulate(self.times[first:])


def _reach(free: dict[int, _Free], i: int, low: int, times: Times) -> None:
    if i in free:
        free[i].merge(low, times)
    else:
        free[i] = _Free(low, times.copy())
