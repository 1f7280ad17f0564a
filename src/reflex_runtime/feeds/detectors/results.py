"""What was found in a picture, as a feed's result: a mapping that JSON can hold, in pixels of the frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.feeds.detectors.fitting import Fit
from reflex_runtime.feeds.detectors.found import Found


def result_of(found: Found, fit: Fit, names: Mapping[int, str], size: tuple[int, int]) -> dict[str, Any]:
    """Boxes, scores and labels, and keypoints, polygons and masks where the graph has them; see docs/feeds.md.

    Numbers are rounded to hundredths of a pixel and millionths of a score. Boxes outside of the frame are left out.
    size: width and height of the input.
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
        result["keypoints"] = _points(found.points[fine], fit)
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


def _points(points: NDArray[np.float64], fit: Fit) -> list[Any]:
    """[k, m, 2 or 3]: x, y, and how visible each is."""
    placed = np.concatenate([fit.back(points[..., :2]).round(2), points[..., 2:].round(4)], axis=-1)
    found: list[Any] = placed.tolist()
    return found


def _mask(mask: NDArray[np.bool_], box: NDArray[np.float64], fit: Fit, size: tuple[int, int]) -> dict[str, Any]:
    """The cells of a mask that a box of the frame touches: `box` in pixels of the frame, which whole cells may exceed,
    `size` (rows, columns) of the cells, `counts` of equal cells, row by row: first those outside of the mask, then
    inside, and so on."""
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
    """Whole cells, at least one, that cover a stretch."""
    low = min(max(0, int(np.floor(first))), most - 1)
    return low, min(max(low + 1, int(np.ceil(last))), most)
