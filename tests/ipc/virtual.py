"""An event loop in virtual time, for tests that have both ends of a connection on it."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(timeout and 0)  # what was written on this loop can be read at once
        self.loop.now += 0.0 if found else timeout or 0.0
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """now: passes by a microsecond with each look at it, and to the next timer when nothing is left to do."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        self.now += 1e-6
        return self.now
