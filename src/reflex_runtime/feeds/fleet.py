"""The feeds of a run, by name: added, changed and removed while it goes on, and the detector that all of them share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from reflex_runtime.config import FeedsConfig
from reflex_runtime.core.errors import Closed, ConfigError, ProcessorError
from reflex_runtime.drivers.coordinator import BatchCoordinator
from reflex_runtime.feeds.consume import Sink
from reflex_runtime.feeds.fresh import check_fresh
from reflex_runtime.feeds.onnx import FrameLimits, OnnxFrames
from reflex_runtime.feeds.opening import DRAWN
from reflex_runtime.feeds.pipeline import Pipeline
from reflex_runtime.feeds.replaceable import DetectorVersion, ReplaceableDetector
from reflex_runtime.feeds.runtime import Runtime
from reflex_runtime.feeds.source import Source
from reflex_runtime.feeds.spec import PER_FEED, FeedSpec, set_in, source_of_spec, spec_of
from reflex_runtime.feeds.stages.opening import stages_of
from reflex_runtime.feeds.video import without_secrets

MOST: Final = 256  # feeds of a run to which some are added
OF_RATE: Final = ("every", "fps")
OF_DETECTOR: Final = ("size", "resize", "names", "score", "iou", "classes", "max_detections")


class FeedFleet:
    """Makes feeds of their specs. Every method may be called on any thread; changes happen one after another.

    detector: None where the processor is one of the user's, which has no limits and is not replaced. sinks: makes those
    of a feed. made: a detector of the settings with --onnx in them. removed: called after a feed was
    removed.
    Raises ConfigError for what cannot be done; `details["field"]` names the field of the request.
    """

    def __init__(
        self,
        runtime: Runtime,
        coordinator: BatchCoordinator,
        detector: ReplaceableDetector | None,
        config: FeedsConfig,
        sinks: Callable[[FeedSpec], Sequence[Sink]],
        made: Callable[[FeedsConfig], OnnxFrames],
        removed: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._coordinator, self._detector = runtime, coordinator, detector
        self._config, self._sinks, self._made = config, sinks, made
        self._removed = removed
        self._specs: dict[str, FeedSpec] = {}
        self._turn = threading.Lock()

    def begin(self, specs: Iterable[FeedSpec], sources: Mapping[str, Source]) -> None:
        """The feeds of the command line."""
        for spec in specs:
            self._start(spec, sources[spec.name])

    def add(self, name: str, source: str, own: Mapping[str, Any], wanted: FrameLimits) -> dict[str, Any]:
        """Add a feed and start it. own: its settings, of `PER_FEED`."""
        with self._turn:
            if name in self._specs:
                raise ConfigError(f"name={name}: there is such a feed", field="name", conflict=True)
            if len(self._specs) >= MOST:
                raise ConfigError(f"there are {MOST} feeds, which is the most", field="name", conflict=True)
            check_fresh(name, source, DRAWN, self._config.add_files)
            spec = spec_of(name, source, own, self._config)
            opened = source_of_spec(spec, direct=True)
            self._limit(name, wanted)
            try:
                self._start(spec, opened)
            except BaseException:
                self._forget(name)
                raise
        return self.told(name)

    def change(
        self, name: str, wanted: Callable[[FrameLimits], FrameLimits], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Other limits for a feed, from its next batch on, and another rate, from its next picture on. KeyError if
        there is none.

        wanted: makes the limits of those that it has then: changes before it count. own: settings of `OF_RATE`; None is
        what the command says.
        """
        with self._turn:
            spec = self._specs[name]
            given = {key: getattr(self._config, key) if value is None else value for key, value in own.items()}
            spec = replace(spec, config=set_in(spec.config, given, OF_RATE))
            self._limit(name, wanted(self.limits_of(name)))
            self._runtime.change_rate(name, spec.config.every, spec.config.fps)
            self._specs[name] = spec
        return self.told(name)

    def remove(self, name: str) -> dict[str, Any]:
        """Stop a feed and forget it; what it has in the processor is still answered. KeyError if there is none."""
        with self._turn:
            del self._specs[name]
            ended = self._runtime.remove(name)
            self._forget(name)
        self._removed()
        return {"name": name, "ended": ended}

    def replace(self, path: str, own: Mapping[str, Any]) -> DetectorVersion:
        """Another detector for all feeds. own: its settings, of `OF_DETECTOR`; others as on the command line."""
        if self._detector is None:
            raise ConfigError("path: a processor of your own (--processor) is not replaced", field="path")
        with self._turn:
            try:
                made = self._made(set_in(self._config, {"onnx": path, **own}, ("onnx", *OF_DETECTOR)))
            except ConfigError as error:
                message = error.message.replace("--onnx=", "path=", 1).removeprefix("--")
                raise ConfigError(message, field=error.details.get("field", "path")) from None
            version = self._detector.replace(made)
            self._coordinator.relearn()
        return version

    def limits_of(self, name: str) -> FrameLimits:
        return FrameLimits() if self._detector is None else self._detector.limits.get(name, FrameLimits())

    def told(self, name: str) -> dict[str, Any]:
        """A feed with its settings, JSON-safe. KeyError if there is none."""
        spec, wanted = self._specs[name], self.limits_of(name)
        feed = self._runtime.feed_snapshots()[name]
        return {
            "name": name,
            "source": without_secrets(spec.source),
            "mode": feed.mode,
            "state": feed.state,
            "frames": feed.frames,
            "answered": feed.processed,
            "fps": round(feed.fps, 2),
            "error": feed.error,
            "settings": {f.name: getattr(spec.config, f.name) for f in fields(spec.config) if f.name in PER_FEED},
            "score": wanted.score,
            "classes": None if wanted.classes is None else list(wanted.classes),
        }

    @property
    def has_key(self) -> bool:
        """Whether callers need one."""
        return bool(self._config.api_key)

    @property
    def version(self) -> str | None:
        """The detector that runs the next batch."""
        return None if self._detector is None else self._detector.current.name

    # -- within --------------------------------------------------------------------------------------------------------

    def _start(self, spec: FeedSpec, source: Source) -> None:
        self._runtime.feed(
            spec.name,
            source,
            Pipeline(batch=self._coordinator, after=stages_of(spec.config), region=spec.region),
            self._sinks(spec),
            **spec.options(source.live),
        )
        self._specs[spec.name] = spec

    def _limit(self, name: str, wanted: FrameLimits) -> None:
        given = "score" if wanted.classes is None else "classes"
        if self._detector is not None:
            if wanted == FrameLimits():
                self._detector.forget(name)
                return
            try:
                self._detector.limit(name, wanted)
            except ConfigError as error:
                raise ConfigError(error.message, field=given) from None
            except ProcessorError:
                raise Closed("the detector is not running (yet, or any more)", retry_after=1.0) from None
        elif wanted != FrameLimits():
            raise ConfigError(f"{given}: has no effect on a processor of your own (--processor)", field=given)

    def _forget(self, name: str) -> None:
        if self._detector is not None:
            self._detector.forget(name)
