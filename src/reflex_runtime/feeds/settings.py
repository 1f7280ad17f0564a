"""Feeds by name, as the command line and a configuration file ask for them: checked before anything runs.

Every refusal is one line that names the feed or the setting, the value, and what is allowed. It holds no credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.json_lines import NAME
from reflex_runtime.feeds.runtime.pipeline import Region, Source
from reflex_runtime.feeds.sources import DRAWN, pictures_in, source_of
from reflex_runtime.feeds.sources.video import without_secrets
from reflex_runtime.run.modules import in_one_line
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import convert, did_you_mean, hints_of, one_line
from reflex_runtime.settings.read import read_toml

PER_FEED = (
    "realtime", "loop", "max_age_ms", "restarts", "read_timeout_s", "every", "fps", "rotate", "roi", "hwaccel",
    "score", "classes",
)  # fmt: skip
OF_STAGES = ("track", "track_score", "zone", "line", "stage")  # of a feed in a file
_FILE, _PLAYED, _FOLDER = "a file without realtime", "a file", "a directory of pictures"
_DRAWN_KIND, CAMERA = "drawn", "a camera"
FILES = (_FILE, _PLAYED)
_ONLY = (  # settings of a feed, what they are for, and the kinds of source that have them
    (("realtime", "loop"), "files of video", FILES),
    (("max_age_ms", "restarts"), "cameras", (_PLAYED, _DRAWN_KIND, CAMERA)),
    (("read_timeout_s",), "cameras", (_DRAWN_KIND, CAMERA)),
    (("hwaccel",), "videos and cameras", (*FILES, CAMERA)),
)
_EXAMPLE = "such as door=rtsp://10.0.0.7/live or yard=yard.mp4"


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """A feed's name, its source as text, and its settings: the general ones with its own in their place."""

    name: str
    source: str
    config: FeedsConfig

    @property
    def file(self) -> Path | None:
        """The video file or the directory it reads, if it is one."""
        return Path(self.source) if is_file(self.source) else None

    @property
    def kind(self) -> str:
        """What its source is, in words: one of `FILES`, `CAMERA`, a directory, or drawn."""
        return _kind(self.source, self.config.realtime)

    @property
    def region(self) -> Region | None:
        """The part of its pictures that the processor gets; None for all."""
        return Region.of(self.config.roi) if self.config.roi else None

    def same_as(self, other: FeedSpec) -> bool:
        """Whether it is the same feed: of the general settings only its own count."""
        settings = (*PER_FEED, *OF_STAGES)
        same = all(getattr(self.config, name) == getattr(other.config, name) for name in settings)
        return same and (self.name, self.source) == (other.name, other.source)

    def options(self, live: bool) -> dict[str, Any]:
        """Its settings as `Runtime.feed` takes them. live: of its source."""
        own = self.config
        return {
            "max_age": own.max_age_ms / 1e3,
            "restarts": (own.restarts or None) if live else None,
            "every": own.every,
            "fps": own.fps,
            "rotate": int(own.rotate),
        }


def is_file(source: str) -> bool:
    """Whether a source is a path to a file: no address, no device, nothing drawn."""
    return "://" not in source and not source.startswith("/dev/video") and not is_drawn(source)


def is_drawn(source: str) -> bool:
    """Whether a source draws its own pictures."""
    return source.lower().startswith(tuple(f"{name}:" for name in DRAWN))


def specs_of(texts: Sequence[str], file: Path | None, config: FeedsConfig) -> list[FeedSpec]:
    """The feeds of a configuration file and of texts NAME=SOURCE, with the settings of texts NAME.SETTING=VALUE for one
    feed alone. ConfigError for a name given twice, and for none."""
    feeds, own = _taken_apart(texts)
    specs = [
        *(_of_file(file, config, own) if file is not None else ()),
        *(_of_text(text, config, own) for text in feeds),
    ]
    if not specs:
        raise ConfigError(f"no feeds: give NAME=SOURCE, {_EXAMPLE}, or --config FILE with tables [[feed]]")
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


def _taken_apart(texts: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Texts NAME=SOURCE; and of texts NAME.SETTING=VALUE the values by feed and setting."""
    feeds: list[str] = []
    own: dict[str, dict[str, str]] = {}
    for text in texts:
        left, equals, value = text.partition("=")
        name, _, setting = left.rpartition(".")
        if equals and name and (setting := setting.replace("-", "_")) in PER_FEED:
            own.setdefault(name, {})[setting] = value
        else:
            feeds.append(text)
    return feeds, own


def _of_text(text: str, config: FeedsConfig, own: Mapping[str, Mapping[str, str]]) -> FeedSpec:
    name, equals, source = text.partition("=")
    if not equals or not source or not name or "/" in name or ":" in name:
        name = re.sub(r"[^\w.-]", "-", Path(text).stem)[:64]
        example = f"such as {name}={one_line(text)}" if Path(text).is_file() else _EXAMPLE
        raise ConfigError(f"{_public(text)}: must be NAME=SOURCE, {example}")
    settings = own.get(name, {})
    where = f"{one_line(name)}={_public(source)}"
    return _spec(name, source, set_in(config, settings, PER_FEED, f"{where}: "), settings.keys(), where)


def _of_file(file: Path, config: FeedsConfig, more: Mapping[str, Mapping[str, str]]) -> Iterator[FeedSpec]:
    tables = read_toml(file).get("feed", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: feed: must be tables, each beginning with [[feed]]")
    for number, table in enumerate(tables, 1):
        where = f"{file}: feed {number}"
        for key in ("name", "source"):
            if not isinstance(table.get(key), str) or not table[key]:
                raise ConfigError(f"{where}: {key}: must be there, and be text")
        own = {key.replace("-", "_"): value for key, value in table.items() if key not in ("name", "source")}
        own |= more.get(table["name"], {})
        settings = set_in(config, own, (*PER_FEED, *OF_STAGES), f"{where}: ")
        yield _spec(table["name"], table["source"], settings, own.keys(), where)


def set_in(config: FeedsConfig, own: Mapping[str, Any], known: Sequence[str], where: str = "") -> FeedsConfig:
    """The settings with some in place of the general ones. known: those that may be given."""
    hints = hints_of(FeedsConfig)
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    for name, value in own.items():
        if name not in known:
            words = f"no such setting of a feed; there are {', '.join(known)}"
            raise ConfigError(f"{where}{one_line(name)}: {words}")
        values[name] = convert(value, hints[name], f"{where}{name}")
    try:
        return FeedsConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}{error.message.removeprefix('--')}") from None


def _spec(name: str, source: str, config: FeedsConfig, own: Any, where: str) -> FeedSpec:
    if not re.fullmatch(NAME, name):
        words = "the name must be 1 to 64 letters, digits, '.', '-' or '_', and neither . nor .."
        raise ConfigError(f"{where}: {words}")
    if config.roi:
        try:
            Region.of(config.roi)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    for setting in ("score", "classes"):
        if setting in own and not config.onnx:
            raise ConfigError(f"{where}: {setting}: has no effect on a processor of your own (--processor)")
    kind = _kind(source, config.realtime)
    for settings, of, kinds in _ONLY:
        for setting in settings if kind not in kinds else ():
            if setting in own and getattr(config, setting):
                raise ConfigError(f"{where}: {setting}: is for {of}, and {_public(source)} is {kind}")
    if kind not in FILES:  # general settings of the command that do not apply to this source
        config = set_in(config, {"realtime": False, "loop": False}, PER_FEED, f"{where}: ")
    if kind in (_DRAWN_KIND, _FOLDER):
        config = set_in(config, {"hwaccel": ""}, PER_FEED, f"{where}: ")
    if config.loop and not config.realtime:
        raise ConfigError(f"{where}: --loop needs --realtime: a file without end cannot be answered whole")
    return FeedSpec(name, source, config)


def _kind(source: str, realtime: bool) -> str:
    if is_drawn(source):
        return _DRAWN_KIND
    if not is_file(source):
        return CAMERA
    if "\0" not in source and Path(source).is_dir():
        return _FOLDER
    return _PLAYED if realtime else _FILE


def _public(text: str) -> str:
    """A text that may hold an address, as an error may show it."""
    return one_line(without_secrets(text))


def source_of_spec(spec: FeedSpec) -> Source:
    """The source of a feed. ConfigError for a file that is not there."""
    where = f"{spec.name}={_public(spec.source)}"
    if spec.file is not None and not spec.file.exists():
        raise ConfigError(f"{where}: no such file")
    own = spec.config
    try:
        if spec.kind == _FOLDER:
            pictures_in(Path(spec.source))
        return source_of(
            spec.source,
            realtime=own.realtime,
            loop=own.loop,
            read_timeout=own.read_timeout_s,
            hwaccel=own.hwaccel,
        )
    except ConfigError as error:
        raise ConfigError(f"{spec.name}: {in_one_line(error.message)}") from None
