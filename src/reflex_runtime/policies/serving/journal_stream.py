"""GET /diagnostics/journal: the journal of the next seconds, as `--trace` writes it, from a server that runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.web.errors import InvalidRequest, TooManyRequests
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.watchers import LINES
from reflex_runtime.web.websocket import query_of

JOURNAL: Final = "/diagnostics/journal"
SECONDS: Final = 30.0  # if none are asked for
LEAST: Final = 1.0
MOST: Final = 600.0
BEAT: Final = 1.0  # seconds between two blank lines
READERS: Final = 4  # at a time; each has a thread that writes for it
LAST: Final = 0.5  # seconds that a caller has in a drain to take what is left for it


class JournalStreams:
    """The journals that are being sent. Everything happens on the loop but the writing.

    A journal ends with its footer after the seconds that were asked for, or in a drain. A caller that reads slowly
    makes its writer wait; what finds its queue full then is left out, and counted in the footer. One that does not read
    when a drain begins is cut off: the server does not wait for it.
    """

    def __init__(self, runtime: PolicyRuntime) -> None:
        self._runtime = runtime
        self._ends: set[asyncio.Event] = set()
        runtime.on_drain.append(self.close)
        self.route = Route(JOURNAL, self.send, own_pages=True, form=PLAIN)

    def send(self, exchange: Exchange, _: bytes) -> None:
        """Answer with a journal. Raises InvalidRequest, TooManyRequests, NotReady, or Closed in a drain."""
        if exchange.app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        seconds = _seconds(exchange)
        if len(self._ends) >= READERS:
            raise TooManyRequests(f"{READERS} journals are being sent already, which is the most", retry_after=10.0)
        end = asyncio.Event()
        self._ends.add(end)  # at once: others may come in this turn of the loop
        exchange.on_left = end.set
        exchange.app.spawn(exchange, self._sending(exchange, seconds, end))

    def close(self) -> None:
        """End every journal: the server is draining."""
        for end in self._ends:
            end.set()

    async def _sending(self, exchange: Exchange, seconds: float, end: asyncio.Event) -> None:
        try:
            await self._write(exchange, seconds, end)
        finally:
            self._ends.discard(end)
        exchange.end()

    async def _write(self, exchange: Exchange, seconds: float, end: asyncio.Event) -> None:
        runtime = self._runtime
        writer = runtime.journaled(_Pipe(exchange))
        try:
            exchange.begin(200, [(b"content-type", LINES), (b"cache-control", b"no-store")], _failed)
            exchange.app.entered(exchange)
            await _beating(exchange, end, 0.0 if exchange.method == "HEAD" else seconds)
        finally:
            limit = _cut_off(exchange) if exchange.app.closing else None
            runtime.forget_journal(writer)
            await in_thread(writer.close)
            if limit is not None:
                limit.cancel()


def _cut_off(exchange: Exchange) -> asyncio.TimerHandle:
    """At once if its caller has stopped reading, else after a while unless that is cancelled."""
    if not exchange.writable:
        exchange.carrier.abort()
    return asyncio.get_running_loop().call_later(LAST, exchange.carrier.abort)


async def _beating(exchange: Exchange, end: asyncio.Event, seconds: float) -> None:
    """Wait so long, or for the end; meanwhile a blank line every second says that the server lives."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not end.is_set() and (left := until - loop.time()) > 0.0:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(BEAT, left)):
                await end.wait()
        if exchange.writable:
            exchange.write(b"\n")


class _Pipe:
    """The caller, in the place of a file. The writer's thread waits until the caller takes more."""

    def __init__(self, exchange: Exchange) -> None:
        self.path, self.size = Path(JOURNAL), 0
        self._exchange, self._loop = exchange, asyncio.get_running_loop()

    def write(self, lines: bytes) -> None:
        asyncio.run_coroutine_threadsafe(self._send(lines), self._loop).result()
        self.size += len(lines)

    def flush(self) -> None:
        """Every write is sent at once."""

    def close(self) -> None:
        """The exchange ends when the writer has."""

    def abandon(self) -> None:
        """Likewise."""

    async def _send(self, lines: bytes) -> None:
        if not self._exchange.left:
            self._exchange.write(lines)
            await self._exchange.drained()


def _seconds(exchange: Exchange) -> float:
    asked = query_of(exchange.target)
    unknown = [name for name in asked if name != "seconds"]
    if unknown:
        raise InvalidRequest(f"{unknown[0][:100]}: {JOURNAL} takes only seconds", unknown[0][:100])
    try:
        seconds = float(asked.get("seconds", SECONDS))
    except ValueError:
        seconds = 0.0
    if not LEAST <= seconds <= MOST:
        raise InvalidRequest(f"seconds: must be from {LEAST:g} to {MOST:g}", "seconds")
    return seconds


def _failed(error: ReflexError) -> bytes:
    """An answer that fails has no footer, which says enough."""
    return b""
