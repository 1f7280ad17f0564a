"""The thread driver: many feeds submit frames, one thread forms batches over them and runs a processor it owns alone.

    class Detector:
        id = "detector"
        def on_start(self): ...
        def process(self, entries): ...        # one result per entry
        def on_stop(self): ...

    with BatchCoordinator(Detector(), BatchConfig(max_batch_size=8, max_latency=0.02)) as handle:
        boxes = handle.submit_and_wait("cam1", frame)        # from any thread; shares a call with other feeds

A submission never waits for room: without room it is refused, the frame is dropped and the feed goes on. An admitted
frame is answered exactly once, whatever the processor does. A feed is a client of the scheduler: its frames are first
in, first out; feeds have fair shares, and each has at most `max_in_flight_per_feed` frames in the system.

Feeds submit frames through a `BatchHandle`: from any thread, waiting for the answer or with a future of it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, TypeVar, Unpack

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    InFlightCapReached,
    ProcessorError,
    QueueFull,
    Rejected,
    WaitTimeout,
)
from reflex_runtime.core.events import DeviceLost, Event
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.batch_metrics import BatchMeter, BatchMetrics
from reflex_runtime.run.audience import Audience, Delivery, Relay, Sink, Sleeper
from reflex_runtime.run.batch_processor import BatchConfig, BatchProcessor, Owned, id_of, on_start
from reflex_runtime.run.device import Clock, Device
from reflex_runtime.run.submitted_frame import FrameOptions, GivenFrame, NewestFrame

log = logging.getLogger("reflex.coordinator")

KNOWN_FEEDS = 4096  # feeds whose frames are numbered here; the one known longest is forgotten beyond


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


class BatchHandle:
    """Feeds submit frames here, on any thread. For the errors see `submit_and_wait`."""

    def __init__(self, coordinator: BatchCoordinator) -> None:
        self._coordinator = coordinator
        self._sequences: dict[str, count[int]] = {}
        self._changing = threading.Lock()  # of these

    @property
    def lost(self) -> ProcessorError | None:
        """Why the coordinator's thread died, if it did; then no more frames are answered."""
        return self._coordinator.lost

    @property
    def ahead(self) -> int:
        """Frames that a feed may have in flight and that one batch can hold."""
        config = self._coordinator.config
        return min(config.max_batch_size, config.max_in_flight_per_feed or config.max_batch_size)

    @property
    def patience(self) -> float:
        """Seconds after which a frame has no answer."""
        return self._coordinator.patience

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """The processor's own `prepare`, if it has one: see `BatchProcessor`."""
        prepare: Callable[[Any], Any] | None = getattr(self._coordinator.processor, "prepare", None)
        return prepare

    def submit(self, feed_id: str, frame: Any, view: Any = None, **options: Unpack[FrameOptions]) -> Future[Any]:
        """A future of the frame's result. Never blocks; raises `QueueFull`, `InFlightCapReached` or `Closed`.

        The frame is not copied: do not write to it until the future ends (a capture loop with one buffer copies it).
        The future ends with the result or with one of the errors of `submit_and_wait`, `WaitTimeout` apart. Its
        callbacks run on the thread that answers and must be quick. Cancelling it takes the frame back.
        """
        future = _Pending()
        coordinator = self._coordinator
        ticket = self._submit(GivenFrame(feed_id, frame, view, **options), future.settled)
        future.take_back = lambda: coordinator.cancel(ticket)
        if future.done():  # `settled` came before
            future.take_back = None
        return future

    def submit_and_wait(
        self,
        feed_id: str,
        frame: Any,
        view: Any = None,
        *,
        newest: Callable[[], NewestFrame] | None = None,
        **options: Unpack[FrameOptions],
    ) -> Any:
        """The frame's result; blocks this thread for at most max_latency + response_timeout.

        sequence, pts, time_limit: see `FrameOptions`.
        newest: called once, when the batch begins, on the thread that runs it, and must be quick: what is computed
            instead, such as a frame that came meanwhile. It keeps the place in the queue. What it raises is raised
            here, as a ProcessorError if it is none of the runtime's, and costs no other frame anything.

        Refused at once: `QueueFull`, `InFlightCapReached`, `Closed`. Left without being computed: `Drained` at
        shutdown, `Expired` by its time limit. It ran and failed: `ProcessorError`. `WaitTimeout`: it may still run, and
        counts as in flight until it is answered or the next batch is formed; its result is dropped.
        """
        coordinator = self._coordinator
        if coordinator.answers_here:
            raise ConfigError(f"{coordinator.id}: submit_and_wait on the thread that answers would wait for itself")
        sleeper, relay = Sleeper(), coordinator.relay
        given = GivenFrame(feed_id, frame, view, newest, **options)
        del frame, view  # once another takes its place, nothing keeps it
        ticket = self._submit(given, lambda _: relay.answered(sleeper))
        try:
            answered = relay.wait(sleeper, coordinator.patience)
        except BaseException:  # interrupted: the answer has no reader
            coordinator.cancel(ticket)
            raise
        if not answered and not coordinator.abandon(ticket):
            raise WaitTimeout(f"{coordinator.id}: no answer for feed {feed_id!r} within {coordinator.patience:g} s")
        outcome = ticket.outcome
        assert outcome is not None
        if isinstance(outcome, Done):
            return outcome.value
        try:
            raise outcome.error.with_traceback(None)  # shared by the callers of a failed batch
        finally:  # it holds this call, whose variables hold it and the frame: a cycle, and pictures are large
            del given, ticket, outcome

    def metrics(self) -> BatchMetrics:
        """Everything counted so far, as one consistent snapshot."""
        return self._coordinator.metrics()

    # -- within --------------------------------------------------------------------------------------------------------

    def _submit(self, given: GivenFrame, settled: Callable[[Ticket], None]) -> Ticket:
        """Raises the `Rejected` that says why not. settled: called once, at its end, by the thread that answers."""
        numbers = self._sequences.get(given.feed_id)
        if numbers is None:
            numbers = self._new_feed(given.feed_id)
        if given.sequence is None:
            given.sequence = next(numbers)
        request = Request(given, group=self._coordinator.id, client=given.feed_id, time_limit=given.time_limit)
        try:
            return self._coordinator.admit(request, settled)
        except Rejected as error:
            raise self._worded(error, given.feed_id) from None

    def _new_feed(self, feed_id: str) -> count[int]:
        if not isinstance(feed_id, str) or not 0 < len(feed_id) <= 256:
            raise ConfigError(f"feed_id={feed_id!r}: must be a text of 1 to 256 characters")
        coordinator, feeds = self._coordinator, self._sequences
        with self._changing:
            if len(feeds) >= KNOWN_FEEDS:
                del feeds[next(iter(feeds))]
            numbers = feeds.setdefault(feed_id, count())
            known = len(feeds)
        if known == coordinator.config.capacity + 1:
            log.warning(
                "%s: more feeds than queue_capacity=%d: frames are refused even when each feed has one",
                coordinator.id,
                coordinator.config.capacity,
            )
        return numbers

    def _worded(self, error: Rejected, feed_id: str) -> Rejected:
        """The refusal, with a message for feeds."""
        coordinator, config = self._coordinator, self._coordinator.config
        more: dict[str, Any] = {"retry_after": error.retry_after, **error.details}
        if isinstance(error, QueueFull):
            return QueueFull(f"{coordinator.id}: {config.capacity} frames wait already, the frame is dropped", **more)
        if isinstance(error, InFlightCapReached):
            most = config.max_in_flight_per_feed
            return InFlightCapReached(f"{coordinator.id}: feed {feed_id!r} has {most} frames in flight already", **more)
        if type(error) is Closed:  # not one that says why itself
            why = "is stopping" if coordinator.lost is None else f"died: {coordinator.lost.message}"
            return Closed(f"{coordinator.id}: the coordinator {why}", **more)
        return error


# -- the coordinator ---------------------------------------------------------------------------------------------------


T = TypeVar("T")

GRACE = 2.0  # further seconds for a thread that is late to start, before it is abandoned


# While a coordinator lives, by the identity of the processor it owns: a second owner would call it on a second thread.
_owners: weakref.WeakValueDictionary[int, BatchCoordinator] = weakref.WeakValueDictionary()


class BatchCoordinator:
    """Owns a processor and the thread that runs it. See the module docstring.

    sinks: called with every event of its scheduler, in order and one at a time, on whichever thread; must be quick. A
        sink with an attribute `events` (a set of event types) gets those only. One that raises is logged.
    lost: why its thread died, if it did. detached: the name of a thread that did not end in time, else None.
    stop_error: what `on_stop` raised, else None. processor: the one it owns; only its thread may call it.

    A batch beyond the watchdog is answered with `ProcessorHung`. Only one thread may call the processor, so the
    coordinator waits for it and goes on when it comes back. A thread that dies ends the coordinator, and every frame is
    answered.
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
        self.patience = config.max_latency + config.response_timeout
        self.handle = BatchHandle(self)
        self.detached: str | None = None
        self.processor = processor
        self._owned = Owned(processor, clock)
        self._scheduler = Scheduler([config.group(self.id, self._owned.sizes)])
        self.clock = clock
        self._meter = BatchMeter(config.max_batch_size)
        self._audience = Audience([self._meter, *sinks], self.id)
        self._delivery = Delivery(self._events, self._audience)
        name = f"reflex-{self.id}"
        self._device = Device(
            self._scheduler, {self.id: self._owned}, self._deliver, clock, self._died, name=name, one_thread=True
        )
        self.relay = Relay(clock, self._device.wake)
        self._loss: DeviceLost | None = None  # published after everything else
        self._watchdog = config.watchdog or inf
        self._alarm = inf  # when the timekeeper looks next
        self._setting = threading.Lock()
        self._bell = threading.Event()
        self._over = False
        self._started = self._signalled = False
        _owners[id(processor)] = self

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> BatchHandle:
        """Start the thread and wait for `on_start`.

        Raises what it raised as the cause of a ProcessorError, or one that says it took longer than startup_timeout;
        after `GRACE` more seconds its thread is left behind then (`detached`). It cannot be started twice.
        """
        if self._started or self._signalled:
            raise ConfigError(f"BatchCoordinator {self.id!r}: {'started' if self._started else 'stopped'} already")
        self._started = True
        if self.config.capacity < 2 * self.config.max_batch_size:
            log.warning(
                "%s: queue_capacity=%d is below twice max_batch_size=%d: frames are refused while a batch runs",
                self.id,
                self.config.capacity,
                self.config.max_batch_size,
            )
        ready: Future[None] = Future()
        self._device.start(lambda: self._prepare(ready))
        try:
            failure = ready.exception(self.config.startup_timeout)
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
        try:
            threading.Thread(target=self._keep_time, name=f"reflex-{self.id}-timekeeper", daemon=True).start()
        except RuntimeError:  # no threads left
            self.stop(GRACE)
            raise
        return self.handle

    def signal(self) -> None:
        """Admit no more frames. The batch being formed or run is still answered; all other frames are released now."""
        self._signalled = True
        self._owned.before_run = self._close_behind
        more = self._device.input(
            lambda scheduler, now: scheduler.close(now, drain=self._owned.started and not self._device.busy)
        )
        if more:
            self._close_behind()

    def join(self, timeout: float = 5.0) -> bool:
        """After `signal`: wait for the thread's end, `on_stop` included. Returns whether it ended within `timeout`.

        Every frame is answered when it returns. A thread that did not end is named by `detached`.
        """
        until = time.monotonic() + timeout
        self._device.stop(timeout)
        self._device.join(max(0.0, until - time.monotonic()))
        self._over = True
        self._bell.set()
        self.detached = self._device.name if self._device.alive else None
        if self.detached is None and _owners.get(id(self.processor)) is self:  # the entry of its next owner must stay
            del _owners[id(self.processor)]
        return self.detached is None

    def stop(self, timeout: float = 5.0) -> bool:
        """`signal` and `join`. May be called again."""
        self.signal()
        return self.join(timeout)

    def __enter__(self) -> BatchHandle:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def lost(self) -> ProcessorError | None:
        """Why the thread died, if it did."""
        return self._device.lost

    @property
    def stop_error(self) -> BaseException | None:
        """What `on_stop` raised."""
        return self._owned.stop_error

    # -- feeds: for the handle -----------------------------------------------------------------------------------------

    def admit(self, request: Request, settled: Callable[[Ticket], None]) -> Ticket:
        """Let a frame wait for the processor, or raise the `Rejected` that says why not."""
        later = self.relay.going
        try:
            ticket = self._device.submit(request, settled, wake=not later)
        except Rejected:
            self._deliver()
            raise
        if later:
            self.relay.came()
        if self._alarm == inf or ticket.deadline < self._alarm:  # wake then, and when its batch would take too long
            self._set_alarm(min(ticket.deadline, ticket.arrived + self._watchdog))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a frame for its caller."""
        self._device.cancel(ticket)

    def abandon(self, ticket: Ticket) -> bool:
        """The caller stops waiting. Returns whether the answer is there after all."""
        return self._device.abandon(ticket)

    @property
    def answers_here(self) -> bool:
        """Whether the calling thread is one that answers: it must not wait for an answer."""
        return self._device.current or self._delivery.current

    def metrics(self) -> BatchMetrics:
        """Everything counted so far, as one consistent snapshot."""
        return self.between(self._meter.take)()

    @property
    def consecutive_errors(self) -> int:
        """Batches in a row without any result, of those whose end was delivered."""
        return self._meter.errors_in_a_row

    def between(self, action: Callable[[], T]) -> T:
        """Deliver every event up to now, then call `action` before the next one. Returns its result."""
        try:
            return self._delivery.after(action)
        finally:
            self.relay.go()

    def add_sink(self, sink: Sink) -> None:
        """Call it with every event from now on; see `sinks` above."""
        self.between(lambda: self._audience.add(sink))

    def remove_sink(self, sink: Sink) -> None:
        """It gets no more events. ValueError if it is none of the sinks."""
        self.between(lambda: self._audience.remove(sink))

    def queues(self) -> dict[str, Any]:
        """What waits and runs, as the scheduler's snapshot tells it: by group, the id of a processor."""
        groups: dict[str, Any] = self._device.input(lambda scheduler, _: scheduler.snapshot()["groups"])
        return groups

    def _deliver(self) -> None:
        """Deliver the new events and answers, then wake the threads that have theirs."""
        self._delivery.deliver()
        self.relay.go()

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _prepare(self, ready: Future[None]) -> None:
        """Run `on_start` on the thread that will run everything else."""
        try:
            on_start(self.processor)
            self._owned.started = True
        except BaseException as error:
            self.signal()  # frames may wait already, and none may run on a processor that did not start
            ready.set_exception(error)
        else:
            ready.set_result(None)

    def _close_behind(self) -> None:
        """After `signal`, before the last batch runs: release the frames that are not in it."""
        self._owned.before_run = None
        while self._device.input(lambda scheduler, now: scheduler.close(now, drain=False)):
            pass

    def _events(self) -> list[Event]:
        events = self._device.take_events()
        if self._loss is not None:
            events.append(self._loss)
            self._loss = None
        return events

    def _died(self) -> None:
        """The thread died and every frame was answered. Publish that, unless the thread was to end anyway."""
        assert self._device.lost is not None
        if not self._signalled:
            self._loss = DeviceLost(self.clock(), self._device.lost)
            self._deliver()

    # -- the timekeeper: what must happen while the processor is busy --------------------------------------------------

    def _set_alarm(self, at: float) -> None:
        with self._setting:
            if at < self._alarm:
                self._alarm = at
                self._bell.set()

    def _keep_time(self) -> None:
        """Wake at the next time limit of a frame or a running batch; sleep while nothing is in flight."""
        while True:
            self._bell.clear()
            if self._over:  # checked after the bell, which may have rung for it just before
                return
            delay = self._alarm - self.clock()
            if delay > 0.0 and self._bell.wait(None if delay == inf else min(delay, threading.TIMEOUT_MAX)):
                continue  # an earlier alarm, or the end
            with self._setting:
                self._alarm = inf  # first, so that later inputs set it again
            at = self.clock() + self._watchdog
            try:
                at = self._device.look(self._watchdog)
                self._deliver()
            except Exception:  # it must go on: batches and deadlines depend on it
                log.exception("%s: the timekeeper failed", self.id)
            self._set_alarm(at)
