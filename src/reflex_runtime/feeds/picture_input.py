"""The input of a graph that takes pictures: its size, its order of axes, and the tensor of a batch of frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.fitting import FITTINGS, Fit, Picture, planes_of
from reflex_runtime.run.onnx_session import OnnxSession, Port, shown

SIZES_NAME: Final = "orig_target_sizes"  # of a second input [n, 2] that gets the width and height of the first


@dataclass(frozen=True, slots=True)
class PixelScale:
    """What a floating input gets of a pixel: (pixel / 255 - mean) / std, per channel."""

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def plain(self) -> bool:
        """Whether pixels are only divided."""
        return not any(self.mean) and set(self.std) == {1.0}


@dataclass(frozen=True, slots=True, eq=False)
class FittedPicture:
    """A frame brought to the size of an input. pixels: uint8, in the order of the input's axes. fit: where the frame
    lies in it. resize: the way it was done, of `FITTINGS`."""

    pixels: NDArray[np.uint8]
    fit: Fit
    resize: str


@dataclass(frozen=True, slots=True)
class PictureInput:
    """name: of the input. last: whether its channels are the last axis. size: width and height. sizes: whether there is
    a second input for the size."""

    name: str
    dtype: Any
    last: bool
    size: tuple[int, int]
    sizes: bool

    def fitted(self, frame: Picture, resize: str) -> FittedPicture:
        """A frame brought to this input's size."""
        width, height = self.size
        place = np.empty((height, width, 3), np.uint8)
        fit = FITTINGS[resize](frame, place)
        return FittedPicture(place if self.last else planes_of(place), fit, resize)

    def takes(self, picture: FittedPicture, resize: str) -> bool:
        """Whether `fitted` makes pictures of this form."""
        return picture.resize == resize and picture.pixels.shape == self._shape

    def tensors(self, pictures: Sequence[FittedPicture], scale: PixelScale) -> dict[str, NDArray[Any]]:
        """The graph's inputs for these pictures."""
        if self.dtype == np.uint8:
            pixels: NDArray[Any] = np.stack([picture.pixels for picture in pictures])
        else:
            pixels = np.empty((len(pictures), *self._shape), np.float32)
            for picture, row in zip(pictures, pixels, strict=True):
                self._scale(picture.pixels, row, scale)
        rows = {self.name: pixels.astype(self.dtype, copy=False)}
        if self.sizes:
            rows[SIZES_NAME] = np.tile(np.array([self.size], np.int64), (len(pictures), 1))
        return rows

    def _scale(self, pixels: NDArray[np.uint8], row: NDArray[np.float32], scale: PixelScale) -> None:
        np.divide(pixels, np.float32(255.0), out=row)
        if not scale.plain:
            channels = (3,) if self.last else (3, 1, 1)
            row -= np.asarray(scale.mean, np.float32).reshape(channels)
            row /= np.asarray(scale.std, np.float32).reshape(channels)

    @property
    def _shape(self) -> tuple[int, int, int]:
        width, height = self.size
        return (height, width, 3) if self.last else (3, height, width)


def picture_input(
    path: Path, session: OnnxSession, size: tuple[int, int] | None, said: tuple[int, int] | None
) -> PictureInput:
    """Find the input for pictures. size: that the user wants. said: that the metadata says. Raises ConfigError."""
    others = dict(session.inputs)
    sizes = others.pop(SIZES_NAME, None)
    if len(others) != 1 or (sizes is not None and not _takes_sizes(sizes)):
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
        if (width is None or height is None) and said is None:
            raise ConfigError(f"{where}: takes any size of picture, {found}; choose one, such as --size 640")
        size = (width or said[0], height or said[1]) if said else (width or 0, height or 0)
    elif width not in (None, size[0]) or height not in (None, size[1]):
        takes = f"input {name!r} takes width {_any(width)} and height {_any(height)}"
        raise ConfigError(f"{path}: size {size[0]}x{size[1]}: {takes}")
    return PictureInput(name, port.dtype, last, size, sizes is not None)


def _takes_sizes(port: Port) -> bool:
    return port.dtype.kind == "i" and len(port.dims) == 2 and port.dims[1] in (None, 2)


def _any(side: int | None) -> str:
    return "any" if side is None else str(side)
