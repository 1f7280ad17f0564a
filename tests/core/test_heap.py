"""The heap that forgets, against a sorted list."""

from __future__ import annotations

from random import Random

import pytest

from reflex_runtime.core import order
from reflex_runtime.core.order import FEW, LazyHeap


@pytest.mark.parametrize("shown", [order.SORTED, 0], ids=["sorted", "off the heap"])
def test_the_heap_is_a_sorted_list_that_can_forget(shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "SORTED", shown)
    random = Random(31)
    heap: LazyHeap[int, float] = LazyHeap()
    entries: dict[int, tuple[float, int]] = {}
    for serial in range(4000):
        item = random.randrange(60)
        match random.randrange(4):
            case 0 | 1:
                key = float(random.randrange(20))
                heap.push(key, item)
                entries[item] = (key, serial)
            case 2:
                heap.discard(item)
                entries.pop(item, None)
            case _ if random.random() < 0.3 and entries:
                first = min(entries, key=lambda i: entries[i])
                heap.discard(first)
                del entries[first]
        ordered = sorted(entries, key=lambda i: entries[i])
        assert len(heap) == len(ordered)
        assert (item in heap) is (item in entries)
        assert heap.first() == ((entries[ordered[0]][0], ordered[0]) if ordered else None)
        if serial % 50 == 0:
            assert list(heap.ascending()) == [(entries[item][0], item) for item in ordered]
            assert set(heap) == set(ordered)


@pytest.mark.parametrize("shown", [order.SORTED, 0], ids=["sorted", "off the heap"])
def test_looking_ahead_changes_nothing_even_when_it_stops_early(shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "SORTED", shown)
    heap: LazyHeap[str, float] = LazyHeap()
    for key, item in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        heap.push(key, item)
    ahead = heap.ascending()
    assert [next(ahead), next(ahead)] == [(1.0, "a"), (2.0, "b")]
    del ahead
    assert list(heap.ascending()) == [(1.0, "a"), (2.0, "b"), (3.0, "c")]


def test_what_is_forgotten_without_anything_new_leaves_the_heap_too() -> None:
    heap: LazyHeap[int, float] = LazyHeap()
    for i in range(1000):
        heap.push(float(i), i)
    for i in range(999, 4, -1):
        heap.discard(i)
    assert len(heap) == 5
    assert len(heap._heap) <= 2 * 5 + FEW
