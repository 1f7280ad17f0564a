"""What is kept of many callers, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(OrderedDict[K, V]):
    """A table whose entry that was used least recently is forgotten beyond `most`. forgotten: called with its value."""

    def __init__(self, most: int, forgotten: Callable[[V], object] = lambda value: None) -> None:
        super().__init__()
        self._most, self._forgotten = most, forgotten

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self._forgotten(self.popitem(last=False)[1])

    def use(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made where there is none."""
        value = self.get(key)
        if value is None:
            value = make()
        self[key] = value
        return value
