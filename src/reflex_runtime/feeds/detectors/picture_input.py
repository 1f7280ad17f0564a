"""Brings frames to the input of a graph, and detections back to pixels of the frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.heads import CORNER, CROP, LETTERBOX, STRETCH, Dialect, Found
from reflex_runtime.feeds.runtime.pipeline import opencv
from reflex_runtime.run.onnx_session import OnnxSession, fits, shown

GREY: Final = 114  # of all channels, around the picture

Picture = NDArray[np.uint8]  # RGB [h, w, 3]


@dataclass(frozen=True, slots=True)
class Fit:
    """The place of a frame in the input: x of the input is x of the frame · across + left, y = y · down + top.

    width, height: of the frame.
    """

    across: float
    down: float
    left: float
    top: float
    width: int
    height: int

    def back(self, places: NDArray[Any]) -> NDArray[np.float64]:
        """Places of the input in pixels of the frame, clipped to it. places: [..., 2 · m] as x, y, x, y …"""
        return np.clip(self.unbounded(places), 0.0, (self.width, self.height) * (places.shape[-1] // 2))

    def unbounded(self, places: NDArray[Any]) -> NDArray[np.float64]:
        """The same, not clipped."""
        pairs = places.shape[-1] // 2
        offset, scale = (self.left, self.top) * pairs, (self.across, self.down) * pairs
        found: NDArray[np.float64] = (places.astype(np.float64) - offset) / scale
        return found

    def forth(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """Places of the frame in pixels of the input."""
        pairs = places.shape[-1] // 2
        found: NDArray[np.float64] = places * ((self.across, self.down) * pairs) + (self.left, self.top) * pairs
        return found


def letterboxed(frame: Picture, place: Picture, middle: bool = True) -> Fit:
    """Write the whole frame into the middle of `place` [h, w, 3], or its corner, as large as fits, grey around it.

    Bilinear without smoothing, by OpenCV, as in the training and measurements of YOLO models.
    """
    height, width = frame.shape[:2]
    room_h, room_w = place.shape[:2]
    scale = min(room_h / height, room_w / width)
    new_w, new_h = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (round((room_w - new_w) / 2 - 0.1), round((room_h - new_h) / 2 - 0.1)) if middle else (0, 0)
    place[:top], place[top + new_h :], place[:, :left], place[:, left + new_w :] = GREY, GREY, GREY, GREY
    inner = place[top : top + new_h, left : left + new_w]
    if (new_h, new_w) == (height, width):
        inner[:] = frame
    else:
        cv2 = opencv()
        cv2.resize(np.ascontiguousarray(frame), (new_w, new_h), dst=inner, interpolation=cv2.INTER_LINEAR)
    return Fit(new_w / width, new_h / height, left, top, width, height)


def stretched(frame: Picture, place: Picture) -> Fit:
    """Write the whole frame into the whole of `place`, each side by its own scale, bilinear with smoothing."""
    height, width = frame.shape[:2]
    room_h, room_w = place.shape[:2]
    place[:] = frame if frame.shape == place.shape else _smooth(frame, (room_w, room_h), reducing_gap=2.0)
    return Fit(room_w / width, room_h / height, 0.0, 0.0, width, height)


def cropped(frame: Picture, place: Picture) -> Fit:
    """Write into `place` the largest middle part of the frame that has its shape."""
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
    CORNER: partial(letterboxed, middle=False),
    STRETCH: stretched,
    CROP: cropped,
}


def planes_of(picture: Picture) -> NDArray[np.uint8]:
    """A picture as [3, h, w]."""
    planes = np.empty((3, *picture.shape[:2]), np.uint8)
    if (cv2 := opencv()) is not None:  # seven times as fast
        cv2.split(picture, list(planes))
    else:
        planes[:] = picture.transpose(2, 0, 1)
    return planes


def _smooth(frame: Picture, size: tuple[int, int], reducing_gap: float | None = None) -> Picture:
    picture = Image.fromarray(frame)
    return np.asarray(picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=reducing_gap))


SIZES_NAME: Final = "orig_target_sizes"  # a second input [n, 2], for width and height of the first


@dataclass(frozen=True, slots=True, eq=False)
class FittedPicture:
    """A frame in the size of an input. pixels: uint8, in the order of the input's axes. fit: the frame's place in it.
    resize: one of `FITTINGS`."""

    pixels: NDArray[np.uint8]
    fit: Fit
    resize: str


@dataclass(frozen=True, slots=True)
class PictureInput:
    """The input of a graph. last: whether its channels are the last axis. size: width and height. sizes: whether the
    graph has a second input for the size."""

    name: str
    dtype: Any
    last: bool
    size: tuple[int, int]
    sizes: bool

    def fitted(self, frame: Picture, resize: str) -> FittedPicture:
        """A frame in this input's size."""
        width, height = self.size
        place = np.empty((height, width, 3), np.uint8)
        fit = FITTINGS[resize](frame, place)
        return FittedPicture(place if self.last else planes_of(place), fit, resize)

    def tensors(self, pictures: Sequence[FittedPicture], dialect: Dialect | None) -> dict[str, NDArray[Any]]:
        """The graph's inputs for these pictures; floating pixels are (pixel / 255 - mean) / std of the dialect."""
        known, axis = dialect or Dialect(), -1 if self.last else 0
        ordered = [np.flip(p.pixels, axis) if known.bgr else p.pixels for p in pictures]
        if self.dtype == np.uint8:
            pixels: NDArray[Any] = np.stack(ordered)
        else:
            pixels = np.empty((len(pictures), *self.shape), np.float32)
            for picture, row in zip(ordered, pixels, strict=True):
                np.divide(picture, np.float32(255.0), out=row)
                if (known.mean, known.std) != (Dialect.mean, Dialect.std):
                    channels = (3,) if self.last else (3, 1, 1)
                    row -= np.asarray(known.mean, np.float32).reshape(channels)
                    row /= np.asarray(known.std, np.float32).reshape(channels)
        rows = {self.name: pixels.astype(self.dtype, copy=False)}
        if self.sizes:
            rows[SIZES_NAME] = np.tile(np.array([self.size], np.int64), (len(pictures), 1))
        return rows

    @property
    def shape(self) -> tuple[int, int, int]:
        width, height = self.size
        return (height, width, 3) if self.last else (3, height, width)


def picture_input(
    path: Path, session: OnnxSession, size: tuple[int, int] | None, metadata: tuple[int, int] | None
) -> PictureInput:
    """The input for pictures. size: the user's. metadata: the size there. Raises ConfigError."""
    others = dict(session.inputs)
    sizes = others.pop(SIZES_NAME, None)
    if len(others) != 1 or (sizes is not None and not (sizes.dtype.kind == "i" and fits((None, 2), sizes.dims))):
        found = ", ".join(f"{name!r} {shown(port.dims)}" for name, port in session.inputs.items())
        raise ConfigError(f"{path}: found the inputs {found}, expected one, for pictures")
    ((name, port),) = others.items()
    where, found = f"{path}: input {name!r}", shown(port.dims)
    if len(port.dims) != 4 or 3 not in (port.dims[1], port.dims[3]):
        raise ConfigError(f"{where}: found {found}, expected [n, 3, h, w] or [n, h, w, 3]")
    if port.dtype != np.uint8 and port.dtype.kind != "f":
        raise ConfigError(f"{where}: found {port.dtype}, expected uint8 or floating")
    last = port.dims[1] != 3
    height, width = port.dims[1:3] if last else port.dims[2:4]
    if size is None:
        if (width is None or height is None) and metadata is None:
            raise ConfigError(f"{where}: takes any size of picture, {found}; choose one, such as --size 640")
        size = (width or metadata[0], height or metadata[1]) if metadata else (width or 0, height or 0)
    elif width not in (None, size[0]) or height not in (None, size[1]):
        takes = f"input {name!r} takes width {width or 'any'} and height {height or 'any'}"
        raise ConfigError(f"{path}: size {size[0]}x{size[1]}: {takes}")
    return PictureInput(name, port.dtype, last, size, sizes is not None)


def result_of(found: Found, fit: Fit, names: Mapping[int, str], size: tuple[int, int]) -> dict[str, Any]:
    """A feed's result: boxes, scores, labels, and keypoints, polygons and masks where the graph has them.

    Pixels are rounded to hundredths, scores to millionths. Boxes outside of the frame are left out. size: width and
    height of the input.
    """
    if found.boxes is None:
        return _classes(found, names)
    boxes = fit.back(found.boxes)
    fine = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    result: dict[str, Any] = {
        "boxes": boxes[fine].round(2).tolist(),
        "scores": found.scores[fine].round(6).tolist(),
        "labels": _named(found.labels[fine], names),
    }
    if found.points is not None:
        points = found.points[fine]  # [k, m, 2 or 3]: x, y, and how visible
        places = fit.back(points[..., :2]).round(2)
        result["keypoints"] = np.concatenate([places, points[..., 2:].round(4)], axis=-1).tolist()
    if found.polygons is not None:
        result["polygons"] = fit.unbounded(found.polygons[fine]).round(2).tolist()
    if found.masks is not None:
        pairs = zip(found.masks[fine], boxes[fine], strict=True)
        result["masks"] = [_mask(mask, box, fit, size) for mask, box in pairs]
    return result


def _classes(found: Found, names: Mapping[int, str]) -> dict[str, Any]:
    labels = _named(found.labels, names)
    scores = found.scores.round(6).tolist()
    return {"labels": labels, "scores": scores, "text": f"{labels[0]} {scores[0]:.2f}" if labels else ""}


def _named(labels: NDArray[np.int64], names: Mapping[int, str]) -> list[Any]:
    return [names.get(label, label) for label in labels.tolist()]


def _mask(mask: NDArray[np.bool_], box: NDArray[np.float64], fit: Fit, size: tuple[int, int]) -> dict[str, Any]:
    """The cells of a mask that cover a box of the frame. `box`: their edges in pixels of the frame. `size`: rows and
    columns. `counts`: lengths of runs, row by row, outside and inside of the mask in turn, the first one outside."""
    height, width = mask.shape
    across, down = width / size[0], height / size[1]
    x0, y0, x1, y1 = fit.forth(box)
    left, right = _cells(x0 * across, x1 * across, width)
    top, bottom = _cells(y0 * down, y1 * down, height)
    inner = mask[top:bottom, left:right]
    covered = fit.unbounded(np.array([left / across, top / down, right / across, bottom / down]))
    changes = np.flatnonzero(np.diff(inner.reshape(-1), prepend=False))
    counts = np.diff(np.concatenate([[0], changes, [inner.size]]))
    return {"box": covered.round(2).tolist(), "size": list(inner.shape), "counts": counts.tolist()}


def _cells(first: float, last: float, most: int) -> tuple[int, int]:
    """The whole cells, at least one, that cover a range."""
    low = min(max(0, int(np.floor(first))), most - 1)
    return low, min(max(low + 1, int(np.ceil(last))), most)
