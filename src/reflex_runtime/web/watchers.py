"""Those who watch a server: one snapshot is made for all of them, a few times a second, and only while somebody looks.

A watcher is a GET whose answer does not end: one JSON document a line. One that reads slowly misses snapshots instead
of holding memory, and sees it by their numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.core.events import Event
from reflex_runtime.run.audience import Sink
from reflex_runtime.web.bodies import Seldom
from reflex_runtime.web.errors import PLAIN, TooManyRequests
from reflex_runtime.web.request import HttpRequest

log = logging.getLogger("reflex.server")

EVERY: Final = 0.25  # seconds between two snapshots
MOST: Final = 16  # watchers
LINES: Final = b"application/x-ndjson"


class Fold(Protocol):
    """A sink of events that makes snapshots. now: seconds on the clock of the events."""

    def __call__(self, event: Event) -> None: ...
    def snapshot(self, now: float, server: Mapping[str, Any]) -> Any: ...


class Watchers:
    """The watchers of one server. Everything happens on the loop.

    fold: made when the first watcher comes, from the time. add, remove: it as a sink of the server's events; it is one
    until the last watcher has left. server: what the server itself tells in a snapshot; called before each, so that it
    may have events delivered.
    missed: snapshots that a watcher did not get, because it had not read those before.
    """

    def __init__(
        self,
        fold: Callable[[float], Fold],
        add: Callable[[Sink], None],
        remove: Callable[[Sink], None],
        server: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._make, self._add, self._remove, self._server = fold, add, remove, server
        self._fold: Fold | None = None
        self._count = 0
        self._told = asyncio.Event()  # set, and replaced, with each snapshot
        self._line = b""
        self._number = 0
        self._closed = False
        self._writing = 0  # watchers that do not take what was written
        self._timer: asyncio.TimerHandle | None = None
        self._broken = Seldom()
        self.missed = 0

    def __len__(self) -> int:
        return self._count

    async def watch(self, request: HttpRequest) -> None:
        """Answer with snapshots until the caller leaves. Raises TooManyRequests beyond 16, Closed in a drain."""
        if request.app.closing:  # a page that connects again would keep the drain waiting
            raise Closed("the server is shutting down", retry_after=1.0)
        if self._count >= MOST:
            raise TooManyRequests(f"{MOST} watch already, which is the most", retry_after=10.0)
        self._enter()
        try:
            await request.begin(200, [(b"content-type", LINES), (b"cache-control", b"no-store")], _failed)
            seen = self._number
            while request.method != "HEAD" and not self._closed:
                if seen == self._number:
                    await self._told.wait()
                    continue
                seen = self._number
                self._writing += 1
                try:
                    await request.write(self._line)
                finally:
                    self._writing -= 1
        finally:
            self._leave()
        await request.end()

    def close(self) -> None:
        """End every answer: the server is draining."""
        self._closed = True
        self._told.set()

    def _enter(self) -> None:
        self._count += 1
        if self._fold is None:
            self._fold = self._make(time.monotonic())
            self._add(self._fold)
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._tell)

    def _leave(self) -> None:
        self._count -= 1
        if not self._count:
            assert self._timer is not None
            assert self._fold is not None
            self._timer.cancel()
            self._remove(self._fold)
            self._fold = None

    def _tell(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._tell)
        assert self._fold is not None
        try:
            server = {**self._server(), "watchers": self._count, "missed": self.missed}
            self._line = msgspec.json.encode(self._fold.snapshot(time.monotonic(), server)) + b"\n"
        except Exception:  # the next one may be well
            if self._broken.first():
                log.exception("a snapshot for those who watch could not be made (repeats are not logged)")
            return
        self._number += 1
        self.missed += self._writing
        told, self._told = self._told, asyncio.Event()
        told.set()


def _failed(error: ReflexError) -> bytes:
    """The last line of an answer that fails."""
    return PLAIN(error, "", False).body + b"\n"
