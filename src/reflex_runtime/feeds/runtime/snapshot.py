"""What a feed did, in figures: the ledger that its threads write, and the frozen copies that callers get.

Every frame that was read is in exactly one place, so that in every snapshot

    frames == processed + the sum of drops + waiting
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reflex_runtime.feeds.runtime.pipeline import Frame
from reflex_runtime.observe.batch_metrics import BatchMetrics, Durations, Times, plain

DROPS = {
    "overrun": "a newer frame took its place before its batch began",
    "slow_stage": "the same, while a stage of the feed worked on an earlier frame",
    "stale": "it was older than max_age before its batch began",
    "queue_full": "the coordinator's queue was full",
    "in_flight": "the feed had as many frames in flight as it may",
    "timeout": "no answer came in time",
    "failed": "the processor or a stage of the feed failed on it",
    "skipped": "a stage before the batch point passed it over, or --every or --fps left it out",
    "closed": "the coordinator was gone",
    "stopped": "the feed was stopped before its turn came",
}
OUTPUT_DROPS = {
    "overrun": "newer results took its place in the queue of the output",
    "lost": "the connection was lost while it was sent, or it was tried as often as it may be",
    "refused": "the receiver did not take it",
    "unsent": "the end came before it was sent",
}
RATE_S = 2.0  # seconds that a feed's fps is taken over


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage of a feed. runs: frames that it got. errors: of these, on which it failed. seconds: in it, in all."""

    runs: int = 0
    errors: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSnapshot:
    """One feed at one moment.

    mode: live (newest wins) or file (nothing is lost). source: what it is called, without credentials.
    state: connecting, running, reconnecting; then ended (of itself), failed (given up) or stopped.
    frames: read from the source. processed: answered and through every stage. waiting: read, and neither of processed
    or dropped yet. in_flight: of these, at the batch point. drops: by reason, see `DROPS`.
    fps: answered per second, over the last two. age: seconds since the last answered frame was captured; None before.
    latency: from a frame's capture to its answer. restarts: how often the source was opened again. error: the last one.
    sink_errors: results on which a sink failed; they count as processed. total: frames the source says it has, or None.
    position: pts of the last answered frame. resolution: width and height of the last frame read. corrupt: packets and
    pictures that the source could not decode, and which are in none of the figures above. stages: those of its
    pipeline, by name. zones: boxes in each, in the last frame. lines: objects that crossed each, `in` and `out`.
    """

    name: str
    mode: str
    source: str
    state: str
    frames: int = 0
    processed: int = 0
    waiting: int = 0
    in_flight: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    fps: float = 0.0
    age: float | None = None
    latency: Durations = field(default_factory=Durations)
    restarts: int = 0
    error: str | None = None
    sink_errors: int = 0
    total: int | None = None
    position: float | None = None
    resolution: tuple[int, int] | None = None
    corrupt: int = 0
    stages: Mapping[str, StageFigures] = field(default_factory=dict)
    zones: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSnapshot:
    """One output at one moment: taken == sent + the sum of drops + waiting.

    where: its address, without user, password and query. state: connecting, connected, away or closed. taken: results
    that were given to it. waiting: those that are not sent yet. drops: by reason, see `OUTPUT_DROPS`. retries: times
    that it tried again. error: the last one.
    """

    name: str
    where: str
    state: str
    taken: int = 0
    sent: int = 0
    waiting: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSnapshot:
    """A runtime at one moment. state: new, starting, running, stopping or stopped. uptime: seconds since `start`."""

    state: str
    uptime: float
    feeds: Mapping[str, FeedSnapshot]
    coordinators: Mapping[str, BatchMetrics]
    outputs: Mapping[str, OutputSnapshot] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-safe."""
        found: dict[str, Any] = plain(self)
        return found


class Ledger:
    """Where each frame of a feed is. Thread-safe; a frame is `read` once and then `drop`ped or `answered` once.

    read_so_far: frames; also the number of the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_so_far = self._processed = self._waiting = self._sink_errors = 0
        self._drops = dict.fromkeys(DROPS, 0)
        self._latency = Times()
        self._began: float | None = None  # when the first frame came
        self._answers: deque[float] = deque()  # when, over the last RATE_S
        self._captured: float | None = None
        self._position: float | None = None
        self._resolution: tuple[int, int] | None = None
        self._error: str | None = None
        self._stages: dict[str, StageFigures] = {}
        self._in_stage = False

    def read(self, frame: Frame) -> None:
        """A frame came from the source."""
        with self._lock:
            self.read_so_far += 1
            self._waiting += 1
            self._resolution = frame.size
            if self._began is None:
                self._began = frame.captured

    def passed_over(self) -> None:
        """A picture was read and not taken."""
        with self._lock:
            self.read_so_far += 1
            self._drops["skipped"] += 1

    def drop(self, reason: str, count: int = 1) -> None:
        """Frames left, for one of `DROPS`."""
        with self._lock:
            self._waiting -= count
            self._drops[reason] += count

    def overrun(self) -> None:
        """A frame left the queue for a newer one."""
        self.drop("slow_stage" if self._in_stage else "overrun")

    def stage_begins(self) -> None:
        """The pipeline's thread is in a stage."""
        self._in_stage = True

    def stage_ended(self, name: str, seconds: float, failed: bool) -> None:
        """It is out of it."""
        self._in_stage = False
        with self._lock:
            was = self._stages.get(name, StageFigures())
            self._stages[name] = StageFigures(was.runs + 1, was.errors + failed, was.seconds + seconds)

    def answered(self, frame: Frame, now: float) -> None:
        """A frame went all the way."""
        with self._lock:
            self._waiting -= 1
            self._processed += 1
            self._latency.add(now - frame.captured)
            self._captured = frame.captured
            self._position = frame.pts
            self._answers.append(now)
            self._forget(now)

    def sink_failed(self) -> None:
        """A sink failed on a result."""
        with self._lock:
            self._sink_errors += 1

    def note(self, error: str) -> None:
        with self._lock:
            self._error = error

    def figures(self, now: float) -> dict[str, Any]:
        """The ledger's part of a `FeedSnapshot`, all of one moment."""
        with self._lock:
            self._forget(now)
            figures = {
                "frames": self.read_so_far,
                "processed": self._processed,
                "waiting": self._waiting,
                "drops": dict(self._drops),
                "fps": len(self._answers) / self._span(now),
                "age": None if self._captured is None else now - self._captured,
                "sink_errors": self._sink_errors,
                "position": self._position,
                "resolution": self._resolution,
                "error": self._error,
                "stages": dict(self._stages),
            }
            latency = self._latency.take()
        return figures | {"latency": latency()}

    def _span(self, now: float) -> float:
        """Seconds that the rate is taken over; a young feed has fewer than RATE_S, and not so few that it jumps."""
        return RATE_S if self._began is None else min(RATE_S, max(0.5, now - self._began))

    def _forget(self, now: float) -> None:
        while self._answers and self._answers[0] <= now - RATE_S:
            self._answers.popleft()
