"""The newest pictures of feeds as JPEG, with their results drawn on them, made only while somebody watches.

    GET /feeds/NAME.jpg             a small picture; each feed makes at most one in two seconds
    GET /feeds/NAME.mjpeg           large pictures until the caller leaves, at most ten a second
    GET /feeds.mjpeg?feed=A&feed=B  smaller ones of several feeds in one answer; without names, of the first 64 feeds

Each picture is made once for all callers. One thread makes them. It rests three times as long as it works, so it takes
at most a quarter of a core. A caller that does not read misses pictures, and is cut off after ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final
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

STREAMS: Final = 16  # most streams at a time
TOGETHER: Final = 64  # most feeds in one answer
RESTS: Final = 3.0  # the rest after a picture, as a multiple of its CPU time
SOON: Final = 0.02  # seconds between two checks for the next frame of /feeds/NAME.jpg
PATIENCE: Final = 3.0  # seconds that /feeds/NAME.jpg waits for a frame; then the answer is 204
UNREAD: Final = 10.0  # seconds that a caller of a stream may leave a picture unread
NEXT: Final = b"--frame\r\n"  # follows each picture at once: a browser shows a picture when this arrives
HEADERS: Final[Headers] = [
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),  # pages of other sites may not show it
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True, slots=True)
class PictureSize:
    """longest: most pixels of the longer side. every: seconds between two pictures. drawn: fields, with `_PLACES`."""

    longest: int
    every: float
    quality: int
    drawn: tuple[str, ...] = ("labels", "scores", "tracker_ids", "text", "masks")


_PLACES: Final = ("boxes", "polygons", "keypoints")
SMALL: Final = PictureSize(320, 2.0, 70, ("labels", "text", "masks"))
MIDDLE: Final = PictureSize(480, 0.1, 75)
LARGE: Final = PictureSize(960, 0.1, 80)


@dataclass(frozen=True, slots=True)
class MadePicture:
    """number: of its result. due: loop time of the next one. task: gives the JPEG, or None if it cannot be made."""

    number: int
    due: float
    task: asyncio.Task[bytes | None]


class FeedPictures:
    """The pictures of all feeds, and their routes. known: the names of the feeds.

    take: a sink for every feed, called on the feeds' threads. Everything else runs on the loop.
    """

    def __init__(self, known: Callable[[], Collection[str]]) -> None:
        self._known = known
        self._viewers: Counter[str] = Counter()  # callers by feed
        self._newest: dict[str, tuple[int, Result]] = {}  # the newest result of each watched feed, with a number
        self._numbers = count()
        self._made: dict[tuple[str, PictureSize], MadePicture] = {}
        self._streams = 0
        self._thread = ThreadPoolExecutor(1, "reflex-pictures")
        self._over = threading.Event()
        self._broken = Seldom()
        self.take = self._take  # one object: a shared sink is recognised by its identity
        self._one = {
            suffix: Route(f"/feeds/{{name}}{suffix}", run, own_pages=True, form=PLAIN)
            for suffix, run in ((".jpg", self._answer_jpeg), (".mjpeg", self._answer_stream))
        }
        self.routes = {"/feeds.mjpeg": Route("/feeds.mjpeg", self._answer_grid, own_pages=True, form=PLAIN)}

    def _take(self, result: Result) -> None:
        if result.feed in self._viewers:
            self._newest[result.feed] = next(self._numbers), result
            if result.feed not in self._viewers:  # the last caller left between the two lines above
                self._newest.pop(result.feed, None)

    def find(self, path: str) -> Route | None:
        """The route of a picture; None for other paths."""
        found = (route for suffix, route in self._one.items() if path.startswith("/feeds/") and path.endswith(suffix))
        return next(found, None)

    @property
    def every(self) -> list[Route]:
        """All routes."""
        return [*self._one.values(), *self.routes.values()]

    def close(self) -> None:
        """End every answer."""
        self._over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _answer_jpeg(self, request: HttpRequest) -> HttpResponse:
        """Answer with the last small picture if it was made less than two seconds ago, else with the next one."""
        feed, found = request.path[len("/feeds/") : -len(".jpg")], None
        self._check(request, [feed])
        with self._viewing([feed]):
            for _ in range(round(PATIENCE / SOON)):
                if (found := await self._picture(feed, SMALL)) is not None or self._over.is_set():
                    break
                await asyncio.sleep(SOON)
        return HttpResponse(*((204, b"") if found is None else (200, found[1])), b"image/jpeg", list(HEADERS))

    async def _answer_stream(self, request: HttpRequest) -> None:
        await self._stream(request, [request.path[len("/feeds/") : -len(".mjpeg")]], LARGE)

    async def _answer_grid(self, request: HttpRequest) -> None:
        known = self._known()
        names = _named_feeds(request.query_string) or sorted(known)[:TOGETHER]
        there = [name for name in names if name in known]  # an open page may still name a removed feed
        await self._stream(request, there or names, MIDDLE)

    async def _stream(self, request: HttpRequest, names: Sequence[str], size: PictureSize) -> None:
        """Answer with the pictures of these feeds until the caller leaves, or all of the feeds are removed."""
        self._check(request, names)
        if self._streams >= STREAMS:
            raise TooManyRequests(f"{STREAMS} streams of pictures are open, which is the most", retry_after=10.0)
        self._streams += 1
        try:
            with self._viewing(names):
                kind = b"multipart/x-mixed-replace; boundary=frame"
                await request.begin(200, [(b"content-type", kind), *HEADERS])
                if request.method != "HEAD":
                    await request.write(NEXT)
                    await self._send(request, names, size)
            await request.end()
        except TimeoutError:  # the caller does not read
            request.abort()
        finally:
            self._streams -= 1

    async def _send(self, request: HttpRequest, names: Sequence[str], size: PictureSize) -> None:
        """Send new pictures, except those that come while the caller does not read: TimeoutError after `UNREAD`."""
        seen: dict[str, int] = {}
        while (there := [name for name in names if name in self._known()]) and not self._over.is_set():
            for name in there:
                if (found := await self._picture(name, size, seen.get(name, -1))) is None:
                    continue
                seen[name], picture = found
                head = b"X-Feed: %b\r\nContent-Type: image/jpeg\r\nContent-Length: %d"
                head %= quote(name, safe="").encode(), len(picture)
                async with asyncio.timeout(UNREAD):
                    await request.write(b"%b\r\n\r\n%b\r\n%b" % (head, picture, NEXT))
            await asyncio.sleep(size.every)

    @contextmanager
    def _viewing(self, feeds: Sequence[str]) -> Iterator[None]:
        """Inside, the newest result of each of these feeds is kept."""
        self._viewers.update(feeds)
        try:
            yield
        finally:
            self._viewers.subtract(feeds)
            for feed in feeds:
                if not self._viewers[feed]:
                    del self._viewers[feed]
                    self._newest.pop(feed, None)

    def _check(self, request: HttpRequest, names: Sequence[str]) -> None:
        """Raise Closed at a shutdown, and NotFound if there are no feeds or not all of these. Forget removed feeds."""
        if request.app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        if not names:
            raise NotFound("there are no feeds")
        known = self._known()
        self._made = {key: made for key, made in self._made.items() if key[0] in known}
        for name in names:
            if name not in known:
                raise NotFound(printable(f"there is no feed {name[:200]}"))

    # -- pictures ------------------------------------------------------------------------------------------------------

    async def _picture(self, feed: str, size: PictureSize, seen: int = -1) -> tuple[int, bytes] | None:
        """A picture of a later result than number `seen`, after the number of its result. None if there is none now."""
        loop, key = asyncio.get_running_loop(), (feed, size)
        made = self._made.get(key)
        if made is None or loop.time() >= made.due:  # make the next one
            number, result = self._newest.get(feed, (-1, None))
            if result is None or (made is not None and number <= made.number):
                return None
            task = loop.create_task(self._jpeg(result, size))
            made = self._made[key] = MadePicture(number, loop.time() + size.every, task)
        if made.number <= seen or (picture := await asyncio.shield(made.task)) is None:
            return None
        return made.number, picture

    async def _jpeg(self, result: Result, size: PictureSize) -> bytes | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, result, size)
        except Exception:  # such as a frame that is no picture; also after `close`
            if not self._over.is_set() and self._broken.first():
                log.exception("%s: a picture could not be made (repeats are not logged)", result.feed)
            return None

    def _make(self, result: Result, size: PictureSize) -> bytes:
        began = time.thread_time()
        try:
            return jpeg_of(result, size)
        finally:
            self._over.wait(RESTS * (time.thread_time() - began))


def jpeg_of(result: Result, size: PictureSize) -> bytes:
    """A result's frame as JPEG with its boxes drawn, reduced by a whole factor: of so many rows one is kept, and of a
    row so many pixels are averaged."""
    image = result.frame.image
    by = max(1, -(-max(image.shape[:2]) // size.longest))
    picture = np.asarray(Image.fromarray(image[::by]).reduce((by, 1)))
    value = result.value if isinstance(result.value, Mapping) else {}
    drawn = {name: value[name] for name in (*_PLACES, *size.drawn) if name in value}
    picture = np.ascontiguousarray(annotated(picture, drawn, by=by))
    encoded: bytes = simplejpeg.encode_jpeg(picture, size.quality, colorspace="RGB", colorsubsampling="420")
    return encoded


def _named_feeds(query: bytes) -> list[str]:
    """The feeds that a query names, each once."""
    pairs = parse_qsl(query.decode("ascii", "replace"), keep_blank_values=True)
    names = list(dict.fromkeys(value for name, value in pairs if name == "feed"))
    if len(names) > TOGETHER:
        raise invalid("feed", f"feed: {len(names)} are named, at most {TOGETHER} may be")
    return names
