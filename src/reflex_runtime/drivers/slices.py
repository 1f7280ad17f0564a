"""Thousands of requests, cancels or answers are done in slices: a turn of the loop each, with other work in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from reflex_runtime.core.request import Ticket
from reflex_runtime.core.scheduler import Scheduler

TURN: Final = 0.004  # seconds after which the rest of the events is for the next turn of the loop
SLICE: Final = 64  # requests queued or cancelled, and answers delivered, in one turn of the loop: a few milliseconds


class Slices:
    """Of one caller that makes or queues its requests one after the other."""

    def __init__(self) -> None:
        self._done = 0  # in this turn of the loop

    async def next(self, count: int = 1) -> bool:
        """So many requests are next: in this turn of the loop, or in the next one where it has a slice of them. Whether
        others had their turn."""
        full = self._done > 0 and self._done + count > SLICE
        if full:
            self._done = 0
            await asyncio.sleep(0)
        self._done += count
        return full


def in_order(lock: asyncio.Lock, count: int) -> AbstractAsyncContextManager[None]:
    """While it is open, so many requests are queued. Of those with more than a slice one goes after the other, or two
    that do not fit together would both be refused. lock: of the queue."""
    return lock if count > SLICE else nullcontext()


class Cancels:
    """Cancels requests at once, as long as there are few in a turn of the loop; the others in its next turns.

    input: the driver's way to make an input to its scheduler. Called on the loop.
    """

    def __init__(self, input: Callable[[Callable[[Scheduler, float], None]], object]) -> None:
        self._input = input
        self._cancelled = 0  # in this turn of the loop
        self._later: deque[Ticket] = deque()

    @property
    def pending(self) -> bool:
        """Whether some were added that are not cancelled yet."""
        return bool(self._later)

    def add(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel it now or soon, after those that were added before. loop: the running one."""
        if not self._cancelled:
            loop.call_soon(self._next_turn, loop)
        self._cancelled += 1
        if self._cancelled <= SLICE and not self._later:
            self._cancel([ticket])
        else:
            self._later.append(ticket)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cancelled = min(SLICE, len(self._later))
        if self._cancelled:
            loop.call_soon(self._next_turn, loop)
            self._cancel([self._later.popleft() for _ in range(self._cancelled)])

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        def cancel(scheduler: Scheduler, now: float) -> None:
            for ticket in tickets:
                scheduler.cancel(ticket, now)

        self._input(cancel)
