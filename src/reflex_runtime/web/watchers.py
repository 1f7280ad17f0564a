"""Those who watch a server: one snapshot is made for all of them, a few times a second, and only while somebody looks.

A watcher is a GET whose answer does not end: one JSON document a line. One that reads slowly misses snapshots instead
of holding memory, and sees it by their numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.errors import TooManyRequests
from reflex_runtime.web.exchange import Exchange
from reflex_runtime.web.form import PLAIN

log = logging.getLogger("reflex.server")

EVERY: Final = 0.25  # seconds between two snapshots
MOST: Final = 16  # watchers
LINES: Final = b"application/x-ndjson"


class Watchers:
    """The watchers of one server. Everything happens on the loop.

    begin: called when the first one comes. take: the snapshot of this moment, to be written as JSON; its first call is
    one interval after `begin`. end: called when the last one has left.
    missed: snapshots that a watcher did not get, because it had not read those before.
    """

    def __init__(self, begin: Callable[[], None], take: Callable[[], Any], end: Callable[[], None]) -> None:
        self._begin, self._take, self._end = begin, take, end
        self._watching: dict[Exchange, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.missed = 0

    def __len__(self) -> int:
        return len(self._watching)

    def watch(self, exchange: Exchange, _: bytes = b"") -> None:
        """Answer with snapshots until the caller leaves. Raises TooManyRequests beyond 16 watchers."""
        if len(self._watching) >= MOST:
            raise TooManyRequests(f"{MOST} watch already, which is the most", retry_after=10.0)
        exchange.begin(200, [(b"content-type", LINES), (b"cache-control", b"no-store")], _failed)
        if exchange.method == "HEAD":
            exchange.end()
            return
        exchange.on_left = lambda: self._left(exchange)
        if not self._watching:
            self._begin()
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._tell)
        self._watching[exchange] = None

    def close(self) -> None:
        """End every answer: the server is draining."""
        for exchange in list(self._watching):
            exchange.on_left = None
            exchange.end()
            self._forget(exchange)

    def _left(self, exchange: Exchange) -> None:
        self._forget(exchange)
        exchange.app.leave(exchange)

    def _forget(self, exchange: Exchange) -> None:
        del self._watching[exchange]
        if not self._watching:
            assert self._timer is not None
            self._timer.cancel()
            self._end()

    def _tell(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._tell)
        try:
            line = msgspec.json.encode(self._take()) + b"\n"
        except Exception:  # the next one may be well
            log.exception("a snapshot for those who watch could not be made")
            return
        for exchange in list(self._watching):
            if exchange.writable:
                exchange.write(line)
            else:
                self.missed += 1


def _failed(error: ReflexError) -> bytes:
    """The last line of an answer that fails."""
    return PLAIN.refuse(error, "", False).body + b"\n"
