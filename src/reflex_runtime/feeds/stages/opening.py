"""The stages after the batch that settings name: one set for each feed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.opening import imported
from reflex_runtime.feeds.pipeline import After, Result
from reflex_runtime.feeds.stages.zones import lines_of, zones_of
from reflex_runtime.feeds.words import told
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import one_line


def stages_of(config: FeedsConfig) -> list[After]:
    """Those of one feed, new: tracks, then zones and lines, then its own in their order. Raises ConfigError."""
    found: list[After] = []
    zones, lines = zones_of(config.zone), lines_of(config.line)
    if config.track:
        from reflex_runtime.feeds.stages.tracking import TrackStage

        found.append(_with_library("--track", lambda: TrackStage(config.track_score)))
    if lines and not config.track:
        raise ConfigError("--line needs --track: an object crosses it once", field="line")
    if zones or lines:
        from reflex_runtime.feeds.stages.zones import ZoneStage

        found.append(_with_library("--zone" if zones else "--line", lambda: ZoneStage(zones, lines)))
    return found + [own_stage(text) for text in config.stage]


def _with_library(flag: str, make: Callable[[], After]) -> After:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}") from None


class OwnStage:
    """A stage that MODULE:NAME names: a function of a `Result`, which all feeds share, or a class, of which each feed
    has an instance. It returns a `Result`, or None to keep this one from the sinks."""

    def __init__(self, name: str, call: Callable[[Result], Any]) -> None:
        self.name, self._call = name, call

    def __call__(self, result: Result) -> Any:
        return self._call(result)


def own_stage(text: str) -> OwnStage:
    """Import a stage. Raises ConfigError."""
    flag = f"--stage={one_line(text)}"
    found = imported(text, flag, "mypkg.rules:only_large")
    if inspect.isclass(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{flag}: cannot be made: {told(error)}") from error
    if not callable(found):
        raise ConfigError(f"{flag}: {type(found).__name__} cannot be called with a result")
    return OwnStage(text, found)
