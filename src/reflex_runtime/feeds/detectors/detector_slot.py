"""The detector of a run, and a second model on what it finds.

Another detector can replace it between two batches: that one is loaded and tried first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, floor
from pathlib import Path
from typing import Any, Final

import numpy as np

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.feeds.detectors.onnx import FrameLimits, OnnxFrames
from reflex_runtime.run.batch_processor import BatchConfig, BatchEntry, BatchProcessor
from reflex_runtime.run.modules import told
from reflex_runtime.run.submitted_frame import Join

Limits = Mapping[str, FrameLimits]  # by feed


@dataclass(frozen=True, slots=True)
class DetectorVersion:
    """A detector that was loaded. name: in results, its file and the first 16 digits of its SHA-256. labels: classes
    that every version must have, as its results have them."""

    detector: OnnxFrames
    name: str
    labels: frozenset[Any] = frozenset()


class DetectorSlot:
    """A batch processor around an `OnnxFrames`, which `change` exchanges for another one.

    A batch runs on one detector from its start to its end, so every result is of one version; mappings say which, as
    `model`. needed: classes that every version must have. limits: what feeds want in place of its score and classes.
    """

    repeatable = True

    def __init__(self, first: OnnxFrames, needed: Sequence[str] = (), limits: Limits | None = None) -> None:
        self.id = first.id
        self._needed = tuple(needed)
        first.limits = limits or {}
        self.current = self._before = DetectorVersion(first, "")
        self._newest: BatchEntry | None = None
        self._largest = 1  # batch so far

    def labels(self, result: Mapping[str, Any]) -> frozenset[Any]:
        """The classes that are needed, as a result of this version or of the one before has them."""
        versions = (self.current, self._before)
        return next((v.labels for v in versions if v.name == result.get("model")), frozenset())

    @property
    def batch_size(self) -> int | None:
        """As of `OnnxFrames`; another one after a change."""
        return self.current.detector.batch_size

    def prepare(self, frame: Any) -> Any:
        """As of `OnnxFrames`; what was prepared for another version is prepared anew."""
        return self.current.detector.prepare(frame)

    def on_start(self) -> None:
        """Load the detector. Raises ConfigError if it lacks a class that is needed, or that a feed wants."""
        self.current = self._version(self.current.detector, self.current.detector.limits)

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        version = self.current  # read once: it may change meanwhile
        self._newest, self._largest = entries[-1], max(self._largest, len(entries))
        results = version.detector.process(entries)
        return [{**found, "model": version.name} if isinstance(found, Mapping) else found for found in results]

    def on_stop(self) -> None:
        self.current.detector.on_stop()
        self._newest = None

    def change(self, made: OnnxFrames | None, limits: Limits) -> None:
        """From the next batch on, run `made` (None: the same detector) and look at feeds with these limits.

        It is loaded here, on any thread, and tried on the newest frame, alone and in the largest batch so far. Raises
        ConfigError if it cannot be used or a feed wants a class that it lacks; then nothing has changed.
        """
        if made is None:
            self._check(self.current.detector, limits)
            self.current.detector.limits = limits
            return
        version = self._version(made, limits)
        self._try(made)
        made.limits = limits
        self._before, self.current = self.current, version  # results of the one before are still on their way

    def _version(self, made: OnnxFrames, limits: Limits) -> DetectorVersion:
        try:
            made.on_start()
            name = version_of(made.path)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{made.path}: cannot be loaded: {told(error)}") from error
        try:
            labels = made.labels_of(self._needed)
        except ConfigError as error:
            raise ConfigError(f"{made.path}: needed {error.message}") from None
        self._check(made, limits)
        return DetectorVersion(made, name, labels)

    @staticmethod
    def _check(made: OnnxFrames, limits: Limits) -> None:
        for feed, wanted in limits.items():
            try:
                made.check_limits(wanted)
            except ConfigError as error:
                raise ConfigError(f"{made.path}: feed {feed}: {error.message}") from None

    def _try(self, made: OnnxFrames) -> None:
        newest = self._newest
        if newest is None:
            return
        most = min(self._largest, made.batch_size or self._largest)
        try:
            (found, *_) = [made.process([newest] * n)[0] for n in (1, most)]
        except Exception as error:
            found = error
        if isinstance(found, Exception):
            words = found.message if isinstance(found, ReflexError) else told(found)
            raise ConfigError(f"{made.path}: fails on the newest frame of {newest.feed_id}: {words}")


def version_of(path: Path) -> str:
    """NAME@HASH of a graph: of its file and, if there is one, of the file that holds its weights."""
    digest = hashlib.sha256()
    for file in (path, path.with_name(f"{path.name}.data")):
        with suppress(FileNotFoundError), file.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    return f"{path.stem}@{digest.hexdigest()[:16]}"


# -- a second model ----------------------------------------------------------------------------------------------------


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
