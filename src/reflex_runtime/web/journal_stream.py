"""GET /diagnostics/journal: the journal of the next seconds, as `--trace` writes it, from a server that runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import Closed
from reflex_runtime.run.process import in_thread
from reflex_runtime.web.batch_server import BatchServer
from reflex_runtime.web.errors import PLAIN, InvalidRequest, TooManyRequests
from reflex_runtime.web.request import HttpRequest, Route
from reflex_runtime.web.watchers import LINES

JOURNAL: Final = "/diagnostics/journal"
SECONDS: Final = 30.0  # if none are asked for
LEAST: Final = 1.0
MOST: Final = 600.0
BEAT: Final = 1.0  # seconds between two blank lines
READERS: Final = 4  # at a time; each has a thread that writes for it
LAST: Final = 0.5  # seconds that a caller has in a drain to take what is left for it


class JournalStreams:
    """The journals that are being sent. Everything happens on the loop but the writing.

    A journal ends with its footer after the seconds that were asked for, or in a drain; one that fails has none. A
    caller that reads slowly makes its writer wait; what finds its queue full then is left out, and counted in the
    footer. One that does not read when a drain begins is cut off: the server does not wait for it.
    """

    def __init__(self, server: BatchServer) -> None:
        self._server = server
        self._ends: set[asyncio.Event] = set()
        server.on_drain.append(self.close)
        self.route = Route(JOURNAL, self.send, own_pages=True, operators=True, form=PLAIN)

    async def send(self, request: HttpRequest) -> None:
        """Answer with a journal. Raises InvalidRequest, TooManyRequests, NotReady, or Closed in a drain."""
        if request.app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        seconds = _seconds(request)
        if len(self._ends) >= READERS:
            raise TooManyRequests(f"{READERS} journals are being sent already, which is the most", retry_after=10.0)
        pipe = _Pipe(request)
        writer = self._server.journaled(pipe)
        end = asyncio.Event()
        self._ends.add(end)
        try:
            await request.begin(200, [(b"content-type", LINES), (b"cache-control", b"no-store")])
            await _beating(request, end, 0.0 if request.method == "HEAD" else seconds)
        except BaseException:
            pipe.left = True
            raise
        finally:
            self._ends.discard(end)
            self._server.forget_journal(writer)
            closing = asyncio.ensure_future(in_thread(writer.close))
            if request.app.closing:  # one that does not read is cut off
                asyncio.get_running_loop().call_later(LAST, pipe.cut)
            await asyncio.shield(closing)
        await pipe.end()

    def close(self) -> None:
        """End every journal: the server is draining."""
        for end in self._ends:
            end.set()


async def _beating(request: HttpRequest, end: asyncio.Event, seconds: float) -> None:
    """Wait so long, or for the end; meanwhile a blank line every second says that the server lives."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT)
            await request.write(b"\n")

    beats, ending = asyncio.ensure_future(beat()), asyncio.ensure_future(end.wait())
    try:
        await asyncio.wait({beats, ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        beats.cancel()
        ending.cancel()


class _Pipe:
    """The caller, in the place of a file. The writer's thread waits until the caller takes more."""

    def __init__(self, request: HttpRequest) -> None:
        self.path, self.size = Path(JOURNAL), 0
        self.left = False  # nothing can be sent any more
        self._request, self._loop = request, asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None

    def write(self, lines: bytes) -> None:
        asyncio.run_coroutine_threadsafe(self._send(lines), self._loop).result()
        self.size += len(lines)

    def flush(self) -> None:
        """Every write is sent at once."""

    def close(self) -> None:
        """The answer ends when the writer has."""

    def abandon(self) -> None:
        """Likewise."""

    async def end(self) -> None:
        """The answer is complete; that of a caller that was cut off is not."""
        if self.left:
            self._request.abort()
            return
        self._sending = asyncio.current_task()
        await self._request.end()

    async def _send(self, lines: bytes) -> None:
        if not self.left:
            self._sending = asyncio.current_task()
            await self._request.write(lines)

    def cut(self) -> None:
        """Give up what its caller does not take."""
        self.left = True
        if self._sending is not None and not self._sending.done():
            self._sending.cancel()


def _seconds(request: HttpRequest) -> float:
    asked = request.query
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
