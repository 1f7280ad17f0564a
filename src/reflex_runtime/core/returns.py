"""Which clients a free device waits for: those whose next request is due, and only if waiting pays.

Cameras send by the clock; robots and files send some time after their answer. Two habits of each client are recorded:
the last 32 gaps between its requests, and the last 32 times from an answer to its next request. The more regular one
predicts its next request. With n waiting and a batch whose fixed part takes a seconds, the batch is held for the h
that maximises

    G(h) = a · E(h) − W(h) − n · h

where E(h) is the expected number of absent clients back within h, at most as many as the batch has places for, and
W(h) the sum of their expected times until then. If no G(h) > 0, nothing is held. (With T(n) = a + b·n this is
E·T(n) − W − n·(h + b·E): a client that joins saves itself a whole batch, and lengthens this one for n others.)

G considers one batch only. But two groups of clients that take turns cost a more in every cycle than one group. So a
group that is complete when the device becomes free waits for the other one, once, if that takes less than a.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable
from math import inf

RECENT = 64  # absent clients considered per decision: those answered last
REMEMBERED = 1024  # clients whose habits are kept
HISTORY = 32  # values of each habit
REGULAR = 3  # gaps needed for a prediction
IRREGULAR = 0.67  # spread of think times, as a share of a chunk, above which clients that met do not meet again
PARTS = 3  # steps by which a habit's distribution is summed
JUST_LATE = 2.0**-12  # seconds, about 0.25 ms: requests that come together reach the scheduler one by one
CLEARLY = 0.0001  # seconds by which gaps must be more regular than think times
BRIEF = 0.0001  # seconds: a shorter hold is not worth it, because ending one takes as long
A_TIE = 1e-9  # seconds of gain below which the shorter hold wins
MERGE_EVERY = 64.0  # times a, at least: seconds between two attempts to merge two groups
NEARLY_ALL = 0.9  # share of a group to wait for

_Due = tuple[float, float, float, bool]  # seconds from now, probability, probability · mean seconds, by think time


class _Habit:
    """How long something took, the last HISTORY times."""

    __slots__ = ("_latest", "ordered")

    def __init__(self) -> None:
        self._latest: list[float] = []  # a deque would take half a kilobyte for each client
        self.ordered: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self._latest) == HISTORY:
            del self.ordered[bisect_left(self.ordered, self._latest.pop(0))]
        self._latest.append(seconds)
        insort(self.ordered, seconds)

    @property
    def spread(self) -> float:
        """Interquartile range; inf without values."""
        n = len(self.ordered)
        return self.ordered[3 * n // 4] - self.ordered[n // 4] if n else inf


class _Client:
    """One client. since, ordered: start of the interval that predicts its next request, and past lengths, sorted."""

    __slots__ = ("answered", "asked", "gaps", "ordered", "partition", "since", "thinks")

    def __init__(self) -> None:
        self.partition: Hashable = None
        self.asked: float | None = None
        self.answered: float | None = None
        self.gaps, self.thinks = _Habit(), _Habit()
        self.since = 0.0
        self.ordered: list[float] = []

    def ask(self, partition: Hashable, now: float) -> None:
        if self.asked is not None:
            self.gaps.add(now - self.asked)
        if self.answered is not None:
            self.thinks.add(now - self.answered)
        self.partition, self.asked, self.answered = partition, now, None

    def answer(self, now: float) -> None:
        assert self.asked is not None
        self.answered = now
        gaps, thinks = self.gaps, self.thinks
        if len(gaps.ordered) >= REGULAR and gaps.spread < thinks.spread - CLEARLY:
            self.since, self.ordered = self.asked, gaps.ordered
        else:
            self.since, self.ordered = now, thinks.ordered

    @property
    def was_answered(self) -> bool:
        """Whether it ever was."""
        return self.answered is not None or bool(self.thinks.ordered)

    def due(self, now: float, longest: float, found: list[_Due]) -> int:
        """Add its possible times within `longest`, given that it has not come yet. 1 if its think time predicts, else
        0."""
        ordered, age = self.ordered, now - self.since
        first = bisect_left(ordered, age - JUST_LATE)
        possible = len(ordered) - first
        if not possible or ordered[first] > age + longest:
            return 0
        thinks = self.since == self.answered
        last = bisect_right(ordered, age + longest, first)
        step = 1 + (last - first - 1) // PARTS
        if ordered[last - 1] - ordered[first] <= JUST_LATE:
            step = last - first
        while first < last:
            part = ordered[first : first + step if first + step < last else last]
            share, wait = len(part) / possible, part[-1] - age
            found.append((wait if wait > 0.0 else 0.0, share, sum(part) / possible - share * age, thinks))
            first += step
        return int(thinks)


class ThinkTimes:
    """The habits of a group's clients and the hold they justify. Times in seconds."""

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, _Client] = OrderedDict()
        self._absent: OrderedDict[Hashable, _Client] = OrderedDict()  # answered and not back, most recent last
        self._merging: tuple[Hashable, float] = (None, -inf)  # the partition that waits for another group, until when
        self._merge_again = -inf

    def worth(self, n: int, places: int, fixed: float) -> float:
        """Upper bound: skip holds that would not pay even if every absent client returned now. Seconds, else 0.0."""
        worth = min(len(self._absent), places) * fixed
        return worth if worth > n * BRIEF else 0.0

    def arrived(self, client: Hashable, partition: Hashable, now: float) -> None:
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client()
            if len(self._clients) > REMEMBERED:
                self._absent.pop(self._clients.popitem(last=False)[0], None)
        known.ask(partition, now)
        self._absent.pop(client, None)

    def answered(self, client: Hashable, now: float) -> None:
        """The client got its answer and has no other ticket."""
        known = self._clients.get(client)
        if known is None:
            return
        known.answer(now)
        self._clients.move_to_end(client)
        self._absent[client] = known
        if len(self._absent) > RECENT:
            self._absent.popitem(last=False)

    def in_turns(self, seconds: float, now: float) -> float:
        """Share of the device that the active clients take if each comes in turn, for `seconds`. inf if they are not so
        regular that two of them that once met do not meet again.

        Considers the most recently answered clients until one that has gone; inf for more than `RECENT`, and for none.
        seconds: 0.0 until measured; then inf.
        """
        if seconds <= 0.0:
            return inf
        share = longest = 0.0
        known = (client for client in reversed(self._clients.values()) if client.was_answered)
        for count, client in enumerate(known):
            ordered = client.thinks.ordered
            longest = max(longest, ordered[-1] if ordered else 0.0)
            if client.answered is not None and now - client.answered > 2.0 * longest:
                break
            if count == RECENT or not ordered or client.thinks.spread > IRREGULAR * seconds:
                return inf
            share += seconds / (seconds + ordered[len(ordered) // 2])
        return share or inf

    def hold(
        self, partition: Hashable, now: float, longest: float, queued: int, places: int, fixed: float, freed: bool
    ) -> float:
        """Seconds to hold a batch of the partition, at most `longest`; 0.0 to send at once.

        queued: n. places: how many more may join. fixed: a. freed: whether the device has just become free, after all n
        had come.
        """
        worth = self.worth(queued, places, fixed)
        if longest <= 0.0 or worth <= 0.0:
            return 0.0
        found: list[_Due] = []
        thinkers = 0
        for client in self._absent.values():
            if client.partition == partition:
                thinkers += client.due(now, longest, found)
        if not found:
            return 0.0
        found.sort()
        best = gain = expected = waits = 0.0
        for wait, share, seconds, _ in found:
            if queued * wait >= worth:
                break
            expected += share
            waits += seconds
            g = fixed * (expected if expected < places else places) - waits - queued * wait
            if g > gain + A_TIE:
                best, gain = min(wait + JUST_LATE, longest), g
        if freed and now >= self._merge_again and 0 < thinkers <= places:
            together = _until_nearly_all(found, thinkers)
            if best < together < min(fixed, longest):
                self._merging, self._merge_again = (partition, now + together), now + MERGE_EVERY * fixed
        merging, until = self._merging
        return max(best, until - now) if merging == partition else best


def _until_nearly_all(found: list[_Due], thinkers: int) -> float:
    """Seconds until nearly all clients that think are back, slightly late ones included; inf if unknown."""
    expected = 0.0
    for wait, share, _, thinks in found:
        expected += share * thinks
        if expected >= NEARLY_ALL * thinkers:
            return wait + JUST_LATE
    return inf
