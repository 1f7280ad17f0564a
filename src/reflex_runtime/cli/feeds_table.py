"""The tables of `reflex feeds`: one that lives while it runs and fits its terminal, and one that stays at the end."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.feeds_words import drops, frames, in_one_line, progress, seconds, state, states
from reflex_runtime.feeds.snapshot import FeedSnapshot, RuntimeSnapshot
from reflex_runtime.telemetry.batch_metrics import BatchMetrics

_STYLES = {"running": "green", "ended": "dim", "stopped": "dim", "failed": "bold red"}
_TROUBLE = {"failed": 0, "reconnecting": 1, "connecting": 2, "running": 3, "stopped": 4, "ended": 5}
LEAST_ROWS = 3  # feeds that are shown, however low the terminal is


class LiveTable:
    """Feeds as rows, and a line on each coordinator. Where the terminal is too low for all feeds, those in trouble come
    first and the rest is counted; where it is too narrow, names and drops are cut short."""

    def __init__(self, snapshot: RuntimeSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        feeds = list(self._snapshot.feeds.values())
        batches = [_batches(name, metrics) for name, metrics in self._snapshot.coordinators.items()]
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
    batches = (Text(_batches(name, c), style="dim") for name, c in snapshot.coordinators.items())
    return Group(table, *batches)


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
