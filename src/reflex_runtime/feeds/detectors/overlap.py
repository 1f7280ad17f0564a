"""Leaves out boxes that overlap a better one of their class: non-maximum suppression in numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_CANDIDATES: Final = 30_000  # boxes of a picture that are compared: the best ones
AT_ONCE: Final = 128


def kept_of(
    boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[np.int64], iou: float, most: int
) -> NDArray[np.int64]:
    """The numbers of the boxes that stay, best first, at most `most`.

    boxes: [k, 4], x0, y0, x1, y1. A box is left out if its intersection with a better box of the same label is more
    than `iou` of their union. Equal scores: the first one is the better one.

    The best `AT_ONCE` boxes are compared with each other in one operation, then the next ones with those that stay and
    with each other, until enough stay.
    """
    order = np.argsort(-scores, kind="stable")[:MOST_CANDIDATES]
    boxes, labels = boxes.astype(np.float32)[order], labels[order]
    kept: list[int] = []
    for start in range(0, len(order), AT_ONCE):
        numbers = np.arange(start, min(start + AT_ONCE, len(order)))
        if kept:
            numbers = numbers[~_overlaps(boxes, labels, np.asarray(kept), numbers, iou).any(axis=0)]
        over = _overlaps(boxes, labels, numbers, numbers, iou)
        left = np.ones(len(numbers), bool)
        for i, number in enumerate(numbers.tolist()):
            if left[i]:
                kept.append(number)
                if len(kept) == most:
                    return order[kept]
                left &= ~over[i]
    return order[kept] if kept else order[:0]


def _overlaps(
    boxes: NDArray[np.float32], labels: NDArray[np.int64], one: NDArray[np.int64], other: NDArray[np.int64], iou: float
) -> NDArray[np.bool_]:
    """[i, j]: whether box one[i] and box other[j] are of one label and overlap by more than iou."""
    a, b = boxes[one][:, None], boxes[other][None]
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    shared = np.maximum(width, 0.0) * np.maximum(height, 0.0)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    more: NDArray[np.bool_] = shared > iou * (areas[one][:, None] + areas[other][None] - shared)
    more &= labels[one][:, None] == labels[other][None]
    return more
