"""The queue of an output: bounded, the newest win, and every item is counted in exactly one place."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, TypeVar

from reflex_runtime.run.device import Clock

OUTPUT_DROPS: Final = {
    "overrun": "newer results took its place in the queue of the output",
    "lost": "the connection was lost while it was sent, or it was tried as often as it may be",
    "refused": "the receiver did not take it",
    "unsent": "the end came before it was sent",
}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSnapshot:
    """One output at one moment: taken == sent + the sum of drops + waiting.

    where: its address, without user, password and query. state: connecting, connected, away or closed. taken: results
    that were given to it. waiting: those that are not sent yet. drops: by reason, see `OUTPUT_DROPS`. retries: times
    that it tried again. error: the last one.
    """

    name: str
    where: str
    state: str
    taken: int = 0
    sent: int = 0
    waiting: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"drops": dict(self.drops)}


class Outbox(Generic[Item]):
    """Items between the feeds' threads, which `put`, and the thread of an output, which takes and settles them.

    capacity: items that wait; those that are taken and not settled yet come on top.
    news: notified when something comes, at the close, and by the output when `ready` may have changed.
    """

    def __init__(self, capacity: int, clock: Clock = time.monotonic) -> None:
        self.news = threading.Condition()
        self._capacity = capacity
        self._clock = clock
        self._items: deque[Item] = deque()
        self._in_hand = 0  # taken, neither sent nor dropped
        self._taken = self._sent = 0
        self._drops = dict.fromkeys(OUTPUT_DROPS, 0)
        self._until: float | None = None  # once it closes: when its time is over
        self._over = False  # everything is counted

    def put(self, item: Item) -> None:
        """Never waits. The oldest item is dropped where there is no room."""
        with self.news:
            self._taken += 1
            if self._until is not None:
                self._drops["unsent"] += 1
                return
            self._items.append(item)
            self._cut()
            self.news.notify_all()

    def take(self, most: int, ready: Callable[[], bool] = lambda: True) -> list[Item]:
        """Up to so many, the oldest first; waits for one, and until it is `ready`. Empty at the end."""
        with self.news:
            while not (self._items and ready()):
                left = self.time_left
                if left is not None and (left <= 0.0 or not self._items):
                    return []
                self.news.wait(left)
            if self._until is not None and self._until <= self._clock():
                return []
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._in_hand += len(taken)
            return taken

    def sent(self, count: int = 1) -> None:
        """Items in hand arrived."""
        self._settle(count)
        with self.news:
            if not self._over:
                self._sent += count

    def drop(self, reason: str, count: int = 1) -> None:
        """Items in hand are given up, for one of `OUTPUT_DROPS`."""
        self._settle(count)
        with self.news:
            if not self._over:
                self._drops[reason] += count

    def back(self, items: Sequence[Item]) -> None:
        """Items in hand wait again, as the oldest ones."""
        self._settle(len(items))
        with self.news:
            if not self._over:
                self._items.extendleft(reversed(items))
                self._cut()

    def pause(self, seconds: float) -> bool:
        """Wait, until it closes at most. Returns whether it closes."""
        with self.news:
            return self.news.wait_for(lambda: self._until is not None, seconds)

    def close(self, timeout: float) -> None:
        """Take nothing more; what waits may be sent for so many seconds. The earlier end counts."""
        with self.news:
            until = self._clock() + timeout
            self._until = until if self._until is None else min(until, self._until)
            self.news.notify_all()

    def end(self) -> int:
        """Count what is left as unsent; how many that are. Later calls of the output's thread count nothing."""
        with self.news:
            left = 0 if self._over else len(self._items) + self._in_hand
            self._over = True
            self._items.clear()
            self._in_hand = 0
            self._drops["unsent"] += left
            return left

    @property
    def time_left(self) -> float | None:
        """Seconds for what waits once it closes; None before."""
        return None if self._until is None else self._until - self._clock()

    def figures(self) -> dict[str, Any]:
        """Its part of an `OutputSnapshot`, all of one moment."""
        with self.news:
            waiting = len(self._items) + self._in_hand
            return {"taken": self._taken, "sent": self._sent, "waiting": waiting, "drops": dict(self._drops)}

    def _settle(self, count: int) -> None:
        with self.news:
            if not self._over:
                self._in_hand -= count
            self.news.notify_all()

    def _cut(self) -> None:
        while len(self._items) > self._capacity:
            self._items.popleft()
            self._drops["overrun"] += 1
