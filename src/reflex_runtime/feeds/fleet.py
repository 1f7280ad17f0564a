"""The feeds of a run as its configuration asks for them; when that is read again, only those that it changes notice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.detector_slot import DetectorSlot, version_of
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.plan import FeedPlan
from reflex_runtime.feeds.runtime.consumer import Sink
from reflex_runtime.feeds.runtime.frame import Source
from reflex_runtime.feeds.runtime.pipeline import Pipeline
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.feeds.settings import OF_STAGES, PER_FEED, FeedSpec
from reflex_runtime.feeds.stages import stages_of
from reflex_runtime.run.coordinator import BatchCoordinator
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import flag

log = logging.getLogger("reflex.feeds")

OF_DETECTOR: Final = ("onnx", "size", "resize", "names", "score", "iou", "classes", "max_detections")


class FeedFleet:
    """Makes feeds of a plan, and of later ones.

    detector: None where the processor is the user's own, which is not replaced. sinks: makes those of a feed. made: a
    detector of the settings with --onnx in them. gone: called with the name of each feed that there is no more.
    """

    def __init__(
        self,
        runtime: Runtime,
        coordinator: BatchCoordinator,
        detector: DetectorSlot | None,
        plan: FeedPlan,
        sinks: Callable[[FeedSpec], Sequence[Sink]],
        made: Callable[[FeedsConfig], OnnxFrames],
        gone: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._runtime, self._coordinator, self._detector = runtime, coordinator, detector
        self._plan, self._sinks, self._made, self._gone = plan, sinks, made, gone
        self._turn = threading.Lock()
        for spec in plan.specs:
            self._add(spec, plan.sources[spec.name], self._pipeline(spec))

    @property
    def over(self) -> bool:
        """Whether every feed is over."""
        with self._turn:  # not while some are exchanged
            return self._runtime.over

    def change(self, plan: FeedPlan) -> str:
        """Make feeds of this plan: those whose settings are the same go on, untouched. Returns what was done, in words.

        Raises ConfigError for what cannot be; then nothing has changed.
        """
        before, after = ({spec.name: spec for spec in each.specs} for each in (self._plan, plan))
        same = {name for name, spec in after.items() if name in before and spec.same_as(before[name])}
        new = [(after[name], plan.sources[name], self._pipeline(after[name])) for name in after if name not in same]
        if len(after) > (room := self._coordinator.config.capacity):
            raise ConfigError(f"{len(after)} feeds: this run has room for {room}")
        detector = self._change_detector(plan)
        with self._turn:
            for name in before.keys() - same:
                self._runtime.remove(name)
            for spec, source, pipeline in new:
                self._add(spec, source, pipeline)
        for name in before.keys() - after.keys():
            self._gone(name)
        later = _at_the_next_start(self._plan.config, plan.config)
        self._plan = plan
        told = {
            "new": sorted(after.keys() - before.keys()),
            "changed": sorted(after.keys() & before.keys() - same),
            "gone": sorted(before.keys() - after.keys()),
        }
        parts = [f"{what}: {', '.join(names)}" for what, names in told.items() if names]
        parts += [f"{len(same)} as before"] * bool(same) + [detector] * bool(detector)
        return "; ".join([*parts, *later])

    def _change_detector(self, plan: FeedPlan) -> str:
        if self._detector is None or not plan.config.onnx:
            return ""
        made, before = self._made(plan.config), self._detector.current.name
        same = all(getattr(plan.config, name) == getattr(self._plan.config, name) for name in OF_DETECTOR)
        same = same and version_of(made.path) == before
        self._detector.change(None if same else made, plan.limits)
        if same:
            return ""
        self._coordinator.relearn()
        return f"{self._detector.current.name} runs now, in place of {before}"

    def _pipeline(self, spec: FeedSpec) -> Pipeline:
        return Pipeline(batch=self._coordinator, after=stages_of(spec.config), region=spec.region)

    def _add(self, spec: FeedSpec, source: Source, pipeline: Pipeline) -> None:
        self._runtime.feed(spec.name, source, pipeline, self._sinks(spec), **spec.options(source.live))


def _at_the_next_start(before: FeedsConfig, after: FeedsConfig) -> list[str]:
    """What is said of settings that a run keeps."""
    kept = (f.name for f in fields(before) if f.name not in {*PER_FEED, *OF_STAGES, *OF_DETECTOR})
    changed = [flag(name) for name in kept if getattr(before, name) != getattr(after, name)]
    return [f"at the next start: {', '.join(changed)}"] if changed else []
