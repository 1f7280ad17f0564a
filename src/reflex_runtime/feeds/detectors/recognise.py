"""Which dialect a graph speaks: told by its metadata, and by its outputs for one blank picture."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.heads import (
    CROP,
    IMAGENET,
    Classes,
    Dialect,
    Extras,
    NamedBoxes,
    Queries,
    RawHead,
    Rows,
)
from reflex_runtime.feeds.detectors.obb import ObbHead, ObbRows

LONGEST: Final = 1_000_000  # characters of a list of names
MOST_NAMES: Final = 100_000
LONGEST_NAME: Final = 200
LARGEST: Final = 16_384  # pixels of a side of the input


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The metadata of a graph, as far as it can be read; what cannot is as if it were not there.

    names: labels by number. size: width and height of the input. task: such as detect, segment, pose, classify.
    points: number of keypoints and columns of each. resize: letterbox, stretch or crop. stride: the largest one. head:
    the exporter's name of what made the outputs. at_once: most pictures in a call, None if that is not said.
    """

    names: Mapping[int, str]
    size: tuple[int, int] | None = None
    task: str = ""
    points: tuple[int, int] | None = None
    resize: str = ""
    stride: int = 32
    head: str = ""
    at_once: int | None = None


def facts_of(metadata: Mapping[str, str]) -> GraphFacts:
    """From metadata by key: `names`, `imgsz` (height and width), `task`, `kpt_shape`, `resize`, `stride`, `head`,
    `args`."""
    height_width = _numbers(metadata.get("imgsz", ""), 2)
    stride = _numbers(metadata.get("stride", ""), 1)
    return GraphFacts(
        names=names_in(metadata.get("names", "")) or {},
        size=(height_width[1], height_width[0]) if height_width else None,
        task=metadata.get("task", "")[:40],
        points=_numbers(metadata.get("kpt_shape", ""), 2),  # type: ignore[arg-type]
        resize=metadata.get("resize", "")[:40],
        stride=stride[0] if stride else 32,
        head=metadata.get("head", "")[:40],
        at_once=_at_once(metadata),
    )


def names_in(text: str) -> dict[int, str] | None:
    """Labels by number from a JSON or Python text of a list, or of a mapping by number. None if it is neither."""
    found = literal(text)
    if isinstance(found, (list, tuple)):
        found = dict(enumerate(found))
    if not isinstance(found, dict) or len(found) > MOST_NAMES:
        return None
    try:
        return {int(number): _name(name) for number, name in found.items()}
    except (ValueError, TypeError, OverflowError):
        return None


def names_of_file(path: Path) -> dict[int, str]:
    """Labels by number: a JSON or Python text as in metadata, or a name a line. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field="names") from None
    except UnicodeDecodeError:
        raise ConfigError("is no UTF-8 text", field="names") from None
    if len(text) > LONGEST:
        raise ConfigError(f"is longer than {LONGEST} characters, the most", field="names")
    if text.lstrip()[:1] in ("[", "{", "("):
        found = names_in(text)
        if found is None:
            raise ConfigError("must be a list of names, or an object of names by number", field="names")
    else:
        found = {number: _name(line.strip()) for number, line in enumerate(text.strip().splitlines())}
    if not found:
        raise ConfigError("has no names in it", field="names")
    return found


def literal(text: str) -> Any:
    """The value that a text writes in JSON or as a Python literal; None for every other text."""
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
    """ultralytics exports NMS for the pictures of one batch: with a symbolic axis, results of all others are empty."""
    arguments = literal(metadata.get("args", "")[:10_000])
    batch = _numbers(metadata.get("batch", "1"), 1) or (1,)
    return batch[0] if isinstance(arguments, dict) and arguments.get("nms") is True else None


def _name(value: Any) -> str:
    return str(value)[:LONGEST_NAME]


def _numbers(text: str, count: int) -> tuple[int, ...] | None:
    """So many whole numbers above 0; one stands for all of them."""
    found = literal(text[:100])
    values = [found] * count if isinstance(found, (int, float)) else found
    if not isinstance(values, (list, tuple)) or len(values) < count:
        return None
    numbers = values[:count]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n <= LARGEST for n in numbers):
        return None
    return tuple(int(n) for n in numbers)


MOST_NUMBERS: Final = 2048  # of an output [n, k] that is passed on as it is, such as an embedding
_STRIDES: Final = ((8, 16, 32), (4, 8, 16, 32), (8, 16, 32, 64), (16, 32))
_NAMED: Final = (("boxes", "scores", "labels", ""), ("det_boxes", "det_scores", "det_classes", "num_dets"))
_SHARE: Final = 1.5  # numbers up to this are shares of the picture: no head has all its boxes in one corner


@dataclass(frozen=True, slots=True)
class Trial:
    """What a graph returned for one blank picture. outputs: arrays [1, …]. size: width and height of the picture."""

    outputs: Mapping[str, NDArray[Any]]
    facts: GraphFacts
    size: tuple[int, int]

    @property
    def classes(self) -> int:
        """How many names there are; 0 if that is not known."""
        return len(self.facts.names)

    def dims(self, name: str) -> tuple[int, ...]:
        return self.outputs[name].shape


def dialect_of(trial: Trial) -> Dialect | None:
    """The dialect, or None for outputs [n] and [n, k ≤ 2048] that are passed on as they are.

    Raises ConfigError for outputs whose meaning is not known, or that may mean two things.
    """
    for recognise in _RECOGNISERS:
        dialect = recognise(trial)
        if dialect is not None:
            return dialect
    if all(array.ndim == 1 or (array.ndim == 2 and array.shape[1] <= MOST_NUMBERS) for array in trial.outputs.values()):
        return None
    raise _unknown(trial)


def shown_outputs(trial: Trial) -> str:
    """Outputs and their shapes as errors show them."""
    shapes = (f"{name!r} [{', '.join(['n', *map(str, a.shape[1:])])}]" for name, a in trial.outputs.items())
    return ", ".join(shapes)


# -- one function per family -------------------------------------------------------------------------------------------


def _named_boxes(trial: Trial) -> Dialect | None:
    for boxes, scores, labels, count in _NAMED:
        if {boxes, scores, labels} <= set(trial.outputs):
            for name, rank in ((boxes, 3), (scores, 2), (labels, 2)):
                dims = trial.dims(name)
                if len(dims) != rank or (rank == 3 and dims[2] != 4) or dims[1] != trial.dims(boxes)[1]:
                    wanted = "[n, k, 4]" if rank == 3 else "[n, k]"
                    raise ConfigError(f"output {name!r}: found {_shape(dims)}, expected {wanted}")
            return NamedBoxes(boxes, scores, labels, count if count in trial.outputs else "")
    return None


def _queries(trial: Trial) -> Dialect | None:
    """A pair of boxes and logits, one row per query."""
    for boxes, logits in (("pred_boxes", "logits"), ("pred_boxes", "pred_logits"), ("dets", "labels")):
        if not {boxes, logits} <= set(trial.outputs):
            continue
        dims, wide = trial.dims(boxes), trial.dims(logits)
        if len(dims) != 3 or dims[2] != 4 or len(wide) != 3 or wide[1] != dims[1]:
            wanted = f"{boxes!r} [n, k, 4] and {logits!r} [n, k, classes]"
            raise ConfigError(f"expected {wanted}; found {shown_outputs(trial)}")
        if boxes == "dets":
            return Queries(boxes, logits, "sigmoid", trial.size, *IMAGENET)
        if trial.classes == wide[2]:
            return Queries(boxes, logits, "sigmoid", trial.size)
        if trial.classes == wide[2] - 1:
            return Queries(boxes, logits, "softmax", trial.size, *IMAGENET)
        raise ConfigError(
            f"{logits!r} has {wide[2]} classes, with or without one for nothing: {_count_of_names(trial)}. "
            f"Give --names FILE with {wide[2]} names (a sigmoid each) or {wide[2] - 1} (softmax, the last for nothing)"
        )
    return None


def _classes(trial: Trial) -> Dialect | None:
    if len(trial.outputs) != 1:
        return None
    ((name, array),) = trial.outputs.items()
    if array.ndim != 2 or not (trial.facts.task == "classify" or 1 < trial.classes == array.shape[1]):
        return None
    scores = bool((array >= 0).all() and np.allclose(array.sum(axis=1), 1.0, atol=1e-2))
    return _Cropped(name, not scores) if trial.facts.task == "classify" else Classes(name, not scores)


class _Cropped(Classes):
    """As exporters of classifiers for `task: classify` train them: on the middle of a picture."""

    resize = CROP


def _one_output(trial: Trial) -> Dialect | None:
    """A head of one output, or of one and its prototypes of masks."""
    ranks: dict[int, list[str]] = {}
    for name, array in trial.outputs.items():
        ranks.setdefault(array.ndim, []).append(name)
    heads, prototypes = ranks.get(3, []), ranks.get(4, [])
    if len(heads) != 1 or len(prototypes) > 1 or len(trial.outputs) != len(heads) + len(prototypes):
        return None
    if trial.facts.task == "obb":
        return _turned(trial, heads[0])
    extras = _extras(trial, prototypes[0] if prototypes else "")
    return _rows(trial, heads[0], extras) or _raw_head(trial, heads[0], extras)


def _rows(trial: Trial, name: str, extras: Extras) -> Dialect | None:
    _, rows, columns = trial.dims(name)
    if columns != 6 + extras.columns or rows in _places(trial):
        return None
    boxes = trial.outputs[name][..., :4]
    if boxes.any() and _shares(boxes):
        if trial.facts.head != "RTDETRDecoder" or extras.columns:
            raise _not_in_pixels(trial, boxes)
        return Queries(name, name, "best", trial.size)
    return Rows(name, extras)


def _turned(trial: Trial, name: str) -> Dialect | None:
    """By the number of places, as a raw head; the angle is the last number of a box."""
    _, second, third = trial.dims(name)
    if third == 7 and second not in _places(trial):
        return ObbRows(name)
    if third not in _places(trial) or second <= 5:
        return None
    if trial.classes and trial.classes != second - 5:
        raise _other_classes(trial, second - 5)
    return ObbHead(name, second - 5)


def _raw_head(trial: Trial, name: str, extras: Extras) -> Dialect | None:
    """By the number of places, which follows from the size of the input, and by the number of names."""
    _, second, third = trial.dims(name)
    places, behind = _places(trial), extras.columns
    if third in places and second > 4 + behind:
        return _checked(trial, RawHead(name, second - 4 - behind, extras=extras))
    if second in {3 * count for count in places} and third > 5 + behind:
        return _checked(trial, RawHead(name, third - 5 - behind, rows=True, objectness=True, extras=extras))
    named = trial.classes
    if not named:
        return None
    for rows, columns in ((False, second), (True, third)):
        if columns - behind == 4 + named:
            if rows and not extras.columns and _shares(trial.outputs[name][..., :4]):
                return Queries(name, name, "scores", trial.size)
            return _checked(trial, RawHead(name, named, rows=rows, extras=extras))
        if columns - behind == 5 + named:
            return _checked(trial, RawHead(name, named, rows=rows, objectness=True, extras=extras))
    return None


_RECOGNISERS: Final[Sequence[Callable[[Trial], Dialect | None]]] = (_named_boxes, _queries, _classes, _one_output)


# -- parts of them -----------------------------------------------------------------------------------------------------


def _places(trial: Trial) -> set[int]:
    """How many places a head without anchors has for a picture of this size, one per cell of its grids."""
    width, height = trial.size
    own = tuple(2**i for i in range(3, 8) if 2**i <= trial.facts.stride)
    return {sum(-(-width // s) * -(-height // s) for s in strides) for strides in (*_STRIDES, own) if strides}


def _extras(trial: Trial, prototypes: str) -> Extras:
    count, dims = trial.facts.points or (0, 3)
    if trial.facts.task != "pose" or dims not in (2, 3):
        count = 0
    return Extras(count, dims, prototypes, trial.dims(prototypes)[1] if prototypes else 0)


def _checked(trial: Trial, head: RawHead) -> RawHead:
    """The head, if it agrees with the names and its boxes are in pixels."""
    if trial.classes and head.classes != trial.classes:
        raise _other_classes(trial, head.classes)
    array = trial.outputs[head.output]
    boxes = array[..., :4] if head.rows else array[:, :4]
    if _shares(boxes):
        raise _not_in_pixels(trial, boxes)
    return head


def _other_classes(trial: Trial, found: int) -> ConfigError:
    return ConfigError(f"{shown_outputs(trial)}: {found} classes, but {_count_of_names(trial)}; give --names FILE")


def _shares(boxes: NDArray[Any]) -> bool:
    return bool(boxes.size) and bool(np.abs(boxes.astype(np.float64)).max() <= _SHARE)


def _not_in_pixels(trial: Trial, boxes: NDArray[Any]) -> ConfigError:
    least, most = float(boxes.min()), float(boxes.max())
    between = f"its boxes are not in pixels of the input but between {least:.3g} and {most:.3g}"
    return ConfigError(f"{shown_outputs(trial)}: {between}. Export it with decoded boxes")


def _count_of_names(trial: Trial) -> str:
    return f"its metadata has {trial.classes} names" if trial.classes else "its metadata has no names"


def _shape(dims: Sequence[int]) -> str:
    return "[" + ", ".join(chain(("n",), map(str, dims[1:]))) + "]"


def _unknown(trial: Trial) -> ConfigError:
    task = f", task {trial.facts.task!r}" if trial.facts.task else ""
    return ConfigError(
        f"its outputs are not known: {shown_outputs(trial)} for a picture of {trial.size[0]} × {trial.size[1]}"
        f"{task}; {_count_of_names(trial)}. Known are boxes, scores and labels; raw heads [n, 4 + classes, k]; "
        "[n, k, 6]; logits and pred_boxes; [n, classes] (docs/feeds.md, Detectors). If it is one of them, give the "
        "names of its classes: --names FILE. Otherwise give --processor MODULE:NAME"
    )
