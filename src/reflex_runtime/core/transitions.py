"""The life of admitted tickets: each method moves some to their next state, and makes the events of it.

The scheduler decides what happens; this file carries it out. Every way out of the system ends in `settle` or
`end_unready`, so that a ticket settles exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from reflex_runtime.core.batch import Apart, Batch, Done, Failed, More, Outcome
from reflex_runtime.core.errors import Cancelled, Drained, Dropped, Expired, ProcessorError, ReflexError
from reflex_runtime.core.events import Event, RequestPreempted, RequestProgressed, RequestSettled
from reflex_runtime.core.group import Group
from reflex_runtime.core.holding import Holding
from reflex_runtime.core.isolation import Origin
from reflex_runtime.core.leaving import Leaving
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import (
    PREPARING,
    RESIDENT,
    RUNNING,
    SETTLED,
    TRANSITIONS,
    WAITING,
    Ticket,
    TicketState,
)

_event = tuple.__new__  # for each token and request: a NamedTuple's own constructor is a Python function around this


def is_fault(error: BaseException) -> bool:
    """Whether it is the processor's or a request's, and not overload, a deadline or a cancellation."""
    return not isinstance(error, Dropped)


class Transitions:
    """What happens to admitted tickets.

    events: made since they were last taken. settled: tickets that have ended. drained: the scheduler is closed, and
    what is queued does not run any more.
    """

    def __init__(self, groups: Mapping[str, Group], leaving: Leaving, holding: Holding) -> None:
        self._groups = groups
        self._leaving = leaving
        self._holding = holding
        self.events: list[Event] = []
        self.settled = 0
        self.drained = False

    # -- a batch came back -----------------------------------------------------------------------------------------

    def ended(
        self, group: Group, partition: Partition, batch: Batch, outcomes: Sequence[Outcome], share: float, now: float
    ) -> Iterator[tuple[Ticket, Done | Failed]]:
        """Move the tickets of a batch to their next state; those that end, to be settled. share: seconds of each."""
        settled, evidence, took = group.cost.settled, group.evidence, 0.0
        done: list[Ticket] = []
        for (ticket, units), outcome in zip(batch.grants.items(), outcomes, strict=True):
            ticket.shared += share
            if evidence.pending and evidence.probes(ticket):
                group.clients.shares.charge(ticket.queue.client, share / ticket.request.weight)
            if isinstance(outcome, Done):
                ticket.computed += units - outcome.unused
                ticket.unused += outcome.unused
                if outcome.earlier:
                    self._publish(ticket, outcome.earlier, now)
                settled(ticket)
                done.append(ticket)
                took += ticket.shared
                yield ticket, outcome
            elif isinstance(outcome, More):
                error = self._stay(partition, ticket, units, outcome, now)
                if error is not None:
                    yield ticket, Failed(error)
            else:
                assert not isinstance(outcome, Apart)
                self._publish(ticket, outcome.earlier, now)
                if len(batch) == 1 and is_fault(outcome.error):
                    group.offenders.failed(ticket.request.client)
                yield ticket, outcome
        if done:
            group.ran(took / len(done))
            group.offenders.answered(done)

    def apart(self, partition: Partition, batch: Batch, now: float) -> Iterator[tuple[Ticket, Failed]]:
        """Queue the members of a call that failed as a whole again, in halves; those that leave now, to be settled."""
        part = batch.part
        origin = Origin() if part is None else part.origin
        origin.pending -= part is not None
        wanted = {ticket: units - batch.extra.get(ticket, 0.0) for ticket, units in batch.grants.items()}
        partition.suspects.split(wanted if batch.extra else batch.grants, origin)
        for ticket, units in batch.grants.items():
            ticket.recomputed += units
            error = self._reside(partition, ticket, now)
            if error is not None:
                yield ticket, Failed(error)

    def _stay(self, partition: Partition, ticket: Ticket, units: float, more: More, now: float) -> ReflexError | None:
        """Keep a ticket that ran as a resident until its next step. Returns the error if it leaves instead."""
        value, wants, stage, earlier, unused, extra = more  # at once: this runs for every token
        if not 0.0 < wants < inf:
            return ProcessorError(f"More.wants={wants!r}: must be finite and > 0")
        self._groups[ticket.request.group].steps = True
        ticket.computed += units
        ticket.wants, ticket.extra = wants, extra
        if stage is not None:
            ticket.stage = stage
        if unused:
            ticket.computed -= unused
            ticket.unused += unused
        if earlier:
            self._publish(ticket, earlier, now)
        self.events.append(_event(RequestProgressed, (now, ticket, value)))
        if value is not None and ticket.request.streams:
            ticket.answered, ticket.deadline = True, inf  # a stream's deadline is for its first answer
        return self._reside(partition, ticket, now)

    def _publish(self, ticket: Ticket, earlier: tuple[Any, ...], now: float) -> None:
        """Publish what came before the last answer of a step."""
        for value in earlier:
            self.events.append(_event(RequestProgressed, (now, ticket, value)))

    def _reside(self, partition: Partition, ticket: Ticket, now: float) -> ReflexError | None:
        """Make a ticket that ran wait for its next call. Returns the error if it leaves at this boundary instead."""
        self.move(ticket, RESIDENT)
        partition.residents[ticket] = None
        if ticket.cancel_requested or ticket.abandoned:
            return Cancelled("cancelled by the caller")
        if self.drained:
            return Drained("the server is shutting down")
        if ticket.deadline <= now:
            return Expired("its deadline passed before it was answered")
        if ticket.deadline < inf:
            partition.deadlines.push(ticket.deadline, ticket)
        return None

    # -- one ticket ------------------------------------------------------------------------------------------------

    def preempt(self, group: Group, ticket: Ticket, now: float) -> None:
        """Preempt a resident, whose resources are released: it starts over from the front of its queue."""
        ticket.lost = ticket.computed
        ticket.recomputed += ticket.computed
        ticket.wants += ticket.computed
        ticket.computed, ticket.extra = 0.0, ()
        ticket.stage = ticket.request.stage
        self.move(ticket, WAITING)
        group.requeue(ticket)
        group.left.append(ticket)
        self.events.append(RequestPreempted(now, ticket))

    def drop(self, ticket: Ticket, error: ReflexError, now: float) -> None:
        """End a ticket that does not run."""
        group = self._groups[ticket.request.group]
        if ticket.state is PREPARING:
            self.end_preparing(group, ticket, now)
            self.end_unready(ticket, error, now)
            return
        self.settle(group, group.active[ticket.request.partition], ((ticket, Failed(error)),), now)

    def end_preparing(self, group: Group, ticket: Ticket, now: float) -> None:
        """It is prepared, or never will be."""
        group.end_preparing(ticket, now)
        self._leaving.unready.discard(ticket)

    def end_unready(self, ticket: Ticket, error: ReflexError, now: float) -> None:
        """End a ticket that was never ready to run."""
        self.move(ticket, SETTLED)
        ticket.outcome = Failed(error)
        self.settled += 1
        self.events.append(_event(RequestSettled, (now, ticket)))

    def settle(
        self, group: Group, partition: Partition, ended: Iterable[tuple[Ticket, Done | Failed]], now: float
    ) -> None:
        """End tickets of one partition, each exactly once."""
        events, resources, residents = self.events, group.config.resources, partition.residents
        for ticket, outcome in ended:
            state = ticket.state
            if ticket.cancel_requested:  # while it ran: its result is dropped
                outcome = Failed(Cancelled("cancelled by the caller"))
            if state is WAITING:
                partition.take(ticket)
                partition.tidy()
                group.backlog.remove(ticket)
                group.dequeue(1, ticket.wants)
            elif residents and (state is RESIDENT or (isinstance(outcome, Failed) and ticket in residents)):
                group.left.append(ticket)
            if resources is not None and state is not WAITING:
                resources.release(ticket)
            assert state is not SETTLED, ticket
            ticket.state = SETTLED
            ticket.outcome = outcome
            self.settled += 1
            if ticket.deadline < inf and state is not RUNNING:  # it was discarded when it was scheduled
                partition.deadlines.discard(ticket)
            group.leave(ticket, partition, isinstance(outcome, Done), now)
            events.append(_event(RequestSettled, (now, ticket)))
        group.settled(partition)
        self._holding.changed(partition)

    @staticmethod
    def move(ticket: Ticket, state: TicketState) -> None:
        """The one way from state to state that checks it against the table; hot paths that need no check assign."""
        assert state in TRANSITIONS[ticket.state], (ticket, state)
        ticket.state = state
