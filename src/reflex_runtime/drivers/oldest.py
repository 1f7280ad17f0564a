"""Keys in the order in which they began to wait, such as connections, of which the oldest is closed first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Generic, TypeVar

K = TypeVar("K")


class Oldest(Generic[K]):
    """Keys with the time at which each was put; times never go back. Every call costs the same, whatever their number,
    but for `due`, which costs as much as it returns."""

    def __init__(self) -> None:
        self._since: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def put(self, key: K, now: float) -> None:
        """It waits from now on, whether it did before or not."""
        self._since.pop(key, None)
        self._since[key] = now

    def drop(self, key: K) -> None:
        """It does not wait any more."""
        self._since.pop(key, None)

    def first(self, fits: Callable[[K], bool] = lambda key: True) -> K | None:
        """The one that has waited longest of those that fit."""
        return next(filter(fits, self._since), None)

    @property
    def since(self) -> float | None:
        """When the first of them began to wait."""
        return next(iter(self._since.values()), None)

    def due(self, until: float) -> list[K]:
        """Those that began to wait at that time or before."""
        return [key for key, _ in takewhile(lambda item: item[1] <= until, self._since.items())]

    def all(self) -> list[K]:
        """All of them, the oldest first."""
        return list(self._since)
