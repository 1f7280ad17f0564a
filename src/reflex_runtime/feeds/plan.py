"""What a run of `reflex feeds` needs, made of its settings, and what changes when these are read again."""

from __future__ import annotations

import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.outputs import video_of, written
from reflex_runtime.feeds.runtime.feed import Sink
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Source
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.feeds.settings import CAMERA, FILES, OF_STAGES, PER_FEED, FeedSpec, source_of_spec, specs_of
from reflex_runtime.feeds.stages import stages_of
from reflex_runtime.run.batch_processor import BatchConfig, BatchProcessor
from reflex_runtime.run.coordinator import BatchCoordinator
from reflex_runtime.run.model_files import check_kind
from reflex_runtime.run.modules import imported, in_one_line, made, told
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import check_needs, flag, one_line
from reflex_runtime.settings.read import environment, read

LONGEST_S: Final = 3600.0  # for what has no time limit of its own
MOST: Final = 256  # feeds of a run whose file may name more of them later
LARGEST_QUEUE: Final = 1_000_000  # frames: as many as `BatchConfig.queue_capacity` may be


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """A configuration that was read and checked. sources: of each feed, not opened yet. file: where it was read."""

    config: FeedsConfig
    specs: Sequence[FeedSpec]
    sources: Mapping[str, Source]
    file: Path | None = None

    def limits(self, general: FeedsConfig) -> dict[str, dict[str, Any]]:
        """What feeds want in place of the detector's `score` and `classes`. general: its settings."""
        found: dict[str, dict[str, Any]] = {}
        for spec in self.specs:
            score, classes = spec.config.score, spec.config.classes
            if (score, classes) != (general.score, general.classes):
                found[spec.name] = {"score": score, "classes": [name.strip() for name in classes]}
        return found


def plan_of(texts: Sequence[str], file: Path | None, flags: Mapping[str, Any]) -> FeedPlan:
    """What texts NAME=SOURCE, a file, the environment and flags ask for, checked as far as it can be before it runs."""
    config, places = read(FeedsConfig, "feeds", file, environment(), flags, ("feed",))
    specs = specs_of(texts, file, config)
    sources = {spec.name: source_of_spec(spec) for spec in specs}
    facts = {
        "a file": any(spec.kind in FILES for spec in specs),
        "a video": any(spec.kind in (*FILES, CAMERA) for spec in specs),
        "a live feed": any(source.live for source in sources.values()),
        "a camera": any(spec.file is None for spec in specs),
    }
    check_needs(config, places, {fact: "no feed is one" for fact, holds in facts.items() if not holds})
    check_places(config, specs, file)
    return FeedPlan(config, specs, sources, file)


def check_places(config: FeedsConfig, specs: Sequence[FeedSpec], file: Path | None = None) -> None:
    """That nothing is written over what is read, or written twice. file: the configuration."""
    outputs = [(name, value, Path(value)) for name, value in written(config)]
    if config.annotate:
        outputs += [("--annotate", config.annotate, video_of(config, spec.name)) for spec in specs]
    taken = {os.path.realpath(spec.file): f"which {spec.name} reads" for spec in specs if spec.file is not None}
    if config.onnx:
        taken[os.path.realpath(config.onnx)] = "which is the model"
    if file is not None:
        taken[os.path.realpath(file)] = "which is the configuration"
    for name, value, path in outputs:
        if (use := taken.get(os.path.realpath(path))) is not None:
            raise ConfigError(f"{name}={one_line(value)}: would write over {one_line(path)}, {use}")
        taken[os.path.realpath(path)] = f"which {name} writes"


def processor_asked(plan: FeedPlan) -> BatchProcessor:
    """The processor that --processor or --onnx names."""
    config = plan.config
    if config.processor and config.onnx:
        raise ConfigError("--processor and --onnx: give one of them, not both")
    if config.processor:
        return processor_of(config.processor)
    if not config.onnx:
        either = "give --processor MODULE:NAME or --onnx FILE (--onnx shapes is the bundled one)"
        raise ConfigError(f"no processor: {either}")
    detector = onnx_asked(config)
    detector.limits = plan.limits(config)
    return detector


def processor_of(text: str) -> BatchProcessor:
    """The batch processor that MODULE:NAME names: an object, or a class or function that makes one."""
    flag = f"--processor={one_line(text)}"
    found = imported(text, flag, "MODULE:NAME, such as mypkg.vision:Detector")
    found = made(found, flag, found.__name__) if inspect.isclass(found) or inspect.isfunction(found) else found
    if not isinstance(getattr(found, "id", None), str):
        raise ConfigError(f"{flag}: {type(found).__name__} has no id, a text that names it in the table and in metrics")
    if not callable(getattr(found, "process", None)):
        raise ConfigError(f"{flag}: {type(found).__name__} has no method process(), which a batch processor needs")
    processor: BatchProcessor = found
    return processor


def onnx_asked(config: FeedsConfig) -> OnnxFrames:
    """The detector that --onnx names."""
    from reflex_runtime.feeds.detectors.recognise import names_of_file
    from reflex_runtime.feeds.sources.shapes import DETECTOR
    from reflex_runtime.run.onnx_session import PROVIDERS, check_provider

    path = DETECTOR if config.onnx == "shapes" else Path(config.onnx)
    if not path.is_file():
        raise ConfigError(f"--onnx={one_line(config.onnx)}: no such file (shapes is the bundled detector)")
    check_kind(path.with_name(f"{path.name}.data"))  # its weights may be there
    provider, names = PROVIDERS.get(config.provider, config.provider), None
    try:
        check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    try:
        names = names_of_file(Path(config.names)) if config.names else None
    except ConfigError as error:
        raise ConfigError(f"--names={one_line(config.names)}: {error.message}") from None
    return OnnxFrames(
        path,
        provider=provider,
        threads=config.threads,
        score=config.score,
        iou=config.iou,
        max_detections=config.max_detections or None,
        classes=[name.strip() for name in config.classes],
        size=_size(config.size) if config.size else None,
        resize=None if config.resize == "auto" else config.resize,
        names=names,
    )


def _size(text: str) -> tuple[int, int]:
    """Width and height from 640 or 640x384."""
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text.strip())
    if found is None or not all(1 <= int(side) <= 16_384 for side in found.groups(found[1])):
        raise ConfigError(f"--size={one_line(text)}: must be pixels of a side, such as 640, or WIDTHxHEIGHT")
    return int(found[1]), int(found[2] or found[1])


def batching_asked(plan: FeedPlan) -> BatchConfig:
    """How frames are batched. Feeds together have enough in flight for two batches. A file may name more feeds later,
    and whatever each has in flight has a place in the queue."""
    config, feeds, size = plan.config, len(plan.specs), plan.config.max_batch_size
    most = feeds if plan.file is None else max(feeds, MOST)
    ahead = min(size, ceil(2 * size / feeds), LARGEST_QUEUE // most)
    return BatchConfig(
        max_batch_size=size,
        max_latency=config.max_latency_ms / 1e3,
        max_in_flight_per_feed=ahead,
        queue_capacity=max(4 * size, most * ahead),
        response_timeout=config.watchdog_s or LONGEST_S,
        startup_timeout=LONGEST_S,  # a model may be compiled for its device; Ctrl-C ends a start
        watchdog=config.watchdog_s,
    )


def refusal_of(config: FeedsConfig, error: Exception) -> ConfigError:
    """Why the processor cannot be used, in the words of the command line."""
    named = f"--processor={one_line(config.processor)}" if config.processor else f"--onnx={one_line(config.onnx)}"
    cause = error.__cause__
    words = in_one_line(getattr(cause if isinstance(cause, ConfigError) else error, "message", str(error)))
    if cause is not None and not isinstance(cause, ConfigError):
        words = f"on_start failed: {told(cause)}"
    return ConfigError(f"{named}: {words.removeprefix(config.onnx + ': ')}")


log = logging.getLogger("reflex.feeds")


class FeedFleet:
    """Makes feeds of a plan, and of later ones.

    sinks: makes those of a feed. gone: called with the name of each feed that there is
    no more.
    """

    def __init__(
        self,
        runtime: Runtime,
        coordinator: BatchCoordinator,
        plan: FeedPlan,
        sinks: Callable[[FeedSpec], Sequence[Sink]],
        gone: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._runtime, self._coordinator, self._began = runtime, coordinator, plan.config
        self._plan, self._sinks, self._gone = plan, sinks, gone
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
        if len(after) > (room := self._coordinator.config.capacity // self._coordinator.most_ahead):
            raise ConfigError(f"{len(after)} feeds: this run has room for {room}")
        if isinstance(detector := self._coordinator.processor, OnnxFrames):
            detector.limit(plan.limits(self._began))
        with self._turn:
            for name in before.keys() - same:
                self._runtime.remove(name)
            for spec, source, pipeline in new:
                self._add(spec, source, pipeline)
        for name in before.keys() - after.keys():
            self._gone(name)
        later = _at_the_next_start(self._began, plan.config)
        self._plan = plan
        told = {
            "new": sorted(after.keys() - before.keys()),
            "changed": sorted(after.keys() & before.keys() - same),
            "gone": sorted(before.keys() - after.keys()),
        }
        parts = [f"{what}: {', '.join(names)}" for what, names in told.items() if names]
        parts += [f"{len(same)} as before"] * bool(same)
        return "; ".join([*parts, *later])

    def _pipeline(self, spec: FeedSpec) -> Pipeline:
        return Pipeline(batch=self._coordinator, after=stages_of(spec.config), region=spec.region)

    def _add(self, spec: FeedSpec, source: Source, pipeline: Pipeline) -> None:
        self._runtime.feed(spec.name, source, pipeline, self._sinks(spec), **spec.options(source.live))


def _at_the_next_start(before: FeedsConfig, after: FeedsConfig) -> list[str]:
    """What is said of settings that a run keeps."""
    kept = (f.name for f in fields(before) if f.name not in {*PER_FEED, *OF_STAGES})
    changed = [flag(name) for name in kept if getattr(before, name) != getattr(after, name)]
    return [f"at the next start: {', '.join(changed)}"] if changed else []
