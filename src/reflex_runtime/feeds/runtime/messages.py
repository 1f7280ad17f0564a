"""Health events, errors and feeds in words, each as one line."""

from __future__ import annotations

import importlib
import logging
import os
import traceback
from collections.abc import Mapping
from pathlib import Path

from reflex_runtime.feeds.runtime.health import (
    BatchError,
    BatchInFlightExceeded,
    BatchSubmissionRejected,
    BatchTimeout,
    FeedConnected,
    FeedDisconnected,
    FeedEnded,
    FeedFailed,
    FeedFrozen,
    FeedStageError,
    HealthEvent,
    StageError,
    ThreadDetached,
)
from reflex_runtime.feeds.runtime.snapshot import FeedSnapshot, OutputSnapshot

LONGEST = 1000  # characters of a foreign text
_IMPORTS = tuple(str(Path(__file__).parent.parent / name) for name in ("stages.py", "plan.py"))


def in_one_line(text: object) -> str:
    """A foreign text as one line without control characters."""
    words = "".join(c if c.isprintable() else " " for c in str(text)[:LONGEST])
    return " ".join(words.split())


def told(error: BaseException) -> str:
    """An exception as one line: its class, what it says, and where in which file it was raised."""
    words = in_one_line(f"{type(error).__name__}: {error}").removesuffix(":")
    passed = (__file__, *_IMPORTS, str(Path(importlib.__file__).parent), "<")  # on the way to it
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(passed)]
    return f"{words} ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else words


def words_of(event: HealthEvent) -> tuple[int, str]:
    """(level, text) of a health event for the log."""
    level, text = _words_of(event)
    return level, in_one_line(f"{event.source}: {text}")


def _words_of(event: HealthEvent) -> tuple[int, str]:
    match event:
        case FeedConnected():
            return logging.INFO, "connected"
        case FeedEnded():
            return logging.INFO, "came to its end"
        case FeedFrozen():
            return logging.WARNING, "connected, but sends nothing"
        case FeedDisconnected(error=error, retry_in=None):
            return logging.ERROR, error
        case FeedDisconnected(error=error, retry_in=seconds):
            return logging.WARNING, f"{error}; trying again in {seconds:.1f} s"
        case FeedFailed(error=error):
            return logging.ERROR, f"given up: {error}"
        case BatchSubmissionRejected(count=n, coordinator=c):
            return logging.WARNING, f"{frames(n)} refused, the queue of {c} was full"
        case BatchInFlightExceeded(count=n, coordinator=c):
            return logging.WARNING, f"{frames(n)} refused, {c} had not answered the one before"
        case BatchTimeout(count=n, coordinator=c):
            return logging.WARNING, f"{frames(n)} not answered by {c} in time"
        case BatchError(count=n, error=error):
            return logging.ERROR, f"{n} batch{'es' if n > 1 else ''} failed: {error}"
        case FeedStageError(count=n, error=error) if n > 1:
            return logging.ERROR, f"{error} ({n} times)"
        case FeedStageError(error=error) | StageError(error=error):
            return logging.ERROR, error
        case ThreadDetached(name=name):
            return logging.ERROR, f"thread {name} did not end in time and is abandoned"
        case _:
            return logging.INFO, type(event).__name__


def line_of(feed: FeedSnapshot) -> str:
    """The state and figures of a feed, in a line."""
    age = "" if feed.age is None else f", newest answer {seconds(feed.age)} old"
    lost = _dropped(_drops(feed.drops)) + _undecoded(feed.corrupt)
    return f"{feed.name}: {state(feed)}, {progress(feed)} answered, {feed.fps:.1f}/s{age}{lost}"


def line_of_all(feeds: list[FeedSnapshot]) -> str:
    """The states of many feeds, in a line."""
    answered, rate = sum(f.processed for f in feeds), sum(f.fps for f in feeds)
    counts: dict[str, int] = {}
    for feed in feeds:
        for reason, count in feed.drops.items():
            counts[reason] = counts.get(reason, 0) + count
    corrupt = _undecoded(sum(feed.corrupt for feed in feeds))
    return f"{states(feeds)}; {answered} answered, {rate:.1f}/s{_dropped(_drops(counts))}{corrupt}"


def states(feeds: list[FeedSnapshot]) -> str:
    """12 feeds: 10 running, 2 reconnecting."""
    each: dict[str, int] = {}
    for feed in feeds:
        each[feed.state] = each.get(feed.state, 0) + 1
    return f"{len(feeds)} feed{'s'[: len(feeds) != 1]}: " + ", ".join(f"{n} {name}" for name, n in each.items())


def state(feed: FeedSnapshot) -> str:
    """The state of a feed; for a file also its progress, and the time left at the present rate."""
    done = feed.frames - feed.waiting
    if not feed.total or feed.mode != "file" or feed.state != "running":
        return feed.state
    left = f" {clock((feed.total - done) / feed.fps)}" if feed.fps and feed.total > done else ""
    return f"{min(100, 100 * done // feed.total)} %{left}"


def progress(feed: FeedSnapshot) -> str:
    """Frames answered; of a file also how many there are."""
    return f"{feed.processed}/{feed.total}" if feed.total and feed.mode == "file" else str(feed.processed)


def drops(feed: FeedSnapshot) -> str:
    """Frames that were not answered, by reason; and packets that became no frame."""
    return ", ".join(filter(None, (_drops(feed.drops), undecoded(feed.corrupt))))


def undecoded(packets: int) -> str:
    """3 packets could not be decoded; nothing for none."""
    return f"{packets} packet{'s'[: packets != 1]} could not be decoded" if packets else ""


def frames(count: int) -> str:
    """1 frame, 2 frames."""
    return f"{count} frame{'s'[: count != 1]}"


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return ""
    if value < 0.0095:
        return f"{1e3 * value:.1f} ms"
    return f"{1e3 * value:.0f} ms" if value < 1.0 else f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def line_of_counts(feed: FeedSnapshot) -> str:
    """What a feed's zones and lines count, in a line; empty without any."""
    zones = [f"{count} in {name}" for name, count in feed.zones.items()]
    lines = [f"{name} crossed {counts['in']} in, {counts['out']} out" for name, counts in feed.lines.items()]
    return f"{feed.name}: {'; '.join(zones + lines)}" if zones or lines else ""


def line_of_stages(feed: FeedSnapshot) -> str:
    """The stage for which a feed dropped frames, in a line; empty if none did."""
    lost = feed.drops.get("slow_stage", 0)
    if not lost or not feed.stages:
        return ""
    name, slowest = max(feed.stages.items(), key=lambda stage: stage[1].seconds)
    each = seconds(slowest.seconds / max(1, slowest.runs))
    return f"{feed.name}: {frames(lost)} dropped while a stage ran; {name} takes {each} a frame"


def line_of_output(output: OutputSnapshot) -> str:
    """What became of the results that an output got, in a line."""
    waiting = f", {output.waiting} waiting" if output.waiting else ""
    why = f" ({output.error})" if output.error and any(output.drops.values()) else ""
    return f"{output.name}: {output.sent} results to {output.where}{waiting}{_dropped(_drops(output.drops))}{why}"


def clock(value: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _drops(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def _dropped(text: str) -> str:
    return f", dropped: {text}" if text else ""


def _undecoded(packets: int) -> str:
    return f", {undecoded(packets)}" if packets else ""
