"""What a person sees of `reflex feeds`: a live table with log lines above it, and the last table."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reflex_runtime.feeds.runtime.health import HealthEvent
from reflex_runtime.feeds.runtime.messages import (
    drops,
    frames,
    in_one_line,
    line_of,
    line_of_all,
    line_of_counts,
    line_of_output,
    line_of_stages,
    progress,
    seconds,
    state,
    states,
    told,
    words_of,
)
from reflex_runtime.feeds.runtime.snapshot import FeedSnapshot, RuntimeSnapshot
from reflex_runtime.observe.batch_metrics import BatchMetrics

if TYPE_CHECKING:
    from reflex_runtime.feeds.runtime.runtime import Runtime

PER_SECOND = 4  # times the table is drawn anew
EVERY_S = 5.0  # seconds between lines where there is no terminal
LINES = 8  # feeds of which each has its own line; more have one together
WIDE = 160  # columns where the output is no terminal
_LEVELS = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}
_STYLES = {"running": "green", "ended": "dim", "stopped": "dim", "failed": "bold red"}
_TROUBLE = {"failed": 0, "reconnecting": 1, "connecting": 2, "running": 3, "stopped": 4, "ended": 5}
LEAST_ROWS = 3  # feeds that are shown, however low the terminal is


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
        # A line that is written while the table grows by a row would be overwritten.
        self._turn = threading.RLock()
        logging.basicConfig(level=logging.INFO, handlers=[_ConsoleLog(self.console, self._turn)], force=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(
                console=self.console,
                get_renderable=lambda: LiveTable(self._runtime.snapshot()),
                auto_refresh=False,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # else it is a file or a pipe
            )
            with self._turn:
                self._live.start(refresh=True)
        shows = self._lines if self._live is None else self._refreshes
        self._thread = threading.Thread(target=shows, name="reflex-feeds-lines", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            with self._turn:
                self._live.stop()

    def tell(self, event: HealthEvent) -> None:
        """One line for what happened."""
        level, text = words_of(event)
        logging.log(level, "%s", text)

    def summary(self) -> None:
        """The last table, which stays."""
        self.console.print(summary(self._runtime.snapshot()), soft_wrap=False)

    def _refreshes(self) -> None:
        assert self._live is not None
        while not self._over.wait(1.0 / PER_SECOND):
            with self._turn:
                self._live.refresh()

    def _lines(self) -> None:
        while not self._over.wait(EVERY_S):
            feeds = list(self._runtime.snapshot().feeds.values())
            for line in map(line_of, feeds) if len(feeds) <= LINES else [line_of_all(feeds)]:
                logging.info("%s", line)


class _ConsoleLog(logging.Handler):
    """Log lines on a console, one line each: on a terminal in colour with the time, else with date and level."""

    def __init__(self, console: Console, turn: AbstractContextManager[Any]) -> None:
        """turn: held while something is written."""
        super().__init__()
        self._console, self._turn = console, turn
        if console.is_terminal:
            self.setFormatter(_OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
        else:
            self.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _LEVELS.get(record.levelno, "")
            with self._turn:
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
    """A stream that ignores writes once its reader has left, as with `2>&1 | head`: the run goes on."""

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


# -- tables ------------------------------------------------------------------------------------------------------------


class LiveTable:
    """Feeds as rows, and a line on each coordinator. Where the terminal is too low for all feeds, those in trouble come
    first and the rest is counted; where it is too narrow, names and drops are cut short."""

    def __init__(self, snapshot: RuntimeSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        feeds = list(self._snapshot.feeds.values())
        batches = [_batches(name, metrics) for name, metrics in self._snapshot.coordinators.items()]
        batches += map(line_of_output, self._snapshot.outputs.values())
        room = max(LEAST_ROWS, options.size.height - 3 - len(batches))  # two lines of heads, and one for the cursor
        shown, rest = feeds, ""
        if len(feeds) > room:
            shown = sorted(feeds, key=lambda feed: _TROUBLE.get(feed.state, 2))[: max(LEAST_ROWS, room - 1)]
            kept = {feed.name for feed in shown}
            rest = "and " + states([feed for feed in feeds if feed.name not in kept]).replace(" feed", " more feed", 1)
        yield _live(shown)
        for line in filter(None, (rest, *batches)):
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def _live(feeds: list[FeedSnapshot]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("feed", "state"):
        table.add_column(head, no_wrap=head == "state", vertical="bottom")
    for head in ("answered", "fps", "age", "p95", "in\nflight"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("dropped")
    for feed in feeds:
        table.add_row(
            _cut(feed.name),
            Text(state(feed), style=_STYLES.get(feed.state, "yellow")),
            progress(feed),
            f"{feed.fps:.1f}",
            seconds(feed.age) if feed.state == "running" else "",
            seconds(feed.latency.p95),
            str(feed.in_flight),
            _cut(drops(feed)),
        )
    return table


def summary(snapshot: RuntimeSnapshot) -> RenderableType:
    """What became of every frame, for good."""
    feeds = list(snapshot.feeds.values())
    table = Table(box=None, pad_edge=False)
    table.add_column("feed", overflow="fold")
    table.add_column("state", no_wrap=True)
    for head in ("frames", "answered", "p50", "p95"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("dropped")
    for feed in feeds:
        table.add_row(
            feed.name,
            Text(feed.state, style=_STYLES.get(feed.state, "yellow")),
            str(feed.frames),
            str(feed.processed),
            seconds(feed.latency.p50),
            seconds(feed.latency.p95),
            drops(feed),
        )
    if len(feeds) > 1:
        read, answered = sum(f.frames for f in feeds), sum(f.processed for f in feeds)
        lost = sum(sum(f.drops.values()) for f in feeds)
        table.add_row("together", "", str(read), str(answered), "", "", str(lost) if lost else "", style="bold")
    lines = [_batches(name, c) for name, c in snapshot.coordinators.items()]
    lines += map(line_of_output, snapshot.outputs.values())
    lines += [line for feed in feeds for line in (line_of_counts(feed), line_of_stages(feed)) if line]
    return Group(table, *(Text(line, style="dim") for line in lines))


def _batches(name: str, metrics: BatchMetrics) -> str:
    name, n = in_one_line(name), metrics.batches_dispatched
    if not n:
        return f"{name}: no batch yet"
    size = sum(size * count for size, count in metrics.batch_sizes.items()) / n
    failed = f", {frames(metrics.failed)} failed" if metrics.failed else ""
    full = 100 * (metrics.fill_ratio or 0.0)
    return (
        f"{name}: {n} batch{'es'[: 2 * (n != 1)]}{failed}, mean size {size:.1f} ({full:.0f} % full), "
        f"{seconds(metrics.processing.mean) or '?'} each, formed in {seconds(metrics.formation.p95)} (p95)"
    )


def _cut(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
