"""Bodies of requests: the limit on their bytes in memory, compressed ones, and the decoding of large ones.

Every byte counts from when it was read until its request is answered, so that callers that send half a body, or wait in
the queue with a picture, cannot fill the memory. Large bodies are decoded in a separate thread, one at a time: a
decoder holds the interpreter's lock, and two would stop the event loop twice as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from math import inf
from typing import Any, Final, Protocol, TypeVar

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.errors import BodyTooLarge, ClientError, Overloaded, UnsupportedEncoding

T = TypeVar("T")
log = logging.getLogger("reflex.server")

LARGE: Final = 1024 * 1024  # bytes; what is larger is decoded beside the loop: msgspec reads a megabyte in 1 ms
STALLED: Final = 1.0  # seconds without a byte after which a body may be given up for others


class Seldom:
    """Limits repeated log lines: True for an event if none came in the minute before it."""

    QUIET = 60.0

    def __init__(self) -> None:
        self._last = -inf

    def first(self) -> bool:
        now = time.monotonic()
        before, self._last = self._last, now
        return now - before > self.QUIET


class Reading:
    """Messages whose size is not known before they are there: at most so many are read at a time. While others wait,
    one that is read has STALLED seconds more."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._running: set[asyncio.Timeout] = set()
        self._waiting = 0

    @asynccontextmanager
    async def one(self, until: float) -> AsyncIterator[None]:
        """Read one in this block. TimeoutError when it has not come until then, by the loop's clock."""
        async with asyncio.timeout_at(until) as limit:
            self._waiting += 1
            if self._free.locked():
                self._hurry(self._running)
            try:
                await self._free.acquire()
            finally:
                self._waiting -= 1
            self._running.add(limit)
            if self._waiting:
                self._hurry([limit])
            try:
                yield
            finally:
                self._running.discard(limit)
                self._free.release()

    def _hurry(self, limits: Iterable[asyncio.Timeout]) -> None:
        soon = asyncio.get_running_loop().time() + STALLED
        for limit in limits:
            if not limit.expired():
                limit.reschedule(min(limit.when() or inf, soon))


class Holder(Protocol):
    """A request. held: bytes of its body that are counted."""

    held: int


class Bodies:
    """The bodies of one server.

    most: bytes that may be held in all; a single request may have more. cut_stalled: called with the time when there
    are too many bytes; ends a body that has stopped coming. held: bytes now.
    """

    def __init__(self, most: int, cut_stalled: Callable[[float], None]) -> None:
        self.most, self.held = most, 0
        self._cut_stalled = cut_stalled
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reflex-decode")
        self._full = Seldom()

    def take(self, owner: Holder, size: int) -> None:
        """Count so many bytes more. Raises Overloaded when there are too many."""
        if self.held + size > self.most and self.held > owner.held:
            self._cut_stalled(time.monotonic())
        if self.held + size > self.most and self.held > owner.held:
            if self._full.first():
                log.warning("%d bytes of request bodies are held: more are refused (--max-bodies-mb)", self.held)
            raise Overloaded(
                f"{self.held} bytes of request bodies are held, at most {self.most} may be", retry_after=1.0
            )
        self.held += size
        owner.held += size

    def release(self, owner: Holder) -> None:
        """The body is no longer needed: stop counting it."""
        self.held -= owner.held
        owner.held = 0

    def beside(self, decode: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of `decode`, computed outside the loop."""
        return asyncio.get_running_loop().run_in_executor(self._decoder, _bare, decode, *arguments)

    def close(self) -> None:
        """Forget the bodies that wait to be decoded."""
        self._decoder.shutdown(wait=False, cancel_futures=True)


class Gzip:
    """A compressed body, unfolded part by part. Of neither form more than `most` bytes are taken."""

    def __init__(self, most: int) -> None:
        self._most, self._came, self._made = most, 0, 0
        self._stream = zlib.decompressobj(wbits=31)

    def unfold(self, part: bytes) -> bytes:
        self._came += len(part)
        try:
            made = self._stream.decompress(part, self._most - self._made + 1)
        except zlib.error as error:
            raise ClientError(f"the body is not gzip: {error}") from None
        self._made += len(made)
        if max(self._made, self._came) > self._most:
            raise BodyTooLarge(f"the body has over {self._most} bytes", max_body_bytes=self._most)
        if self._stream.unused_data:
            raise ClientError("the body goes on behind the end of its gzip")
        return made

    def end(self) -> None:
        """ClientError where the last part was not the last."""
        if not self._stream.eof:
            raise ClientError("the body is not gzip: it ends in the middle")


def gzip_of(encoding: bytes, most: int) -> Gzip | None:
    """What unfolds a body with this Content-Encoding, None for a plain one."""
    name = encoding.strip().lower()
    if name in (b"gzip", b"x-gzip"):
        return Gzip(most)
    if name not in (b"identity", b""):
        told = name[:100].decode("ascii", "backslashreplace")
        raise UnsupportedEncoding(f"Content-Encoding: {told}: must be gzip, or left out")
    return None


def _bare(decode: Callable[..., T], *arguments: Any) -> T:
    """Call it so that its exception does not keep the body alive: a future, its error and the error's frames are a
    reference cycle, which lives until the next collection."""
    try:
        return decode(*arguments)
    except ReflexError as error:
        del decode, arguments
        error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904
