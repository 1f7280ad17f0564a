"""A driver that makes one step per call, in the calling thread: form a batch, run it, complete it.

Tests, offline generation and tracing use it: nothing happens between two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.events import Event
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.device import complete
from reflex_runtime.run.processor import Processor, run_batch


class Stepper:
    """Runs a scheduler's batches one by one. Not thread-safe.

    processors: one per group. sinks: called with every event, in order; what they raise reaches the caller of `step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processors: Mapping[str, Processor],
        sinks: Iterable[Callable[[Event], object]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.sinks = list(sinks)
        self._processors = processors

    def step(self) -> Batch | None:
        """One batch, formed, run and completed; None when the scheduler has none now."""
        batch = self.scheduler.next_batch(self.clock())
        self.deliver()
        if batch is None:
            self._drop()
            return None
        start = self.clock()
        outcomes = run_batch(self._processors[batch.group], batch)
        end = self.clock()
        complete(self.scheduler, batch, outcomes, end - start, end)
        self.deliver()
        return batch

    def deliver(self) -> None:
        """Call the sinks with what has happened since the last call, such as an input of the caller."""
        for event in self.scheduler.take_events():
            for sink in self.sinks:
                sink(event)

    def _drop(self) -> None:
        """Drop residents that left, where no next batch names them."""
        for name, processor in self._processors.items():
            if left := self.scheduler.take_left(name):
                processor.drop(left)
