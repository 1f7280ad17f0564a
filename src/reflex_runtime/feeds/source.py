"""Where pictures come from: what a feed asks of a camera or a video."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import JSON, ReflexError

Picture = tuple[NDArray[np.uint8], float | None]  # RGB [height, width, 3] and its pts in seconds


class SourceError(ReflexError):
    """A source gives no more pictures: it was lost, could not be opened, or stopped sending.

    retryable: True, opening it again may help (a camera that is gone may come back). False, it will not (a file that
        is not there, or is no video).
    """

    code, http_status = "source_lost", 502

    def __init__(
        self, message: str = "", *, retryable: bool = True, retry_after: float | None = None, **details: JSON
    ) -> None:
        super().__init__(message, retry_after=retry_after, retryable=retryable, **details)
        self.retryable = retryable


class Source(Protocol):
    """What gives a feed its pictures. One thread opens, reads and closes; only `interrupt` may come from another.

    name: for people; holds no credentials.
    live: it does not wait for the reader, so the newest picture wins. False: it waits, and no picture is lost.
    total: pictures expected in all, None when not known. Final once `open` has returned.
    """

    name: str
    live: bool
    total: int | None

    def open(self) -> None:
        """Connect, or connect again after `close`. Raises SourceError."""

    def read(self) -> Picture | None:
        """The next picture and its pts; waits for it. None at the end. Raises SourceError when the source is lost.

        It may have an attribute `file`, its name in a directory.
        The array belongs to the caller: it is not written to again.
        """

    def close(self) -> None:
        """Close it. Allowed at any time by the reading thread, also twice, also when `open` failed."""

    def interrupt(self) -> None:
        """From any thread: an `open` or `read` that waits ends soon, with a SourceError, and so does every later one.

        Each source documents how soon. An interrupted source stays interrupted: a stop is final.
        """
