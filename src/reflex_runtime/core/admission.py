"""Whether a request may enter, and stay.

One call of the scheduler ends at most `AT_ONCE` tickets that leave without running. Thousands of deadlines may pass in
one moment, and to settle all of them would keep the driver's lock for a tenth of a second. So a call settles some, and
the next call is due at once (`Leaving.behind`). A batch is formed when no ticket is left that must not be in it;
tickets that are shed do not delay a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import Final

from reflex_runtime.core.cost import SLACK
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    Drained,
    Expired,
    InFlightCapReached,
    QueueFull,
    ReflexError,
    Shed,
    TooLarge,
    TooLate,
)
from reflex_runtime.core.group import Group
from reflex_runtime.core.order import LazyHeap, Partition
from reflex_runtime.core.request import BACKGROUND, RUNNING, SETTLED, WAITING, Ticket

RETRY_FLOOR = 1.0  # seconds: the documented Retry-After


def admit(
    group: Group, ticket: Ticket, closed: bool, replaced: Sequence[Ticket], now: float, displaced: Ticket | None
) -> None:
    """Return if the ticket may enter, else raise the `Rejected` that fits.

    replaced: waiting tickets of the same client that it would supersede. displaced: the ticket that would make room.
    """
    request, config, replaces = ticket.request, group.config, len(replaced)
    if closed:
        raise Closed("the server is shutting down", retry_after=RETRY_FLOOR)
    if group.queued - replaces >= config.capacity and displaced is None:
        raise _full(group, group.drain_time(), max_queue=config.capacity)
    if config.max_queued_units < inf:
        _units_fit(group, request.wants, (*replaced, displaced) if displaced is not None else replaced)
    if config.max_queued_seconds < inf and request.priority is not BACKGROUND:
        _seconds_fit(group, ticket, (*replaced, displaced) if displaced is not None else replaced)
    cap = config.max_in_flight_per_client
    if cap and group.unsettled_of(request.client) - replaces >= cap:
        raise InFlightCapReached(
            f"client has {cap} requests in flight", retry_after=RETRY_FLOOR, max_in_flight_per_client=cap
        )
    if config.resources is not None and not config.resources.fits(request):
        raise TooLarge("the request needs more than this server has")
    if ticket.deadline < inf:
        in_time(group, ticket, now)


def in_time(group: Group, ticket: Ticket, now: float) -> None:
    """Raise TooLate if by the estimate its deadline cannot be met."""
    needed = group.cost.remaining(ticket)
    if now + needed > ticket.deadline and group.evidence.refuses(ticket, now):
        left = ticket.deadline - now
        raise TooLate(
            f"needs about {needed * 1e3:.1f} ms, the deadline allows {left * 1e3:.1f} ms",
            needed_ms=round(needed * 1e3, 3),
            deadline_ms=round(left * 1e3, 3),
        )


def _seconds_fit(group: Group, ticket: Ticket, leaving: Sequence[Ticket]) -> None:
    """Refuse a ticket that would wait too long, if its client already has its share of the queue; see `Backlog`.

    Only measured costs count. With an empty queue ahead every ticket may wait, so that the device is never idle.
    """
    request, backlog, most = ticket.request, group.backlog, group.config.max_queued_seconds
    ahead = backlog.ahead(request.priority, leaving)
    if ahead <= 0.0:
        return
    seconds = ticket.seconds = group.seconds_of(ticket)
    if seconds <= 0.0 or ahead + seconds <= most * SLACK:
        return
    if backlog.exceeds_share(request.client, seconds, most, leaving):
        raise _full(group, ahead, max_queue=group.config.capacity, queued_s=round(ahead, 3), max_queue_s=most)


def _units_fit(group: Group, wants: float, leaving: Sequence[Ticket]) -> None:
    """Refuse a ticket if the waiting ones would want too many units together; an empty queue admits any."""
    most, queued_units = group.config.max_queued_units, group.queued_units - sum(t.wants for t in leaving)
    if group.queued > len(leaving) and queued_units + wants > most:
        raise _full(group, group.drain_time(), max_queued_units=most, queued_units=queued_units)


def _full(group: Group, wait: float, **details: float) -> QueueFull:
    """wait: seconds until there is room."""
    what = "at its limit of units" if "queued_units" in details else "at capacity"
    message = f"policy runtime queue {what}"
    return QueueFull(message, retry_after=max(RETRY_FLOOR, wait), policy_id=group.name, **details)


# -- tickets that leave without running --------------------------------------------------------------------------------


AT_ONCE: Final = 16  # tickets settled in one call: about a third of a millisecond
LOOKED_AT: Final = 4 * AT_ONCE  # tickets that are searched for late ones; some of these may not be shed

Leaves = tuple[Ticket, ReflexError]


class Leaving:
    """Tickets that must leave, by reason.

    unready: tickets that are being prepared, by deadline. behind: whether the last call may have left some over.
    holds_up: whether one of those must not be in a batch.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups.values()
        self.unready: LazyHeap[Ticket, float] = LazyHeap()
        self._abandoned: deque[Ticket] = deque()
        self._late: dict[Partition, tuple[Group, float]] = {}  # the time until which the device is busy
        self.behind = self.holds_up = False

    def expires_at(self) -> float:
        """The earliest deadline of tickets that wait, are resident or are being prepared; inf if none has one."""
        found = top[0] if (top := self.unready.first()) is not None else inf
        for group in self._groups:
            expires = group.turns.expires_at()
            if expires < found:
                found = expires
        return found

    def abandon(self, ticket: Ticket) -> None:
        """The ticket's caller left: the ticket leaves when the next batch is formed."""
        self._abandoned.append(ticket)

    def shed(self, group: Group, partition: Partition, after: float) -> None:
        """The partition has more tickets that are too late, because they cannot run before `after`."""
        self._late[partition] = group, after
        self.behind = True

    def due(self, now: float, drained: bool, forming: bool) -> Iterator[Leaves]:
        """The tickets that leave now, for the caller to settle one by one.

        drained: whether all tickets leave that do not run. forming: whether a batch will be formed.
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
        """Tickets that do not run; those that run leave when their step ends."""
        prepared = (t for g in self._groups for tickets in g.preparing.values() for t in tickets)
        queued = (t for g in self._groups for p in g.active.values() for t in p.unsettled if t.state is not RUNNING)
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
    """Waiting tickets that are late if they run after `after`, tightest first, and whether there may be more.

    spared: tickets that are left out. may: whether a ticket may be shed. most: at most so many; None for AT_ONCE.
    """
    most = AT_ONCE if most is None else most
    found: list[Ticket] = []
    for _, ticket in islice(partition.deadlines.ascending(), LOOKED_AT + len(spared) + len(partition.residents)):
        if len(found) == most:
            return found, True
        if ticket.state is not WAITING or ticket in spared:
            continue
        if after + group.cost.remaining(ticket) <= ticket.deadline:
            break
        if may(ticket):
            found.append(ticket)
    return found, False
