"""The user's processor of a coordinator, and the settings of its batching.

`Owned` adapts such a processor to the `Processor` of all drivers, so that all are run, repeated in parts and timed in
the same way.

Calls of several frames may not pay: on a CPU they often take longer than as many calls of one frame, and then frames
run alone: more of them are answered, and each sooner.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

from reflex_runtime.core.batch import Batch, Failed
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.errors import ConfigError, ProcessorError, ReflexError, ResultCountMismatch
from reflex_runtime.core.flush import Affine, Controller, FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.run.processor import WALL, BaseProcessor, kind_of, wrapped
from reflex_runtime.settings.declare import option, validate

log = logging.getLogger("reflex.coordinator")

KEPT: Final = 15  # newest calls of each kind whose median is compared
LEAST: Final = 3  # calls of a kind before it is compared, and in a trial
FORMING: Final = 0.0003  # seconds to form a batch and to answer it, which a call of several frames needs once
FIRST: Final = 16  # calls until the other kind is tried; eight times as many each time that this changes nothing
LAST: Final = 4096
RESTED: Final = 0.001  # seconds between calls, beside a twentieth of the second one, of a processor that never rests


class PayingSize:
    """A controller for one processor: batches as large as they may be, or of one frame.

    It compares the times of calls. While the processor never rests, the kind that does not run is tried now and then,
    with `LEAST` calls. `ran` is called by the thread that runs the batches, everything else on any thread.
    name: of the processor, for the log. at_once: how many frames a call computes whatever it is given; None: any.
    """

    def __init__(self, name: str, at_once: Callable[[], int | None]) -> None:
        self._name, self._at_once = name, at_once
        self._policies: dict[tuple[FlushPolicy, int], FlushPolicy] = {}
        self._alone = self._trying = False
        self._times: dict[bool, deque[float]] = {alone: deque(maxlen=KEPT) for alone in (True, False)}
        self._calls, self._pause, self._ended = 0, FIRST, -inf

    @property
    def alone(self) -> bool:
        """Whether the next batch has one frame only."""
        return self._alone != self._trying

    def arrived(self, ticket: Ticket, now: float, others: int) -> None:
        return

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        size = 1 if self.alone else min(self._at_once() or base.max_batch_size, base.max_batch_size)
        if size == base.max_batch_size:
            return base
        if (base, size) not in self._policies:
            self._policies[base, size] = replace(base, max_batch_size=size)
        return self._policies[base, size]

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
        one, several = (median(self._times[alone]) for alone in (True, False))
        alone = one + FORMING <= several
        changed, self._alone, self._trying, self._calls = alone != self._alone, alone, False, 0
        self._pause = FIRST if changed else min(LAST, 8 * self._pause)
        if changed:
            what = "frames run alone" if alone else "frames share calls"
            log.info(
                "%s: a call of one frame takes %.1f ms, of several %.1f ms a frame: %s from now on",
                self._name,
                1e3 * one,
                1e3 * several,
                what,
            )


# -- batch processor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How a coordinator batches. All times in seconds.

    max_batch_size: most frames in a call; one, where calls of several take longer than as many calls of one and the
        processor never rests.
    max_latency: longest time that a frame waits on a free processor, counted from its arrival or from when the
        processor became free, whichever is later. It waits only for feeds whose next frame is due within that time, and
        only if sharing the call saves more than waiting costs.
    queue_capacity: most waiting frames, by default four batches; beyond it a submission is refused.
    response_timeout: time that `submit_and_wait` waits, in addition to max_latency.
    max_in_flight_per_feed: most frames of a feed from submission to answer; 0 for no cap.
    startup_timeout: for `on_start`. watchdog: for one batch; then its feeds are released. 0 switches it off.
    """

    max_batch_size: int = option(4, low=1, high=4096)
    max_latency: float = option(0.050, low=0, high=60, unit="seconds")
    queue_capacity: int | None = option(None, low=1, high=1_000_000)
    response_timeout: float = option(5.0, low=0, above=True, high=3600, unit="seconds")
    max_in_flight_per_feed: int = option(1, low=0, high=1_000_000)
    startup_timeout: float = option(30.0, low=0, above=True, high=3600, unit="seconds")
    watchdog: float = option(60.0, low=0, high=3600, unit="seconds")

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
    """What is computed in place of a frame that waited."""

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
        """Its batch begins, or its call is repeated: take the newest frame, once. Raises what that raised."""
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
    """The processor of a coordinator. It is called on one thread only and needs no lock.

    id: names it in metrics and events. It may have `on_start`, called once before the first batch: load the model
    there, `start` raises its exception; and `on_stop`, called once after the last batch, if `on_start` succeeded and
    the thread did not die. A class may set `repeatable = False`: then a call that raised is not repeated with fewer
    entries to find the bad one, and the whole batch fails. It may have `batch_size`, known after `on_start`:
    how many entries a call computes, whatever it is given; batches are then no larger. None: any number. It may change.
    It may have `prepare(frame)`, which feeds call on their own threads, several at once: what it returns is the entry's
    `view`, unless a feed makes its own. So work on one frame needs no time of the thread that runs `process`, which
    calls it only for a frame that is taken when its batch begins.
    """

    id: str

    def process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        """One result per entry, in order. An exception instance fails that entry alone; None counts as missing."""


class Owned(BaseProcessor):
    """Makes a `Processor` of a user's `BatchProcessor`. sizes: told how long its calls take."""

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
                faults[place] = Failed(error if isinstance(error, ReflexError) else wrapped(error))
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
            results = self.processor.process(entries)
        except ReflexError as error:
            raise _of_processor(error) from error
        if results is None or isinstance(results, (Mapping, str, bytes)):  # of these the keys or letters would be taken
            found = "None" if results is None else kind_of(results)
            raise ResultCountMismatch(f"process returned {found}, expected a sequence of {len(entries)} results")
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
    """A ProcessorError for a runtime error that a processor raised, such as another coordinator's refusal.

    The original class would say that the frame never ran and may be sent again.
    """
    return error if isinstance(error, ProcessorError) else wrapped(error)


def _missing() -> Failed:
    """A new error each time: raising one attaches a traceback, and with it the frame of the caller."""
    return Failed(ProcessorError("process gave no result for this frame: found None"))


def id_of(processor: BatchProcessor) -> str:
    name = getattr(processor, "id", None)
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise ConfigError(f"{type(processor).__name__}.id={name!r}: must be a text of 1 to 64 characters")
    if not callable(getattr(processor, "process", None)):
        raise ConfigError(f"{type(processor).__name__}: has no method process(), which a batch processor needs")
    return name
