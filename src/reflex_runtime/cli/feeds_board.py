"""Where `reflex feeds` speaks: standard error, with a live table on a terminal, and log lines that go above it."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from reflex_runtime.cli.feeds_table import LiveTable, summary
from reflex_runtime.cli.feeds_words import in_one_line, line_of, line_of_all, told, words_of
from reflex_runtime.telemetry.health import HealthEvent

if TYPE_CHECKING:
    from reflex_runtime.feeds.runtime import Runtime

PER_SECOND = 4  # times the table is drawn anew
EVERY_S = 5.0  # seconds between lines where there is no terminal
LINES = 8  # feeds of which each has its own line; more have one together
WIDE = 160  # columns where the output is no terminal
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class Board:
    """What a person sees of a run. live: whether there is a table; None: where standard error is a terminal.

    Everything goes through one console, so that log lines and table do not write into each other. A context manager:
    inside it the table lives, or lines come now and then.
    """

    def __init__(self, runtime: Runtime, live: bool | None) -> None:
        self._runtime = runtime
        terminal = sys.stderr.isatty()
        self.console = Console(
            file=cast(TextIO, _Unfailing(sys.stderr)),
            highlight=False,
            force_terminal=True if live else None,
            width=None if terminal else WIDE,
            soft_wrap=not terminal,
        )
        usable = self.console.is_terminal and not self.console.is_dumb_terminal
        self._is_live = usable if live is None else live
        self._live: Live | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        logging.basicConfig(level=logging.INFO, handlers=[_ConsoleLog(self.console)], force=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(
                console=self.console,
                get_renderable=lambda: LiveTable(self._runtime.snapshot()),
                refresh_per_second=PER_SECOND,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # else it is somebody's file
            )
            self._live.start(refresh=True)
        else:
            self._thread = threading.Thread(target=self._lines, name="reflex-feeds-lines", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def tell(self, event: HealthEvent) -> None:
        """One line for what happened."""
        level, text = words_of(event)
        logging.log(level, "%s", text)

    def summary(self) -> None:
        """The last table, which stays."""
        self.console.print(summary(self._runtime.snapshot()), soft_wrap=False)

    def _lines(self) -> None:
        while not self._over.wait(EVERY_S):
            feeds = list(self._runtime.snapshot().feeds.values())
            for line in map(line_of, feeds) if len(feeds) <= LINES else [line_of_all(feeds)]:
                logging.info("%s", line)


class _ConsoleLog(logging.Handler):
    """Log lines on a console, one line each: on a terminal in colour with the time, else with date and level."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        if console.is_terminal:
            self.setFormatter(_OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
        else:
            self.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelno, "")
            self._console.print(Text(self.format(record), style), soft_wrap=True)
        except Exception:
            self.handleError(record)


class _OneLine(logging.Formatter):
    """A record as one line; of an exception what it says and where it was raised."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        said = in_one_line(record.getMessage())
        plain = logging.makeLogRecord(
            record.__dict__
            | {"msg": f"{said}: {told(error)}" if error else said, "args": None, "exc_info": None, "exc_text": None}
        )
        plain.stack_info = None
        return super().format(plain)


class _Unfailing(io.TextIOBase):
    """A stream that takes no more once nobody reads it, as with `2>&1 | head`, and does not end the run for it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            if not self._gone:
                self._stream.write(text)
        except (OSError, ValueError):
            self._lost()
        return len(text)

    def flush(self) -> None:
        try:
            if not self._gone:
                self._stream.flush()
        except (OSError, ValueError):
            self._lost()

    def _lost(self) -> None:
        """What the stream still holds goes nowhere: the interpreter flushes it at its end, and exits with 120 if it
        cannot."""
        self._gone = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
