"""Virtual time: how clients, or partitions, share a device fairly.

Each member has a counter: the device time or cost it was charged, over its weight. The smallest counter is next. A
member that becomes active starts at the smallest active counter, so idle time earns no credit; after an idle device it
starts at the largest counter that left, so having had the device alone is no debt.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from reflex_runtime.core.heap import LazyHeap


class Member(Protocol):
    """Something with a share."""

    counter: float

    def __hash__(self) -> int: ...


M = TypeVar("M", bound=Member)


class Shares(Generic[M]):
    """The active members. Its methods are amortised O(log active)."""

    __slots__ = ("_active", "_rest")

    def __init__(self) -> None:
        self._active: LazyHeap[M, float] = LazyHeap()  # keys may be smaller than the counters: `floor` corrects them
        self._rest = 0.0

    def __len__(self) -> int:
        return len(self._active)

    def enter(self, member: M) -> None:
        """The member becomes active."""
        member.counter = max(member.counter, self.floor())
        self._active.push(member.counter, member)

    def leave(self, member: M) -> None:
        """The member becomes idle."""
        self._active.discard(member)
        self._rest = max(self._rest, member.counter)

    def charge(self, member: M, amount: float) -> None:
        """Add to an active member's counter. Negative amounts correct an earlier charge."""
        member.counter += amount
        if amount < 0.0:
            self._active.push(member.counter, member)

    def floor(self) -> float:
        """The smallest active counter; when there is none, the largest of those that left."""
        active = self._active
        while (top := active.first()) is not None:
            key, member = top
            if key == member.counter:
                return key
            active.push(member.counter, member)
        return self._rest
