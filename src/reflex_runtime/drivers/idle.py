"""Waiting until a driver has nothing left to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Idle:
    """For a coroutine that waits until there is nothing left. idle: whether that is so now."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        self._idle = idle
        self._reached: asyncio.Event | None = None  # made when something waits: most of the time nothing does

    def look(self) -> None:
        """To be called when it may have become so."""
        if self._reached is not None and self._idle():
            self._reached.set()

    async def wait(self, timeout: float) -> bool:
        """Wait until it is so, `timeout` seconds at most. Returns whether it is."""
        if timeout > 0 and not self._idle():
            self._reached = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await self._reached.wait()
            except TimeoutError:
                pass
        return self._idle()
