"""What passes through a feed: pictures of a source and their times, the part for the processor, results and stages."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import JSON, ConfigError, ProcessorError, ReflexError
from reflex_runtime.extras import needed_by
from reflex_runtime.run.coordinator import BatchCoordinator
from reflex_runtime.run.modules import in_one_line
from reflex_runtime.settings.declare import one_line


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A picture of one feed. Frames are compared by identity.

    image: RGB, uint8 [height, width, 3]; frames of a feed may differ in size.
    sequence: its number in the feed, from 0; a reconnect repeats none.
    pts: seconds of the source that never go back (see `SourceClock`); None for a file without times and rate.
    captured: when it was read, monotonic seconds. Ages and latencies count from here.
    prepared: what the processor's `prepare` made of the image on the capture's thread; None if it is called later.
    file: its name in a directory of pictures; "" for other sources.
    """

    image: NDArray[np.uint8]
    sequence: int
    pts: float | None
    captured: float
    prepared: Any = None
    file: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.image.shape[1], self.image.shape[0]

    @property
    def time(self) -> float:
        """Its pts; without one, its number at 25 pictures a second."""
        return self.sequence * UNTIMED_S if self.pts is None else self.pts


UNTIMED_S: Final = 0.04  # between two pictures of a source without times and rate
Picture = tuple[NDArray[np.uint8], float | None]  # RGB [height, width, 3] and its pts in seconds


class SourceError(ReflexError):
    """A source gives no more pictures: it was lost, could not be opened, or stopped sending.

    retryable: whether opening it again may help, as for a camera; not for a file that is missing or no video.
    """

    code, http_status = "source_lost", 502

    def __init__(
        self, message: str = "", *, retryable: bool = True, retry_after: float | None = None, **details: JSON
    ) -> None:
        super().__init__(message, retry_after=retry_after, retryable=retryable, **details)
        self.retryable = retryable


class Source(Protocol):
    """The pictures of a feed. One thread opens, reads and closes; any thread may interrupt.

    name: for people, without credentials.
    live: whether the newest picture wins, as of a camera. False: the source waits, and no picture is lost.
    total: expected number of pictures, None if unknown; final once `open` has returned.

    Optional: `step`, seconds between two pictures of a file by its rate; `paced`, whether the reader must take them at
    their times; `corrupt`, pictures that could not be decoded; `file`, the name of the last picture in its directory.
    """

    name: str
    live: bool
    total: int | None

    def open(self) -> None:
        """Connect, or connect again after `close`. Raises SourceError."""

    def read(self) -> Picture | None:
        """Wait for the next picture and its pts. None at the end. Raises SourceError when the source is lost.

        The source does not write to the array again.
        """

    def close(self) -> None:
        """Close it: also twice, and after a failed `open`."""

    def interrupt(self) -> None:
        """From any thread: end a waiting `open` or `read` soon, and every later one, with a SourceError."""


Image = NDArray[np.uint8]  # [height, width, 3]


class SourceClock:
    """The time of a source: seconds that never go back, even where those of its stream do.

    Times of the stream count while they go forward without a leap. Where they are missing, stand still, go back or
    leap, a camera's next picture is as much later as it arrived later, and a file's follows by the rate.
    """

    LEAP_S: Final = {True: 5.0, False: 600.0}  # live, file: its pictures may be far apart
    LEAST_S: Final = 1e-3  # between two pictures
    LATE_S, FAR_S = 1.0, 10.0  # a picture of a played file that is later, or farther ahead, is due at once

    def __init__(self, live: bool) -> None:
        self.live, self._offset = live, 0.0
        self._begun = -inf  # when the time 0 of a played file was
        self._before: tuple[float | None, float] | None = None  # pts and arrival of the picture before
        self._time: float | None = None

    def time(self, pts: float | None, arrived: float, step: float | None) -> float | None:
        """The time of the next picture; None for a file without times and rate.

        pts: in the stream. arrived: monotonic. step: between two pictures by the file's rate, if known.
        """
        pts = pts if pts is not None and isfinite(pts) else None
        before, self._before = self._before, (pts, arrived)
        if before is None or self._time is None:
            self._time = 0.0 if pts is None and (self.live or step) else pts
            return self._time
        last, arrived_last = before
        gap = None if pts is None or last is None else pts - last
        if pts is not None and gap is not None and 0.0 < gap <= self.LEAP_S[self.live]:
            self._time = pts + self._offset
        else:
            gap = arrived - arrived_last if self.live else step or self.LEAST_S
            self._time += max(self.LEAST_S, gap)
            self._offset = self._time - (pts or 0.0)
        return self._time

    def ahead(self, now: float) -> float:
        """Seconds until the last timed picture of a played file is due.

        A picture that is too late or too far ahead is due at once, and the next ones count from it.
        """
        ahead = self._begun + (self._time or 0.0) - now
        if not -self.LATE_S <= ahead <= self.FAR_S:
            self._begun, ahead = now - (self._time or 0.0), 0.0
        return max(0.0, ahead)


class Taking:
    """Which pictures of a source are taken: one of `every`, and of those at most `fps` a second; fps 0 is no limit.

    A picture may come a quarter of a period early, so that a limit near the camera's rate takes all of them; on average
    the rate holds.
    """

    EARLY: Final = 0.25

    def __init__(self, every: int = 1, fps: float = 0.0) -> None:
        self._count, self._due = 0, -inf
        self._every, self._period = every, 1.0 / fps if fps else 0.0

    def takes(self, time: float | None) -> bool:
        """Whether the next picture, with this time, is taken. Without a time only `every` counts."""
        self._count += 1
        if (self._count - 1) % self._every:
            return False
        if not self._period or time is None:
            return True
        if time < self._due - self.EARLY * self._period:
            return False
        self._due = time + self._period if self._due == -inf else max(self._due + self._period, time)
        return True


def turned(image: Image, degrees: int) -> Image:
    """A picture turned clockwise by 0, 90, 180 or 270 degrees."""
    if not degrees:
        return image
    quarters = degrees // 90
    if (cv2 := opencv()) is not None:  # five times as fast
        ways = (cv2.ROTATE_90_CLOCKWISE, cv2.ROTATE_180, cv2.ROTATE_90_COUNTERCLOCKWISE)
        result: Image = cv2.rotate(image, ways[quarters - 1])
        return result
    return np.ascontiguousarray(np.rot90(image, -quarters))


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a feed's pictures that its processor gets, in pixels. It is cut off at the edges of the picture."""

    left: int
    top: int
    width: int
    height: int

    @classmethod
    def of(cls, text: str) -> Region:
        """The region of a text LEFT,TOP,WIDTH,HEIGHT. Raises ConfigError."""
        found = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", text, re.ASCII)
        if found is None or not (int(found[3]) and int(found[4])):
            raise ConfigError(f"roi={one_line(text)}: must be X,Y,WIDTH,HEIGHT in pixels, such as 0,200,1280,520")
        return cls(*(int(number) for number in found.groups()))

    def part(self, image: Image) -> Image:
        """That part of a picture, a view of it. Raises ProcessorError if it lies outside."""
        part = image[self.top : self.top + self.height, self.left : self.left + self.width]
        if not part.size:
            height, width = image.shape[:2]
            raise ProcessorError(
                f"roi={self.left},{self.top},{self.width},{self.height} lies outside of the picture, {width}x{height}"
            )
        return part

    def placed(self, value: Any) -> Any:
        """A result of the part with its boxes, keypoints, polygons and masks in pixels of the whole picture."""
        if not isinstance(value, Mapping) or not (self.left or self.top):
            return value
        result = dict(value)
        for name, pairs in (("boxes", 2), ("keypoints", 1), ("polygons", 1)):
            if name in result:
                result[name] = self._moved(result[name], pairs)
        if isinstance(masks := result.get("masks"), list | tuple):
            result["masks"] = [self._mask(mask) for mask in masks]
        return result

    def _mask(self, mask: Any) -> Any:
        return {**mask, "box": self._moved(mask["box"], 2)} if isinstance(mask, Mapping) and "box" in mask else mask

    def _moved(self, places: Any, pairs: int) -> Any:
        """Positions [..., x, y, …] moved, further columns kept. Anything else is returned unchanged."""
        try:
            array = np.array(places, np.float64)
            if array.size:
                array[..., : 2 * pairs] += (self.left, self.top) * pairs
        except (TypeError, ValueError, IndexError):
            return places
        return array if isinstance(places, np.ndarray) else array.round(4).tolist()


def library(name: str, what: str) -> Any:
    """Import a module of an extra. what: what needs it, in words. Raises ConfigError."""
    with needed_by(what):
        return importlib.import_module(name)


@cache
def opencv() -> Any:
    """The module cv2, or None."""
    with suppress(ConfigError):
        return library("cv2", "this")


@contextmanager
def refusals_of(where: str, then: str = ": ") -> Iterator[None]:
    """Put `where` in front of a ConfigError, in one line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}{then}{in_one_line(error.message.removeprefix('--'))}") from None


# -- stages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A frame and what was found in it.

    value: the processor's answer, then what the stages made of it; None without a batch point. Sinks draw a mapping
        with any of boxes ([[x0, y0, x1, y1], ...] in pixels of the frame), labels, scores and text.
    latency: seconds from the frame's capture to its answer.
    """

    frame: Frame
    feed: str
    value: Any
    latency: float


After = Callable[[Result], Result | None]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a feed does with its frames, on its own thread, one after the other.

    batch: a coordinator, which gets the picture. None: results have the value None.
    after: stages; each gets a result and returns it or another one. After None no stage and no sink gets the result.
    region: the part of the picture that the processor gets. Stages and sinks get boxes, keypoints and masks in pixels
        of the whole picture.

    If a stage raises, only that frame is lost; the error names the stage by its attribute `name`, else its own name.
    Stages may keep state, so a pipeline that has any belongs to one feed: to give many feeds the same stages, pass a
    function that makes a pipeline.
    """

    batch: BatchCoordinator | None = None
    after: Sequence[After] = ()
    region: Region | None = None

    def __post_init__(self) -> None:
        if callable(self.after):
            raise ConfigError("Pipeline.after: must be a sequence of stages, is a single one")
        for stage in self.after:
            if not callable(stage):
                raise ConfigError(f"Pipeline.after: {stage!r} cannot be called")
        object.__setattr__(self, "after", tuple(self.after))
        if self.batch is not None and not hasattr(self.batch, "submit_and_wait"):
            raise ConfigError(f"Pipeline.batch: {self.batch!r} is no coordinator")

    def prepared(self, image: Any) -> Any:
        """What the processor's `prepare` makes of a picture; None if the processor has no `prepare`."""
        prepare = None if self.batch is None else getattr(self.batch, "prepare", None)
        return None if prepare is None else prepare(self.part(image))

    def part(self, image: Any) -> Any:
        """The part of a picture that the processor gets."""
        return image if self.region is None else self.region.part(image)

    def placed(self, value: Any) -> Any:
        """The processor's result with positions in pixels of the whole picture."""
        return value if self.region is None else self.region.placed(value)


def name_of(stage: object) -> str:
    """The name of a stage in errors and figures."""
    name = getattr(stage, "name", None)
    if isinstance(name, str) and name:
        return name
    named = stage if inspect.isroutine(stage) or inspect.isclass(stage) else type(stage)
    return str(getattr(named, "__qualname__", named)).rpartition("<locals>.")[2]
