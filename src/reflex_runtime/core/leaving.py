"""Tickets that leave without running, at most `AT_ONCE` in one call of the scheduler.

Thousands of deadlines may pass in the same moment. Settling them at once would keep the driver's lock for a tenth of a
second. So a call settles some, and the next one is due at once (`Leaving.behind`). A batch is formed only when no
ticket is left that must not be in it; tickets that are shed do not keep a batch waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from math import inf
from typing import Final

from reflex_runtime.core.errors import Cancelled, Drained, Expired, ReflexError, Shed
from reflex_runtime.core.group import Group
from reflex_runtime.core.heap import LazyHeap
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import RUNNING, SETTLED, WAITING, Ticket

AT_ONCE: Final = 16  # tickets settled in one call: about a third of a millisecond
LOOKED_AT: Final = 4 * AT_ONCE  # tickets looked at for those that are too late; some may not be shed

Leaves = tuple[Ticket, ReflexError]


class Leaving:
    """What must leave, by reason.

    unready: tickets that are prepared, by deadline. behind: whether the last call may have left some. holds_up: whether
    one of them must not be in a batch.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups.values()
        self.unready: LazyHeap[Ticket, float] = LazyHeap()
        self._abandoned: deque[Ticket] = deque()
        self._late: dict[Partition, tuple[Group, float]] = {}  # until when the device is taken
        self.behind = self.holds_up = False

    def expires_at(self) -> float:
        """The earliest deadline of tickets that wait, are resident or are prepared; inf if none has one."""
        found = top[0] if (top := self.unready.first()) is not None else inf
        for group in self._groups:
            expires = group.turns.expires_at()
            if expires < found:
                found = expires
        return found

    def abandon(self, ticket: Ticket) -> None:
        """Its caller left: it leaves when a batch is formed."""
        self._abandoned.append(ticket)

    def shed(self, group: Group, partition: Partition, after: float) -> None:
        """The partition has more tickets that are too late if they run after that time."""
        self._late[partition] = group, after
        self.behind = True

    def due(self, now: float, drained: bool, forming: bool) -> Iterator[Leaves]:
        """Those that leave now: each is ended before the next is asked for.

        drained: whether all leave that do not run. forming: whether a batch is to be formed.
        """
        if not (drained or self._abandoned or self._late) and self.expires_at() > now:
            self.behind = self.holds_up = False
            return
        some: list[Iterable[Leaves]] = [self._drained()] if drained else []
        some.append(self._expired(now))
        if forming:
            some.append(self._gone())
        left = AT_ONCE
        for leaves in islice(chain.from_iterable(some), AT_ONCE):
            left -= 1
            yield leaves
        self.behind = self.holds_up = left == 0
        yield from self._too_late(left)

    def _expired(self, now: float) -> Iterator[Leaves]:
        error = "its deadline passed before it was answered"
        while (top := self.unready.first()) is not None and top[0] <= now:
            yield top[1], Expired(error)
        for group in self._groups:
            while group.turns.expires_at() <= now:
                yield group.turns.first_to_expire(), Expired(error)

    def _drained(self) -> Iterator[Leaves]:
        """All that do not run; running ones leave at their boundary."""
        prepared = (t for g in self._groups for tickets in g.preparing.values() for t in tickets)
        queued = (t for g in self._groups for p in g.active.values() for t in p.tickets() if t.state is not RUNNING)
        for ticket in list(islice(chain(prepared, queued), AT_ONCE)):
            yield ticket, Drained("the server is shutting down")

    def _gone(self) -> Iterator[Leaves]:
        abandoned = self._abandoned
        for _ in range(len(abandoned)):
            ticket = abandoned.popleft()
            if ticket.state is RUNNING:
                abandoned.append(ticket)
            elif ticket.state is not SETTLED:
                yield ticket, Cancelled("its caller stopped waiting")

    def _too_late(self, most: int) -> Iterator[Leaves]:
        while self._late and most:
            partition, (group, after) = next(iter(self._late.items()))
            found, more = too_late(group, partition, after, (), lambda t: not group.evidence.probes(t), most)  # noqa: B023
            most -= len(found)
            if not more:
                del self._late[partition]
            for ticket in found:
                yield ticket, Shed("its deadline can no longer be met")
        self.behind = self.behind or bool(self._late)


def too_late(
    group: Group,
    partition: Partition,
    after: float,
    spared: Collection[Ticket],
    may: Callable[[Ticket], bool],
    most: int | None = None,
) -> tuple[list[Ticket], bool]:
    """Waiting tickets that cannot be answered in time after that time, tightest first, and whether there may be more.

    spared: others. may: whether one may be shed. most: AT_ONCE, unless given.
    """
    most = AT_ONCE if most is None else most
    found: list[Ticket] = []
    for ticket in islice(partition.deadlines.ascending(), LOOKED_AT + len(spared) + len(partition.residents)):
        if len(found) == most:
            return found, True
        if ticket.state is not WAITING or ticket in spared:
            continue
        if after + group.cost.remaining(ticket) <= ticket.deadline:
            break
        if may(ticket):
            found.append(ticket)
    return found, False
