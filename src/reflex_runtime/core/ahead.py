"""The next batch, formed while one still runs: a driver then starts it in the moment that the device is free.

Late binding stays true. Only a batch is formed ahead that could not become another one by waiting: it is full, of one
call, in the first turn, and no deadline of it is at risk. A driver asks for it shortly before the running batch ends.
Until it is started it is taken back if anything happens that would change it: a request arrives that may go first, one
with a deadline in another partition, or the first one of another group; a member leaves, is replaced or can no longer
meet its deadline; its group pauses; the scheduler closes.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.group import Group
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import RUNNING, WAITING, Ticket


class Ahead:
    """The batch formed ahead, if any.

    expires: the earliest deadline of its members. last: the tier of its last member.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.expires = inf
        self.last = 0

    def set(self, batch: Batch) -> None:
        self.batch = batch
        self.expires = min(t.deadline for t in batch.grants)
        self.last = max(t.tier for t in batch.grants)

    def pop(self) -> Batch | None:
        """The batch; from now on none is formed ahead."""
        batch, self.batch, self.expires = self.batch, None, inf
        return batch

    def gives_way(self, ticket: Ticket, group: Group) -> bool:
        """Whether a ticket that has entered its group could run first: before a member; in another partition, because
        of its deadline; or as the first one of another group."""
        batch = self.batch
        if batch is None or ticket.tier < self.last:
            return batch is not None
        if group.name != batch.group:
            return group.active[ticket.request.partition].waiting == 1 or ticket.deadline < inf
        return ticket.request.partition != batch.partition and ticket.deadline < inf

    def late(self, now: float) -> bool:
        """Whether a member will probably miss its deadline if the batch starts now."""
        return self.batch is not None and now + self.batch.expected > self.expires

    def asked_by(self, client: Hashable) -> bool:
        """Whether a member is a request of the client."""
        return self.batch is not None and any(t.request.client == client for t in self.batch.grants)

    def has(self, ticket: Ticket) -> bool:
        return self.batch is not None and ticket in self.batch.grants

    def waiting(self, group: str) -> int:
        """Its members of this group: until it is started they wait."""
        return len(self.batch) if self.batch is not None and self.batch.group == group else 0


def may_lead(group: Group, partition: Partition) -> bool:
    """Whether a batch of the partition may be formed ahead.

    Not where the members of the running batch may come back for another step, or a failed call is repeated in parts:
    those go first. Nor where a batch is chosen by more than its size.
    """
    config = group.config
    return not (
        group.steps
        or config.resources is not None
        or config.gap_chance
        or config.flush.group_commit
        or group.cost.unit != "seconds"
        or group.offenders
        or group.evidence.pending
        or partition.residents
        or partition.in_flight > 1
    )


def put_back(group: Group, partition: Partition, batch: Batch) -> None:
    """Let the members of a batch that was not started wait again, each in its old place."""
    partition.in_flight -= 1
    group.left[:0] = batch.left
    if partition.room is not None:
        partition.room += len(batch)
    if group.room is not None:
        group.room += len(batch)
    for ticket, units in batch.grants.items():
        assert ticket.state is RUNNING, ticket
        ticket.state, ticket.admission, ticket.started = WAITING, None, None
        ticket.granted -= units
        ticket.batches -= 1
        if ticket.deadline < inf:
            partition.deadlines.push(ticket.deadline, ticket)
        group.requeue(ticket)
