"""What passes through a feed: frames of a source, which of them and what part; its stages; and results.

Stages run before the batch point, which is shared with other feeds, and after it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import JSON, ConfigError, ProcessorError, ReflexError, needed_by
from reflex_runtime.run.coordinator import BatchCoordinator
from reflex_runtime.run.modules import in_one_line
from reflex_runtime.settings.declare import one_line


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A picture of one feed. Two frames are equal when they are the same object: comparing pixels is not for `==`.

    image: RGB, uint8 [height, width, 3]. Its size may differ from that of the frame before it.
    sequence: counts the feed's frames from 0; a reconnect goes on counting and repeats no number.
    pts: seconds of the source that never go back (see `SourceClock`); None for a file without times and rate.
    captured: when the picture was read, in seconds of the monotonic clock. Ages and latencies count from here.
    file: its name in a directory of pictures.
    prepared: what the processor's `prepare` made of the image, if that was done when it was read.
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
        """Its pts; of a source without times and rate 25 pictures a second, by their number."""
        return self.sequence * UNTIMED_S if self.pts is None else self.pts


UNTIMED_S: Final = 0.04  # between two pictures without times and rate
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

    It may have `step`, the seconds between two pictures of a file by its own rate, `paced`, whether the reader is to
    take them at their times, `corrupt`, how many pictures of what was read could not be decoded, and `file`, the name
    of the last picture in its directory.
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
        """Close it. Allowed at any time by the reading thread, also twice, also when `open` failed."""

    def interrupt(self) -> None:
        """From any thread: an `open` or `read` that waits ends soon, with a SourceError, and so does every later one.

        Each source documents how soon. An interrupted source stays interrupted: a stop is final.
        """


LARGEST: Final = 1_000_000  # pixels

Image = NDArray[np.uint8]  # [height, width, 3]


class SourceClock:
    """The time of a source: seconds that never go back, even where those of its stream do.

    Times of the stream count as long as they go forward without a leap. Where they are missing, stand still, go back or
    leap, the next picture of a camera comes as much later as it arrived later, and that of a file by its rate: also of
    one that starts over, or is played at its pace.
    """

    LEAP_S: Final = {True: 5.0, False: 600.0}  # of a camera, of a file: its pictures may be far apart
    LEAST_S: Final = 1e-3  # between two pictures
    LATE_S, FAR_S = 1.0, 10.0  # behind, or ahead, after which a played picture is due at once

    def __init__(self, live: bool) -> None:
        self._live, self._offset = live, 0.0
        self._begun = -inf  # when time 0 was, of a file that is played
        self._before: tuple[float | None, float] | None = None  # time in the stream and arrival of the picture before
        self._time: float | None = None

    def time(self, pts: float | None, arrived: float, step: float | None) -> float | None:
        """That of the next picture; None for a file without times and rate.

        pts: in the stream. arrived: by the machine's clock. step: between two pictures by the file's rate, if known.
        """
        pts = pts if pts is not None and isfinite(pts) else None
        before, self._before = self._before, (pts, arrived)
        if before is None or self._time is None:
            self._time = 0.0 if pts is None and (self._live or step) else pts
            return self._time
        last, arrived_last = before
        found = None if pts is None or last is None else pts - last
        if pts is not None and found is not None and 0.0 < found <= self.LEAP_S[self._live]:
            self._time = pts + self._offset
        else:
            found = arrived - arrived_last if self._live else step or self.LEAST_S
            self._time += max(self.LEAST_S, found)
            self._offset = self._time - (pts or 0.0)
        return self._time

    def ahead(self, now: float) -> float:
        """Seconds until the picture that was timed last is due, where a file is played at its pace.

        Being late is not made up for in a rush, and a leap is not waited for: those after it count from it.
        """
        ahead = self._begun + (self._time or 0.0) - now
        if not -self.LATE_S <= ahead <= self.FAR_S:
            self._begun, ahead = now - (self._time or 0.0), 0.0
        return max(0.0, ahead)


class Taking:
    """Which pictures of a source are taken: one of `every`, and of those at most `fps` a second; 0 is no limit.

    A picture may come up to a quarter of a period early, so that a limit near the camera's own rate takes all; on
    average the rate holds.
    """

    EARLY: Final = 0.25

    def __init__(self, every: int = 1, fps: float = 0.0) -> None:
        self._count, self._due = 0, -inf
        self._every, self._period = every, 1.0 / fps if fps else 0.0

    @property
    def all(self) -> bool:
        """Whether every picture is taken."""
        return self._every == 1 and not self._period

    def takes(self, time: float | None) -> bool:
        """Whether the next picture, of that time of its source, is taken; without a time each of `every`."""
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
    """The part of a feed's pictures that its processor gets: left, top, width and height in pixels. What of it lies
    outside of a picture is left out."""

    left: int
    top: int
    width: int
    height: int

    def __post_init__(self) -> None:
        sides = (self.left, self.top, self.width, self.height)
        if not all(isinstance(n, int) and 0 <= n <= LARGEST for n in sides) or not (self.width and self.height):
            raise ConfigError(f"Region{sides}: must be whole numbers of pixels >= 0, width and height >= 1")

    @classmethod
    def of(cls, text: str) -> Region:
        """From a text LEFT,TOP,WIDTH,HEIGHT. Raises ConfigError."""
        found = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", text, re.ASCII)
        if found is None or not (int(found[3]) and int(found[4])):
            raise ConfigError(f"roi={one_line(text)}: must be X,Y,WIDTH,HEIGHT in pixels, such as 0,200,1280,520")
        return cls(*(int(number) for number in found.groups()))

    def part(self, image: Image) -> Image:
        """That part of a picture, not copied. Raises ProcessorError if nothing of it lies inside."""
        part = image[self.top : self.top + self.height, self.left : self.left + self.width]
        if not part.size:
            height, width = image.shape[:2]
            raise ProcessorError(
                f"roi={self.left},{self.top},{self.width},{self.height} lies outside of the picture, {width}x{height}"
            )
        return part

    def placed(self, value: Any) -> Any:
        """A result about the part, with its boxes, keypoints and masks in pixels of the whole picture."""
        if not isinstance(value, Mapping) or not (self.left or self.top):
            return value
        result = dict(value)
        for name, pairs in (("boxes", 2), ("keypoints", 1), ("polygons", 1)):
            if name in result:
                result[name] = self._moved(result[name], pairs)
        if "masks" in result:
            result["masks"] = [self._mask(mask) for mask in result["masks"]]
        return result

    def _mask(self, mask: Any) -> Any:
        return {**mask, "box": self._moved(mask["box"], 2)} if isinstance(mask, Mapping) and "box" in mask else mask

    def _moved(self, places: Any, pairs: int) -> Any:
        """Places [..., x, y, …] moved; what has more columns keeps them. What has another form is left as it is."""
        try:
            array = np.array(places, np.float64)
            if array.size:
                array[..., : 2 * pairs] += (self.left, self.top) * pairs
        except (TypeError, ValueError, IndexError):
            return places
        return array if isinstance(places, np.ndarray) else array.round(4).tolist()


def library(name: str, what: str) -> Any:
    """A module that an extra brings. Raises ConfigError. what: needs it, in words."""
    with needed_by(what):
        return importlib.import_module(name)


@cache
def opencv() -> Any:
    """The module cv2, or None."""
    with suppress(ConfigError):
        return library("cv2", "this")


@contextmanager
def refusals_of(where: str) -> Iterator[None]:
    """A ConfigError in one line that begins with what it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {in_one_line(error.message.removeprefix('--'))}") from None


# -- stages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A frame with what was found in it.

    frame: as the stages before the batch point left it; positions in `value` are pixels of this picture.
    value: what the processor answered, then what the stages after made of it; None without a batch point. Drawing and
        JSON lines know a mapping with any of boxes ([[x0, y0, x1, y1], ...] in pixels), labels, scores and text.
    latency: seconds from the frame's capture to its answer.
    """

    frame: Frame
    feed: str
    value: Any
    latency: float


Before = Callable[[Frame], Frame | None]
After = Callable[[Result], Result | None]
View = Callable[[Frame], Any]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a feed, called on its own thread, one frame at a time and in order.

    before: each gets a frame and returns it, or another one made of it (`dataclasses.replace`); None skips the frame.
    batch: a coordinator; it gets the picture of the frame. None: nothing is asked, and results have the value None.
    view: makes what goes with the picture to the processor, as the entry's `view`; called after the stages before.
        None: the processor's own `prepare` makes it, if it has one.
    region: the part of the picture that the processor gets; boxes, keypoints and masks of its results are moved to
        where they are in the whole picture, which stages and sinks get.
    after: each gets a result and returns it or another one; None keeps it from the sinks.

    A stage that raises loses that frame only, and is named in the error: by its attribute `name`, or as it is called in
    its module. Stages may keep state, so a pipeline that has any belongs to one feed: to give many feeds the same
    stages, pass a function that makes a pipeline.
    """

    before: Sequence[Before] = ()
    batch: BatchCoordinator | None = None
    after: Sequence[After] = ()
    view: View | None = field(default=None, kw_only=True)
    region: Region | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            stages = getattr(self, name)
            if callable(stages):
                raise ConfigError(f"Pipeline.{name}: must be a sequence of stages, is a single one")
            for stage in stages:
                if not callable(stage):
                    raise ConfigError(f"Pipeline.{name}: {stage!r} cannot be called")
            object.__setattr__(self, name, tuple(stages))
        if self.view is not None and not callable(self.view):
            raise ConfigError(f"Pipeline.view: {self.view!r} cannot be called")
        if self.batch is not None and not hasattr(self.batch, "submit_and_wait"):
            raise ConfigError(f"Pipeline.batch: {self.batch!r} is no coordinator")

    def view_of(self, frame: Frame) -> Any:
        """What goes with a frame to the processor."""
        if self.view is not None:
            return self.view(frame)
        return frame.prepared if frame.prepared is not None else self.prepared(frame.image)

    def prepared(self, image: Any) -> Any:
        """What the processor makes of a picture ahead of its call; None if nothing."""
        prepare = None if self.batch is None else getattr(self.batch, "prepare", None)
        return None if prepare is None else prepare(self.part(image))

    def part(self, image: Any) -> Any:
        """What the processor gets of a picture."""
        return image if self.region is None else self.region.part(image)

    def placed(self, value: Any) -> Any:
        """The processor's result, in pixels of the whole picture."""
        return value if self.region is None else self.region.placed(value)


def name_of(stage: object) -> str:
    """What a stage is called in errors and figures."""
    name = getattr(stage, "name", None)
    if isinstance(name, str) and name:
        return name
    named = stage if inspect.isroutine(stage) or inspect.isclass(stage) else type(stage)
    return str(getattr(named, "__qualname__", named)).rpartition("<locals>.")[2]
