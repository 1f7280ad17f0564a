"""The device that the models of one event loop run on: one batch at a time, of the model whose turn it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from reflex_runtime.core.events import BatchFinished, Event
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.drivers.batcher import Batcher, Sink
from reflex_runtime.processors.base import Processor

log = logging.getLogger("reflex.server")


class GroupProcessor(Processor, Protocol):
    """A processor that says the settings of its group, whose name is its own."""

    name: str

    @property
    def group(self) -> GroupConfig: ...


class ModelDevice:
    """One scheduler and one thread for all models; those that have work share its time by weight.

    processors: taken over; closed with the device. watchdog: seconds that a step may take until its callers are told; a
    model that has not come back in twice that time is given up (`on_fatal`, on the loop, once). sinks: see `Batcher`.
    """

    events = frozenset({BatchFinished})  # as a sink

    def __init__(
        self,
        processors: Seq[GroupProcessor],
        *,
        watchdog: float = 60.0,
        sinks: Iterable[Sink] = (),
        on_fatal: Callable[[], None] | None = None,
    ) -> None:
        self.groups = [processor.group for processor in processors]
        # A step that hangs may still write to the cache: no other step may run before it has returned.
        self.batcher = Batcher(
            {processor.name: processor for processor in processors}, self.groups, [self, *sinks], watchdog,
            on_fatal=self._given_up, one_thread=True,
        )  # fmt: skip
        self._watchdog, self._on_fatal = watchdog, on_fatal
        self._hung: asyncio.TimerHandle | None = None

    async def start(self, prepare: Callable[[], object] | None = None) -> None:
        """Start the thread. prepare: see `Batcher.start`."""
        await self.batcher.start(prepare)

    async def close(self, drain: bool = True, timeout: float = 10.0) -> bool:
        """Refuse new requests, finish those accepted within `timeout` seconds, end the rest with an error.

        Every stream has ended when it returns. Returns whether the thread has, too.
        """
        ended = await self.batcher.close(drain, timeout)
        if self._hung is not None:
            self._hung.cancel()
        return ended and not self.batcher.device.busy

    @property
    def hangs(self) -> bool:
        """Whether a step was given up and has not come back."""
        device = self.batcher.device
        return device.busy and device.running_since is None

    def __call__(self, event: Event) -> None:
        """A sink: watch a step that was given up."""
        if isinstance(event, BatchFinished) and event.crashed and self.hangs and self._hung is None:
            loop, count = asyncio.get_running_loop(), self.batcher.device.hung
            self._hung = loop.call_later(self._watchdog, self._still_hangs, count)

    def _still_hangs(self, count: int) -> None:
        """Called one time limit after a step was given up: if it has not returned by then, the model is lost."""
        self._hung = None
        if self.hangs and self.batcher.device.hung == count:
            log.error("a step has not come back in %g s: the model is given up", 2 * self._watchdog)
            while self.batcher.device.input(lambda scheduler, now: scheduler.close(now, drain=False)):
                pass
            self._given_up()

    def _given_up(self) -> None:
        on_fatal, self._on_fatal = self._on_fatal, None
        if on_fatal is not None:
            on_fatal()
