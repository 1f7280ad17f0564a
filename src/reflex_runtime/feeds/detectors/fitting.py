"""How a frame is brought to the size of a graph's input, and where it lies in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.found import CROP, LETTERBOX, STRETCH

GREY: Final = 114  # of all channels, around the picture

Picture = NDArray[np.uint8]  # RGB [h, w, 3]


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a frame lies in the input: x of the input is x of the frame · across + left, y likewise.

    width, height: of the frame.
    """

    across: float
    down: float
    left: float
    top: float
    width: int
    height: int

    def back(self, places: NDArray[Any]) -> NDArray[np.float64]:
        """Places in pixels of the frame, on or within its edges. places: [..., 2 · m] as x, y, x, y … of the input."""
        return np.clip(self.unbounded(places), 0.0, (self.width, self.height) * (places.shape[-1] // 2))

    def unbounded(self, places: NDArray[Any]) -> NDArray[np.float64]:
        """The same for places that may lie outside of the frame."""
        pairs = places.shape[-1] // 2
        offset, scale = (self.left, self.top) * pairs, (self.across, self.down) * pairs
        found: NDArray[np.float64] = (places.astype(np.float64) - offset) / scale
        return found

    def forth(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """Places of the frame in pixels of the input."""
        pairs = places.shape[-1] // 2
        found: NDArray[np.float64] = places * ((self.across, self.down) * pairs) + (self.left, self.top) * pairs
        return found


def letterboxed(frame: Picture, place: Picture) -> Fit:
    """The whole frame into the middle of `place` [h, w, 3], as large as fits, grey around it.

    Bilinear without smoothing, as OpenCV does it and YOLO models are trained and measured.
    """
    height, width = frame.shape[:2]
    room_h, room_w = place.shape[:2]
    scale = min(room_h / height, room_w / width)
    new_w, new_h = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = round((room_w - new_w) / 2 - 0.1), round((room_h - new_h) / 2 - 0.1)
    place[:top], place[top + new_h :], place[:, :left], place[:, left + new_w :] = GREY, GREY, GREY, GREY
    inner = place[top : top + new_h, left : left + new_w]
    if (new_h, new_w) == (height, width):
        inner[:] = frame
    else:
        cv2 = _cv2()
        cv2.resize(np.ascontiguousarray(frame), (new_w, new_h), dst=inner, interpolation=cv2.INTER_LINEAR)
    return Fit(new_w / width, new_h / height, left, top, width, height)


def stretched(frame: Picture, place: Picture) -> Fit:
    """The whole frame into the whole of `place`: both sides by their own scale, bilinear with smoothing."""
    height, width = frame.shape[:2]
    room_h, room_w = place.shape[:2]
    place[:] = frame if frame.shape == place.shape else _smooth(frame, (room_w, room_h), reducing_gap=2.0)
    return Fit(room_w / width, room_h / height, 0.0, 0.0, width, height)


def cropped(frame: Picture, place: Picture) -> Fit:
    """The middle of the frame, as much as fills `place`."""
    height, width = frame.shape[:2]
    room_h, room_w = place.shape[:2]
    scale = max(room_h / height, room_w / width)
    new_w, new_h = max(room_w, int(width * scale)), max(room_h, int(height * scale))
    left, top = round((new_w - room_w) / 2), round((new_h - room_h) / 2)
    whole = frame if (new_w, new_h) == (width, height) else _smooth(frame, (new_w, new_h))
    place[:] = whole[top : top + room_h, left : left + room_w]
    return Fit(new_w / width, new_h / height, -left, -top, width, height)


FITTINGS: Final[dict[str, Callable[[Picture, Picture], Fit]]] = {
    LETTERBOX: letterboxed,
    STRETCH: stretched,
    CROP: cropped,
}


def planes_of(picture: Picture) -> NDArray[np.uint8]:
    """The channels of a picture one after the other: [3, h, w]."""
    planes = np.empty((3, *picture.shape[:2]), np.uint8)
    if (cv2 := opencv()) is not None:  # seven times as fast
        cv2.split(picture, list(planes))
    else:
        planes[:] = picture.transpose(2, 0, 1)
    return planes


def check_fitting(resize: str) -> None:
    """ConfigError if this way of resizing cannot be used here."""
    if resize == LETTERBOX:
        _cv2()


def _smooth(frame: Picture, size: tuple[int, int], reducing_gap: float | None = None) -> Picture:
    picture = Image.fromarray(frame)
    return np.asarray(picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=reducing_gap))


def _cv2() -> Any:
    if (cv2 := opencv()) is None:
        raise ConfigError("letterbox needs OpenCV: in a clone, pip install '.[feeds]'")
    return cv2


@cache
def opencv() -> Any:
    """The module cv2, or None."""
    try:
        import cv2
    except ImportError:
        return None
    return cv2
