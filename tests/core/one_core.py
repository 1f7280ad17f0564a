"""Callers that send a picture and ask again at once, in virtual time, on one core that decodes and runs batches.

While it does both, each takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler

BACK, ONE_BY_ONE = 0.0003, 0.00005  # seconds from an answer to the next request, and between answers of a batch


@dataclass
class OneCore:
    """decoding, fixed, marginal: seconds of the core. latencies, sizes: of what was answered in the second half."""

    callers: int
    decoding: float
    fixed: float
    marginal: float
    noise: float = 0.03
    latencies: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(0)
        group = GroupConfig(flush=FlushPolicy.window(0.100), controller=Planner())
        self._scheduler = Scheduler([group])
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._asked: dict[Hashable, float] = {}
        self._decodes: list[tuple[Ticket, float]] = []  # and the seconds left
        self._batch: Batch | None = None
        self._left = self._now = 0.0

    @property
    def mean_batch(self) -> float:
        return sum(self.sizes) / len(self.sizes)

    def run(self, seconds: float) -> OneCore:
        for caller in range(self.callers):
            self._ask_at(0.005 * self._random.random(), caller)
        while self._now < seconds:
            if self._batch is None:
                self._start()
            self._step(seconds / 2)
        return self

    def _ask_at(self, time: float, caller: int) -> None:
        def ask() -> None:
            self._asked[caller] = self._now
            ticket = self._scheduler.submit(Request(client=caller), self._now, ready=False)
            spread = 0.2 * (self._random.random() - 0.5) if self.noise else 0.0
            self._decodes.append((ticket, self.decoding * (1.0 + spread)))

        heappush(self._agenda, (time, len(self._agenda) + self._scheduler.settled * 1000 + caller, ask))

    def _start(self) -> None:
        self._batch = self._scheduler.next_batch(self._now)
        if self._batch is not None:
            takes = self.fixed + self.marginal * len(self._batch)
            self._left = takes * (1.0 + self.noise * self._random.gauss(0.0, 1.0))

    def _step(self, counted_from: float) -> None:
        batch, decodes = self._batch, self._decodes
        speed = 0.5 if batch is not None and decodes else 1.0
        times = [self._agenda[0][0] if self._agenda else inf]
        times.append(max(self._now, self._scheduler.wake_at()) if batch is None else self._now + self._left / speed)
        times.append(self._now + decodes[0][1] / speed if decodes else inf)
        passed, self._now = min(times) - self._now, min(times)
        self._left -= passed * speed
        if decodes:
            decodes[0] = (decodes[0][0], decodes[0][1] - passed * speed)
        if self._now == times[0]:
            heappop(self._agenda)[2]()
        elif decodes and self._now == times[2]:
            ticket, _ = decodes.pop(0)
            self._scheduler.prepared(ticket, ticket.request, self._now)
        elif batch is not None:
            self._end(batch, counted_from)

    def _end(self, batch: Batch, counted_from: float) -> None:
        self._batch = None
        self._scheduler.complete(batch, [Done()] * len(batch), self._now - batch.scheduled_at, self._now)
        self._scheduler.take_events()
        if self._now >= counted_from:
            self.sizes.append(len(batch))
        for i, ticket in enumerate(batch.grants):
            caller: int = ticket.request.client  # type: ignore[assignment]
            if self._now >= counted_from:
                self.latencies.append(self._now - self._asked[caller])
            self._ask_at(self._now + BACK + i * ONE_BY_ONE, caller)
