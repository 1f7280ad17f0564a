"""Where pictures come from: what a feed asks of a camera or a video, and how a text on the command line becomes one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import JSON, ConfigError, ReflexError

Picture = tuple[NDArray[np.uint8], float | None]  # RGB [height, width, 3] and its pts in seconds
SourceMaker = Callable[[str], "Source"]  # gets the whole text, scheme included


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
    live: it goes on without us, so the newest picture wins. False: it waits for us, and nothing is lost.
    total: pictures expected in all, None when not known. Final once `open` has returned.
    """

    name: str
    live: bool
    total: int | None

    def open(self) -> None:
        """Connect, or connect again after `close`. Raises SourceError."""

    def read(self) -> Picture | None:
        """The next picture and its pts; waits for it. None at the end. Raises SourceError when the source is lost.

        The array belongs to the caller: it is not written to again.
        """

    def close(self) -> None:
        """Let go of it. Allowed at any time by the reading thread, also twice, also when `open` failed."""

    def interrupt(self) -> None:
        """From any thread: an `open` or `read` that waits ends soon, with a SourceError, and so does every later one.

        How soon is said by each source. An interrupted source stays so: a stop is final.
        """


def source_of(
    text: str,
    *,
    realtime: bool = False,
    loop: bool = False,
    size: tuple[int, int] | None = None,
    read_timeout: float = 5.0,
    schemes: Mapping[str, SourceMaker] | None = None,
) -> Source:
    """The source that a text names. Raises ConfigError; whether anything is there shows at `open`.

    text: a path to a file; an address with rtsp, rtsps, http or https; a device like /dev/video0; `chaos:` with
        options, as in chaos:seed=7,length=200. Text before a colon that is in `schemes` goes to its maker.
    realtime, loop, size, read_timeout: see VideoSource; read_timeout counts for connecting, too.
    """
    scheme = match[1].lower() if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", text)) else ""
    makers: dict[str, SourceMaker] = {"chaos": _chaos, **(schemes or {})}
    if scheme in makers:
        if realtime or loop:
            raise ConfigError(f"realtime={realtime}, loop={loop}: must be False for {scheme}:, which is no file")
        return makers[scheme](text)
    # Here and not above: they build on this module.
    from reflex_runtime.feeds.video import NETWORK, VideoSource, without_secrets

    if not text or ("://" in text and scheme not in NETWORK):
        known = ", ".join([*(f"{name}://" for name in NETWORK), *(f"{name}:" for name in makers)])
        name = without_secrets(text)
        raise ConfigError(f"source={name!r}: must be a path, a device /dev/video*, or start with {known}")
    return VideoSource(
        text, realtime=realtime, loop=loop, size=size, open_timeout=read_timeout, read_timeout=read_timeout
    )


def _chaos(text: str) -> Source:
    from reflex_runtime.feeds.chaos import ChaosSource

    return ChaosSource.of(text)
