"""What the tables and lines of `reflex feeds` say, made from figures, without a run."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from reflex_runtime.feeds.runtime import health
from reflex_runtime.feeds.runtime.health import FeedSnapshot, RuntimeSnapshot, words_of
from reflex_runtime.feeds.table import clock, line_of, line_of_all, state, summary
from reflex_runtime.observe.batch_metrics import BatchMetrics, Durations
from reflex_runtime.run.modules import in_one_line, told

CAMERA = FeedSnapshot(
    name="door",
    mode="live",
    source="rtsp://10.0.0.7/live",
    state="running",
    frames=120,
    processed=100,
    waiting=1,
    in_flight=1,
    drops={"overrun": 13, "stale": 6, "timeout": 0},
    fps=12.34,
    age=0.066,
    latency=Durations(count=100, mean=0.05, p50=0.04, p95=0.12, p99=0.2),
)
FILE = replace(CAMERA, name="yard", mode="file", total=400, frames=104, waiting=4, drops={}, fps=10.0)
BATCHES = BatchMetrics(
    batches_dispatched=50,
    processed=99,
    failed=1,
    processing=Durations(count=50, mean=0.0123),
    formation=Durations(count=50, p95=0.05),
    batch_sizes={1: 20, 2: 20, 4: 10},
    fill_ratio=0.5,
)


def shown(what: RenderableType, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(what)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def snapshot(*feeds: FeedSnapshot, metrics: BatchMetrics = BATCHES) -> RuntimeSnapshot:
    by_name = {feed.name: feed for feed in feeds}
    return RuntimeSnapshot(state="running", uptime=1.0, feeds=by_name, coordinators={"onnx": metrics})


def test_f14_the_summary_counts_every_frame() -> None:
    lines = shown(summary(snapshot(replace(CAMERA, state="stopped"), replace(FILE, state="ended"))))
    assert lines[0].split() == ["feed", "state", "frames", "answered", "p50", "p95", "dropped"]
    assert lines[1].split() == [
        "door",
        "stopped",
        "120",
        "100",
        "40.0",
        "ms",
        "120",
        "ms",
        "13",
        "overrun,",
        "6",
        "stale",
    ]
    assert lines[2].split() == ["yard", "ended", "104", "100", "40.0", "ms", "120", "ms"]
    assert lines[3].split() == ["together", "224", "200", "19"]
    batches = " ".join(lines[4:])
    assert batches.startswith("onnx: 50 batches of 2.0 frames on average, 1 frame failed, ")
    assert batches.endswith(" % of the time")
    assert "together" not in "".join(shown(summary(snapshot(CAMERA))))
    none = shown(summary(snapshot(replace(CAMERA, latency=Durations()), metrics=BatchMetrics())))
    assert none[-1] == "onnx: no batch yet"


def test_f14_a_file_says_how_far_it_is_and_how_long_the_rest_takes() -> None:
    assert state(FILE) == "25 % 0:30"
    assert state(replace(FILE, fps=0.0)) == "25 %"
    assert state(replace(FILE, frames=404, waiting=4)) == "100 %"
    assert state(replace(FILE, frames=900)) == "100 %", "a header may claim too few"
    assert state(replace(FILE, total=None)) == "running"
    assert state(replace(FILE, state="ended")) == "ended"
    assert state(replace(CAMERA, total=400)) == "running"
    assert [clock(value) for value in (7, 59.6, 754, 3723)] == ["0:07", "1:00", "12:34", "1:02:03"]


def test_f14_without_a_terminal_a_feed_is_a_line_and_many_are_one() -> None:
    said = "door: running, 100 answered, 12.3/s, newest answer 66.0 ms old, dropped: 13 overrun, 6 stale"
    assert line_of(CAMERA) == said
    assert line_of(replace(FILE, age=None)) == "yard: 25 % 0:30, 100/400 answered, 10.0/s"
    torn = replace(CAMERA, corrupt=3)
    assert line_of(torn) == said + ", 3 pictures missing or broken"
    assert line_of_all([torn, torn]).endswith("12 stale, 6 pictures missing or broken")
    one = line_of(replace(CAMERA, drops={}, corrupt=1))
    assert one.endswith("66.0 ms old, 1 picture missing or broken")
    assert shown(summary(snapshot(torn)), 120)[1].endswith("13 overrun, 6 stale, 3 pictures missing or broken")
    feeds = [replace(CAMERA, name=str(k)) for k in range(9)] + [replace(CAMERA, name="x", state="failed")]
    together = "10 feeds: 9 running, 1 failed; 1000 answered, 123.4/s, dropped: 130 overrun, 60 stale"
    assert line_of_all(feeds) == together


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (health.FeedConnected(0, "door"), logging.INFO, "door: connected"),
        (health.FeedEnded(0, "door"), logging.INFO, "door: came to its end"),
        (health.FeedDisconnected(0, "door", error="gone"), logging.ERROR, "door: gone"),
        (health.FeedDisconnected(0, "door", error="gone", retry_in=2.04), logging.WARNING,
         "door: gone; trying again in 2.0 s"),
        (health.FeedFailed(0, "door", error="gone"), logging.ERROR, "door: given up: gone"),
        (health.BatchSubmissionRejected(0, "door", 3, "onnx"), logging.WARNING,
         "door: 3 frames refused, the queue of onnx was full"),
        (health.BatchInFlightExceeded(0, "door", 1, "onnx"), logging.WARNING,
         "door: 1 frame refused, onnx had not answered the earlier ones"),
        (health.BatchTimeout(0, "door", 2, "onnx"), logging.WARNING, "door: 2 frames not answered by onnx in time"),
        (health.BatchError(0, "onnx", 1, error="bad\nframe"), logging.ERROR, "onnx: 1 batch failed: bad frame"),
        (health.BatchError(0, "onnx", 4, error="bad"), logging.ERROR, "onnx: 4 batches failed: bad"),
        (health.StageError(0, "door", coordinator="onnx", error="it died"), logging.ERROR, "door: it died"),
        (health.FeedStageError(0, "door", error="disk full"), logging.ERROR, "door: disk full"),
        (health.FeedStageError(0, "door", 7, error="disk full"), logging.ERROR, "door: disk full (7 times)"),
        (
            health.ThreadDetached(0, "door", error="t-1"),
            logging.ERROR,
            "door: thread t-1 did not end in time and is abandoned",
        ),
    ],
)  # fmt: skip
def test_f14_what_happens_is_told_in_a_line(event: health.HealthEvent, level: int, text: str) -> None:
    assert words_of(event) == (level, text)


def test_f14_words_of_somebody_else_are_one_line_without_control_characters() -> None:
    assert in_one_line("one\x1b[2J\r\n two\t\x00three ") == "one [2J two three"
    assert len(in_one_line("x" * 10_000)) == 1000
    with pytest.raises(ValueError, match="a") as caught:
        raise ValueError("a\nb")
    assert told(caught.value).startswith("ValueError: a b (test_feeds_table.py, line ")
    assert told(KeyError()) == "KeyError"
