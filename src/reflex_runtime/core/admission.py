"""Whether a request may enter."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from reflex_runtime.core.backlog import SLACK
from reflex_runtime.core.errors import Closed, InFlightCapReached, QueueFull, TooLarge, TooLate
from reflex_runtime.core.group import Group
from reflex_runtime.core.request import BACKGROUND, Ticket

RETRY_FLOOR = 1.0  # seconds: the documented Retry-After


def admit(
    group: Group, ticket: Ticket, closed: bool, replaced: Sequence[Ticket], now: float, displaced: Ticket | None
) -> None:
    """Return if the ticket may enter, else raise the `Rejected` that says why.

    replaced: waiting tickets of the same client that it would supersede. displaced: one that would make room.
    """
    request, config, replaces = ticket.request, group.config, len(replaced)
    if closed:
        raise Closed("the server is shutting down", retry_after=RETRY_FLOOR)
    if group.queued - replaces >= config.capacity and displaced is None:
        raise QueueFull(
            "policy runtime queue at capacity",
            retry_after=max(RETRY_FLOOR, group.drain_time()),
            policy_id=group.name,
            max_queue=config.capacity,
        )
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
    """Raise when the estimate says that its deadline cannot be met."""
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
    seconds = group.seconds_of(ticket)
    if seconds <= 0.0 or ahead + seconds <= most * SLACK:
        return
    if backlog.exceeds_share(request.client, seconds, most, leaving):
        raise QueueFull(
            "policy runtime queue at capacity",
            retry_after=max(RETRY_FLOOR, ahead),
            policy_id=group.name,
            max_queue=group.config.capacity,
            queued_s=round(ahead, 3),
            max_queue_s=most,
        )


def _units_fit(group: Group, wants: float, leaving: Sequence[Ticket]) -> None:
    """Refuse a ticket if the waiting ones would want too many units together; an empty queue admits any."""
    most, queued_units = group.config.max_queued_units, group.queued_units - sum(t.wants for t in leaving)
    if group.queued > len(leaving) and queued_units + wants > most:
        raise QueueFull(
            "policy runtime queue at its limit of units",
            retry_after=max(RETRY_FLOOR, group.drain_time()),
            policy_id=group.name,
            max_queued_units=most,
            queued_units=queued_units,
        )
