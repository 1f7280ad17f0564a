"""Whether a request may enter."""

from __future__ import annotations

from reflex_runtime.core.errors import Closed, InFlightCapReached, QueueFull, TooLarge, TooLate
from reflex_runtime.core.group import Group
from reflex_runtime.core.request import Ticket

RETRY_FLOOR = 1.0  # seconds: the documented Retry-After


def admit(group: Group, ticket: Ticket, closed: bool, replaces: int, now: float, displaces: bool = False) -> None:
    """Return if the ticket may enter, else raise the `Rejected` that says why.

    replaces: waiting tickets of the same client that it would supersede. displaces: whether somebody else makes room.
    """
    request = ticket.request
    config = group.config
    if closed:
        raise Closed("the server is shutting down", retry_after=RETRY_FLOOR)
    if group.queued - replaces >= config.capacity and not displaces:
        raise QueueFull(
            "policy runtime queue at capacity",
            retry_after=max(RETRY_FLOOR, group.drain_time()),
            policy_id=group.name,
            max_queue=config.capacity,
        )
    cap = config.max_in_flight_per_client
    if cap and group.clients.unsettled(request.client) - replaces >= cap:
        raise InFlightCapReached(
            f"client has {cap} requests in flight", retry_after=RETRY_FLOOR, max_in_flight_per_client=cap
        )
    if config.resources is not None and not config.resources.fits(request):
        raise TooLarge("the request needs more than this server has")
    if request.time_limit is not None:
        needed = group.cost.remaining(ticket)
        if now + needed > ticket.deadline:
            raise TooLate(
                f"needs about {needed * 1e3:.1f} ms, the deadline allows {request.time_limit * 1e3:.1f} ms",
                needed_ms=round(needed * 1e3, 3),
                deadline_ms=round(request.time_limit * 1e3, 3),
            )
