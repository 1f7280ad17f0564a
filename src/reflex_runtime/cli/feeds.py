"""`reflex feeds NAME=SOURCE …`: many cameras and videos on one processor, watched in the terminal."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from reflex_runtime.config import FeedsConfig
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.options import add_options, check_needs, one_line
from reflex_runtime.sources import environment, read

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from reflex_runtime.cli.feeds_output import Board
    from reflex_runtime.drivers.batch_processor import BatchConfig, BatchProcessor
    from reflex_runtime.drivers.coordinator import BatchCoordinator
    from reflex_runtime.feeds.cascade import SecondModel
    from reflex_runtime.feeds.fleet import FeedFleet
    from reflex_runtime.feeds.onnx import OnnxFrames
    from reflex_runtime.feeds.opening import SourceMaker
    from reflex_runtime.feeds.outputs.output import AnyOutput
    from reflex_runtime.feeds.outputs.parquet import ParquetResults
    from reflex_runtime.feeds.pictures import FeedPictures
    from reflex_runtime.feeds.runtime import Runtime, StopReport
    from reflex_runtime.feeds.sinks import JsonLines
    from reflex_runtime.feeds.source import Source
    from reflex_runtime.feeds.spec import FeedSpec
    from reflex_runtime.telemetry.journal_writer import JournalWriter

_EPILOG = """\
sources:
  video.mp4                          a file: every frame is answered, none is dropped
  rtsp://user:secret@camera/stream   a camera: the newest frame wins; also rtsps, http, https and /dev/video0
  pictures/                          a directory: each picture once, results name the file
  shapes:seed=3,fps=15               moving shapes, for trying it out; markers:feed=1,fps=15; chaos:seed=7

examples:
  reflex feeds a=shapes:seed=1 b=shapes:seed=2 --onnx shapes --annotate out      the bundled detector, no camera needed
  reflex feeds yard=rtsp://10.0.0.7/live --onnx yolo11n.onnx --classes person,car --results found.jsonl
  reflex feeds door=door.mp4 yard=rtsp://10.0.0.7/live --processor mypkg:Detector --results found.jsonl
  reflex feeds door=rtsp://10.0.0.7/live door.roi=0,200,1280,520 yard=yard.mp4 --fps 5 --onnx yolo11n.onnx
  reflex feeds --config cameras.toml --port 9000                     http://127.0.0.1:9000/feeds shows and changes them
  reflex feeds yard=rtsp://10.0.0.7/live --onnx yolo11n.onnx --then makes.onnx --then-classes car

cameras.toml:
  [feeds]
  onnx = "detector.onnx"
  max_batch_size = 8
  [[feed]]
  name = "door"
  source = "rtsp://10.0.0.7/live"
  max_age_ms = 300             # also per feed: realtime, loop, restarts, read_timeout_s, every, fps,
                               # rotate, roi, hwaccel

Every option also stands in the file's table [feeds] and in the environment (REFLEX_MAX_BATCH_SIZE=8).
Ctrl-C stops in order: what is in the processor is still answered and written. A second one does not wait.
Exit status: 0 when every feed came to its end or was stopped by you; 1 when something is missing: a feed was given up
or never connected, the processor was lost, a file is damaged or has frames without an answer, or results could not be
written; 2 for a wrong option or a processor that does not start; 130 for a second Ctrl-C, or one during the start. See
docs/feeds.md.
"""

_LOST, _READER_GONE, _WAKE = "lost", "reader gone", ""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "feeds",
        anywhere="feeds",
        description="Run many cameras and videos on one processor: their frames share its calls, and results go "
        "back to the right feed in order.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "feeds",
        nargs="*",
        metavar="NAME=SOURCE",
        help="a feed: its name and its source, such as a file, rtsp://… or /dev/video0; NAME.SETTING=VALUE, such as "
        "door.fps=5, sets for one feed alone what the file may set per feed",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file: table [feeds], tables [[feed]]")
    add_options(parser, FeedsConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, start, watch, stop, sum up."""
    from reflex_runtime.cli.feeds_output import check_outputs
    from reflex_runtime.feeds.outputs.opening import outputs_of
    from reflex_runtime.feeds.spec import source_of_spec, specs_of

    config, places = read(FeedsConfig, "feeds", args.config, environment(), vars(args), ("feed",))
    specs = specs_of(args.feeds, args.config, config)
    sources = {spec.name: source_of_spec(spec, _schemes()) for spec in specs}
    check_needs(config, places, _missing(specs, sources))
    check_outputs(config, specs, args.config)
    outputs = outputs_of(config)
    if config.add_files and not Path(config.add_files).is_dir():
        raise ConfigError(f"--add-files={one_line(config.add_files)}: no such folder")
    if config.otel:
        from reflex_runtime.telemetry.tracing import check_otel

        check_otel(config.otel)
    output = sys.stdout
    if config.table and config.results == "-" and output.isatty() and sys.stderr.isatty():
        raise ConfigError("--table with --results=-: both would write to this terminal; send one of them to a file")
    with redirect_stdout(sys.stderr if config.results == "-" else output):  # what a processor prints is no result
        return _Session(config, specs, sources, _processor(config), output, outputs).run()


class _Session:
    """One run, from the start of the processor to the last word."""

    def __init__(
        self,
        config: FeedsConfig,
        specs: Sequence[FeedSpec],
        sources: Mapping[str, Source],
        processor: BatchProcessor,
        output: Any,
        outputs: Sequence[AnyOutput] = (),
    ) -> None:
        from reflex_runtime.cli.feeds_output import Board
        from reflex_runtime.feeds.runtime import Runtime

        self._config = config
        self._specs = specs
        self._sources = sources
        self._processor = processor
        self._output = output
        self._batching = _batching(config, len(specs))
        self._then = _then(config, processor, self._batching.capacity) if config.then else None
        self._runtime: Runtime = Runtime()
        self._outputs = [self._runtime.output(each) for each in outputs]
        on_screen = config.results == "-" and output.isatty()  # then there is no room for a table
        self._board: Board = Board(self._runtime, False if on_screen and config.table is None else config.table)
        self._results: JsonLines | ParquetResults | None = None
        self._trace: JournalWriter | None = None
        self._registry: CollectorRegistry | None = None
        self._news: SimpleQueue[str] = SimpleQueue()  # why to stop; the one queue that a signal handler may put into
        self._started = threading.Event()
        self._waiting = False  # the main thread looks at the news
        self._signal = 0
        self._hurried = False  # by a second signal
        self._events = self._runtime.events()
        self._faults = False  # a stage or a sink failed
        self._annotated: set[str] = set()  # feeds that have a video

    def run(self) -> int:
        """Returns the exit status."""
        from reflex_runtime.cli.feeds_output import Signals

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
        self._say_what_was_written()
        return (0 if complete or why == _READER_GONE else 1), not report.detached

    # -- building ------------------------------------------------------------------------------------------------------

    def _coordinator(self, closing: ExitStack) -> BatchCoordinator:
        from reflex_runtime.telemetry.journal_writer import JournalWriter
        from reflex_runtime.telemetry.one_group import OneGroup

        sinks: list[Callable[[Any], None]] = []
        if self._config.trace:
            groups = [self._batching.group(self._processor.id)]
            if self._then is not None:
                groups.append(self._then.config.group(self._then.processor.id))
            self._trace = JournalWriter(self._config.trace, groups)
            closing.callback(self._trace.close)
            sinks.append(self._trace)
        if self._config.otel:
            from reflex_runtime.telemetry.tracing import FrameSpans, spans_of

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
        from reflex_runtime.feeds.fleet import FeedFleet
        from reflex_runtime.feeds.replaceable import ReplaceableDetector

        self._results = self._lines()
        detector = self._processor if isinstance(self._processor, ReplaceableDetector) else None
        sinks = partial(self._sinks_of, pictures)
        return FeedFleet(self._runtime, coordinator, detector, self._config, sinks, _onnx, _schemes(), self._look)

    def _sinks_of(self, pictures: FeedPictures | None, spec: FeedSpec) -> list[Callable[[Any], None]]:
        from reflex_runtime.cli.feeds_output import annotated
        from reflex_runtime.feeds.sinks import AnnotatedVideo

        sinks: list[Callable[[Any], None]] = [] if self._results is None else [self._results]
        sinks += [each.take for each in self._outputs]
        if pictures is not None:
            sinks.append(pictures.take)
        if self._config.annotate:
            sinks.append(AnnotatedVideo(annotated(self._config, spec.name)))
            self._annotated.add(spec.name)
        return sinks

    def _lines(self) -> JsonLines | ParquetResults | None:
        from reflex_runtime.cli.feeds_output import ResultStream, is_parquet
        from reflex_runtime.feeds.sinks import JsonLines

        if not self._config.results:
            return None
        if self._config.results == "-":
            return JsonLines(ResultStream(self._output, lambda: self._news.put(_READER_GONE)))  # type: ignore[arg-type]
        if is_parquet(self._config.results):
            from reflex_runtime.feeds.outputs.parquet import ParquetResults

            return ParquetResults(self._config.results)
        return JsonLines(self._config.results)

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
            raise _refused(self._config, errors[0]) if isinstance(errors[0], ProcessorError) else errors[0]
        if self._results is not None:
            self._results.begin()  # not before: what does not start leaves the results of the run before

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
        from reflex_runtime.telemetry.health import FeedEnded, FeedFailed, FeedStageError, StageError

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
        from reflex_runtime.feeds.words import undecoded

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
        if self._results is not None and self._results.lost:
            logging.error("--results=%s: %d results are not in it", self._config.results, self._results.lost)
            self._results = None
        if self._trace is not None and (self._trace.error is not None or self._trace.dropped):
            why = f": {self._trace.error.strerror}" if self._trace.error is not None else ""
            logging.error("--trace=%s: %d lines are not in it%s", self._config.trace, self._trace.dropped, why)
            self._trace, complete = None, False
        return complete

    def _say_what_was_written(self) -> None:
        from reflex_runtime.cli.feeds_output import annotated

        config = self._config
        videos = [annotated(config, name) for name in sorted(self._annotated)]
        made = [str(path) for path in videos if path.is_file()]
        written = [
            f"results: {config.results}" if self._results is not None and config.results != "-" else "",
            f"videos: {', '.join(made) if len(made) <= 4 else f'{len(made)} in {config.annotate}'}" if made else "",
            f"trace: {config.trace} (reflex trace {config.trace})" if self._trace is not None else "",
        ]
        if any(written):
            logging.info("wrote %s", "; ".join(filter(None, written)))


def _leave(status: int) -> NoReturn:
    """Out, without waiting for threads that may never end."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


# -- what was asked for ------------------------------------------------------------------------------------------------


def _schemes() -> dict[str, SourceMaker]:
    """Sources that draw their own pictures."""
    from reflex_runtime.demo.markers import markers_source
    from reflex_runtime.demo.shapes import shapes_source

    return {"shapes": shapes_source, "markers": markers_source}


def _missing(specs: Sequence[FeedSpec], sources: Mapping[str, Source]) -> dict[str, str]:
    """The facts that settings need and that do not hold; see `check_needs`."""
    found = {
        "a file": any(spec.file is not None and not spec.folder for spec in specs),
        "a video": any(spec.video for spec in specs),
        "a live feed": any(source.live for source in sources.values()),
        "a camera": any(spec.file is None for spec in specs),
    }
    if not specs:  # they are added later
        return {}
    return {fact: "no feed is one" for fact, holds in found.items() if not holds}


def _processor(config: FeedsConfig) -> BatchProcessor:
    """The processor that --processor or --onnx names."""
    from reflex_runtime.feeds.opening import processor_of

    if config.processor and config.onnx:
        raise ConfigError("--processor and --onnx: give one of them, not both")
    if not config.processor and not config.onnx:
        raise ConfigError(
            "no processor: give --processor MODULE:NAME or --onnx FILE (--onnx shapes is the bundled one)"
        )
    if config.processor:
        return processor_of(config.processor)
    from reflex_runtime.feeds.replaceable import ReplaceableDetector

    return ReplaceableDetector(_onnx(config), config.then_classes)


def _then(config: FeedsConfig, detector: BatchProcessor, frames: int) -> SecondModel:
    """The second model. frames: most that wait for the first one."""
    from reflex_runtime.drivers.batch_processor import BatchConfig
    from reflex_runtime.feeds.cascade import SecondModel
    from reflex_runtime.feeds.replaceable import ReplaceableDetector

    size = config.then_batch_size
    batching = BatchConfig(
        max_batch_size=size,
        max_latency=0.0,  # the boxes of a batch of frames come together
        queue_capacity=max(size, frames * config.then_most),
        max_in_flight_per_feed=0,
    )

    given = {*config.then_classes, *(int(name) for name in config.then_classes if name.isdecimal())}

    def labels(value: Any) -> Collection[Any] | None:
        if not config.then_classes:
            return None
        return detector.labels(value) if isinstance(detector, ReplaceableDetector) else given

    plain = replace(config, size="", resize="auto", names="", score=None, iou=None, classes=(), max_detections=0)
    model = _onnx(replace(plain, onnx=config.then), "--then", "then")
    return SecondModel(model, batching, labels, config.then_most)


def _refused(config: FeedsConfig, error: Exception) -> ConfigError:
    """Why the processor cannot be used, in the words of the command line."""
    from reflex_runtime.feeds.words import in_one_line, told

    named = f"--processor={one_line(config.processor)}" if config.processor else f"--onnx={one_line(config.onnx)}"
    cause = error.__cause__
    words = in_one_line(getattr(cause if isinstance(cause, ConfigError) else error, "message", str(error)))
    if config.then and isinstance(cause, ConfigError) and words.startswith(f"{config.then}: "):
        return ConfigError(f"--then={one_line(words)}")
    if cause is not None and not isinstance(cause, ConfigError):
        words = f"on_start failed: {told(cause)}"
    return ConfigError(f"{named}: {words.removeprefix(config.onnx + ': ')}")


def _onnx(config: FeedsConfig, flag: str = "--onnx", id: str = "onnx") -> OnnxFrames:
    from reflex_runtime.demo.shapes import DETECTOR
    from reflex_runtime.feeds.onnx import OnnxFrames
    from reflex_runtime.processors.onnx import PROVIDERS, check_provider

    path = DETECTOR if config.onnx == "shapes" else Path(config.onnx)
    if not path.is_file():
        raise ConfigError(f"{flag}={one_line(config.onnx)}: no such file (shapes is the bundled detector)")
    provider = PROVIDERS.get(config.provider, config.provider)
    try:
        check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    return OnnxFrames(
        path,
        id,
        provider=provider,
        threads=config.threads,
        score=config.score,
        iou=config.iou,
        max_detections=config.max_detections or None,
        classes=[name.strip() for name in config.classes],
        size=_size(config.size) if config.size else None,
        resize=None if config.resize == "auto" else config.resize,
        names=_names(config.names) if config.names else None,
    )


def _size(text: str) -> tuple[int, int]:
    """Width and height from 640 or 640x384."""
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text.strip())
    if found is None or not all(1 <= int(side) <= 16_384 for side in found.groups(found[1])):
        raise ConfigError(f"--size={one_line(text)}: must be pixels of a side, such as 640, or WIDTHxHEIGHT")
    return int(found[1]), int(found[2] or found[1])


def _names(file: str) -> dict[int, str]:
    from reflex_runtime.feeds.detectors.facts import names_of_file

    try:
        return names_of_file(Path(file))
    except ConfigError as error:
        raise ConfigError(f"--names={one_line(file)}: {error.message}") from None


def _batching(config: FeedsConfig, feeds: int) -> BatchConfig:
    from reflex_runtime.drivers.batch_processor import BatchConfig
    from reflex_runtime.feeds.fleet import MOST

    size, capacity = config.max_batch_size, config.queue_capacity
    if 0 < capacity < size:
        raise ConfigError(f"--queue-capacity={capacity}: must be at least --max-batch-size={size}, or 0")
    return BatchConfig(
        max_batch_size=size,
        max_latency=config.max_latency_ms / 1e3,
        queue_capacity=capacity or max(4 * size, feeds if config.port < 0 else MOST),
        response_timeout=config.response_timeout_s,
        startup_timeout=config.startup_timeout_s,
        watchdog=config.watchdog_s,
    )
