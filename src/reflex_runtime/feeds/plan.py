"""Reads options and a configuration file, checks them, and makes sources, processor and batching from them.

Every error is one line that names the feed or the setting, the value, and what is allowed, without credentials.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.outputs import video_of, written
from reflex_runtime.feeds.outputs.json_lines import NAME
from reflex_runtime.feeds.runtime.pipeline import Region, Source, refusals_of
from reflex_runtime.feeds.sources import CAMERA, DRAWING, FOLDER, VIDEO, kind_of, pictures_in, source_of
from reflex_runtime.feeds.sources.shapes import DETECTOR
from reflex_runtime.feeds.sources.video import without_secrets
from reflex_runtime.run.coordinator import BatchConfig, BatchProcessor
from reflex_runtime.run.model_files import check_kind
from reflex_runtime.run.modules import imported, in_one_line, made, told
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import check_needs, convert, did_you_mean, flag, hints_of, one_line
from reflex_runtime.settings.read import environment, read, read_toml

PER_FEED = (
    "realtime", "loop", "max_age_ms", "restarts", "read_timeout_s", "every", "fps", "rotate", "roi", "hwaccel",
    "score", "classes",
)  # fmt: skip
OF_STAGES = ("track", "track_score", "zone", "line", "stage")  # only in a table [[feed]]
FILE = "a file without realtime"
FILES = (FILE, VIDEO)  # kinds of a feed; here `VIDEO` is a file with realtime
_KINDS: Final = {  # what a setting of a feed may need → the kinds of source that satisfy it
    "a file": FILES,
    "a live feed": (VIDEO, DRAWING, CAMERA),
    "a camera": (DRAWING, CAMERA),
    "a video": (*FILES, CAMERA),
}
_EXAMPLE = "such as door=rtsp://10.0.0.7/live or yard=yard.mp4"
LONGEST_S: Final = 3600.0  # stands for no time limit
MOST: Final = 256  # feeds for which a run with a file has room: the file may name more later
LARGEST_QUEUE: Final = 1_000_000  # frames: the largest `BatchConfig.queue_capacity`


# -- one feed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """A feed's name, its source as text, and its settings: those of all feeds, replaced by its own."""

    name: str
    source: str
    config: FeedsConfig

    @property
    def kind(self) -> str:
        """The kind of its source, in words: that of `kind_of`, but `FILE` for a file without realtime."""
        kind = kind_of(self.source)
        return FILE if kind == VIDEO and not self.config.realtime else kind

    @property
    def file(self) -> Path | None:
        """The video file or the directory that it reads; None for other sources."""
        return None if self.kind in (DRAWING, CAMERA) else Path(self.source)

    @property
    def region(self) -> Region | None:
        """The part of its pictures that the processor gets; None for the whole."""
        return Region.of(self.config.roi) if self.config.roi else None

    def same_as(self, other: FeedSpec) -> bool:
        """Whether name, source and the settings that each feed may have of its own are equal."""
        settings = (*PER_FEED, *OF_STAGES)
        same = all(getattr(self.config, name) == getattr(other.config, name) for name in settings)
        return same and (self.name, self.source) == (other.name, other.source)

    def options(self) -> dict[str, Any]:
        """Its settings as `Runtime.feed` takes them."""
        own = self.config
        return {
            "max_age": own.max_age_ms / 1e3,
            "restarts": own.restarts or None,
            "every": own.every,
            "fps": own.fps,
            "rotate": int(own.rotate),
        }


def specs_of(texts: Sequence[str], file: Path | None, config: FeedsConfig) -> list[FeedSpec]:
    """The feeds of a configuration file and of texts NAME=SOURCE. Texts NAME.SETTING=VALUE are settings of one feed.
    Raises ConfigError, also for a name given twice, and for no feeds."""
    feeds: list[str] = []
    own: dict[str, dict[str, str]] = {}  # by feed
    for text in texts:
        left, equals, value = text.partition("=")
        name, _, setting = left.rpartition(".")
        if equals and name and (setting := setting.replace("-", "_")) in PER_FEED:
            if setting in own.setdefault(name, {}):
                raise ConfigError(f"{one_line(left)}: is given twice")
            own[name][setting] = value
        else:
            feeds.append(text)
    specs = [
        *(_of_file(file, config, own) if file is not None else ()),
        *(_of_text(text, config, own) for text in feeds),
    ]
    if not specs:
        where = "--config FILE with tables [[feed]]" if file is None else f"tables [[feed]] in {file}"
        raise ConfigError(f"no feeds: give NAME=SOURCE, {_EXAMPLE}, or {where}")
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two feeds are called {spec.name}: give each a name of its own")
        names.add(spec.name)
    for name, (setting, *_) in own.items():
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"{one_line(name)}.{setting}: there is no feed {one_line(name)}{hint}")
    return specs


def _of_text(text: str, config: FeedsConfig, own: Mapping[str, Mapping[str, str]]) -> FeedSpec:
    name, equals, source = text.partition("=")
    if not equals or not source or not name or "/" in name or ":" in name:
        name = re.sub(r"[^\w.-]", "-", Path(text).stem)[:64]
        example = f"such as {name}={one_line(text)}" if Path(text).is_file() else _EXAMPLE
        raise ConfigError(f"{_public(text)}: must be NAME=SOURCE, {example}")
    with refusals_of(f"{one_line(name)}={_public(source)}"):
        return _spec(name, source, config, own.get(name, {}), PER_FEED)


def _of_file(file: Path, config: FeedsConfig, more: Mapping[str, Mapping[str, str]]) -> Iterator[FeedSpec]:
    tables = read_toml(file).get("feed", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: feed: must be tables, each beginning with [[feed]]")
    for number, table in enumerate(tables, 1):
        with refusals_of(f"{file}: feed {number}"):
            for key in ("name", "source"):
                if not isinstance(table.get(key), str) or not table[key]:
                    raise ConfigError(f"{key}: must be given, as a text")
            own = {key.replace("-", "_"): value for key, value in table.items() if key not in ("name", "source")}
            own |= more.get(table["name"], {})
            yield _spec(table["name"], table["source"], config, own, (*PER_FEED, *OF_STAGES))


def _spec(name: str, source: str, config: FeedsConfig, own: Mapping[str, Any], known: Sequence[str]) -> FeedSpec:
    """A feed with the settings of all feeds, replaced by its own. known: the settings that it may have of its own."""
    hints, values = hints_of(FeedsConfig), {}
    for setting, value in own.items():
        if setting not in known:
            hint = did_you_mean(setting, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{one_line(setting)}: no such setting of a feed{hint}")
        values[setting] = convert(value, hints[setting], setting)
    spec = FeedSpec(name, source, replace(config, **values))
    if not re.fullmatch(NAME, name):
        raise ConfigError("the name must be 1 to 64 letters, digits, '.', '-' or '_', and neither . nor ..")
    _ = spec.region  # raises if roi is wrong
    for setting in ("score", "classes"):
        if setting in own and not config.onnx:
            raise ConfigError(f"{setting}: has no effect on a processor of your own (--processor)")
    kind, defaults = spec.kind, dict[str, Any]()
    for f in fields(FeedsConfig):
        need = f.metadata["needs"]
        if f.name in PER_FEED and kind not in _KINDS.get(need, (kind,)):
            if f.name in own and getattr(spec.config, f.name):
                raise ConfigError(f"{f.name}: needs {need}, and {_public(source)} is {kind}")
            defaults[f.name] = f.default  # a setting of all feeds has no effect on feeds of another kind
    spec = replace(spec, config=replace(spec.config, **defaults))
    if spec.config.loop and not spec.config.realtime:
        raise ConfigError("loop needs realtime: without it every frame is answered, and a loop has no last frame")
    return spec


def _public(text: str) -> str:
    """A text as an error may show it: without secrets of an address."""
    return one_line(without_secrets(text))


def source_of_spec(spec: FeedSpec) -> Source:
    """The source of a feed, not opened. Raises ConfigError, also for a missing file."""
    own = spec.config
    if spec.file is not None and not spec.file.exists():
        feed, _, setting = spec.name.rpartition(".")
        hint = did_you_mean(setting, PER_FEED) if feed else ""
        camera = f"; the camera is /dev/video{spec.source}" if spec.source.isdecimal() else ""  # as OpenCV counts them
        why = f"no such setting {setting}{hint}" if hint else f"no such file{camera}"
        if feed and setting.replace("-", "_") in hints_of(FeedsConfig):
            why = f"not a setting of one feed: give {flag(setting)}"
        raise ConfigError(f"{spec.name}={_public(spec.source)}: {why}")
    with refusals_of(spec.name):
        if spec.kind == FOLDER:
            pictures_in(Path(spec.source))
        return source_of(
            spec.source, realtime=own.realtime, loop=own.loop, read_timeout=own.read_timeout_s, hwaccel=own.hwaccel
        )


# -- all of a run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """A checked configuration. sources: by feed, not opened yet. file: the configuration file, if any."""

    config: FeedsConfig
    specs: Sequence[FeedSpec]
    sources: Mapping[str, Source]
    file: Path | None = None

    def limits(self, general: FeedsConfig) -> dict[str, dict[str, Any]]:
        """By feed, the settings that differ from the detector's, which are those of `general`."""
        each = {spec.name: _limits(spec.config) for spec in self.specs}
        return {name: limits for name, limits in each.items() if limits != _limits(general)}


def _limits(config: FeedsConfig) -> dict[str, Any]:
    """The settings of a detector that a feed may have of its own."""
    stages = [name for name in ("track", "zone", "line") if getattr(config, name)]
    return {"score": config.score, "classes": [name.strip() for name in config.classes], "stages": stages}


def plan_of(texts: Sequence[str], file: Path | None, flags: Mapping[str, Any]) -> FeedPlan:
    """The plan of texts NAME=SOURCE, a file, the environment and flags. Raises ConfigError."""
    config, places = read(FeedsConfig, "feeds", file, environment(), flags, ("feed",))
    specs = specs_of(texts, file, config)
    sources = {spec.name: source_of_spec(spec) for spec in specs}
    facts = {need: any(spec.kind in kinds for spec in specs) for need, kinds in _KINDS.items()}
    facts["a live feed"] = any(source.live for source in sources.values())  # not every drawn source is live
    check_needs(config, places, {fact: "no feed is one" for fact, holds in facts.items() if not holds})
    check_places(config, specs, file)
    return FeedPlan(config, specs, sources, file)


def check_places(config: FeedsConfig, specs: Sequence[FeedSpec], file: Path | None = None) -> None:
    """Raise ConfigError if an output would overwrite an input or another output. file: of the configuration."""
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


def processor_of_plan(plan: FeedPlan) -> BatchProcessor:
    """The processor of --processor or --onnx. Raises ConfigError."""
    config = plan.config
    if config.processor and config.onnx:
        raise ConfigError("--processor and --onnx: give one of them, not both")
    if config.processor:
        return processor_of(config.processor)
    if not config.onnx:
        either = "give --processor MODULE:NAME or --onnx FILE (--onnx shapes is the bundled one)"
        raise ConfigError(f"no processor: {either}")
    detector = detector_of(config)
    detector.limits = plan.limits(config)
    return detector


def processor_of(text: str) -> BatchProcessor:
    """The batch processor of MODULE:NAME: an object, or a class or function that makes one. Raises ConfigError."""
    flag = f"--processor={one_line(text)}"
    found = imported(text, flag, "MODULE:NAME, such as mypkg.vision:Detector")
    found = made(found, flag, found.__name__) if inspect.isclass(found) or inspect.isfunction(found) else found
    if not isinstance(getattr(found, "id", None), str):
        raise ConfigError(f"{flag}: {type(found).__name__} has no id, a text that names it in the table and in metrics")
    if not callable(getattr(found, "process", None)):
        raise ConfigError(f"{flag}: {type(found).__name__} has no method process(), which a batch processor needs")
    processor: BatchProcessor = found
    return processor


def _graph_of(config: FeedsConfig) -> Path:
    return DETECTOR if config.onnx == "shapes" else Path(config.onnx)


def detector_of(config: FeedsConfig) -> OnnxFrames:
    """The detector of --onnx. Raises ConfigError."""
    from reflex_runtime.feeds.detectors.recognise import names_of_file
    from reflex_runtime.run.onnx_session import PROVIDERS, check_provider

    path = _graph_of(config)
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "no such file (shapes is the bundled detector)"
        raise ConfigError(f"--onnx={one_line(config.onnx)}: {why}")
    check_kind(path.with_name(f"{path.name}.data"))  # its weights may be there
    provider = PROVIDERS.get(config.provider, config.provider)
    try:
        check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    with refusals_of(f"--names={one_line(config.names)}"):
        names = names_of_file(Path(config.names)) if config.names else None
    return OnnxFrames(
        path,
        provider=provider,
        threads=config.threads,
        iou=config.iou,
        max_detections=config.max_detections or None,
        size=_size(config.size) if config.size else None,
        resize=None if config.resize == "auto" else config.resize,
        names=names,
        **_limits(config),
    )


def _size(text: str) -> tuple[int, int]:
    """Width and height from 640 or 640x384."""
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text.strip())
    if found is None or not all(1 <= int(side) <= 16_384 for side in found.groups(found[1])):
        raise ConfigError(f"--size={one_line(text)}: must be pixels of a side, such as 640, or WIDTHxHEIGHT")
    return int(found[1]), int(found[2] or found[1])


def batching_of(plan: FeedPlan) -> BatchConfig:
    """How frames are batched. All feeds together may have two batches of frames in flight, each feed at most one batch.
    The queue has room for all of these frames, also for those of feeds that a file may name later."""
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
    """The error of a processor that did not start, as an error of the option that chose it."""
    named = f"--processor={one_line(config.processor)}" if config.processor else f"--onnx={one_line(config.onnx)}"
    cause = error.__cause__
    words = in_one_line(getattr(cause if isinstance(cause, ConfigError) else error, "message", str(error)))
    if cause is not None and not isinstance(cause, ConfigError):
        words = f"on_start failed: {told(cause)}"
    return ConfigError(f"{named}: {words.removeprefix(f'{_graph_of(config)}: ')}")


def deferred_changes(before: FeedsConfig, after: FeedsConfig) -> list[str]:
    """The changed settings that take effect only at the next start, in words; empty if there are none."""
    fixed = (f.name for f in fields(before) if f.name not in {*PER_FEED, *OF_STAGES})
    changed = [flag(name) for name in fixed if getattr(before, name) != getattr(after, name)]
    return [f"at the next start: {', '.join(changed)}"] if changed else []
