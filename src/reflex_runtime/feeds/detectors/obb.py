"""Boxes that are turned by an angle, as heads for pictures from above give them (`task: obb`).

A row or column is a box's middle, width, height and angle: radians clockwise from the picture's x axis to its width.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_CANDIDATES: Final = 3_000  # boxes of a picture that are compared: the best ones
AT_ONCE: Final = 128
SMALL: Final = 1e-7

Array = NDArray[Any]


def polygons_of(turned: Array) -> NDArray[np.float64]:
    """The corners [k, 4, 2] of boxes [k, 5], one after the other around each box."""
    cos, sin = np.cos(turned[:, 4]), np.sin(turned[:, 4])
    along = np.stack([cos, sin], axis=1) * turned[:, 2:3] / 2
    across = np.stack([-sin, cos], axis=1) * turned[:, 3:4] / 2
    middle = turned[:, :2]
    corners = (middle + along + across, middle + along - across, middle - along - across, middle - along + across)
    found: NDArray[np.float64] = np.stack(corners, axis=1)
    return found


def kept_obb(turned: Array, scores: Array, labels: NDArray[np.int64], iou: float, most: int) -> NDArray[np.int64]:
    """The numbers of the boxes that stay, best first, at most `most`.

    A box is left out if a better one of its label, whether that stays or not, is like it by more than `iou`: such
    models are measured so. How alike two boxes are is that of two normal distributions of their extent (ProbIoU,
    arXiv:2106.06072).
    """
    order = np.argsort(-scores, kind="stable")[:MOST_CANDIDATES]
    turned, labels = turned[order].astype(np.float32), labels[order]
    shapes = _spread(turned)
    stays: list[NDArray[np.int64]] = []
    for start in range(0, len(order), AT_ONCE):
        numbers = np.arange(start, min(start + AT_ONCE, len(order)))
        before = np.arange(numbers[-1] + 1)
        alike = _alike(turned, shapes, before, numbers) > iou
        alike &= (labels[before][:, None] == labels[numbers][None]) & (before[:, None] < numbers[None])
        stays.append(numbers[~alike.any(axis=0)])
        if sum(map(len, stays)) >= most:
            break
    return order[np.concatenate(stays)[:most]] if stays else order[:0]


def _spread(turned: Array) -> tuple[Array, Array, Array]:
    """The covariance of an even distribution over each box: of x, of y, and of both."""
    a, b = turned[:, 2] ** 2 / 12, turned[:, 3] ** 2 / 12
    cos, sin = np.cos(turned[:, 4]), np.sin(turned[:, 4])
    return a * cos**2 + b * sin**2, a * sin**2 + b * cos**2, (a - b) * cos * sin


def _alike(turned: Array, shapes: tuple[Array, Array, Array], one: Array, other: Array) -> Array:
    """[i, j]: how alike box one[i] and box other[j] are, 0 … 1."""
    a1, b1, c1 = (part[one][:, None] for part in shapes)
    a2, b2, c2 = (part[other][None] for part in shapes)
    x = turned[one][:, None, 0] - turned[other][None, :, 0]
    y = turned[one][:, None, 1] - turned[other][None, :, 1]
    common = (a1 + a2) * (b1 + b2) - (c1 + c2) ** 2
    away = ((a1 + a2) * y**2 + (b1 + b2) * x**2) / (common + SMALL) / 4 - (c1 + c2) * x * y / (common + SMALL) / 2
    own = np.sqrt(np.maximum(a1 * b1 - c1**2, 0) * np.maximum(a2 * b2 - c2**2, 0))
    form = np.log(common / (4 * own + SMALL) + SMALL) / 2
    distance = np.clip(away + form, SMALL, 100)
    result: Array = 1 - np.sqrt(1 - np.exp(-distance) + SMALL)
    return result
