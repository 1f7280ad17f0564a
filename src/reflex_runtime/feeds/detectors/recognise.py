"""Recognises the dialect of a graph by its metadata and its outputs for one blank picture."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.heads import (
    CROP,
    IMAGENET,
    STRETCH,
    Classes,
    Dialect,
    Extras,
    NamedBoxes,
    Queries,
    RawHead,
    Rows,
    YoloxHead,
    cells_of,
)

LONGEST: Final = 1_000_000  # characters of a list of names
MOST_NAMES: Final = 100_000
LONGEST_NAME: Final = 200
LARGEST: Final = 16_384  # pixels of a side of the input


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The metadata of a graph; values that cannot be read have their defaults.

    names: labels by number. size: width and height of the input. task: such as detect, segment, pose, classify, obb.
    points: number of keypoints and of columns of each. resize: letterbox, corner, stretch or crop. head: the exporter's
    name of the last layer. at_once: most pictures in a call, None if unknown.
    """

    names: Mapping[int, str]
    size: tuple[int, int] | None = None
    task: str = ""
    points: tuple[int, int] | None = None
    resize: str = ""
    head: str = ""
    at_once: int | None = None


def facts_of(metadata: Mapping[str, str]) -> GraphFacts:
    """Facts from the keys `names`, `imgsz` (height and width), `task`, `kpt_shape`, `resize`, `head`, `args`, `batch`,
    and `rfdetr_inference`, whose `class_id_to_name` has gaps."""
    rfdetr = literal(metadata.get("rfdetr_inference", ""))
    rfdetr = rfdetr if isinstance(rfdetr, dict) else {}
    height_width = _numbers(metadata.get("imgsz", ""), 2)
    return GraphFacts(
        names=_numbered(literal(metadata.get("names", "")) or rfdetr.get("class_id_to_name")) or {},
        size=(height_width[1], height_width[0]) if height_width else None,
        task=metadata.get("task", "")[:40],
        points=_numbers(metadata.get("kpt_shape", ""), 2),  # type: ignore[arg-type]
        resize=metadata.get("resize", "")[:40],
        head=metadata.get("head", "")[:40],
        at_once=_at_once(metadata),
    )


def _numbered(found: Any) -> dict[int, str] | None:
    """Labels by number, from a list or a mapping; None for other values."""
    if isinstance(found, (list, tuple)):
        found = dict(enumerate(found))
    if not isinstance(found, dict) or len(found) > MOST_NAMES:
        return None
    try:
        return {int(number): str(name)[:LONGEST_NAME] for number, name in found.items()}
    except (ValueError, TypeError, OverflowError):
        return None


def names_of_file(path: Path) -> dict[int, str]:
    """Labels by number from a file: JSON or Python as in metadata, or a name on each line. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no UTF-8 text"
        raise ConfigError(f"cannot be read: {why}", field="names") from None
    if text.lstrip()[:1] in ("[", "{", "("):
        found = _numbered(literal(text))
    else:
        found = {number: line.strip()[:LONGEST_NAME] for number, line in enumerate(text.strip().splitlines())}
    if not found or len(text) > LONGEST:
        forms = "a name a line, a list of names, or an object of names by number"
        raise ConfigError(f"must be {forms}, of at most {LONGEST} characters", field="names")
    return found


def literal(text: str) -> Any:
    """The value of a text in JSON or a Python literal; None for other texts."""
    if not text or len(text) > LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _at_once(metadata: Mapping[str, str]) -> int | None:
    """ultralytics exports NMS for batches of one size: with a symbolic axis, results of further pictures are empty."""
    arguments = literal(metadata.get("args", "")[:10_000])
    batch = _numbers(metadata.get("batch", "1"), 1) or (1,)
    return batch[0] if isinstance(arguments, dict) and arguments.get("nms") is True else None


def _numbers(text: str, count: int) -> tuple[int, ...] | None:
    """The first `count` numbers of a text, above 0, as integers; a single number stands for all of them."""
    found = literal(text[:100])
    values = [found] * count if isinstance(found, (int, float)) else found
    if not isinstance(values, (list, tuple)) or len(values) < count:
        return None
    numbers = values[:count]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n <= LARGEST for n in numbers):
        return None
    return tuple(int(n) for n in numbers)


MOST_NUMBERS: Final = 2048  # the largest k of an output [n, k] that is passed on, such as an embedding
_NAMED: Final = (("boxes", "scores", "labels", ""), ("det_boxes", "det_scores", "det_classes", "num_dets"))
_QUERIES: Final = (("pred_boxes", "logits"), ("pred_boxes", "pred_logits"), ("dets", "labels"))
_MASKS: Final = ("masks", "pred_masks")
PIXELS, SHARES, OFFSETS = "in pixels of the input", "in shares of the picture", "not decoded"
ELSEWHERE: Final = "in other places than their own"


@dataclass(frozen=True, slots=True)
class Trial:
    """The outputs of a graph for one blank picture: arrays [1, …]. size: width and height of the picture."""

    outputs: Mapping[str, NDArray[Any]]
    facts: GraphFacts
    size: tuple[int, int]

    @property
    def classes(self) -> int:
        """One more than the highest number with a name, because numbers may have gaps. 0 without names."""
        return max(self.facts.names, default=-1) + 1

    def expected(self, name: str, wanted: str) -> tuple[int, ...]:
        """The shape of an output. wanted: its sizes after the first axis, a word for any size. Raises ConfigError."""
        sizes, found = ["n", *wanted.split(", ")], self.outputs[name].shape
        if len(found) != len(sizes) or any(w.isdigit() and int(w) != f for w, f in zip(sizes, found, strict=True)):
            raise ConfigError(f"output {name!r}: expected [n, {wanted}]; found {self}")
        return found

    def __str__(self) -> str:
        shapes = (f"{name!r} [{', '.join(['n', *map(str, a.shape[1:])])}]" for name, a in self.outputs.items())
        return ", ".join(shapes)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible dialect, and the outputs that prove or contradict it.

    boxes: [k, 4] of the blank picture. unit: the one that the dialect expects. cells: of each box, by `cells_of`; None
    for boxes that belong to no cell. scores: of classes, which must lie within 0 … 1. labels: numbers of classes.
    """

    dialect: Dialect
    boxes: NDArray[Any]
    unit: str = PIXELS
    cells: NDArray[np.float64] | None = None
    scores: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None


def dialect_of(trial: Trial) -> Dialect | None:
    """The dialect, or None for outputs [n] and [n, k ≤ 2048], which are passed on.

    Raises ConfigError for outputs of an unknown form, and for those that contradict their form.
    """
    for name, array in trial.outputs.items():
        if array.shape[:1] != (1,):
            found = f"output {name!r}: found {list(array.shape)} for one picture"
            raise ConfigError(f"{found}, expected a first axis of pictures. Export it for batches")
    if (classes := _classes(trial)) is not None:
        return classes
    for recognise in _RECOGNISERS:
        if (candidate := recognise(trial)) is not None:
            _check(trial, candidate)
            return candidate.dialect
    if all(array.ndim == 1 or (array.ndim == 2 and array.shape[1] <= MOST_NUMBERS) for array in trial.outputs.values()):
        return None
    raise _unknown(trial)


def unit_of(boxes: NDArray[Any], size: tuple[int, int], cells: NDArray[np.float64] | None = None) -> str | None:
    """The unit of the boxes of a blank picture; None if too few boxes are finite and not empty.

    The middles of decoded boxes with a cell increase over the picture as those of their cells do, in pixels or in
    shares. Otherwise the boxes are not decoded if they are nearer to their cells as offsets. Boxes without a cell lie
    in the picture; if they are shares, most of them lie within its first pixel.
    """
    usable = np.isfinite(boxes).all(axis=1) & (cells is not None or boxes.any(axis=1))
    boxes = boxes[usable].astype(np.float64)
    if len(boxes) < (1 if cells is None else 2):
        return None
    if cells is None:  # corners or middles and sizes: half of their sum is in the picture
        return PIXELS if np.median((boxes[:, :2] + boxes[:, 2:]).max(axis=1) / 2) > 1 else SHARES
    own, side = cells[usable, :2], cells[usable, 2:]
    away = own - own.mean(axis=0)
    follow = (away * boxes[:, :2]).sum(axis=0) / (away**2).sum(axis=0)  # the slope of a line through them
    if (follow * size).min() > 0.5:
        return PIXELS if follow.min() > 0.5 else SHARES
    as_offsets, as_pixels = np.abs(boxes[:, :2] - 0.5), np.abs(boxes[:, :2] - own) / side
    return OFFSETS if np.median(as_offsets) < np.median(as_pixels) else ELSEWHERE


def _check(trial: Trial, candidate: Candidate) -> None:
    """Raise ConfigError if the outputs contradict a candidate."""
    boxes, scores, labels = candidate.boxes, candidate.scores, candidate.labels
    if boxes.dtype.kind != "f":
        raise ConfigError(f"{trial}: its boxes are {boxes.dtype}. Export it with floating outputs")
    unit = unit_of(boxes, trial.size, candidate.cells)
    if unit not in (None, candidate.unit):
        seen = f"not {candidate.unit} but {unit}, between {np.nanmin(boxes):.3g} and {np.nanmax(boxes):.3g}"
        raise ConfigError(f"{trial}: its boxes are {seen}. Export it with decoded boxes")
    if candidate.cells is not None and unit == PIXELS and (boxes[:, 2:] >= boxes[:, :2]).all():
        raise ConfigError(f"{trial}: its boxes are corners, expected middles and sizes. Give --processor MODULE:NAME")
    if scores is not None and not ((scores > -0.01) & (scores < 1.01)).all():  # half precision may be a little beyond
        seen = f"classes would score between {scores.min():.3g} and {scores.max():.3g}, expected 0 … 1"
        raise ConfigError(f"{trial}: {seen}: {_task(trial)}. Keypoints and turned boxes need `task` in its metadata")
    if labels is not None and trial.classes and labels.max(initial=0) >= trial.classes:
        raise _other_classes(trial, f"a class number {labels.max():.0f}")


# -- one function per family -------------------------------------------------------------------------------------------


def _named_boxes(trial: Trial) -> Candidate | None:
    for boxes, scores, labels, count in _NAMED:
        if {boxes, scores, labels} <= set(trial.outputs):
            k = trial.expected(boxes, "k, 4")[1]
            for name in (scores, labels):
                trial.expected(name, str(k))
            filled = trial.outputs[scores][0] > 0
            dialect = NamedBoxes(boxes, scores, labels, count if count in trial.outputs else "")
            return Candidate(dialect, trial.outputs[boxes][0][filled], labels=trial.outputs[labels][0][filled])
    return None


def _queries(trial: Trial) -> Candidate | None:
    """A pair of boxes and logits, a row for each query."""
    for boxes, logits in _QUERIES:
        if not {boxes, logits} <= set(trial.outputs):
            continue
        k = trial.expected(boxes, "k, 4")[1]
        wide = trial.expected(logits, f"{k}, classes")[2]
        masks = next((name for name in _MASKS if name in trial.outputs and trial.expected(name, f"{k}, h, w")), "")
        if boxes == "dets" and set(trial.outputs) != {boxes, logits, masks} - {""}:
            raise _unknown(trial)
        none = 0 < trial.classes == wide - 1
        if trial.classes not in (wide, wide - 1) and (trial.classes or boxes != "dets"):
            raise ConfigError(
                f"{logits!r} has {wide} classes, one of which may mean no object: {_count_of_names(trial)}. "
                f"Give --names FILE with {wide} names (a sigmoid each) or {wide - 1} (the last one means no object)"
            )
        dets = boxes == "dets"
        mean, std = IMAGENET if none or dets else (Dialect.mean, Dialect.std)
        form = "softmax" if none and not dets else "sigmoid"
        dialect = Queries(boxes, logits, form, trial.size, mean, std, none, masks)
        return Candidate(dialect, trial.outputs[boxes][0], SHARES)
    return None


def _classes(trial: Trial) -> Dialect | None:
    if len(trial.outputs) != 1:
        return None
    ((name, array),) = trial.outputs.items()
    whole = trial.facts.task == "classify"
    if array.ndim != 2 or not (whole or 1 < trial.classes == array.shape[1]):
        return None
    if trial.classes not in (0, array.shape[1]):
        raise _other_classes(trial, f"{array.shape[1]} classes")
    scores = bool((array >= 0).all() and np.allclose(array.sum(axis=1), 1.0, atol=1e-2))
    # Classifiers with `task: classify` in their metadata were trained on the middle of pictures.
    return Classes(name, not scores, CROP if whole else STRETCH)


def _one_output(trial: Trial) -> Candidate | None:
    """A head of one output, or of one output and prototypes of masks."""
    ranks: dict[int, list[str]] = {}
    for name, array in trial.outputs.items():
        ranks.setdefault(array.ndim, []).append(name)
    heads, prototypes = ranks.get(3, []), ranks.get(4, [])
    if len(heads) != 1 or len(prototypes) > 1 or len(trial.outputs) != len(heads) + len(prototypes):
        return None
    extras = _extras(trial, prototypes[0] if prototypes else "")
    array = trial.outputs[heads[0]][0]
    return _rows(trial, heads[0], array, extras) or _raw_head(trial, heads[0], array, extras)


def _rows(trial: Trial, name: str, array: NDArray[Any], extras: Extras) -> Candidate | None:
    """A row for each box. The sixth number is a class: if it is not whole, it is a score."""
    if array.shape[1] != 6 + extras.columns or (array[:, 5] % 1).any():
        return None
    cells = cells_of(trial.size, len(array))
    if cells is not None and unit_of(array[:, :4], trial.size, cells) == PIXELS:
        return None  # a row for each cell: a raw head
    shares = trial.facts.head == "RTDETRDecoder" and not extras.columns
    dialect = Queries(name, name, "best", trial.size) if shares else Rows(name, extras)
    return Candidate(dialect, array[:, :4], SHARES if shares else PIXELS, labels=array[:, 5])


def _raw_head(trial: Trial, name: str, array: NDArray[Any], extras: Extras) -> Candidate | None:
    """A box for each cell; the size of the input gives the number of cells."""
    classes, other = trial.classes, None
    for rows, places in ((False, array.T), (True, array)):
        boxes, scores = places[:, :4], places[:, 4 : places.shape[1] - extras.columns]
        wide, cells = scores.shape[1], cells_of(trial.size, len(places))
        if cells is None:
            if rows and wide == classes > 0 and not extras.columns:
                return Candidate(Queries(name, name, "scores", trial.size), boxes, SHARES, scores=scores)
            continue
        several = len(np.unique(cells, axis=0)) < len(cells)  # boxes in a cell
        objectness = rows and wide > 1 and (wide == classes + 1 if classes else several)
        if objectness and not several and (scores[:, 0] != 1).any():
            offsets = unit_of(boxes, trial.size, cells) == OFFSETS
            yolox = YoloxHead(name, wide - 1, rows, True, extras, trial.size if offsets else None)
            return Candidate(yolox, boxes, OFFSETS if offsets else PIXELS, cells, scores)
        if objectness or (wide == classes if classes else not rows and wide > 0):
            head = RawHead(name, wide - objectness, rows, objectness, extras)
            return Candidate(head, boxes, PIXELS, cells, scores)
        other = _other_classes(trial, f"{wide} classes") if classes else None
    if other is not None:
        raise other
    return None


_RECOGNISERS: Final[Sequence[Callable[[Trial], Candidate | None]]] = (_named_boxes, _queries, _one_output)


# -- parts of them -----------------------------------------------------------------------------------------------------


def _extras(trial: Trial, prototypes: str) -> Extras:
    if trial.facts.task == "obb":
        return Extras(angle=True)
    count, dims = trial.facts.points or (0, 3)
    if trial.facts.task != "pose" or dims not in (2, 3):
        count = 0
    return Extras(count, dims, prototypes, trial.outputs[prototypes].shape[1] if prototypes else 0)


def _other_classes(trial: Trial, found: str) -> ConfigError:
    return ConfigError(f"{trial}: {found}, but {_count_of_names(trial)}; give --names FILE")


def _count_of_names(trial: Trial) -> str:
    count, classes = len(trial.facts.names), trial.classes
    if not count:
        return "its metadata has no names"
    most = f", up to number {classes - 1}" if count != classes else ""
    return f"its metadata has {count} name{'s'[: count != 1]}{most}"


def _task(trial: Trial) -> str:
    return f"its metadata has task {trial.facts.task!r}" if trial.facts.task else "its metadata has no task"


def _unknown(trial: Trial) -> ConfigError:
    return ConfigError(
        f"its outputs are not known: {trial} for a picture of {trial.size[0]} × {trial.size[1]}; {_task(trial)}; "
        f"{_count_of_names(trial)}. Known are boxes, scores and labels; raw heads [n, 4 + classes, k]; [n, k, 6]; "
        "logits and pred_boxes; [n, classes] (docs/feeds.md, Detectors). If it is one of them, give the names of its "
        "classes: --names FILE. Otherwise give --processor MODULE:NAME"
    )
