"""Which partition of a group takes the next turn.

In this order:

1. partitions where an urgent ticket waits, the one with the oldest ticket first;
2. the partition with the least device time, when its oldest ticket has waited for `patience`;
3. partitions with a deadline at risk, least laxity first, as long as they are within their share of device time;
4. all partitions by device time, the one with the oldest ticket first where it is equal.

A deadline is at risk if another partition's batch could make it late. A partition is within its share up to `CREDIT`
above the least device time of an active one. So deadlines come first within a share, and no partition waits longer than
its share explains.

All orders are heaps that change only with a partition's own tickets: `touched` has the partition, and the next question
updates the heaps. A turn costs O(log partitions), however many wait.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from math import inf
from typing import TypeVar

from reflex_runtime.core.cost import CostModel
from reflex_runtime.core.heap import LazyHeap
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import URGENT, Ticket
from reflex_runtime.core.shares import Shares

T = TypeVar("T", bound=Hashable)

CREDIT = 0.100  # seconds of device time that deadlines at risk may take ahead of a partition's share
NEAREST = 16  # partitions with the earliest deadlines, of which those at risk are taken


class Turns:
    """The active partitions of one group.

    budget: cost of the longest batch another partition may run, in the cost model's unit. patience: seconds.
    touched: partitions whose tickets, device time or pause have changed.
    """

    def __init__(self, cost: CostModel, budget: float, patience: float) -> None:
        self._cost, self._budget, self._patience = cost, budget, patience
        self.shares = Shares()
        self.touched: dict[Partition, None] = {}
        # Those that could take a turn, and of them those where an urgent ticket waits.
        self._by_share: LazyHeap[Partition, tuple[float, int]] = LazyHeap()
        self._urgent: LazyHeap[Partition, float] = LazyHeap()
        self._deadlines: LazyHeap[Partition, float] = LazyHeap()  # the earliest of each
        self._promotions: LazyHeap[Partition, float] = LazyHeap()
        self._pauses: LazyHeap[Partition, float] = LazyHeap()

    def expires_at(self) -> float:
        """The earliest deadline of a waiting or resident ticket; inf when none has one."""
        if self.touched:
            self._refresh()
        return top[0] if (top := self._deadlines.first()) is not None else inf

    def first_to_expire(self) -> Ticket:
        return _first(_first(self._deadlines).deadlines)

    def resumes_at(self) -> float:
        """When the next pause of a partition ends; inf when none is paused."""
        self._refresh()
        return top[0] if (top := self._pauses.first()) is not None else inf

    def resume(self, now: float) -> None:
        """End the pauses that are over."""
        self._refresh()
        while (top := self._pauses.first()) is not None and top[0] <= now:
            top[1].paused_until = -inf
            self.touched[top[1]] = None
            self._refresh()

    def promote(self, now: float) -> int:
        """Count background tickets that waited long enough as default. Returns how many."""
        self._refresh()
        moved = 0
        while (top := self._promotions.first()) is not None and top[0] <= now:
            moved += top[1].promote(now)
            self.touched[top[1]] = None
            self._refresh()
        return moved

    def in_order(self, now: float) -> Iterator[Partition]:
        """The partitions that could take a turn, each once, in the order above."""
        self._refresh()
        if len(self._by_share) == 1:
            top = self._by_share.first()
            assert top is not None
            yield top[1]
            return
        seen: set[Partition] = set()
        for some in (self._urgent.ascending(), self._patient(now), self._at_risk(now), self._by_share.ascending()):
            for partition in some:
                if partition not in seen:
                    seen.add(partition)
                    yield partition

    def _patient(self, now: float) -> Iterator[Partition]:
        top = self._by_share.first()
        if top is not None and (oldest := top[1].oldest()) is not None and now >= oldest.arrived + self._patience:
            yield top[1]

    def _at_risk(self, now: float) -> list[Partition]:
        if self._cost.unit != "seconds":
            return []
        most = self.shares.floor() + CREDIT
        found: list[tuple[float, int, Partition]] = []
        for partition in islice(self._deadlines.ascending(), NEAREST):
            tightest, oldest = _first(partition.deadlines), partition.oldest()
            if oldest is None or partition not in self._by_share or partition.counter > most:
                continue
            laxity = tightest.deadline - now - self._cost.remaining(tightest)
            if laxity < self._budget:
                found.append((laxity, oldest.seq, partition))
        return [partition for _, _, partition in sorted(found)]

    def _refresh(self) -> None:
        touched = self.touched
        while touched:
            partition, _ = touched.popitem()
            oldest = partition.oldest() if partition.paused_until == -inf else None
            first = partition.deadlines.first()
            due = partition.promotions.first()
            self._by_share.put(partition, None if oldest is None else (partition.counter, oldest.seq))
            urgent = oldest is not None and partition.tiers[URGENT].oldest.waiting
            self._urgent.put(partition, oldest.seq if oldest is not None and urgent else None)
            self._deadlines.put(partition, None if first is None else first[0])
            self._promotions.put(partition, None if due is None else due[0])
            self._pauses.put(partition, partition.paused_until if partition.paused_until > -inf else None)


def _first(heap: LazyHeap[T, float]) -> T:
    """The first of a heap that is not empty."""
    top = heap.first()
    assert top is not None
    return top[1]
