"""A heap with lazy discards: dead entries are never much more than the live ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
K = TypeVar("K", float, tuple[float, int])

FEW = 8  # dead entries that may stay however few live


class LazyHeap(Generic[T, K]):
    """Smallest key first; `discard` is O(1), `first` and `push` amortised O(log n)."""

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[K, int, T]] = []
        self._entries: dict[T, tuple[K, int, T]] = {}  # the valid one of each item
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def push(self, key: K, item: T) -> None:
        """Insert the item, or move it to another key. Equal keys leave in order of insertion."""
        self._serial += 1
        entry = self._entries[item] = (key, self._serial, item)
        heappush(self._heap, entry)
        if len(self._heap) > FEW + 2 * len(self._entries):
            self._compact()

    def discard(self, item: T) -> None:
        """Forget the item if it is there."""
        if self._entries.pop(item, None) is not None and len(self._heap) > FEW + 2 * len(self._entries):
            self._compact()

    def put(self, item: T, key: K | None) -> None:
        """Set the item's key; None discards it."""
        entry = self._entries.get(item)
        if key is None:
            if entry is not None:
                self.discard(item)
        elif entry is None or entry[0] != key:
            self.push(key, item)

    def _compact(self) -> None:
        entries = self._entries
        self._heap = [entry for entry in self._heap if entries.get(entry[2]) is entry]
        heapify(self._heap)

    def first(self) -> tuple[K, T] | None:
        """Smallest key and its item, or None."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[0], entry[2]
            heappop(heap)
        return None

    def pop(self) -> tuple[K, T] | None:
        """Remove and return the first."""
        top = self.first()
        if top is not None:
            heappop(self._heap)
            del self._entries[top[1]]
        return top

    def ascending(self) -> Iterator[T]:
        """Items in order of key. Nothing may be pushed or discarded meanwhile; O(log k) for the k-th of them."""
        self.first()
        heap, entries = self._heap, self._entries
        ahead = [(heap[0], 0)] if heap else []  # those whose parents have come, with their places
        while ahead:
            entry, at = heappop(ahead)
            if entries.get(entry[2]) is entry:
                yield entry[2]
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(ahead, (heap[child], child))
