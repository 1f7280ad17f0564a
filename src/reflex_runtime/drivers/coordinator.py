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
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from math import inf
from types import TracebackType
from typing import Any, TypeVar

from reflex_runtime.core.errors import ConfigError, ProcessorError, Rejected
from reflex_runtime.core.events import DeviceLost, Event
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.audience import Audience, Delivery, Sink
from reflex_runtime.drivers.batch_handle import BatchHandle
from reflex_runtime.drivers.batch_processor import BatchConfig, BatchProcessor, Owned, id_of
from reflex_runtime.drivers.device import Clock, Device
from reflex_runtime.drivers.follow_up import FollowUp
from reflex_runtime.drivers.relay import Relay
from reflex_runtime.drivers.submitted_frame import SubmittedFrame
from reflex_runtime.telemetry.batch_metrics import BatchMeter, BatchMetrics, OneGroup

log = logging.getLogger("reflex.coordinator")

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
    then: a second processor, for parts of what the first one answers; a frame is answered when they are. Its figures
        are in `all_metrics`, its events among those of `sinks`, under its own id as their group. A frame counts as in
        flight (`max_in_flight_per_feed`) until the first one has answered.

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
        then: FollowUp | None = None,
    ) -> None:
        self.config = config = config or BatchConfig()
        self.id = id_of(processor)
        self.then = then
        runs = {self.id: (processor, config)}
        if then is not None:
            if (name := id_of(then.processor)) == self.id:
                raise ConfigError(f"BatchCoordinator: both processors are called {name!r}")
            runs[name] = (then.processor, then.config)
        for run, _ in runs.values():
            if (owner := _owners.get(id(run))) is not None:
                raise ConfigError(f"BatchCoordinator: processor {owner.id!r} belongs to another coordinator already")
        self.patience = config.max_latency + config.response_timeout
        self.handle = BatchHandle(self)
        self.detached: str | None = None
        self.processor = processor
        self._owned = {name: Owned(run, clock) for name, (run, _) in runs.items()}
        self._scheduler = Scheduler(
            [batching.group(name, self._owned[name].sizes) for name, (_, batching) in runs.items()]
        )
        self.clock = clock
        self._meters = {name: BatchMeter(batching.max_batch_size) for name, (_, batching) in runs.items()}
        meters = [meter if then is None else OneGroup(meter, name) for name, meter in self._meters.items()]
        self._audience = Audience([*meters, *sinks], self.id)
        self._delivery = Delivery(self._events, self._audience)
        self._device = Device(
            self._scheduler,
            self._owned,
            self._deliver,
            clock,
            self._died,
            name=f"reflex-{self.id}",
            one_thread=True,
        )
        self.relay = Relay(clock, self._device.wake)
        self._loss: DeviceLost | None = None  # published after everything else
        self._watchdog = config.watchdog or inf
        self._alarm = inf  # when the timekeeper looks next
        self._setting = threading.Lock()
        self._bell = threading.Event()
        self._over = False
        self._started = self._signalled = False
        for run, _ in runs.values():
            _owners[id(run)] = self

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
        for owned in self._owned.values():
            owned.before_run = self._close_behind
        more = self._device.input(
            lambda scheduler, now: scheduler.close(now, drain=self._running and not self._device.busy)
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
        for owned in self._owned.values() if self.detached is None else ():
            if _owners.get(id(owned.processor)) is self:  # the entry of its next owner must stay
                del _owners[id(owned.processor)]
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
        return next((owned.stop_error for owned in self._owned.values() if owned.stop_error is not None), None)

    @property
    def _running(self) -> bool:
        """Whether every processor has started."""
        return all(owned.started for owned in self._owned.values())

    # -- feeds: for the handle -----------------------------------------------------------------------------------------

    def admit(self, request: Request, frame: SubmittedFrame) -> None:
        """Let a frame wait for the processor, or raise the `Rejected` that says why not."""
        later = self.relay.going
        try:
            ticket = self._device.submit(request, frame.answered, wake=not later)
        except Rejected:
            self._deliver()
            raise
        frame.admitted(ticket)
        if later:
            self.relay.came()
        self._watch(ticket)

    def admit_part(self, request: Request, settled: Callable[[Ticket], None]) -> Ticket:
        """The same for a part of a frame, for the second processor. Called while answers are delivered: by the device
        thread, which looks at the queues next."""
        ticket = self._device.submit(request, settled)
        self._watch(ticket)
        return ticket

    def _watch(self, ticket: Ticket) -> None:
        """Wake at its deadline, and when its batch would take too long."""
        if self._alarm == inf or ticket.deadline < self._alarm:
            self._set_alarm(min(ticket.deadline, ticket.arrived + self._watchdog))

    def cancel(self, frame: SubmittedFrame) -> None:
        """Cancel a frame for its caller."""
        frame.cancel(self._device.cancel)

    def abandon(self, frame: SubmittedFrame) -> bool:
        """The caller stops waiting. Returns whether the answer is there after all."""
        return frame.abandon(self._device.abandon)

    @property
    def answers_here(self) -> bool:
        """Whether the calling thread is one that answers: it must not wait for an answer."""
        return self._device.current or self._delivery.current

    def metrics(self) -> BatchMetrics:
        """Everything counted so far, as one consistent snapshot."""
        return self.between(self._meters[self.id].take)()

    def all_metrics(self) -> dict[str, BatchMetrics]:
        """The same of each of its processors, by id; those of the second one count parts."""
        taken = self.between(lambda: {name: meter.take() for name, meter in self._meters.items()})
        return {name: take() for name, take in taken.items()}

    @property
    def consecutive_errors(self) -> int:
        """Batches in a row without any result, of those whose end was delivered."""
        return self._meters[self.id].errors_in_a_row

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

    def relearn(self) -> None:
        """Its processor takes other times from now on: forget what batches took."""

        def forget(scheduler: Scheduler, _: float) -> None:
            scheduler.cost_model(self.id).forget()
            self._owned[self.id].sizes.forget()

        self._device.input(forget)

    def _deliver(self) -> None:
        """Deliver the new events and answers, then wake the threads that have theirs."""
        self._delivery.deliver()
        self.relay.go()

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _prepare(self, ready: Future[None]) -> None:
        """Run `on_start` on the thread that will run everything else."""
        try:
            for owned in self._owned.values():
                owned.processor.on_start()
                owned.started = True
        except BaseException as error:
            self.signal()  # frames may wait already, and none may run on a processor that did not start
            ready.set_exception(error)
        else:
            ready.set_result(None)

    def _close_behind(self) -> None:
        """After `signal`, before the last batch runs: release the frames that are not in it."""
        for owned in self._owned.values():
            owned.before_run = None
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
            try:
                self._device.expire()
                self._device.check(self._watchdog)
                self._deliver()
            except Exception:  # it must go on: batches and deadlines depend on it
                log.exception("%s: the timekeeper failed", self.id)
            if not self._scheduler.idle:
                since = self._device.running_since
                hangs = (self.clock() if since is None else since) + self._watchdog
                self._set_alarm(min(hangs, self._device.expires_at()))
