"""The live view of a server: `/dashboard` and its stream of snapshots, `/feeds` of cameras, and the journal of the next
seconds.

A stream is a GET without end, one JSON document a line. All watchers get the same snapshots, four a second. For a slow
reader none are kept: gaps in their numbers show what it missed. The files of the pages hold no data and need no key;
the streams need one. The page sends it in a header: `EventSource` would put it into the URL, and so into logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import msgspec

from reflex_runtime.core.batch import Event
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.journal_writer import JournalWriter, LineTarget
from reflex_runtime.observe.live import STREAM
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.process import in_thread
from reflex_runtime.web.errors import PLAIN, Headers, TooManyRequests
from reflex_runtime.web.fields import client_errors
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, Seldom

log = logging.getLogger("reflex.server")

EVERY: Final = 0.25  # seconds between two snapshots
MOST: Final = 16  # watchers
HEADERS: Final[Headers] = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class Fold(Protocol):
    """A sink of events that makes snapshots. now: on the clock of the events."""

    def __call__(self, event: Event) -> None: ...
    def snapshot(self, now: float, server: Mapping[str, Any]) -> Any: ...


class Watchers:
    """The watchers of one server, on its loop.

    fold: makes a `Fold` that begins at the given time, for the first watcher. add, remove: make the fold a sink of the
    server's events, until the last watcher leaves. server: the server's own fields of a snapshot; may deliver events.
    """

    def __init__(
        self, fold: Callable[[float], Fold], add: Callable[[Sink], None], remove: Callable[[Sink], None],
        server: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        self._make, self._add, self._remove, self._server = fold, add, remove, server
        self._fold: Fold | None = None
        self._count = 0
        self._changed = asyncio.Event()  # set and replaced with each snapshot
        self._line = b""
        self._number = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._broken = Seldom()

    def __len__(self) -> int:
        return self._count

    async def watch(self, request: HttpRequest) -> None:
        """Answer with snapshots until the caller leaves. Raises TooManyRequests beyond `MOST`, Closed in a drain."""
        request.app.check_open()  # a page that connects again would keep the drain waiting
        if self._count >= MOST:
            raise TooManyRequests(f"{MOST} watchers are connected, the most that may be", retry_after=10.0)
        self._enter()
        try:
            await request.begin(200, HEADERS, _failed)
            seen = self._number
            while request.method != "HEAD" and not self._closed:
                if seen == self._number:
                    await self._changed.wait()
                    continue
                seen = self._number
                await request.write(self._line)
        finally:
            self._leave()
        await request.end()

    def close(self) -> None:
        """End every answer: the server drains."""
        self._closed = True
        self._changed.set()

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
        except Exception:  # the next one may succeed
            if self._broken.first():
                log.exception("a snapshot for watchers could not be made (repeats are not logged)")
            return
        self._number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _failed(error: ReflexError) -> bytes:
    """The last line of an answer that fails."""
    return PLAIN(error, "", False).body + b"\n"


# -- the journal -------------------------------------------------------------------------------------------------------

JOURNAL: Final = "/diagnostics/journal"
BLANK_LINE_S: Final = 1.0  # between two blank lines, by which the caller notices that the server runs
READERS: Final = 4  # at a time; each has a writer thread
LAST: Final = 0.5  # seconds in a drain for a caller to read the rest


class JournalStreams:
    """Sends journals, as `--trace` writes them. begin: adds a journal to the server's; end: removes it.

    A journal ends with its footer after its seconds or in a drain; a failed one has none. A slow caller blocks its
    writer, whose full queue drops lines and counts them in the footer. A drain cuts off a caller that does not read.
    """

    def __init__(self, begin: Callable[[LineTarget], JournalWriter], end: Callable[[JournalWriter], None]) -> None:
        self._begin, self._end = begin, end
        self._limits: set[asyncio.Timeout] = set()
        self._readers = 0
        self.route = Route(JOURNAL, self.send, own_pages=True, operators=True, form=PLAIN)

    async def send(self, request: HttpRequest) -> None:
        """Answer with a journal. Raises InvalidRequest, TooManyRequests, NotReady, or Closed in a drain."""
        request.app.check_open()
        with client_errors(JournalQuery):
            seconds = msgspec.convert(request.query, JournalQuery, strict=False).seconds
        if self._readers >= READERS:
            raise TooManyRequests(f"{READERS} journals are being sent, the most that may be", retry_after=10.0)
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
            if request.app.closing:
                asyncio.get_running_loop().call_later(LAST, pipe.cut)
            await asyncio.shield(closing)
        await pipe.end()

    async def _beat(self, request: HttpRequest, seconds: float) -> None:
        """Send blank lines for so long, or until a drain begins."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds) as limit:
                self._limits.add(limit)
                try:
                    while not request.app.closing:
                        await asyncio.sleep(BLANK_LINE_S)
                        await request.write(b"\n")
                finally:
                    self._limits.discard(limit)

    def close(self) -> None:
        """End every journal: the server drains."""
        for limit in self._limits:
            if not limit.expired():  # an expired one cannot be rescheduled
                limit.reschedule(asyncio.get_running_loop().time())


class _Pipe:
    """The caller in place of a file. The writer's thread waits until the caller reads."""

    def __init__(self, request: HttpRequest) -> None:
        self.path, self.size = Path(JOURNAL), 0
        self.left = False  # the caller has left, or was cut off
        self._request, self._loop = request, asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None

    def write(self, lines: bytes) -> None:
        asyncio.run_coroutine_threadsafe(self._send(lines), self._loop).result()
        self.size += len(lines)

    def flush(self) -> None:
        """Nothing to do: every write is sent at once."""

    def close(self) -> None:
        """Nothing to do: `end` ends the answer."""

    abandon = close

    async def end(self) -> None:
        """End the answer, incomplete for a caller that was cut off."""
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
        """Cut the caller off: drop what it has not read."""
        self.left = True
        if self._sending is not None and not self._sending.done():
            self._sending.cancel()


class JournalQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of GET /diagnostics/journal. seconds: the length of the journal."""

    seconds: Annotated[float, msgspec.Meta(ge=1.0, le=600.0)] = 30.0


# -- the pages ---------------------------------------------------------------------------------------------------------

PAGE: Final = "/dashboard"
GRID: Final = "/feeds"
_FOLDER: Final = Path(__file__).parent / "dashboard"
_FILES: Final = (
    "index.html", "feeds.html", "grid.js", "link.js", "dashboard.js", "strip.js", "feeds.js", "charts.js", "tables.js",
    "uplot.js", "uplot.css", "dashboard.css",
)  # fmt: skip
_KINDS: Final = {".html": b"text/html", ".js": b"text/javascript", ".css": b"text/css"}
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
    """The page of the dashboard, its files and its stream."""
    routes = [Route(STREAM, watchers.watch, own_pages=True, operators=True, form=PLAIN)]
    routes.append(Route(PAGE, partial(_send, "index.html"), open=True))
    return routes + [Route(f"{PAGE}/{name}", partial(_send, name), open=True) for name in _FILES]


def grid_route() -> Route:
    """The page with a picture of every feed."""
    return Route(GRID, partial(_send, "feeds.html"), open=True)


async def _send(name: str, request: HttpRequest) -> HttpResponse:
    kind = _KINDS[Path(name).suffix] + b"; charset=utf-8"
    return HttpResponse(200, (_FOLDER / name).read_bytes(), kind, list(_PAGE_HEADERS))
