"""Dialects: how the outputs of detectors are read, one for each form of outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LETTERBOX: Final = "letterbox"  # the whole picture in the middle, grey around it
CORNER: Final = "corner"  # the same in the upper left corner
STRETCH: Final = "stretch"
CROP: Final = "crop"  # the middle of the picture, as large as fits

Array = NDArray[Any]
Outputs = Mapping[str, Array]  # output → its array for one picture


@dataclass(frozen=True, slots=True)
class DetectionLimits:
    """score: lowest score that is kept. iou: of two boxes of one class that overlap by more, the one with the lower
    score is left out. most: highest number of results. classes: those that are kept; None keeps all.
    """

    score: float
    iou: float
    most: int
    classes: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The detections in one picture, best first unless the graph has its own order.

    boxes: [k, 4], x0, y0, x1, y1 in pixels of the graph's input; None of a classifier. scores: [k]. labels: [k].
    points: [k, m, 2 or 3], x and y in the same pixels, and how visible. masks: [k, h, w] bool, each over the whole
    input. polygons: [k, 4, 2], the corners of turned boxes; `boxes` are then around them.
    """

    boxes: NDArray[np.float64] | None
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    points: NDArray[np.float64] | None = None
    masks: NDArray[np.bool_] | None = None
    polygons: NDArray[np.float64] | None = None


class Dialect:
    """How a graph's outputs are read, and what its input must be.

    name: in logs and on the page. resize, score, most: the defaults of these settings. overlaps: whether it removes
    overlapping boxes, so that `iou` has an effect. mean, std: of each channel of a floating input. bgr: whether blue
    is the first channel.
    """

    name = ""
    resize = STRETCH
    score = 0.5
    most = 300
    overlaps = False
    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)
    bgr = False

    def found(self, outputs: Outputs, limits: DetectionLimits) -> Found:
        """The detections in the outputs for one picture."""
        raise NotImplementedError


MOST_CANDIDATES: Final = 30_000  # boxes of a picture, the best ones, that are compared
AT_ONCE: Final = 128  # boxes that are compared with each other in one operation
PART: Final = 2048  # boxes that are compared with `AT_ONCE` others in one operation: this fits into a cache

Side = NDArray[np.float32]


def kept_of(
    boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[np.int64], iou: float, most: int
) -> NDArray[np.int64]:
    """The numbers of the boxes that stay, best first, at most `most`.

    boxes: [k, 4], x0, y0, x1, y1. A box is left out if its intersection with a better box of the same label that stays
    is more than `iou` of their union. Of equal scores the first is better.

    The best `AT_ONCE` boxes are compared with each other in one operation; those that stay remove all others that they
    overlap. Then come the best of the rest, until enough stay.
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
    """The boxes, in the order of their scores, that overlap no better one that stays."""
    # A row of bits as one integer: operations on it take a tenth of the time of those on arrays.
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

    In place where possible: these arrays are most of the cost.
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


# -- turned boxes, of heads for aerial pictures (`task: obb`) ----------------------------------------------------------
# A row is a box's middle, width, height and angle: radians clockwise from the x axis to the side called width.

MOST_TURNED: Final = 3_000  # turned boxes of a picture, the best ones, that are compared
SMALL: Final = 1e-7


def polygons_of(turned: Array) -> NDArray[np.float64]:
    """The corners [k, 4, 2] of boxes [k, 5], in order around each box."""
    cos, sin = np.cos(turned[:, 4]), np.sin(turned[:, 4])
    along = np.stack([cos, sin], axis=1) * turned[:, 2:3] / 2
    across = np.stack([-sin, cos], axis=1) * turned[:, 3:4] / 2
    middle = turned[:, :2]
    corners = (middle + along + across, middle + along - across, middle - along - across, middle - along + across)
    found: NDArray[np.float64] = np.stack(corners, axis=1)
    return found


def kept_obb(turned: Array, scores: Array, labels: NDArray[np.int64], iou: float, most: int) -> NDArray[np.int64]:
    """The numbers of the boxes that stay, best first, at most `most`.

    A box is left out if its similarity to a better one of its label, whether that stays or not, is above `iou`, as in
    the measurements of these models. The similarity is ProbIoU (arXiv:2106.06072), that of two normal distributions.
    """
    order = np.argsort(-scores, kind="stable")[:MOST_TURNED]
    turned, labels = turned[order].astype(np.float32), labels[order]
    shapes = _extents(turned)
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


def _extents(turned: Array) -> tuple[Array, Array, Array]:
    """The variances of x and of y and their covariance, of a uniform distribution over each box."""
    a, b = turned[:, 2] ** 2 / 12, turned[:, 3] ** 2 / 12
    cos, sin = np.cos(turned[:, 4]), np.sin(turned[:, 4])
    return a * cos**2 + b * sin**2, a * sin**2 + b * cos**2, (a - b) * cos * sin


def _alike(turned: Array, shapes: tuple[Array, Array, Array], one: Array, other: Array) -> Array:
    """[i, j]: the similarity of box one[i] and box other[j], 0 … 1."""
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


# -- dialects ---------------------------------------------------------------------------------------------------------

IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, slots=True)
class Extras:
    """The columns of a row after box and scores.

    points: number of keypoints, each of `dims` columns. prototypes: the output [n, m, h, w] whose m pictures, weighted
    by `coefficients` columns and added, are a detection's mask; "" for none. angle: whether the last column turns the
    box.
    """

    points: int = 0
    dims: int = 3
    prototypes: str = ""
    coefficients: int = 0
    angle: bool = False

    @property
    def columns(self) -> int:
        """The number of these columns."""
        return self.points * self.dims + self.coefficients + self.angle


@dataclass(frozen=True, slots=True)
class NamedBoxes(Dialect):
    """Boxes [n, k, 4] (x0, y0, x1, y1 in pixels of the input), scores and labels [n, k], in outputs of their own.

    count: the output [n, 1] or [n] with the number of filled rows; "" if all are.
    """

    boxes_name: str = "boxes"
    scores_name: str = "scores"
    labels_name: str = "labels"
    count: str = ""
    name = "boxes, scores and labels"
    score = 0.5

    def found(self, outputs: Outputs, limits: DetectionLimits) -> Found:
        boxes, filled = outputs[self.boxes_name], None
        if self.count:
            filled = int(np.nan_to_num(float(outputs[self.count].reshape(()))).clip(0, len(boxes)))
        order = np.arange(len(boxes))[:filled]
        return _limited(boxes, outputs[self.scores_name], outputs[self.labels_name], limits, order)


@dataclass(frozen=True, slots=True)
class RawHead(Dialect):
    """An output with a column for each place of the picture: [n, 4 + (1) + classes + extras, k], or with the last two
    axes exchanged (`rows`). A box is its middle, width and height in pixels of the input.

    objectness: the fifth number is the probability of any object, by which scores of classes are multiplied. offsets:
    the size of the input if boxes are not decoded: offsets from their cell in strides, and logarithms of sizes.
    """

    output: str
    classes: int
    rows: bool = False
    objectness: bool = False
    extras: Extras = Extras()
    offsets: tuple[int, int] | None = None
    resize = LETTERBOX
    name = "raw head"
    score = 0.25
    overlaps = True

    def found(self, outputs: Outputs, limits: DetectionLimits) -> Found:
        head = outputs[self.output]
        if head.dtype == np.float16:  # numpy compares these slowly
            head = head.astype(np.float32)
        head = head.T if self.rows else head
        first = 5 if self.objectness else 4
        # The score of a class is at most the objectness.
        best = head[4] if self.objectness else head[4 : 4 + self.classes].max(axis=0)
        places = np.flatnonzero(best >= limits.score)
        rows = head[:, places].T
        if self.offsets is not None and (cells := cells_of(self.offsets, head.shape[1])) is not None:
            x, y, stride = cells[places].T.astype(np.float32)
            middles = np.stack([x, y], axis=1) + (rows[:, :2] - 0.5) * stride[:, None]
            rows = np.hstack([middles, np.exp(rows[:, 2:4]) * stride[:, None], rows[:, 4:]])
        classes = rows[:, first : first + self.classes]
        labels = classes.argmax(axis=1) if len(rows) else np.zeros(0, np.int64)
        scores = classes[np.arange(len(rows)), labels]
        if self.objectness:
            scores = scores * rows[:, 4]
        behind, kept = rows[:, first + self.classes :], kept_obb if self.extras.angle else kept_of
        boxes = np.hstack([rows[:, :4], behind]) if self.extras.angle else corners(rows[:, :4])
        fit = np.flatnonzero(wanted_of(boxes, scores, labels, limits))
        best = fit[kept(boxes[fit], scores[fit], labels[fit], limits.iou, limits.most)]
        return found_of(boxes[best], scores[best], labels[best], behind[best], self.extras, outputs)


@dataclass(frozen=True, slots=True)
class YoloxHead(RawHead):
    """The head of YOLOX. Its input is blue, green, red of 0 to 255, with the picture in the corner."""

    resize = CORNER
    std = (1 / 255, 1 / 255, 1 / 255)
    bgr = True
    name = "raw head of YOLOX"


@dataclass(frozen=True, slots=True)
class Rows(Dialect):
    """An output [n, k, 6 + extras] whose boxes do not overlap: x0, y0, x1, y1 in pixels of the input (with an angle:
    middle, width, height), score, class. Empty rows have the score 0."""

    output: str
    extras: Extras = Extras()
    resize = LETTERBOX
    name = "rows without overlaps"
    score = 0.25

    def found(self, outputs: Outputs, limits: DetectionLimits) -> Found:
        rows = outputs[self.output]
        rows = rows[rows[:, 4] >= limits.score].astype(np.float32, copy=False)
        labels = whole_of(rows[:, 5])
        boxes = rows[:, [0, 1, 2, 3, 6]] if self.extras.angle else rows[:, :4]
        fit = np.flatnonzero(wanted_of(boxes, rows[:, 4], labels, limits))[: limits.most]
        return found_of(boxes[fit], rows[fit, 4], labels[fit], rows[fit, 6:], self.extras, outputs)


@dataclass(frozen=True, slots=True)
class Queries(Dialect):
    """A row for each query of a transformer: its box (middle, width, height in shares of the input) and its classes.

    boxes_name, logits_name: outputs [n, k, 4] and [n, k, classes]; one output [n, k, 4 + classes] if they are equal.
    form: of the classes: "scores" between 0 and 1; "sigmoid" or "softmax" of logits; or "best", a score and a class
    number. none: whether the last class means no object. masks: an output [n, k, h, w], above 0 within the object, or
    "". size: width and height of the input.
    """

    boxes_name: str
    logits_name: str
    form: str
    size: tuple[int, int]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    none: bool = False
    masks: str = ""
    name = "queries"
    score = 0.5

    def found(self, outputs: Outputs, limits: DetectionLimits) -> Found:
        both = self.boxes_name == self.logits_name
        logits = outputs[self.logits_name][:, 4 if both else 0 :].astype(np.float32, copy=False)
        best, labels = self._best(logits)
        boxes = corners(outputs[self.boxes_name][:, :4] * np.array(self.size * 2, np.float32))
        order = np.argsort(-best, kind="stable")
        return _limited(boxes, best, labels, limits, order, outputs[self.masks] if self.masks else None)

    def _best(self, logits: Array) -> tuple[Array, Array]:
        """The best score of each query, and its class."""
        if self.form == "best":
            return logits[..., 0], logits[..., 1]
        scores = softmax(logits) if self.form == "softmax" else sigmoid(logits) if self.form == "sigmoid" else logits
        scores = scores[..., :-1] if self.none else scores
        labels = scores.argmax(axis=-1)
        return np.take_along_axis(scores, labels[..., None], -1)[..., 0], labels


@dataclass(frozen=True, slots=True)
class Classes(Dialect):
    """An output [n, classes]: a score for each class of the whole picture. logits: needs softmax."""

    output: str
    logits: bool
    resize: str = STRETCH
    name = "classes of the picture"
    score = 0.0
    most = 5

    def found(self, outputs: Outputs, limits: DetectionLimits) -> Found:
        scores = outputs[self.output].astype(np.float64)
        scores = softmax(scores) if self.logits else scores
        order = np.argsort(-scores, kind="stable")
        order = order[_allowed(scores[order], order, limits)][: limits.most]
        return Found(None, scores[order], order.astype(np.int64))


# -- parts of them -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def cells_of(size: tuple[int, int], count: int) -> NDArray[np.float64] | None:
    """The cell of each of `count` boxes, [count, 3]: its middle in pixels, and its side. None if no grids fit.

    The first grid has cells of 4, 8 or 16 pixels, each further one cells twice as large, up to 128. A cell has one box
    or three; with three, each grid is repeated three times.
    """
    width, height = size
    for first, last, boxes in product(range(2, 5), range(3, 8), (1, 3)):
        sides = [2**i for i in range(first, last + 1)]
        if first < last and count == boxes * sum(-(-width // s) * -(-height // s) for s in sides):
            grids = [np.indices((-(-height // s), -(-width // s)))[::-1].reshape(2, -1).T for s in sides]
            rows = [
                np.tile(np.column_stack([g * s + s / 2, np.full(len(g), s)]), (boxes, 1))
                for g, s in zip(grids, sides, strict=True)
            ]
            return np.concatenate(rows)
    return None


def corners(boxes: Array) -> Array:
    """x0, y0, x1, y1 of boxes [k, 4] of middle, width and height."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def sigmoid(values: Array) -> Array:
    """1 / (1 + e⁻ˣ) of each, without overflow."""
    result: Array = (1 + np.tanh(values / 2)) / 2
    return result


def softmax(values: Array) -> Array:
    """eˣ over their sum along the last axis, without overflow."""
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    result: Array = powers / powers.sum(axis=-1, keepdims=True)
    return result


def found_of(boxes: Array, scores: Array, labels: Array, behind: Array, extras: Extras, outputs: Outputs) -> Found:
    """Detections with their points, masks and polygons. behind: [k, extras.columns]. A point that is not finite becomes
    zeros: 0, 0 and not visible."""
    points = masks = polygons = None
    if extras.angle:
        polygons = polygons_of(boxes.astype(np.float64))
        boxes = np.concatenate([polygons.min(axis=1), polygons.max(axis=1)], axis=1)
    if extras.points:
        points = behind[:, : extras.points * extras.dims].reshape(-1, extras.points, extras.dims).astype(np.float64)
        points[~np.isfinite(points).all(axis=-1)] = 0.0
    if extras.prototypes:
        masks = _masks(behind[:, -extras.coefficients :], outputs[extras.prototypes])
    return Found(boxes.astype(np.float64), scores.astype(np.float64), labels.astype(np.int64), points, masks, polygons)


def _masks(weights: Array, prototypes: Array) -> NDArray[np.bool_]:
    """[k, h, w]: where the weighted sum of the prototypes [m, h, w] is above 0."""
    count, height, width = prototypes.shape
    flat = weights.astype(np.float32) @ prototypes.reshape(count, -1).astype(np.float32)
    return (flat > 0).reshape(-1, height, width)


def _limited(
    boxes: Array, scores: Array, labels: Array, limits: DetectionLimits, order: Array, masks: Array | None = None
) -> Found:
    """The detections within the limits, in this order."""
    labels = whole_of(labels)
    fit = order[wanted_of(boxes, scores, labels, limits)[order]][: limits.most]
    own = None if masks is None else masks[fit] > 0
    return Found(boxes[fit].astype(np.float64), scores[fit].astype(np.float64), labels[fit], masks=own)


def wanted_of(boxes: Array, scores: Array, labels: Array, limits: DetectionLimits) -> NDArray[np.bool_]:
    """Which rows are within the limits and finite."""
    fit: NDArray[np.bool_] = _allowed(scores, labels, limits) & np.isfinite(boxes).all(axis=1)
    return fit


def _allowed(scores: Array, labels: Array, limits: DetectionLimits) -> NDArray[np.bool_]:
    fit: NDArray[np.bool_] = (scores >= limits.score) & np.isfinite(scores) & (labels >= 0)
    return fit if limits.classes is None else fit & np.isin(labels, list(limits.classes))


def whole_of(labels: Array) -> NDArray[np.int64]:
    """Labels rounded to whole numbers; -1 for those that are not finite or too large."""
    if labels.dtype.kind in "iu":
        return labels.astype(np.int64)
    fine = np.isfinite(labels) & (np.abs(labels) < 2**31)
    return np.where(fine, np.round(np.where(fine, labels, 0)), -1).astype(np.int64)
