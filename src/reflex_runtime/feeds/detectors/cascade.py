"""A classifier, or any other model, on what a detector found: each box as a picture of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import ceil, floor
from typing import Any, Final

import numpy as np

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.run.batch_processor import BatchConfig, BatchProcessor
from reflex_runtime.run.submitted_frame import Join

TOO_MANY: Final = "too_many"


class SecondModel:
    """Asks a processor about the boxes of a frame, best ones first; see `FollowUp`.

    labels: those of the boxes that it is asked about, as this result has them; None: all. most: crops of a frame.
    The result of a frame gets `then`: for each of these boxes {"box": its number in `boxes`}, and what the processor
    answered, or `missing`, why there is none: the code of an error, or `too_many`.
    """

    def __init__(
        self,
        processor: BatchProcessor,
        config: BatchConfig,
        labels: Callable[[Any], Collection[Any] | None] = lambda value: None,
        most: int = 16,
    ) -> None:
        self.processor, self.config = processor, config
        self._labels, self._most = labels, most

    def parts(self, frame: Any, value: Any) -> tuple[Sequence[Any], Join]:
        asked = self._asked(frame, value)
        crops = [frame[top:bottom, left:right] for _, (left, top, right, bottom) in asked[: self._most]]
        return crops, partial(_joined, value, [number for number, _ in asked])

    def _asked(self, frame: Any, value: Any) -> list[tuple[int, tuple[int, int, int, int]]]:
        """The boxes of these labels, each with its whole pixels in the frame; best ones first."""
        boxes = value.get("boxes") if isinstance(value, Mapping) else None
        if boxes is None or len(boxes) == 0:
            return []
        height, width = frame.shape[:2]
        wanted, labels, scores = self._labels(value), value.get("labels", ()), value.get("scores", ())
        found = []
        for number, box in enumerate(boxes):
            if wanted is not None and (number >= len(labels) or labels[number] not in wanted):
                continue
            left, top, right, bottom = (float(side) for side in box)
            inside = max(0, floor(left)), max(0, floor(top)), min(width, ceil(right)), min(height, ceil(bottom))
            if inside[0] < inside[2] and inside[1] < inside[3]:
                found.append((number, inside))
        if len(scores) == len(boxes):
            best = np.argsort([-float(scores[number]) for number, _ in found], kind="stable")
            found = [found[i] for i in best]
        return found


def _joined(value: Any, numbers: Sequence[int], answers: Sequence[Done | Failed]) -> Any:
    """A frame's result. numbers: of the boxes that it was to be asked about, the best ones first."""
    if not isinstance(value, Mapping):
        return value
    told = [_told(answer) | {"box": number} for number, answer in zip(numbers, answers, strict=False)]
    told += [{"box": number, "missing": TOO_MANY} for number in numbers[len(answers) :]]
    return {**value, "then": sorted(told, key=lambda one: int(one["box"]))}


def _told(answer: Done | Failed) -> dict[str, Any]:
    if isinstance(answer, Failed):
        error = answer.error
        return {"missing": error.code if isinstance(error, ReflexError) else "processor_failed"}
    return dict(answer.value) if isinstance(answer.value, Mapping) else {"value": answer.value}
