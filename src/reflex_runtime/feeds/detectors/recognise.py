"""Which dialect a graph speaks: told by its outputs for one blank picture, their names, and its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.facts import GraphFacts
from reflex_runtime.feeds.detectors.found import CROP, Dialect
from reflex_runtime.feeds.detectors.heads import IMAGENET, Classes, Extras, NamedBoxes, Queries, RawHead, Rows
from reflex_runtime.feeds.detectors.turned import TurnedHead, TurnedRows

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
        return TurnedRows(name)
    if third not in _places(trial) or second <= 5:
        return None
    if trial.classes and trial.classes != second - 5:
        raise _other_classes(trial, second - 5)
    return TurnedHead(name, second - 5)


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
