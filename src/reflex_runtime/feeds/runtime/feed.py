"""A feed: one thread reads a source, another takes its frames through the batch point and the stages to the sinks.

    capture    source -> FrameQueue            of a live source never waits for a model
    pipeline   FrameQueue -> batch point -> stages -> sinks

What happens when frames come faster than answers depends on the source:

    live   the newest frame wins. A frame is dropped when it is older than `max_age` or the batch point refuses it.
           When a batch begins, a newer frame replaces the one that waited for it
    file   capture waits, a refused frame is submitted again, and no frame is lost
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    CutShort,
    Displaced,
    Drained,
    Expired,
    InFlightCapReached,
    QueueFull,
    ReflexError,
    Shed,
    Superseded,
    TooLate,
    WaitTimeout,
)
from reflex_runtime.feeds.runtime.health import (
    FeedConnected,
    FeedDisconnected,
    FeedEnded,
    FeedFailed,
    FeedSnapshot,
    FeedStageError,
    HealthEvent,
    Ledger,
)
from reflex_runtime.feeds.runtime.pipeline import (
    After,
    Frame,
    Picture,
    Pipeline,
    Result,
    Source,
    SourceClock,
    SourceError,
    Taking,
    name_of,
    turned,
)
from reflex_runtime.pacing import Throttle, doubled
from reflex_runtime.run.coordinator import BatchCoordinator, NewestFrame
from reflex_runtime.run.device import Clock
from reflex_runtime.run.modules import told
from reflex_runtime.run.processor import WALL, place_of
from reflex_runtime.settings.declare import option, validate

log = logging.getLogger("reflex.feeds")

Sink = Callable[[Result], Any]
Pause = Callable[[threading.Event, float], bool]  # waits for the event, so many seconds at most; True: it is set

LIVE, FILE = "live", "file"
RETRY_S, RETRY_MOST_S = 0.005, 0.100  # pauses before a file's frame is submitted again
OPEN_S, OPEN_MOST_S = 1.0, 30.0  # pauses before a lost source is opened again: doubled each time
JITTER = 0.2  # share by which these pauses vary, so that feeds do not reconnect together

_RETRIED = (QueueFull, Displaced, InFlightCapReached, WaitTimeout)  # for a file, which loses no frame
_GONE = (Closed, Drained, CutShort)
_REASONS: tuple[tuple[type[ReflexError] | tuple[type[ReflexError], ...], str], ...] = (
    ((QueueFull, Displaced), "queue_full"),
    (InFlightCapReached, "in_flight"),
    (WaitTimeout, "timeout"),
    ((Expired, Shed, Superseded, TooLate), "stale"),
    (_GONE, "closed"),
    (ReflexError, "failed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """How a feed treats its frames. Times in seconds.

    max_age: live: a frame older than this is dropped before it is computed; None: no limit.
    queue: most frames between the two threads; None: 1 for live, so that the newest wins, and 4 for file. With more
        than 1, the frame that waits for its batch is not replaced by a newer one.
    restarts: how often in all the source is opened again; None: no limit for live, 0 for file.
    retries: file: how often a frame is submitted again after a timeout; then it has failed.
    every, fps: one of so many pictures is taken, and of those at most so many a second (see `Taking`); fps 0 is no
        limit. The others count as `skipped`, and have numbers too.
    rotate: degrees by which pictures are turned clockwise; positions in results are pixels of the turned picture.
    """

    max_age: float | None = option(1.0, within=(0, 86_400, "seconds"), above=True)
    queue: int | None = option(None, within=(1, 4096))
    restarts: int | None = option(None, within=(0, 10**9))
    retries: int = option(10, within=(0, 10**9))
    every: int = option(1, within=(1, 1_000_000))
    fps: float = option(0.0, within=(0, 1000, "pictures a second"))
    rotate: int = 0

    def __post_init__(self) -> None:
        validate(self, "FeedConfig")
        if self.rotate not in (0, 90, 180, 270):
            raise ConfigError(f"FeedConfig.rotate={self.rotate!r}: must be 0, 90, 180 or 270 degrees")


class FrameQueue:
    """A queue of at most `capacity` frames. One thread puts, one takes, any thread closes.

    drop_oldest: `put` never waits: the oldest frame makes room. Else it waits for room.
    A frame is either returned by `get`, or handed back by `put` or `close`, so that every lost frame is counted.
    """

    def __init__(self, capacity: int, drop_oldest: bool) -> None:
        self._capacity, self._drop_oldest = capacity, drop_oldest
        self._frames: deque[Frame] = deque()
        lock = threading.Lock()
        self._filled, self._room = threading.Condition(lock), threading.Condition(lock)
        self.closed = False  # `put` takes no more frames; `get` still returns those left

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame) -> Frame | None:
        """Add a frame. Returns the one that is lost: the oldest of a full queue, this one if it is closed; or None."""
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
        """Wait up to `timeout` seconds for the oldest frame. None after that time, or when closed and empty."""
        with self._filled:
            self._filled.wait_for(lambda: self._frames or self.closed, timeout)
            if not self._frames:
                return None
            self._room.notify()
            return self._frames.popleft()

    def close(self, discard: bool = False) -> list[Frame]:
        """Take no more frames and wake both threads. discard: return the frames left in it; `get` then finds none."""
        with self._filled:
            self.closed = True
            left = list(self._frames) if discard else []
            if discard:
                self._frames.clear()
            self._filled.notify_all()
            self._room.notify_all()
            return left


class StageFailed(ReflexError):
    """A stage of a feed failed on a frame."""

    code = "stage_failed"


class _Dropped(Exception):
    """Raised when the frame is dropped. reason: one of `DROPS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CurrentFrame:
    """The frame that a feed works on. `newest` replaces it by a newer one when its batch begins.

    replaced: whether that happened. answer: the future of a file's frame that is at the batch point, else None.
    """

    def __init__(self, frame: Frame, feed: Feed) -> None:
        self.frame = frame
        self.replaced = False
        self.answer: Future[Any] | None = None
        self._feed = feed
        self._view: Any = None
        self._waits = True  # for its batch; afterwards it is not replaced
        self._guard = threading.Lock()  # of the replacement

    def part(self) -> Any:
        """The picture for the processor."""
        return self._feed.pipeline.part(self.frame.image)

    def view(self) -> Any:
        """What the processor's `prepare` makes of the picture, made once; None if the processor has no `prepare`."""
        if self._view is None:
            prepared = self.frame.prepared
            self._view = self._feed.pipeline.prepared(self.frame.image) if prepared is None else prepared
        return self._view

    def newest(self) -> NewestFrame:
        """Replace it by the frame in the queue, if there is one, and return the frame to compute.

        Called by the coordinator when the batch begins. Raises `Expired` if that is too old, or what `prepare` raises.
        """
        feed = self._feed
        with self._guard:
            newer = feed.queue.get(0.0) if self._waits else None
            self._waits = False
            if newer is not None:
                feed.ledger.overrun()
                self.frame, self.replaced, self._view = newer, True, None
        if self.frame.captured + feed.max_age <= feed.clock():
            raise Expired(f"older than max_age={feed.max_age:g} s when its batch began")
        return NewestFrame(self.part(), self.view(), self.frame.sequence, self.frame.pts)

    def leave(self) -> None:
        """Do not replace it any more, even if its batch begins later."""
        with self._guard:
            self._waits = False


def close_sink(sink: Sink) -> None:
    """Close a sink if it has `close`, which may raise."""
    if (close := getattr(sink, "close", None)) is not None:
        close()


class Feed:
    """One source, its pipeline and its sinks. `Runtime.feed` makes it; it also runs alone.

    sinks: called with each `Result`, in order, on the pipeline's thread. A sink that raises is counted and reported
        (`FeedStageError`), and gets the next result all the same. `release` closes them when the feed is over.
    emit: gets health events, from either thread, and must be quick. on_end: called once when the feed is over.
    clock, pause, seed: for tests; pause waits for an event, seed is that of the jitter.
    in_flight: frames at the batch point: at most one of a live source; of a file as many as the coordinator allows.

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
        self.config = config = config or FeedConfig()
        self.name, self.mode = name, LIVE if source.live else FILE
        self.sinks, self.pipeline, self.clock = tuple(sinks), pipeline or Pipeline(), clock
        self._live = live = self.mode == LIVE
        self.max_age = config.max_age if live and config.max_age is not None else inf
        self.queue, self.ledger = FrameQueue(config.queue or (1 if live else 4), drop_oldest=live), Ledger()
        self._source, self._pause = source, pause
        self._emit_to, self._release, self._on_end = emit, release, on_end
        self._stop = threading.Event()  # set: both threads end
        self._stopped = False  # `signal` was called
        self._failure: BaseException | None = None
        self._final: str | None = None
        self._finished = False
        self._released: list[Sink] = []
        self._guard = threading.Lock()  # of the start, the end, `_abandoned`, `_released` and `_busy_sink`
        self._threads: tuple[threading.Thread, ...] = ()
        # the capture's
        self._taking = Taking(config.every, config.fps)
        self._times = SourceClock(live)
        self._chance, self._losses = random.Random(name if seed is None else seed), 0  # losses since the last picture
        self._connection = "connecting"  # then running, reconnecting
        self._restarts = 0
        self._total: int | None = None
        # the pipeline's
        self._handle = self.pipeline.batch
        self._newest = live and (config.queue or 1) == 1
        self._most_ahead = 1 if live else getattr(self._handle, "most_ahead", 1)  # frames at the batch point
        self._replaced = False  # the last frame was replaced by a newer one
        self._lost: Exception | None = None  # why the coordinator gives no more answers
        self._throttle = Throttle()
        self._fault = ""  # the last error of a stage or sink
        self._abandoned = False  # `stop` gave up waiting for this thread: further results are discarded
        self._busy_sink: Sink | None = None  # the sink that works on a result
        self.in_flight = 0

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads. Does nothing once it was started or signalled."""
        with self._guard:
            if self._threads or self._stopped:
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
        """Begin to stop, and return at once: the source is interrupted, waiting frames are dropped, those at the batch
        point get their answers."""
        with self._guard:
            self._stopped = True
            started = bool(self._threads)
        self._halt()
        if not started:
            self._finish()

    def join(self, timeout: float = 5.0) -> bool:
        """Wait until both threads end, `timeout` seconds at most. Returns whether they did."""
        until = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not self.detached

    def stop(self, timeout: float = 5.0) -> bool:
        """`signal` and `join`; `abandon` if they did not end."""
        self.signal()
        ended = self.join(timeout)
        if not ended:
            self.abandon()
        return ended

    def abandon(self) -> None:
        """Close the sinks now; further results of its thread are discarded.

        A sink that works on a result is closed by the thread when it returns: here that could block.
        """
        with self._guard:
            self._abandoned = True
            inside = self._busy_sink
        self._release_sinks(but=inside)

    @property
    def detached(self) -> tuple[str, ...]:
        """The names of its threads that still run."""
        return tuple(thread.name for thread in self._threads if thread.is_alive())

    @property
    def over(self) -> bool:
        """Whether no more results will come."""
        return self._final is not None

    @property
    def state(self) -> str:
        """connecting, running, reconnecting; then ended, failed or stopped."""
        return self._final or self._connection

    def snapshot(self) -> FeedSnapshot:
        """Its figures now; those of frames are all of one moment."""
        return FeedSnapshot(
            name=self.name,
            mode=self.mode,
            source=self._source.name,
            state=self.state,
            in_flight=int(self.in_flight),
            restarts=self._restarts,
            total=self._total,
            corrupt=getattr(self._source, "corrupt", 0),  # optional in a source
            zones=self._counts("zone_counts"),
            lines=self._counts("line_counts"),
            **self.ledger.figures(self.clock()),
        )

    def _counts(self, kind: str) -> dict[str, Any]:
        """The counts of its stages, by name."""
        return {name: n for stage in self.pipeline.after for name, n in getattr(stage, kind, {}).items()}

    # -- the capture's thread: from the source to the queue ------------------------------------------------------------

    def _capture_main(self) -> None:
        error = self._error_of("capture", self._capture)
        self._failure = self._failure or error
        self.queue.close()  # the frames in it are still computed

    def _capture(self) -> Exception | None:
        """Open, read and close the source, and again when it was lost, which any exception means. Returns None at its
        end or at a stop, else the error after which it is not opened again."""
        most = self.config.restarts if self.config.restarts is not None else (inf if self._live else 0)
        while True:
            try:
                with WALL:
                    self._source.open()
                    self._read()
                return None
            except Exception as error:
                lost = error
            finally:
                self._close()
            if self._stop.is_set():
                return None
            connected, words = self._connection == "running", _words(lost)
            self.ledger.note(words)
            if self._restarts >= most or (isinstance(lost, SourceError) and not lost.retryable):
                if connected:
                    self._emit(FeedDisconnected(self.clock(), self.name, error=words))
                return lost
            pause = doubled(OPEN_S, OPEN_MOST_S, self._losses) * self._chance.uniform(1.0 - JITTER, 1.0 + JITTER)
            self._connection, self._losses = "reconnecting", self._losses + 1
            self._emit(FeedDisconnected(self.clock(), self.name, error=words, retry_in=pause))
            self._pause(self._stop, pause)
            self._restarts += 1

    def _read(self) -> None:
        """Take pictures until the source ends or the feed stops."""
        if self._stop.is_set():
            return
        self._total, self._connection = self._source.total, "running"
        self._emit(FeedConnected(self.clock(), self.name))
        while (picture := self._source.read()) is not None:
            self._take(picture)
            if self._stop.is_set():
                return

    def _take(self, picture: Picture) -> None:
        """Put a picture into the queue, turned, with its time and number; leave out those beyond `every` and `fps`."""
        (image, pts), config, ledger = picture, self.config, self.ledger
        now, paced = self.clock(), getattr(self._source, "paced", False)  # a video over HTTP knows it once it is open
        self._times.live = self._live and not paced
        pts = self._times.time(pts, now, getattr(self._source, "step", None))
        if paced:
            if self._pause(self._stop, self._times.ahead(now)):
                return
            now = self.clock()
        self._losses = 0
        if pts is None and config.fps and ledger.read_so_far == 0:
            log.warning("%s: fps has no effect: its pictures have neither times nor a rate; use every", self.name)
        if not self._taking.takes(pts):
            ledger.passed_over()
            return
        image, prepared = turned(image, config.rotate), None
        if not self._live:  # beside the computation of earlier frames; many pictures of a camera may be dropped
            with suppress(Exception), WALL:  # the pipeline's thread prepares it again, and counts the failure
                prepared = self.pipeline.prepared(image)
        frame = Frame(image, ledger.read_so_far, pts, now, prepared, getattr(self._source, "file", ""))
        ledger.read(frame)
        left_out = self.queue.put(frame)
        if left_out is not None:
            ledger.drop("stopped") if left_out is frame else ledger.overrun()

    def _close(self) -> None:
        try:
            self._source.close()
        except Exception:
            log.exception("%s: the source could not be closed", self.name)

    # -- the pipeline's thread: from the queue to the sinks ------------------------------------------------------------

    def _consume_main(self) -> None:
        if (error := self._error_of("pipeline", self._consume)) is not None:
            self._fail(error)
        self._finish()

    def _consume(self) -> Exception | None:
        """Take each frame from the queue to its end. Returns None after the last one, or why the feed cannot go on."""
        ahead: deque[CurrentFrame] = deque()  # at most `_most_ahead`, in order
        try:
            while self._lost is None or ahead:
                room = self._lost is None and len(ahead) < self._most_ahead
                frame = self.queue.get(0.0 if ahead else None) if room else None
                if frame is not None:
                    ahead.append(self._submitted(frame))
                elif ahead:
                    self._settle(ahead.popleft())
                else:  # the queue is closed and empty
                    break
            return self._lost
        finally:
            for current in ahead:  # the thread died on an earlier frame
                if current.answer is not None:
                    current.answer.cancel()
                    self.in_flight -= 1
            self.ledger.drop("stopped", len(ahead))
            self._report(self._throttle.flush(self.clock()))

    def _submitted(self, frame: Frame) -> CurrentFrame:
        """The current frame. A file's frame is submitted here already, so that several wait at the batch point; if that
        fails, `_settle` tries again, and counts it."""
        current = CurrentFrame(frame, self)
        if self._most_ahead > 1 and self._handle is not None:
            try:
                with suppress(Exception):
                    number, pts = frame.sequence, frame.pts
                    part, view = current.part(), current.view()
                    current.answer = self._handle.submit(self.name, part, view, sequence=number, pts=pts)
                    self.in_flight += 1
            except BaseException:
                self.ledger.drop("failed")
                raise
        return current

    def _settle(self, current: CurrentFrame) -> None:
        """Take a frame to its end: get its answer, call the stages and the sinks; or drop it."""
        pipeline = self.pipeline
        dropped: str | None = "failed"  # also if the thread dies on it
        try:
            value = None
            if self._handle is not None:
                value = pipeline.placed(self._answer(self._handle, current))
            else:
                self._time_left(current)
            if self._abandoned:
                raise _Dropped("stopped")
            answered = self.clock()
            result: Result | None = Result(current.frame, self.name, value, answered - current.frame.captured)
            for after in pipeline.after:
                if result is not None:
                    result = self._staged(after, result)
            dropped = None
            self.ledger.answered(current.frame, answered)
            if (result is None or self._deliver(result)) and self._throttle.held:
                self._report(self._throttle.recover(self.clock()))
        except _Dropped as out:
            dropped = out.reason
        except Exception as error:
            self._failed(error)
        finally:
            if dropped is not None:
                self.ledger.drop(dropped)

    def _staged(self, stage: After, result: Result) -> Result | None:
        """What a stage makes of a result. Counts the stage's time and failures; an error names it."""
        name = name_of(stage)
        try:
            with self.ledger.stage(name, self.clock), WALL:
                made = stage(result)
                if made is not None and not isinstance(made, Result):
                    raise TypeError(f"returned {type(made).__name__}, must return a Result or None")
                return made
        except Exception as error:
            fault = StageFailed(f"stage {name}: {type(error).__name__}: {error}")
            fault.place = place_of(error)
            raise fault from error

    def _time_left(self, current: CurrentFrame) -> float | None:
        """Seconds until the frame is too old, None without a limit. Raises _Dropped if it is already."""
        if self.max_age == inf:
            return None
        left = current.frame.captured + self.max_age - self.clock()
        if left <= 0.0:
            raise _Dropped("stale")
        return left

    def _answer(self, handle: BatchCoordinator, current: CurrentFrame) -> Any:
        """The processor's answer, or _Dropped is raised. A file's frame is submitted again if it is refused or late."""
        image = view = None
        limit = self._time_left(current)
        if not self._newest:
            image, view = current.part(), current.view()
        elif not self._replaced:  # if the last frame was replaced, this one probably will be: then do not prepare it
            current.view()
        pause, timeouts = RETRY_S, 0
        while True:
            self.in_flight += current.answer is None
            try:
                if current.answer is not None:
                    return _result_of(current.answer, handle.patience)
                return handle.submit_and_wait(
                    self.name,
                    image,
                    view,
                    sequence=current.frame.sequence,
                    pts=current.frame.pts,
                    time_limit=None if self._newest else limit,
                    newest=current.newest if self._newest else None,
                )
            except ReflexError as error:
                self.ledger.note(str(error))
                if not self._stop.is_set() and (handle.lost is not None or isinstance(error, _GONE)):
                    self._lost = handle.lost or error  # ends the feed; the coordinator's `Health` reports it
                timeouts += isinstance(error, WaitTimeout)
                if self._live or not isinstance(error, _RETRIED):
                    raise _Dropped(next(reason for kind, reason in _REASONS if isinstance(error, kind))) from error
                if timeouts > self.config.retries:
                    self._failed(error)
                    raise _Dropped("failed") from error
            finally:
                self.in_flight -= 1
                current.leave()
                self._replaced, current.answer = current.replaced, None
            if self._pause(self._stop, pause):
                raise _Dropped("stopped")
            pause = min(RETRY_MOST_S, 2.0 * pause)

    def _deliver(self, result: Result) -> bool:
        """Call every sink, even after one failed, until the thread is abandoned. Returns whether all took it."""
        failed = False
        for sink in self.sinks:
            with self._guard:
                if self._abandoned:  # its sinks may be closed
                    return False
                self._busy_sink = sink
            try:
                with WALL:
                    sink(result)
            except Exception as error:
                failed = True
                self.ledger.sink_failed()
                self._failed(error)
            finally:
                self._busy_sink = None
        return not failed

    def _failed(self, error: Exception) -> None:
        """Report a failed frame: the first at once, then at most once a second with the count."""
        if not self._throttle.held:
            log.debug("%s: a stage or sink failed", self.name, exc_info=error)
        self._fault = error.logged() if isinstance(error, ReflexError) else told(error)
        self.ledger.note(self._fault)
        self._report(self._throttle.count(self.clock()))

    def _report(self, count: int) -> None:
        if count:
            self._emit(FeedStageError(self.clock(), self.name, count, error=self._fault))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _error_of(self, part: str, run: Callable[[], Exception | None]) -> BaseException | None:
        """What ended a thread too early; None if it ended in order."""
        try:
            return run()
        except BaseException as died:
            log.exception("%s: the %s thread died", self.name, part)
            return died

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._halt()

    def _halt(self) -> None:
        """Wake both threads, so that they end."""
        self._stop.set()
        self.ledger.drop("stopped", len(self.queue.close(discard=True)))
        try:
            self._source.interrupt()
        except Exception:
            log.exception("%s: the source could not be interrupted", self.name)

    def _finish(self) -> None:
        """End the feed, once: release its sinks, emit its last event, call `on_end`."""
        with self._guard:
            if self._finished:
                return
            self._finished = True
        self._release_sinks()
        failure, now = self._failure, self.clock()
        if failure is not None:
            self.ledger.note(_words(failure))
        self._final = "failed" if failure is not None else "stopped" if self._stopped else "ended"
        if failure is not None:
            self._emit(FeedFailed(now, self.name, error=_words(failure)))
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
                words = f"a sink could not be closed: {_words(error)}"
                self.ledger.note(words)
                self._emit(FeedStageError(self.clock(), self.name, error=words))

    def _emit(self, event: HealthEvent) -> None:
        try:
            self._emit_to(event)
        except Exception:
            log.exception("%s: the receiver of events failed", self.name)


def _words(error: BaseException) -> str:
    """The message of an error, with its class where the message may mean little alone."""
    return str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"


def _result_of(answer: Future[Any], patience: float) -> Any:
    """The answer of a submitted frame. Raises `WaitTimeout` after `patience` seconds."""
    try:
        return answer.result(patience)
    except TimeoutError:
        answer.cancel()
        raise WaitTimeout(f"no answer within {patience:g} s") from None
