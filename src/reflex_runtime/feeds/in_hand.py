"""The frame that a feed works on. Of a camera it is the newest one there is when its batch begins."""

from __future__ import annotations

import threading
from typing import Any

from reflex_runtime.core.errors import Expired
from reflex_runtime.feeds.frame import Frame
from reflex_runtime.feeds.pipeline import Pipeline
from reflex_runtime.feeds.queue import FrameQueue
from reflex_runtime.feeds.snapshot import Ledger
from reflex_runtime.run.device import Clock
from reflex_runtime.run.submitted_frame import NewestFrame


class FrameInHand:
    """One frame after another may be in hand: a newer one takes its place while it waits for the processor.

    frame: as it was read. made: what the stages before the batch point made of it. replaced: whether it is a newer one
    than that which was submitted.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = self.made = frame
        self.replaced = False
        self._view: Any = None
        self._waits = True  # for its batch; then no frame is taken any more
        self._guard = threading.Lock()  # of these

    def view(self, pipeline: Pipeline) -> Any:
        """What goes with it to the processor, made once."""
        if self._view is None:
            self._view = pipeline.view_of(self.made)
        return self._view

    def newest(
        self, queue: FrameQueue, pipeline: Pipeline, ledger: Ledger, max_age: float, clock: Clock
    ) -> NewestFrame:
        """What its batch computes: the newest frame of the queue, else this one. The one that it replaces is dropped.

        Called by the coordinator. Raises `Expired` if it is older than max_age, or what a preparation raises.
        """
        with self._guard:
            newer = queue.get(0.0) if self._waits else None
            self._waits = False
            if newer is not None:
                ledger.overrun()
                self.frame = self.made = newer
                self.replaced, self._view = True, None
        deadline = self.frame.captured + max_age
        if deadline <= clock():
            raise Expired(f"older than max_age={max_age:g} s when its batch began")
        frame = self.made
        return NewestFrame(pipeline.part(frame.image), self.view(pipeline), frame.sequence, frame.pts, deadline)

    def leave(self) -> None:
        """It waits no more: from now on it stays the same, also if its batch begins."""
        with self._guard:
            self._waits = False
