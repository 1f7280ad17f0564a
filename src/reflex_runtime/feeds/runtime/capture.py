"""The thread that reads a source, again when it was lost, and the queue behind it."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.frame import Frame, Picture, Source, SourceError, Taking, turned
from reflex_runtime.feeds.runtime.health import FeedConnected, FeedDisconnected, HealthEvent
from reflex_runtime.feeds.runtime.snapshot import Ledger
from reflex_runtime.pacing import doubled
from reflex_runtime.run.device import Clock


class FrameQueue:
    """First in, first out, at most `capacity` frames.

    drop_oldest: True, `put` never waits, and the oldest frame makes room: of capacity 1, the newest wins. False, `put`
        waits for room.
    Every frame put is either taken by `get`, or handed back by `put` or `close`: every lost frame is reported.
    """

    def __init__(self, capacity: int, drop_oldest: bool) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= 4096:
            raise ConfigError(f"FrameQueue.capacity={capacity!r}: must be a whole number in [1, 4096]")
        self._capacity = capacity
        self._drop_oldest = drop_oldest
        self._frames: deque[Frame] = deque()
        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._closed = False

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more. What it holds may still be taken."""
        return self._closed

    def put(self, frame: Frame) -> Frame | None:
        """Add a frame. Returns the one that found no place: the oldest, or this one if the queue is closed, else None.

        Waits only without drop_oldest, for room or for the end.
        """
        with self._filled:
            while not (self._drop_oldest or self._closed) and len(self._frames) >= self._capacity:
                self._room.wait()
            if self._closed:
                return frame
            lost = self._frames.popleft() if len(self._frames) >= self._capacity else None
            self._frames.append(frame)
            self._filled.notify()
            return lost

    def get(self, timeout: float | None = None) -> Frame | None:
        """The oldest frame; waits for one. None when the time is over (seconds), or when it is closed and empty."""
        with self._filled:
            self._filled.wait_for(lambda: self._frames or self._closed, timeout)
            if not self._frames:
                return None
            self._room.notify()
            return self._frames.popleft()

    def close(self, discard: bool = False) -> list[Frame]:
        """Take nothing more and wake both sides, at once.

        What it holds may still be taken; with discard it is handed back instead, and `get` finds nothing.
        """
        with self._filled:
            self._closed = True
            left = list(self._frames) if discard else []
            if discard:
                self._frames.clear()
            self._filled.notify_all()
            self._room.notify_all()
            return left


log = logging.getLogger("reflex.feeds")

Pause = Callable[[threading.Event, float], bool]  # waits for the event, some seconds at most; whether it was set


class Backoff:
    """Pauses between attempts: 1 s, doubled up to 30 s, each varied by up to a fifth, so that feeds do not retry
    together."""

    FIRST_S, MOST_S, JITTER = 1.0, 30.0, 0.2

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._made = 0

    def next(self) -> float:
        """Seconds until the next attempt."""
        pause = doubled(self.FIRST_S, self.MOST_S, self._made)
        self._made += 1
        return pause * self._chance.uniform(1.0 - self.JITTER, 1.0 + self.JITTER)

    def reset(self) -> None:
        self._made = 0


class Capture:
    """Opens, reads and closes a source on one thread, and puts its frames into the feed's queue.

    restarts: how often the source is opened again, in all; inf for without end. emit: gets feed events.
    taking: which pictures are taken; None: all. rotate: degrees by which they are turned clockwise.
    prepare: made of each picture here, while the frame before it is computed; None: by the thread that submits it.
    state: connecting, running, reconnecting. total: frames the source says it has. latest: when one came, taken or not.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        queue: FrameQueue,
        ledger: Ledger,
        stop: threading.Event,
        emit: Callable[[HealthEvent], None],
        *,
        restarts: float,
        taking: Taking | None = None,
        rotate: int = 0,
        prepare: Callable[[NDArray[np.uint8]], Any] | None = None,
        clock: Clock,
        pause: Pause,
        chance: random.Random,
    ) -> None:
        self._name = name
        self._source = source
        self._queue = queue
        self._ledger = ledger
        self._stop = stop
        self._emit = emit
        self._most = restarts
        self._taking, self._rotate, self._prepare = taking, rotate, prepare
        self._clock = clock
        self._pause = pause
        self._backoff = Backoff(chance)
        self.state = "connecting"
        self.restarts = 0
        self.total: int | None = None
        self.latest = clock()  # when the newest picture came

    def run(self) -> Exception | None:
        """Read to the end. Returns None there or at a stop, else the error after which it is not tried again.

        Any other exception counts as a lost source, too, because its cause is not known here.
        """
        for attempt in count():
            self.restarts = attempt
            try:
                self._source.open()
                self._read_all()
                return None
            except Exception as error:
                lost = error
            finally:
                self._close()
            if self._stop.is_set():
                return None
            if not self._again(lost):
                return lost
        raise AssertionError("unreachable")

    def _read_all(self) -> None:
        """Returns at the end of the source, or when the feed stops."""
        if self._stop.is_set():
            return
        self.total = self._source.total
        self.state = "running"
        self._emit(FeedConnected(self._clock(), self._name))
        while (picture := self._source.read()) is not None:
            self._take(picture, self._clock())
            if self._stop.is_set():
                return

    def _take(self, picture: Picture, now: float) -> None:
        """Number a picture, and put it into the queue if it is taken."""
        image, pts = picture
        self.latest = now
        self._backoff.reset()
        if self._taking is not None and not self._taking.takes(pts, now):
            self._ledger.passed_over()
            return
        image, file = turned(image, self._rotate), getattr(picture, "file", "")
        frame = Frame(image, self._ledger.read_so_far, pts, now, self._prepared(image), file)
        self._ledger.read(frame)
        left_out = self._queue.put(frame)
        if left_out is not None:
            self._ledger.drop("stopped") if left_out is frame else self._ledger.overrun()

    def _prepared(self, image: NDArray[np.uint8]) -> Any:
        """None if it fails: then the thread that submits the frame does it again, and counts it as failed."""
        try:
            return None if self._prepare is None else self._prepare(image)
        except Exception:
            return None

    def _again(self, lost: Exception) -> bool:
        """Wait before the next attempt; False if there is none."""
        connected, words = self.state == "running", words_of(lost)
        self._ledger.note(words)
        if self.restarts >= self._most or (isinstance(lost, SourceError) and not lost.retryable):
            if connected:
                self._emit(FeedDisconnected(self._clock(), self._name, words))
            return False
        self.state = "reconnecting"
        pause = self._backoff.next()
        self._emit(FeedDisconnected(self._clock(), self._name, words, pause))
        self._pause(self._stop, pause)
        return True

    def _close(self) -> None:
        try:
            self._source.close()
        except Exception:
            log.exception("%s: the source could not be closed", self._name)


def words_of(error: BaseException) -> str:
    """The message of an error; with its class, if the error is not ours and its message may mean little alone."""
    return str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
