"""Predicted device seconds of waiting tickets: by priority, for the wait, and by client, for fair shares."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from reflex_runtime.core.request import BACKGROUND, Priority, Ticket

SLACK = 1.0 + 1e-9  # sums of floats


class Backlog:
    """Running totals. Background work is not included: only its count is limited."""

    __slots__ = ("_by_client", "_by_priority", "_counted")

    def __init__(self) -> None:
        self._counted: dict[Ticket, float] = {}
        self._by_priority = [0.0] * BACKGROUND
        self._by_client: dict[Hashable, list[float]] = {}  # [seconds, tickets]

    @property
    def seconds(self) -> float:
        """Of all that waits."""
        return sum(self._by_priority)

    def add(self, ticket: Ticket, seconds: float) -> None:
        """Add a waiting ticket with its predicted device seconds; 0.0 if they are not known."""
        request = ticket.request
        if seconds > 0.0 and request.priority is not BACKGROUND:
            self._counted[ticket] = seconds
            self._by_priority[request.priority] += seconds
            own = self._by_client.setdefault(request.client, [0.0, 0])
            own[0] += seconds
            own[1] += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that waits no more."""
        seconds = self._counted.pop(ticket, 0.0)
        if seconds == 0.0:
            return
        request = ticket.request
        self._by_priority[request.priority] -= seconds
        own = self._by_client[request.client]
        own[0] -= seconds
        own[1] -= 1
        if not own[1]:
            del self._by_client[request.client]
        if not self._counted:
            self._by_priority = [0.0] * BACKGROUND  # no rounding is carried on

    def ahead(self, priority: Priority, leaving: Iterable[Ticket] = ()) -> float:
        """Waiting seconds of this priority and those before it, without the given leaving tickets."""
        found = sum(self._by_priority[: priority + 1])
        for ticket in leaving:
            if ticket.request.priority <= priority:
                found -= self._counted.get(ticket, 0.0)
        return found

    def exceeds_share(self, client: Hashable, seconds: float, most: float, leaving: Iterable[Ticket] = ()) -> bool:
        """Whether the client, with so many seconds more, had more than its even share of `most` waiting."""
        own = self._by_client.get(client)
        clients = len(self._by_client) + (own is None)
        waiting = 0.0 if own is None else own[0]
        waiting -= sum(self._counted.get(t, 0.0) for t in leaving if t.request.client == client)
        return waiting + seconds > most / clients * SLACK
