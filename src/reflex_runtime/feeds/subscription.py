"""Health events as an iterator. A slow reader delays only itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from reflex_runtime.feeds.health import HealthEvent

LIMIT = 1024  # events kept for a reader


class Events:
    """A subscription: every event since it was made, in order; `for event in events` waits until the runtime stops.

    It keeps `LIMIT` events. Beyond that the oldest is dropped, and `missed` counts it.
    """

    def __init__(self, leave: Callable[[Events], Any] | None = None) -> None:
        self._leave = leave
        self._kept: deque[HealthEvent] = deque()
        self._news = threading.Condition()
        self._closed = False
        self.missed = 0

    def add(self, event: HealthEvent) -> None:
        """Called by the runtime; never waits for the reader."""
        with self._news:
            if self._closed:
                return
            if len(self._kept) >= LIMIT:
                self._kept.popleft()
                self.missed += 1
            self._kept.append(event)
            self._news.notify_all()

    def take(self) -> list[HealthEvent]:
        """What has come since the last look; does not wait."""
        with self._news:
            taken = list(self._kept)
            self._kept.clear()
            return taken

    def next(self, timeout: float | None = None) -> HealthEvent | None:
        """The next event; waits for it. None when the time is over (seconds), or at the end."""
        with self._news:
            self._news.wait_for(lambda: self._kept or self._closed, timeout)
            return self._kept.popleft() if self._kept else None

    def close(self) -> None:
        """End the stream: a reader gets the events that are left, then the end."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._leave is not None:
            self._leave(self)

    def __iter__(self) -> Iterator[HealthEvent]:
        while (event := self.next()) is not None:
            yield event
