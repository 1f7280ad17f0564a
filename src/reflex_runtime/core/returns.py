"""The hold for expected returns: the one thing that may postpone a batch on a free device.

Callers that act and then ask again come back a think time after their answer. Without a hold they split into two
alternating half-size groups; a fixed hold taxes everyone else. So each client's last think times are kept, and with n
queued the batch waits for the h that maximises

    G(h) = E(h) · T(n) − W(h) − n · (h + b · E(h))

where E(h) is the expected number of clients back within h and W(h) their summed expected waits. If no G(h) > 0, nothing
is held.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from itertools import accumulate

RECENT = 64  # clients looked at per decision
REMEMBERED = 1024  # clients whose think times are kept
HISTORY = 32  # think times per client
_REGULAR = 8  # think times without which a client is not called regular
_GRID = (0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005)


class _Thinker:
    """One client: its last answer, its think times in order of arrival, and sorted with prefix sums."""

    __slots__ = ("_sums", "answered", "history", "ordered")

    def __init__(self) -> None:
        self.answered: float | None = None
        self.history: deque[float] = deque()
        self.ordered: list[float] = []
        self._sums: list[float] | None = None

    def add(self, think: float) -> None:
        if len(self.history) == HISTORY:
            self.ordered.remove(self.history.popleft())
        self.history.append(think)
        insort(self.ordered, think)
        self._sums = None

    def back(self, now: float, grid: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
        """E(h) and W(h) of this client for every h of the grid; None when it is back within none of them."""
        assert self.answered is not None
        ordered = self.ordered
        age = now - self.answered
        # Just late is still due: clients that come back together reach the scheduler one by one, and without this the
        # first of them would send the batch away from the rest.
        first = bisect_left(ordered, age - _GRID[0])
        left = len(ordered) - first
        if not left or ordered[first] > age + grid[-1]:
            return None
        last = bisect_right(ordered, age + grid[0], first)
        if last == len(ordered) or ordered[last] > age + grid[-1]:  # whoever is as regular as a robot
            wait = max(0.0, sum(ordered[first:last]) - (last - first) * age)
            return ((last - first) / left,) * len(grid), (wait / left,) * len(grid)
        if self._sums is None:
            self._sums = [0.0, *accumulate(ordered)]
        sums = self._sums
        start = sums[first]
        counts = [bisect_right(ordered, age + h, first) - first for h in grid]
        return (
            [n / left for n in counts],
            [max(0.0, sums[first + n] - start - n * age) / left for n in counts],
        )


class Returns:
    """Think times of a group's clients and the hold they justify."""

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, _Thinker] = OrderedDict()
        self._away: OrderedDict[Hashable, _Thinker] = OrderedDict()  # answered and not back, most recent last

    @property
    def expected(self) -> bool:
        """Whether anybody is away who may come back."""
        return bool(self._away)

    def arrived(self, client: Hashable, now: float) -> None:
        """The client is back."""
        thinker = self._clients.get(client)
        if thinker is not None and thinker.answered is not None:
            thinker.add(now - thinker.answered)
            thinker.answered = None
            self._away.pop(client, None)

    def answered(self, client: Hashable, now: float) -> None:
        """The client has its last answer and nothing else in the system."""
        thinker = self._clients.get(client)
        if thinker is None:
            thinker = self._clients[client] = _Thinker()
            if len(self._clients) > REMEMBERED:
                self._away.pop(self._clients.popitem(last=False)[0], None)
        thinker.answered = now
        self._clients.move_to_end(client)
        self._away[client] = thinker
        self._away.move_to_end(client)
        if len(self._away) > RECENT:
            self._away.popitem(last=False)

    def take_turns(self, seconds: float, now: float) -> bool:
        """Whether the active clients could each have the device to themselves for `seconds` per cycle, and come back so
        regularly that they stay apart: a client that once waits for another then does not meet it again.

        Looks at the most recently answered clients until one that has gone; False for more than `RECENT`.
        """
        load = longest = 0.0
        for count, client in enumerate(reversed(self._clients.values())):
            ordered = client.ordered
            n = len(ordered)
            longest = max(longest, ordered[-1] if ordered else 0.0)
            if client.answered is not None and now - client.answered > 2.0 * longest:
                break
            if count == RECENT or n < _REGULAR or ordered[3 * n // 4] - ordered[n // 4] > 0.5 * seconds:
                return False
            load += seconds / (seconds + ordered[n // 2])
            if load > 1.0:
                return False
        return load > 0.0

    def hold(self, now: float, longest: float, queued: int, batch_time: float, marginal: float) -> float:
        """Seconds to hold, at most `longest`; 0.0 to send at once.

        queued: n. batch_time: T(n) in seconds. marginal: b, seconds one more member costs.
        """
        if longest <= 0.0 or batch_time <= 0.0:
            return 0.0
        grid = [h for h in _GRID if h < longest]
        h = _GRID[-1] * 2.0
        while h < longest and len(grid) < 16:  # timeouts beyond the usual 5 ms
            grid.append(h)
            h *= 2.0
        grid.append(longest)
        # Were all of them certain to be back at once: a hold for which even that is not worth its price needs no sums.
        most = len(self._away) * (batch_time - queued * marginal)
        grid = [h for h in grid if queued * h < most]
        if not grid:
            return 0.0
        rows = [row for thinker in self._away.values() if (row := thinker.back(now, grid)) is not None]
        if not rows:
            return 0.0
        expected = [sum(column) for column in zip(*[e for e, _ in rows], strict=True)]
        waits = [sum(column) for column in zip(*[w for _, w in rows], strict=True)]
        best, gain = 0.0, 0.0
        for h, e, w in zip(grid, expected, waits, strict=True):
            g = e * batch_time - w - queued * (h + marginal * e)
            if g > gain:
                best, gain = h, g
        return best
