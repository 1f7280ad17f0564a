"""Virtual time: how clients, or partitions, share a device fairly.

Each member has a counter: the device time or cost it was charged, over its weight. The smallest counter is next. A
member that becomes active starts at the smallest active counter, so idle time earns no credit. If the device was idle,
it starts at the largest counter of those that left, so using an idle device costs nothing.

Only the number of members at each counter is kept: many enter at the same one, and the smallest is found without them.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Protocol

from reflex_runtime.core.heap import FEW

CHEAPER, DEARER = 0.75, 1.25  # of a price: what changes it
KINDS = 1024  # whose prices are kept


class ShareHolder(Protocol):
    """A member of a fair share: a client or a partition."""

    counter: float


class Shares:
    """The active members. Only `charge` may change the counter of one. Its methods are amortised O(log active)."""

    __slots__ = ("_active", "_counters", "_members", "_rest")

    def __init__(self) -> None:
        self._active = 0
        self._members: dict[float, int] = {}  # active members by counter
        self._counters: list[float] = []  # a heap of those counters, and of some that no member has any more
        self._rest = 0.0

    def __len__(self) -> int:
        return self._active

    def enter(self, member: ShareHolder) -> None:
        member.counter = max(member.counter, self.floor())
        self._active += 1
        self._add(member.counter)

    def leave(self, member: ShareHolder) -> None:
        self._active -= 1
        self._remove(member.counter)
        self._rest = max(self._rest, member.counter)

    def charge(self, member: ShareHolder, amount: float) -> None:
        """Add to an active member's counter. Negative amounts correct an earlier charge."""
        self._remove(member.counter)
        member.counter += amount
        self._add(member.counter)

    def floor(self) -> float:
        """The smallest active counter; when there is none, the largest of those that left."""
        counters, members = self._counters, self._members
        while counters:
            if counters[0] in members:
                return counters[0]
            heappop(counters)
        return self._rest

    def _add(self, counter: float) -> None:
        members = self._members
        count = members[counter] = members.get(counter, 0) + 1
        if count == 1:
            heappush(self._counters, counter)
            if len(self._counters) > FEW + 2 * len(members):
                self._counters = list(members)
                heapify(self._counters)

    def _remove(self, counter: float) -> None:
        members = self._members
        count = members[counter]
        if count == 1:
            del members[counter]
        else:
            members[counter] = count - 1


class Prices:
    """What requests are charged: their cost in a batch of the usual size, as it was when it last changed by more than a
    quarter.

    Not their part of the batch they were in: a client did not choose that it was small. And not each estimate: equal
    requests with slightly different charges overtake each other by a whole round.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, float] = {}

    def of(self, kind: Hashable, cost: float) -> float:
        """The price of a request of this kind, that costs so much by the present estimate."""
        known = self._known.get(kind, 0.0)
        if not CHEAPER * known <= cost <= DEARER * known:
            if len(self._known) >= KINDS:
                self._known.clear()
            known = self._known[kind] = cost
        return known
