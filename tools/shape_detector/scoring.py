"""How well shapes are found, and videos of them: for `check.py`, and for the tests of the bundled detector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.feeds.sources.shapes import Shapes

Truth = tuple[str, float, float, float, float]  # label, x0, y0, x1, y1 in pixels
SEEN = 2 / 3  # a shape of which less is visible is not in the truth


def truth_of(scene: Shapes, i: int) -> list[Truth]:
    """What picture i shows: the whole box of each shape of which at least two thirds are seen."""
    width, height = scene.size
    owner = np.full((height, width), -1)
    areas = []
    for k, shape in enumerate(scene.shapes):
        where, alpha = shape.cover(i, scene.size)
        drawn = alpha[..., 0] > 0.5
        owner[where][drawn] = k
        areas.append(drawn.sum())
    seen = np.bincount(owner[owner >= 0], minlength=scene.count)
    return [
        (shape.label, *shape.box(i, scene.size))
        for shape, area, left in zip(scene.shapes, areas, seen, strict=True)
        if left >= SEEN * area
    ]


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


def write_scene(
    path: Path, seconds: float, fps: float = 15.0, seed: int = 0, size: tuple[int, int] = (320, 240), count: int = 3
) -> None:
    """A video of the scene. Its picture i is `Shapes(seed, size, count).picture(i)`, as far as the codec keeps it."""
    scene = Shapes(seed, size, count)
    write_pictures(path, (scene.picture(i) for i in range(round(seconds * fps))), fps)


def write_pictures(path: Path, pictures: Iterable[NDArray[np.uint8]], fps: float, bit_rate: int = 1_000_000) -> None:
    """Encode pictures of one size, its sides even; the suffix of `path` chooses the container."""
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
        container.mux(stream.encode(None))
