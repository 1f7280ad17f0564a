"""What a run of `reflex feeds` needs, made of its settings: feeds, processor, second model, how frames are batched."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.detector_slot import DetectorSlot
from reflex_runtime.feeds.detectors.onnx import FrameLimits, OnnxFrames
from reflex_runtime.feeds.plugins import processor_of
from reflex_runtime.feeds.result_files import check_places
from reflex_runtime.feeds.runtime.frame import Source
from reflex_runtime.feeds.runtime.messages import in_one_line, told
from reflex_runtime.feeds.settings import FeedSpec, source_of_spec, specs_of
from reflex_runtime.run.batch_processor import BatchConfig, BatchProcessor
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import check_needs, one_line
from reflex_runtime.settings.read import environment, read

if TYPE_CHECKING:
    from reflex_runtime.feeds.detectors.cascade import SecondModel

MOST: Final = 256  # feeds of a run whose file may name more of them later


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """A configuration that was read and checked. sources: of each feed, not opened yet. file: where it was read."""

    config: FeedsConfig
    specs: Sequence[FeedSpec]
    sources: Mapping[str, Source]
    file: Path | None = None

    @property
    def limits(self) -> dict[str, FrameLimits]:
        """What feeds want in place of the general `score` and `classes`."""
        found = {}
        for spec in self.specs:
            score, classes = spec.config.score, spec.config.classes
            if (score, classes) != (self.config.score, self.config.classes):
                found[spec.name] = FrameLimits(score, tuple(name.strip() for name in classes))
        return found


def plan_of(texts: Sequence[str], file: Path | None, flags: Mapping[str, Any]) -> FeedPlan:
    """What texts NAME=SOURCE, a file, the environment and flags ask for, checked as far as it can be before it runs."""
    config, places = read(FeedsConfig, "feeds", file, environment(), flags, ("feed",))
    specs = specs_of(texts, file, config)
    sources = {spec.name: source_of_spec(spec) for spec in specs}
    facts = {
        "a file": any(spec.file is not None and not spec.folder for spec in specs),
        "a video": any(spec.video for spec in specs),
        "a live feed": any(source.live for source in sources.values()),
        "a camera": any(spec.file is None for spec in specs),
    }
    check_needs(config, places, {fact: "no feed is one" for fact, holds in facts.items() if not holds})
    check_places(config, specs, file)
    return FeedPlan(config, specs, sources, file)


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
    return DetectorSlot(onnx_asked(config), config.then_classes, plan.limits)


def second_model_asked(config: FeedsConfig, detector: BatchProcessor, frames: int) -> SecondModel:
    """The second model. frames: most that wait for the first one."""
    from reflex_runtime.feeds.detectors.cascade import SecondModel

    size = config.then_batch_size
    batching = BatchConfig(
        max_batch_size=size,
        max_latency=0.0,  # the boxes of a batch of frames come together
        queue_capacity=max(size, frames * config.then_most),
        max_in_flight_per_feed=0,
    )
    given = {*config.then_classes, *(int(name) for name in config.then_classes if name.isdecimal())}

    def labels(value: Any) -> Collection[Any] | None:
        if not config.then_classes:
            return None
        return detector.labels(value) if isinstance(detector, DetectorSlot) else given

    plain = replace(config, size="", resize="auto", names="", score=None, iou=None, classes=(), max_detections=0)
    model = onnx_asked(replace(plain, onnx=config.then), "--then", "then")
    return SecondModel(model, batching, labels, config.then_most)


def onnx_asked(config: FeedsConfig, flag: str = "--onnx", id: str = "onnx") -> OnnxFrames:
    """The detector that --onnx names."""
    from reflex_runtime.feeds.detectors.recognise import names_of_file
    from reflex_runtime.feeds.sources.shapes import DETECTOR
    from reflex_runtime.run.onnx_session import PROVIDERS, check_provider

    path = DETECTOR if config.onnx == "shapes" else Path(config.onnx)
    if not path.is_file():
        raise ConfigError(f"{flag}={one_line(config.onnx)}: no such file (shapes is the bundled detector)")
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
        id,
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
    """How frames are batched. A file may name more feeds later, and each has a place in the queue."""
    config, feeds = plan.config, len(plan.specs)
    size, capacity = config.max_batch_size, config.queue_capacity
    if 0 < capacity < size:
        raise ConfigError(f"--queue-capacity={capacity}: must be at least --max-batch-size={size}, or 0")
    return BatchConfig(
        max_batch_size=size,
        max_latency=config.max_latency_ms / 1e3,
        queue_capacity=capacity or max(4 * size, feeds if plan.file is None else max(feeds, MOST)),
        response_timeout=config.response_timeout_s,
        startup_timeout=config.startup_timeout_s,
        watchdog=config.watchdog_s,
    )


def refusal_of(config: FeedsConfig, error: Exception) -> ConfigError:
    """Why the processor cannot be used, in the words of the command line."""
    named = f"--processor={one_line(config.processor)}" if config.processor else f"--onnx={one_line(config.onnx)}"
    cause = error.__cause__
    words = in_one_line(getattr(cause if isinstance(cause, ConfigError) else error, "message", str(error)))
    if config.then and isinstance(cause, ConfigError) and words.startswith(f"{config.then}: "):
        return ConfigError(f"--then={one_line(words)}")
    if cause is not None and not isinstance(cause, ConfigError):
        words = f"on_start failed: {told(cause)}"
    return ConfigError(f"{named}: {words.removeprefix(config.onnx + ': ')}")
