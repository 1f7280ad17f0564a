"""What a dialect makes of a graph's outputs, and what limits it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LETTERBOX: Final = "letterbox"  # the whole picture in the middle, grey around it
STRETCH: Final = "stretch"
CROP: Final = "crop"  # the middle of the picture, as large as fits

Outputs = Mapping[str, NDArray[Any]]  # output → array [n, …]


@dataclass(frozen=True, slots=True)
class DetectionLimits:
    """score: what has less is left out. iou: of two boxes of one class that overlap by more, the one with the lower
    score is left out. most: results of a picture. classes: the only ones that are kept; None keeps all.
    """

    score: float
    iou: float
    most: int
    classes: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in one picture, best first where the graph does not say otherwise.

    boxes: [k, 4], x0, y0, x1, y1 in pixels of the graph's input; None if the graph has none. scores: [k]. labels: [k].
    points: [k, m, 2 or 3], x and y in the same pixels, and how visible the point is. masks: [k, h, w] bool, each over
    the whole input. polygons: [k, 4, 2], the corners of boxes that are turned; `boxes` are then around them.
    """

    boxes: NDArray[np.float64] | None
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    points: NDArray[np.float64] | None = None
    masks: NDArray[np.bool_] | None = None
    polygons: NDArray[np.float64] | None = None


class Dialect:
    """The meaning of a graph's outputs.

    name: in logs and on the page. resize: how pictures are brought to the graph's size unless the user says otherwise.
    score, most: limits unless the user says otherwise. overlaps: whether it leaves out overlapping boxes, so that `iou`
    has an effect. mean, std: as of `OnnxFrames`, unless the user says otherwise.
    """

    name = ""
    resize = STRETCH
    score = 0.5
    most = 300
    overlaps = False
    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)

    def found(self, outputs: Outputs, limits: DetectionLimits) -> list[Found]:
        """One per picture."""
        raise NotImplementedError
