"""Starts, watches and stops feeds, coordinators and outputs together, in an order that cannot deadlock.

    with Runtime() as runtime:
        detector = runtime.coordinator(Detector(), BatchConfig(max_batch_size=8))
        runtime.feed("door", source_of("door.mp4"), Pipeline(batch=detector), sinks=[JsonLines("door.jsonl")])
        runtime.wait()

A stop signals the feeds, then the coordinators, then waits for the feeds, then for the coordinators. So a feed that
waits for an answer gets one, and no camera is read while the last batch is formed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.feeds.runtime.feed import FILE, Feed, FeedConfig, Sink, close_sink
from reflex_runtime.feeds.runtime.health import Health, HealthEvent, OutputSnapshot, RuntimeSnapshot, ThreadDetached
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Source
from reflex_runtime.run.audience import Sink as EventSink
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchProcessor

LIMIT = 1024  # events that wait for a reader


class Events:
    """A subscription: every health event since it was made, in order; `for event in events` ends when the runtime
    stops. Beyond `LIMIT` events that wait the oldest is dropped, and counted by `missed`.
    """

    def __init__(self, leave: Callable[[Events], Any] = lambda events: None) -> None:
        self._leave = leave
        self._kept: deque[HealthEvent] = deque(maxlen=LIMIT)
        self._news = threading.Condition()
        self._closed = False
        self.missed = 0

    def add(self, event: HealthEvent) -> None:
        """Called by the runtime. Never waits for the reader."""
        with self._news:
            if not self._closed:
                self.missed += len(self._kept) == LIMIT
                self._kept.append(event)
                self._news.notify_all()

    def next(self, timeout: float | None = None) -> HealthEvent | None:
        """Wait up to `timeout` seconds for the next event. None after that time, or at the end."""
        with self._news:
            self._news.wait_for(lambda: self._kept or self._closed, timeout)
            return self._kept.popleft() if self._kept else None

    def close(self) -> None:
        """End it: a reader gets the events that wait, then the end."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._leave(self)

    def __iter__(self) -> Iterator[HealthEvent]:
        return iter(self.next, None)


log = logging.getLogger("reflex.feeds")

NEW, STARTING, RUNNING, STOPPING, STOPPED = "new", "starting", "running", "stopping", "stopped"
FEEDS_SHARE = 0.8  # the share of a stop's time that feeds have; then it waits for the coordinators
LAST_CALL_S = 0.2  # for feeds that waited for a coordinator which has ended
OUTPUTS_S = 2.0  # for results that wait in outputs


class RuntimeOutput(Protocol):
    """The part of `ResultOutput` that a runtime calls."""

    name: str

    def start(self) -> None: ...
    def signal(self, timeout: float) -> None: ...
    def join(self) -> bool: ...
    def snapshot(self) -> OutputSnapshot: ...


AnyOutput = TypeVar("AnyOutput", bound=RuntimeOutput)


@dataclass(frozen=True, slots=True)
class StopReport:
    """seconds: how long the stop took. detached: threads and outputs that did not end. errors: pairs of a coordinator
    and what its `on_stop` raised."""

    seconds: float
    detached: tuple[str, ...] = ()
    errors: tuple[tuple[str, str], ...] = ()

    @property
    def clean(self) -> bool:
        """Whether every thread ended and nothing was raised."""
        return not self.detached and not self.errors


class Runtime:
    """Owns feeds, coordinators and outputs. Any thread may call it. It is started once and stopped once.

    What is added before `start` is started by it, what is added later at once.
    """

    def __init__(self) -> None:
        self._state = NEW
        self._lock = threading.RLock()  # of everything here
        self._change = threading.Condition(self._lock)  # notified when a feed ends or is removed, and at the end
        self._stopping = threading.Lock()  # one stop at a time
        self._feeds: dict[str, Feed] = {}
        self._coordinators: dict[str, tuple[BatchCoordinator, Health]] = {}
        self._outputs: dict[str, RuntimeOutput] = {}
        self._sinks: dict[int, int] = {}  # feeds that use a sink, by its identity
        self._readers: tuple[Events, ...] = ()
        self._report: StopReport | None = None
        self._since = 0.0

    # -- what it owns --------------------------------------------------------------------------------------------------

    def coordinator(
        self, processor: BatchProcessor, config: BatchConfig | None = None, sinks: Iterable[EventSink] = ()
    ) -> BatchCoordinator:
        """A coordinator that owns this processor. sinks: get its scheduler's events.

        Raises ConfigError if the processor's id is taken, ProcessorError if it does not start.
        """
        health = Health(str(getattr(processor, "id", "")), self._emit)
        coordinator = BatchCoordinator(processor, config, (health, *sinks))
        try:
            with self._lock:
                self._check_open()
                if coordinator.id in self._coordinators:
                    raise ConfigError(f"Runtime.coordinator: the processor id {coordinator.id!r} is used already")
                self._coordinators[coordinator.id] = (coordinator, health)
                running = self._state == RUNNING
            if running:
                coordinator.start()
                with self._lock:
                    self._check_open()
        except BaseException:
            with self._lock:
                if self._coordinators.get(coordinator.id, (None,))[0] is coordinator:
                    del self._coordinators[coordinator.id]
            coordinator.stop()  # it owns its processor until then
            raise
        return coordinator

    def output(self, output: AnyOutput) -> AnyOutput:
        """Own an output, whose `take` is a sink for feeds. Raises ConfigError if its name is taken."""
        with self._lock:
            self._check_open()
            if output.name in self._outputs:
                raise ConfigError(f"Runtime.output: the name {output.name!r} is used already")
            self._outputs[output.name] = output
            if self._state == RUNNING:
                output.start()
        return output

    def feed(
        self,
        name: str,
        source: Source,
        pipeline: Pipeline | Callable[[], Pipeline] | None = None,
        sinks: Sequence[Sink] = (),
        **options: Any,
    ) -> Feed:
        """A new feed. options: see `FeedConfig`.

        pipeline: one, or a function that makes it. sinks: may be shared with other feeds unless they have
        `shared = False`; each is closed when the last feed that has it is over.
        Raises ConfigError if the name is taken, an option is wrong, or a pipeline with stages belongs to another feed.
        """
        config = FeedConfig(**options)
        made = pipeline() if callable(pipeline) else pipeline
        with self._lock:
            self._check_open()
            if name in self._feeds:
                raise ConfigError(f"Runtime.feed: the name {name!r} is used already")
            feed = Feed(name, source, made, sinks, config, emit=self._emit, release=self._release, on_end=self._ended)
            self._check_shared(feed)
            for sink in feed.sinks:
                self._sinks[id(sink)] = self._sinks.get(id(sink), 0) + 1
            self._feeds[name] = feed
            try:
                if self._state == RUNNING:
                    feed.start()
            except BaseException:
                del self._feeds[name]
                feed.signal()  # releases its sinks
                raise
        return feed

    def remove(self, name: str, timeout: float = 2.0) -> bool:
        """Stop a feed and forget it. Returns whether its threads ended within `timeout` seconds. Raises KeyError.

        A thread that does not end is reported (`ThreadDetached`), and its results are discarded.
        """
        with self._lock:
            feed = self._feeds[name]
        feed.signal()
        ended = feed.join(timeout)
        if not ended:
            self._abandon(feed)
        with self._change:
            if self._feeds.get(name) is feed:
                del self._feeds[name]
            self._change.notify_all()
        return ended

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the coordinators, then outputs and feeds. If a coordinator does not start, stop all and raise its
        ProcessorError."""
        with self._lock:
            if self._state != NEW:
                raise ConfigError(f"Runtime.start: it is {self._state}, and can be started once")
            self._state = STARTING
            self._since = time.monotonic()
        try:
            self._start_coordinators()
        except BaseException:
            self.stop()
            raise

    def _start_coordinators(self) -> None:
        started: set[str] = set()
        while True:
            with self._lock:
                if self._state != STARTING:
                    raise Closed("the runtime was stopped while it started")
                waiting = [c for c, _ in self._coordinators.values() if c.id not in started]
                if not waiting:  # also of those that were added meanwhile
                    self._state = RUNNING
                    for output in self._outputs.values():
                        output.start()
                    for feed in self._feeds.values():
                        feed.start()
                    return
            for coordinator in waiting:
                coordinator.start()
                started.add(coordinator.id)

    def stop(self, timeout: float = 5.0) -> StopReport:
        """Stop everything, in about `timeout` seconds, and up to `OUTPUTS_S` more where results wait in outputs. A
        second call returns the same report."""
        with self._stopping:
            if self._report is None:
                self._report = self._stop(timeout)
            return self._report

    def _stop(self, timeout: float) -> StopReport:
        began = time.monotonic()
        with self._lock:
            self._state = STOPPING
            feeds, coordinators = list(self._feeds.values()), list(self._coordinators.values())
            outputs = list(self._outputs.values())
        for feed in feeds:
            feed.signal()
        for coordinator, _ in coordinators:
            coordinator.signal()
        for feed in feeds:
            feed.join(max(0.0, began + FEEDS_SHARE * timeout - time.monotonic()))
        for coordinator, health in coordinators:
            left = 0.0 if coordinator.detached else began + timeout - time.monotonic()  # detached: waited for before
            coordinator.join(max(0.0, left))
            try:
                health.flush(time.monotonic())
            except Exception:  # a detached thread may still report to it
                log.exception("%s: its health could not be reported", coordinator.id)
        last_call = time.monotonic() + LAST_CALL_S
        for feed in feeds:
            if not feed.join(max(0.0, last_call - time.monotonic())):
                self._abandon(feed)
        for output in outputs:
            output.signal(OUTPUTS_S)
        detached = [name for feed in feeds for name in feed.detached]
        detached += [output.name for output in outputs if not output.join()]
        for coordinator, _ in coordinators:
            if coordinator.detached is not None:
                self._emit(ThreadDetached(time.monotonic(), coordinator.id, error=coordinator.detached))
                detached.append(coordinator.detached)
        with self._change:
            self._state = STOPPED
            readers, self._readers = self._readers, ()
            self._change.notify_all()
        for reader in readers:
            reader.close()
        errors = tuple((c.id, str(c.stop_error)) for c, _ in coordinators if c.stop_error is not None)
        return StopReport(time.monotonic() - began, tuple(detached), errors)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every feed of a file is over; without such feeds until the runtime stops. Returns whether that was
        within `timeout` seconds."""

        def over() -> bool:
            files = [feed.over for feed in self._feeds.values() if feed.mode == FILE]
            return all(files) if files else self._state == STOPPED

        with self._change:
            return self._change.wait_for(over, timeout)

    def __enter__(self) -> Runtime:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- watching ------------------------------------------------------------------------------------------------------

    def events(self) -> Events:
        """A new subscription to health events, until the stop or its `close`."""
        reader = Events(self._forget_reader)
        with self._lock:
            if self._state != STOPPED:
                self._readers = (*self._readers, reader)
                return reader
        reader.close()
        return reader

    @property
    def names(self) -> frozenset[str]:
        """The names of its feeds."""
        with self._lock:
            return frozenset(self._feeds)

    @property
    def over(self) -> bool:
        """Whether every feed is over."""
        with self._lock:
            return all(feed.over for feed in self._feeds.values())

    def snapshot(self) -> RuntimeSnapshot:
        """All figures. Those of one feed, coordinator or output are of one moment."""
        with self._lock:
            state, since = self._state, self._since
            feeds, coordinators, outputs = dict(self._feeds), list(self._coordinators.values()), dict(self._outputs)
        return RuntimeSnapshot(
            state=state,
            uptime=time.monotonic() - since if since else 0.0,
            feeds={name: feed.snapshot() for name, feed in feeds.items()},
            coordinators={one.id: one.metrics() for one, _ in coordinators},
            outputs={name: output.snapshot() for name, output in outputs.items()},
        )

    # -- within --------------------------------------------------------------------------------------------------------

    def _emit(self, event: HealthEvent) -> None:
        for reader in self._readers:  # a tuple that is replaced, never changed
            reader.add(event)

    def _forget_reader(self, reader: Events) -> None:
        with self._lock:
            self._readers = tuple(other for other in self._readers if other is not reader)

    def _check_open(self) -> None:
        if self._state in (STOPPING, STOPPED):
            raise Closed("the runtime is stopping")

    def _check_shared(self, feed: Feed) -> None:
        own = feed.pipeline
        if own.after and any(other.pipeline is own for other in self._feeds.values()):
            raise ConfigError(
                f"Runtime.feed: the pipeline of {feed.name!r} belongs to another feed, and its stages may keep state; "
                "pass a function that makes one"
            )
        for sink in feed.sinks:
            if id(sink) in self._sinks and not getattr(sink, "shared", True):
                raise ConfigError(f"Runtime.feed: {type(sink).__name__} of {feed.name!r} belongs to another feed")

    def _release(self, sink: Sink) -> None:
        """Called when a feed does not need a sink any more. The sink is closed after its last feed."""
        with self._lock:
            left = self._sinks[id(sink)] = self._sinks.get(id(sink), 1) - 1
            if left <= 0:
                del self._sinks[id(sink)]
        if left <= 0:
            close_sink(sink)

    def _ended(self) -> None:
        with self._change:
            self._change.notify_all()

    def _abandon(self, feed: Feed) -> None:
        feed.abandon()
        for thread in feed.detached:
            self._emit(ThreadDetached(time.monotonic(), feed.name, error=thread))
