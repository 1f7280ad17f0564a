"""Results as lines of JSON, in a file or a stream.

A sink is called with each `Result`, in order, on its feed's thread; it is closed when its last feed is over. A sink
that fails for good raises once, which its feed reports, and ignores later results.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.observe import files
from reflex_runtime.run.device import Clock

NAME = r"^(?!\.\.?$)[\w.-]{1,64}$"  # of a feed; . and .. are other directories
_PATH_BYTES = 200  # of a file name's 255 bytes at most: endings follow, such as .mp4.1


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """file: the picture's name in a directory, or "". pts: seconds in the stream, or None. latency_ms: from capture to
    answer."""

    feed: str
    sequence: int
    file: str = ""
    pts: float | None
    latency_ms: float
    value: Any


def line_of(result: Result) -> bytes:
    """A result as one line of JSON, without its end. Arrays become lists, numbers that are not finite null, unknown
    objects their text."""
    frame, latency_ms = result.frame, round(1e3 * result.latency, 3)
    line = _Line(
        feed=result.feed, sequence=frame.sequence, file=frame.file, latency_ms=latency_ms, value=result.value,
        pts=None if frame.pts is None else round(frame.pts, 6),
    )  # fmt: skip
    try:
        return _ENCODER.encode(line)
    except UnicodeEncodeError:  # half a pair of surrogates, such as in the name of a file
        text = json.dumps(msgspec.to_builtins(line, enc_hook=_plain))
        return json.dumps(json.loads(text, parse_constant=lambda name: None)).encode()


def _plain(value: Any) -> Any:
    """A value of a class that the encoder does not take, as JSON can hold it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def path_name(feed: str) -> str:
    """A feed's name as one part of a path or topic; a hash of it where it is several parts, none, or too long."""
    data = feed.encode("utf-8", "surrogatepass")
    if re.fullmatch(NAME, feed) and len(data) <= _PATH_BYTES:
        return feed
    return "feed-" + hashlib.sha256(data).hexdigest()[:16]


class SinkError(ReflexError):
    """A sink failed for good: its disk is full, or its reader has left."""

    code = "sink_failed"


class JsonLines:
    """Writes a line of JSON for each result: see `line_of`. Any number of feeds may share it.

    target: a path, whose earlier file is kept as PATH.1 (see `files.create`), or a binary stream, which is not closed.
    gone: called instead of an error, at each write, when the reader has closed the stream; these results are dropped.
    Lines are written every second while results come, at the first result after a pause, and at `close`; to a terminal
    at once. After `close` a result opens the file again and is appended.
    lost: results that were not written after a failure.
    """

    FLUSH_S = 1.0

    def __init__(
        self,
        target: str | os.PathLike[str] | IO[bytes],
        clock: Clock = time.monotonic,
        gone: Callable[[], None] | None = None,
    ) -> None:
        self._path = Path(target) if isinstance(target, (str, os.PathLike)) else None
        self._stream: Any = None if isinstance(target, (str, os.PathLike)) else target
        self._every = 0.0 if self._stream is not None and self._stream.isatty() else self.FLUSH_S
        self._fresh = True  # this sink has not written to the file yet
        self._clock, self._gone = clock, gone
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._flushed = -float("inf")
        self._failed = False
        self.lost = 0

    def __call__(self, result: Result) -> None:
        """Write a result. Raises SinkError the first time that it cannot."""
        line = line_of(result) + b"\n"
        with self._lock:
            if self._failed:
                self.lost += 1
                return
            self._lines.append(line)
            now = self._clock()
            if now - self._flushed >= self._every:
                self._flushed = now
                self._write()

    def begin(self) -> None:
        """Begin the file now: after a run without results there is no file of an earlier run. Raises OSError."""
        with self._lock:
            if self._path is not None and self._fresh:
                self._open()

    def close(self) -> None:
        """Write the lines that wait. Raises SinkError if that fails."""
        with self._lock:
            try:
                if not self._failed:
                    self._write()
            finally:
                self._close_file()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            if self._stream is None:
                self._open()
            files.write_all(self._stream, b"".join(lines))
            self._stream.flush()  # of a caller's stream with a buffer
        except (OSError, ValueError) as error:  # ValueError: the stream was closed elsewhere
            if isinstance(error, BrokenPipeError) and self._gone is not None:
                self._gone()
                return
            self._failed = True
            self.lost += len(lines)
            self._close_file()
            where = self._path or "the stream"
            why = getattr(error, "strerror", None) or error
            raise SinkError(f"JSON lines to {where} failed: {why}; no more are written") from error

    def _open(self) -> None:
        assert self._path is not None
        self._stream = files.create(self._path) if self._fresh else files.append(self._path)
        self._fresh = False

    def _close_file(self) -> None:
        if self._path is not None and self._stream is not None:
            self._stream, stream = None, self._stream
            stream.close()
