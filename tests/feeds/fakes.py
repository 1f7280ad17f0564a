"""Sources, batch points and clocks that a test plays by hand. Whoever waits, waits for an event with a limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.feeds.runtime.feed import Feed
from reflex_runtime.feeds.runtime.pipeline import Frame, Picture, Result, SourceError
from reflex_runtime.run.coordinator import BatchEntry, NewestFrame

PATIENCE = 60.0  # seconds until a test that waits is broken
END = None


def picture(number: int = 0, width: int = 8, height: int = 6) -> Picture:
    """A picture whose first pixels say its number, with a pts of a tenth of it."""
    image = np.zeros((height, width, 3), np.uint8)
    image[0, 0] = (number >> 16 & 255, number >> 8 & 255, number & 255)
    return image, number / 10


def number_in(image: Any) -> int:
    """The number that a picture says."""
    high, middle, low = (int(v) for v in image[0, 0])
    return high << 16 | middle << 8 | low


def frame(sequence: int = 0, captured: float = 0.0) -> Frame:
    """A frame of that number."""
    image, pts = picture(sequence)
    return Frame(image, sequence, pts, captured)


class Camera:
    """A source that gives what the test puts into it: numbers become pictures, exceptions are raised, END ends it.

    opens, closes: how often. deaf: `interrupt` does nothing until the test calls `let_go`.
    """

    def __init__(self, *items: Any, live: bool = True, deaf: bool = False, refuse: Sequence[Exception] = ()) -> None:
        self.name, self.live, self.total = "camera", live, None
        self.opens = self.closes = self._given = self._reads = 0
        self._read = threading.Condition()
        self._deaf = deaf
        self._refuse = list(refuse)
        self._interrupted = threading.Event()
        self._items: queue.Queue[Any] = queue.Queue()
        self.give(*items)

    def give(self, *items: Any) -> None:
        self._given += len(items)
        for item in items:
            self._items.put(item)

    def open(self) -> None:
        self.opens += 1
        if self._refuse:
            raise self._refuse.pop(0)

    def read(self) -> Picture | None:
        with self._read:
            self._reads += 1
            self._read.notify_all()
        item = self._items.get(timeout=PATIENCE)
        if self._interrupted.is_set() and not self._deaf:
            raise SourceError("interrupted")
        if isinstance(item, BaseException):
            raise item
        return picture(item) if isinstance(item, int) else item

    def close(self) -> None:
        self.closes += 1

    def interrupt(self) -> None:
        self._interrupted.set()
        if not self._deaf:
            self._items.put(END)

    def let_go(self) -> None:
        """A deaf one hears at last."""
        self._items.put(END)

    def idle(self) -> None:
        """Returns once the feed has put all it was given into its queue, and waits for more."""
        with self._read:
            assert self._read.wait_for(lambda: self._reads > self._given, PATIENCE)


class Endless:
    """A live source that gives as fast as it is read, and counts what it gave."""

    def __init__(self, live: bool = True) -> None:
        self.name, self.live, self.total = "endless", live, None
        self.given = 0
        self._over = threading.Event()

    def open(self) -> None:
        pass

    def read(self) -> Picture | None:
        if self._over.is_set():
            raise SourceError("interrupted")
        self.given += 1
        return picture(self.given - 1)

    def close(self) -> None:
        pass

    def interrupt(self) -> None:
        self._over.set()


class Detector:
    """A batch processor that answers each entry with the number in its picture, once the gate is open.

    An exception in `faults` for a number is that entry's result. calls: (feed, sequence) of every batch.
    """

    def __init__(self, id: str = "detector", is_open: bool = True) -> None:
        self.id = id
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.entered = threading.Semaphore(0)
        self.calls: list[list[tuple[str, int]]] = []
        self.faults: dict[int, BaseException] = {}
        self.log: list[str] = []

    def on_start(self) -> None:
        self.log.append("start")

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        self.calls.append([(entry.feed_id, entry.sequence) for entry in entries])
        self.entered.release()
        assert self.gate.wait(PATIENCE), "the test never opened the gate"
        results: list[Any] = []
        for entry in entries:
            fault = self.faults.get(number_in(entry.frame))
            if isinstance(fault, BaseException) and not isinstance(fault, Exception):
                raise fault
            results.append(fault or number_in(entry.frame))
        return results

    def on_stop(self) -> None:
        self.log.append("stop")

    def busy(self) -> None:
        """Returns once a batch is inside."""
        assert self.entered.acquire(timeout=PATIENCE)


class Point:
    """A batch point without a coordinator, where a batch begins at once: `answer(sequence)` returns a value or raises.

    asked: what came in, with its time limit.
    """

    def __init__(self, answer: Callable[[int], Any] = lambda sequence: sequence) -> None:
        self.answer = answer
        self.lost: ProcessorError | None = None
        self.asked: list[tuple[str, int, float | None]] = []
        self.views: list[Any] = []

    def submit_and_wait(
        self,
        feed_id: str,
        frame: Any,
        view: Any = None,
        *,
        newest: Callable[[], NewestFrame] | None = None,
        **options: Any,
    ) -> Any:
        sequence, time_limit = options.get("sequence"), options.get("time_limit")
        if newest is not None:
            _, view, sequence, _ = newest()
        assert sequence is not None
        self.asked.append((feed_id, sequence, time_limit))
        self.views.append(view)
        return self.answer(sequence)


class Collector:
    """A sink that keeps results and tells when they come."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.closed = 0
        self._news = threading.Condition()

    def __call__(self, result: Result) -> None:
        with self._news:
            self.results.append(result)
            self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self.closed += 1
            self._news.notify_all()

    def wait(self, count: int) -> None:
        """Returns once so many results came."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.results) >= count, PATIENCE), len(self.results)

    @property
    def sequences(self) -> list[int]:
        return [result.frame.sequence for result in self.results]

    @property
    def values(self) -> list[Any]:
        return [result.value for result in self.results]


class Log:
    """Receives health events, and waits for them."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._news = threading.Condition()

    def __call__(self, event: Any) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def of(self, kind: type) -> list[Any]:
        with self._news:
            return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1) -> list[Any]:
        """Returns once so many of a kind came."""
        with self._news:
            assert self._news.wait_for(
                lambda: sum(isinstance(event, kind) for event in self.events) >= count, PATIENCE
            ), self.events
        return self.of(kind)


class Pauses:
    """Pauses that take no time, or hold until the feed stops. seconds: what was asked for."""

    def __init__(self, hold: bool = False) -> None:
        self.seconds: list[float] = []
        self.entered = threading.Semaphore(0)
        self._hold = hold

    def __call__(self, stop: threading.Event, seconds: float) -> bool:
        self.seconds.append(seconds)
        self.entered.release()
        return stop.wait(PATIENCE) if self._hold else stop.is_set()


class Clock:
    """Time that stands still until it is set, or a feed pauses for it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pause(self, stop: threading.Event, seconds: float) -> bool:
        self.now += seconds
        return stop.is_set()


def quiet(feed: Feed, but: str) -> None:
    """Stop a feed, and wait until only its thread of this name is left."""
    feed.signal()
    for thread in feed._threads:
        if not thread.name.endswith(but):
            thread.join(PATIENCE)


def ended(feed: Feed) -> None:
    """Wait for a feed that ends by itself."""
    assert feed.join(PATIENCE), feed.detached


def balanced(feed: Feed) -> bool:
    """Whether every frame of it is in one place."""
    s = feed.snapshot()
    return s.frames == s.processed + sum(s.drops.values()) + s.waiting and s.waiting >= 0


class Tracker:
    """A stage with a memory."""

    def __call__(self, item: Any) -> Any:
        return item

    def track(self, item: Any) -> Any:
        """The same as a method."""
        return item
