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
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import parse_qsl

from reflex_runtime.core.errors import Closed
from reflex_runtime.feeds.jpeg import PictureSize, jpeg_of
from reflex_runtime.feeds.picture_views import HEADERS, FeedView, PictureStream
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.web.bodies import Seldom
from reflex_runtime.web.errors import NotFound, TooManyRequests
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.json import printable
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route

log = logging.getLogger("reflex.feeds")

UNDER: Final = "/feeds/"
ALL: Final = "/feeds.mjpeg"
STREAMS: Final = 16  # callers whose answers go on
TOGETHER: Final = 64  # feeds in one answer
RESTS: Final = 3.0  # times as long as a picture took

SMALL: Final = PictureSize(".jpg", 320, 2.0, 70, ("labels", "then", "text", "masks"))
MIDDLE: Final = PictureSize("", 480, 0.1, 75, ("labels", "scores", "tracker_ids", "then", "text", "masks"))
LARGE: Final = PictureSize(".mjpeg", 960, 0.1, 80, ("labels", "scores", "tracker_ids", "then", "text", "masks"))


class FeedPictures:
    """The pictures of all feeds, and their routes. known: the feeds there are.

    take: a sink for every feed, called on the feeds' threads. Everything else happens on the loop.
    """

    def __init__(self, known: Callable[[], Collection[str]]) -> None:
        self._known = known
        self._views: dict[tuple[str, PictureSize], FeedView] = {}
        self._of: dict[str, tuple[FeedView, ...]] = {}  # by feed
        self._thread = ThreadPoolExecutor(1, "reflex-pictures")
        self._over = threading.Event()
        self._broken = Seldom()
        self.take = self._take  # one object: feeds that share a sink know it by its identity
        self._routes = {
            SMALL.suffix: Route(f"{UNDER}NAME.jpg", self._ask, own_pages=True, form=PLAIN),
            LARGE.suffix: Route(f"{UNDER}NAME.mjpeg", self._watch, own_pages=True, form=PLAIN),
        }
        self.routes = {ALL: Route(ALL, self._watch_some, own_pages=True, form=PLAIN)}

    def _take(self, result: Result) -> None:
        for view in self._of.get(result.feed, ()):
            view.came(result)

    def find(self, path: str) -> Route | None:
        """The route of a picture; None for other paths."""
        if not path.startswith(UNDER):
            return None
        return next((route for suffix, route in self._routes.items() if path.endswith(suffix)), None)

    def gone(self, feed: str) -> None:
        """On any thread: a feed was removed, and nobody waits for its pictures any more."""
        for view in self._of.get(feed, ()):
            view.end()

    def close(self) -> None:
        """End every answer."""
        for view in list(self._views.values()):
            view.close()
        self._over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- who looks -----------------------------------------------------------------------------------------------------

    async def _ask(self, request: HttpRequest) -> HttpResponse:
        """The last small picture if it is younger than two seconds, else the next."""
        self._check(request, [feed := _named(request.path, SMALL)])
        view = self._view(feed, SMALL)
        picture = view.picture or await view.ask()
        return HttpResponse(204 if picture is None else 200, picture or b"", b"image/jpeg", list(HEADERS))

    async def _watch(self, request: HttpRequest) -> None:
        await self._stream(request, [_named(request.path, LARGE)], LARGE)

    async def _watch_some(self, request: HttpRequest) -> None:
        known = self._known()
        names = _asked(request.query_string) or sorted(known)[:TOGETHER]
        there = [name for name in names if name in known]  # a page may not know yet that another one was removed
        await self._stream(request, there or names, MIDDLE)

    async def _stream(self, request: HttpRequest, names: Sequence[str], size: PictureSize) -> None:
        """Answer with the pictures of these feeds until the caller leaves."""
        self._check(request, names)
        if len({stream for view in self._views.values() for stream in view.streams}) >= STREAMS:
            raise TooManyRequests(f"{STREAMS} watch feeds already, which is the most", retry_after=10.0)
        kind = b"multipart/x-mixed-replace; boundary=frame"
        stream = PictureStream()
        if request.method != "HEAD":
            for name in names:
                stream.watch(self._view(name, size))
        try:
            await request.begin(200, [(b"content-type", kind), *HEADERS])
            if request.method != "HEAD":
                await stream.run(request)
        except TimeoutError:
            request.abort()
            return
        finally:
            stream.end()
        await request.end()

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

    def _view(self, feed: str, size: PictureSize) -> FeedView:
        view = self._views.get((feed, size))
        if view is None:
            view = self._views[feed, size] = FeedView(feed, size)
            self._of[feed] = (*self._of.get(feed, ()), view)
            view.task = asyncio.get_running_loop().create_task(self._show(view))
        return view

    # -- pictures ------------------------------------------------------------------------------------------------------

    async def _show(self, view: FeedView) -> None:
        """Make pictures as long as somebody looks."""
        loop = asyncio.get_running_loop()
        try:
            while (result := await view.next()) is not None:
                began = loop.time()
                view.publish(await self._made(result, view.size))
                await asyncio.sleep(began + view.size.every - loop.time())
                view.picture = None
        finally:
            self._forget(view)

    def _forget(self, view: FeedView) -> None:
        if self._views.get((view.feed, view.size)) is not view:
            return
        del self._views[view.feed, view.size]
        left = tuple(other for other in self._of.pop(view.feed) if other is not view)
        if left:
            self._of[view.feed] = left

    async def _made(self, result: Result, size: PictureSize) -> bytes | None:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._make, result, size)
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


def _named(path: str, size: PictureSize) -> str:
    """The feed in a path."""
    return path[len(UNDER) : -len(size.suffix)]


def _asked(query: bytes) -> list[str]:
    """The feeds that a query names, each once."""
    pairs = parse_qsl(query.decode("ascii", "replace"), keep_blank_values=True)
    names = list(dict.fromkeys(value for name, value in pairs if name == "feed"))
    if len(names) > TOGETHER:
        raise invalid("feed", f"feed: {len(names)} are asked for, at most {TOGETHER} may be")
    return names
