"""Where results go: a line of JSON each, or a video with what was found drawn on it.

A sink is called with a `Result`, on its feed's thread, in order; `close` is called when its last feed is over. A sink
that fails for good raises once (its feed reports the exception) and ignores later results.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from io import FileIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.feeds.draw import annotated
from reflex_runtime.feeds.pipeline import Result
from reflex_runtime.feeds.record import record_of
from reflex_runtime.observe import files
from reflex_runtime.run.device import Clock

_FRAGMENTED = (".mp4", ".m4v", ".mov")


class SinkError(ReflexError):
    """A sink failed for good: its disk is full, or its reader has left."""

    code = "sink_failed"


class JsonLines:
    """A line of JSON per result: feed, sequence, file if it is one of a directory, pts, latency_ms, value. Any number
    of feeds may share it.

    target: a path, which is written anew (what is there is kept as PATH.1, see `files.create`), or a text stream, which
    is not closed. Lines are written out at least every
    second while results come, at the first result after a pause, and at `close`; to a terminal at once. After `close` a
    further result opens the file again and is appended.
    lost: results that could not be written after the sink had failed.
    """

    FLUSH_S = 1.0

    def __init__(self, target: str | os.PathLike[str] | IO[str], clock: Clock = time.monotonic) -> None:
        self._path = Path(target) if isinstance(target, (str, os.PathLike)) else None
        self._stream: Any = None if isinstance(target, (str, os.PathLike)) else target
        self._every = 0.0 if self._path is None and _is_terminal(self._stream) else self.FLUSH_S
        self._fresh = True  # this sink has not written to the file yet
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._flushed = -float("inf")
        self._failed = False
        self.lost = 0

    def __call__(self, result: Result) -> None:
        """Write a result. Raises SinkError the first time that it cannot."""
        text = record_of(result).as_json() + "\n"
        with self._lock:
            if self._failed:
                self.lost += 1
                return
            self._lines.append(text)
            now = self._clock()
            if now - self._flushed >= self._every:
                self._flushed = now
                self._write()

    def begin(self) -> None:
        """Begin the file now, unless a result has begun it, so that a run without results does not leave an earlier
        file."""
        with self._lock:
            if self._path is not None and self._fresh:
                with suppress(OSError):  # the first result says it
                    self._open()

    def close(self) -> None:
        """Write out what is left. Raises SinkError if that fails."""
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
            if self._path is None:
                self._stream.write("".join(lines))
                self._stream.flush()
                return
            if self._stream is None:
                self._open()
            files.write_all(self._stream, "".join(lines).encode(errors="replace"))
        except (OSError, ValueError) as error:  # ValueError: the stream was closed elsewhere
            self._failed = True
            self.lost += len(lines)
            self._close_file()
            where = self._path or "the stream"
            raise SinkError(f"JSON lines to {where} failed: {error}; no more are written") from error

    def _open(self) -> None:
        assert self._path is not None
        self._stream = files.create(self._path) if self._fresh else files.append(self._path)
        self._fresh = False

    def _close_file(self) -> None:
        if self._path is not None and self._stream is not None:
            self._stream, stream = None, self._stream
            stream.close()


class AnnotatedVideo:
    """A video of one feed with boxes, labels and text drawn on it, as H.264 or, where that is missing, MPEG-4.

    path: the file; its suffix says the container (.mp4, .mkv, .avi). It is opened with the first result, whose size
    (made even) all pictures get; what is there is kept as PATH.1, and only the owner may read it. An .mp4 is written in
    fragments of `FRAGMENT_S`, so that a killed process leaves all but the last one, as it does of an .mkv.
    caption: whether feed, number and latency are written into the corner.
    Times are those of the stream; where they stand still, go back or leap more than `LEAP_S`, the usual step is taken.
    Raises ConfigError if PyAV is missing.
    """

    shared = False  # of one feed only
    LEAP_S = 5.0
    FRAGMENT_S = 1.0
    TICKS = 60_000  # a second: a whole number of them at every usual rate, and not more than MPEG-4 counts

    def __init__(self, path: str | os.PathLike[str], caption: bool = True) -> None:
        _av()
        self._path = Path(path)
        self._caption = caption
        self._container: Any = None
        self._file: FileIO | None = None
        self._stream: Any = None
        self._size = (0, 0)
        self._over = False
        self._pts: float | None = None
        self._step = 1 / 25
        self._tick = -1
        self._time = 0.0

    def __call__(self, result: Result) -> None:
        """Add a picture. Raises SinkError the first time that it cannot."""
        if self._over:
            return
        caption = f"{result.feed} #{result.frame.sequence} {1e3 * result.latency:.0f} ms" if self._caption else ""
        picture = annotated(result.frame.image, result.value, caption)
        tick = self._next_tick(result.frame.pts)
        self._guarded(lambda: self._encode(picture, tick))

    def close(self) -> None:
        """Finish the file. Raises SinkError if that fails. Nothing is added to it afterwards."""
        over, self._over = self._over, True
        if self._container is not None and not over:
            self._guarded(self._finish)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._over = True
            container, self._container = self._container, None
            with suppress(Exception):  # the same error again
                if container is not None:
                    container.close()
            self._close_file()
            raise SinkError(f"video to {self._path} failed: {error}; no more is written") from error

    def _encode(self, picture: NDArray[np.uint8], tick: int) -> None:
        av = _av()
        if self._container is None:
            self._open(picture)
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame = frame.reformat(width=self._size[0], height=self._size[1], format="yuv420p", threads=1)
        frame.pts, frame.time_base = tick, Fraction(1, self.TICKS)
        self._container.mux(self._stream.encode(frame))

    def _open(self, picture: NDArray[np.uint8]) -> None:
        height, width = picture.shape[:2]
        self._size = (max(2, width - width % 2), max(2, height - height % 2))
        av = _av()
        self._file = files.create(self._path, private=True)
        fragments = {"movflags": "empty_moov+default_base_moof", "frag_duration": str(round(self.FRAGMENT_S * 1e6))}
        parts = fragments if self._path.suffix.lower() in _FRAGMENTED else {}
        self._container = av.open(self._file, "w", options={"flush_packets": "1", **parts})
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        self._stream = self._container.add_stream(codec, rate=25)
        self._stream.width, self._stream.height = self._size
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = Fraction(1, self.TICKS)
        if codec == "libx264":
            # No pictures held back, so that the flush at the stop is short.
            self._stream.options = {"preset": "veryfast", "crf": "23", "tune": "zerolatency"}
        self._stream.codec_context.thread_count = 1  # the default is one per core, for every feed
        self._container.start_encoding()  # a file that cannot be made shows now, not when the encoder is full

    def _finish(self) -> None:
        self._container.mux(self._stream.encode(None))
        container, self._container = self._container, None
        container.close()
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _next_tick(self, pts: float | None) -> int:
        """When a picture is shown, in ticks from the first; later than the one before it."""
        before, self._pts = self._pts, pts
        if self._tick >= 0:
            step = None if pts is None or before is None else pts - before
            if step is not None and 0.0 < step <= self.LEAP_S:
                self._step = step
            self._time += self._step
        self._tick = max(self._tick + 1, round(self._time * self.TICKS))
        return self._tick


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError("AnnotatedVideo: writing video needs PyAV: in a clone, pip install '.[feeds]'") from None
    return av


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
