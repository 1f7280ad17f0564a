"""The scheduler of one device: its inputs, which batch is next (`next_batch`), and when to call again (`wake_at`).

It has no clock, thread, loop, I/O or randomness, and no rule of its own: whether is in `admission`, when in `holding`,
how much in `cost`, who in `order`, and `forming` makes one batch of them. Inputs carry `now`, seconds on one monotonic
clock that never goes back. A driver does, under one lock:

    batch = scheduler.next_batch(now)                        schedule
    outcomes = processor.run(batch)                          run       (outside the lock)
    scheduler.complete(batch, outcomes, elapsed, now)        complete

and passes the events of `take_events` to its sinks and waiters.

`next_batch` decides in this order; the first step that yields a batch ends it:

 1. Tickets past their deadline settle as `Expired`, some at a time (`Leaving`), and pauses that are over end. Running
    tickets are checked when their batch returns. With `max_batches` running nothing is decided.
 2. Tenants, then the groups of one, take turns by device time over weight, the least served first (`_turns`).
 3. Partitions of a group take turns: urgent work, deadlines at risk near the least share, then the least served
    (`Turns.in_order`). Requests of different partitions never share a batch.
 4. Parts of a call that failed run first, each by itself, to find the bad request (`Former.form`, `Suspects`).
 5. Residents are granted their next step (`Filling.fill`; with memory to reserve tier by tier).
 6. Waiting tickets fill the batch up to its budget: tiers in order, within a tier the client with the least share,
    of equals the oldest (`Filling.fill`, `in_order`). If deadlines are at risk, the set of largest value is chosen
    instead, of equals those first that could not wait, and tickets that can no longer meet theirs are shed
    (`Former._select_for_deadlines`).
 7. A free device may wait for more requests (`Holding.until`): until the batch is full, the hold is over, or waiting
    for the due clients would cost more than it saves (`ThinkTimes`).
 8. New requests enter a running batch with stages only if they gain more than the residents lose
    (`Former._enters`).
 9. A group with `gap_chance` runs only if a gap is likely to be long enough (`Holding.gap_at`).
10. Shed and preempted tickets leave, the members move to RUNNING, clients are charged (`_form`, `_take`, `_begin`).

`complete` teaches the cost model the batch's time, and settles, keeps or requeues its members (`_ended`, `_apart`).
Every way out of the system ends in `_settle` or `_end_unready`, so that a ticket settles exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from reflex_runtime.core.admission import Leaving, admit, in_time
from reflex_runtime.core.batch import (
    Apart,
    Batch,
    BatchFinished,
    BatchScheduled,
    Done,
    Event,
    Failed,
    More,
    Origin,
    Outcome,
    RequestAbandoned,
    RequestPreempted,
    RequestProgressed,
    RequestQueued,
    RequestRejected,
    RequestSettled,
    SchedulerPaused,
)
from reflex_runtime.core.errors import (
    Cancelled,
    ConfigError,
    Displaced,
    Drained,
    Dropped,
    Expired,
    ProcessorError,
    ReflexError,
    Rejected,
    Shed,
    Superseded,
)
from reflex_runtime.core.forming import Ahead, Former, may_lead, put_back
from reflex_runtime.core.group import Group, GroupConfig, tenants_of, turns_of
from reflex_runtime.core.holding import Holding
from reflex_runtime.core.order import Partition
from reflex_runtime.core.request import (
    PREPARING,
    RESIDENT,
    RUNNING,
    SETTLED,
    TRANSITIONS,
    WAITING,
    AdmittedBatch,
    Request,
    Ticket,
    TicketState,
)

_event = tuple.__new__  # for each token and request: a NamedTuple's own constructor is a Python function around this


def is_fault(error: BaseException) -> bool:
    """Whether an error is a failure of the processor or a request, not overload, a deadline or a cancellation."""
    return not isinstance(error, Dropped)


IDLE_POLLS = 256  # most times in a batch's `idle_polls`
_BAD = (Failed, Apart)


class Scheduler:
    """One per device. Not thread-safe: its driver holds one lock around every call.

    groups: at least one configuration, names unique. max_batches: batches in flight at a time.
    """

    def __init__(self, groups: Iterable[GroupConfig] = (GroupConfig(),), max_batches: int = 1) -> None:
        configs = list(groups)
        self._groups = {
            config.name: Group(config, tenant) for config, tenant in zip(configs, tenants_of(configs), strict=True)
        }
        if not configs:
            raise ConfigError("Scheduler.groups=(): needs at least one group")
        if len(self._groups) < len(configs):
            raise ConfigError(f"Scheduler.groups={[c.name for c in configs]}: names must be unique")
        if not max_batches >= 1:
            raise ConfigError(f"Scheduler.max_batches={max_batches!r}: must be >= 1")
        self._max_batches = max_batches
        self._holding = Holding(configs)
        self._in_flight: dict[Batch, None] = {}
        self._ahead = Ahead()
        self._started: Batch | None = None  # formed ahead; it begins when the batch before it is complete
        self._leaving = Leaving(self._groups)
        self._paused: dict[Group | Partition, Group] = {}
        self._events: list[Event] = []
        self._drained = False
        self.settled = 0
        self.unheard: Collection[type[Any]] = ()  # RequestQueued, BatchScheduled, BatchFinished are not made if in here
        self._now = -inf
        self._idle_polls: deque[float] = deque(maxlen=IDLE_POLLS)
        self._tickets = self._batches = 0
        self._closed = False

    # -- inputs ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, ready: bool = True, held: bool = False) -> Ticket:
        """Admit a request, or raise a `Rejected`.

        ready: False if it must be prepared (a picture is decoded): it has its place, counts for its client's cap, and
        its deadline runs, but no batch takes it before `prepared`. held: as after `hold`.
        """
        self._input(now)
        group = self._groups.get(request.group)
        if group is None:
            raise ConfigError(f"Request.group={request.group!r}: not one of {sorted(self._groups)}")
        ticket = Ticket(request, self._tickets, now)
        ticket.held = held
        if group.config.latest_only and self._ahead.asked_by(request.client):
            self._take_back()
        replaced = group.superseded_by(request) if group.config.latest_only else []
        full = group.queued >= group.config.capacity and not replaced
        displaced = group.to_displace(request, now) if full else None
        try:
            admit(group, ticket, self._closed, replaced, now, displaced)
        except Rejected as error:
            self._events.append(RequestRejected(now, request, error))
            raise
        self._tickets += 1
        for old in replaced:
            self._drop(old, Superseded("a newer request of the same client replaced it"))
        if displaced is not None:
            full_up = Displaced("the queue is full, and a request that comes before it took its place")
            self._drop(displaced, full_up)
        if ready:
            self._enter(group, ticket, now)
        else:
            ticket.state, ticket.ready_at = PREPARING, inf
            group.prepare(ticket)
            self._holding.think_times[group.name].prepares(ticket)
            if ticket.deadline < inf:
                self._leaving.unready.push(ticket.deadline, ticket)
        if RequestQueued not in self.unheard:
            self._events.append(_event(RequestQueued, (now, ticket)))
        if displaced is None and not replaced:
            self._holding.arrived(group, ticket, now)
        return ticket

    def prepared(self, ticket: Ticket, made: Request | ReflexError, now: float) -> None:
        """A ticket is ready to run, or never will be. No effect if it has settled meanwhile.

        made: the prepared request (payload, shape, class, stage and wants; group, client and priority as admitted), or
        the error it ends with. The ticket now arrives and waits. Its deadline stays; if it cannot be met, it ends.
        """
        self._input(now)
        if ticket.state is not PREPARING:
            return
        if isinstance(made, ReflexError):
            self._drop(ticket, made)
            return
        group = self._groups[ticket.request.group]
        self._end_preparing(group, ticket)
        if ticket.deadline < inf:  # the rest of it: the ticket counts as one that has just arrived
            made = replace(made, time_limit=max(0.0, ticket.deadline - now))
        ticket.request, ticket.stage, ticket.wants = made, made.stage, made.wants
        try:
            in_time(group, ticket, now)
        except Rejected as error:
            self._end_unready(ticket, error)
            return
        self._move(ticket, WAITING)
        ticket.arrived, ticket.ready_at, ticket.seq = now, now, self._tickets
        self._tickets += 1
        self._enter(group, ticket, now)
        self._holding.arrived(group, ticket, now)

    def cancel(self, ticket: Ticket, now: float) -> None:
        """Cancel a ticket. Waiting and resident tickets settle at once, a running one at its boundary."""
        self._input(now)
        self._take_back()
        if ticket.state is RUNNING:
            ticket.cancel_requested = True
        elif ticket.state is not SETTLED:
            self._drop(ticket, Cancelled("cancelled by the caller"))

    def abandon(self, ticket: Ticket, now: float) -> None:
        """The caller stopped waiting. The ticket keeps its place until it is answered or the next batch is formed."""
        self._input(now)
        if ticket.state is not SETTLED and not ticket.abandoned:
            self._take_back()
            ticket.abandoned = True
            self._leaving.abandon(ticket)
            self._events.append(RequestAbandoned(self._now, ticket))

    def hold(self, ticket: Ticket, now: float) -> None:
        """Grant a resident nothing until `resume`; it keeps its memory, but is preempted first."""
        self._input(now)
        ticket.held = True

    def resume(self, ticket: Ticket, now: float) -> None:
        self._input(now)
        ticket.held = False

    def set_room(self, group: str, n: int | None, now: float) -> None:
        """At most n new requests of the group may enter from now on; None removes the limit."""
        self._input(now)
        self._take_back()
        self._groups[group].room = n

    def pause(self, group: str, until: float, now: float, partition: Hashable | None = None) -> None:
        """Let the group, or one of its partitions, take no turn before `until`. A time in the past ends a pause."""
        self._input(now)
        self._take_back()
        self._end_pauses()  # a partition whose pause is over may be forgotten
        of = self._groups[group]
        target = of if partition is None else of.partition(partition)
        target.paused_until = until if until > now else -inf
        self._paused[target] = of
        if until <= now:
            del self._paused[target]
        if isinstance(target, Partition):
            of.turns.touched[target] = None
        self._events.append(SchedulerPaused(now, group, partition, until))

    def close(self, now: float, drain: bool = True) -> bool:
        """Admit nothing more. drain: queued tickets run, without holds; otherwise they settle as Drained, some at
        a time. Returns whether more must settle: call it again."""
        self._input(now)
        self._take_back()
        self._closed, self._holding.draining, self._drained = True, drain, not drain
        if not drain:
            self._settle_leaving(forming=False)
        return not drain and self._leaving.behind

    def complete(self, batch: Batch, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
        """The batch has returned, with one outcome per ticket, in the order of its grants. elapsed: seconds."""
        if batch not in self._in_flight:
            raise ValueError(f"batch {batch.id} is not in flight")
        if (n := len(outcomes)) != len(batch):
            raise ValueError(f"batch {batch.id} needs {len(batch)} outcomes, not {n}")
        group = self._groups[batch.group]
        apart = isinstance(outcomes[0], Apart)
        failed = sum([isinstance(outcome, _BAD) for outcome in outcomes])
        faults = failed and sum([isinstance(outcome, _BAD) and is_fault(outcome.error) for outcome in outcomes])
        if not failed:  # first, because it may raise: then the batch is still in flight, and a driver can let it fail
            group.cost.observe(batch, elapsed)
        self._input(now)
        del self._in_flight[batch]
        self._holding.free_since = now
        partition = group.active[batch.partition]
        group.charge(partition, elapsed - batch.expected)
        if group.cost.unit == "seconds":
            group.evidence.returned(batch, elapsed, now, not failed)
        resources = group.config.resources
        if resources is not None:
            resources.rollback(batch) if failed == n else resources.commit(batch)
        crashed = not apart and group.crashed(partition, batch, failed, faults)
        if BatchFinished not in self.unheard:
            self._events.append(BatchFinished(now, batch, elapsed, crashed, apart))
        if apart:
            self._settle(group, partition, self._apart(partition, batch))
        else:
            self._settle(group, partition, self._ended(group, partition, batch, outcomes, elapsed / n))
        if self._started is not None:
            started, self._started = self._started, None
            self._begin_ahead(started)

    # -- the next batch ----------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> Batch | None:
        """The batch to run now, or None; then `wake_at` is when to call again."""
        self._now = max(self._now, now)
        stood, settled = self._holding.current, self.settled
        if not self._apply_due(len(self._in_flight) < self._max_batches):
            return None
        self._holding.ends = inf
        for group in self._turns():
            batch = self._form(group)
            if batch is not None:
                return batch
        self._holding.idle_after = self._holding.inputs
        shed = settled != self.settled
        if shed or (not stood and any(group.unsettled for group in self._groups.values())):
            self._idle_polls.append(self._now)
        return None

    def form_ahead(self, now: float) -> Batch | None:
        """The batch to run after those in flight, if waiting until they end could not change it (`Ahead`).

        It is started with `start_ahead`; until it is, inputs may take it back.
        """
        self._now = max(self._now, now)
        may = self._ahead.batch is None and not self._closed and len(self._in_flight) == self._max_batches == 1
        if not self._apply_due(may):
            return None
        for group in self._turns()[:1]:
            group.promote(self._now)
            partition = next(iter(group.turns.in_order(self._now)), None)
            if partition is None or not may_lead(group, partition):
                continue
            batch = Former(group, partition, self._holding, self._now).form_full()
            if batch is not None:
                self._take(group, partition, batch)
                self._ahead.set(batch)
        return self._ahead.batch

    def start_ahead(self, now: float) -> Batch | None:
        """The batch formed ahead, to run at once: the one before has ended, and may be completed while this one runs.

        None if it was taken back, or if a member would now miss its deadline.
        """
        self._now = max(self._now, now)
        if self._ahead.late(self._now):
            self._take_back()
        batch = self._ahead.pop()
        if len(self._in_flight) > 1:
            self._started = batch
        elif batch is not None:
            self._begin_ahead(batch)
        return batch

    def expire(self, now: float) -> None:
        """Expire tickets and end pauses without forming a batch: for a driver whose device is busy. If very many
        expire, it settles some, and `wake_at` is now."""
        self._now = max(self._now, now)
        self._apply_due()

    def wake_at(self) -> float:
        """When to call `next_batch` again if no input comes first; inf: not at all.

        Exact once `next_batch` returned None; straight after an input to a free device it is the time of that input.
        """
        at = self._now if self._leaving.behind else self.expires_at()
        at = min([at, *[paused.paused_until for paused in self._paused]])
        if len(self._in_flight) >= self._max_batches:
            return at
        return min(at, self._holding.ends if self._holding.current else self._now)

    @property
    def behind(self) -> bool:
        """Whether the last call settled some of very many tickets that must leave, and the next one is due at once."""
        return self._leaving.behind

    @property
    def decision_current(self) -> bool:
        """Whether `wake_at` is still valid: no input since the last `next_batch` could make a batch possible."""
        return self._holding.current

    def expires_at(self) -> float:
        """The earliest deadline of waiting tickets and those being prepared; inf if none has one."""
        return min(self._leaving.expires_at(), self._ahead.expires)

    def take_events(self) -> list[Event]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def take_left(self, group: str) -> tuple[Ticket, ...]:
        """Residents gone since the group's last batch, for a driver that will form no further batch (`Batch.left`)."""
        of = self._groups[group]
        left, of.left = tuple(of.left), []
        return left

    def snapshot(self) -> dict[str, Any]:
        return {
            "in_flight_batches": len(self._in_flight),
            "admitted": self._tickets,
            "batches": self._batches,
            "closed": self._closed,
            "groups": {n: g.describe(self._now) | {"queued": self.queued(n)} for n, g in self._groups.items()},
        }

    def queued(self, group: str) -> int:
        """Waiting tickets of the group, those of a batch formed ahead included."""
        return self._groups[group].queued + self._ahead.waiting(group)

    def queued_units(self, group: str) -> float:
        """Units that the group's waiting tickets want together."""
        return self._groups[group].queued_units

    def queued_seconds(self, group: str) -> float:
        """Predicted device seconds of the group's waiting tickets; 0.0 for costs that are no seconds."""
        return self._groups[group].backlog.seconds

    def unsettled(self, group: str) -> int:
        """Tickets of the group that have not ended."""
        return self._groups[group].unsettled

    def partitions(self, group: str) -> list[Hashable]:
        """The group's partitions that hold unsettled tickets."""
        return [key for key, partition in self._groups[group].active.items() if partition.unsettled]

    @property
    def idle(self) -> bool:
        """Whether every admitted ticket has settled."""
        return not self._in_flight and all(g.unsettled == 0 for g in self._groups.values())

    def cost_model(self, group: str) -> Any:
        """The group's cost model, for diagnostics."""
        return self._groups[group].cost

    # -- due -----------------------------------------------------------------------------------------------------------

    def _input(self, now: float) -> None:
        if now > self._now:
            self._now = now
        self._holding.inputs += 1

    def _apply_due(self, forming: bool = False) -> bool:
        """Settle some of the tickets that must leave, and end pauses. forming: whether a batch may be formed. Returns
        whether it still may: no ticket is left that must not be in it."""
        if self._ahead.expires <= self._now:
            self._take_back()
        self._settle_leaving(forming)
        self._end_pauses()
        return forming and not self._leaving.holds_up

    def _end_pauses(self) -> None:
        for target, group in list(self._paused.items()):
            if target.paused_until <= self._now:
                del self._paused[target]
                target.paused_until = -inf
                if isinstance(target, Partition):
                    group.turns.touched[target] = None

    def _settle_leaving(self, forming: bool) -> None:
        for ticket, error in self._leaving.due(self._now, self._drained, forming):
            self._drop(ticket, error)

    # -- forming -------------------------------------------------------------------------------------------------------

    def _turns(self) -> list[Group]:
        return turns_of(self._groups.values(), self._now, self._in_flight)

    def _form(self, group: Group) -> Batch | None:
        group.promote(self._now)
        for partition in group.turns.in_order(self._now):
            while partition.unsettled:
                former = Former(group, partition, self._holding, self._now)
                batch = former.form()
                if batch is None and not former.shed and not former.preempted:
                    self._holding.put_off(former.held_until)
                    break
                if batch is not None and group.config.gap_chance:
                    gap = self._holding.gap_at(group, batch.grants)
                    if gap > self._now:
                        self._holding.put_off(gap)
                        break
                for ticket in former.shed:
                    self._drop(ticket, Shed("its deadline can no longer be met"))
                for ticket in former.preempted:
                    self._preempt(group, ticket)
                if former.late_after < inf:
                    self._leaving.shed(group, partition, former.late_after)
                if batch is not None:
                    self._take(group, partition, batch)
                    return self._begin(group, partition, batch)
                if former.late_after < inf:
                    return None  # the rest of them first: `wake_at` is now
        return None

    def _take(self, group: Group, partition: Partition, batch: Batch) -> None:
        """Move the members of a batch out of the queue."""
        self._batches += 1
        batch.id, batch.left = self._batches, self.take_left(group.name)
        admission = AdmittedBatch(batch.id, len(batch.admitted), *batch.cause.names, batch.cost)
        partition.take(batch.admitted)
        group.take(batch)
        for ticket, units in batch.grants.items():
            if ticket.state is WAITING:
                ticket.admission = admission
                if ticket.started is None:
                    ticket.started = self._now
            else:
                assert ticket.state is RESIDENT, ticket
            ticket.state = RUNNING
            if ticket.deadline < inf:  # running tickets do not expire; checked at the boundary
                partition.deadlines.discard(ticket)
            ticket.granted += units
            ticket.batches += 1
        self._holding.sent(partition)
        if not partition.waiting:
            batch.short_of = ""
        if batch.part is not None:
            partition.suspects.take(batch.part)
        self._in_flight[batch] = None

    def _begin(self, group: Group, partition: Partition, batch: Batch) -> Batch:
        """The batch is started: charge its clients, and publish it."""
        group.began(batch, partition)
        if BatchScheduled not in self.unheard:
            idle_polls = tuple(self._idle_polls)
            self._events.append(BatchScheduled(batch.scheduled_at, batch, group.queued, idle_polls))
        self._idle_polls.clear()
        return batch

    def _begin_ahead(self, batch: Batch) -> None:
        """A batch formed ahead is started, and the one before it is complete."""
        batch.scheduled_at = self._now
        for ticket in batch.grants:
            ticket.started = self._now
        group = self._groups[batch.group]
        self._begin(group, group.active[batch.partition], batch)

    def _take_back(self) -> None:
        """Undo the batch formed ahead, if there is one: something changes what runs next."""
        batch = self._ahead.pop()
        if batch is not None:
            del self._in_flight[batch]
            group = self._groups[batch.group]
            put_back(group, group.active[batch.partition], batch)

    # -- a ticket enters -----------------------------------------------------------------------------------------------

    def _enter(self, group: Group, ticket: Ticket, now: float) -> None:
        """The ticket may run from now on."""
        self._holding.entered(group, ticket, now)
        group.enter(ticket, now)
        if self._ahead.batch is not None and self._ahead.gives_way(ticket, group):
            self._take_back()

    # -- a batch came back -----------------------------------------------------------------------------------------

    def _ended(
        self, group: Group, partition: Partition, batch: Batch, outcomes: Sequence[Outcome], share: float
    ) -> Iterator[tuple[Ticket, Done | Failed]]:
        """Move the tickets of a batch to their next state. Yields those that end. share: seconds of each."""
        evidence, took = group.evidence, 0.0
        done: list[Ticket] = []
        for (ticket, units), outcome in zip(batch.grants.items(), outcomes, strict=True):
            ticket.shared += share
            if evidence.pending and evidence.probes(ticket):
                group.clients.shares.charge(ticket.queue.client, share / ticket.request.weight)
            if isinstance(outcome, Done):
                ticket.computed += units - outcome.unused
                ticket.unused += outcome.unused
                if outcome.earlier:
                    self._publish(ticket, outcome.earlier)
                done.append(ticket)
                took += ticket.shared
                yield ticket, outcome
            elif isinstance(outcome, More):
                error = self._stay(partition, ticket, units, outcome)
                if error is not None:
                    yield ticket, Failed(error)
            else:
                assert not isinstance(outcome, Apart)
                self._publish(ticket, outcome.earlier)
                if len(batch) == 1 and is_fault(outcome.error):
                    group.offenders.failed(ticket.request.client)
                yield ticket, outcome
        if done:
            group.cost.settled(done)
            group.ran(took / len(done))
            group.offenders.answered(done)

    def _apart(self, partition: Partition, batch: Batch) -> Iterator[tuple[Ticket, Failed]]:
        """Queue the members of a call that failed as a whole again, in halves. Yields those that leave now."""
        part = batch.part
        origin = Origin() if part is None else part.origin
        origin.pending -= part is not None
        wanted = {ticket: units - batch.extra.get(ticket, 0.0) for ticket, units in batch.grants.items()}
        partition.suspects.split(wanted if batch.extra else batch.grants, origin)
        for ticket, units in batch.grants.items():
            ticket.recomputed += units
            error = self._reside(partition, ticket)
            if error is not None:
                yield ticket, Failed(error)

    def _stay(self, partition: Partition, ticket: Ticket, units: float, more: More) -> ReflexError | None:
        """Keep a ticket as a resident until its next step. Returns the error if it leaves instead."""
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
            self._publish(ticket, earlier)
        self._events.append(_event(RequestProgressed, (self._now, ticket, value)))
        if value is not None and ticket.request.streams:
            ticket.answered, ticket.deadline = True, inf  # a stream's deadline is for its first answer
        return self._reside(partition, ticket)

    def _publish(self, ticket: Ticket, earlier: tuple[Any, ...]) -> None:
        """Publish the answers of a step before its last one."""
        for value in earlier:
            self._events.append(_event(RequestProgressed, (self._now, ticket, value)))

    def _reside(self, partition: Partition, ticket: Ticket) -> ReflexError | None:
        """Let a ticket wait for its next call. Returns the error if it leaves at this boundary instead."""
        self._move(ticket, RESIDENT)
        partition.residents.pop(ticket, None)  # the one that stepped last is at the end
        partition.residents[ticket] = None
        if ticket.cancel_requested or ticket.abandoned:
            return Cancelled("cancelled by the caller")
        if self._drained:
            return Drained("the server is shutting down")
        if ticket.deadline <= self._now:
            return Expired("its deadline passed before it was answered")
        if ticket.deadline < inf:
            partition.deadlines.push(ticket.deadline, ticket)
        return None

    # -- one ticket ------------------------------------------------------------------------------------------------

    def _preempt(self, group: Group, ticket: Ticket) -> None:
        """Preempt a resident, whose resources are released: it starts over from the front of its queue."""
        ticket.lost = ticket.computed
        ticket.recomputed += ticket.computed
        ticket.wants += ticket.computed
        ticket.computed, ticket.extra = 0.0, ()
        ticket.stage = ticket.request.stage
        self._move(ticket, WAITING)
        group.requeue(ticket)
        group.left.append(ticket)
        self._events.append(RequestPreempted(self._now, ticket))

    def _drop(self, ticket: Ticket, error: ReflexError) -> None:
        """End a ticket that does not run."""
        group = self._groups[ticket.request.group]
        if ticket.state is PREPARING:
            self._end_preparing(group, ticket)
            self._end_unready(ticket, error)
            return
        self._settle(group, group.active[ticket.request.partition], ((ticket, Failed(error)),))

    def _end_preparing(self, group: Group, ticket: Ticket) -> None:
        """The ticket is ready, or never will be."""
        group.end_preparing(ticket)
        self._holding.think_times[group.name].prepared(ticket, self._now)
        self._leaving.unready.discard(ticket)

    def _end_unready(self, ticket: Ticket, error: ReflexError) -> None:
        """End a ticket that was never ready to run."""
        self._move(ticket, SETTLED)
        ticket.outcome = Failed(error)
        self.settled += 1
        self._events.append(_event(RequestSettled, (self._now, ticket)))

    def _settle(self, group: Group, partition: Partition, ended: Iterable[tuple[Ticket, Done | Failed]]) -> None:
        """End tickets of one partition, each exactly once."""
        events, resources, residents = self._events, group.config.resources, partition.residents
        think_times = self._holding.think_times[group.name]
        for ticket, outcome in ended:
            state = ticket.state
            if ticket.cancel_requested:  # while it ran: its result is dropped
                outcome = Failed(Cancelled("cancelled by the caller"))
            if state is WAITING:
                partition.take((ticket,))
                group.dequeue((ticket,))
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
            answered = isinstance(outcome, Done)
            if group.leave(ticket, partition, answered, self._now) and answered:
                think_times.answered(ticket.request.client, self._now)
            events.append(_event(RequestSettled, (self._now, ticket)))
        group.settled(partition)
        self._holding.changed(partition)

    @staticmethod
    def _move(ticket: Ticket, state: TicketState) -> None:
        """Change the state as the table allows. Hot paths assign it."""
        assert state in TRANSITIONS[ticket.state], (ticket, state)
        ticket.state = state
