"""Leaves out boxes that overlap a better one of their class: non-maximum suppression in numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_CANDIDATES: Final = 30_000  # boxes of a picture that are compared: the best ones
AT_ONCE: Final = 128
PART: Final = 2048  # boxes in an operation: what 128 of them are compared with fits into a cache

Side = NDArray[np.float32]


def kept_of(
    boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[np.int64], iou: float, most: int
) -> NDArray[np.int64]:
    """The numbers of the boxes that stay, best first, at most `most`.

    boxes: [k, 4], x0, y0, x1, y1. A box is left out if its intersection with a better box of the same label is more
    than `iou` of their union. Equal scores: the first one is the better one.

    The best `AT_ONCE` boxes are compared with each other in one operation. Those that stay then remove all others that
    overlap them, and the best of what is left are next, until enough stay.
    """
    order = np.argsort(-scores, kind="stable")[:MOST_CANDIDATES]
    labels = labels[order]
    x0, y0, x1, y1 = np.ascontiguousarray(boxes.astype(np.float32)[order].T)
    sides = (x0, y0, x1, y1, (x1 - x0) * (y1 - y0))
    kept: list[int] = []
    left = np.arange(len(order))
    while len(left):
        stay = _best_of(left[:AT_ONCE], sides, labels, iou)
        kept += stay
        if len(kept) >= most:
            break
        parts = [left[k : k + PART] for k in range(AT_ONCE, len(left), PART)]
        clear = [part[~_overlaps(sides, labels, np.asarray(stay), part, iou).any(axis=0)] for part in parts]
        left = np.concatenate(clear) if clear else left[:0]
    return order[kept[:most]] if kept else order[:0]


def _best_of(numbers: NDArray[np.int64], sides: tuple[Side, ...], labels: NDArray[np.int64], iou: float) -> list[int]:
    """Of boxes in the order of their scores those that no better one of them overlaps which stays itself."""
    # A row of bits as one number: an operation on it takes a tenth of the time of one on an array.
    over = np.packbits(_overlaps(sides, labels, numbers, numbers, iou), axis=1, bitorder="little")
    rows, width, gone = over.tobytes(), over.shape[1], 0
    stay: list[int] = []
    for i, number in enumerate(numbers.tolist()):
        if not gone >> i & 1:
            stay.append(number)
            gone |= int.from_bytes(rows[i * width : (i + 1) * width], "little")
    return stay


def _overlaps(
    sides: tuple[Side, ...], labels: NDArray[np.int64], one: NDArray[np.int64], other: NDArray[np.int64], iou: float
) -> NDArray[np.bool_]:
    """[i, j]: whether box one[i] and box other[j] are of one label and overlap by more than iou.

    In place as far as it goes: these arrays are most of what suppression costs.
    """
    (x0, y0, x1, y1, area), (u0, v0, u1, v1, room) = ([side[n] for side in sides] for n in (one, other))
    shared = np.minimum(x1[:, None], u1)
    shared -= np.maximum(x0[:, None], u0)
    np.maximum(shared, 0.0, out=shared)
    height = np.minimum(y1[:, None], v1)
    height -= np.maximum(y0[:, None], v0)
    np.maximum(height, 0.0, out=height)
    shared *= height
    union = np.add(area[:, None], room, out=height)
    union -= shared
    union *= np.float32(iou)
    more: NDArray[np.bool_] = shared > union
    more &= labels[one][:, None] == labels[other]
    return more
