"""The outputs of a run: its files, checked before it starts, and receivers, which may be slow or away."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.feeds.outputs.json_lines import JsonLines, path_name
from reflex_runtime.feeds.outputs.output import ResultOutput
from reflex_runtime.feeds.runtime.pipeline import refusals_of
from reflex_runtime.observe import files
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import one_line


class ResultFiles:
    """The files of one run.

    output: standard output. gone: called when its reader has closed it. trace: a sink of the coordinator's events,
    which the caller closes; None without --trace.
    """

    def __init__(
        self, config: FeedsConfig, groups: Sequence[GroupConfig], output: Any, gone: Callable[[], None]
    ) -> None:
        from reflex_runtime.observe.journal_writer import JournalWriter

        self._config = config
        self.trace = JournalWriter(config.trace, groups) if config.trace else None
        self._results: JsonLines | None = None
        if config.results == "-":
            self._results = JsonLines(FileIO(output.fileno(), "w", closefd=False), gone=gone)
        elif config.results:
            self._results = JsonLines(config.results)
        self._videos: dict[str, Any] = {}  # by feed

    def sinks_of(self, feed: str) -> list[Callable[[Any], None]]:
        """The sinks of a feed."""
        sinks: list[Callable[[Any], None]] = [] if self._results is None else [self._results]
        if self._config.annotate:
            from reflex_runtime.feeds.outputs.annotated import AnnotatedVideo

            self._videos[feed] = AnnotatedVideo(video_of(self._config, feed))
            sinks.append(self._videos[feed])
        return sinks

    def begin(self) -> None:
        """Begin the file of results. Called once the run has started, so that a failed start keeps an earlier file.
        Raises ConfigError."""
        if self._results is not None:
            with files.refused(f"--results={one_line(self._config.results)}"):
                self._results.begin()

    def complete(self) -> bool:
        """Log at the end what was written and what is missing. Returns whether the trace is complete."""
        config, lines, whole = self._config, [], True
        if self._results is not None and self._results.lost:
            logging.error("--results=%s: %d results are not in it", config.results, self._results.lost)
        elif config.results not in ("", "-"):
            lines.append(f"results: {config.results}")
        made = [str(video.path) for _, video in sorted(self._videos.items()) if video.whole]
        if made:
            lines.append(f"videos: {', '.join(made) if len(made) <= 4 else f'{len(made)} in {config.annotate}'}")
        if self.trace is not None and (self.trace.error is not None or self.trace.dropped):
            why = f": {self.trace.error.strerror}" if self.trace.error is not None else ""
            logging.error("--trace=%s: %d lines are not in it%s", config.trace, self.trace.dropped, why)
            whole = False
        elif self.trace is not None:
            lines.append(f"trace: {config.trace} (reflex trace {config.trace})")
        if lines:
            logging.info("wrote %s", "; ".join(lines))
        return whole


# -- checks ------------------------------------------------------------------------------------------------------------


def check_files(config: FeedsConfig) -> None:
    """Raise ConfigError if a file cannot be written."""
    if config.results.lower().endswith(".parquet"):
        other = one_line(Path(config.results).with_suffix(".jsonl"))
        raise ConfigError(f"--results={one_line(config.results)}: results are JSON lines, not Parquet: {other}")
    if config.annotate:
        with files.refused(f"--annotate={one_line(config.annotate)}", "be made"):
            Path(config.annotate).mkdir(parents=True, exist_ok=True)
        if not os.access(config.annotate, os.W_OK | os.X_OK):
            raise ConfigError(f"--annotate={one_line(config.annotate)}: cannot be written to")
    for flag, value in written(config):
        with files.refused(f"{flag}={one_line(value)}"):
            files.check(value)


def written(config: FeedsConfig) -> list[tuple[str, str]]:
    """The flags and paths of the files that are written."""
    pairs = (("--results", "" if config.results == "-" else config.results), ("--trace", config.trace))
    return [(flag, value) for flag, value in pairs if value]


def video_of(config: FeedsConfig, feed: str) -> Path:
    """The path of a feed's video."""
    return Path(config.annotate, f"{path_name(feed)}.mp4")


# -- receivers ---------------------------------------------------------------------------------------------------------


def outputs_of(config: FeedsConfig) -> list[ResultOutput]:
    """The outputs of --publish and --webhook, not started. Raises ConfigError, whose text has no secrets."""
    found: list[ResultOutput] = []
    if config.publish:
        from reflex_runtime.feeds.outputs.mqtt import MqttPublisher

        with refusals_of("--publish", "="):
            found.append(MqttPublisher(config.publish, config.publish_qos))
    if config.webhook:
        from reflex_runtime.feeds.outputs.webhook import Webhook

        with refusals_of("--webhook", "="):
            found.append(Webhook(config.webhook))
    return found
