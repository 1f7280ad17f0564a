"""One run of `reflex feeds`, from the start of the processor to the last word."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from reflex_runtime.cli.feeds_asked import batching_asked, onnx_asked, refusal_of, second_model_asked
from reflex_runtime.cli.feeds_files import FeedFiles
from reflex_runtime.cli.feeds_signals import Signals
from reflex_runtime.cli.feeds_table import Board
from reflex_runtime.config import FeedsConfig
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.feeds.fleet import FeedFleet
from reflex_runtime.feeds.replaceable import ReplaceableDetector
from reflex_runtime.feeds.runtime import Runtime, StopReport
from reflex_runtime.feeds.words import undecoded
from reflex_runtime.telemetry.health import FeedEnded, FeedFailed, FeedStageError, StageError
from reflex_runtime.telemetry.one_group import OneGroup

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from reflex_runtime.drivers.batch_processor import BatchProcessor
    from reflex_runtime.drivers.coordinator import BatchCoordinator
    from reflex_runtime.feeds.outputs.output import AnyOutput
    from reflex_runtime.feeds.pictures import FeedPictures
    from reflex_runtime.feeds.source import Source
    from reflex_runtime.feeds.spec import FeedSpec

_LOST, _READER_GONE, _WAKE = "lost", "reader gone", ""


class FeedsSession:
    """What a run owns, and how it goes. output: standard output."""

    def __init__(
        self,
        config: FeedsConfig,
        specs: Sequence[FeedSpec],
        sources: Mapping[str, Source],
        processor: BatchProcessor,
        output: Any,
        outputs: Sequence[AnyOutput] = (),
    ) -> None:
        self._config = config
        self._specs = specs
        self._sources = sources
        self._processor = processor
        self._batching = batching_asked(config, len(specs))
        self._then = second_model_asked(config, processor, self._batching.capacity) if config.then else None
        self._runtime = Runtime()
        self._outputs = [self._runtime.output(each) for each in outputs]
        on_screen = config.results == "-" and output.isatty()  # then there is no room for a table
        self._board = Board(self._runtime, False if on_screen and config.table is None else config.table)
        self._registry: CollectorRegistry | None = None
        self._news: SimpleQueue[str] = SimpleQueue()  # why to stop; the one queue that a signal handler may put into
        self._started = threading.Event()
        self._waiting = False  # the main thread looks at the news
        self._signal = 0
        self._hurried = False  # by a second signal
        self._events = self._runtime.events()
        self._faults = False  # a stage or a sink failed
        groups = [self._batching.group(processor.id)]
        if self._then is not None:
            groups.append(self._then.config.group(self._then.processor.id))
        self._files = FeedFiles(config, groups, output, lambda: self._news.put(_READER_GONE))

    def run(self) -> int:
        """Returns the exit status."""
        handlers = Signals(self._signalled, lambda: self._news.put(_WAKE))
        with handlers:
            try:
                status, clean = self._run()
            except KeyboardInterrupt:
                when = "without waiting" if self._waiting else "before it had started"
                logging.warning("stopped by %s %s", signal.Signals(self._signal).name, when)
                _leave(128 + self._signal)
        if not clean:
            _leave(status)
        return status

    def _run(self) -> tuple[int, bool]:
        """The exit status, and whether every thread ended."""
        with ExitStack() as closing:
            coordinator = self._coordinator(closing)
            pictures = self._pictures() if self._config.port >= 0 else None
            fleet = self._fleet(coordinator, pictures)
            fleet.begin(self._specs, self._sources)
            if pictures is not None:
                self._status(coordinator, pictures, fleet, closing)
            watcher = threading.Thread(target=self._watch, args=(coordinator,), name="reflex-feeds-watch", daemon=True)
            watcher.start()
            self._say_what_starts(coordinator)
            try:
                self._start()
                with self._board:
                    why = self._wait()
            except BaseException:
                if not self._hurried:
                    self._runtime.stop()
                raise
            report = self._runtime.stop()
            watcher.join(2.0)
        if why == _READER_GONE:
            logging.info("stopped: the reader of standard output has left")
        elif why in signal.Signals.__members__:
            logging.info("stopped by %s", why)
        self._board.summary()
        complete = self._complete(coordinator, report)
        self._files.tell()
        return (0 if complete or why == _READER_GONE else 1), not report.detached

    # -- building ------------------------------------------------------------------------------------------------------

    def _coordinator(self, closing: ExitStack) -> BatchCoordinator:
        sinks: list[Callable[[Any], None]] = []
        if (trace := self._files.trace) is not None:
            closing.callback(trace.close)
            sinks.append(trace)
        if self._config.otel:
            from reflex_runtime.telemetry.spans import FrameSpans, spans_of

            spans = spans_of(self._config.otel, self._config.otel_sample, self._series(), FrameSpans)
            assert spans is not None
            closing.callback(spans.close)
            sinks.append(spans if self._then is None else OneGroup(spans, self._processor.id))
        return self._runtime.coordinator(self._processor, self._batching, sinks, self._then)

    def _series(self) -> CollectorRegistry:
        """The registry of its /metrics."""
        from prometheus_client import CollectorRegistry

        if self._registry is None:
            self._registry = CollectorRegistry()
        return self._registry

    def _pictures(self) -> FeedPictures:
        from reflex_runtime.feeds.pictures import FeedPictures

        return FeedPictures(lambda: self._runtime.names)

    def _fleet(self, coordinator: BatchCoordinator, pictures: FeedPictures | None) -> FeedFleet:
        detector = self._processor if isinstance(self._processor, ReplaceableDetector) else None
        sinks = partial(self._sinks_of, pictures)
        return FeedFleet(self._runtime, coordinator, detector, self._config, sinks, onnx_asked, self._look)

    def _sinks_of(self, pictures: FeedPictures | None, spec: FeedSpec) -> list[Callable[[Any], None]]:
        taking = [each.take for each in self._outputs]
        return [*self._files.sinks_of(spec), *taking, *([] if pictures is None else [pictures.take])]

    def _status(
        self, coordinator: BatchCoordinator, pictures: FeedPictures, fleet: FeedFleet, closing: ExitStack
    ) -> None:
        from reflex_runtime.cli.serving import url, warn_if_open
        from reflex_runtime.feeds.series import FeedSeries
        from reflex_runtime.feeds.status import StatusServer, health_of
        from reflex_runtime.feeds.watching import FeedPages

        registry = self._series()
        FeedSeries(self._runtime.snapshot, registry)
        server = StatusServer(
            self._config,
            registry,
            lambda: health_of(self._runtime.snapshot(), {coordinator.id: coordinator.lost}),
            lambda: FeedPages(self._runtime, coordinator, pictures, fleet),
        )
        closing.enter_context(server)
        warn_if_open(self._config, server.address)
        logging.info("%s/dashboard, /feeds, /metrics and /health", url(server.address))

    # -- running -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the feeds on another thread: a signal may come at any step of the main one, and what has been started
        by half cannot be stopped."""
        errors: list[BaseException] = []

        def start() -> None:
            try:
                self._runtime.start()
                self._waiting = True  # from now on a signal is news, and ends what runs in order
            except BaseException as error:
                errors.append(error)
            self._started.set()

        threading.Thread(target=start, name="reflex-feeds-start", daemon=True).start()
        self._started.wait()
        if errors:
            raise refusal_of(self._config, errors[0]) if isinstance(errors[0], ProcessorError) else errors[0]
        self._files.begin()

    def _wait(self) -> str:
        """Why it stops: a signal's name, or what there is no more."""
        self._look()  # feeds may have ended before the watcher began
        until = time.monotonic() + self._config.duration_s if self._config.duration_s else inf
        try:
            while True:
                left = None if until == inf else max(0.0, until - time.monotonic())
                if (why := self._news.get(timeout=left)) != _WAKE:
                    return why
        except Empty:
            return "time"

    def _watch(self, coordinator: BatchCoordinator) -> None:
        """Say what happens, and notice the end. On a thread of its own."""
        lost = False
        for event in self._events:
            if isinstance(event, FeedStageError):
                self._faults = True
            if isinstance(event, StageError):  # of every feed; once is enough
                if not lost:
                    logging.error("%s died and answers no more: %s", coordinator.id, event.error)
                lost = True
                self._news.put(_LOST)
            else:
                self._board.tell(event)
            if isinstance(event, (FeedEnded, FeedFailed)):
                self._look()

    def _look(self) -> None:
        if self._runtime.names and self._runtime.over:  # without feeds it waits for some to be added
            self._news.put("over")

    def _signalled(self, number: int) -> None:
        """In the main thread, between any two of its steps: nothing here may wait for it."""
        if self._hurried:  # it is on its way out
            return
        again, self._signal = self._signal, number
        self._hurried = bool(again)
        if again or not self._waiting:
            raise KeyboardInterrupt
        self._news.put(signal.Signals(number).name)

    # -- log lines -----------------------------------------------------------------------------------------------------

    def _say_what_starts(self, coordinator: BatchCoordinator) -> None:
        feeds, batching = len(self._specs), self._batching
        number, wait = f"{feeds} feed{'s'[: feeds != 1]}", f"{1e3 * batching.max_latency:g} ms"
        most = batching.max_batch_size
        logging.info("starting: %s on %s, batches of at most %d frames or %s", number, coordinator.id, most, wait)

    def _complete(self, coordinator: BatchCoordinator, report: StopReport) -> bool:
        """Whether nothing is missing; says what is, unless it was said when it happened."""
        complete = not self._faults and coordinator.lost is None and report.clean
        for name, feed in self._runtime.snapshot().feeds.items():
            if feed.mode == "live" and feed.state == "stopped" and not feed.frames:
                why = f": {feed.error}" if feed.error else ""
                logging.error("%s: never connected to %s%s", name, feed.source, why)
                complete = False
            failed = feed.drops.get("failed", 0)
            if failed and coordinator.lost is None and (feed.mode == "file" or not feed.processed):
                logging.error("%s: %d of %d frames have no answer: %s", name, failed, feed.frames, feed.error)
                complete = False
            if feed.corrupt and feed.mode == "file" and feed.state == "ended":
                logging.error("%s: the file is damaged: %s", name, undecoded(feed.corrupt))
                complete = False
            complete = complete and feed.state != "failed" and not feed.sink_errors
        for name, output in self._runtime.snapshot().outputs.items():
            if output.taken and not output.sent:
                why = f": {output.error}" if output.error else ""
                logging.error("%s: none of %d results arrived at %s%s", name, output.taken, output.where, why)
                complete = False
        return self._files.complete() and complete


def _leave(status: int) -> NoReturn:
    """Out, without waiting for threads that may never end."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
