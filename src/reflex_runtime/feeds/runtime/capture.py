"""The thread that reads a source, again when it was lost, and the queue between it and the stages."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.health import FeedConnected, FeedDisconnected, HealthEvent
from reflex_runtime.feeds.runtime.pipeline import Frame, Picture, Source, SourceClock, SourceError, Taking, turned
from reflex_runtime.feeds.runtime.snapshot import Ledger
from reflex_runtime.pacing import doubled
from reflex_runtime.run.device import Clock
from reflex_runtime.run.wall import WALL
from reflex_runtime.settings.declare import option, validate

log = logging.getLogger("reflex.feeds")

Pause = Callable[[threading.Event, float], bool]  # waits for the event, some seconds at most; whether it was set
LIVE, FILE = "live", "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """How a feed treats its frames. Times in seconds.

    mode: live or file (see `Feed`); None: as the source is.
    max_age: live: a frame older than this is dropped before it is computed; None: no limit.
    queue: frames between the two threads; None: 1 for live, so that the newest wins, and 4 for file. With more than 1,
        with stages before the batch point, or with a view of its own (`Pipeline`), the frame that waits for its batch
        stays the same.
    restarts: how often the source is opened again, in all; None: without end for live, never for file.
    retries: file: how often a frame is asked again after no answer came in time; then it counts as failed.
    every, fps: one of so many pictures is taken, and of those at most so many a second (see `Taking`); 0 is no limit.
        The others are numbered, and dropped as `skipped`.
    rotate: degrees by which pictures are turned clockwise; places in results are pixels of the turned picture.
    frozen_after: live: an open source that sends nothing for so long is reported (`FeedFrozen`); None: never.
    """

    mode: str | None = option(None, choices=(LIVE, FILE))
    max_age: float | None = option(1.0, low=0, above=True, high=86_400, unit="seconds")
    queue: int | None = option(None, low=1, high=4096)
    restarts: int | None = option(None, low=0, high=10**9)
    retries: int = option(10, low=0, high=10**9)
    frozen_after: float | None = option(3.0, low=0, above=True, high=86_400, unit="seconds")
    every: int = option(1, low=1, high=1_000_000)
    fps: float = option(0.0, low=0, high=1000, unit="pictures a second")
    rotate: int = 0

    def __post_init__(self) -> None:
        validate(self, "FeedConfig")
        if self.rotate not in (0, 90, 180, 270):
            raise ConfigError(f"FeedConfig.rotate={self.rotate!r}: must be 0, 90, 180 or 270 degrees")


class FrameQueue:
    """First in, first out, at most `capacity` frames. One thread puts, one takes, any thread closes; nothing is polled.

    drop_oldest: `put` never waits, and the oldest frame makes room: of capacity 1, the newest wins. Else it waits.
    Every frame put is either taken by `get`, or handed back by `put` or `close`: every lost frame is reported.
    """

    def __init__(self, capacity: int, drop_oldest: bool) -> None:
        self._capacity, self._drop_oldest = capacity, drop_oldest
        self._frames: deque[Frame] = deque()
        lock = threading.Lock()
        self._filled, self._room = threading.Condition(lock), threading.Condition(lock)
        self.closed = False  # it takes nothing more; what it holds may still be taken

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame) -> Frame | None:
        """Add a frame. Returns the one that found no place: the oldest, or this one if it is closed; else None."""
        with self._filled:
            if not self._drop_oldest:
                self._room.wait_for(lambda: self.closed or len(self._frames) < self._capacity)
            if self.closed:
                return frame
            lost = self._frames.popleft() if len(self._frames) >= self._capacity else None
            self._frames.append(frame)
            self._filled.notify()
            return lost

    def get(self, timeout: float | None = None) -> Frame | None:
        """The oldest frame; waits for one. None when the time is over (seconds), or when it is closed and empty."""
        with self._filled:
            self._filled.wait_for(lambda: self._frames or self.closed, timeout)
            if not self._frames:
                return None
            self._room.notify()
            return self._frames.popleft()

    def close(self, discard: bool = False) -> list[Frame]:
        """Take nothing more and wake both sides. discard: what it holds is handed back, and `get` finds nothing."""
        with self._filled:
            self.closed = True
            left = list(self._frames) if discard else []
            if discard:
                self._frames.clear()
            self._filled.notify_all()
            self._room.notify_all()
            return left


@dataclass(slots=True)
class FeedContext:
    """What both threads of a feed share. stop: everything of this feed ends. emit: gets its events."""

    name: str
    config: FeedConfig
    live: bool
    emit: Callable[[HealthEvent], None]
    clock: Clock
    pause: Pause
    queue: FrameQueue = field(init=False)
    ledger: Ledger = field(default_factory=Ledger)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.queue = FrameQueue(self.config.queue or (1 if self.live else 4), drop_oldest=self.live)


class Backoff:
    """Pauses between attempts: 1 s, doubled up to 30 s, each varied by up to a fifth, so that feeds do not retry
    together."""

    FIRST_S, MOST_S, JITTER = 1.0, 30.0, 0.2

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._made = chance, 0

    def next(self) -> float:
        """Seconds until the next attempt."""
        self._made += 1
        pause = doubled(self.FIRST_S, self.MOST_S, self._made - 1)
        return pause * self._chance.uniform(1.0 - self.JITTER, 1.0 + self.JITTER)

    def reset(self) -> None:
        self._made = 0


class Capture:
    """Opens, reads and closes a source on one thread, and puts its frames into the feed's queue.

    prepare: made of each picture here, while the frame before it is computed; None: by the thread that submits it.
    state: connecting, running, reconnecting. total: frames the source says it has.
    """

    def __init__(
        self, feed: FeedContext, source: Source, prepare: Callable[[Any], Any] | None, chance: random.Random
    ) -> None:
        self._feed, self._source, self._prepare = feed, source, prepare
        restarts = feed.config.restarts
        self._most = restarts if restarts is not None else (inf if feed.live else 0)
        self._taking = Taking(feed.config.every, feed.config.fps)
        self._paced = getattr(source, "paced", False)
        self._clock = SourceClock(feed.live and not self._paced)
        self._backoff = Backoff(chance)
        self.state = "connecting"
        self.restarts = 0
        self.total: int | None = None
        self.latest = feed.clock()  # when the newest picture came, taken or not

    def run(self) -> Exception | None:
        """Read to the end. Returns None there or at a stop, else the error after which it is not tried again.

        Any other exception counts as a lost source, too, because its cause is not known here.
        """
        while True:
            try:
                with WALL:
                    self._source.open()
                    self._read_all()
                return None
            except Exception as error:
                lost = error
            finally:
                self._close()
            if self._feed.stop.is_set():
                return None
            if not self._again(lost):
                return lost
            self.restarts += 1

    def silent(self, seconds: float) -> bool:
        """Whether an open source has sent nothing for so long: pictures that are not taken are something, too."""
        lately = not self._taking.all and self._feed.clock() - self.latest < seconds
        return self.state == "running" and not lately

    def _read_all(self) -> None:
        """Returns at the end of the source, or when the feed stops."""
        feed = self._feed
        if feed.stop.is_set():
            return
        self.total = self._source.total
        self.state = "running"
        feed.emit(FeedConnected(feed.clock(), feed.name))
        while (picture := self._source.read()) is not None:
            self._take(picture)
            if feed.stop.is_set():
                return

    def _take(self, picture: Picture) -> None:
        """Number a picture, and put it into the queue if it is taken."""
        (image, pts), feed, ledger = picture, self._feed, self._feed.ledger
        now = feed.clock()
        pts = self._clock.time(pts, now, getattr(self._source, "step", None))
        if self._paced:
            if feed.pause(feed.stop, self._clock.ahead(now)):
                return
            now = feed.clock()
        self.latest = now
        self._backoff.reset()
        if pts is None and feed.config.fps and ledger.read_so_far == 0:
            log.warning("%s: fps has no effect: its pictures have neither times nor a rate; use every", feed.name)
        if not self._taking.takes(pts):
            ledger.passed_over()
            return
        image, file = turned(image, self._feed.config.rotate), getattr(picture, "file", "")
        frame = Frame(image, ledger.read_so_far, pts, now, self._prepared(image), file)
        ledger.read(frame)
        left_out = self._feed.queue.put(frame)
        if left_out is not None:
            ledger.drop("stopped") if left_out is frame else ledger.overrun()

    def _prepared(self, image: Any) -> Any:
        """None if it fails: then the thread that submits the frame does it again, and counts it as failed."""
        try:
            with WALL:
                return None if self._prepare is None else self._prepare(image)
        except Exception:
            return None

    def _again(self, lost: Exception) -> bool:
        """Wait before the next attempt; False if there is none."""
        feed, connected, words = self._feed, self.state == "running", words_of(lost)
        feed.ledger.note(words)
        if self.restarts >= self._most or (isinstance(lost, SourceError) and not lost.retryable):
            if connected:
                feed.emit(FeedDisconnected(feed.clock(), feed.name, words))
            return False
        self.state = "reconnecting"
        pause = self._backoff.next()
        feed.emit(FeedDisconnected(feed.clock(), feed.name, words, pause))
        feed.pause(feed.stop, pause)
        return True

    def _close(self) -> None:
        try:
            self._source.close()
        except Exception:
            log.exception("%s: the source could not be closed", self._feed.name)


def words_of(error: BaseException) -> str:
    """The message of an error; with its class, if the error is not ours and its message may mean little alone."""
    return str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
