"""Those who look at pictures of feeds: callers of one picture, and callers whose answer goes on until they leave."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from reflex_runtime.feeds.jpeg import PictureSize
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.web.form import Headers
from reflex_runtime.web.request import HttpRequest

PATIENCE: Final = 3.0  # seconds that a caller of /feeds/NAME.jpg waits for the next frame; then it is 204
UNREAD: Final = 10.0  # seconds without reading after which a stream is cut off
NEXT: Final = b"--frame\r\n"  # behind each picture, so that a browser shows it without waiting for the next one
HEADERS: Final[Headers] = [
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),  # pages of other sites may not show it
    (b"x-content-type-options", b"nosniff"),
]


class PictureStream:
    """A caller that gets the pictures of some feeds in one answer. It misses those for which it does not read."""

    def __init__(self) -> None:
        self._views: list[FeedView] = []
        self._parts: list[bytes] = []
        self._busy = self._over = False
        self._told = asyncio.Event()

    async def run(self, request: HttpRequest) -> None:
        """Send pictures until the caller leaves, or there is no feed left. Who does not read for long is cut off."""
        await request.write(NEXT)
        while not self._over:
            await self._told.wait()
            self._told.clear()
            parts, self._parts, self._busy = self._parts, [], True
            async with asyncio.timeout(UNREAD):
                await request.write(b"".join(parts))
            self._busy = False

    def watch(self, view: FeedView) -> None:
        self._views.append(view)
        view.streams.add(self)

    def give(self, part: bytes) -> None:
        """Send a picture, unless the caller has not read those before."""
        if not self._busy:
            self._parts.append(part)
            self._told.set()

    def leave(self, view: FeedView) -> None:
        """A feed is gone. Without any the answer ends."""
        self._views.remove(view)
        if not self._views:
            self.end()

    def end(self) -> None:
        """The caller has left, or the server stops."""
        self._over = True
        self._told.set()
        views, self._views = self._views, []
        for view in views:
            view.streams.discard(self)
            view.look()


class FeedView:
    """One feed in one size, while somebody looks. `came` is called on the feed's thread, everything else on the loop.

    picture: the last one, while it is young enough to be given again. streams: those that get each one. asking: callers
    that wait for the next one.
    """

    def __init__(self, feed: str, size: PictureSize) -> None:
        self.feed, self.size = feed, size
        self.picture: bytes | None = None
        self.streams: set[PictureStream] = set()
        self.asking: set[asyncio.Future[bytes | None]] = set()
        self.task: asyncio.Task[None] | None = None
        self._marked = quote(feed, safe="").encode()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[Result | None] | None = None
        self._hungry = False

    @property
    def watched(self) -> bool:
        """Whether somebody looks."""
        return bool(self.streams or self.asking)

    async def ask(self) -> bytes | None:
        """The next picture; None if none comes in time."""
        asked: asyncio.Future[bytes | None] = self._loop.create_future()
        self.asking.add(asked)
        try:
            async with asyncio.timeout(PATIENCE):
                return await asked
        except TimeoutError:
            return None
        finally:
            self.asking.discard(asked)
            self.look()

    def close(self) -> None:
        """There are no more pictures."""
        self._answer(None)
        for stream in list(self.streams):
            self.streams.discard(stream)
            stream.leave(self)
        if self.task is not None:
            self.task.cancel()

    def end(self) -> None:
        """On any thread: there is no such feed any more."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.close)

    def came(self, result: Result) -> None:
        """The feed has a result."""
        if self._hungry:
            self._hungry = False  # one frame in hand, not all that come
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take, result)

    async def next(self) -> Result | None:
        """The next result; None once nobody looks."""
        if not self.watched:
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
        self._answer(picture)
        head = b"X-Feed: %b\r\nContent-Type: image/jpeg\r\nContent-Length: %d" % (self._marked, len(picture))
        part = b"%b\r\n\r\n%b\r\n%b" % (head, picture, NEXT)
        for stream in list(self.streams):
            stream.give(part)

    def look(self) -> None:
        """Somebody has left."""
        if not self.watched:
            self._take(None)

    def _answer(self, picture: bytes | None) -> None:
        for asked in self.asking:
            if not asked.done():
                asked.set_result(picture)

    def _take(self, result: Result | None) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(result)
