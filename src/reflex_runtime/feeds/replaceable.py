"""A detector that can be replaced while it runs: the new one is loaded and tried beside it, and then takes the next
batch."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.drivers.batch_processor import BatchEntry
from reflex_runtime.feeds.onnx import FrameLimits, OnnxFrames
from reflex_runtime.feeds.words import told

log = logging.getLogger("reflex.feeds")


@dataclass(frozen=True, slots=True)
class DetectorVersion:
    """A detector under the name that results carry: its file and the first 16 digits of its SHA-256."""

    detector: OnnxFrames
    name: str

    @property
    def path(self) -> Path:
        return self.detector.path


class ReplaceableDetector:
    """A batch processor around an `OnnxFrames`, which `replace` exchanges for another one.

    A batch runs on one detector from its start to its end, so every result is of one version; mappings say which, as
    `model`. The old detector is let go when its last batch has ended.
    """

    repeatable = True

    def __init__(self, first: OnnxFrames, needed: Sequence[str] = ()) -> None:
        """needed: classes that every version must have."""
        self.id = first.id
        self._needed = tuple(needed)
        self._labels: dict[str, frozenset[Any]] = {}  # that are needed, by version: this one and those before
        self.limits: dict[str, FrameLimits] = {}  # by feed, of every version
        first.limits = self.limits
        self._current = DetectorVersion(first, "")
        self._newest: BatchEntry | None = None
        self._largest = 1  # batch so far
        self._replacing = threading.Lock()

    @property
    def current(self) -> DetectorVersion:
        """The version that runs the next batch."""
        return self._current

    def labels(self, result: Mapping[str, Any]) -> frozenset[Any]:
        """The classes that are needed, as a result of this or an earlier version has them."""
        return self._labels.get(result.get("model", ""), frozenset())

    @property
    def batch_size(self) -> int | None:
        """As of `OnnxFrames`; another one after a replacement."""
        return self._current.detector.batch_size

    def prepare(self, frame: Any) -> Any:
        """As of `OnnxFrames`; what was prepared for another version is prepared anew."""
        return self._current.detector.prepare(frame)

    def on_start(self) -> None:
        self._current.detector.on_start()
        version = DetectorVersion(self._current.detector, version_of(self._current.path))
        self._labels[version.name] = self._labels_in(version.detector)
        self._current = version

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        version = self._current  # read once: it may change meanwhile
        self._newest, self._largest = entries[-1], max(self._largest, len(entries))
        results = version.detector.process(entries)
        return [{**found, "model": version.name} if isinstance(found, Mapping) else found for found in results]

    def on_stop(self) -> None:
        self._current.detector.on_stop()
        self._newest = None

    def limit(self, feed: str, wanted: FrameLimits) -> None:
        """From its next batch on a feed is looked at with these. Raises ConfigError; then nothing has changed."""
        with self._replacing:
            self._current.detector.check_limits(wanted)
            self.limits[feed] = wanted

    def forget(self, feed: str) -> None:
        """A feed is gone, and its limits."""
        self.limits.pop(feed, None)

    def replace(self, made: OnnxFrames) -> DetectorVersion:
        """Load another detector, try it, and let it run the next batch. Returns it. On any thread; takes as long as
        loading takes.

        It is tried on the newest frame, if there was one, alone and in the largest batch so far. Raises ConfigError if
        it cannot be used, or does not have the classes that a feed wants; then nothing has changed.
        """
        with self._replacing:
            version = self._loaded(made)
            made.limits = self.limits
            labels = self._labels_in(made)
            for feed, wanted in list(self.limits.items()):
                self._check_feed(made, feed, wanted)
            self._try(made)
            self._labels = {name: known for name, known in self._labels.items() if name == self._current.name}
            self._labels[version.name] = labels  # results of the one before are still on their way
            self._current = version
        return version

    def _labels_in(self, made: OnnxFrames) -> frozenset[Any]:
        try:
            return made.labels_of(self._needed)
        except ConfigError as error:
            raise ConfigError(f"{made.path}: needed {error.message}") from None

    @staticmethod
    def _check_feed(made: OnnxFrames, feed: str, wanted: FrameLimits) -> None:
        try:
            made.check_limits(wanted)
        except ConfigError as error:
            raise ConfigError(f"{made.path}: feed {feed}: {error.message}") from None

    @staticmethod
    def _loaded(made: OnnxFrames) -> DetectorVersion:
        try:
            made.on_start()
            return DetectorVersion(made, version_of(made.path))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{made.path}: cannot be loaded: {told(error)}") from error

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
