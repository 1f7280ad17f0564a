"""Those who look at pictures of feeds: callers of one picture, and callers whose answer goes on until they leave."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from reflex_runtime.feeds.jpeg import PictureSize
from reflex_runtime.feeds.pipeline import Result
from reflex_runtime.web.exchange import Exchange
from reflex_runtime.web.form import Headers

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

    def __init__(self, exchange: Exchange, now: float) -> None:
        self.exchange = exchange
        self._read = now  # when it last took a picture
        self._views: list[FeedView] = []
        exchange.on_left = self.end
        exchange.write(NEXT)

    def watch(self, view: FeedView) -> None:
        self._views.append(view)
        view.streams.add(self)

    def give(self, part: bytes, now: float) -> None:
        """Send a picture, unless the caller has not read those before."""
        if self.exchange.writable:
            self._read = now
            self.exchange.write(part)
        elif now - self._read > UNREAD:
            self.exchange.carrier.abort()

    def leave(self, view: FeedView) -> None:
        """A feed is gone. Without any the answer ends."""
        self._views.remove(view)
        if not self._views:
            self.end()

    def end(self) -> None:
        """The caller has left, or the server stops."""
        views, self._views = self._views, []
        for view in views:
            view.streams.discard(self)
            view.look()
        self.exchange.on_left = None
        self.exchange.end()


class FeedView:
    """One feed in one size, while somebody looks. `came` is called on the feed's thread, everything else on the loop.

    picture: the last one, while it is young enough to be given again. streams: those that get each one. asking: who
    waits for the next one, each with the timer of its patience.
    """

    def __init__(self, feed: str, size: PictureSize) -> None:
        self.feed, self.size = feed, size
        self.picture: bytes | None = None
        self.streams: set[PictureStream] = set()
        self.asking: dict[Exchange, asyncio.TimerHandle] = {}
        self.task: asyncio.Task[None] | None = None
        self._marked = quote(feed, safe="").encode()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[Result | None] | None = None
        self._hungry = False

    @property
    def watched(self) -> bool:
        """Whether somebody looks."""
        return bool(self.streams or self.asking)

    def ask(self, exchange: Exchange) -> None:
        """Answer with the next picture."""
        self.asking[exchange] = self._loop.call_later(PATIENCE, self._give_up, exchange)
        exchange.on_left = lambda: self._give_up(exchange)

    def close(self) -> None:
        """There are no more pictures."""
        for exchange in list(self.asking):
            self._give_up(exchange)
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
        for exchange, timer in self.asking.items():
            timer.cancel()
            exchange.on_left = None
            exchange.answer(200, picture, b"image/jpeg", list(HEADERS))
        self.asking.clear()
        head = b"X-Feed: %b\r\nContent-Type: image/jpeg\r\nContent-Length: %d" % (self._marked, len(picture))
        part, now = b"%b\r\n\r\n%b\r\n%b" % (head, picture, NEXT), self._loop.time()
        for stream in list(self.streams):
            stream.give(part, now)

    def look(self) -> None:
        """Somebody has left."""
        if not self.watched:
            self._take(None)

    def _give_up(self, exchange: Exchange) -> None:
        """No picture came in time, or its caller has left."""
        self.asking.pop(exchange).cancel()
        exchange.on_left = None
        exchange.answer(204, b"", b"image/jpeg", list(HEADERS))
        self.look()

    def _take(self, result: Result | None) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(result)
