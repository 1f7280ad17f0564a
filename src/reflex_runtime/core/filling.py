"""Fills the next batch of a partition: residents that step, then waiting tickets in serving order.

Without memory to reserve (`GroupConfig.resources`) all residents come first. With it every grant is reserved, and tiers
go in order: in each the residents before the waiting tickets. A waiting ticket is *over* the residents of tiers less
urgent than its own priority. They give way to it:

    places   when none is free, one of them loses its place. Their clients' shares of places hold between equals only
    memory   when it cannot reserve, they lose their memory until it fits; none does if all were not enough
    budget   it is granted before them. Those that want one unit (decodes) still go first while that leaves it one unit,
             so a ticket that enters has begun with this step, and leads the next one as a resident

When a resident cannot reserve, the residents behind it give way; if all were not enough, it gives way itself.

A resident that gives way is preempted: it starts over from the front of its queue. Held ones go first, then the newest
of the lowest tier. A resident is not preempted again before it holds more than it lost; this bounds the repeated work.
One that runs in another batch is never preempted. An aged ticket is served, and gives way, like the tier that it moved
up to. But only its priority puts it over others: otherwise an aged backlog would preempt its own kind.
`room` is an outside limit and always holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, inf

from reflex_runtime.core.cost import tally_of
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import Group
from reflex_runtime.core.order import MAX_PASSED_OVER, Cursor, Partition
from reflex_runtime.core.request import BACKGROUND, RESIDENT, Priority, Ticket
from reflex_runtime.core.resources import Resources
from reflex_runtime.core.select import Filled

_ANY = 1 << 30  # places, where another rule counts them


class Filling:
    """The fills of one partition for one decision. It reserves resources; all else is carried out by the scheduler.

    base: the residents that step, with their grants. line: the waiting tickets, if all are equals (see `_equals`).
    cached: units of entering tickets that were found already computed.
    extra: units of residents beyond those they wanted, a part of their grants.
    preempted: residents that lost their place, in the order it happened.
    """

    def __init__(self, group: Group, partition: Partition, policy: FlushPolicy) -> None:
        self._group, self._partition, self._cost = group, partition, group.cost
        self._budget, self._size, self._room = policy.max_batch_cost, policy.max_batch_size, group.room_in(partition)
        self._resources = group.config.resources
        self.base: dict[Ticket, float] = {}
        self.line: list[Ticket] | None = None
        self.cached: dict[Ticket, float] = {}
        self.extra: dict[Ticket, float] = {}
        self.preempted: dict[Ticket, None] = {}
        self._entered = self._beside({})
        self._todo = movable(partition)[::-1] if partition.residents else []  # may still step, the first at the end
        if self._resources is not None and self._todo:
            self._entered.tally.expect([t for t in self._todo if t.wants <= 1.0 and t.computed])
        self._stage: str | None = None  # a step has one
        self._present = [0, 0, 0]  # with memory: residents that do not run, by tier
        self._memory_short = False

    def fill(self) -> Filled:
        """The residents that step, and the tickets that enter in serving order: O(batch + passed over)."""
        if self._resources is not None:
            return self._fill_by_tiers()
        self._step_up_to(BACKGROUND)
        self.line = self._equals()
        filled = self._beside(self.base) if self.base else self._entered
        if self.line is not None:
            return self._add_line(filled, self.line)
        cursor = Cursor(self._partition)
        return self._add(filled, iter(cursor.next, None), inf, cursor)

    def fill_from(self, candidates: Iterable[Ticket], limit: float = inf) -> Filled:
        """The same from these candidates in order, while the batch takes at most `limit` seconds. Without memory."""
        return self._add(self._beside(self.base), candidates, limit)

    def fill_line(self, line: Sequence[Ticket]) -> Filled:
        return self._add_line(self._beside(self.base), line)

    def _beside(self, base: Mapping[Ticket, float]) -> Filled:
        """An empty fill beside these residents. With memory, the number that may enter changes during the fill."""
        if self._resources is not None:
            return Filled({}, self._cost.tally(), places=_ANY)
        free = self._size - len(self._partition.residents)
        places = free if self._room is None else min(free, self._room)
        places = max(0, int(min(places, self._group.offenders.limit)))
        return Filled({}, tally_of(self._cost, base), places=places)

    def _equals(self) -> list[Ticket] | None:
        """The waiting tickets in serving order, if grants change neither that order nor the cost of the next one.

        So it is for one-shot work of one kind with no client waiting twice, as with robots: one sort and a few sums
        decide. None otherwise; then filling goes ticket by ticket, with the same result.
        """
        group, partition = self._group, self._partition
        if not group.cost.linear or partition.residents:
            return None
        offenders = group.offenders
        if offenders and any(q.client.key in offenders for tier in partition.tiers for q in tier.queues()):
            return None
        line = Cursor.fixed_order(partition)
        if line:
            one, stage = line[0].request, line[0].stage
            shape, cost_class = one.shape, one.cost_class
            for ticket in line:
                request = ticket.request
                if request.cost_class != cost_class or request.shape != shape or ticket.stage != stage or ticket.held:
                    return None
        return line

    def _add_line(self, filled: Filled, line: Sequence[Ticket]) -> Filled:
        """Add equals: as many as surely fit at once, the others one by one."""
        if line:
            n = filled.tally.repeat(line[0], min(len(line), filled.places), self._budget)
            filled.grants = dict.fromkeys(line[:n], 1.0)
            line = line[n:]
        return self._add(filled, line) if line else filled

    def _add(
        self, filled: Filled, candidates: Iterable[Ticket], limit: float = inf, cursor: Cursor | None = None
    ) -> Filled:
        """Add candidates in order to the fill: the one loop that grants units to waiting tickets."""
        model, budget, places, resources = self._cost, self._budget, filled.places, self._resources
        shares = shares_of_places(self._group, self._partition, self._size)
        tally, grants, offenders = filled.tally, filled.grants, self._group.offenders
        over: list[Ticket] | None = None
        blocked: set[object] = set()
        for ticket in candidates:
            if len(grants) >= places:
                filled.short_of = self._short_of_places()
                break
            client = ticket.request.client
            if client in blocked:
                continue
            if ticket.held:  # preempted while held: skipped until its resume
                if cursor is not None:
                    cursor.take(0.0)
                continue
            if resources is not None:
                over = self._come_up_to(ticket.request.priority)
                if closed := self._limit_reason(over):
                    filled.short_of = closed
                    break
            apart = bool(offenders) and client in offenders and resources is None
            if apart and grants:  # its turn comes when it is the first
                why = "apart"
            elif over is None and shares is not None and shares[client] <= 0:
                why = "share"
            elif resources is not None:
                why = self._enter(ticket, over, resources)
            else:
                units = tally.offer(ticket, budget, limit)
                why = "" if units > 0.0 else "budget"
                if not why:
                    tally.add(ticket, units)
                    grants[ticket] = units
            if not why:
                if shares is not None:
                    shares[client] -= 1
                if cursor is not None:
                    cursor.take(model.marginal(ticket, grants[ticket]) / ticket.request.weight)
                if apart:
                    filled.apart, filled.short_of = True, "apart"
                    break
                continue
            blocked.add(client)
            if cursor is not None:
                cursor.skip()
            if why in ("budget", "memory"):
                filled.passed_over = True
            spent = why if why == "memory" else "budget" if why != "apart" and tally.cost >= budget else ""
            filled.short_of = spent or filled.short_of or why
            if spent or (len(blocked) >= MAX_PASSED_OVER and why != "apart"):
                break
        return filled

    def _short_of_places(self) -> str:
        """The limit that keeps the others out when no more may enter."""
        short = self._room is not None and self._room < self._size - len(self._partition.residents)
        return "room" if short else "places"

    # -- residents -----------------------------------------------------------------------------------------------------

    def _step_up_to(self, tier: Priority) -> None:
        """Grant to the residents up to this tier, in order, within budget, size and memory: those of one stage."""
        todo, grants, preempted, resources = self._todo, self.base, self.preempted, self._resources
        offer, add, budget = self._entered.tally.offer, self._entered.tally.add, self._budget
        reserve = None if resources is None else resources.reserve
        places = self._size - len(self._entered.grants)
        while todo and todo[-1].tier <= tier:
            ticket = todo.pop()
            if ticket in preempted or len(grants) >= places:
                continue
            if self._stage is None:
                self._stage = ticket.stage
            if ticket.stage != self._stage:
                continue
            units = offer(ticket, budget)
            if units > 0.0 and (reserve is None or reserve(ticket, units) or self._make_room(ticket, units)):
                add(ticket, units)
                grants[ticket] = units

    def _make_room(self, ticket: Ticket, units: float) -> bool:
        """A resident could not reserve: preempt those behind it if it then fits, otherwise preempt it."""
        resources = self._resources
        assert resources is not None
        runs = bool(self.base or self._entered.grants)
        behind = self._may_give_way([t for t in self._partition.residents if gives_way(t) > gives_way(ticket)], runs)
        if resources.would_fit(ticket, units, behind):
            for victim in behind:
                self._preempt(victim, resources, for_memory=True)
                if resources.reserve(ticket, units):
                    return True
        elif ticket.progressed or not runs:
            self._preempt(ticket, resources, for_memory=True)
        return False

    # -- with memory ---------------------------------------------------------------------------------------------------

    def _fill_by_tiers(self) -> Filled:
        filled, room, partition = self._entered, self._room, self._partition
        if partition.waiting:
            for ticket in partition.residents:
                self._present[ticket.tier] += ticket.state is RESIDENT
            cursor = Cursor(partition)
            self._add(filled, iter(cursor.next, None), inf, cursor)
        self._step_up_to(BACKGROUND)
        free = len(filled.grants) + self._free
        filled.places = free if room is None else min(free, room)
        if self.preempted and not filled.short_of:
            filled.short_of = "memory" if self._memory_short else "places"
        if filled.short_of != "memory":
            self._add_extra()
        return filled

    def _add_extra(self) -> None:
        """Grant residents that got all they wanted some of the units beyond it: of what is left, so nobody waits."""
        resources, base, tally = self._resources, self.base, self._entered.tally
        assert resources is not None
        asking = [t for t, units in base.items() if t.extra and units == t.wants]
        for ticket, most in zip(asking, tally.extra(asking, self._budget) if asking else (), strict=True):
            more = resources.extend(ticket, base[ticket], most) if most else 0.0
            if more > 0.0:
                base[ticket] += more
                self.extra[ticket] = more
                tally.cost += more

    def _come_up_to(self, priority: Priority) -> list[Ticket] | None:
        """Grant to the residents up to this priority; returns the others that may give way to it."""
        self._step_up_to(priority)
        if not any(self._present[priority + 1 :]):
            return None
        runs = bool(self.base or self._entered.grants or self._todo)
        return self._may_give_way([t for t in self._partition.residents if t.tier > priority], runs)

    def _limit_reason(self, over: Sequence[Ticket] | None) -> str:
        """The limit that keeps out the next ticket and all after it; "" if there is none."""
        entered = len(self._entered.grants)
        if self._memory_short and over is None:  # a step that preempted for memory admits only what is over others
            return "memory"
        if (self._free <= 0 and not over) or entered + len(self.base) >= self._size:
            return "places"
        return "room" if self._room is not None and entered >= self._room else ""

    def _enter(self, ticket: Ticket, over: Sequence[Ticket] | None, resources: Resources) -> str:
        """Reserve and grant what fits, preempting residents that it is over; "", or the limit that is reached."""
        tally, entered = self._entered.tally, self._entered.grants
        if (self.base or entered) and ticket.stage != self._stage:
            return "stage"
        leaves = over[0] if over and self._free <= 0 else None
        cached = ticket.computed = resources.begin(ticket)
        ticket.wants -= cached
        units = tally.offer(ticket, self._budget if over is None else self._budget_over(ticket, leaves))
        if units > 0.0 and self._reserve_entry(ticket, units, over or (), leaves is not None, resources):
            ticket.cached += cached
            if cached:
                self.cached[ticket] = cached
            self._stage = ticket.stage
            tally.add(ticket, units)
            entered[ticket] = units
            return ""
        ticket.wants += cached
        ticket.computed = 0.0
        resources.release(ticket)
        return "memory" if units > 0.0 else "budget"

    def _budget_over(self, ticket: Ticket, leaves: Ticket | None) -> float:
        """The budget for a ticket over residents: those that want one unit keep it, as long as one unit is left."""
        decodes = [t for t in self._todo if t.wants <= 1.0 and t.stage == ticket.stage and t is not leaves]
        kept = sum(self._cost.marginal(t, 1.0) for t in decodes if t not in self.preempted)
        one = self._cost.marginal(ticket, 1.0)
        return min(self._budget, max(self._budget - kept, self._entered.tally.cost + one))

    def _reserve_entry(
        self, ticket: Ticket, units: float, over: Sequence[Ticket], takes_place: bool, resources: Resources
    ) -> bool:
        """Reserve for an entering ticket. Residents give way only if it then fits."""
        if not takes_place and resources.reserve(ticket, units):
            return True
        if not over or not resources.would_fit(ticket, units, over):
            return False
        for i, victim in enumerate(over):
            self._preempt(victim, resources, for_memory=i > 0 or not takes_place)
            if resources.reserve(ticket, units):
                return True
        return False

    @property
    def _free(self) -> int:
        """Free places; negative if concurrent batches admitted more than there are."""
        held = len(self._partition.residents) - len(self.preempted) + len(self._entered.grants)
        return self._size - held

    def _may_give_way(self, some: Iterable[Ticket], runs: bool) -> list[Ticket]:
        """Those of them that may give way, the first to go first: none twice without progress between, unless nothing
        runs otherwise."""
        found = [t for t in some if t.state is RESIDENT and t not in self.base and t not in self.preempted]
        found.sort(key=gives_way, reverse=True)
        fresh = [t for t in found if t.progressed]
        return fresh if runs else fresh + [t for t in found if not t.progressed]

    def _preempt(self, ticket: Ticket, resources: Resources, for_memory: bool) -> None:
        resources.release(ticket)
        self.preempted[ticket] = None
        self._present[ticket.tier] -= 1
        self._memory_short = self._memory_short or for_memory


def gives_way(ticket: Ticket) -> tuple[bool, Priority, int]:
    """The largest gives way first: held ones, then the newest of the lowest tier."""
    return ticket.held, ticket.tier, ticket.seq


def movable(partition: Partition) -> list[Ticket]:
    """The residents that may step, in order: tiers, then those that want one unit, then the others, each by arrival."""
    able = [t for t in partition.residents if t.state is RESIDENT and not t.held]
    able.sort(key=lambda t: (t.tier, t.wants > 1.0, t.seq))
    return able


def shares_of_places(group: Group, partition: Partition, places: int) -> dict[object, int] | None:
    """Resident places each client may still take while others wait: its even part less what it holds.

    None when work is one-shot or no other client waits.
    """
    active = len(group.clients)
    if not partition.residents or active < 2 or not partition.contended():
        return None
    even = ceil(places / active)
    spare: dict[object, int] = defaultdict(lambda: even)
    for ticket in partition.residents:
        spare[ticket.request.client] -= 1
    return spare
