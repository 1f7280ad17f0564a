"""Bodies of requests: the limit on their bytes in memory, and the decoding of large ones.

Every byte counts from when it was read until its request is answered, so that callers that send half a body, or wait in
the queue with a picture, cannot fill the memory. Large bodies are decoded in a separate thread, one at a time: a
decoder holds the interpreter's lock, and two would stop the event loop twice as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.connections import Connections, Seldom
from reflex_runtime.web.errors import Overloaded

T = TypeVar("T")
log = logging.getLogger("reflex.server")

LARGE = 128 * 1024  # bytes; what is larger is decoded beside the loop


class Holder(Protocol):
    """A request. held: bytes of its body that are counted."""

    held: int


class Bodies:
    """The bodies of one server.

    most: bytes that may be held in all; a single request may have more. connections: ends a connection with a stalled
    body when there are too many bytes. held: bytes now.
    """

    def __init__(self, most: int, connections: Connections) -> None:
        self.most, self.held = most, 0
        self._connections = connections
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reflex-decode")
        self._full = Seldom()
        self._line: deque[Callable[[], None]] = deque()

    def line_up(self, read: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call `read` in a later turn of the loop: each turn reads one connection with a large body."""
        if not self._line:
            loop.call_soon(self._read_one, loop)
        self._line.append(read)

    def _read_one(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._line[0]()  # may line up again
        finally:
            self._line.popleft()
            if self._line:
                loop.call_soon(self._read_one, loop)

    def take(self, owner: Holder, size: int) -> None:
        """Count so many bytes more. Raises Overloaded when there are too many."""
        if self.held + size > self.most and self.held > owner.held:
            self._connections.cut_stalled()
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

    def keep(self, owner: Holder, size: int) -> None:
        """Count only this many bytes of it from now on."""
        self.held -= owner.held - size
        owner.held = size

    def beside(self, decode: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of `decode`, computed outside the loop."""
        return asyncio.get_running_loop().run_in_executor(self._decoder, _bare, decode, *arguments)

    def close(self) -> None:
        """Forget the bodies that wait to be decoded."""
        self._decoder.shutdown(wait=False, cancel_futures=True)


def _bare(decode: Callable[..., T], *arguments: Any) -> T:
    """Call it so that its exception does not keep the body alive: a future, its error and the error's frames are a
    reference cycle, which lives until the next collection."""
    try:
        return decode(*arguments)
    except ReflexError as error:
        del decode, arguments
        error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904
