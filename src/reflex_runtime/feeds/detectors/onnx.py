"""A detector or classifier in ONNX as a batch processor."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.feeds.detectors.heads import CORNER, LETTERBOX, STRETCH, Classes, DetectionLimits, Dialect
from reflex_runtime.feeds.detectors.picture_input import (
    FITTINGS,
    FittedPicture,
    Picture,
    PictureInput,
    picture_input,
    result_of,
)
from reflex_runtime.feeds.detectors.recognise import LARGEST, GraphFacts, Trial, dialect_of, facts_of
from reflex_runtime.feeds.runtime.pipeline import library, refusals_of
from reflex_runtime.run.coordinator import BatchEntry
from reflex_runtime.run.onnx_session import PROVIDERS, OnnxSession
from reflex_runtime.settings.declare import did_you_mean, one_line, one_of, option, validate

log = logging.getLogger("reflex.feeds")

OVERLAP = 0.7  # default of iou
MOST_NAMED = 12  # classes in an error


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """A user's settings of a detector; None and () mean those of its metadata or its dialect.

    score: lowest score that is kept, 0 … 1. iou: of two boxes of a class whose intersection is a larger share of their
        union, only the better one stays; only for graphs that do not do this. max_detections: of a picture.
    classes: names or numbers of the classes that are kept.
    size: width and height of the input, needed if neither the graph nor its metadata has them.
    resize: "letterbox", "corner" (the same in the upper left), "stretch" or "crop".
    names: labels by number. A label without a name stays a number. stages: those that need boxes.
    """

    score: float | None = option(None, within=(0, 1))
    iou: float | None = option(None, within=(0, 1))
    max_detections: int | None = option(None, within=(1, 10**9))
    classes: Sequence[str | int] = ()
    size: tuple[int, int] | None = None
    resize: str | None = None
    names: Mapping[int, str] | None = None
    stages: Sequence[str] = ()

    def __post_init__(self) -> None:
        validate(self, "OnnxFrames")
        if self.size is not None and not (len(self.size) == 2 and min(self.size) >= 1 and max(self.size) <= LARGEST):
            raise ConfigError(f"size={self.size!r}: must be a width and a height of 1 to {LARGEST}")
        if self.resize is not None and self.resize not in FITTINGS:
            raise ConfigError(f"resize={self.resize!r}: {one_of(str(self.resize), FITTINGS)}")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded graph. dialect: of its outputs; None if they are passed on."""

    session: OnnxSession
    input: PictureInput
    facts: GraphFacts
    dialect: Dialect | None
    limits: DetectionLimits
    resize: str

    def __str__(self) -> str:
        """Dialect, names and input in one line."""
        dialect, at_once = self.dialect, self.session.batch_size
        count = len(self.facts.names)
        names = f"{count} name{'s'[: count != 1]}" if count else "no names that can be read (see --names)"
        what = "outputs are passed on" if dialect is None else f"{dialect.name}, {names}"
        size = f"{self.resize} {self.input.size[0]} × {self.input.size[1]}"
        return f"{what}, {size}" + (f", batches of {at_once}" if at_once else "")

    def fitted(self, frame: Picture, ahead: Any = None) -> FittedPicture:
        """The frame in the size of the input. ahead: what `prepare` made of it, used if it fits this graph."""
        if isinstance(ahead, FittedPicture) and (ahead.pixels.shape, ahead.resize) == (self.input.shape, self.resize):
            return ahead
        return self.input.fitted(frame, self.resize)

    def run(self, pictures: Sequence[FittedPicture], limits: Sequence[DetectionLimits]) -> list[dict[str, Any]]:
        """A result for each picture. limits: of each picture."""
        outputs = self.session.run(self.input.tensors(pictures, self.dialect))
        each = [{name: array[i] for name, array in outputs.items()} for i in range(len(pictures))]
        if self.dialect is None:
            return each
        found = map(self.dialect.found, each, limits)
        together = zip(found, pictures, strict=True)
        return [result_of(one, picture.fit, self.facts.names, self.input.size) for one, picture in together]


class OnnxFrames:
    """Runs an ONNX graph on RGB pictures, as a batch processor.

    path: the graph. It has one input, [n, 3, h, w] or [n, h, w, 3], uint8 or floating; a second one named
        `orig_target_sizes` [n, 2] gets the size of the first. If the first axis is fixed, batches have at most so many
        pictures, and smaller batches are padded (`batch_size`).
    id: its name in metrics and events.
    provider: "cpu", "cuda", "openvino", or the name of an execution provider. threads: intra-op threads of a call.
    settings: see `DetectorSettings`. limits: by feed, those that differ; see `limit`.

    The outputs for one blank picture decide how outputs are read; see `detectors.recognise`. A result is {"boxes":
    [[x0, y0, x1, y1], …] in pixels of the frame, "scores": [float, …], "labels": [name, …]}, and `keypoints`, `masks`
    or `polygons` where the graph has them; see `result_of`. Outputs [n] or [n, k] without names for the k are passed
    on: {output: array without batch axis}. Any other graph is refused. Each result has `model`: NAME@HASH, the name of
    the file and 16 digits of a SHA-256.

    A frame that is no uint8 [h, w, 3] picture fails alone. Wrong settings raise ConfigError, some of them only in
    `on_start`, which reads the graph.
    """

    repeatable = True

    def __init__(
        self, path: str | Path, id: str = "onnx", provider: str = "cpu", threads: int = 1, **settings: Any
    ) -> None:
        self.id, self.path = id, Path(path)
        self.limits: Mapping[str, Mapping[str, Any]] = {}
        self._settings = DetectorSettings(**settings)
        self._provider, self._threads = PROVIDERS.get(provider, provider), threads
        self._loaded: _Loaded | None = None
        self._of_feeds: dict[str, DetectionLimits] = {}
        self._name = ""

    def on_start(self) -> None:
        """Load the graph, recognise its outputs, and run it once, so that no frame pays for the first call. Raises
        ConfigError."""
        session = OnnxSession(self.path, provider=self._provider, threads=self._threads, any_batch=True)
        self._loaded = loaded = self._read(session)
        self._name = _name_of(self.path)
        log.info("%s: %s", self.path.name, loaded)
        self.limit(self.limits)
        width, height = loaded.input.size
        loaded.run([loaded.fitted(np.zeros((height, width, 3), np.uint8))], [loaded.limits])

    def prepare(self, frame: Any) -> FittedPicture | None:
        """The frame in the size of the graph's input, for `process` as an entry's `view`. May be called on any thread,
        also while the graph runs. None before the start, and if the frame is no picture."""
        loaded = self._loaded
        return None if loaded is None or _fault(frame) is not None else loaded.fitted(frame)

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        """A result for each entry, or a ProcessorError in its place."""
        loaded = self._started()
        results: list[Any] = [_fault(entry.frame) for entry in entries]
        fine = [entry for entry, fault in zip(entries, results, strict=True) if fault is None]
        limits = [self._of_feeds.get(entry.feed_id, loaded.limits) for entry in fine]
        pictures = [loaded.fitted(entry.frame, entry.view) for entry in fine]
        answers = iter(loaded.run(pictures, limits) if fine else ())
        return [{**next(answers), "model": self._name} if fault is None else fault for fault in results]

    def on_stop(self) -> None:
        """Release the graph and its memory."""
        self._loaded = None

    @property
    def batch_size(self) -> int | None:
        """The fixed number of pictures of a call; None before the start, and for any number."""
        return None if self._loaded is None else self._loaded.session.batch_size

    @property
    def dialect(self) -> Dialect | None:
        """The dialect of the outputs; None before the start, and if they are passed on."""
        return None if self._loaded is None else self._loaded.dialect

    def limit(self, limits: Mapping[str, Mapping[str, Any]]) -> None:
        """Change the settings of single feeds, after the start. Raises ConfigError for settings without effect and for
        unknown classes; then nothing has changed."""
        loaded, found = self._started(), {}
        for feed, differs in limits.items():
            try:
                found[feed] = _limits(replace(self._settings, **differs), loaded.dialect, loaded.facts)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: feed {feed}: {error.message}") from None
        self.limits, self._of_feeds = limits, found

    def _started(self) -> _Loaded:
        if self._loaded is None:
            raise ProcessorError(f"{self.path}: not started")
        return self._loaded

    def _read(self, session: OnnxSession) -> _Loaded:
        wanted = self._settings
        facts = facts_of(session.metadata)
        if wanted.names is not None:
            facts = replace(facts, names=wanted.names)
        if session.batch_size is None:
            session.batch_size = facts.at_once
        taken = picture_input(self.path, session, wanted.size, facts.size)
        dialect = self._recognised(session, taken, facts)
        resize = wanted.resize or facts.resize or (dialect.resize if dialect else STRETCH)
        if resize not in FITTINGS:
            raise ConfigError(f"{self.path}: metadata resize={one_line(resize)}: {one_of(resize, FITTINGS)}")
        if resize in (CORNER, LETTERBOX):
            library("cv2", "letterbox")
        return _Loaded(session, taken, facts, dialect, _limits(wanted, dialect, facts), resize)

    def _recognised(self, session: OnnxSession, taken: PictureInput, facts: GraphFacts) -> Dialect | None:
        """The dialect, by the outputs for one blank picture."""
        width, height = taken.size
        blank = taken.fitted(np.zeros((height, width, 3), np.uint8), STRETCH)
        outputs = session.run(taken.tensors([blank], None))
        with refusals_of(str(self.path)), np.errstate(invalid="ignore"):  # NaN contradicts any form
            return dialect_of(Trial(outputs, facts, taken.size))


def _limits(wanted: DetectorSettings, dialect: Dialect | None, facts: GraphFacts) -> DetectionLimits:
    """The user's limits, else those of the dialect. Raises ConfigError for a setting without effect."""
    if wanted.stages and (dialect is None or isinstance(dialect, Classes)):
        raise ConfigError(f"{wanted.stages[0]} has no effect: the graph gives no boxes")
    if dialect is None:
        for name in ("score", "iou", "max_detections", "classes"):
            if getattr(wanted, name) not in (None, (), []):
                raise ConfigError(f"{name} has no effect: the graph's outputs are passed on unchanged")
        return DetectionLimits(0.0, 1.0, 1)
    if wanted.iou is not None and not dialect.overlaps:
        raise ConfigError("iou has no effect: the graph leaves out overlapping boxes itself")
    return DetectionLimits(
        dialect.score if wanted.score is None else wanted.score,
        OVERLAP if wanted.iou is None else wanted.iou,
        wanted.max_detections or dialect.most,
        _numbers(wanted.classes, facts.names) if wanted.classes else None,
    )


def _name_of(path: Path) -> str:
    """NAME@HASH of a graph. The hash is over its file and, if there is one, FILE.data with its weights."""
    digest = hashlib.sha256()
    for file in (path, path.with_name(f"{path.name}.data")):
        with suppress(FileNotFoundError), file.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    return f"{path.stem}@{digest.hexdigest()[:16]}"


def _numbers(classes: Sequence[str | int], names: Mapping[int, str]) -> frozenset[int]:
    """The numbers of classes given by name or number. Raises ConfigError."""
    by_name = {name: number for number, name in names.items()}
    found = set()
    for given in classes:
        if given in by_name:
            found.add(by_name[str(given)])
        elif str(given).isdecimal() and len(str(given)) <= 9 and (not names or int(given) in names):
            found.add(int(given))
        else:
            known = f"the graph has {len(names)} classes" if names else "the graph has no names: give numbers"
            few = f": {', '.join(map(one_line, by_name))}" if 0 < len(by_name) <= MOST_NAMED else ""
            raise ConfigError(f"classes={one_line(given)}: {known}{did_you_mean(str(given), by_name) or few}")
    return frozenset(found)


def _fault(frame: Any) -> ProcessorError | None:
    if not isinstance(frame, np.ndarray):
        return ProcessorError(f"frame: found {type(frame).__name__}, expected a uint8 array [h, w, 3]")
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
        return ProcessorError(f"frame: found {frame.dtype} {list(frame.shape)}, expected uint8 [h, w, 3]")
    return None
