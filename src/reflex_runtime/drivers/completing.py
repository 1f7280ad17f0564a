"""How every driver completes a batch: also if its cost model raises, each of its requests is answered."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from reflex_runtime.core.batch import Batch, Failed, Outcome
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.scheduler import Scheduler

log = logging.getLogger("reflex.device")


def complete(scheduler: Scheduler, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
    """Complete a batch that took `elapsed` seconds. If the cost model cannot learn from it, it is logged, and the batch
    fails with a ProcessorError."""
    try:
        scheduler.complete(batch, outcomes, elapsed, now)
    except Exception as error:  # the batch is still in flight, see `Scheduler.complete`
        log.exception("batch %d could not be completed", batch.id)
        failed = Failed(ProcessorError(f"its batch could not be completed: {type(error).__name__}: {error}"))
        scheduler.complete(batch, [failed] * len(batch), elapsed, now)
