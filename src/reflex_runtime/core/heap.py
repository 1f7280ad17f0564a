"""A heap that forgets: entries are discarded lazily, and dead ones never outnumber the living for long."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Smallest key first; `discard` is O(1), `first` and `push` amortised O(log n)."""

    __slots__ = ("_heap", "_keys", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._keys: dict[T, tuple[float, int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: T) -> bool:
        return item in self._keys

    def push(self, key: float, item: T) -> None:
        """Insert the item, or move it to another key. Equal keys leave in order of insertion."""
        self._serial += 1
        self._keys[item] = (key, self._serial)
        heappush(self._heap, (key, self._serial, item))

    def discard(self, item: T) -> None:
        """Forget the item if it is there."""
        if self._keys.pop(item, None) is not None and len(self._heap) > 64 and len(self._heap) > 2 * len(self._keys):
            self._heap = [e for e in self._heap if self._keys.get(e[2]) == (e[0], e[1])]
            heapify(self._heap)

    def first(self) -> tuple[float, T] | None:
        """Smallest key and its item, or None."""
        heap = self._heap
        while heap:
            key, serial, item = heap[0]
            if self._keys.get(item) == (key, serial):
                return key, item
            heappop(heap)
        return None

    def pop(self) -> tuple[float, T] | None:
        """Remove and return the first."""
        top = self.first()
        if top is not None:
            heappop(self._heap)
            del self._keys[top[1]]
        return top

    def ascending(self) -> Iterator[T]:
        """Items in order of key; what was looked at is put back when the iterator closes."""
        seen: list[tuple[float, int, T]] = []
        try:
            while (top := self.first()) is not None:
                entry = heappop(self._heap)
                seen.append(entry)
                yield top[1]
        finally:
            for entry in seen:
                heappush(self._heap, entry)
