"""A step of a group with memory: tier by tier, residents before those that wait, and who gives way to whom.

A waiting ticket is *over* the residents of less urgent tiers than its own priority. It comes before them, in three
ways:

    places   none is free: one resident it is over gives way to it, whatever their clients' shares of places, which hold
             between equals
    memory   it cannot reserve: residents it is over give way until it fits, nobody when all of them were not enough
    budget   residents it is over take what it leaves, but those that want one unit (decodes) still go first, as long as
             that leaves it one unit: so who enters here has begun with this step, and leads the next as a resident

Among residents those that come later give way to those that come first when memory is short: until it fits, or, where
it would not, who asked for it gives way itself.

Those that give way are preempted: they start over from the front of their queue. Held ones go first, then the lowest
tier's newest; nobody twice before it holds more than it lost, so what one ticket is made to repeat is bounded by its
own length; and never who runs in another batch, or in another partition. Age moves a ticket up the queue, and what has
aged gives way like the tier it is served in, but only its priority puts it over others: else a backlog would throw out
its own kind as soon as it counts as default. `room` is somebody else's limit and stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil

from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import Group
from reflex_runtime.core.order import MAX_PASSED_OVER, Cursor, Partition
from reflex_runtime.core.request import BACKGROUND, RESIDENT, Priority, Ticket
from reflex_runtime.core.select import Filled


def gives_way(ticket: Ticket) -> tuple[bool, Priority, int]:
    """The largest gives way first: held ones, then the lowest tier's newest."""
    return ticket.held, ticket.tier, ticket.seq


def movable(partition: Partition) -> list[Ticket]:
    """The residents that may step, in order: tiers, then those that want one unit, then the others, each by arrival."""
    able = [t for t in partition.residents if t.state is RESIDENT and not t.held]
    able.sort(key=lambda t: (t.tier, t.wants > 1.0, t.seq))
    return able


def shares_of_places(group: Group, partition: Partition, places: int) -> dict[object, int] | None:
    """Resident places each client may still take while others wait: its even part less what it holds.

    None when work is one-shot or nobody else waits.
    """
    active = len(group.clients)
    if not partition.residents or active < 2 or not partition.contended():
        return None
    even = ceil(places / active)
    left: dict[object, int] = defaultdict(lambda: even)
    for ticket in partition.residents:
        left[ticket.request.client] -= 1
    return left


class ResidentStep:
    """The next step of one partition. Reserves on the way; what it decides beside that, the scheduler carries out.

    base: the residents that step, with their grants. entered: those that enter; both count in one tally.
    cached: of those that enter, the units that were already there, where there were any.
    preempted: residents that lost their place, in the order it happened.
    """

    def __init__(self, group: Group, partition: Partition, policy: FlushPolicy) -> None:
        resources = group.config.resources
        assert resources is not None
        self._resources, self._partition, self._policy, self._cost = resources, partition, policy, group.cost
        self._tally = group.cost.tally()
        self.base, self.entered = Filled({}, self._tally), Filled({}, self._tally)
        self.cached: dict[Ticket, float] = {}
        self.preempted: dict[Ticket, None] = {}
        self._room = group.room_in(partition)
        self._todo = movable(partition)[::-1]  # who may still step, the first at the end
        self._present = [0, 0, 0]  # residents that do not run, by tier
        self._stage: str | None = None  # a batch has one
        self._memory_short = False
        self._passed_over = 0
        self._shares = shares_of_places(group, partition, policy.max_batch_size)

    def fill(self) -> None:
        """Decide all of it."""
        if self._partition.waiting:
            self._let_in()
        self._step_up_to(BACKGROUND)
        filled, room = self.entered, self._room
        free = len(filled.grants) + self._free
        filled.places = free if room is None else min(free, room)
        if self.preempted and not filled.short_of:
            filled.short_of = "memory" if self._memory_short else "places"

    # -- those that wait -----------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        for ticket in self._partition.residents:
            self._present[ticket.tier] += ticket.state is RESIDENT
        cursor = Cursor(self._partition)
        for ticket in iter(cursor.next, None):
            if ticket.held:  # preempted while held: skipped until its resume
                cursor.take(0.0)
            elif not self._next(ticket, cursor):
                break

    def _next(self, ticket: Ticket, cursor: Cursor) -> bool:
        """Let the next in serving order enter, or pass it over. False: nobody after it enters either."""
        priority = ticket.request.priority
        self._step_up_to(priority)
        over = any(self._present[priority + 1 :])
        victims = self._over(priority) if over else []
        filled, tally, client = self.entered, self._tally, ticket.request.client
        closed = self._closed(over, victims)
        if closed:
            filled.short_of = closed
            return False
        if not over and self._shares is not None and self._shares[client] <= 0:
            why = "share"
        elif (self.base.grants or filled.grants) and ticket.stage != self._stage:
            why = "stage"
        else:
            why = self._enter(ticket, victims, over)
        if not why:
            if self._shares is not None:
                self._shares[client] -= 1
            cursor.take(self._cost.marginal(ticket, filled.grants[ticket]) / ticket.request.weight)
            return True
        filled.passed_over = filled.passed_over or why in ("budget", "memory")
        cursor.skip()
        self._passed_over += 1
        spent = "memory" if why == "memory" else "budget" if tally.cost >= self._policy.max_batch_cost else ""
        filled.short_of = spent or filled.short_of or why
        return not spent and self._passed_over < MAX_PASSED_OVER

    def _over(self, priority: Priority) -> list[Ticket]:
        """Residents that may give way to a ticket of this priority."""
        runs = bool(self.base.grants or self.entered.grants or self._todo)
        return self._victims([t for t in self._partition.residents if t.tier > priority], runs)

    def _closed(self, over: bool, victims: Sequence[Ticket]) -> str:
        """What keeps out the next one and everybody after it; "" when nothing does."""
        room, entered = self._room, len(self.entered.grants)
        if self._memory_short and not over:  # nobody else enters in a step that threw somebody out
            return "memory"
        if (self._free <= 0 and not victims) or entered + len(self.base.grants) >= self._policy.max_batch_size:
            return "places"
        return "room" if room is not None and entered >= room else ""

    def _enter(self, ticket: Ticket, victims: Sequence[Ticket], over: bool) -> str:
        """Reserve and grant what fits, others giving way where it is over them; "", or what is short."""
        leaves = victims[0] if self._free <= 0 else None
        cached = self._resources.begin(ticket)
        ticket.wants -= cached
        units = self._tally.offer(ticket, self._budget(ticket, leaves) if over else self._policy.max_batch_cost)
        if units > 0.0 and self._reserve(ticket, units, victims, leaves is not None):
            ticket.cached += cached
            ticket.computed = cached
            if cached:
                self.cached[ticket] = cached
            self._stage = ticket.stage
            self._tally.add(ticket, units)
            self.entered.grants[ticket] = units
            return ""
        ticket.wants += cached
        self._resources.release(ticket)
        return "memory" if units > 0.0 else "budget"

    def _budget(self, ticket: Ticket, leaves: Ticket | None) -> float:
        """What the residents it is over leave it: those that want one unit keep theirs, while that leaves it one."""
        decodes = [t for t in self._todo if t.wants <= 1.0 and t.stage == ticket.stage and t is not leaves]
        kept = sum(self._cost.marginal(t, 1.0) for t in decodes if t not in self.preempted)
        budget, one = self._policy.max_batch_cost, self._cost.marginal(ticket, 1.0)
        return min(budget, max(budget - kept, self._tally.cost + one))

    def _reserve(self, ticket: Ticket, units: float, victims: Sequence[Ticket], takes_place: bool) -> bool:
        """Reserve for who enters. Nobody gives way unless it fits then."""
        if not takes_place and self._resources.reserve(ticket, units):
            return True
        if not victims or not self._resources.would_fit(ticket, units, victims):
            return False
        for i, victim in enumerate(victims):
            self._preempt(victim, for_memory=i > 0 or not takes_place)
            if self._resources.reserve(ticket, units):
                return True
        return False

    # -- residents -----------------------------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        """Places nobody holds; negative where batches in flight at one time took in more than there are."""
        held = len(self._partition.residents) - len(self.preempted) + len(self.entered.grants)
        return self._policy.max_batch_size - held

    def _step_up_to(self, tier: Priority) -> None:
        """Grant to the residents up to this tier, in order, within budget, size and memory: those of one stage."""
        todo, grants, tally, reserve = self._todo, self.base.grants, self._tally, self._resources.reserve
        budget, places = self._policy.max_batch_cost, self._policy.max_batch_size - len(self.entered.grants)
        while todo and todo[-1].tier <= tier:
            ticket = todo.pop()
            if ticket in self.preempted or len(grants) >= places:
                continue
            if self._stage is None:
                self._stage = ticket.stage
            if ticket.stage != self._stage:
                continue
            units = tally.offer(ticket, budget)
            if units > 0.0 and (reserve(ticket, units) or self._make_room(ticket, units)):
                tally.add(ticket, units)
                grants[ticket] = units

    def _make_room(self, ticket: Ticket, units: float) -> bool:
        """A resident's reservation failed. Those behind it give way if it fits then, else it gives way itself."""
        runs = bool(self.base.grants or self.entered.grants)
        behind = self._victims([t for t in self._partition.residents if gives_way(t) > gives_way(ticket)], runs)
        if self._resources.would_fit(ticket, units, behind):
            for victim in behind:
                self._preempt(victim, for_memory=True)
                if self._resources.reserve(ticket, units):
                    return True
        elif ticket.progressed or not runs:
            self._preempt(ticket, for_memory=True)
        return False

    def _victims(self, behind: Iterable[Ticket], runs: bool) -> list[Ticket]:
        """Those of them that may give way, the first to go first.

        Nobody twice without progress between, unless nothing runs otherwise.
        """
        found = [t for t in behind if t.state is RESIDENT and t not in self.base.grants and t not in self.preempted]
        found.sort(key=gives_way, reverse=True)
        fresh = [t for t in found if t.progressed]
        return fresh if runs else fresh + [t for t in found if not t.progressed]

    def _preempt(self, ticket: Ticket, for_memory: bool) -> None:
        self._resources.release(ticket)
        self.preempted[ticket] = None
        self._present[ticket.tier] -= 1
        self._memory_short = self._memory_short or for_memory
