"""The outputs of one request over time, for one reader.

Producers push on the event loop and never wait. A subclass bounds the memory: its hooks are called when outputs were
pushed and when they were taken, and it holds the producer of this stream alone.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from typing import Generic, Self, TypeVar

from reflex_runtime.core.errors import Cancelled, ReflexError

T = TypeVar("T")

_CLOSED = "closed before all of it was read"


class Stream(Generic[T]):
    """An async iterator of outputs. One that ends with an error raises it here, after what had come until then.

    A reader that stops before the end calls `close`. bell: set whenever there is something to read, for a reader of
    several streams. ended: whether no more will come; what came may still be unread.
    """

    __slots__ = ("_bell", "_closed", "_error", "_outputs", "ended")

    def __init__(self, bell: asyncio.Event | None = None) -> None:
        self._bell = bell or asyncio.Event()
        self._outputs: deque[T] = deque()
        self._error: ReflexError | None = None
        self._closed = self.ended = False

    # -- for the reader ------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Outputs that wait for the reader."""
        return len(self._outputs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._outputs and not await self._more():
            raise StopAsyncIteration
        output = self._outputs.popleft()
        self._taken(1)
        return output

    async def read(self) -> list[T]:
        """Everything that has come, at least one output; empty at the end."""
        return self.take() if self._outputs or await self._more() else []

    def take(self, most: int | None = None) -> list[T]:
        """What has come, at most so many, without waiting. Raises the error of a stream that ended with one and is
        read."""
        if not self._outputs and self._error is not None:
            raise copy.copy(self._error)  # the traceback of a raised error holds this stream: avoid a reference cycle
        if most is None or most >= len(self._outputs):
            outputs = list(self._outputs)
            self._outputs.clear()
        else:
            outputs = [self._outputs.popleft() for _ in range(most)]
        if outputs:
            self._taken(len(outputs))
        return outputs

    def close(self) -> None:
        """Take the request back unless it has ended. Reading afterwards raises `Cancelled`, so a truncated answer does
        not pass for a complete one."""
        if self._closed:
            return
        self._closed = True
        if self._error is None and (self._outputs or not self.ended):
            self._error = Cancelled(_CLOSED)
        self._outputs.clear()
        if not self.ended:
            self._left()
        self._bell.set()

    async def _more(self) -> bool:
        """Wait for an output; False at the end."""
        while not self._outputs:
            if self._error is not None:
                raise copy.copy(self._error)
            if self.ended:
                return False
            self._bell.clear()
            await self._bell.wait()
        return True

    # -- for the producer ----------------------------------------------------------------------------------------------

    def push(self, outputs: list[T]) -> None:
        """Outputs came. Dropped after `close`."""
        if not self._closed:
            self._outputs += outputs
            self._bell.set()
            self._pushed(len(outputs))

    def end(self, error: ReflexError | None = None) -> None:
        """It has ended; called exactly once."""
        assert not self.ended
        self.ended = True
        if error is not None and self._error is None:
            self._error = error
        self._bell.set()

    # -- hooks of a subclass that bounds it ----------------------------------------------------------------------------

    def _pushed(self, n: int) -> None:
        """So many outputs came."""

    def _taken(self, n: int) -> None:
        """So many outputs were read."""

    def _left(self) -> None:
        """The reader closed it before its end."""
