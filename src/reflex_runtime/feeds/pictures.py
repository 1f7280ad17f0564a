"""The newest pictures of feeds as JPEG, with what was found drawn on them, made only while somebody looks.

    GET /feeds/NAME.jpg     a small one, at most one in two seconds of each feed, the same for all who ask
    GET /feeds/NAME.mjpeg   larger ones until the caller leaves, at most ten a second, each made once for all

One thread makes them, and rests three times as long as it works: pictures take at most a quarter of a core, and become
fewer beyond that. A caller that does not read misses pictures, and is cut off after ten seconds of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import simplejpeg
from PIL import Image

from reflex_runtime.core.errors import Closed
from reflex_runtime.feeds.draw import annotated
from reflex_runtime.feeds.pipeline import Result
from reflex_runtime.web.connections import Seldom
from reflex_runtime.web.errors import NotFound, TooManyRequests
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.form import PLAIN, Headers
from reflex_runtime.web.json import printable

log = logging.getLogger("reflex.feeds")

UNDER: Final = "/feeds/"
STREAMS: Final = 16  # watchers of /feeds/NAME.mjpeg
PATIENCE: Final = 3.0  # seconds that a caller of /feeds/NAME.jpg waits for the next frame; then it is 204
UNREAD: Final = 10.0  # seconds without reading after which a stream is cut off
RESTS: Final = 3.0  # times as long as a picture took
_NEXT: Final = b"--frame\r\n"  # behind each picture, so that a browser shows it without waiting for the next one
_HEADERS: Final[Headers] = [
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),  # pages of other sites may not show it
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True, slots=True)
class PictureSize:
    """longest: pixels of the longer side at most. every: seconds between two of a feed. drawn: fields of a result."""

    suffix: str
    longest: int
    every: float
    quality: int
    drawn: tuple[str, ...]


SMALL: Final = PictureSize(".jpg", 320, 2.0, 70, ("labels", "text", "masks"))
LARGE: Final = PictureSize(".mjpeg", 960, 0.1, 80, ("labels", "scores", "text", "masks"))


class FeedPictures:
    """The pictures of all feeds, and their routes. known: the feeds there are.

    take: a sink for every feed, called on the feeds' threads. Everything else happens on the loop.
    """

    def __init__(self, known: Callable[[], Container[str]]) -> None:
        self._known = known
        self._views: dict[tuple[str, PictureSize], _FeedView] = {}
        self._of: dict[str, tuple[_FeedView, ...]] = {}  # by feed
        self._thread = ThreadPoolExecutor(1, "reflex-pictures")
        self._over = threading.Event()
        self._broken = Seldom()
        self.take = self._take  # one object: feeds that share a sink know it by its identity
        self._routes = {
            SMALL.suffix: Route(f"{UNDER}NAME.jpg", self._ask, own_pages=True, form=PLAIN),
            LARGE.suffix: Route(f"{UNDER}NAME.mjpeg", self._watch, own_pages=True, form=PLAIN),
        }

    def _take(self, result: Result) -> None:
        for view in self._of.get(result.feed, ()):
            view.came(result)

    def find(self, path: str) -> Route | None:
        """The route of a picture; None for other paths."""
        if not path.startswith(UNDER):
            return None
        return next((route for suffix, route in self._routes.items() if path.endswith(suffix)), None)

    def close(self) -> None:
        """End every answer."""
        for view in self._views.values():
            view.close()
        self._over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- who looks -----------------------------------------------------------------------------------------------------

    def _ask(self, exchange: Exchange, _: bytes) -> None:
        """Answer with the last small picture if it is younger than two seconds, else with the next."""
        view = self._view(exchange, SMALL)
        if view.picture is None:
            view.ask(exchange)
        else:
            exchange.answer(200, view.picture, b"image/jpeg", list(_HEADERS))

    def _watch(self, exchange: Exchange, _: bytes) -> None:
        if sum(len(view.streams) for view in self._views.values()) >= STREAMS:
            raise TooManyRequests(f"{STREAMS} watch feeds already, which is the most", retry_after=10.0)
        view = self._view(exchange, LARGE)
        kind = b"multipart/x-mixed-replace; boundary=frame"
        exchange.begin(200, [(b"content-type", kind), *_HEADERS], lambda error: b"")
        if exchange.method == "HEAD":
            exchange.end()
        else:
            view.watch(exchange)

    def _view(self, exchange: Exchange, size: PictureSize) -> _FeedView:
        if exchange.app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        feed = exchange.path[len(UNDER) : -len(size.suffix)]
        if feed not in self._known():
            raise NotFound(printable(f"there is no feed {feed[:200]}"))
        view = self._views.get((feed, size))
        if view is None:
            view = self._views[feed, size] = _FeedView(size)
            self._of[feed] = (*self._of.get(feed, ()), view)
            view.task = asyncio.get_running_loop().create_task(self._show(feed, view))
        return view

    # -- pictures ------------------------------------------------------------------------------------------------------

    async def _show(self, feed: str, view: _FeedView) -> None:
        """Make pictures as long as somebody looks."""
        loop = asyncio.get_running_loop()
        try:
            while (result := await view.next()) is not None:
                began = loop.time()
                view.publish(await self._made(result, view.size))
                await asyncio.sleep(began + view.size.every - loop.time())
                view.picture = None
        finally:
            del self._views[feed, view.size]
            left = tuple(other for other in self._of.pop(feed) if other is not view)
            if left:
                self._of[feed] = left

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


class _FeedView:
    """One feed in one size, while somebody looks. `came` is called on the feed's thread, everything else on the loop.

    picture: the last one, while it is young enough to be given again. streams: when each last took one. asking: who
    waits for the next one, each with the timer of its patience.
    """

    def __init__(self, size: PictureSize) -> None:
        self.size = size
        self.picture: bytes | None = None
        self.streams: dict[Exchange, float] = {}
        self.asking: dict[Exchange, asyncio.TimerHandle] = {}
        self.task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[Result | None] | None = None
        self._hungry = False

    def ask(self, exchange: Exchange) -> None:
        """Answer with the next picture."""
        self.asking[exchange] = self._loop.call_later(PATIENCE, self._give_up, exchange)
        exchange.on_left = lambda: self._give_up(exchange)

    def watch(self, exchange: Exchange) -> None:
        """Send every picture from now on."""
        self.streams[exchange] = self._loop.time()
        exchange.on_left = lambda: self._end(exchange)
        exchange.write(_NEXT)

    def close(self) -> None:
        for exchange in list(self.asking):
            self._give_up(exchange)
        for exchange in list(self.streams):
            self._end(exchange)
        if self.task is not None:
            self.task.cancel()

    def came(self, result: Result) -> None:
        """The feed has a result."""
        if self._hungry:
            self._hungry = False  # one frame in hand, not all that come
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take, result)

    async def next(self) -> Result | None:
        """The next result; None once nobody looks."""
        if not self.streams and not self.asking:
            return None
        self._next = self._loop.create_future()
        self._hungry = True
        try:
            return await self._next
        finally:
            self._next, self._hungry = None, False

    def publish(self, picture: bytes | None) -> None:
        """Give it to everybody. None: it could not be made."""
        if picture is None:
            return
        self.picture = picture
        for exchange, timer in self.asking.items():
            timer.cancel()
            exchange.on_left = None
            exchange.answer(200, picture, b"image/jpeg", list(_HEADERS))
        self.asking.clear()
        part = b"Content-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n%b" % (len(picture), picture, _NEXT)
        now = self._loop.time()
        for exchange, last in list(self.streams.items()):
            if exchange.writable:
                self.streams[exchange] = now
                exchange.write(part)
            elif now - last > UNREAD:
                exchange.carrier.abort()

    def _give_up(self, exchange: Exchange) -> None:
        """No picture came in time, or its caller has left."""
        self.asking.pop(exchange).cancel()
        exchange.on_left = None
        exchange.answer(204, b"", b"image/jpeg", list(_HEADERS))
        self._look()

    def _end(self, exchange: Exchange) -> None:
        del self.streams[exchange]
        exchange.on_left = None
        exchange.end()
        self._look()

    def _look(self) -> None:
        if not self.streams and not self.asking:
            self._take(None)

    def _take(self, result: Result | None) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(result)


def jpeg_of(result: Result, size: PictureSize) -> bytes:
    """A result's frame as JPEG, with its boxes drawn. Smaller by a whole number, so that little is read of it: rows are
    left out, pixels of a row averaged."""
    image = result.frame.image
    by = max(1, -(-max(image.shape[:2]) // size.longest))
    picture = np.asarray(Image.fromarray(image[::by]).reduce((by, 1)))
    picture = annotated(picture, _smaller(result.value, by, size.drawn))
    picture = np.ascontiguousarray(picture)
    encoded: bytes = simplejpeg.encode_jpeg(picture, size.quality, colorspace="RGB", colorsubsampling="420")
    return encoded


def _smaller(value: Any, by: int, drawn: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a result that are drawn, in pixels of the smaller picture. What has another form is left out."""
    if not isinstance(value, Mapping):
        return {}
    found = {name: value[name] for name in drawn if name in value}
    with suppress(TypeError, ValueError):
        found["boxes"] = np.asarray(value.get("boxes"), dtype=np.float64) / by
    with suppress(TypeError, ValueError, IndexError):
        points = np.asarray(value.get("keypoints"), dtype=np.float64)
        points[..., :2] /= by
        found["keypoints"] = points
    with suppress(TypeError, ValueError, KeyError):
        masks = found.pop("masks", ())
        found["masks"] = [{**mask, "box": [float(v) / by for v in mask["box"]]} for mask in masks]
    return found
