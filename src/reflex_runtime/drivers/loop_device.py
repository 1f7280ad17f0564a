"""A device whose brief batches run on the event loop (`brief`): a hand-over to its thread costs more than such a batch.

Such a batch runs in `turn`, at the end of the loop's turn. Meanwhile the device thread watches it: it expires tickets,
and says so if the batch does not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

from reflex_runtime.core.batch import Apart, Batch, Done, Failed, Outcome
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.brief import BriefBatches
from reflex_runtime.drivers.device import Clock, Device
from reflex_runtime.processors.base import Processor, run_batch

log = logging.getLogger("reflex.device")


class LoopDevice(Device):
    """A `Device` that forms full batches ahead, and runs brief ones on the thread that calls `turn`.

    brief: seconds up to which batches may run there; 0: none do.
    on_stuck: called on the device thread, once a `look_every`, while a batch that runs there has taken longer than
        that: the thread that could answer is not free.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processors: Mapping[str, Processor],
        notify: Callable[[], None],
        clock: Clock,
        on_fatal: Callable[[], None] | None = None,
        expendable: Collection[str] = (),
        one_thread: bool = False,
        brief: float = 0.0,
        on_stuck: Callable[[], None] | None = None,
        look_every: float = inf,
    ) -> None:
        super().__init__(
            scheduler, processors, notify, clock, on_fatal, expendable=expendable, one_thread=one_thread, ahead=True
        )
        self._brief = BriefBatches(0.0 if one_thread else brief, processors)
        self._here = False  # the batch that runs is on the thread that called `turn`
        self._handed: Batch | None = None  # formed there, but for the device thread to run
        self._on_stuck, self._look_every = on_stuck, look_every

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
            outcomes = run_batch(self._processors[batch.group], batch)
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
        if self._running is None or now - self._running[1] < self._look_every:
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
        super()._wait(min(most, self._look_every))

    def _answer_running(self, error: ProcessorError) -> None:
        self._handed = None
        super()._answer_running(error)
