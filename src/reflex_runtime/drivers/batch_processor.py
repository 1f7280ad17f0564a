"""What a coordinator runs, and how it batches: the processor as its user writes it, and the settings.

`Owned` puts the processor behind the interface of the drivers, so that it is run, bisected and timed like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from reflex_runtime.core.batch import Batch, Failed
from reflex_runtime.core.cost import TimedUnits
from reflex_runtime.core.errors import ConfigError, ProcessorError, ReflexError, ResultCountMismatch
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.processors.base import BaseProcessor

log = logging.getLogger("reflex.coordinator")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How a coordinator batches. All times in seconds.

    max_batch_size: most frames in a call. max_latency: longest that a frame waits on a free processor, counted from
        its arrival or from when the processor got free, whichever is later; it waits only for feeds whose next frame
        is due within that time, and only if their sharing the call saves more than the waiting costs.
    queue_capacity: most waiting frames, by default four batches; beyond it a submission is refused.
    response_timeout: what `submit_and_wait` waits beyond max_latency.
    max_in_flight_per_feed: most frames of a feed from submission to answer; 0 for no cap.
    startup_timeout: for `on_start`. watchdog: for one batch; then its feeds are released. 0 switches it off.
    """

    max_batch_size: int = 4
    max_latency: float = 0.050
    queue_capacity: int | None = None
    response_timeout: float = 5.0
    max_in_flight_per_feed: int = 1
    startup_timeout: float = 30.0
    watchdog: float = 60.0

    def __post_init__(self) -> None:
        _whole("max_batch_size", self.max_batch_size, 1, 4096)
        _seconds("max_latency", self.max_latency, 60.0)
        if self.queue_capacity is not None:
            _whole("queue_capacity", self.queue_capacity, 1, 1_000_000)
            if self.queue_capacity < self.max_batch_size:
                raise ConfigError(
                    f"BatchConfig.queue_capacity={self.queue_capacity}: must be >= max_batch_size, which is "
                    f"{self.max_batch_size}"
                )
        _seconds("response_timeout", self.response_timeout, 3600.0, above=True)
        _whole("max_in_flight_per_feed", self.max_in_flight_per_feed, 0, 1_000_000)
        _seconds("startup_timeout", self.startup_timeout, 3600.0, above=True)
        _seconds("watchdog", self.watchdog, 3600.0)

    @property
    def capacity(self) -> int:
        """The queue's capacity in force."""
        return max(4, 4 * self.max_batch_size) if self.queue_capacity is None else self.queue_capacity

    def group(self, name: str) -> GroupConfig:
        """The same in the scheduler's terms."""
        return GroupConfig(
            name=name,
            flush=FlushPolicy(max_batch_size=self.max_batch_size, returns=self.max_latency),
            capacity=self.capacity,
            max_in_flight_per_client=self.max_in_flight_per_feed,
            share_room=True,
            cost=TimedUnits,
        )


class BatchEntry(NamedTuple):
    """One frame of a batch, as the processor gets it.

    view: whatever the feed sent along. sequence: the frame's number in its feed. pts: its time in its stream, in
    seconds, or None. arrived: monotonic seconds of its submission.
    """

    feed_id: str
    frame: Any
    view: Any
    sequence: int
    pts: float | None
    arrived: float


_entry = tuple.__new__  # a NamedTuple's own constructor is a Python function around this


class BatchProcessor(Protocol):
    """What a coordinator runs batches on. It is called on one thread only and needs no lock.

    id: names it in metrics and events. A class may set `repeatable = False`: then a call that raised is not repeated
    with fewer entries to find the guilty one, and the batch fails as one.
    """

    id: str

    def on_start(self) -> None:
        """Called once, before the first batch: load the model here. What it raises is what `start` raises."""

    def process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        """One result per entry, in order. An exception instance fails that entry alone; None counts as missing."""

    def on_stop(self) -> None:
        """Called once, after the last batch, if `on_start` succeeded and the thread did not die."""


class Owned(BaseProcessor):
    """A user's processor behind the interface of the drivers."""

    def __init__(self, processor: BatchProcessor) -> None:
        self._processor = processor
        self.repeatable = bool(getattr(processor, "repeatable", True))
        self.started = False
        self.stop_error: BaseException | None = None
        self.before_run: Callable[[], None] | None = None

    def run(self, batch: Batch) -> Sequence[Any]:
        if self.before_run is not None:
            self.before_run()
        entries = [_entry(BatchEntry, (*t.request.payload, t.arrived)) for t in batch.grants]
        try:
            results = self._processor.process(entries)
        except ReflexError as error:
            raise _of_processor(error) from error
        if results is None or isinstance(results, (Mapping, str, bytes)):  # of these the keys or letters would be taken
            found = "None" if results is None else f"a {type(results).__name__}"
            raise ResultCountMismatch(f"process returned {found}, expected a sequence of {len(entries)} results")
        return [_missing() if r is None else _of_processor(r) if isinstance(r, ReflexError) else r for r in results]

    def stop(self) -> None:
        if not self.started:
            return
        try:
            self._processor.on_stop()
        except BaseException as error:
            self.stop_error = error
            log.exception("%s: on_stop failed", self._processor.id)


def _of_processor(error: ReflexError) -> ProcessorError:
    """An error of the runtime that came out of a processor, such as another coordinator's refusal.

    Of its own class it would tell the caller that the frame never ran and may be sent again.
    """
    if isinstance(error, ProcessorError):
        return error
    wrapped = ProcessorError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _missing() -> Failed:
    """A new one each time: whoever raises an exception hangs its traceback, and with it his frame, on it."""
    return Failed(ProcessorError("process gave no result for this frame: found None"))


def id_of(processor: BatchProcessor) -> str:
    name = getattr(processor, "id", None)
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise ConfigError(f"{type(processor).__name__}.id={name!r}: must be a text of 1 to 64 characters")
    for verb in ("on_start", "process", "on_stop"):
        if not callable(getattr(processor, verb, None)):
            raise ConfigError(f"{type(processor).__name__}: has no method {verb}(), which a batch processor needs")
    return name


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"BatchConfig.{name}={value!r}: must be a whole number in [{low}, {high}]")


def _seconds(name: str, value: float, high: float, above: bool = False) -> None:
    inside = isinstance(value, (int, float)) and 0 <= value <= high  # NaN is not
    if not inside or (above and value == 0):
        raise ConfigError(f"BatchConfig.{name}={value!r}: must be in {'(' if above else '['}0, {high:g}] seconds")
