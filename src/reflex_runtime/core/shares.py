"""Virtual time: how clients, or partitions, share a device fairly.

Each member has a counter: the device time or cost it was charged, over its weight. The smallest counter is next. A
member that becomes active starts at the smallest active counter, so idle time earns no credit. If the device was idle,
it starts at the largest counter of those that left, so using an idle device costs nothing.

Counters grow, so a stale entry of the heap is too small, surfaces early and is put right when it does: most charges
touch no heap.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from reflex_runtime.core.heap import FEW

CHEAPER, DEARER = 0.75, 1.25  # of a price: what changes it
KINDS = 1024  # whose prices are kept


class ShareHolder(Protocol):
    """A member of a fair share: a client or a partition.

    standing: its valid entry in the heap, None while it is not active; other entries are garbage.
    """

    counter: float
    standing: Standing | None


Standing = tuple[float, int, ShareHolder]


class Shares:
    """The active members. Amortised O(log active).

    The counter of a member may grow at any time. Only `charge` may make it smaller.
    """

    __slots__ = ("_active", "_heap", "_rest", "_serial")

    def __init__(self) -> None:
        self._active = 0
        self._heap: list[Standing] = []  # (a counter that a member has or had, a number that no other has, the member)
        self._serial = 0
        self._rest = 0.0

    def __len__(self) -> int:
        return self._active

    def enter(self, member: ShareHolder) -> None:
        floor = self.floor()
        if member.counter < floor:
            member.counter = floor
        self._active += 1
        self._push(member)

    def leave(self, member: ShareHolder) -> None:
        self._active -= 1
        member.standing = None
        if member.counter > self._rest:
            self._rest = member.counter

    def charge(self, member: ShareHolder, amount: float) -> None:
        """Add to an active member's counter. Negative amounts correct an earlier charge."""
        member.counter += amount
        if amount < 0.0:
            self._push(member)

    def floor(self) -> float:
        """The smallest active counter; when there is none, the largest of those that left."""
        heap = self._heap
        while heap:
            entry = heap[0]
            counter, serial, member = entry
            if member.standing is not entry:
                heappop(heap)
            elif member.counter == counter:
                return counter
            else:
                member.standing = (member.counter, serial, member)
                heapreplace(heap, member.standing)
        return self._rest

    def _push(self, member: ShareHolder) -> None:
        self._serial += 1
        member.standing = (member.counter, self._serial, member)
        heappush(self._heap, member.standing)
        if len(self._heap) > FEW + 2 * self._active:
            self._heap = [entry for entry in self._heap if entry[2].standing is entry]
            heapify(self._heap)


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
