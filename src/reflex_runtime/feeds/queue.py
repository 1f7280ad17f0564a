"""The queue between a source and the stages: it never blocks a camera, and never loses a frame of a file.

One thread puts, one takes, any thread closes. Each side wakes the other; nothing is polled.
"""

from __future__ import annotations

import threading
from collections import deque

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.frame import Frame


class FrameQueue:
    """First in, first out, at most `capacity` frames.

    drop_oldest: True, `put` never waits, and the oldest frame makes room: of capacity 1, the newest wins. False, `put`
        waits for room.
    Every frame put is either taken by `get`, or handed back by `put` or `close`: every lost frame is reported.
    """

    def __init__(self, capacity: int, drop_oldest: bool) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= 4096:
            raise ConfigError(f"FrameQueue.capacity={capacity!r}: must be a whole number in [1, 4096]")
        self._capacity = capacity
        self._drop_oldest = drop_oldest
        self._frames: deque[Frame] = deque()
        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._closed = False

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more. What it holds may still be taken."""
        return self._closed

    def put(self, frame: Frame) -> Frame | None:
        """Add a frame. Returns the one that found no place: the oldest, or this one if the queue is closed, else None.

        Waits only without drop_oldest, for room or for the end.
        """
        with self._filled:
            while not (self._drop_oldest or self._closed) and len(self._frames) >= self._capacity:
                self._room.wait()
            if self._closed:
                return frame
            lost = self._frames.popleft() if len(self._frames) >= self._capacity else None
            self._frames.append(frame)
            self._filled.notify()
            return lost

    def get(self, timeout: float | None = None) -> Frame | None:
        """The oldest frame; waits for one. None when the time is over (seconds), or when it is closed and empty."""
        with self._filled:
            self._filled.wait_for(lambda: self._frames or self._closed, timeout)
            if not self._frames:
                return None
            self._room.notify()
            return self._frames.popleft()

    def close(self, discard: bool = False) -> list[Frame]:
        """Take nothing more and wake both sides, at once.

        What it holds may still be taken; with discard it is handed back instead, and `get` finds nothing.
        """
        with self._filled:
            self._closed = True
            left = list(self._frames) if discard else []
            if discard:
                self._frames.clear()
            self._filled.notify_all()
            self._room.notify_all()
            return left
