"""Cameras that are drawn: pictures computed from their number, as a source for a feed or as a video file.

What a picture holds is known without looking at it, so results can be checked against the truth on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from threading import TIMEOUT_MAX, Event
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.source import Picture, SourceError

Image = NDArray[np.uint8]  # RGB [height, width, 3]

MAX_FPS, MAX_SECONDS, MAX_SIDE = 1000.0, 1e9, 4096  # beyond them is a slip of the hand, or nothing would move
_FPS, _SECONDS = "must be in (0, 1000]", "must be in (0, 1e9]"


class DrawnSource:
    """A source whose picture i is `draw(i)`, shown at i / fps seconds.

    name: for people. fps: pictures per second, in (0, 1000]. frames: pictures in all, None without end.
    live: True, pictures appear at their time and a reader that comes late has missed some, as with a camera. False,
        they wait for the reader, as in a file.

    Opening it again begins again at picture 0. After `interrupt` a waiting read ends at once.
    """

    def __init__(
        self, name: str, draw: Callable[[int], Image], fps: float = 15.0, frames: int | None = None, live: bool = True
    ) -> None:
        if not 0 < fps <= MAX_FPS:
            raise ConfigError(f"fps={fps!r}: {_FPS}")
        if frames is not None and frames < 1:
            raise ConfigError(f"frames={frames!r}: must be >= 1, or None for no end")
        self.name, self.live, self.total = name, live, frames
        self.fps = fps
        self._draw = draw
        self._interrupted = Event()
        self._next, self._began = 0, 0.0
        self._open = False

    def open(self) -> None:
        self._check()
        self._next, self._began, self._open = 0, time.monotonic(), True

    def read(self) -> Picture | None:
        """The next picture and its time. The array is new at every call."""
        self._check()
        if not self._open:
            raise SourceError(f"{self.name}: not open")
        if self.live:
            passed = time.monotonic() - self._began
            self._next = max(self._next, floor(passed * self.fps))
            wait = self._next / self.fps - passed
            if self._more() and wait > 0 and self._interrupted.wait(min(wait, TIMEOUT_MAX)):
                self._check()
        if not self._more():
            return None
        i, self._next = self._next, self._next + 1
        return self._draw(i), i / self.fps

    def close(self) -> None:
        self._open = False

    def interrupt(self) -> None:
        self._interrupted.set()

    def _more(self) -> bool:
        return self.total is None or self._next < self.total

    def _check(self) -> None:
        if self._interrupted.is_set():
            raise SourceError(f"{self.name}: interrupted")


def write_video(path: Path, pictures: Iterable[Image], fps: float, bit_rate: int = 1_000_000) -> None:
    """Encode pictures of one size, its sides even, with H.264, or MPEG-4 part 2 where PyAV lacks an H.264 encoder.

    The suffix of `path` chooses the container. bit_rate: bits per second. Needs the extra `feeds`.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError("PyAV is not installed: in a clone, pip install '.[feeds]'") from error
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream: Any = None
        for picture in pictures:
            if stream is None:
                stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt, stream.bit_rate = "yuv420p", bit_rate
                stream.thread_count = 1  # the same file on any machine
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        if stream is None:
            raise ConfigError(f"{path}: a video needs at least one picture")
        container.mux(stream.encode(None))


Made = TypeVar("Made")
Kinds = Mapping[str, Callable[[str], Any]]  # option → what makes a value of its text, or raises ValueError


def options_of(text: str, kinds: Kinds) -> dict[str, Any]:
    """What stands in `scheme:name=value,name=value`, converted. ConfigError names an unknown or wrong option."""
    found: dict[str, Any] = {}
    scheme, _, options = text.partition(":")
    for item in filter(None, options.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds:
            raise ConfigError(f"{text}: unknown option {name!r}, expected one of {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except ValueError as error:
            raise ConfigError(f"{scheme}:{name}={value}: {error}") from None
    return found


def made_of(text: str, kind: Callable[..., Made], options: Mapping[str, Any]) -> Made:
    """A source of these options. ConfigError names the scheme with what is wrong."""
    try:
        return kind(**options)
    except ConfigError as error:
        raise ConfigError(f"{text.partition(':')[0]}:{error.message}") from None


def whole(text: str) -> int:
    """A whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def fps_of(text: str) -> float:
    """Pictures per second. Raises ValueError."""
    return _number(text, MAX_FPS, _FPS)


def seconds_of(text: str) -> float:
    """A length. Raises ValueError."""
    return _number(text, MAX_SECONDS, _SECONDS)


def _number(text: str, high: float, words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not 0 < value <= high:
        raise ValueError(words)
    return value


def size_of(text: str) -> tuple[int, int]:
    """320x240 → (320, 240). Raises ValueError."""
    width, x, height = text.partition("x")
    try:
        return int(width), int(height if x else "")
    except ValueError:
        raise ValueError("must be a size like 320x240") from None


def flag(text: str) -> bool:
    """1, true, yes → True; 0, false, no → False. Raises ValueError."""
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError("must be true or false")
    return known[text.lower()]


def frames_in(seconds: float | None, fps: float) -> int | None:
    """Pictures that begin within `seconds`; None for no end."""
    if seconds is None:
        return None
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"seconds={seconds!r}: {_SECONDS}, or None for no end")
    return max(1, ceil(seconds * fps - 1e-9))
