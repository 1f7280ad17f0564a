"""A heap that forgets: entries are discarded lazily, and dead ones never outnumber the living for long."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Smallest key first; `discard` is O(1), `first` and `push` amortised O(log n)."""

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._entries: dict[T, tuple[float, int, T]] = {}  # the valid one of each item
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def push(self, key: float, item: T) -> None:
        """Insert the item, or move it to another key. Equal keys leave in order of insertion."""
        self._serial += 1
        entry = self._entries[item] = (key, self._serial, item)
        heappush(self._heap, entry)

    def discard(self, item: T) -> None:
        """Forget the item if it is there."""
        entries, heap = self._entries, self._heap
        if entries.pop(item, None) is not None and len(heap) > 64 and len(heap) > 2 * len(entries):
            self._heap = [entry for entry in heap if entries.get(entry[2]) is entry]
            heapify(self._heap)

    def first(self) -> tuple[float, T] | None:
        """Smallest key and its item, or None."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[0], entry[2]
            heappop(heap)
        return None

    def pop(self) -> tuple[float, T] | None:
        """Remove and return the first."""
        top = self.first()
        if top is not None:
            heappop(self._heap)
            del self._entries[top[1]]
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
