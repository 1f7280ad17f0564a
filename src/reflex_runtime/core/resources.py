"""Resources that residents occupy between steps (memory blocks, slots), and the protocol to reserve them.

The scheduler reserves before it schedules, commits when the step succeeded and rolls back when it failed, so a step is
a transaction. `UnitPool` is the smallest real implementation, an example to copy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request, Ticket


class Resources(Protocol):
    """Memory of residents. All methods are called with the scheduler's lock held and must not wait."""

    def fits(self, request: Request) -> bool:
        """Whether the request could run if it were alone; False refuses it with TooLarge."""

    def begin(self, ticket: Ticket) -> float:
        """The ticket is about to enter: claim its cached units; returns the number that need no computing."""

    def reserve(self, ticket: Ticket, units: float) -> bool:
        """Reserve `units` more for the ticket; False if there is no room."""

    def extend(self, ticket: Ticket, units: float, more: float) -> float:
        """Reserve up to `more` units beyond the `units` that were just reserved; returns how many."""

    def would_fit(self, ticket: Ticket, units: float, released: Collection[Ticket]) -> bool:
        """Whether `reserve(ticket, units)` would succeed once these others were released. Changes nothing."""

    def commit(self, batch: Batch) -> None:
        """The step succeeded."""

    def rollback(self, batch: Batch) -> None:
        """The step failed: undo its reservations."""

    def release(self, ticket: Ticket) -> None:
        """The ticket left or was preempted: free everything it holds."""


class UnitPool:
    """A pool of `capacity` units: a ticket holds one for each unit it was granted, until it leaves."""

    def __init__(self, capacity: float) -> None:
        if not capacity > 0:
            raise ConfigError(f"UnitPool.capacity={capacity!r}: must be > 0 units")
        self.capacity = capacity
        self._held: dict[Ticket, float] = {}
        self.used = 0.0

    def fits(self, request: Request) -> bool:
        return request.wants <= self.capacity

    def begin(self, ticket: Ticket) -> float:
        return 0.0

    def reserve(self, ticket: Ticket, units: float) -> bool:
        if self.used + units > self.capacity:
            return False
        self._held[ticket] = self._held.get(ticket, 0.0) + units
        self.used += units
        return True

    def extend(self, ticket: Ticket, units: float, more: float) -> float:
        more = min(more, self.capacity - self.used)
        return more if more > 0.0 and self.reserve(ticket, more) else 0.0

    def would_fit(self, ticket: Ticket, units: float, released: Collection[Ticket]) -> bool:
        return self.used - sum(self._held.get(t, 0.0) for t in released) + units <= self.capacity

    def commit(self, batch: Batch) -> None:
        return

    def rollback(self, batch: Batch) -> None:
        for ticket, units in batch.grants.items():
            if ticket in self._held:
                self._held[ticket] -= units
                self.used -= units

    def release(self, ticket: Ticket) -> None:
        self.used -= self._held.pop(ticket, 0.0)
