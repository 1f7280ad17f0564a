"""What shows a server while it runs: `/dashboard`, the stream of snapshots that it reads, `/feeds` of cameras, and the
journal of the next seconds.

A stream is a GET whose answer does not end: one JSON document a line. One snapshot is made for all who watch, a few
times a second, and only while somebody looks; who reads slowly misses snapshots instead of holding memory, and sees it
by their numbers. The files of the pages hold no data, so they need no key; the streams do, where there is one. The page
sends the key in a header: `EventSource` could send it only in the address, where it would stand in logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from reflex_runtime.core.batch import Event
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.journal_writer import JournalWriter, LineTarget
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.process import in_thread
from reflex_runtime.web.errors import PLAIN, Headers, InvalidRequest, TooManyRequests
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, Seldom

log = logging.getLogger("reflex.server")

EVERY: Final = 0.25  # seconds between two snapshots
MOST: Final = 16  # watchers
HEADERS: Final[Headers] = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
STREAM: Final = "/dashboard/stream"


class Fold(Protocol):
    """A sink of events that makes snapshots. now: seconds on the clock of the events."""

    def __call__(self, event: Event) -> None: ...
    def snapshot(self, now: float, server: Mapping[str, Any]) -> Any: ...


class Watchers:
    """The watchers of one server. Everything happens on the loop.

    fold: made when the first watcher comes, from the time. add, remove: it as a sink of the server's events; it is one
    until the last watcher has left. server: what a snapshot has of the server itself; called before each, so that it
    may have events delivered.
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
        self._timer: asyncio.TimerHandle | None = None
        self._broken = Seldom()

    def __len__(self) -> int:
        return self._count

    async def watch(self, request: HttpRequest) -> None:
        """Answer with snapshots until the caller leaves. Raises TooManyRequests beyond 16, Closed in a drain."""
        request.app.check_open()  # a page that connects again would keep the drain waiting
        if self._count >= MOST:
            raise TooManyRequests(f"{MOST} watch already, which is the most", retry_after=10.0)
        self._enter()
        try:
            await request.begin(200, HEADERS, _failed)
            seen = self._number
            while request.method != "HEAD" and not self._closed:
                if seen == self._number:
                    await self._told.wait()
                    continue
                seen = self._number
                await request.write(self._line)
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
            server = {**self._server(), "watchers": self._count}
            self._line = msgspec.json.encode(self._fold.snapshot(time.monotonic(), server)) + b"\n"
        except Exception:  # the next one may be well
            if self._broken.first():
                log.exception("a snapshot for those who watch could not be made (repeats are not logged)")
            return
        self._number += 1
        told, self._told = self._told, asyncio.Event()
        told.set()


def _failed(error: ReflexError) -> bytes:
    """The last line of an answer that fails."""
    return PLAIN(error, "", False).body + b"\n"

# -- the journal -------------------------------------------------------------------------------------------------------

JOURNAL: Final = "/diagnostics/journal"
SECONDS: Final = 30.0  # if none are asked for
SHORTEST: Final = 1.0
LONGEST: Final = 600.0
BEAT: Final = 1.0  # seconds between two blank lines, by which a caller sees that the server lives
READERS: Final = 4  # at a time; each has a thread that writes for it
LAST: Final = 0.5  # seconds that a caller has in a drain to take what is left for it


class JournalStreams:
    """The journals that are being sent, as `--trace` writes them. Everything happens on the loop but the writing.

    begin: adds a journal to the server's; end: takes it away.

    A journal ends with its footer after its seconds, or in a drain; one that fails has none. A
    caller that reads slowly makes its writer wait; what finds its queue full then is left out, and counted in the
    footer. One that does not read when a drain begins is cut off: the server does not wait for it.
    """

    def __init__(self, begin: Callable[[LineTarget], JournalWriter], end: Callable[[JournalWriter], None]) -> None:
        self._begin, self._end = begin, end
        self._limits: set[asyncio.Timeout] = set()
        self._readers = 0
        self.route = Route(JOURNAL, self.send, own_pages=True, operators=True, form=PLAIN)

    async def send(self, request: HttpRequest) -> None:
        """Answer with a journal. Raises InvalidRequest, TooManyRequests, NotReady, or Closed in a drain."""
        request.app.check_open()
        seconds = _seconds(request)
        if self._readers >= READERS:
            raise TooManyRequests(f"{READERS} journals are being sent already, which is the most", retry_after=10.0)
        pipe = _Pipe(request)
        writer = self._begin(pipe)
        self._readers += 1
        try:
            await request.begin(200, HEADERS)
            await self._beat(request, 0.0 if request.method == "HEAD" else seconds)
        except BaseException:
            pipe.left = True
            raise
        finally:
            self._readers -= 1
            self._end(writer)
            closing = asyncio.ensure_future(in_thread(writer.close))
            if request.app.closing:  # one that does not read is cut off
                asyncio.get_running_loop().call_later(LAST, pipe.cut)
            await asyncio.shield(closing)
        await pipe.end()

    async def _beat(self, request: HttpRequest, seconds: float) -> None:
        """Wait so long, or until a drain begins."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds) as limit:
                self._limits.add(limit)
                try:
                    while not request.app.closing:
                        await asyncio.sleep(BEAT)
                        await request.write(b"\n")
                finally:
                    self._limits.discard(limit)

    def close(self) -> None:
        """End every journal: the server is draining."""
        for limit in self._limits:
            if not limit.expired():  # one whose time is over in this turn of the loop cannot be changed
                limit.reschedule(asyncio.get_running_loop().time())


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
    if not SHORTEST <= seconds <= LONGEST:
        raise InvalidRequest(f"seconds: must be from {SHORTEST:g} to {LONGEST:g}", "seconds")
    return seconds


# -- the pages ---------------------------------------------------------------------------------------------------------

PAGE: Final = "/dashboard"
GRID: Final = "/feeds"
_FOLDER: Final = Path(__file__).parent / "dashboard"
_FILES: Final = {
    "index.html": b"text/html; charset=utf-8",
    "feeds.html": b"text/html; charset=utf-8",
    "grid.js": b"text/javascript; charset=utf-8",
    "link.js": b"text/javascript; charset=utf-8",
    "dashboard.js": b"text/javascript; charset=utf-8",
    "strip.js": b"text/javascript; charset=utf-8",
    "feeds.js": b"text/javascript; charset=utf-8",
    "charts.js": b"text/javascript; charset=utf-8",
    "tables.js": b"text/javascript; charset=utf-8",
    "uplot.js": b"text/javascript; charset=utf-8",
    "uplot.css": b"text/css; charset=utf-8",
    "dashboard.css": b"text/css; charset=utf-8",
}
_POLICY: Final = (
    b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_PAGE_HEADERS: Final = [
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


def dashboard_routes(watchers: Watchers) -> list[Route]:
    """The page, its files and its stream."""
    routes = [Route(STREAM, watchers.watch, own_pages=True, operators=True, form=PLAIN)]
    routes.append(Route(PAGE, partial(_send, "index.html"), open=True))
    return routes + [Route(f"{PAGE}/{name}", partial(_send, name), open=True) for name in _FILES]


def grid_route() -> Route:
    """The page with a picture of every feed."""
    return Route(GRID, partial(_send, "feeds.html"), open=True)


async def _send(name: str, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (_FOLDER / name).read_bytes(), _FILES[name], list(_PAGE_HEADERS))
