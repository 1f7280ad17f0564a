"""Brief batches run on the event loop, without the hand-over to a thread.

A hand-over there and back costs more than a small model. But while a batch runs on the loop nothing else does, so a
kind of batch runs there only after many of them in a row were brief, and the first long one sends it back.

Such a batch runs in `turn`, at the end of the loop's turn. Meanwhile the device thread watches it: it expires tickets,
and says so if the batch does not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextvars import Context
from math import inf
from typing import Final

from reflex_runtime.core.batch import Apart, Batch, Done, Failed, Outcome
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.device import Clock, Device
from reflex_runtime.run.processor import Processor, may_run_anywhere, run_batch

BRIEF: Final = 0.0003  # seconds; a hand-over costs 0.05 to 0.15 ms of them
PROOF: Final = 32  # batches in a row that must be brief
MOST_PROOF: Final = 4096  # after long ones that came soon, at most so many
KINDS: Final = 256  # kinds that are measured; with more of them all are measured anew


class _Proof:
    """Batches of one group, partition and stage.

    proof: how many must be brief in a row. brief: how many have been. size, seconds: of the largest among them.
    """

    __slots__ = ("brief", "proof", "seconds", "size")

    def __init__(self) -> None:
        self.brief, self.proof = 0, PROOF
        self.size, self.seconds = 0, inf


class BriefBatches:
    """Measures every batch, and answers where the next one runs.

    limit: the longest that a brief batch takes, in seconds; 0: none is brief. processors: by group; those with
    `any_thread` may run on the loop.
    """

    def __init__(self, limit: float, processors: Mapping[str, Processor]) -> None:
        self.limit, self._processors = limit, processors
        self._kinds: dict[tuple[str, Hashable, str], _Proof] = {}
        self._proven: dict[str, int] = {}  # kinds that are, by group

    def group(self, name: str) -> bool:
        """Whether any batch of the group may run on the loop."""
        return self._proven.get(name, 0) > 0 and may_run_anywhere(self._processors[name])

    def fits(self, batch: Batch) -> bool:
        """Whether this batch may run on the loop: many of its kind were brief, and it is predicted to be.

        One larger than they were is predicted to take longer in proportion.
        """
        kind = self._kinds.get((batch.group, batch.partition, batch.stage))
        if kind is None or kind.brief < kind.proof:
            return False
        return kind.seconds * max(1.0, len(batch) / kind.size) <= self.limit

    def ran(self, batch: Batch, seconds: float, failed: bool = False) -> None:
        """A batch came back after so many seconds, on the loop or on the device thread. One that failed proves nothing,
        unless it was long."""
        if self.limit <= 0.0:
            return
        key = (batch.group, batch.partition, batch.stage)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == KINDS:
                self._kinds.clear()
                self._proven.clear()
            kind = self._kinds[key] = _Proof()
        if seconds > self.limit:
            self._was_long(batch.group, kind)
            return
        if failed:
            return
        if len(batch) >= kind.size:
            kind.size, kind.seconds = len(batch), seconds
        kind.brief += 1
        if kind.brief == kind.proof:
            self._proven[batch.group] = self._proven.get(batch.group, 0) + 1

    def _was_long(self, group: str, kind: _Proof) -> None:
        if kind.brief >= kind.proof:
            self._proven[group] -= 1
            soon = kind.brief < 2 * kind.proof
            kind.proof = min(2 * kind.proof, MOST_PROOF) if soon else PROOF
        kind.brief, kind.size, kind.seconds = 0, 0, inf


# -- a device whose brief batches run on the event loop ----------------------------------------------------------------


log = logging.getLogger("reflex.device")


class LoopDevice(Device):
    """A `Device` that forms full batches ahead, and runs brief ones on the thread that calls `turn`.

    brief: seconds up to which batches may run there; 0: none do.
    on_stuck: called on the device thread, once a watchdog, while a batch that runs there has taken longer than that:
        the thread that could answer is not free.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processors: Mapping[str, Processor],
        notify: Callable[[], None],
        clock: Clock,
        on_fatal: Callable[[], None] | None = None,
        watchdog: float = inf,
        expendable: Collection[str] = (),
        one_thread: bool = False,
        brief: float = 0.0,
        on_stuck: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            scheduler, processors, notify, clock, on_fatal,
            watchdog=watchdog, expendable=expendable, one_thread=one_thread, ahead=True,
        )  # fmt: skip
        self._brief = BriefBatches(0.0 if one_thread else brief, processors)
        self._context = Context()  # as a thread has one: not that of the caller who woke the loop
        self._here = False  # the batch that runs is on the thread that called `turn`
        self._handed: Batch | None = None  # formed there, but for the device thread to run
        self._on_stuck = on_stuck

    # -- the thread that calls `turn` ----------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Let a free device take what was submitted: here, if its batch is brief, else on its thread.

        Returns whether a batch ran here; its events wait to be taken. Always on the same thread.
        """
        if not self._bell.waiting:
            return False
        with self._lock:
            settled = self.scheduler.settled
            try:
                batch = self._form_here() if self._has_news() else None
            except BaseException:  # it fails on the device thread, too, and there it has consequences
                self._bell.ring()
                raise
            news = settled != self.scheduler.settled
        if batch is None:
            if news:  # some were shed
                self._notify()
            return False
        try:
            outcomes = self._context.run(run_batch, self._processors[batch.group], batch)
        except BaseException:  # the caller does not go on with what waits
            error = Failed(ProcessorError("the thread that ran it was interrupted"))
            self._came_back(batch, [error] * len(batch), ring=True)
            self._notify()
            raise
        self._came_back(batch, outcomes, ring=False)
        return True

    def _form_here(self) -> Batch | None:
        """The batch to run on the calling thread; otherwise the device thread is woken. The lock is held."""
        busy = [group for group in self._processors if self.scheduler.unsettled(group)]
        if not self._bell.waiting or self._stopping or not all(map(self._brief.group, busy)):
            self._bell.ring()
            return None
        self._settle()
        assert self._ahead is not None
        self._ahead.rest()
        batch = self.scheduler.next_batch(self.clock())
        if batch is None:  # the thread sleeps until the end of a hold
            self._bell.ring()
            return None
        if not self._brief.fits(batch):
            self._start(batch, self.clock())
            self._handed = batch
            self._bell.ring()
            return None
        self._running, self._here = (batch, self.clock()), True
        batch.notes["on_loop"] = True
        return batch

    def _came_back(self, batch: Batch, outcomes: Sequence[Outcome], ring: bool) -> None:
        with self._lock:
            self._here = False
            if self._running is not None and self._running[0] is batch:  # it was not given up meanwhile
                self._complete(outcomes, self.clock())
                self._settle()
            dropped = not all(isinstance(outcome, Done) for outcome in outcomes) and self.scheduler.idle
            if self._stopping or ring or dropped:  # residents that left, and no next batch names them
                self._bell.ring()

    # -- device thread -------------------------------------------------------------------------------------------------

    def _take(self, now: float) -> tuple[Batch | None, Sequence[tuple[Processor, tuple[Ticket, ...]]]]:
        handed, self._handed = self._handed, None
        if handed is not None:
            return handed, ()
        if self._here:
            self._look_here(now)
            return None, ()
        return super()._take(now)

    def _look_here(self, now: float) -> None:
        """A batch runs on the thread that called `turn`. The lock is held."""
        self.scheduler.expire(now)
        if self._running is None or now - self._running[1] < self.watchdog:
            return
        batch, since = self._running
        log.error("batch %d has run for %.0f s on the event loop, which stands still", batch.id, now - since)
        if self._on_stuck is not None:
            self._on_stuck()

    def _complete(self, outcomes: Sequence[Outcome], now: float) -> None:
        if self._running is not None:
            batch, since = self._running
            self._brief.ran(batch, now - since, failed=isinstance(outcomes[0], Failed | Apart))
        super()._complete(outcomes, now)

    def _has_work(self) -> bool:
        return self._here or super()._has_work()

    def _wait(self, most: float = inf) -> None:
        super()._wait(min(most, self.watchdog))

    def _answer_running(self, error: ProcessorError) -> None:
        self._handed = None
        super()._answer_running(error)
