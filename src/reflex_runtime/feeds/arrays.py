"""Results as plain arrays, and as the `Detections` of the library supervision."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.pipeline import Result

NO_TRACK: Final = -1
NO_CLASS: Final = -1
MOST_CELLS: Final = 4_000_000  # of a mask


@dataclass(frozen=True, slots=True, eq=False)
class ResultArrays:
    """The k detections of a result. Positions are pixels of its frame.

    boxes: [k, 4], x0, y0, x1, y1. scores: [k], 1 where the result has none. labels: k names or numbers, None where the
    result has none. classes: [k], a number for each label, -1 for none: see `to_arrays`. tracker_ids: [k], -1 for no
    track yet; None without tracking. keypoints: [k, m, 2 or 3], x, y and how visible. masks: [k, height, width] over
    the whole frame.
    """

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: tuple[Any, ...]
    classes: NDArray[np.int64]
    tracker_ids: NDArray[np.int64] | None = None
    keypoints: NDArray[np.float64] | None = None
    masks: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.boxes)


def to_arrays(result: Result, names: Sequence[str] | None = None, masks: bool = True) -> ResultArrays:
    """The detections of a result as arrays.

    names: the classes in order; a label's number is its place among them. Without names, a label that is a number is
    its own, and any other one gets a number made of its text, the same in every frame and run.
    masks: whether masks are unpacked: each takes a byte for every pixel of the frame.
    Raises ConfigError for a result that has no boxes, or whose fields differ in length.
    """
    value = result.value
    if not isinstance(value, Mapping) or "boxes" not in value:
        raise ConfigError(f"a result of {result.feed!r} has no boxes, so it has no detections")
    try:
        boxes = np.asarray(value["boxes"], dtype=np.float64).reshape(-1, 4)
        k = len(boxes)
        scores = np.ones(k) if value.get("scores") is None else _row(value["scores"], np.float64, k)
        labels = tuple([None] * k if value.get("labels") is None else value["labels"])
        if len(labels) != k:
            raise ValueError(f"{len(labels)} labels of {k} boxes")
        ids = value.get("tracker_ids")
        points = value.get("keypoints")
        return ResultArrays(
            boxes=boxes,
            scores=scores,
            labels=labels,
            classes=np.array([_number(label, names) for label in labels], np.int64),
            tracker_ids=None if ids is None else _row([NO_TRACK if i is None else i for i in ids], np.int64, k),
            keypoints=None if points is None else np.asarray(points, np.float64).reshape(k, -1, _columns(points)),
            masks=_masks(value["masks"], result.frame.size) if masks and value.get("masks") is not None else None,
        )
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"a result of {result.feed!r} has no detections: {error}") from None


def to_supervision(result: Result, names: Sequence[str] | None = None, masks: bool = True) -> Any:
    """The detections of a result as `supervision.Detections`: xyxy, confidence, class_id, tracker_id, mask, and the
    labels as data["class_name"]. names, masks: see `to_arrays`.

    Raises ConfigError if supervision is missing, or for a result without boxes.
    """
    found = to_arrays(result, names, masks)
    return supervision().Detections(
        xyxy=found.boxes.astype(np.float32),
        confidence=found.scores.astype(np.float32),
        class_id=found.classes,
        tracker_id=found.tracker_ids,
        mask=found.masks,
        data={"class_name": np.array(["" if label is None else str(label) for label in found.labels], dtype=str)},
    )


def supervision() -> Any:
    """The library. Raises ConfigError if it is missing."""
    try:
        import supervision as library
    except ImportError:
        raise ConfigError("this needs supervision: in a clone, pip install '.[vision]'") from None
    return library


def _row(values: Any, kind: Any, k: int) -> NDArray[Any]:
    found = np.asarray(values, dtype=kind)
    if found.shape != (k,):
        raise ValueError(f"{found.size} values of {k} boxes")
    return found


def _number(label: Any, names: Sequence[str] | None) -> int:
    if label is None:
        return NO_CLASS
    if names is not None:
        return list(names).index(label) if label in names else NO_CLASS
    if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
        return int(label)
    return zlib.crc32(str(label).encode()) >> 1


def _columns(points: Any) -> int:
    shape = np.shape(points)
    return int(shape[-1]) if len(shape) == 3 else 3


def _masks(masks: Sequence[Any], size: tuple[int, int]) -> NDArray[np.bool_]:
    width, height = size
    found = np.zeros((len(masks), height, width), np.bool_)
    for whole, mask in zip(found, masks, strict=True):
        cells = cells_of(mask)
        if cells is None:
            continue
        x0, y0, x1, y1 = (round(v) for v in mask["box"])
        if not (0 < x1 - x0 <= 2 * width and 0 < y1 - y0 <= 2 * height):
            continue
        inner = Image.fromarray(cells).resize((x1 - x0, y1 - y0), Image.Resampling.NEAREST)
        left, top, right, bottom = max(0, x0), max(0, y0), min(width, x1), min(height, y1)
        if left < right and top < bottom:
            whole[top:bottom, left:right] = np.asarray(inner)[top - y0 : bottom - y0, left - x0 : right - x0]
    return found


def cells_of(mask: Any) -> NDArray[np.bool_] | None:
    """The cells [rows, columns] of a mask of a result; they cover its `box` evenly. None for what is no mask."""
    try:
        rows, columns = (int(n) for n in mask["size"])
        counts = np.asarray(mask["counts"], np.int64)
        if not (0 < rows * columns <= MOST_CELLS and counts.ndim == 1 and counts.min(initial=0) >= 0):
            return None
        if counts.max(initial=0) > rows * columns or counts.sum() != rows * columns:  # their sum could overflow
            return None
        return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(rows, columns)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
