"""Leaves out boxes that overlap a better one of their class: non-maximum suppression in numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_CANDIDATES: Final = 30_000  # boxes of a picture that are compared: the best ones


def kept_of(
    boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[np.int64], iou: float, most: int
) -> NDArray[np.int64]:
    """The numbers of the boxes that stay, best first, at most `most`.

    boxes: [k, 4], x0, y0, x1, y1. A box is left out if its intersection with a better box of the same label is more
    than `iou` of their union. Equal scores: the first one is the better one.

    Takes time for every box that stays, not for every pair: each is compared with all that are left in one operation.
    """
    left = np.argsort(-scores, kind="stable")[:MOST_CANDIDATES]
    boxes = boxes.astype(np.float32)[left]
    labels = labels[left]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    while len(left) and len(kept) < most:
        kept.append(int(left[0]))
        corner = np.minimum(boxes[0, 2:], boxes[1:, 2:]) - np.maximum(boxes[0, :2], boxes[1:, :2])
        np.maximum(corner, 0.0, out=corner)
        shared = corner[:, 0] * corner[:, 1]
        apart = (shared <= iou * (areas[0] + areas[1:] - shared)) | (labels[1:] != labels[0])
        left, boxes, areas, labels = left[1:][apart], boxes[1:][apart], areas[1:][apart], labels[1:][apart]
    return np.asarray(kept, np.int64)
