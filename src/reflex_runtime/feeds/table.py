"""What `reflex feeds` prints: log lines, the state of the feeds every few seconds, and the table at the end."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from reflex_runtime.feeds.runtime.health import (
    FeedSnapshot,
    OutputSnapshot,
    RuntimeSnapshot,
    frames,
)
from reflex_runtime.observe.batch_metrics import BatchMetrics
from reflex_runtime.run.modules import in_one_line, told

EVERY_S: Final = 5.0  # seconds between lines on the feeds
LINES: Final = 8  # most feeds with a line each; more have one together
WIDE: Final = 160  # columns without a terminal
_LEVELS: Final = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}
_STYLES: Final = {"running": "green", "ended": "dim", "stopped": "dim", "failed": "bold red"}


def log_console() -> Console:
    """Standard error, also for all log lines: one console, so that lines of two threads do not mix."""
    terminal = sys.stderr.isatty()
    console = Console(file=sys.stderr, highlight=False, width=None if terminal else WIDE, soft_wrap=not terminal)
    logging.basicConfig(level=logging.INFO, handlers=[_ConsoleLog(console)], force=True)
    return console


class _ConsoleLog(logging.Handler):
    """Logs one line each, an exception too: in colour with the time on a terminal, else with date and level."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        self.formatter = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S") if console.is_terminal else plain

    def emit(self, record: logging.LogRecord) -> None:
        try:
            error = record.exc_info[1] if record.exc_info else None
            said = in_one_line(record.getMessage()) + (f": {told(error)}" if error else "")
            line = {"msg": said, "args": None, "exc_info": None, "exc_text": None, "stack_info": None}
            text = self.format(logging.makeLogRecord(record.__dict__ | line))
            self._console.print(Text(text, _LEVELS.get(record.levelno, "")), soft_wrap=True)
        except Exception:
            self.handleError(record)


# -- in words ----------------------------------------------------------------------------------------------------------


def lines_of(feeds: list[FeedSnapshot]) -> list[str]:
    """A line for each feed, or one for all where they are many."""
    return [line_of(feed) for feed in feeds] if len(feeds) <= LINES else [line_of_all(feeds)]


def line_of(feed: FeedSnapshot) -> str:
    """The state and figures of a feed, in a line."""
    age = "" if feed.age is None else f", newest answer {seconds(feed.age)} old"
    answered = f"{feed.processed}/{feed.total}" if feed.total and feed.mode == "file" else str(feed.processed)
    lost = dropped(feed.drops, feed.corrupt)
    return f"{feed.name}: {state(feed)}, {answered} answered, {feed.fps:.1f}/s{age}{lost}"


def line_of_all(feeds: list[FeedSnapshot]) -> str:
    """The states and figures of many feeds, in a line."""
    answered, rate = sum(f.processed for f in feeds), sum(f.fps for f in feeds)
    states = ", ".join(f"{n} {name}" for name, n in Counter(feed.state for feed in feeds).items())
    lost = dropped(sum((Counter(feed.drops) for feed in feeds), Counter()), sum(feed.corrupt for feed in feeds))
    return f"{len(feeds)} feeds: {states}; {answered} answered, {rate:.1f}/s{lost}"


def state(feed: FeedSnapshot) -> str:
    """The state of a feed; of a running file the share that is done, and the time left at the present rate."""
    done = feed.frames - feed.waiting
    if not feed.total or feed.mode != "file" or feed.state != "running":
        return feed.state
    left = f" {clock((feed.total - done) / feed.fps)}" if feed.fps and feed.total > done else ""
    return f"{min(100, 100 * done // feed.total)} %{left}"


def dropped(drops: Mapping[str, int], corrupt: int = 0) -> str:
    """The end of a line: dropped frames by reason, and pictures that could not be decoded."""
    frames, pictures = reasons(drops), undecoded(corrupt)
    return (f", dropped: {frames}" if frames else "") + (f", {pictures}" if pictures else "")


def reasons(drops: Mapping[str, int]) -> str:
    """13 overrun, 6 stale."""
    return ", ".join(f"{count} {reason}" for reason, count in drops.items() if count)


def undecoded(pictures: int) -> str:
    """3 pictures missing or broken; empty for none."""
    return f"{pictures} picture{'s'[: pictures != 1]} missing or broken" if pictures else ""


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return ""
    if value < 0.0095:
        return f"{1e3 * value:.1f} ms"
    return f"{1e3 * value:.0f} ms" if value < 1.0 else f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def line_of_counts(feed: FeedSnapshot) -> str:
    """The counts of a feed's zones and lines, in a line; empty without any."""
    zones = [f"{count} in {name}" for name, count in feed.zones.items()]
    lines = [f"{name} crossed {counts['in']} in, {counts['out']} out" for name, counts in feed.lines.items()]
    return f"{feed.name}: {'; '.join(zones + lines)}" if zones or lines else ""


def line_of_stages(feed: FeedSnapshot) -> str:
    """The slowest stage of a feed that dropped frames during one, in a line; empty for other feeds."""
    lost = feed.drops.get("slow_stage", 0)
    if not lost or not feed.stages:
        return ""
    name, slowest = max(feed.stages.items(), key=lambda stage: stage[1].seconds)
    each = seconds(slowest.seconds / max(1, slowest.runs))
    return f"{feed.name}: {frames(lost)} dropped while a stage ran; {name} takes {each} a frame"


def line_of_output(output: OutputSnapshot) -> str:
    """The figures of an output, in a line."""
    waiting = f", {output.waiting} waiting" if output.waiting else ""
    why = f" ({output.error})" if output.error and any(output.drops.values()) else ""
    return f"{output.name}: {output.sent} results to {output.where}{waiting}{dropped(output.drops)}{why}"


def clock(value: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


# -- the table ---------------------------------------------------------------------------------------------------------

_RIGHT: Final = {"justify": "right", "no_wrap": True}
_LAST: Final[tuple[tuple[str, Callable[[FeedSnapshot], Any], dict[str, Any]], ...]] = (  # head, cell, options
    ("feed", lambda feed: feed.name, {"overflow": "fold"}),
    ("state", lambda feed: Text(feed.state, style=_STYLES.get(feed.state, "yellow")), {"no_wrap": True}),
    ("frames", lambda feed: str(feed.frames), _RIGHT),
    ("answered", lambda feed: str(feed.processed), _RIGHT),
    ("p50", lambda feed: seconds(feed.latency.p50), _RIGHT),
    ("p95", lambda feed: seconds(feed.latency.p95), _RIGHT),
    ("dropped", lambda feed: ", ".join(filter(None, (reasons(feed.drops), undecoded(feed.corrupt)))), {}),
)


def summary(snapshot: RuntimeSnapshot) -> RenderableType:
    """The figures of a run that has ended."""
    feeds = list(snapshot.feeds.values())
    table = Table(box=None, pad_edge=False)
    for head, _, options in _LAST:
        table.add_column(head, **options)
    for feed in feeds:
        table.add_row(*(cell(feed) for _, cell, _ in _LAST))
    if len(feeds) > 1:
        read, answered = sum(f.frames for f in feeds), sum(f.processed for f in feeds)
        lost = sum(sum(f.drops.values()) for f in feeds)
        table.add_row("together", "", str(read), str(answered), "", "", str(lost or ""), style="bold")
    lines = [_batches(in_one_line(name), one, snapshot.uptime) for name, one in snapshot.coordinators.items()]
    lines += map(line_of_output, snapshot.outputs.values())
    lines += [line for feed in feeds for line in (line_of_counts(feed), line_of_stages(feed)) if line]
    return Group(table, *(Text(line, style="dim") for line in lines))


def _batches(name: str, metrics: BatchMetrics, uptime: float) -> str:
    n, work = metrics.batches_dispatched, metrics.processing
    if not n:
        return f"{name}: no batch yet"
    size = sum(size * count for size, count in metrics.batch_sizes.items()) / n
    failed = f", {frames(metrics.failed)} failed" if metrics.failed else ""
    busy = f", busy {100 * work.total / uptime:.0f} % of the time" if uptime else ""
    return (
        f"{name}: {n} batch{'es'[: 2 * (n != 1)]} of {size:.1f} frames on average{failed}, "
        f"{seconds(work.mean) or '?'} each{busy}"
    )
