"""One batch of one partition: fill it, choose whom to leave out, decide whether it is sent now.

No queue changes here. The result is a `Batch`, which the scheduler carries out, or the time until which the partition
is held. Only resources are reserved, and groups with resources are never held.

Filling: residents that step, then waiting tickets in serving order. Without memory to reserve (`GroupConfig.resources`)
all residents come first. With it every grant is reserved, and tiers go in order: in each the residents before the
waiting tickets. A waiting ticket is *over* the residents of tiers less urgent than its own priority. They give way to
it:

    places   when none is free, one of them loses its place. Shares of places hold between equals only
    memory   when it cannot reserve, they lose their memory until it fits; none does if all were not enough
    budget   it is granted before them. Residents that want one unit (decodes) still go first while that leaves it one
             unit, so a ticket that enters begins with this step, and leads the next one as a resident

When a resident cannot reserve, the residents behind it give way; if all were not enough, it gives way itself.

A resident that gives way is preempted: it starts over from the front of its queue. Held ones go first, then of the
lowest tier those beyond their client's even part of the memory, then the newest. A resident is not preempted again
before it holds more than it lost; this bounds the repeated work. One that runs in another batch is never preempted. An
aged ticket is served, and gives way, like the tier that it moved up to, but only its priority puts it over others:
otherwise an aged backlog would preempt its own kind. `room` is an outside limit and always holds.

Each member makes a step longer for all, so with memory each client has a part of it (`part_of_step`), in units. Of a
client with more residents, those step that waited longest; its tickets enter until its part is used up, at least one. A
client alone has the whole step once the others have been away for a while: else they would meet a long step when they
come back.

Stages. New requests (newcomers) may run their first stage, of P seconds, before the residents' next step. With n
residents and w newcomers, steps of f + m · n seconds, and `rem` of them left:

    newcomers gain   w · rem · f                      rem of the longest resident: they share its steps
    residents lose   Σ over them of P + rem · m · w   they wait for the first stage, and each of their steps is wider

Newcomers join if they gain more, but not if the longest latency would grow, or a resident would miss a deadline that it
would meet if they waited. Regular clients that join meet again in each cycle, and the residents lose again. A client
that waits instead comes later in each cycle: it waits once. So the gain must be a multiple of the loss, by the share of
the device that they would take if each came in turn (`ThinkTimes.in_turns`). Up to a share of 1 none joins. Above it
some must share, and the multiple falls from 2 to 1. Without joining the mean latency of 8 and 16 robots is 10 to 14 %
longer; without the multiple that of few regular ones 5 to 14 %.

Ahead. The next batch may be formed while one still runs, to start when the device is free. Only a batch is formed ahead
that waiting could not change: it is full, of one call, in the first turn, and no deadline of it is at risk. The driver
forms it shortly before the running batch ends. Until it starts it is taken back if it changes: a request arrives that
may go first, one with a deadline in another partition, or the first one of another group; a member leaves, is replaced
or would miss its deadline; its group pauses; the scheduler closes. For calls of 0.6 to 1 ms in full batches this brings
7 to 30 % of the rate, for calls of 5 ms 2 %.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from math import ceil, inf
from operator import itemgetter

from reflex_runtime.core.admission import too_late
from reflex_runtime.core.batch import Batch, Cause, Part
from reflex_runtime.core.cost import Tally, tally_of
from reflex_runtime.core.flush import Filled, Fitter, FlushPolicy, at_risk, window
from reflex_runtime.core.group import Group, Resources
from reflex_runtime.core.holding import Holding
from reflex_runtime.core.order import MAX_PASSED_OVER, Partition, in_order
from reflex_runtime.core.request import BACKGROUND, RESIDENT, RUNNING, URGENT, WAITING, Priority, Ticket

_ANY = 1 << 30  # places, if another rule counts them
KEPT = 64  # of each 64 places one is kept for clients that have none
LATER = 1.25  # batches; a ticket that would be late after so many goes before its equals
BESIDE = 1.0  # seconds for which a client that left still counts as present
_SAME = 1e-9  # relative: plans that differ by less are equal


class Filling:
    """The fills of one partition for one decision. It reserves resources; the scheduler carries out all else.

    base: the residents that step, with their grants. cached: units found already computed, of entering tickets.
    extra: units of residents beyond those they wanted, a part of their grants.
    preempted: residents that lost their place, in the order it happened.
    """

    def __init__(self, group: Group, partition: Partition, policy: FlushPolicy, now: float) -> None:
        self._group, self._partition, self._cost = group, partition, group.cost
        self._budget, self._size, self._room = policy.max_batch_cost, policy.max_batch_size, group.room
        self._resources = group.config.resources
        self.base: dict[Ticket, float] = {}
        self.cached: dict[Ticket, float] = {}
        self.extra: dict[Ticket, float] = {}
        self.preempted: dict[Ticket, None] = {}
        self._entered = self._beside({})
        part = inf if self._resources is None else part_of_step(group, partition, now)
        self._todo = movable(partition, part)[::-1] if partition.residents else []  # to step, the first at the end
        self._left: dict[object, float] | None = None  # of each client's part, for tickets that enter
        if part < inf:
            self._left = defaultdict(lambda: part)
            for client, step in Counter(t.request.client for t in self._todo).items():
                self._left[client] = max(1.0, part - step)
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
        return self._add_in_order(self._beside(self.base) if self.base else self._entered)

    def fill_from(self, candidates: Iterable[Ticket], limit: float = inf) -> Filled:
        """As `fill`, from these candidates in order, while the batch takes at most `limit` seconds. Without memory."""
        return self._add(self._beside(self.base), candidates, limit, set())

    def fit(self, candidates: Sequence[Ticket], limit: float) -> tuple[Sequence[Ticket], float]:
        """As a `Fitter`."""
        filled = self.fill_from(candidates, limit)
        return list(filled.grants), filled.tally.seconds

    def _add_in_order(self, filled: Filled) -> Filled:
        """Add waiting tickets in serving order."""
        cost, grants = self._cost, filled.grants

        def charge(ticket: Ticket) -> float:
            return cost.marginal(ticket, grants[ticket]) / ticket.request.weight if ticket in grants else 0.0

        passed_over: set[Hashable] = set()
        return self._add(filled, in_order(self._partition, charge, passed_over), inf, passed_over)

    def _beside(self, base: Mapping[Ticket, float]) -> Filled:
        """An empty fill beside these residents. With memory, the number that may enter changes during the fill."""
        if self._resources is not None:
            return Filled({}, self._cost.tally(), places=_ANY)
        free = self._size - len(self._partition.residents)
        places = free if self._room is None else min(free, self._room)
        places = max(0, int(min(places, self._group.offenders.limit)))
        return Filled({}, tally_of(self._cost, base), places=places)

    def _add(self, filled: Filled, candidates: Iterable[Ticket], limit: float, passed_over: set[Hashable]) -> Filled:
        """Grant units to candidates, in order.

        passed_over: clients of which one did not fit, whose later ones must not overtake it.
        """
        budget, places, resources = self._budget, filled.places, self._resources
        shares = shares_of_places(self._group, self._partition, self._size)
        tally, grants, left = filled.tally, filled.grants, self._left
        offenders = self._group.offenders if resources is None and self._group.offenders else ()
        over: list[Ticket] | None = None
        for ticket in candidates:
            if len(grants) >= places:
                outside = self._room is not None and self._room < self._size - len(self._partition.residents)
                filled.short_of = "room" if outside else "places"
                break
            client = ticket.request.client
            if client in passed_over or ticket.held:  # it was preempted while held: skipped until `resume`
                continue
            if resources is not None:
                over = self._come_up_to(ticket.request.priority)
                if closed := self._limit_reason(over):
                    filled.short_of = closed
                    break
            apart = client in offenders
            if apart and grants:  # it runs alone, when it is the first
                why = "apart"
            elif over is None and (
                (shares is not None and shares[client] <= 0) or (left is not None and left[client] <= 0)
            ):
                why = "share"
            elif resources is not None:
                why = self._enter(ticket, over, resources)
            else:
                units = tally.grant(ticket, budget, limit)
                why = "" if units > 0.0 else "budget"
                if not why:
                    grants[ticket] = units
            if not why:
                if shares is not None:
                    shares[client] -= 1
                if left is not None:
                    left[client] -= grants[ticket]
                if apart:
                    filled.apart, filled.short_of = True, "apart"
                    break
                continue
            passed_over.add(client)
            if why in ("budget", "memory"):
                filled.passed_over = True
            spent = why if why == "memory" else "budget" if why != "apart" and tally.cost >= budget else ""
            filled.short_of = spent or filled.short_of or why
            if spent or (len(passed_over) >= MAX_PASSED_OVER and why != "apart"):
                break
        return filled

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
        """A resident could not reserve: preempt residents after it if it then fits, otherwise preempt it."""
        resources = self._resources
        assert resources is not None
        runs = bool(self.base or self._entered.grants)
        order = self._gives_way()
        behind = self._may_give_way([t for t in self._partition.residents if order(t) > order(ticket)], runs)
        if self._displace(behind, ticket, units, resources):
            return True
        if ticket.progressed or not runs:
            self._preempt(ticket, resources, for_memory=True)
        return False

    def _displace(
        self, victims: Sequence[Ticket], ticket: Ticket, units: float, resources: Resources, place: bool = False
    ) -> bool:
        """Preempt some of these residents until the ticket can reserve; none if all were not enough. place: the first
        one gives its place."""
        if not victims or not resources.would_fit(ticket, units, victims):
            return False
        for i, victim in enumerate(victims):
            self._preempt(victim, resources, for_memory=i > 0 or not place)
            if resources.reserve(ticket, units):
                return True
        return False

    # -- with memory ---------------------------------------------------------------------------------------------------

    def _fill_by_tiers(self) -> Filled:
        filled, room, partition = self._entered, self._room, self._partition
        if partition.waiting:
            for ticket in partition.residents:
                self._present[ticket.tier] += ticket.state is RESIDENT
            self._add_in_order(filled)
        self._step_up_to(BACKGROUND)
        free = len(filled.grants) + self._free
        filled.places = free if room is None else min(free, room)
        if self.preempted and not filled.short_of:
            filled.short_of = "memory" if self._memory_short else "places"
        if filled.short_of != "memory":
            self._add_extra()
        return filled

    def _add_extra(self) -> None:
        """Grant residents units beyond those they wanted, of the rest of the budget."""
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
        """Grant to the residents up to this priority; returns the others that may be preempted for it."""
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
        """Reserve and grant the units that fit, preempting residents; "", or the limit that is reached."""
        tally, entered = self._entered.tally, self._entered.grants
        if (self.base or entered) and ticket.stage != self._stage:
            return "stage"
        leaves = over[0] if over and self._free <= 0 else None
        cached = ticket.computed = resources.begin(ticket)
        ticket.wants -= cached
        units = tally.offer(ticket, self._budget if over is None else self._budget_over(ticket, leaves))
        reserved = units > 0.0 and leaves is None and resources.reserve(ticket, units)
        if reserved or (units > 0.0 and self._displace(over or (), ticket, units, resources, leaves is not None)):
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

    @property
    def _free(self) -> int:
        """Free places; negative if concurrent batches admitted more than there are."""
        held = len(self._partition.residents) - len(self.preempted) + len(self._entered.grants)
        return self._size - held

    def _may_give_way(self, some: Iterable[Ticket], runs: bool) -> list[Ticket]:
        """Those of them that may be preempted, the first to go first: none twice without progress in between, unless
        otherwise nothing would run."""
        found = [t for t in some if t.state is RESIDENT and t not in self.base and t not in self.preempted]
        found.sort(key=self._gives_way(), reverse=True)
        fresh = [t for t in found if t.progressed]
        return fresh if runs else fresh + [t for t in found if not t.progressed]

    def _gives_way(self) -> Callable[[Ticket], tuple[bool, Priority, bool, int]]:
        """The order in which residents give way, the largest first: held ones, then of the lowest tier those beyond
        their client's even part of the memory, then the newest. Of each client one is never beyond it."""
        clients, held, beyond = len(self._group.clients), defaultdict[Hashable, float](float), set[Ticket]()
        if clients > 1:
            some = [t for t in self._partition.residents if t.state is RESIDENT and t not in self.preempted]
            part = sum(t.computed for t in some) / clients
            for ticket in sorted(some, key=lambda t: (t.tier, t.seq)):
                before = held[ticket.request.client]
                held[ticket.request.client] += ticket.computed
                if before and before + ticket.computed > part:
                    beyond.add(ticket)
        return lambda ticket: (ticket.held, ticket.tier, ticket in beyond, ticket.seq)

    def _preempt(self, ticket: Ticket, resources: Resources, for_memory: bool) -> None:
        resources.release(ticket)
        self.preempted[ticket] = None
        self._present[ticket.tier] -= 1
        self._memory_short = self._memory_short or for_memory


def movable(partition: Partition, part: float) -> list[Ticket]:
    """The residents that may step, in order: tiers, then those that want one unit, then the others, each by arrival.

    part: most of one client. If they could be too many they take turns: those first that did not step for longest.
    """
    able = [t for t in partition.residents if t.state is RESIDENT and not t.held]
    if part >= len(able):
        able.sort(key=lambda t: (t.tier, t.wants > 1.0, t.seq))
        return able
    turns: dict[Hashable, list[Ticket]] = defaultdict(list)
    for ticket in sorted(able, key=lambda t: t.tier):
        turns[ticket.request.client].append(ticket)
    able = [ticket for some in turns.values() for ticket in some[: int(part)]]
    able.sort(key=lambda t: (t.tier, t.wants > 1.0))
    return able


def part_of_step(group: Group, partition: Partition, now: float) -> float:
    """Most members of one client in a step, so that no client makes it much longer (`CostModel.shared`) than if each
    had as many as the one with the fewest. A client without residents counts as one member.

    inf for a client alone, and until step times are measured.
    """
    known, residents = group.clients, partition.residents
    clients = len(known) + (len(known) == 1 and now < known.left_at + BESIDE)
    if clients < 2:
        return inf
    asked = sorted(client.unsettled for client in {t.queue.client for t in residents}) or [inf]
    others = clients - len(asked)
    least = 1 if others else int(asked[0])
    most = group.cost.shared((clients - 1) * least)
    if most == inf:
        return inf
    left = max(clients * least, most) - others
    for i, some in enumerate(asked):
        count = len(asked) - i
        if count == 1 or some * count > left:
            break
        left -= some
    return left // count


def shares_of_places(group: Group, partition: Partition, places: int) -> dict[object, int] | None:
    """Resident places that each client may still take: its even part while others wait, less those it holds. With
    memory, the last of many places are kept for clients that hold none: they need not wait for a client that takes all.

    None for one-shot work, and where no other client waits and no place is kept.
    """
    active = len(group.clients)
    kept = places // KEPT if group.config.resources is not None else 0
    contended = partition.residents and active >= 2 and partition.contended()
    if not contended and not kept:
        return None
    even = ceil(places / active) if contended else places - kept
    spare: dict[object, int] = defaultdict(lambda: even)
    for ticket in partition.residents:
        spare[ticket.request.client] -= 1
    return spare


# -- one batch ---------------------------------------------------------------------------------------------------------


class Former:
    """Forms a batch of one partition at one time.

    shed: waiting tickets that cannot be answered in time. preempted: residents that lost their place, in order.
    late_after: more are to be shed, of those that are too late if they run after that time; inf: none.
    held_until: when to decide again, if there is no batch; inf: after the next input.
    """

    def __init__(self, group: Group, partition: Partition, holding: Holding, now: float) -> None:
        self.group, self.partition, self.holding, self.now = group, partition, holding, now
        self.held_until = self.late_after = inf
        self.shed: list[Ticket] = []
        self.preempted: list[Ticket] = []
        self.policy = self._policy()

    def _policy(self) -> FlushPolicy:
        base = self.group.config.flush
        controller = self.group.config.controller
        if controller is None or (head := self._head()) is None:
            return base
        policy = controller.policy(base, lambda: self.group.cost.line(head), self.now, self.partition.key)
        if base.times_fixed:
            self.group.budget = max(base.max_batch_cost, policy.max_batch_cost)
        return self._for_urgent(policy, head) if policy.max_batch_cost < base.max_batch_cost else policy

    def _for_urgent(self, policy: FlushPolicy, head: Ticket) -> FlushPolicy:
        """Batches are planned short for urgent requests to come, but those that wait share one, even a longer one. In
        overload 6 % more of them are on time."""
        fixed, marginal, _ = self.group.cost.line(head)
        urgent = fixed + marginal * len(self.partition.tiers[URGENT].tickets)
        most = min(urgent, self.group.config.flush.max_batch_cost)
        return policy if most <= policy.max_batch_cost else replace(policy, max_batch_cost=most)

    def _head(self) -> Ticket | None:
        return next((head for tier in self.partition.tiers if (head := tier.tickets.first) is not None), None)

    # -- the decision ------------------------------------------------------------------------------------------------

    def form(self) -> Batch | None:
        """The batch to send now, or None; its scheduler gives it a number."""
        while (part := self.partition.suspects.next()) is not None:
            if (batch := self._form_part(part)) is not None:
                return batch
        filling = Filling(self.group, self.partition, self.policy, self.now)
        filled = filling.fill()
        self.preempted = list(filling.preempted)
        if filled.passed_over and filled.grants and self.policy.times_fixed and not len(self.partition.deadlines):
            even = list(filled.grants)[: self.holding.even_part(self.group, self.partition, filled, self.now)]
            filled = replace(filling.fill_from(even), passed_over=True, short_of=filled.short_of)
        if self.policy.shed and len(self.partition.deadlines):
            filled, self.shed = self._select_for_deadlines(filling, filled)
        if not filling.base and (not filled.grants or self._held(filled)):
            return None
        batch = self._finish(filling.base, filled)
        batch.cached, batch.extra = filling.cached, filling.extra
        return batch

    def form_full(self) -> Batch | None:
        """The batch, if it is full and no deadline is at risk. For a partition without residents."""
        filled = Filling(self.group, self.partition, self.policy, self.now).fill()
        full = filled.grants and (filled.size_reached or filled.passed_over)
        if not full or (self.policy.shed and self._at_risk(filled)):
            return None
        return self._finish({}, filled)

    def _form_part(self, part: Part) -> Batch | None:
        """Members of a failed call, with their grants: sent at once, without others. None if their resources are
        taken."""
        resources = self.group.config.resources
        if resources is not None:
            part.grants = {t: units for t, units in part.grants.items() if resources.reserve(t, units)}
        if not part.grants:
            return None
        tally = tally_of(self.group.cost, part.grants)
        return self._batch(part.grants, tally.cost, Cause.APART, (), "apart", part)

    def _finish(self, base: dict[Ticket, float], filled: Filled) -> Batch:
        grants, newcomers, tally = self._stage(base, filled)
        filled.apart = filled.apart and len(grants) == len(newcomers) == 1
        cause = self._cause(filled, tally, newcomers, bool(base))
        short_of = "stage" if len(newcomers) < len(filled.grants) else filled.short_of
        return self._batch(grants, tally.cost, cause, newcomers, short_of)

    def _batch(
        self,
        grants: dict[Ticket, float],
        cost: float,
        cause: Cause,
        newcomers: Sequence[Ticket],
        short_of: str,
        part: Part | None = None,
    ) -> Batch:
        return Batch(
            id=0,
            group=self.group.name,
            partition=self.partition.key,
            stage=next(iter(grants)).stage,
            cause=cause,
            scheduled_at=self.now,
            cost=cost,
            expected=cost if self.group.cost.unit == "seconds" else 0.0,  # until it begins
            grants=grants,
            admitted=tuple(newcomers),
            short_of=short_of,
            part=part,
        )

    def _cause(self, filled: Filled, tally: Tally, newcomers: Sequence[Ticket], residents: bool) -> Cause:
        """Precedence: single, apart, budget, size, then the event that ended the wait."""
        budget = self.policy.max_batch_cost
        if newcomers and tally.dearest > budget * (1.0 + 1e-9):
            return Cause.SINGLE
        if filled.apart:
            return Cause.APART
        if newcomers and (tally.cost >= budget * (1.0 - 1e-9) or filled.passed_over):
            return Cause.FULL
        if newcomers and filled.size_reached:
            return Cause.SIZE
        if newcomers and newcomers[0].tier is URGENT:  # tiers enter in order
            return Cause.URGENT
        if residents:
            return Cause.STEP
        if self.holding.draining:
            return Cause.DRAIN
        return Cause.HELD if self.partition.hold_since is not None else Cause.IDLE

    def _stage(self, base: dict[Ticket, float], filled: Filled) -> tuple[dict[Ticket, float], list[Ticket], Tally]:
        """A batch has one stage. New requests at another stage than the residents' go first if it pays, else they
        wait."""
        newcomers = list(filled.grants)
        if not newcomers:
            return base, [], filled.tally
        if not base:
            stage = newcomers[0].stage
        else:
            stage = next(iter(base)).stage
            entering = [t for t in newcomers if t.stage != stage]
            if entering and self._enters(base, entering, filled.tally.sigma):
                chosen = [t for t in entering if t.stage == entering[0].stage]
                return {t: filled.grants[t] for t in chosen}, chosen, filled.tally
        chosen = [t for t in newcomers if t.stage == stage]
        if len(chosen) == len(newcomers):
            together = {**base, **filled.grants} if base else filled.grants
            return together, chosen, filled.tally
        together = {**base, **{t: filled.grants[t] for t in chosen}}
        return together, chosen, tally_of(self.group.cost, together)

    def _enters(self, base: dict[Ticket, float], entering: list[Ticket], sigma: float) -> bool:
        """Whether new requests run their first stage before the residents' next step, see the module docstring."""
        model, now = self.group.cost, self.now
        first = [t for t in entering if t.stage == entering[0].stage]
        takes = model.fixed(first[0]) + sum([model.marginal(t, 1.0) for t in first])
        resident = next(iter(base))
        fixed, each = model.fixed(resident), model.marginal(resident, 1.0)
        step, wider = fixed + each * len(base), each * len(first)
        left, own = max([t.wants for t in base]), max([t.wants for t in first]) - 1.0
        gain, loss = len(first) * left * fixed, sum([takes + t.wants * wider for t in base])
        if gain <= loss * (1.0 + _SAME):
            return False
        turns = self.holding.think_times[self.group.name].in_turns(model.remaining(first[0]), now)
        if turns <= 1.0 or gain <= (3.0 - turns) * loss * (1.0 + _SAME):
            return False
        ends = {t: takes + t.wants * (step + wider) for t in base}
        waiting = max([now - t.arrived for t in first]) + left * step + takes + own * (fixed + wider)
        if max([now - t.arrived + end for t, end in ends.items()]) > waiting * (1.0 + _SAME):
            return False
        late = [t for t, end in ends.items() if now + end * (1.0 + 2.0 * sigma) > t.deadline and not t.request.streams]
        return not any(now + t.wants * (fixed + each) <= t.deadline for t in late)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def _select_for_deadlines(self, filling: Filling, full: Filled) -> tuple[Filled, list[Ticket]]:
        """The batch of largest expected value when deadlines are at risk, and the tickets that are shed."""
        chosen = full
        shed: list[Ticket] = []
        if self._at_risk(full):
            candidates, hopeless = self._candidates(full.tally.seconds)
            chosen = Filled({}, full.tally)
            probe = next((t for t in hopeless if not self.group.evidence.refuses(t, self.now)), None)
            if probe is not None:
                self.group.evidence.probe(probe)
                hopeless.remove(probe)
                chosen = filling.fill_from([probe])
            elif candidates:
                affine = self.group.cost.line(candidates[0])
                alike = not filling.base and self._alike(candidates)
                fit = _formula(affine, len(full.grants)) if alike else filling.fit
                chosen = filling.fill_from(window(candidates, full, fit, self.now))
            chosen.short_of = full.short_of or "budget"  # of the time that deadlines allow
            shed = list(dict.fromkeys((*hopeless, *self._overtaken(chosen))))
        return chosen, shed + self._infeasible(chosen, shed)

    def _at_risk(self, full: Filled) -> bool:
        """Whether a member of the batch, or a ticket left out of it, is likely to miss its deadline."""
        if not full.grants or full.tally.seconds <= 0.0:
            return False
        return at_risk(full, self.now) or bool(self._infeasible(full, []))

    def _candidates(self, seconds: float) -> tuple[list[Ticket], list[Ticket]]:
        """The waiting tickets, in serving order, that can be answered in time, and those that cannot even if run alone.

        Of equal tier and share those go first that could not wait for a batch of so many seconds. Looks at 4 × the size
        cap.
        """
        cost, now, most = self.group.cost, self.now, 4 * self.policy.max_batch_size
        charged: dict[Hashable, float] = defaultdict(float)
        found: list[tuple[Priority, float, bool, Ticket]] = []
        hopeless = []

        def charge(ticket: Ticket) -> float:
            price = cost.marginal(ticket, 1.0) / ticket.request.weight
            charged[ticket.queue.client] += price
            return price

        for ticket in islice(in_order(self.partition, charge, ()), most):
            client, end = ticket.queue.client, now + cost.remaining(ticket)
            if end > ticket.deadline:
                hopeless.append(ticket)
            elif not ticket.held:
                share = client.counter + charged.get(client, 0.0)
                found.append((ticket.tier, share, end + LATER * seconds <= ticket.deadline, ticket))
        found.sort(key=itemgetter(0, 1, 2))
        return [ticket for *_, ticket in found], hopeless

    def _alike(self, candidates: Sequence[Ticket]) -> bool:
        """Whether all cost the same."""
        one = candidates[0].request
        return self.group.cost.linear and all(t.request.cost_class == one.cost_class for t in candidates)

    def _infeasible(self, chosen: Filled, shed: list[Ticket]) -> list[Ticket]:
        """Waiting tickets that cannot be answered in time, neither now nor after this batch, tightest first: the first
        ones of very many (`late_after`)."""
        after = self.now + (chosen.tally.until_boundary if chosen.grants else 0.0)
        spared = {*chosen.grants, *shed}
        found, more = too_late(self.group, self.partition, after, spared, lambda ticket: self._refused(ticket, chosen))
        self.late_after = after if more else inf
        return found

    def _refused(self, ticket: Ticket, chosen: Filled) -> bool:
        """Whether to refuse a ticket that is late by its estimate. A batch that runs now renews the estimate."""
        evidence = self.group.evidence
        return not evidence.probes(ticket) if chosen.grants else evidence.refuses(ticket, self.now)

    def _overtaken(self, chosen: Filled) -> list[Ticket]:
        """Per-client FIFO: waiting tickets with a deadline whose client has a younger one in this batch."""
        last = {ticket.queue: ticket for ticket in chosen.grants}
        return [
            elder
            for queue, youngest in last.items()
            for elder in takewhile(lambda t, stop=youngest: t is not stop, queue.tickets)  # type: ignore[misc]
            if elder not in chosen.grants and elder.deadline < inf
        ]

    def _held(self, filled: Filled) -> bool:
        """Whether the batch waits for more; sets `held_until`."""
        until = self.holding.until(self.group, self.partition, self.policy, filled, self.now)
        if until > self.now:
            self.held_until = until
        return until > self.now


def _formula(affine: tuple[float, float, float], most: int) -> Fitter:
    """`Filling.fit` by formula, when all cost the same. most: the limit of budget and places."""
    fixed, marginal, _ = affine

    def fit(some: Sequence[Ticket], limit: float) -> tuple[Sequence[Ticket], float]:
        n = min(most, len(some), int((limit - fixed) / marginal + 1e-9)) if marginal > 0.0 else most
        return some[: max(0, n)], fixed + marginal * n

    return fit


# -- the next batch, formed while one runs -----------------------------------------------------------------------------


class Ahead:
    """The batch that was formed ahead, if there is one.

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

    def waiting(self, group: str) -> int:
        """Its members of this group: until it is started they wait."""
        return len(self.batch) if self.batch is not None and self.batch.group == group else 0


def may_lead(group: Group, partition: Partition) -> bool:
    """Whether a batch of the partition may be formed ahead: where no member of the running batch may come back for
    another step, no failed call is repeated in parts, and a batch is chosen by its size alone."""
    config = group.config
    return not (
        group.steps
        or config.resources is not None
        or config.gap_chance
        or group.cost.unit != "seconds"
        or group.offenders
        or group.evidence.pending
        or partition.residents
    )


def put_back(group: Group, partition: Partition, batch: Batch) -> None:
    """Make the members of a batch that was not started wait again, each in its old place."""
    group.left[:0] = batch.left
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
