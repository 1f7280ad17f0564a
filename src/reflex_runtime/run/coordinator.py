"""The driver of feeds: threads submit frames, one thread forms batches over them and runs a processor it owns alone.

    class Detector:
        id = "detector"
        def on_start(self): ...
        def process(self, entries): ...        # one result per entry
        def on_stop(self): ...

    with BatchCoordinator(Detector(), BatchConfig(max_batch_size=8, max_latency=0.02)) as coordinator:
        boxes = coordinator.submit_and_wait("cam1", frame)   # from any thread; shares a call with other feeds

A submission without room is refused at once: the frame is dropped and the feed goes on. An admitted frame is answered
exactly once, whatever the processor does. A feed is a client of the scheduler: its frames are first in, first out;
feeds have fair shares, and each has at most `max_in_flight_per_feed` frames in the system.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from math import inf
from statistics import median
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from reflex_runtime.core.batch import Batch, DeviceLost, Done, Failed
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    InFlightCapReached,
    ProcessorError,
    QueueFull,
    ReflexError,
    Rejected,
    ResultCountMismatch,
)
from reflex_runtime.core.flush import Affine, Controller, FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.batch_metrics import BatchMeter, BatchMetrics
from reflex_runtime.run.audience import Sink
from reflex_runtime.run.device import Clock
from reflex_runtime.run.processor import WALL, BaseProcessor, checked_results, reflex_error, wrapped
from reflex_runtime.run.thread_driver import ThreadDriver
from reflex_runtime.settings.declare import option, validate

log = logging.getLogger("reflex.coordinator")

KNOWN_FEEDS: Final = 4096  # feeds whose frames are numbered here; beyond it the oldest is forgotten
GRACE: Final = 2.0  # further seconds for a thread that is late to start, before it is abandoned

# By the identity of the processor: a second coordinator would call it on a second thread.
_owners: weakref.WeakValueDictionary[int, BatchCoordinator] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How a coordinator batches. All times in seconds.

    max_batch_size: most frames in a call; only one where single calls are faster and the processor never rests.
    max_latency: longest wait of a frame for a free processor, from its arrival or from when the processor became free,
        whichever is later. It waits only for feeds whose next frame is due within that time, and only if sharing the
        call saves more than waiting costs.
    queue_capacity: most waiting frames, by default four batches; beyond it a submission is refused.
    response_timeout: longest wait of `submit_and_wait`, in addition to max_latency.
    max_in_flight_per_feed: most frames of a feed from submission to answer; 0 for no cap.
    startup_timeout: of `on_start`. watchdog: of one batch; then its feeds are released. 0 switches it off.
    """

    max_batch_size: int = option(4, within=(1, 4096))
    max_latency: float = option(0.050, within=(0, 60, "seconds"))
    queue_capacity: int | None = option(None, within=(1, 1_000_000))
    response_timeout: float = option(5.0, within=(0, 3600, "seconds"), above=True)
    max_in_flight_per_feed: int = option(1, within=(0, 1_000_000))
    startup_timeout: float = option(30.0, within=(0, 3600, "seconds"), above=True)
    watchdog: float = option(60.0, within=(0, 3600, "seconds"))

    def __post_init__(self) -> None:
        validate(self, "BatchConfig")
        if self.queue_capacity is not None and self.queue_capacity < self.max_batch_size:
            raise ConfigError(
                f"BatchConfig.queue_capacity={self.queue_capacity}: must be >= max_batch_size, which is "
                f"{self.max_batch_size}"
            )

    @property
    def capacity(self) -> int:
        """The queue's capacity in force."""
        return max(4, 4 * self.max_batch_size) if self.queue_capacity is None else self.queue_capacity

    def group(self, name: str, sizes: Controller | None = None) -> GroupConfig:
        """The same settings for the scheduler. sizes: decides how large batches are, up to max_batch_size."""
        return GroupConfig(
            name=name,
            controller=sizes,
            flush=FlushPolicy(max_batch_size=self.max_batch_size, returns=self.max_latency),
            capacity=self.capacity,
            max_in_flight_per_client=self.max_in_flight_per_feed,
            share_room=True,
            cost=UnitCost,
        )


class NewestFrame(NamedTuple):
    """A newer frame, computed in place of one that waited."""

    frame: Any
    view: Any
    sequence: int
    pts: float | None


@dataclass(slots=True, eq=False)
class BatchEntry:
    """One frame, as a feed submits it and the processor gets it.

    view: any object that the feed sent with it. sequence: the frame's number in its feed. pts: its time in its stream,
    in seconds, or None. arrived: monotonic seconds of its submission. newest: see `BatchCoordinator.submit_and_wait`.
    """

    feed_id: str
    frame: Any
    view: Any = None
    sequence: int = 0
    pts: float | None = None
    arrived: float = 0.0
    newest: Callable[[], NewestFrame] | None = None
    fault: Exception | None = None  # what that raised

    def begin(self, arrived: float) -> None:
        """Take the newest frame, once, when its batch begins. Raises what `newest` raised, also when the call is
        repeated."""
        self.arrived = arrived
        if self.newest is not None:
            newest, self.newest = self.newest, None
            try:
                with WALL:
                    self.frame, self.view, self.sequence, self.pts = newest()
            except Exception as error:
                self.fault = error
        if self.fault is not None:
            raise self.fault


class BatchProcessor(Protocol):
    """The processor of a coordinator, called on one thread only. id: its name in metrics and events. It may have:

    on_start(): called once before the first batch, to load the model. `start` raises its exception.
    on_stop(): called once after the last batch, if `on_start` succeeded and the thread did not die.
    repeatable: False if a call that raised may not be repeated with fewer entries; then the whole batch fails.
    batch_size: how many entries a call computes, whatever it gets; batches are then no larger. None: any number. It is
        read after `on_start` and may change.
    prepare(frame): makes an entry's `view`, unless the feed makes its own. Feeds call it on their own threads, several
        at once; the thread of `process` calls it only for a frame that it takes when the batch begins.
    """

    id: str

    def process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        """One result per entry, in order. An exception instance fails that entry alone; None counts as missing."""


# -- what runs frames --------------------------------------------------------------------------------------------------


KEPT: Final = 15  # newest calls of each kind whose median is compared
LEAST: Final = 3  # calls of a kind before it is compared, and in a trial
FORMING: Final = 0.0003  # seconds to form a batch and to answer it, which a call of several frames needs once
FIRST: Final = 16  # calls until the other kind is tried; eight times as many each time that this changes nothing
LAST: Final = 4096
RESTED: Final = 0.001  # seconds between calls, beside a twentieth of the second one, of a processor that never rests


class PayingSize:
    """A controller for one processor: full batches, or batches of one frame. On a CPU a call of several frames often
    takes longer than as many calls of one; alone more frames are answered, and each sooner.

    It compares the times of calls. While the processor never rests, the other kind is tried now and then, with `LEAST`
    calls. `ran` is called by the thread that runs the batches, everything else on any thread.
    name: of the processor, for the log. at_once: how many frames a call computes, whatever it gets; None: any.
    """

    def __init__(self, name: str, at_once: Callable[[], int | None]) -> None:
        self._name, self._at_once = name, at_once
        self._alone = self._trying = False
        self._times: dict[bool, deque[float]] = {alone: deque(maxlen=KEPT) for alone in (True, False)}
        self._calls, self._pause, self._ended = 0, FIRST, -inf

    @property
    def alone(self) -> bool:
        """Whether the next batch has one frame only."""
        return self._alone != self._trying

    def arrived(self, ticket: Ticket, now: float) -> None:
        return

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        size = 1 if self.alone else min(self._at_once() or base.max_batch_size, base.max_batch_size)
        return base if size == base.max_batch_size else _limited(base, size)

    def ran(self, frames: int, began: float, ended: float) -> None:
        """A call came back with results. began, ended: seconds of one clock."""
        seconds, rested, self._ended = ended - began, began - self._ended, ended
        self._times[frames == 1].append(seconds / frames)
        if self._trying:
            if len(self._times[not self._alone]) >= LEAST:
                self._compare()
            return
        self._calls += rested <= RESTED + 0.05 * seconds  # otherwise it is fast enough as it is
        if self._calls >= self._pause and len(self._times[self._alone]) >= LEAST:
            self._times[not self._alone].clear()
            self._trying = True

    def _compare(self) -> None:
        """Choose the faster kind after a trial."""
        one, several = (median(self._times[alone]) for alone in (True, False))
        alone = one + FORMING <= several
        changed, self._alone, self._trying, self._calls = alone != self._alone, alone, False, 0
        self._pause = FIRST if changed else min(LAST, 8 * self._pause)
        if changed:
            what = "frames run alone" if alone else "frames share calls"
            times = f"a call of one frame takes {1e3 * one:.1f} ms, of several {1e3 * several:.1f} ms a frame"
            log.info("%s: %s: %s from now on", self._name, times, what)


@lru_cache(maxsize=64)
def _limited(policy: FlushPolicy, size: int) -> FlushPolicy:
    return replace(policy, max_batch_size=size)


class Owned(BaseProcessor):
    """Adapts a user's `BatchProcessor` to `Processor`. sizes: learns from the time of its calls."""

    def __init__(self, processor: BatchProcessor, clock: Callable[[], float] = time.monotonic) -> None:
        self.processor, self._clock = processor, clock
        self.sizes = PayingSize(str(processor.id), lambda: getattr(processor, "batch_size", None))
        self.repeatable = bool(getattr(processor, "repeatable", True))
        self.started = False
        self.stop_error: BaseException | None = None
        self.before_run: Callable[[], None] | None = None

    def run(self, batch: Batch) -> Sequence[Any]:
        if self.before_run is not None:
            self.before_run()
        entries: list[BatchEntry] = []
        faults: dict[int, Failed] = {}  # by place: of frames that were not there in the end
        for place, ticket in enumerate(batch.grants):
            try:
                ticket.request.payload.begin(ticket.arrived)
                entries.append(ticket.request.payload)
            except Exception as error:
                error.__traceback__ = None  # it holds this call, and with it the frames of the batch
                faults[place] = Failed(reflex_error(error))
        results = self._process(entries) if entries else []
        if not faults:
            return results
        if len(results) != len(entries):
            raise ResultCountMismatch(f"the processor returned {len(results)} results for {len(entries)} requests")
        rest = iter(results)
        return [faults[place] if place in faults else next(rest) for place in range(len(batch))]

    def _process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        """One result per entry, or an error."""
        began = self._clock()
        try:
            results = checked_results(self.processor.process, self.processor.process(entries))
        except ProcessorError:
            raise
        except ReflexError as error:
            raise _of_processor(error) from error
        self.sizes.ran(len(entries), began, self._clock())
        return [_missing() if r is None else _of_processor(r) if isinstance(r, ReflexError) else r for r in results]

    def stop(self) -> None:
        if not self.started:
            return
        try:
            if on_stop := getattr(self.processor, "on_stop", None):
                on_stop()
        except BaseException as error:
            self.stop_error = error
            log.exception("%s: on_stop failed", self.processor.id)


def _of_processor(error: ReflexError) -> ProcessorError:
    """A ProcessorError for a runtime error that a processor raised, such as another coordinator's refusal. The original
    class would mean that the frame never ran and may be sent again."""
    return error if isinstance(error, ProcessorError) else wrapped(error)


def _missing() -> Failed:
    """A new error each time: a raised one holds a traceback, and with it the caller's frame."""
    return Failed(ProcessorError("process gave no result for this frame: found None"))


def id_of(processor: BatchProcessor) -> str:
    name = getattr(processor, "id", None)
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise ConfigError(f"{type(processor).__name__}.id={name!r}: must be a text of 1 to 64 characters")
    if not callable(getattr(processor, "process", None)):
        raise ConfigError(f"{type(processor).__name__}: has no method process(), which a batch processor needs")
    return name


# -- the coordinator ---------------------------------------------------------------------------------------------------


class _Pending(Future[Any]):
    """A caller's future. Cancelling it cancels the frame unless it already runs."""

    take_back: Callable[[], None] | None = None

    def settled(self, ticket: Ticket) -> None:
        self.take_back = None  # it holds the ticket, and the ticket this future
        outcome = ticket.outcome
        assert outcome is not None
        try:
            if not self.set_running_or_notify_cancel():
                return
            if isinstance(outcome, Done):
                self.set_result(outcome.value)
            else:
                self.set_exception(outcome.error)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a callback wanted to end the thread, or the caller settled the future itself
            log.exception("the future of a frame of %r could not be settled", ticket.request.client)

    def cancel(self) -> bool:
        take_back, self.take_back = self.take_back, None  # `settled` clears it, too
        cancelled = super().cancel()
        if cancelled and take_back is not None:
            take_back()
        return cancelled


class BatchCoordinator(ThreadDriver):
    """Owns a processor and the thread that runs it. Errors: see `submit_and_wait`.

    sinks: see `Audience`; called on any thread. detached: the name of a thread that did not end in time, else None.
    processor: only the coordinator's thread may call it. patience: seconds after which `submit_and_wait` gives up.

    A batch beyond the watchdog is answered with `ProcessorHung`. No other thread may call the processor, so the
    coordinator goes on when it comes back. A thread that dies ends the coordinator, and every frame is answered.
    """

    def __init__(
        self,
        processor: BatchProcessor,
        config: BatchConfig | None = None,
        sinks: Iterable[Sink] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        self.config = config = config or BatchConfig()
        self.id = id_of(processor)
        if (owner := _owners.get(id(processor))) is not None:
            raise ConfigError(f"BatchCoordinator: processor {owner.id!r} belongs to another coordinator already")
        self.processor, self._owned = processor, Owned(processor, clock)
        self._meter = BatchMeter(config.max_batch_size)
        super().__init__(
            config.group(self.id, self._owned.sizes), self._owned, config.watchdog or inf, clock, f"reflex-{self.id}",
            sinks=[self._meter, *sinks], label=self.id, one_thread=True,
        )  # fmt: skip
        self.patience = config.max_latency + config.response_timeout
        self.detached: str | None = None
        self._began = self._signalled = False
        self._sequences: dict[str, count[int]] = {}  # by feed
        self._numbering = threading.Lock()  # of these
        _owners[id(processor)] = self

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the thread and wait for `on_start`. It cannot be started twice.

        ProcessorError if that raised, or took longer than startup_timeout. `GRACE` seconds later such a thread is left
        behind (`detached`).
        """
        if self._began or self._signalled:
            raise ConfigError(f"BatchCoordinator {self.id!r}: {'started' if self._began else 'stopped'} already")
        self._began = True
        if self.config.capacity < 2 * self.config.max_batch_size:
            sizes = f"queue_capacity={self.config.capacity} is below twice max_batch_size={self.config.max_batch_size}"
            log.warning("%s: %s: frames are refused while a batch runs", self.id, sizes)
        prepared = self.device.start(self._prepare)
        try:
            failure = prepared.exception(self.config.startup_timeout)
        except BaseException as error:  # too late, or an interrupt
            self.stop(GRACE)
            if not isinstance(error, TimeoutError):
                raise
            left = f"; its thread {self.detached} was left behind" if self.detached else ""
            message = f"on_start took longer than startup_timeout={self.config.startup_timeout:g} s{left}"
            raise ProcessorError(f"{self.id}: {message}") from None
        if failure is not None:
            self.stop(GRACE)
            raise ProcessorError(f"{self.id}: on_start failed: {type(failure).__name__}: {failure}") from failure
        return self

    def signal(self) -> None:
        """Admit no more frames. The batch that runs or is formed next is answered; all others are released now."""
        self._signalled = True
        self._owned.before_run = self._close_behind
        more = self.device.input(
            lambda scheduler, now: scheduler.close(now, drain=self._owned.started and not self.device.busy)
        )
        if more:
            self._close_behind()

    def join(self, timeout: float = 5.0) -> bool:
        """After `signal`: wait for the thread's end, `on_stop` included. Returns whether it ended in `timeout` seconds,
        else `detached` names it. Every frame is answered when it returns."""
        until = time.monotonic() + timeout
        self.stop_threads(timeout)
        thread = self.device.thread
        if thread is not None and not self.device.current:  # it still calls `on_stop`
            thread.join(max(0.0, until - time.monotonic()))
        self.detached = thread.name if thread is not None and thread.is_alive() else None
        if self.detached is None and _owners.get(id(self.processor)) is self:  # the entry of its next owner must stay
            del _owners[id(self.processor)]
        return self.detached is None

    def stop(self, timeout: float = 5.0) -> bool:
        """`signal` and `join`. May be called again."""
        self.signal()
        return self.join(timeout)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def lost(self) -> ProcessorError | None:
        """Why the thread died, if it did; then every frame is refused."""
        return self.device.lost

    @property
    def stop_error(self) -> BaseException | None:
        """The exception of `on_stop`."""
        return self._owned.stop_error

    # -- feeds ---------------------------------------------------------------------------------------------------------

    @property
    def most_ahead(self) -> int:
        """Frames of one feed that may be in flight and in one batch."""
        return min(self.config.max_batch_size, self.config.max_in_flight_per_feed or self.config.max_batch_size)

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """The processor's own `prepare`, if it has one: see `BatchProcessor`."""
        return getattr(self.processor, "prepare", None)

    def submit(
        self,
        feed_id: str,
        frame: Any,
        view: Any = None,
        *,
        sequence: int | None = None,
        pts: float | None = None,
        time_limit: float | None = None,
    ) -> Future[Any]:
        """A future of the frame's result. Never blocks; raises `QueueFull`, `InFlightCapReached` or `Closed`.

        sequence: its number in its feed, by default counted. pts: seconds in its stream. time_limit: seconds from now
        after which a result has no use.

        The frame is not copied: do not write to it until the future ends. That has the result, or an error as of
        `submit_and_wait`, except `WaitTimeout`. Its callbacks run on the thread that answers and must be quick.
        Cancelling it takes the frame back.
        """
        future = _Pending()
        number = self._number(feed_id, sequence)
        ticket = self.admit(self._request(BatchEntry(feed_id, frame, view, number, pts), time_limit), future.settled)
        future.take_back = lambda: self.device.cancel(ticket)
        if future.done():  # `settled` came before
            future.take_back = None
        return future

    def submit_and_wait(
        self,
        feed_id: str,
        frame: Any,
        view: Any = None,
        *,
        sequence: int | None = None,
        pts: float | None = None,
        time_limit: float | None = None,
        newest: Callable[[], NewestFrame] | None = None,
    ) -> Any:
        """The frame's result; blocks this thread for at most max_latency + response_timeout.

        sequence, pts, time_limit: see `submit`.
        newest: returns the frame to compute instead, such as one that came meanwhile, at the same place in the queue.
            Called once, when the batch begins, on the thread that runs it; it must be quick. Its exception is raised
            here, as a ProcessorError if it is none of the runtime's, and harms no other frame.

        Refused at once: `QueueFull`, `InFlightCapReached`, `Closed`. Not computed: `Drained` at shutdown, `Expired` by
        its time limit. It ran and failed: `ProcessorError`. `WaitTimeout`: it may still run, and counts as in flight
        until it is answered or the next batch is formed; its result is dropped.
        """
        if self.answers_here:
            raise ConfigError(f"{self.id}: submit_and_wait on the thread that answers would wait for itself")
        number = self._number(feed_id, sequence)
        request = self._request(BatchEntry(feed_id, frame, view, number, pts, newest=newest), time_limit)
        del frame, view  # nothing keeps them once another frame takes the place
        try:
            return self.ask(request, self.patience, f"{self.id}: feed {feed_id!r}")
        finally:  # an error holds this call, and pictures are large
            del request

    def admit(self, request: Request, settled: Callable[[Ticket], None], wake: bool = True) -> Ticket:
        try:
            return super().admit(request, settled, wake)
        except Rejected as error:
            words = {
                QueueFull: f"{self.config.capacity} frames wait already, the frame is dropped",
                InFlightCapReached: f"feed {request.client!r} has {self.config.max_in_flight_per_feed} frames in "
                "flight already",
                Closed: f"the coordinator {'is stopping' if self.lost is None else f'died: {self.lost.message}'}",
            }.get(type(error))  # not of a kind of Closed, whose message has the reason
            if words is None:
                raise
            raise type(error)(f"{self.id}: {words}", retry_after=error.retry_after, **error.details) from None

    def metrics(self) -> BatchMetrics:
        """All counts, as one consistent snapshot."""
        return self.between(self._meter.take)()

    def queues(self) -> dict[str, Any]:
        """The scheduler's snapshot of its group, by the processor's id."""
        groups: dict[str, Any] = self.device.input(lambda scheduler, _: scheduler.snapshot()["groups"])
        return groups

    def _request(self, entry: BatchEntry, time_limit: float | None) -> Request:
        return Request(entry, group=self.group, client=entry.feed_id, time_limit=time_limit)

    def _number(self, feed_id: str, given: int | None) -> int:
        numbers = self._sequences.get(feed_id) or self._new_feed(feed_id)
        return next(numbers) if given is None else given

    def _new_feed(self, feed_id: str) -> count[int]:
        if not isinstance(feed_id, str) or not 0 < len(feed_id) <= 256:
            raise ConfigError(f"feed_id={feed_id!r}: must be a text of 1 to 256 characters")
        feeds = self._sequences
        with self._numbering:
            if len(feeds) >= KNOWN_FEEDS:
                del feeds[next(iter(feeds))]
            numbers = feeds.setdefault(feed_id, count())
            known = len(feeds)
        if known == self.config.capacity + 1:
            more = f"more feeds than queue_capacity={self.config.capacity}"
            log.warning("%s: %s: frames are refused even when each feed has one", self.id, more)
        return numbers

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Run `on_start` on the thread that will run everything else."""
        try:
            if on_start := getattr(self.processor, "on_start", None):
                on_start()
            self._owned.started = True
        except BaseException:
            self.signal()  # frames may wait already, and none may run on a processor that did not start
            raise

    def _close_behind(self) -> None:
        """After `signal`, before the last batch runs: release the frames that are not in it."""
        self._owned.before_run = None
        while self.device.close(drain=False):
            pass

    def died(self) -> None:
        """Publish the loss, unless the coordinator was stopping anyway."""
        super().died()
        assert self.device.lost is not None
        if not self._signalled:
            loss = DeviceLost(self.clock(), self.device.lost)
            self.between(lambda: self._audience.publish(loss))
