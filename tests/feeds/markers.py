"""Pictures that say whose they are: proof, by content, that each result came from the frame it is given for.

Every picture carries two ArUco markers, the number of its feed on the left and its own number on the right. A result
that was mis-routed, repeated, reordered or left over from an earlier frame is then caught by what stands in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray
from tools.shape_detector.scoring import write_pictures

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.feeds.sources import DRAWN
from reflex_runtime.feeds.sources.shapes import DrawnSource, Image, made_of, size_of
from reflex_runtime.run.coordinator import BatchEntry

NUMBERS: Final = 1000
"""Markers in the dictionary (5×5, 1000). Feeds are below it, frames count modulo it."""

_BITS = 5  # a marker's side in cells, without its black border
_CELLS = _BITS + 2
_PAPER, _INK = 225, 20  # not quite white and black: codecs overshoot at edges


class MarkerPictures:
    """The pictures of one feed.

    feed: 0 … 999. size: width and height in pixels; a marker's cell is a 20th of the width or a 9th of the height,
    whichever is less, and at least 2 pixels: 40 × 18 is the smallest picture. Codecs need 4 pixels: 80 × 36.
    """

    def __init__(self, feed: int, size: tuple[int, int] = (160, 120)) -> None:
        assert 0 <= feed < NUMBERS
        assert size[0] >= 40
        assert size[1] >= 18
        self.feed = feed
        self._cell = min(size[0] // 20, size[1] // 9)
        side = _CELLS * self._cell
        middle = size[0] // 2
        # Two cells between the markers, so that each has one cell of paper all around.
        self._left, self._right, self._top = middle - self._cell - side, middle + self._cell, (size[1] - side) // 2
        self._paper = np.full((size[1], size[0], 3), _PAPER, np.uint8)
        self._put(self._paper, feed, self._left)

    def picture(self, i: int) -> Image:
        """Picture i ≥ 0, which shows i modulo 1000: RGB, uint8 [height, width, 3], the caller's own."""
        picture = self._paper.copy()
        self._put(picture, i % NUMBERS, self._right)
        return picture

    def _put(self, picture: Image, number: int, left: int) -> None:
        cells = np.where(_patterns()[number], _PAPER, _INK).astype(np.uint8)
        marker = cells.repeat(self._cell, 0).repeat(self._cell, 1)
        side = len(marker)
        picture[self._top : self._top + side, left : left + side] = marker[..., None]


class MarkerCamera(DrawnSource):
    """A camera that sees the markers of its feed. fps, frames and live as in `DrawnSource`."""

    def __init__(
        self,
        feed: int,
        fps: float = 15.0,
        frames: int | None = None,
        size: tuple[int, int] = (160, 120),
        live: bool = True,
    ) -> None:
        super().__init__(f"markers:feed={feed},fps={fps:g}", MarkerPictures(feed, size).picture, fps, frames, live)


def markers_source(text: str) -> MarkerCamera:
    """From a text: markers:feed=3,fps=15,frames=100,size=160x120,live=false; feed must be there."""
    return made_of(text, MarkerCamera, {"feed": int, "fps": float, "frames": int, "size": size_of, "live": bool})


DRAWN["markers"] = markers_source


def write_marker_video(
    path: Path, feed: int, frames: int, fps: float = 15.0, size: tuple[int, int] = (160, 120)
) -> None:
    """A video of pictures 0 … frames - 1 of a feed."""
    pictures = MarkerPictures(feed, size)
    write_pictures(path, (pictures.picture(i) for i in range(frames)), fps)


class MarkerReader:
    """A batch processor that reads both markers: {"feed": int, "frame": int, "text": "feed 3 frame 17"} per entry.

    It reads the feed and the number from the picture alone. Markers must stand upright, as `MarkerCamera` shows them;
    every one of their cells must be right. A picture that does not show exactly two is a ProcessorError for that entry.
    """

    repeatable = True

    def __init__(self, id: str = "markers") -> None:
        self.id = id

    def on_start(self) -> None:
        """Load the dictionary, so that the first frame does not wait for it."""
        _numbers()

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        return [_reading(entry.frame) for entry in entries]

    def on_stop(self) -> None:
        return


def read_markers(picture: Image) -> list[int]:
    """Numbers of the upright markers in a picture, from left to right.

    Dark regions are looked at one by one, as OpenCV's own detector would, which compares each with 4000 patterns and
    takes milliseconds. A marker that stands upright needs one look into a table.
    """
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    _, dark = cv2.threshold(grey, 0, 255, cv2.THRESH_BINARY_INV | cv2.THRESH_OTSU)
    outlines, _ = cv2.findContours(dark, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    found = []
    for x, y, width, height in sorted(cv2.boundingRect(outline) for outline in outlines):
        if min(width, height) >= 2 * _CELLS and max(width, height) <= 2 * min(width, height):  # may be stretched
            number = _number(dark[y : y + height, x : x + width])
            if number is not None:
                found.append(number)
    return found


def _reading(picture: Any) -> dict[str, Any] | ProcessorError:
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        return ProcessorError("frame: expected a uint8 array [h, w, 3]")
    found = read_markers(picture)
    if len(found) != 2:
        return ProcessorError(f"found {len(found)} markers, expected 2")
    feed, frame = found
    return {"feed": feed, "frame": frame, "text": f"feed {feed} frame {frame}"}


def _number(dark: NDArray[np.uint8]) -> int | None:
    """The marker that fills this picture of 0 (light) and 255 (dark), if it is one."""
    height, width = dark.shape
    y = ((np.arange(_CELLS) + 0.5) * height / _CELLS).astype(int)
    x = ((np.arange(_CELLS) + 0.5) * width / _CELLS).astype(int)
    return _numbers().get((dark[np.ix_(y, x)] == 0).tobytes())


@cache
def _patterns() -> NDArray[np.bool_]:
    """[1000, 7, 7]: which cells of each marker are light."""
    aruco = cv2.aruco
    dictionary = aruco.getPredefinedDictionary(aruco.DICT_5X5_1000)
    drawings = [aruco.generateImageMarker(dictionary, number, _CELLS) for number in range(NUMBERS)]
    return np.stack(drawings) > 127


@cache
def _numbers() -> dict[bytes, int]:
    return {pattern.tobytes(): number for number, pattern in enumerate(_patterns())}
