"""What `reflex feeds` was asked for: feeds, their sources, the processor. Everything is checked before anything runs.

Every refusal is one line that names the flag or the feed, the value, and what would be right. Credentials of an address
are in none of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from reflex_runtime.cli.feeds_words import in_one_line, told
from reflex_runtime.config import FeedsConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import convert, one_line
from reflex_runtime.sources import read_toml
from reflex_runtime.telemetry import files

if TYPE_CHECKING:
    from reflex_runtime.drivers.batch_processor import BatchConfig, BatchProcessor
    from reflex_runtime.feeds.source import Source

PER_FEED = ("realtime", "loop", "max_age_ms", "restarts", "read_timeout_s")
_DRAWN = ("chaos:", "shapes:", "markers:")
_EXAMPLE = "such as door=rtsp://10.0.0.7/live or yard=yard.mp4"


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """A feed as it was asked for. config: the settings, with this feed's own in place of the general ones."""

    name: str
    source: str
    config: FeedsConfig

    @property
    def file(self) -> Path | None:
        """The video file it reads, if it is one."""
        return Path(self.source) if is_file(self.source) else None


def is_file(source: str) -> bool:
    """Whether a source is a path to a file: no address, no device, nothing drawn."""
    return "://" not in source and not source.lower().startswith((*_DRAWN, "/dev/video"))


# -- feeds -------------------------------------------------------------------------------------------------------------


def specs_of(texts: Sequence[str], file: Path | None, config: FeedsConfig) -> list[FeedSpec]:
    """The feeds of the file and of the command line; ConfigError if a name comes twice or something is missing."""
    specs = [*(_of_file(file, config) if file is not None else ()), *(_of_text(text, config) for text in texts)]
    if not specs:
        raise ConfigError("no feeds: give NAME=SOURCE, " + _EXAMPLE + ", or --config FILE with tables [[feed]]")
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two feeds are called {spec.name}: give each a name of its own")
        names.add(spec.name)
    return specs


def _of_text(text: str, config: FeedsConfig) -> FeedSpec:
    name, equals, source = text.partition("=")
    if not equals or not source or not name or "/" in name or ":" in name:
        raise ConfigError(f"{_public(text)}: must be NAME=SOURCE, {_EXAMPLE}")
    return _spec(name, source, config, frozenset(), f"{one_line(name)}={_public(source)}")


def _of_file(file: Path, config: FeedsConfig) -> Iterator[FeedSpec]:
    tables = read_toml(file).get("feed", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: feed: must be tables, each beginning with [[feed]]")
    for number, table in enumerate(tables, 1):
        where = f"{file}: feed {number}"
        for key in ("name", "source"):
            if not isinstance(table.get(key), str) or not table[key]:
                raise ConfigError(f"{where}: {key}: must be there, and be text")
        own = {key.replace("-", "_"): value for key, value in table.items() if key not in ("name", "source")}
        yield _spec(table["name"], table["source"], _with(config, own, where), own.keys(), where)


def _with(config: FeedsConfig, own: Mapping[str, Any], where: str) -> FeedsConfig:
    """The settings with a feed's own in place of the general ones."""
    hints = get_type_hints(FeedsConfig)
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    for name, value in own.items():
        if name not in PER_FEED:
            raise ConfigError(f"{where}: {one_line(name)}: no such setting of a feed; there are {', '.join(PER_FEED)}")
        values[name] = convert(value, hints[name], f"{where}: {name}")
    try:
        return FeedsConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message.removeprefix('--')}") from None


def _spec(name: str, source: str, config: FeedsConfig, own: Any, where: str) -> FeedSpec:
    if not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ConfigError(f"{where}: the name must be 1 to 64 letters, digits, '.', '-' or '_'")
    if not is_file(source):  # it goes at its own pace anyway, and what was said of files was not said of it
        for wrong in ("realtime", "loop"):
            if wrong in own and getattr(config, wrong):
                raise ConfigError(f"{where}: {wrong}: is for files, and {_public(source)} is none")
        config = _with(config, {"realtime": False, "loop": False}, where)
    elif config.loop and not config.realtime:
        raise ConfigError(f"{where}: --loop needs --realtime: a file without end cannot be answered whole")
    else:  # it is not lost, and without realtime it waits for us
        for wrong in ("read_timeout_s",) if config.realtime else ("max_age_ms", "restarts", "read_timeout_s"):
            if wrong in own:
                kind = "a file" if wrong == "read_timeout_s" else "a file without realtime"
                raise ConfigError(f"{where}: {wrong}: is for cameras, and {_public(source)} is {kind}")
    return FeedSpec(name, source, config)


def _public(text: str) -> str:
    """A text that may hold an address, as an error may show it."""
    from reflex_runtime.feeds.video import without_secrets

    return one_line(without_secrets(text))


def source_of_spec(spec: FeedSpec) -> Source:
    """The source of a feed; ConfigError if it can be seen that there is none."""
    from reflex_runtime.demo.markers import markers_source
    from reflex_runtime.demo.shapes import shapes_source
    from reflex_runtime.feeds.opening import source_of

    where = f"{spec.name}={_public(spec.source)}"
    if spec.file is not None and not spec.file.exists():
        raise ConfigError(f"{where}: no such file")
    if spec.file is not None and spec.file.is_dir():
        raise ConfigError(f"{where}: is a directory, must be a video")
    own = spec.config
    try:
        return source_of(
            spec.source,
            realtime=own.realtime,
            loop=own.loop,
            read_timeout=own.read_timeout_s,
            schemes={"shapes": shapes_source, "markers": markers_source},
        )
    except ConfigError as error:
        raise ConfigError(f"{spec.name}: {in_one_line(error.message)}") from None


def missing(specs: Sequence[FeedSpec], sources: Mapping[str, Source]) -> dict[str, str]:
    """The facts that settings need and that do not hold; see `check_needs`."""
    found = {
        "a file": any(spec.file is not None for spec in specs),
        "a live feed": any(source.live for source in sources.values()),
        "a camera": any(spec.file is None for spec in specs),
    }
    return {fact: "no feed is one" for fact, holds in found.items() if not holds}


# -- the processor -----------------------------------------------------------------------------------------------------


def processor_of(config: FeedsConfig) -> BatchProcessor:
    """The processor that --processor or --onnx names."""
    if config.processor and config.onnx:
        raise ConfigError("--processor and --onnx: give one of them, not both")
    if not config.processor and not config.onnx:
        raise ConfigError(
            "no processor: give --processor MODULE:NAME or --onnx FILE (--onnx shapes is the bundled one)"
        )
    return _imported(config.processor) if config.processor else _onnx(config)


def asked_processor(config: FeedsConfig) -> str:
    """The flag and the value that named the processor, for errors."""
    return f"--processor={one_line(config.processor)}" if config.processor else f"--onnx={one_line(config.onnx)}"


def refused(config: FeedsConfig, error: Exception) -> ConfigError:
    """Why the processor cannot be used, in the words of the command line."""
    cause = error.__cause__
    words = in_one_line(getattr(cause if isinstance(cause, ConfigError) else error, "message", str(error)))
    if cause is not None and not isinstance(cause, ConfigError):
        words = f"on_start failed: {told(cause)}"
    return ConfigError(f"{asked_processor(config)}: {words.removeprefix(config.onnx + ': ')}")


def _onnx(config: FeedsConfig) -> BatchProcessor:
    from reflex_runtime.demo.shapes import DETECTOR
    from reflex_runtime.feeds.onnx import OnnxFrames
    from reflex_runtime.processors.onnx import CPU, CUDA, check_provider

    path = DETECTOR if config.onnx == "shapes" else Path(config.onnx)
    if not path.is_file():
        raise ConfigError(f"--onnx={one_line(config.onnx)}: no such file (shapes is the bundled detector)")
    provider = {"cpu": CPU, "cuda": CUDA}.get(config.provider, config.provider)
    try:
        check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    return OnnxFrames(path, provider=provider, threads=config.threads, score=config.score)


def _imported(text: str) -> BatchProcessor:
    module, _, name = text.partition(":")
    flag = f"--processor={one_line(text)}"
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", text):
        raise ConfigError(f"{flag}: must be MODULE:NAME, such as mypkg.vision:Detector")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file beside you, as `python -m` finds it
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{flag}: cannot be imported: {told(error)}") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError(f"{flag}: {module} has no {name}") from None
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return _checked(found, flag)
    try:
        return _checked(found(), flag)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{flag}: cannot be made: {told(error)}") from error


def _checked(made: Any, flag: str) -> BatchProcessor:
    """That it is a batch processor, as far as can be seen."""
    if not isinstance(getattr(made, "id", None), str):
        raise ConfigError(f"{flag}: {type(made).__name__} has no id, a text that names it in the table and in metrics")
    missing = [verb for verb in ("on_start", "process", "on_stop") if not callable(getattr(made, verb, None))]
    if missing:
        raise ConfigError(f"{flag}: {type(made).__name__} has no method {missing[0]}(), which a batch processor needs")
    processor: BatchProcessor = made
    return processor


def batching_of(config: FeedsConfig, feeds: int) -> BatchConfig:
    """How frames are batched."""
    from reflex_runtime.drivers.batch_processor import BatchConfig

    size, capacity = config.max_batch_size, config.queue_capacity
    if 0 < capacity < size:
        raise ConfigError(f"--queue-capacity={capacity}: must be at least --max-batch-size={size}, or 0")
    return BatchConfig(
        max_batch_size=size,
        max_latency=config.max_latency_ms / 1e3,
        queue_capacity=capacity or max(4 * size, feeds),
        response_timeout=config.response_timeout_s,
        startup_timeout=config.startup_timeout_s,
        watchdog=config.watchdog_s,
    )


# -- what is written ---------------------------------------------------------------------------------------------------


def annotated(config: FeedsConfig, name: str) -> Path:
    """The video of a feed with what was found drawn on it."""
    return Path(config.annotate, f"{name}.mp4")


def check_outputs(config: FeedsConfig, specs: Sequence[FeedSpec], file: Path | None = None) -> None:
    """That everything can be written, and that nothing is written over what is read. file: the configuration."""
    outputs = [("--results", config.results, Path(config.results))] if config.results not in ("", "-") else []
    outputs += [("--trace", config.trace, Path(config.trace))] if config.trace else []
    for flag, value, path in outputs:
        if path.is_dir():
            raise ConfigError(f"{flag}={one_line(value)}: is a directory, must be a file")
    if config.annotate:
        _check_folder(config.annotate)
        outputs += [("--annotate", config.annotate, annotated(config, spec.name)) for spec in specs]
    taken = {_place(spec.file): f"which {spec.name} reads" for spec in specs if spec.file is not None}
    if config.onnx:
        taken[_place(Path(config.onnx))] = "which is the model"
    if file is not None:
        taken[_place(file)] = "which is the configuration"
    for flag, value, path in outputs:
        if (use := taken.get(_place(path))) is not None:
            raise ConfigError(f"{flag}={one_line(value)}: would write over {one_line(path)}, {use}")
        taken[_place(path)] = f"which {flag} writes"
    for flag, value, path in outputs:
        if flag != "--annotate":
            _check_file(flag, value, path)


def _place(path: Path) -> str:
    return os.path.realpath(path)


def _check_file(flag: str, value: str, path: Path) -> None:
    try:
        files.check(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}={one_line(value)}: cannot be written: {_why(error)}") from None


def _check_folder(value: str) -> None:
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--annotate={one_line(value)}: cannot be made: {_why(error)}") from None
    if not os.access(value, os.W_OK | os.X_OK):
        raise ConfigError(f"--annotate={one_line(value)}: cannot be written to")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or in_one_line(error)
