"""The files that a run of `reflex feeds` writes: results, videos and a trace."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.annotated import AnnotatedVideo
from reflex_runtime.feeds.outputs.json_lines import JsonLines, path_name
from reflex_runtime.feeds.runtime.messages import in_one_line
from reflex_runtime.observe import files
from reflex_runtime.observe.journal_writer import JournalWriter
from reflex_runtime.settings import FeedsConfig
from reflex_runtime.settings.declare import one_line

if TYPE_CHECKING:
    from reflex_runtime.core.group import GroupConfig
    from reflex_runtime.feeds.outputs.parquet import ParquetResults
    from reflex_runtime.feeds.settings import FeedSpec


class FeedFiles:
    """The files of one run.

    output: standard output. gone: called when its reader left. trace: None without --trace; a sink of the coordinator's
    events, to be closed by who opens it.
    """

    def __init__(
        self, config: FeedsConfig, groups: Sequence[GroupConfig], output: Any, gone: Callable[[], None]
    ) -> None:
        self._config = config
        self.trace = JournalWriter(config.trace, groups) if config.trace else None
        self._results = self._lines(output, gone)
        self._annotated: set[str] = set()  # feeds that have a video

    def sinks_of(self, spec: FeedSpec) -> list[Callable[[Any], None]]:
        """Those of a feed."""
        sinks: list[Callable[[Any], None]] = [] if self._results is None else [self._results]
        if self._config.annotate:
            sinks.append(AnnotatedVideo(annotated(self._config, spec.name)))
            self._annotated.add(spec.name)
        return sinks

    def begin(self) -> None:
        """The run has started: until then the results of the run before are left as they are."""
        if self._results is not None:
            self._results.begin()

    def complete(self) -> bool:
        """Whether no line is missing; a log line says which are."""
        config, complete = self._config, True
        if self._results is not None and self._results.lost:
            logging.error("--results=%s: %d results are not in it", config.results, self._results.lost)
            self._results = None
        if self.trace is not None and (self.trace.error is not None or self.trace.dropped):
            why = f": {self.trace.error.strerror}" if self.trace.error is not None else ""
            logging.error("--trace=%s: %d lines are not in it%s", config.trace, self.trace.dropped, why)
            self.trace, complete = None, False
        return complete

    def tell(self) -> None:
        """Log what was written."""
        config = self._config
        videos = [annotated(config, name) for name in sorted(self._annotated)]
        made = [str(path) for path in videos if path.is_file()]
        written = [
            f"results: {config.results}" if self._results is not None and config.results != "-" else "",
            f"videos: {', '.join(made) if len(made) <= 4 else f'{len(made)} in {config.annotate}'}" if made else "",
            f"trace: {config.trace} (reflex trace {config.trace})" if self.trace is not None else "",
        ]
        if any(written):
            logging.info("wrote %s", "; ".join(filter(None, written)))

    def _lines(self, output: Any, gone: Callable[[], None]) -> JsonLines | ParquetResults | None:
        if not self._config.results:
            return None
        if self._config.results == "-":
            return JsonLines(ResultStream(output, gone))  # type: ignore[arg-type]
        if is_parquet(self._config.results):
            from reflex_runtime.feeds.outputs.parquet import ParquetResults

            return ParquetResults(self._config.results)
        return JsonLines(self._config.results)


class ResultStream:
    """Standard output for results, unbuffered and in UTF-8. gone: called when its reader left, and what comes after is
    dropped, because the reader of standard output has left."""

    def __init__(self, stream: Any, gone: Callable[[], None]) -> None:
        self._file, self._tty, self._gone = stream.fileno(), stream.isatty(), gone

    def isatty(self) -> bool:
        return bool(self._tty)

    def write(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "replace"))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self._gone()

    def flush(self) -> None:
        """Nothing is held back."""


def annotated(config: FeedsConfig, name: str) -> Path:
    """The video of a feed with what was found drawn on it."""
    return Path(config.annotate, f"{path_name(name)}.mp4")


def check_outputs(config: FeedsConfig) -> None:
    """That everything can be written."""
    for flag, value in _written(config):
        path = Path(value)
        if path.is_dir() and not is_parquet(value):
            raise ConfigError(f"{flag}={one_line(value)}: is a directory, must be a file")
    if config.annotate:
        _check_folder("--annotate", config.annotate)
    for flag, value in _written(config):
        _check_file(flag, value, Path(value))


def check_places(config: FeedsConfig, specs: Sequence[FeedSpec], file: Path | None = None) -> None:
    """That nothing is written over what is read, or written twice. file: the configuration."""
    outputs = [(flag, value, Path(value)) for flag, value in _written(config)]
    if config.annotate:
        outputs += [("--annotate", config.annotate, annotated(config, spec.name)) for spec in specs]
    taken = {_place(spec.file): f"which {spec.name} reads" for spec in specs if spec.file is not None}
    for model in filter(None, (config.onnx, config.then)):
        taken[_place(Path(model))] = "which is the model"
    if file is not None:
        taken[_place(file)] = "which is the configuration"
    for flag, value, path in outputs:
        if (use := taken.get(_place(path))) is not None:
            raise ConfigError(f"{flag}={one_line(value)}: would write over {one_line(path)}, {use}")
        taken[_place(path)] = f"which {flag} writes"


def _written(config: FeedsConfig) -> list[tuple[str, str]]:
    """Files that are written, by flag."""
    results = [("--results", config.results)] if config.results not in ("", "-") else []
    return results + ([("--trace", config.trace)] if config.trace else [])


def is_parquet(results: str) -> bool:
    """Whether results are written as Parquet: by the end of the name."""
    return results.lower().endswith(".parquet")


def _place(path: Path) -> str:
    return os.path.realpath(path)


def _check_file(flag: str, value: str, path: Path) -> None:
    try:
        if flag == "--results" and is_parquet(value):
            from reflex_runtime.feeds.outputs.parquet import check_parquet

            check_parquet(path)
        else:
            files.check(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}={one_line(value)}: cannot be written: {_why(error)}") from None


def _check_folder(flag: str, value: str) -> None:
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}={one_line(value)}: cannot be made: {_why(error)}") from None
    if not os.access(value, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}={one_line(value)}: cannot be written to")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or in_one_line(error)
