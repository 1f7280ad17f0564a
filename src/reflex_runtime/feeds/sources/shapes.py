"""Moving shapes as a source without a camera or a file. Picture i depends only on the options and on i, so that the
right detections are known. `DETECTOR` finds the shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, cos, pi, sin
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.pipeline import Picture, SourceError
from reflex_runtime.settings.declare import convert, one_of

LABELS: Final = ("circle", "square", "triangle")
DETECTOR: Final = Path(__file__).parent.parent / "detectors" / "shapes.onnx"
MAX_SIDE: Final = 4096

Image = NDArray[np.uint8]  # RGB [height, width, 3]
Made = TypeVar("Made")

_CORNERS: Final = {"square": 4, "triangle": 3}
_SMALLEST, _LARGEST = 0.065, 0.15  # radius of the circle around a shape, as a share of the smaller side
_GROUND, _SHAPE, _NOISE = (25, 130), (60, 215), 40  # brightness; with the noise it stays below 256
_BRIGHT = 185  # least brightness of a shape's brightest channel: it stands out from any ground
_ROAM = 32  # most pixels by which the noise is shifted from frame to frame


class DrawnSource:
    """A source whose picture i is `draw(i)`, shown at i / fps seconds.

    name: for people. fps: pictures per second, in (0, 1000]. frames: number of pictures, None without end.
    live: the reader takes the pictures at their times (`paced`), as from a camera; else at once, as from a file.
    `open` begins again at picture 0.
    """

    def __init__(
        self, name: str, draw: Callable[[int], Image], fps: float = 15.0, frames: int | None = None, live: bool = True
    ) -> None:
        check("fps", fps, 0 < fps <= 1000, "in (0, 1000]")
        check("frames", frames, frames is None or frames >= 1, ">= 1, or None for no end")
        self.name, self.live, self.paced, self.total = name, live, live, frames
        self.fps, self.step = fps, 1.0 / fps
        self._draw = draw
        self._interrupted = self._open = False
        self._next = 0

    def open(self) -> None:
        self._check()
        self._next, self._open = 0, True

    def read(self) -> Picture | None:
        """The next picture and its time. The array is new at every call."""
        self._check()
        if not self._open:
            raise SourceError(f"{self.name}: not open")
        if self._next == self.total:
            return None
        i, self._next = self._next, self._next + 1
        return self._draw(i), i / self.fps

    def close(self) -> None:
        self._open = False

    def interrupt(self) -> None:
        """Every later call raises SourceError."""
        self._interrupted = True

    def _check(self) -> None:
        if self._interrupted:
            raise SourceError(f"{self.name}: interrupted")


class ShapesSource(DrawnSource):
    """`Shapes` as a camera, or with realtime=False as a file. scene: what it draws."""

    def __init__(
        self,
        seed: int = 0,
        fps: float = 15.0,
        seconds: float | None = None,
        realtime: bool = True,
        size: tuple[int, int] = (320, 240),
        count: int = 3,
    ) -> None:
        check("seconds", seconds, seconds is None or 0 < seconds <= 1e9, "in (0, 1e9], or None for no end")
        self.scene = Shapes(seed, size, count)
        frames = None if seconds is None else max(1, ceil(seconds * fps - 1e-9))
        super().__init__(f"shapes:seed={seed},fps={fps:g},size={size[0]}x{size[1]}", self.scene.picture, fps, frames,
                         realtime)  # fmt: skip


def shapes_source(text: str) -> ShapesSource:
    """The source of shapes:seed=3,fps=15,seconds=10,size=320x240,count=3,realtime=false. Raises ConfigError."""
    known = {"seed": int, "fps": float, "seconds": float, "size": size_of, "count": int, "realtime": bool}
    return made_of(text, ShapesSource, known)


def made_of(text: str, make: Callable[..., Made], known: Mapping[str, Any]) -> Made:
    """Call `make` with the options of SCHEME:NAME=VALUE,NAME=VALUE. known: the type of each option, or a function of
    its text and its name in errors. Raises ConfigError."""
    scheme, _, options = text.partition(":")
    found: dict[str, Any] = {}
    for name, _, value in (item.partition("=") for item in options.split(",") if item):
        if name not in known:
            raise ConfigError(f"{scheme}:{name}: {one_of(name, known)}")
        if name in found:
            raise ConfigError(f"{scheme}:{name}: is given twice")
        kind, where = known[name], f"{scheme}:{name}"
        found[name] = convert(value, kind, where) if isinstance(kind, type) else kind(value, where)
    try:
        return make(**found)
    except ConfigError as error:
        raise ConfigError(f"{scheme}:{error.message}") from None


def size_of(text: str, where: str) -> tuple[int, int]:
    """Width and height of a text like 320x240. Raises ConfigError."""
    sides = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if sides is None:
        raise ConfigError(f"{where}={text}: must be a size like 320x240")
    return int(sides[1]), int(sides[2])


def check(name: str, value: object, right: bool, must: str) -> None:
    """Raise ConfigError unless `right`."""
    if not right:
        raise ConfigError(f"{name}={value!r}: must be {must}")


@dataclass(frozen=True, slots=True)
class _Shape:
    """One shape, which moves and turns evenly, and is reflected at the edges of the picture."""

    label: str
    radius: float
    colour: NDArray[np.float32]
    start: tuple[float, float]  # pixels on the way from edge to edge and back
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
        """Its place in the picture, and the covered share of each pixel there, 0 … 1: [rows, columns, 1]."""
        cx, cy = self.centre(i, size)
        x0, y0, x1, y1 = self.box(i, size)
        left, top = max(0, int(x0) - 1), max(0, int(y0) - 1)
        right, bottom = min(size[0], int(x1) + 2), min(size[1], int(y1) + 2)
        x = np.arange(left, right, dtype=np.float32) + np.float32(0.5 - cx)
        y = (np.arange(top, bottom, dtype=np.float32) + np.float32(0.5 - cy))[:, None]
        inside: NDArray[np.float32]  # distance to the edge in pixels, positive inside
        if self.label == "circle":
            inside = self.radius - np.sqrt(x * x + y * y)
        else:  # the normals of its sides are half-way between its corners
            half = pi / _CORNERS[self.label]
            outwards = [np.float32(dx) * x + np.float32(dy) * y for dx, dy in self.directions(i, half)]
            inside = np.float32(self.radius * cos(half)) - np.maximum.reduce(outwards)
        return (slice(top, bottom), slice(left, right)), np.clip(inside + 0.5, 0.0, 1.0)[..., None]


class Shapes:
    """Moving shapes, drawn one over the other.

    seed: of everything random. size: width and height in pixels, in [32, 4096]. count: shapes, 1 … 20.
    speed: highest speed in pixels per picture, where the smaller side has 240 pixels.
    """

    def __init__(self, seed: int, size: tuple[int, int] = (320, 240), count: int = 3, speed: float = 4.0) -> None:
        check("size", size, all(32 <= side <= MAX_SIDE for side in size), f"width and height in [32, {MAX_SIDE}]")
        check("count", count, 1 <= count <= 20, "1 … 20")
        check("seed", seed, seed >= 0, ">= 0")
        self.seed, self.size, self.count = seed, (int(size[0]), int(size[1])), count
        rng = np.random.default_rng(seed)
        self._ground = _ground(rng, self.size)
        self.shapes = [self._shape(rng, speed) for _ in range(count)]
        amount = int(rng.integers(1, _NOISE + 1))
        self._noise = rng.integers(0, amount, (self.size[1] + _ROAM, self.size[0] + _ROAM, 3), np.uint8)

    def picture(self, i: int) -> Image:
        """Picture i ≥ 0: RGB, uint8 [height, width, 3], a new array."""
        picture = self._ground.copy()
        for shape in self.shapes:
            where, alpha = shape.cover(i, self.size)
            patch = picture[where]
            patch[:] = patch + alpha * (shape.colour - patch)
        width, height = self.size
        down, right = (i * 13 + i * i * 5) % _ROAM, (i * 7 + i * i * 3) % _ROAM
        picture += self._noise[down : down + height, right : right + width]
        return picture

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
    """The place of a point that goes from 0 to span and back for ever, after `way`."""
    along = way % (2 * span)
    return 2 * span - along if along > span else along


def _ground(rng: np.random.Generator, size: tuple[int, int]) -> Image:
    """A background of soft patches: a few random pixels, enlarged."""
    few = rng.integers(*_GROUND, (int(rng.integers(3, 9)), int(rng.integers(3, 9)), 3), np.uint8)
    return np.array(Pillow.fromarray(few).resize(size, Pillow.Resampling.BILINEAR))
