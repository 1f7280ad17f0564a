"""What `reflex feeds` prints: log lines, the state of the feeds every few seconds, and the table at the end."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from reflex_runtime.feeds.runtime.health import FeedSnapshot, OutputSnapshot, RuntimeSnapshot, frames
from reflex_runtime.observe.batch_metrics import BatchMetrics
from reflex_runtime.observe.top_view import ms, state_text
from reflex_runtime.run.modules import in_one_line, told

EVERY_S: Final = 5.0  # seconds between log lines on the feeds
LINES: Final = 8  # feeds at most that have a line each; more feeds have one line together
WIDE: Final = 160  # columns of the table without a terminal


def begin_log() -> None:
    """Log to standard error."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(_LineLog("%(asctime)s %(levelname)s %(message)s"))


class _LineLog(logging.Formatter):
    """One line for each record, an exception too."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f": {told(error)}" if error else "")
        return super().format(logging.makeLogRecord(record.__dict__ | {
            "msg": in_one_line(text), "args": None, "exc_info": None, "exc_text": None, "stack_info": None,
        }))  # fmt: skip


# -- in words ----------------------------------------------------------------------------------------------------------


def lines_of(feeds: list[FeedSnapshot]) -> list[str]:
    """A line for each feed; of more than `LINES` feeds one line for all."""
    return [line_of(feed) for feed in feeds] if len(feeds) <= LINES else [line_of_all(feeds)]


def line_of(feed: FeedSnapshot) -> str:
    """The state and figures of a feed, in a line."""
    age = "" if feed.age is None else f", newest answer {ms(feed.age)} old"
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
    """Dropped frames by reason, as in "13 overrun, 6 stale"."""
    return ", ".join(f"{count} {reason}" for reason, count in drops.items() if count)


def undecoded(pictures: int) -> str:
    """The number of bad pictures, as in "3 pictures missing or broken"; empty for none."""
    return f"{pictures} picture{'s'[: pictures != 1]} missing or broken" if pictures else ""


def line_of_counts(feed: FeedSnapshot) -> str:
    """The counts of a feed's zones and lines, in a line; empty if it has none."""
    zones = [f"{count} in {name}" for name, count in feed.zones.items()]
    lines = [f"{name} crossed {counts['in']} in, {counts['out']} out" for name, counts in feed.lines.items()]
    return f"{feed.name}: {'; '.join(zones + lines)}" if zones or lines else ""


def line_of_stages(feed: FeedSnapshot) -> str:
    """The slowest stage of a feed that dropped frames during one, in a line; empty for other feeds."""
    lost = feed.drops.get("slow_stage", 0)
    if not lost or not feed.stages:
        return ""
    name, slowest = max(feed.stages.items(), key=lambda stage: stage[1].seconds)
    each = ms(slowest.seconds / max(1, slowest.runs))
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


def print_summary(snapshot: RuntimeSnapshot) -> None:
    """Print the figures of a run that has ended to standard error."""
    console = Console(file=sys.stderr, highlight=False, width=None if sys.stderr.isatty() else WIDE)
    console.print(summary(snapshot))


def summary(snapshot: RuntimeSnapshot) -> RenderableType:
    """The figures of a run that has ended."""
    feeds = list(snapshot.feeds.values())
    figures = (Column(name, justify="right", no_wrap=True) for name in ("frames", "answered", "p50", "p95"))
    table = Table(Column("feed", overflow="fold"), "state", *figures, "dropped", box=None, pad_edge=False)
    for feed in feeds:
        times = ms(feed.latency.p50), ms(feed.latency.p95)
        lost = ", ".join(filter(None, (reasons(feed.drops), undecoded(feed.corrupt))))
        table.add_row(feed.name, state_text(feed.state), str(feed.frames), str(feed.processed), *times, lost)
    if len(feeds) > 1:
        read, answered = sum(f.frames for f in feeds), sum(f.processed for f in feeds)
        lost = str(sum(sum(f.drops.values()) for f in feeds) or "")
        table.add_row("together", "", str(read), str(answered), "", "", lost, style="bold")
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
        f"{name}: {n} batch{'es'[: 2 * (n != 1)]} of {size:.1f} frames on average{failed}, {ms(work.mean)} each{busy}"
    )
