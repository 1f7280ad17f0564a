"""The newest pictures of feeds as JPEG, with what was found drawn on them, made only while somebody looks.

    GET /feeds/NAME.jpg             a small one, at most one in two seconds of each feed, the same for all who ask
    GET /feeds/NAME.mjpeg           larger ones until the caller leaves, at most ten a second, each made once for all
    GET /feeds.mjpeg?feed=A&feed=B  the same of several feeds in one answer, in a size between; without names, of all

One thread makes them, and rests three times as long as it works: pictures take at most a quarter of a core, and become
fewer beyond that. A caller that does not read misses pictures, and is cut off after ten seconds of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import numpy as np
import simplejpeg
from PIL import Image

from reflex_runtime.core.errors import Closed
from reflex_runtime.feeds.outputs.annotated import annotated
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.web.errors import PLAIN, Headers, NotFound, TooManyRequests
from reflex_runtime.web.fields import invalid, printable
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, Seldom

log = logging.getLogger("reflex.feeds")

STREAMS: Final = 16  # callers whose answers go on
TOGETHER: Final = 64  # feeds in one answer
RESTS: Final = 3.0  # times as long as a picture took
PATIENCE: Final = 3.0  # seconds that a caller of /feeds/NAME.jpg waits for the next frame; then it is 204
UNREAD: Final = 10.0  # seconds without reading after which a stream is cut off
NEXT: Final = b"--frame\r\n"  # behind each picture, so that a browser shows it without waiting for the next one
HEADERS: Final[Headers] = [
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),  # pages of other sites may not show it
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True, slots=True)
class PictureSize:
    """longest: pixels of the longer side at most. every: seconds between two of a feed. drawn: fields of a result."""

    longest: int
    every: float
    quality: int
    drawn: tuple[str, ...] = ("labels", "scores", "tracker_ids", "text", "masks")


_PLACES: Final = ("boxes", "polygons", "keypoints")
SMALL: Final = PictureSize(320, 2.0, 70, ("labels", "text", "masks"))
MIDDLE: Final = PictureSize(480, 0.1, 75)
LARGE: Final = PictureSize(960, 0.1, 80)


class PictureView:
    """One feed in one size, while somebody looks. `came` is called on the feed's thread, everything else on the loop.

    users: those who look. make: makes a picture of a result; None if it has none.
    """

    def __init__(self, feed: str, size: PictureSize, make: Callable[[Result, PictureSize], Any]) -> None:
        self.feed, self.size, self.users = feed, size, 0
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._picture, self._made = b"", -inf  # the newest one, and when its frame came
        self._due = -inf  # when the next one may be made
        self._making: asyncio.Task[None] | None = None
        self._frame: asyncio.Future[Result | None] | None = None
        self._hungry = self._over = False

    async def newest(self, seen: float = -inf) -> tuple[float, bytes] | None:
        """The newest picture, and when its frame came: later than `seen`. None once there is no feed any more."""
        if self._loop.time() >= self._due:  # what there is is too old
            seen = max(seen, self._made)
        while not self._over and self._made <= seen:
            self._making = self._making or self._loop.create_task(self._take())
            await asyncio.shield(self._making)  # others may wait for it, too
        return None if self._over else (self._made, self._picture)

    async def _take(self) -> None:
        """Make a picture of the next frame, for all who wait."""
        try:
            await asyncio.sleep(self._due - self._loop.time())
            self._frame, self._hungry = self._loop.create_future(), True
            if (result := await self._frame) is not None:
                made, self._due = self._loop.time(), self._loop.time() + self.size.every
                if (picture := await self._make(result, self.size)) is not None:
                    self._made, self._picture = made, picture
        finally:
            self._frame = self._making = None

    def came(self, result: Result) -> None:
        """The feed has a result."""
        if self._hungry:
            self._hungry = False  # one frame in hand, not all that come
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._give, result)

    def leave(self, over: bool = False) -> None:
        """Nobody looks any more. over: and nobody can."""
        self._over = self._over or over
        self._give(None)

    def _give(self, result: Result | None) -> None:
        self._hungry = False
        if self._frame is not None and not self._frame.done():
            self._frame.set_result(result)


class FeedPictures:
    """The pictures of all feeds, and their routes. known: the feeds there are.

    take: a sink for every feed, called on the feeds' threads. Everything else happens on the loop.
    """

    def __init__(self, known: Callable[[], Collection[str]]) -> None:
        self._known = known
        self._views: dict[tuple[str, PictureSize], PictureView] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = 0
        self._thread = ThreadPoolExecutor(1, "reflex-pictures")
        self._over = threading.Event()
        self._broken = Seldom()
        self.take = self._take  # one object: feeds that share a sink know it by its identity
        self._one = {
            suffix: Route(f"/feeds/{{name}}{suffix}", run, own_pages=True, form=PLAIN)
            for suffix, run in ((".jpg", self._ask), (".mjpeg", self._watch))
        }
        self.routes = {"/feeds.mjpeg": Route("/feeds.mjpeg", self._watch_some, own_pages=True, form=PLAIN)}

    def _take(self, result: Result) -> None:
        for size in (SMALL, MIDDLE, LARGE):
            if (view := self._views.get((result.feed, size))) is not None:
                view.came(result)

    def find(self, path: str) -> Route | None:
        """The route of a picture; None for other paths."""
        found = (route for suffix, route in self._one.items() if path.startswith("/feeds/") and path.endswith(suffix))
        return next(found, None)

    @property
    def every(self) -> list[Route]:
        """All routes."""
        return [*self._one.values(), *self.routes.values()]

    def gone(self, feed: str) -> None:
        """On any thread: a feed was removed, and nobody waits for its pictures any more."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._end, feed)

    def close(self) -> None:
        """End every answer."""
        self._end()
        self._over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _end(self, feed: str | None = None) -> None:
        for key, view in list(self._views.items()):
            if feed in (None, view.feed):
                del self._views[key]
                view.leave(over=True)

    # -- who looks -----------------------------------------------------------------------------------------------------

    async def _ask(self, request: HttpRequest) -> HttpResponse:
        """The last small picture if it is younger than two seconds, else the next."""
        feed = request.path[len("/feeds/") : -len(".jpg")]
        self._check(request, [feed])
        found = None
        with self._watched(feed, SMALL) as view, suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                found = await view.newest()
        return HttpResponse(*((204, b"") if found is None else (200, found[1])), b"image/jpeg", list(HEADERS))

    async def _watch(self, request: HttpRequest) -> None:
        await self._stream(request, [request.path[len("/feeds/") : -len(".mjpeg")]], LARGE)

    async def _watch_some(self, request: HttpRequest) -> None:
        known = self._known()
        names = _asked(request.query_string) or sorted(known)[:TOGETHER]
        there = [name for name in names if name in known]  # a page may not know yet that another one was removed
        await self._stream(request, there or names, MIDDLE)

    async def _stream(self, request: HttpRequest, names: Sequence[str], size: PictureSize) -> None:
        """Answer with the pictures of these feeds until the caller leaves, or there is no such feed any more."""
        self._check(request, names)
        if self._streams >= STREAMS:
            raise TooManyRequests(f"{STREAMS} watch feeds already, which is the most", retry_after=10.0)
        self._streams += 1
        try:
            with ExitStack() as watching:
                views = [watching.enter_context(self._watched(name, size)) for name in names]
                kind = b"multipart/x-mixed-replace; boundary=frame"
                await request.begin(200, [(b"content-type", kind), *HEADERS])
                if request.method != "HEAD":
                    await request.write(NEXT)
                    await _send(request, views)
            await request.end()
        except TimeoutError:  # it does not read
            request.abort()
        finally:
            self._streams -= 1

    @contextmanager
    def _watched(self, feed: str, size: PictureSize) -> Iterator[PictureView]:
        """The view of a feed; kept until its picture is too old to be given to the next one who looks."""
        self._loop = asyncio.get_running_loop()
        key = (feed, size)
        view = self._views[key] = self._views.get(key) or PictureView(feed, size, self._made)
        view.users += 1
        try:
            yield view
        finally:
            view.users -= 1
            if not view.users:
                view.leave()
                self._loop.call_later(size.every, self._forget, view)

    def _forget(self, view: PictureView) -> None:
        if not view.users and self._views.get((view.feed, view.size)) is view:
            del self._views[view.feed, view.size]

    def _check(self, request: HttpRequest, names: Sequence[str]) -> None:
        """Raise what stands against an answer."""
        if request.app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        if not names:
            raise NotFound("there are no feeds")
        known = self._known()
        for name in names:
            if name not in known:
                raise NotFound(printable(f"there is no feed {name[:200]}"))

    # -- pictures ------------------------------------------------------------------------------------------------------

    async def _made(self, result: Result, size: PictureSize) -> bytes | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, result, size)
        except Exception:  # such as a frame of a form that no picture has
            if self._broken.first():
                log.exception("%s: a picture could not be made (repeats are not logged)", result.feed)
            return None

    def _make(self, result: Result, size: PictureSize) -> bytes:
        began = time.thread_time()
        try:
            return jpeg_of(result, size)
        finally:
            self._over.wait(RESTS * (time.thread_time() - began))


async def _send(request: HttpRequest, views: Sequence[PictureView]) -> None:
    """Send every new picture; what is made while the caller does not read is left out. TimeoutError after `UNREAD`."""
    waits = {asyncio.ensure_future(view.newest()): view for view in views}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            parts = []
            for wait in done:
                view = waits.pop(wait)
                if (found := wait.result()) is not None:
                    made, picture = found
                    name = quote(view.feed, safe="").encode()
                    head = b"X-Feed: %b\r\nContent-Type: image/jpeg\r\nContent-Length: %d" % (name, len(picture))
                    parts.append(b"%b\r\n\r\n%b\r\n%b" % (head, picture, NEXT))
                    waits[asyncio.ensure_future(view.newest(made))] = view
            async with asyncio.timeout(UNREAD):
                await request.write(b"".join(parts))
    finally:
        for wait in waits:
            wait.cancel()


def jpeg_of(result: Result, size: PictureSize) -> bytes:
    """A result's frame as JPEG, with its boxes drawn. Smaller by a whole number, so that little is read of it: rows are
    left out, pixels of a row averaged."""
    image = result.frame.image
    by = max(1, -(-max(image.shape[:2]) // size.longest))
    picture = np.asarray(Image.fromarray(image[::by]).reduce((by, 1)))
    value = result.value if isinstance(result.value, Mapping) else {}
    drawn = {name: value[name] for name in (*_PLACES, *size.drawn) if name in value}
    picture = np.ascontiguousarray(annotated(picture, drawn, by=by))
    encoded: bytes = simplejpeg.encode_jpeg(picture, size.quality, colorspace="RGB", colorsubsampling="420")
    return encoded


def _asked(query: bytes) -> list[str]:
    """The feeds that a query names, each once."""
    pairs = parse_qsl(query.decode("ascii", "replace"), keep_blank_values=True)
    names = list(dict.fromkeys(value for name, value in pairs if name == "feed"))
    if len(names) > TOGETHER:
        raise invalid("feed", f"feed: {len(names)} are asked for, at most {TOGETHER} may be")
    return names
