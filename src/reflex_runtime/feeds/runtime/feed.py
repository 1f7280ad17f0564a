"""One camera or video on its way through the runtime: a thread that reads it, and one that works on its frames.

    capture    source -> FrameQueue            never waits for a model
    pipeline   FrameQueue -> stages -> batch point -> stages -> sinks

Two modes differ in what happens when frames come faster than answers:

    live   the newest frame wins: the oldest is dropped, and one older than `max_age` or refused at the batch point.
           Until a batch begins, a newer frame takes the place of the one that waits for it
    file   capture waits, the batch point is asked again until it has room, and no frame is lost
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.capture import FILE, LIVE, Capture, FeedConfig, FeedContext, Pause, words_of
from reflex_runtime.feeds.runtime.consumer import Consumer, Sink
from reflex_runtime.feeds.runtime.health import FeedEnded, FeedFailed, FeedStageError, HealthEvent
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Source
from reflex_runtime.feeds.runtime.snapshot import FeedSnapshot
from reflex_runtime.run.device import Clock

log = logging.getLogger("reflex.feeds")


def close_sink(sink: Sink) -> None:
    """Close a sink that can be closed. It may raise."""
    if (close := getattr(sink, "close", None)) is not None:
        close()


class Feed:
    """One source, its pipeline and its sinks. Made by `Runtime.feed`; can be used alone.

    sinks: called with each `Result`, in order, on the feed's thread. One that raises is counted and told
        (`FeedStageError`), and gets the next result all the same. Closed when the feed is over, by `release`.
    emit: gets health events, from either thread, and must be quick. on_end: called once when the feed is over.
    clock, pause, seed: for tests; pause waits for an event, seed is of the jitter in reconnecting.

    Whatever ends one of its threads, an unexpected exception too, ends the feed with a state and an event.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        pipeline: Pipeline | None = None,
        sinks: Sequence[Sink] = (),
        config: FeedConfig | None = None,
        *,
        emit: Callable[[HealthEvent], None] = lambda event: None,
        release: Callable[[Sink], None] = close_sink,
        on_end: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
        pause: Pause = threading.Event.wait,
        seed: int | None = None,
    ) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise ConfigError(f"Feed.name={name!r}: must be a text of 1 to 256 characters")
        config = config or FeedConfig()
        self.name, self.mode = name, config.mode or (LIVE if source.live else FILE)
        self.sinks, self.pipeline = tuple(sinks), pipeline or Pipeline()
        self._source = source
        self._emit_to, self._release, self._on_end = emit, release, on_end
        live = self.mode == LIVE
        self._shared = shared = FeedContext(name, config, live, self._emit, clock, pause)
        # Of a camera's pictures many may be dropped: those that are not are prepared when they are taken.
        ahead = None if live or self.pipeline.before or self.pipeline.view else self.pipeline.prepared
        self._capture = Capture(shared, source, ahead, random.Random(name if seed is None else seed))
        self._consumer = Consumer(shared, self.pipeline, self.sinks, self._silent)
        self._asked = False  # whether `stop` was called
        self._failure: BaseException | None = None
        self._final: str | None = None
        self._finished = False
        self._released: list[Sink] = []
        self._guard = threading.Lock()  # of starting, of the end and of letting a sink go: each happens once
        self._threads: tuple[threading.Thread, ...] = ()

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads. Does nothing once it was started or signalled."""
        with self._guard:
            if self._threads or self._asked:
                return
            self._threads = tuple(
                threading.Thread(target=main, name=f"reflex-feed-{self.name}-{part}", daemon=True)
                for part, main in (("pipeline", self._consume_main), ("capture", self._capture_main))
            )
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:  # the system gives no more threads
            self._fail(error)
            if not self._threads[0].is_alive():
                self._finish()
            raise

    def signal(self) -> None:
        """Let it end: the source is interrupted, frames that wait are dropped, one at the batch point gets its answer.

        Returns at once.
        """
        with self._guard:
            self._asked = True
            started = bool(self._threads)
        self._halt()
        if not started:
            self._finish()

    def join(self, timeout: float = 5.0) -> bool:
        """After `signal`, or for a feed that ends by itself. Returns whether both threads ended within `timeout`."""
        until = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not self.detached

    def stop(self, timeout: float = 5.0) -> bool:
        """`signal` and `join`. Threads left behind are named by `detached`, and nothing of theirs reaches a sink."""
        self.signal()
        ended = self.join(timeout)
        if not ended:
            self.abandon()
        return ended

    def abandon(self) -> None:
        """Leave its thread behind: further results do not reach the sinks, which are closed now.

        A sink that the thread is inside of is not closed here, because that could block, too; the thread closes it if
        it returns.
        """
        self._release_sinks(but=self._consumer.abandon())

    @property
    def detached(self) -> tuple[str, ...]:
        """Names of its threads that still run."""
        return tuple(thread.name for thread in self._threads if thread.is_alive())

    @property
    def state(self) -> str:
        """connecting, running, reconnecting; then ended, failed or stopped."""
        return self._final or self._capture.state

    @property
    def over(self) -> bool:
        """Whether no more results will come."""
        return self._final is not None

    def snapshot(self) -> FeedSnapshot:
        """Its figures now; those of frames are all of one moment."""
        return FeedSnapshot(
            name=self.name,
            mode=self.mode,
            source=self._source.name,
            state=self.state,
            in_flight=int(self._consumer.in_flight),
            restarts=self._capture.restarts,
            total=self._capture.total,
            corrupt=getattr(self._source, "corrupt", 0),  # a source may not know it
            zones=self._counts("zone_counts"),
            lines=self._counts("line_counts"),
            **self._shared.ledger.figures(self._shared.clock()),
        )

    def _counts(self, kind: str) -> dict[str, Any]:
        """What its stages count, by name."""
        return {name: n for stage in self.pipeline.after for name, n in getattr(stage, kind, {}).items()}

    def _silent(self) -> bool:
        return self._capture.silent(self._shared.config.frozen_after or 0.0)

    # -- its threads ---------------------------------------------------------------------------------------------------

    def _capture_main(self) -> None:
        error: BaseException | None
        try:
            error = self._capture.run()
        except BaseException as died:
            log.exception("%s: the capture thread died", self.name)
            error = died
        self._failure = self._failure or error
        self._shared.queue.close()  # what was read before is still worked on

    def _consume_main(self) -> None:
        try:
            error = self._consumer.run()
            if error is not None:
                self._fail(error)
        except BaseException as died:
            log.exception("%s: the pipeline thread died", self.name)
            self._fail(died)
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._halt()

    def _halt(self) -> None:
        """Wake both threads, so that they end."""
        self._shared.stop.set()
        self._shared.ledger.drop("stopped", len(self._shared.queue.close(discard=True)))
        try:
            self._source.interrupt()
        except Exception:
            log.exception("%s: the source could not be interrupted", self.name)

    def _finish(self) -> None:
        """End the feed, once: close its sinks, publish its last event, wake callers that wait."""
        with self._guard:
            if self._finished:
                return
            self._finished = True
        self._release_sinks()
        failure, now = self._failure, self._shared.clock()
        if failure is not None:
            self._shared.ledger.note(words_of(failure))
        self._final = "failed" if failure is not None else "stopped" if self._asked else "ended"
        if failure is not None:
            self._emit(FeedFailed(now, self.name, words_of(failure)))
        elif self._final == "ended":
            self._emit(FeedEnded(now, self.name))
        self._on_end()

    def _release_sinks(self, but: Sink | None = None) -> None:
        """Release the sinks that are not released yet."""
        with self._guard:
            sinks = [s for s in self.sinks if s is not but and not any(s is other for other in self._released)]
            self._released += sinks
        for sink in sinks:
            try:
                self._release(sink)
            except BaseException as error:
                words = f"a sink could not be closed: {words_of(error)}"
                self._shared.ledger.note(words)
                self._emit(FeedStageError(self._shared.clock(), self.name, words))

    def _emit(self, event: HealthEvent) -> None:
        try:
            self._emit_to(event)
        except Exception:
            log.exception("%s: the receiver of events failed", self.name)
