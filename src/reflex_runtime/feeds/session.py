"""One run of `reflex feeds`: start, log lines, signals, changed feeds, stop and exit status."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from reflex_runtime.core.errors import Closed, ConfigError, ProcessorError
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.outputs import ResultFiles
from reflex_runtime.feeds.outputs.output import ResultOutput
from reflex_runtime.feeds.plan import OF_STAGES, FeedPlan, FeedSpec, batching_of, deferred_changes, refusal_of
from reflex_runtime.feeds.runtime.health import FeedEnded, FeedFailed, FeedStageError, StageError, words_of
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Source, refusals_of
from reflex_runtime.feeds.runtime.runtime import Runtime, StopReport
from reflex_runtime.feeds.stages import stages_of
from reflex_runtime.feeds.table import EVERY_S, begin_log, lines_of, print_summary, undecoded
from reflex_runtime.observe.logs import leave
from reflex_runtime.run.coordinator import BatchCoordinator, BatchProcessor
from reflex_runtime.run.modules import in_one_line

if TYPE_CHECKING:
    from reflex_runtime.feeds.pictures import FeedPictures

_LOST, _READER_GONE, _OVER, _TIME = "lost", "reader gone", "over", "time"
_HANGUP = getattr(signal, "SIGHUP", None)


class FeedsSession:
    """Runs the feeds of a plan once.

    output: standard output. again: reads the configuration file once more, or raises ConfigError; None without a file.
    """

    _coordinator: BatchCoordinator

    def __init__(
        self,
        plan: FeedPlan,
        processor: BatchProcessor,
        output: Any,
        outputs: Sequence[ResultOutput] = (),
        again: Callable[[], FeedPlan] | None = None,
    ) -> None:
        self._plan, self._again = plan, again
        self._config = config = plan.config
        self._processor = processor
        self._batching = batching_of(plan)
        self._runtime = Runtime()
        self._outputs = [self._runtime.output(each) for each in outputs]
        self._events = self._runtime.events()
        begin_log()
        self._reasons: SimpleQueue[str] = SimpleQueue()  # to stop
        self._begun = threading.Event()  # the start has ended, or was given up
        self._signal = 0  # the first signal that stops the run
        self._faults = False  # a stage or a sink failed
        self._turn = threading.Lock()  # held while feeds are replaced
        self._reloading = threading.Lock()  # held by the one reload that runs
        self._reload_due = threading.Lock()  # held while a reload waits: it will read the file after any signal so far
        self._pictures: FeedPictures | None = None
        group = self._batching.group(processor.id)
        self._files = ResultFiles(config, [group], output, partial(self._reasons.put, _READER_GONE))

    def run(self) -> int:
        """Returns the exit status."""
        numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT}
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if _HANGUP is not None and (self._again or signal.getsignal(_HANGUP) != signal.SIG_IGN):  # nohup ignores it
            numbers.add(_HANGUP)
        with _signals(numbers, self._signalled):
            status, clean = self._run()
        if not clean:
            leave(status)
        return status

    def _run(self) -> tuple[int, bool]:
        """Returns the exit status, and whether every thread ended."""
        with ExitStack() as closing:
            self._build(closing)
            watcher = _thread("reflex-feeds-watch", self._watch)
            feeds, batching = len(self._plan.specs), self._batching
            number, wait = f"{feeds} feed{'s'[: feeds != 1]}", f"{1e3 * batching.max_latency:g} ms"
            what = f"{number} on {self._coordinator.id}, batches of at most {batching.max_batch_size} frames"
            logging.info("starting: %s, held for at most %s", what, wait)
            try:
                self._start()
                why = self._wait()
            except BaseException:
                self._runtime.stop()
                raise
            report = self._runtime.stop()
            watcher.join()
        if why == _READER_GONE:
            logging.info("stopped: the reader of standard output has left")
        elif why in signal.Signals.__members__:
            logging.info("stopped by %s", why)
        print_summary(self._runtime.snapshot())
        complete = self._complete(report)
        return (0 if complete or why == _READER_GONE else 1), not report.detached

    # -- building ------------------------------------------------------------------------------------------------------

    def _build(self, closing: ExitStack) -> None:
        """Make the coordinator and the feeds, and open the port."""
        sinks: list[Callable[[Any], None]] = []
        if (trace := self._files.trace) is not None:
            closing.callback(trace.close)
            sinks.append(trace)
        config, registry = self._config, CollectorRegistry()
        if config.otel:
            from reflex_runtime.observe.tracing import spans_of

            spans = spans_of(config.otel, registry, "frames")
            assert spans is not None
            closing.callback(spans.close)
            sinks.append(spans)
        self._coordinator = self._runtime.coordinator(self._processor, self._batching, sinks)
        if config.port >= 0:
            from reflex_runtime.feeds.pictures import FeedPictures

            self._pictures = FeedPictures(lambda: self._runtime.names)
        for spec in self._plan.specs:
            self._add(spec, self._plan.sources[spec.name], self._pipeline(spec))
        if self._pictures is not None:
            self._serve(self._pictures, registry, closing)

    def _serve(self, pictures: FeedPictures, registry: CollectorRegistry, closing: ExitStack) -> None:
        from reflex_runtime.feeds.pages import FeedPages, FeedSeries, status_server
        from reflex_runtime.web.access import Keys, warn_if_open

        FeedSeries(self._runtime.snapshot, registry)
        keys = Keys(self._config.api_key, self._config.admin_key)
        pages = partial(FeedPages, self._runtime, self._coordinator, pictures, registry, keys)
        url = closing.enter_context(status_server(self._config, pages))
        warn_if_open(self._config)
        logging.info("%s/dashboard, /feeds, /metrics and /health", url)

    def _pipeline(self, spec: FeedSpec) -> Pipeline:
        own = any(getattr(spec.config, name) != getattr(self._config, name) for name in OF_STAGES)
        with refusals_of(spec.name) if own else nullcontext():
            return Pipeline(batch=self._coordinator, after=stages_of(spec.config), region=spec.region)

    def _add(self, spec: FeedSpec, source: Source, pipeline: Pipeline) -> None:
        sinks = [*self._files.sinks_of(spec.name), *(each.take for each in self._outputs)]
        if self._pictures is not None:
            sinks.append(self._pictures.take)
        self._runtime.feed(spec.name, source, pipeline, sinks, **spec.options())

    # -- running -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the feeds on another thread: a model may take long to load, and a signal then ends the process."""
        ends: list[BaseException | None] = []

        def start() -> None:
            try:
                self._runtime.start()
                ends.append(None)
            except BaseException as error:
                ends.append(error)
            self._begun.set()

        _thread("reflex-feeds-start", start)
        self._begun.wait()
        if not ends:
            self._runtime.stop()
            logging.warning("stopped by %s before it had started", _name(self._signal))
            leave(128 + self._signal)
        if (error := ends[0]) is not None:
            raise refusal_of(self._config, error) if isinstance(error, ProcessorError) else error
        self._files.begin()

    def _wait(self) -> str:
        """Wait for a reason to stop, and return it. Meanwhile log how the feeds are doing."""
        self._stop_if_over()  # all feeds may have ended already
        until = time.monotonic() + (self._config.duration_s or inf)
        while (left := until - time.monotonic()) > 0.0:
            try:
                return self._reasons.get(timeout=min(EVERY_S, left))
            except Empty:
                for line in lines_of(list(self._runtime.snapshot().feeds.values())) if left > EVERY_S else ():
                    logging.info("%s", line)
        return _TIME

    def _watch(self) -> None:
        """Log health events, on a thread of its own."""
        lost = False
        for event in self._events:
            self._faults = self._faults or isinstance(event, FeedStageError)
            if isinstance(event, StageError):  # each feed has one; it is logged once
                if not lost:
                    logging.error("%s died and answers no more: %s", self._coordinator.id, event.error)
                lost = True
                self._reasons.put(_LOST)
            else:
                logging.log(*words_of(event))
            if isinstance(event, (FeedEnded, FeedFailed)):
                self._stop_if_over()

    def _stop_if_over(self) -> None:
        """Stop if every feed is over."""
        with self._turn:
            if self._runtime.over:
                self._reasons.put(_OVER)

    def _change(self, plan: FeedPlan) -> str:
        """Make the feeds of this plan; those with the same settings go on. Returns in words what was done.

        Raises ConfigError for a plan that this run cannot take; then nothing has changed.
        """
        coordinator = self._coordinator
        before, after = ({spec.name: spec for spec in each.specs} for each in (self._plan, plan))
        same = {name for name, spec in after.items() if name in before and spec.same_as(before[name])}
        new = [(after[name], plan.sources[name], self._pipeline(after[name])) for name in after if name not in same]
        if len(after) > (room := coordinator.config.capacity // coordinator.most_ahead):
            raise ConfigError(f"{len(after)} feeds: this run has room for {room}")
        if isinstance(detector := coordinator.processor, OnnxFrames):
            detector.limit(plan.limits(self._config))
        with self._turn:
            for name in before.keys() - same:
                self._runtime.remove(name)
            for spec, source, pipeline in new:
                self._add(spec, source, pipeline)
        self._plan = plan
        by_change = {
            "new": sorted(after.keys() - before.keys()),
            "changed": sorted(after.keys() & before.keys() - same),
            "gone": sorted(before.keys() - after.keys()),
        }
        parts = [f"{what}: {', '.join(names)}" for what, names in by_change.items() if names]
        parts += [f"{len(same)} as before"] * bool(same)
        return "; ".join([*parts, *deferred_changes(self._config, plan.config)])

    def _reload(self, again: Callable[[], FeedPlan]) -> None:
        """Make the feeds of the configuration file as it is now. On a thread of its own, after the start."""
        file = self._plan.file
        self._begun.wait()
        with self._reloading:
            self._reload_due.release()
            try:
                logging.info("%s was read again: %s", file, self._change(again()))
            except ConfigError as error:
                logging.error("%s changes nothing: %s", file, in_one_line(error.message.removeprefix(f"{file}: ")))
            except Closed:
                return
            except Exception:
                logging.exception("%s changes nothing", file)
            self._stop_if_over()

    def _signalled(self, number: int) -> None:
        """Handle a signal, on the thread of signals."""
        if number == _HANGUP and self._again is not None:
            if self._reload_due.acquire(blocking=False):
                _thread("reflex-feeds-reload", partial(self._reload, self._again))
        elif self._signal:  # it is stopping already
            logging.warning("stopped by %s without waiting", _name(number))
            leave(128 + number)
        else:
            self._signal = number
            self._reasons.put(_name(number))
            self._begun.set()  # gives up a start

    # -- log lines -----------------------------------------------------------------------------------------------------

    def _complete(self, report: StopReport) -> bool:
        """Whether no result is missing. Logs each gap that was not logged when it happened."""
        snapshot, lost = self._runtime.snapshot(), self._coordinator.lost
        complete, missing = not self._faults and lost is None and report.clean, []
        for name, feed in snapshot.feeds.items():
            why = f": {feed.error.removeprefix(f'{feed.source}: ')}" if feed.error else ""
            if feed.mode == "live" and feed.state == "stopped" and not feed.frames:
                missing.append(f"{name}: never connected to {feed.source}{why}")
            failed = feed.drops.get("failed", 0)
            if failed and lost is None and (feed.mode == "file" or not feed.processed):
                missing.append(f"{name}: {failed} of {feed.frames} frames have no answer: {feed.error}")
            if feed.corrupt and feed.state == "ended":
                missing.append(f"{name}: {feed.source} is damaged: {undecoded(feed.corrupt)}")
            complete = complete and feed.state != "failed" and not feed.sink_errors
        for name, output in snapshot.outputs.items():
            if output.taken and not output.sent:
                why = f": {output.error}" if output.error else ""
                missing.append(f"{name}: none of {output.taken} results arrived at {output.where}{why}")
        for line in missing:
            logging.error("%s", line)
        return self._files.complete() and complete and not missing


@contextmanager
def _signals(numbers: Collection[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Inside, `handle(number)` is called for each of these signals, on a thread of its own: the main thread may wait in
    native code. The interpreter writes the numbers into a socket, whichever thread the kernel interrupts.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        with reader:
            while found := reader.recv(16):
                for number in filter(numbers.__contains__, found):
                    handle(number)

    _thread("reflex-feeds-signals", listen)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()


def _name(number: int) -> str:
    return signal.Signals(number).name


def _thread(name: str, main: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=main, name=name, daemon=True)
    thread.start()
    return thread
