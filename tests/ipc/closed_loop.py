"""Closed-loop callers in front of a runtime process, in virtual time: for what the generate batcher saves and costs.

    callers ─▶ front: one request after the other ─▶ scheduler ─▶ messages ─▶ engine: steps
       ▲                                                                        │
       └──────────── front: one token after the other ◀── a frame per step ─────┘

Callers ask again as soon as their stream has ended, one by one, tens of microseconds apart. A step takes in what came
before it began. Timers of the front are whole milliseconds, as on its real loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from statistics import median

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.ipc.generate_batcher import StepHold

MS = 0.001
PARSE, TOKEN, WRITE, WIRE, CLIENT, NET = 0.07 * MS, 0.015 * MS, 0.05 * MS, 0.12 * MS, 0.06 * MS, 0.1 * MS


@dataclass
class ClosedLoop:
    """callers: of answers with a number of tokens from this range. step: seconds. batched: False sends each alone.

    messages, requests, firsts (seconds to the first token), begun (steps in which requests began): after half a second.
    """

    callers: int
    step: float
    tokens: tuple[int, int]
    batched: bool = True
    seed: int = 0
    messages: int = 0
    begun: int = 0
    requests: int = 0
    firsts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._active = 0
        self._steps = StepHold(lambda: self._active > 0, 0.75 * MS)
        flush = FlushPolicy(max_batch_size=16, hold_max=(0.0, 3 * MS, 5 * MS))
        if not self.batched:
            flush = FlushPolicy(max_batch_size=1)
        controller = self._steps if self.batched else None
        self._scheduler = Scheduler([GroupConfig(flush=flush, cost=UnitCost, controller=controller)], 256)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self._now = self._front_free = self._client_free = 0.0
        self._asked: dict[int, float] = {}
        self._timer = 0
        self._frame: list[tuple[int, int]] = []
        self._coming: list[tuple[int, int]] = []
        self._running: dict[int, int] = {}
        self._stepping = False

    def run(self, seconds: float) -> ClosedLoop:
        for i in range(self.callers):
            self._at(i * 0.12 * MS, lambda i=i: self._ask(i))  # type: ignore[misc]
        while self._agenda and self._agenda[0][0] < seconds:
            self._now, _, action = heappop(self._agenda)
            action()
        return self

    @property
    def saved(self) -> float:
        """Share of messages."""
        return 1.0 - self.messages / self.requests

    @property
    def most(self) -> float:
        """Share of messages that could be saved if each step got all its requests in one."""
        return 1.0 - self.begun / self.requests

    @property
    def first(self) -> float:
        """Median seconds to the first token."""
        return median(self.firsts)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._entries += 1
        heappush(self._agenda, (time, self._entries, action))

    def _about(self, seconds: float) -> float:
        return seconds * (0.85 + 0.3 * self._random.random())

    # -- callers and front -------------------------------------------------------------------------------------------

    def _ask(self, caller: int) -> None:
        self._client_free = max(self._client_free, self._now) + self._about(CLIENT)
        self._asked[caller] = self._client_free
        self._at(self._client_free + NET, lambda: self._at(self._front(PARSE), lambda: self._submit(caller)))

    def _front(self, takes: float) -> float:
        """When the front has done this, after what it does already."""
        self._front_free = max(self._front_free, self._now) + self._about(takes)
        return self._front_free

    def _submit(self, caller: int) -> None:
        self._scheduler.submit(Request(payload=caller), self._now)
        self._turn()

    def _turn(self) -> None:
        while (batch := self._scheduler.next_batch(self._now)) is not None:
            self._send(batch)
        self._scheduler.take_events()
        if self._frame:
            said, self._frame = self._frame, []
            self._at(self._front_free + WIRE, lambda: self._come(said))
        self._timer += 1
        wake = self._scheduler.wake_at()
        if wake < 1e9:
            ticks, timer = max(1, int((wake - self._now) / MS + 0.5)), self._timer
            self._at(self._now + ticks * MS, lambda: self._turn() if timer == self._timer else None)

    def _send(self, batch: Batch) -> None:
        began = self._now
        if not self._active:
            self._steps.begins(began)
        self._active += len(batch)
        if began > 0.5:
            self.messages += 1
            self.requests += len(batch)
        for ticket in batch.grants:
            tokens = self._random.randint(*self.tokens)
            self._frame.append((ticket.request.payload, tokens))
        answered = self._front(WRITE) + 2 * WIRE + 0.2 * MS
        self._at(answered, lambda: self._answered(batch, began))

    def _answered(self, batch: Batch, began: float) -> None:
        self._scheduler.complete(batch, [Done()] * len(batch), self._now - began, self._now)
        self._turn()

    def _token(self, caller: int, last: bool) -> None:
        self._steps.begins(self._now)
        asked = self._asked.pop(caller, None)
        if asked is not None and asked > 0.5:
            self.firsts.append(self._now + NET - asked)
        if last:
            self._active -= 1
            self._steps.took(self.step)
            self._scheduler.set_room("default", None, self._now)  # the batcher says so whenever a stream ended
            self._turn()
            self._at(self._now + NET, lambda: self._ask(caller))

    # -- engine --------------------------------------------------------------------------------------------------------

    def _come(self, requests: list[tuple[int, int]]) -> None:
        self._coming += requests
        if not self._stepping:
            self._begin_step()

    def _begin_step(self) -> None:
        self.begun += bool(self._coming) and self._now > 0.5
        self._running |= dict(self._coming)
        self._coming.clear()
        self._stepping = bool(self._running)
        if self._stepping:
            self._at(self._now + self.step * (1.0 + 0.02 * self._random.random()), self._end_step)

    def _end_step(self) -> None:
        said = [(caller, left == 1) for caller, left in self._running.items()]
        self._running = {caller: left - 1 for caller, left in self._running.items() if left > 1}
        self._at(self._now + WIRE, lambda: self._tokens(said))
        self._begin_step()

    def _tokens(self, said: list[tuple[int, bool]]) -> None:
        for caller, last in said:
            self._at(self._front(TOKEN), lambda c=caller, e=last: self._token(c, e))  # type: ignore[misc]
