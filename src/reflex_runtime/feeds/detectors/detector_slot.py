"""The detector of a run, which another one can replace between two batches: it is loaded and tried first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.feeds.detectors.onnx import FrameLimits, OnnxFrames
from reflex_runtime.feeds.runtime.messages import told
from reflex_runtime.run.batch_processor import BatchEntry

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
            version = DetectorVersion(made, version_of(made.path), self._labels_in(made))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{made.path}: cannot be loaded: {told(error)}") from error
        self._check(made, limits)
        return version

    def _labels_in(self, made: OnnxFrames) -> frozenset[Any]:
        try:
            return made.labels_of(self._needed)
        except ConfigError as error:
            raise ConfigError(f"{made.path}: needed {error.message}") from None

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
