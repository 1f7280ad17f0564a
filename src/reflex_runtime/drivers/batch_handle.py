"""Where feeds submit frames to a coordinator: from any thread, waiting for the answer or with a future of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, Protocol, Unpack

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
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.drivers.batch_processor import BatchConfig, BatchProcessor
from reflex_runtime.drivers.device import Clock
from reflex_runtime.drivers.follow_up import FollowUp, FrameParts
from reflex_runtime.drivers.relay import Relay, Sleeper
from reflex_runtime.drivers.submitted_frame import FrameOptions, GivenFrame, NewestFrame, SubmittedFrame
from reflex_runtime.telemetry.batch_metrics import BatchMetrics

log = logging.getLogger("reflex.coordinator")

KNOWN_FEEDS = 4096  # feeds whose frames are numbered here; the one known longest is forgotten beyond


class _Pending(Future[Any]):
    """A caller's future. Cancelling it cancels the frame unless it already runs."""

    take_back: Callable[[], None] | None = None

    def settled(self, frame: SubmittedFrame) -> None:
        self.take_back = None  # it holds the frame, and the frame this future
        outcome = frame.outcome
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
            log.exception("the future of a frame of %r could not be settled", frame.feed_id)

    def cancel(self) -> bool:
        take_back, self.take_back = self.take_back, None  # `settled` clears it, too
        cancelled = super().cancel()
        if cancelled and take_back is not None:
            take_back()
        return cancelled


class _Owner(Protocol):
    """What a handle needs of its coordinator."""

    id: str
    config: BatchConfig
    processor: BatchProcessor
    then: FollowUp | None
    relay: Relay
    clock: Clock
    patience: float

    @property
    def lost(self) -> ProcessorError | None: ...
    @property
    def answers_here(self) -> bool: ...
    def admit(self, request: Request, frame: SubmittedFrame) -> None: ...
    def admit_part(self, request: Request, settled: Callable[[Ticket], None]) -> Ticket: ...
    def cancel(self, frame: SubmittedFrame) -> None: ...
    def abandon(self, frame: SubmittedFrame) -> bool: ...
    def metrics(self) -> BatchMetrics: ...


class BatchHandle:
    """Feeds submit frames here, on any thread. For the errors see `submit_and_wait`."""

    def __init__(self, coordinator: _Owner) -> None:
        self._coordinator = coordinator
        self._sequences: dict[str, count[int]] = {}
        self._changing = threading.Lock()  # of these

    @property
    def lost(self) -> ProcessorError | None:
        """Why the coordinator's thread died, if it did; then no more frames are answered."""
        return self._coordinator.lost

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """The processor's own `prepare`, if it has one: see `BatchProcessor`."""
        prepare: Callable[[Any], Any] | None = getattr(self._coordinator.processor, "prepare", None)
        return prepare

    def submit(
        self, feed_id: str, frame: Any, view: Any = None, **options: Unpack[FrameOptions]
    ) -> Future[Any]:
        """A future of the frame's result. Never blocks; raises `QueueFull`, `InFlightCapReached` or `Closed`.

        The future ends with the result or with one of the errors of `submit_and_wait`, `WaitTimeout` apart. Its
        callbacks run on the thread that answers and must be quick. Cancelling it takes the frame back.
        """
        future = _Pending()
        coordinator = self._coordinator
        submitted = self._submit(GivenFrame(feed_id, frame, view, **options), future.settled)
        future.take_back = lambda: coordinator.cancel(submitted)
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
        submitted = self._submit(given, lambda _: relay.answered(sleeper))
        try:
            answered = relay.wait(sleeper, coordinator.patience)
        except BaseException:  # interrupted: the answer has no reader
            coordinator.cancel(submitted)
            raise
        if not answered and not coordinator.abandon(submitted):
            raise WaitTimeout(f"{coordinator.id}: no answer for feed {feed_id!r} within {coordinator.patience:g} s")
        outcome = submitted.outcome
        assert outcome is not None
        if isinstance(outcome, Done):
            return outcome.value
        try:
            raise outcome.error.with_traceback(None)  # shared by the callers of a failed batch
        finally:  # it holds this call, whose variables hold it and the frame: a cycle, and pictures are large
            del given, submitted, outcome

    def metrics(self) -> BatchMetrics:
        """Everything counted so far, as one consistent snapshot."""
        return self._coordinator.metrics()

    # -- within --------------------------------------------------------------------------------------------------------

    def _submit(self, given: GivenFrame, settled: Callable[[SubmittedFrame], None]) -> SubmittedFrame:
        """Raises the `Rejected` that says why not. settled: called at its end with what this returns."""
        numbers = self._sequences.get(given.feed_id)
        if numbers is None:
            numbers = self._new_feed(given.feed_id)
        if given.sequence is None:
            given.sequence = next(numbers)
        coordinator = self._coordinator
        then = coordinator.then
        if then is None:
            frame = SubmittedFrame(given.feed_id, settled)
        else:
            frame = FrameParts(then, given, coordinator.admit_part, settled, coordinator.clock)
        request = Request(given, group=coordinator.id, client=given.feed_id, time_limit=given.time_limit)
        try:
            coordinator.admit(request, frame)
        except Rejected as error:
            raise self._worded(error, given.feed_id) from None
        return frame

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
        if isinstance(error, Closed):
            why = "is stopping" if coordinator.lost is None else f"died: {coordinator.lost.message}"
            return Closed(f"{coordinator.id}: the coordinator {why}", **more)
        return error
