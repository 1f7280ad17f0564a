"""A scene with the truth attached: circles, squares and triangles that move over a noisy ground.

Picture i is computed from the seed and i alone. So a video of it, a live camera of it and the boxes that a detector
should find need no file, no recording and no labels by hand, and two machines agree on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import drawn
from reflex_runtime.demo.drawn import DrawnSource, Image, frames_in

LABELS: Final = ("circle", "square", "triangle")

DETECTOR: Final = Path(__file__).parent / "models" / "shapes.onnx"
"""The detector of these shapes that comes with the package; how it was made and what it measured stands beside it."""

Truth = tuple[str, float, float, float, float]  # label, x0, y0, x1, y1 in pixels

_CORNERS: Final = {"square": 4, "triangle": 3}
_SMALLEST, _LARGEST = 0.065, 0.15  # radius of the circle around a shape, of the picture's smaller side
_GROUND, _SHAPE, _NOISE = (25, 130), (60, 215), 40  # brightness: with the noise on top it stays below 256
_BRIGHT = 185  # least brightness of a shape's brightest colour channel: it stands out from any ground
_ROAM = 32  # the noise lies under the picture at another place in each frame, by up to this many pixels
_SEEN = 2 / 3  # a shape of which less is visible is not in the truth


@dataclass(frozen=True, slots=True)
class _Shape:
    """One shape. It moves evenly, turns evenly, and returns at the edges of the picture."""

    label: str
    radius: float
    colour: NDArray[np.float32]
    start: tuple[float, float]  # of the way from edge to edge and back, in pixels
    speed: tuple[float, float]  # pixels per picture
    angle: float
    turn: float  # radians per picture

    def centre(self, i: int, size: tuple[int, int]) -> tuple[float, float]:
        x, y = (
            self.radius + _there_and_back(start + i * speed, side - 2 * self.radius)
            for start, speed, side in zip(self.start, self.speed, size, strict=True)
        )
        return x, y

    def directions(self, i: int, beside: float = 0.0) -> list[tuple[float, float]]:
        """Unit vectors to its corners, turned by `beside` radians."""
        n = _CORNERS[self.label]
        first = self.angle + i * self.turn + beside
        return [(cos(first + 2 * pi * k / n), sin(first + 2 * pi * k / n)) for k in range(n)]

    def box(self, i: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
        (x, y), r = self.centre(i, size), self.radius
        if self.label == "circle":
            return x - r, y - r, x + r, y + r
        dx, dy = zip(*self.directions(i), strict=True)
        return x + r * min(dx), y + r * min(dy), x + r * max(dx), y + r * max(dy)

    def cover(self, i: int, size: tuple[int, int]) -> tuple[tuple[slice, slice], NDArray[np.float32]]:
        """Where it lies, and how much of each pixel there it covers, 0 … 1: [rows, columns, 1]."""
        cx, cy = self.centre(i, size)
        x0, y0, x1, y1 = self.box(i, size)
        left, top = max(0, int(x0) - 1), max(0, int(y0) - 1)
        right, bottom = min(size[0], int(x1) + 2), min(size[1], int(y1) + 2)
        x = np.arange(left, right, dtype=np.float32) + np.float32(0.5 - cx)
        y = (np.arange(top, bottom, dtype=np.float32) + np.float32(0.5 - cy))[:, None]
        inside: NDArray[np.float32]  # distance to the edge in pixels, positive inside
        if self.label == "circle":
            inside = self.radius - np.sqrt(x * x + y * y)
        else:  # its sides look half-way between its corners
            half = pi / _CORNERS[self.label]
            outwards = [np.float32(dx) * x + np.float32(dy) * y for dx, dy in self.directions(i, half)]
            inside = np.float32(self.radius * cos(half)) - np.maximum.reduce(outwards)
        return (slice(top, bottom), slice(left, right)), np.clip(inside + 0.5, 0.0, 1.0)[..., None]


class Shapes:
    """Moving shapes, drawn one over the other.

    seed: everything about the scene. size: width and height in pixels, in [32, 4096]. count: shapes, 1 … 20.
    speed: pixels per picture of the fastest, for a picture 240 pixels high.
    """

    def __init__(self, seed: int, size: tuple[int, int] = (320, 240), count: int = 3, speed: float = 4.0) -> None:
        if words := _wrong(size):
            raise ConfigError(f"size={size!r}: {words}")
        if not 1 <= count <= 20:
            raise ConfigError(f"count={count!r}: must be 1 … 20")
        if not seed >= 0:
            raise ConfigError(f"seed={seed!r}: must be >= 0")
        self.seed, self.size, self.count = seed, (int(size[0]), int(size[1])), count
        rng = np.random.default_rng(seed)
        self._ground = _ground(rng, self.size)
        self._shapes = [self._shape(rng, speed) for _ in range(count)]
        amount = int(rng.integers(1, _NOISE + 1))
        roam = (self.size[1] + _ROAM, self.size[0] + _ROAM, 3)
        self._noise = rng.integers(0, amount, roam, np.uint8)

    def picture(self, i: int) -> Image:
        """Picture i ≥ 0: RGB, uint8 [height, width, 3], the caller's own."""
        picture = self._ground.copy()
        for shape in self._shapes:
            where, alpha = shape.cover(i, self.size)
            patch = picture[where]
            patch[:] = patch + alpha * (shape.colour - patch)
        width, height = self.size
        down, right = (i * 13 + i * i * 5) % _ROAM, (i * 7 + i * i * 3) % _ROAM
        picture += self._noise[down : down + height, right : right + width]
        return picture

    def truth(self, i: int) -> list[Truth]:
        """What picture i shows: the whole box of each shape of which at least two thirds are seen."""
        width, height = self.size
        owner = np.full((height, width), -1)
        areas = []
        for k, shape in enumerate(self._shapes):
            where, alpha = shape.cover(i, self.size)
            drawn_ = alpha[..., 0] > 0.5
            owner[where][drawn_] = k
            areas.append(drawn_.sum())
        seen = np.bincount(owner[owner >= 0], minlength=self.count)
        return [
            (shape.label, *shape.box(i, self.size))
            for shape, area, left in zip(self._shapes, areas, seen, strict=True)
            if left >= _SEEN * area
        ]

    def _shape(self, rng: np.random.Generator, speed: float) -> _Shape:
        side = min(self.size)
        radius = float(rng.uniform(_SMALLEST, _LARGEST)) * side
        colour = rng.uniform(*_SHAPE, 3)
        colour[rng.integers(3)] = rng.uniform(_BRIGHT, _SHAPE[1])
        fastest = speed * side / 240
        return _Shape(
            label=LABELS[rng.integers(len(LABELS))],
            radius=radius,
            colour=colour.astype(np.float32),
            start=(float(rng.uniform(0, 2 * self.size[0])), float(rng.uniform(0, 2 * self.size[1]))),
            speed=(float(rng.uniform(-fastest, fastest)), float(rng.uniform(-fastest, fastest))),
            angle=float(rng.uniform(0, 2 * pi)),
            turn=float(rng.uniform(-0.06, 0.06)),
        )


def _there_and_back(way: float, span: float) -> float:
    """A point that goes from 0 to span and back for ever, after `way`."""
    along = way % (2 * span)
    return 2 * span - along if along > span else along


def _ground(rng: np.random.Generator, size: tuple[int, int]) -> Image:
    """Soft patches of colour: a few random pixels, enlarged."""
    few = rng.integers(*_GROUND, (int(rng.integers(3, 9)), int(rng.integers(3, 9)), 3), np.uint8)
    return np.array(Pillow.fromarray(few).resize(size, Pillow.Resampling.BILINEAR))


def hits(
    truth: Sequence[Truth], boxes: Sequence[Sequence[float]], labels: Sequence[str], least: float = 0.5
) -> list[float]:
    """Overlaps (intersection over union) of the shapes that were found, at most one box to a shape.

    A box finds a shape of its label that it overlaps by at least `least`. Boxes come best first. Precision is then
    len(hits) / len(boxes), recall len(hits) / len(truth).
    """
    left, found = list(truth), []
    for box, label in zip(boxes, labels, strict=True):
        overlaps = [(_overlap(box, shape[1:]), k) for k, shape in enumerate(left) if shape[0] == label]
        overlap, k = max(overlaps, default=(0.0, -1))
        if overlap >= least:
            found.append(overlap)
            left.pop(k)
    return found


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def write_video(
    path: Path, seconds: float, fps: float = 15.0, seed: int = 0, size: tuple[int, int] = (320, 240), count: int = 3
) -> None:
    """A video of the scene. Its picture i is `Shapes(seed, size, count).picture(i)`, as far as the codec keeps it."""
    scene = Shapes(seed, size, count)
    frames = frames_in(seconds, fps) or 0
    drawn.write_video(path, (scene.picture(i) for i in range(frames)), fps)


class ShapesSource(DrawnSource):
    """The scene as a camera, or with realtime=False as a file, read as fast as possible.

    `scene` tells the truth about each picture: its number is pts · fps.
    """

    def __init__(
        self,
        seed: int = 0,
        fps: float = 15.0,
        seconds: float | None = None,
        realtime: bool = True,
        size: tuple[int, int] = (320, 240),
        count: int = 3,
    ) -> None:
        self.scene = Shapes(seed, size, count)
        name = f"shapes:seed={seed},fps={fps:g},size={size[0]}x{size[1]}"
        super().__init__(name, self.scene.picture, fps, frames_in(seconds, fps), realtime)


def shapes_source(text: str) -> ShapesSource:
    """`shapes:seed=3,fps=15,seconds=10,size=320x240,count=3,realtime=false` → the source; every option may be left out.

    Raises ConfigError.
    """
    numbers: drawn.Kinds = {
        "seed": drawn.whole, "fps": drawn.fps_of, "seconds": drawn.seconds_of, "count": drawn.whole
    }  # fmt: skip
    options = drawn.options_of(text, {**numbers, "size": _size_of, "realtime": drawn.flag})
    return drawn.made_of(text, ShapesSource, options)


def _size_of(text: str) -> tuple[int, int]:
    size = drawn.size_of(text)
    if words := _wrong(size):
        raise ValueError(words)
    return size


def _wrong(size: tuple[int, int]) -> str:
    """What a size must be, if it is not."""
    fits = len(size) == 2 and all(32 <= side <= drawn.MAX_SIDE for side in size)
    return "" if fits else f"must be width and height in [32, {drawn.MAX_SIDE}]"
