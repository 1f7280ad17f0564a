"""Forming one batch of one partition: fill it, choose whom to leave out, decide whether it goes now.

Nothing here changes a queue. The result is a `Formed` batch for the scheduler to commit, or the time until which the
partition is held. Only `Resources` are asked on the way, and then there are no holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.cost import Tally, line_of
from reflex_runtime.core.flush import Fill, FlushPolicy, cause_of
from reflex_runtime.core.group import Group
from reflex_runtime.core.holding import Holding
from reflex_runtime.core.isolation import Part
from reflex_runtime.core.joining import StagedRequest, join_pays
from reflex_runtime.core.order import MAX_PASSED_OVER, Cursor, Partition
from reflex_runtime.core.request import Priority, Ticket, TicketState
from reflex_runtime.core.residents import ResidentStep, movable, shares_of_places
from reflex_runtime.core.select import Filled, Fitter, at_risk, price_of_time, value, window


@dataclass(slots=True)
class Formed:
    """A batch that may go. shed: waiting tickets that can no longer be answered in time. short_of, cached: as in
    `Batch`. preempted: residents that lost their place, in the order it happened."""

    stage: str
    grants: dict[Ticket, float]
    cost: float
    cause: Cause
    newcomers: list[Ticket]
    shed: list[Ticket] = field(default_factory=list)
    short_of: str = ""
    preempted: list[Ticket] = field(default_factory=list)
    cached: dict[Ticket, float] = field(default_factory=dict)
    part: Part | None = None


class Former:
    """Forms a batch of one partition at one time."""

    def __init__(self, group: Group, partition: Partition, holding: Holding, now: float) -> None:
        self.group, self.partition, self.holding, self.now = group, partition, holding, now
        self.held_until = inf
        self._line: list[Ticket] | None = None  # what waits, if all are equals: see `_equals`
        self.policy = self._policy()

    def _policy(self) -> FlushPolicy:
        base = self.group.config.flush
        controller = self.group.config.controller
        if controller is None or (head := self._head()) is None:
            return base
        return controller.policy(base, lambda: line_of(self.group.cost, head), self.now, self.partition.key)

    def _head(self) -> Ticket | None:
        return next((top[1] for tier in self.partition.tiers if (top := tier.oldest.first()) is not None), None)

    # -- the decision ------------------------------------------------------------------------------------------------

    def form(self) -> Formed | None:
        """The batch to send now, or None; then `held_until` says when to look again (inf: not without an input)."""
        while (part := self.partition.suspects.next()) is not None:
            if (formed := self._form_part(part)) is not None:
                return formed
        if self.group.config.resources is not None:
            return self._form_step()
        base = self._seed()
        self._line = self._equals()
        filled = self._fill_waiting(base)
        shed: list[Ticket] = []
        if self.policy.shed and len(self.partition.deadlines):
            filled, shed = self._select_for_deadlines(base, filled)
        if not base.grants and (not filled.grants or self._held(filled)):
            return Formed("", {}, 0.0, Cause.IDLE, [], shed) if shed else None
        return self._finish(base, filled, shed)

    def _form_part(self, part: Part) -> Formed | None:
        """Members of a call that failed, as they ran in it: at once, and with nobody else. None when what they had
        reserved has gone to others meanwhile."""
        resources = self.group.config.resources
        if resources is not None:
            part.grants = {t: units for t, units in part.grants.items() if resources.reserve(t, units)}
        if not part.grants:
            return None
        tally = self._copy(part.grants)
        stage = next(iter(part.grants)).stage
        return Formed(stage, part.grants, tally.cost, Cause.APART, [], short_of="apart", part=part)

    def _form_step(self) -> Formed | None:
        """The next step where there is memory: no holds, no shedding, and some may give way to others."""
        step = ResidentStep(self.group, self.partition, self.policy)
        step.fill()
        if not (step.base.grants or step.entered.grants or step.preempted):
            return None
        formed = self._finish(step.base, step.entered, [])
        formed.preempted, formed.cached = list(step.preempted), step.cached
        return formed

    def _finish(self, base: Filled, filled: Filled, shed: list[Ticket]) -> Formed:
        grants, newcomers, tally = self._stage(base, filled)
        if not grants:
            return Formed("", {}, 0.0, Cause.IDLE, [], shed)
        fill = Fill(
            cost=tally.cost,
            dearest=tally.dearest,
            passed_over=filled.passed_over,
            size_reached=filled.size_reached,
            urgent=bool(newcomers) and newcomers[0].tier is Priority.URGENT,  # tiers enter in order
            newcomers=bool(newcomers),
            residents=bool(base.grants),
            held=self.partition.hold_since is not None,
            draining=self.holding.draining,
            apart=filled.apart and len(grants) == len(newcomers) == 1,
        )
        cause = cause_of(fill, self.policy.max_batch_cost)
        stage = next(iter(grants)).stage
        short_of = "stage" if len(newcomers) < len(filled.grants) else filled.short_of
        return Formed(stage, grants, tally.cost, cause, newcomers, shed, short_of)

    def _stage(self, base: Filled, filled: Filled) -> tuple[dict[Ticket, float], list[Ticket], Tally]:
        """A batch has one stage. Newcomers of another stage than the residents' go first if that pays, else wait."""
        newcomers = list(filled.grants)
        if not newcomers:
            return base.grants, [], filled.tally
        if not base.grants:
            stage = newcomers[0].stage
        else:
            stage = next(iter(base.grants)).stage
            entering = [t for t in newcomers if t.stage != stage]
            if entering and self._enters(base, entering):
                chosen = [t for t in entering if t.stage == entering[0].stage]
                return {t: filled.grants[t] for t in chosen}, chosen, filled.tally
        chosen = [t for t in newcomers if t.stage == stage]
        if len(chosen) == len(newcomers):
            together = {**base.grants, **filled.grants} if base.grants else filled.grants
            return together, chosen, filled.tally
        together = {**base.grants, **{t: filled.grants[t] for t in chosen}}
        return together, chosen, self._copy(together)

    def _enters(self, base: Filled, entering: list[Ticket]) -> bool:
        """Whether newcomers run their first stage before the residents' next step: no resident misses its deadline by
        it, it pays (`joining`), and the clients are not of a kind that would soon take turns by themselves."""
        model, now = self.group.cost, self.now
        first = [t for t in entering if t.stage == entering[0].stage]
        takes = model.fixed(first[0]) + sum(model.marginal(t, 1.0) for t in first)
        if any(
            t.deadline < inf and not t.request.streams and now + takes + model.remaining(t) > t.deadline
            for t in base.grants
        ):
            return False
        residents = [StagedRequest(now - t.arrived, t.wants) for t in base.grants]
        newcomers = [StagedRequest(now - t.arrived, t.wants - 1.0) for t in first]
        one = next(iter(base.grants))
        if not join_pays(residents, newcomers, takes, model.fixed(one), model.marginal(one, 1.0)):
            return False
        return not self.group.returns.take_turns(model.remaining(first[0]), now)

    # -- filling -----------------------------------------------------------------------------------------------------

    def _seed(self) -> Filled:
        """The batch of residents alone: those of the first one's stage, within the budget."""
        filled = Filled({}, self.group.cost.tally())
        if not self.partition.residents:
            return filled
        able = movable(self.partition)
        for ticket in able:
            if len(filled.grants) >= self.policy.max_batch_size:
                break
            if ticket.stage != able[0].stage:
                continue
            units = filled.tally.offer(ticket, self.policy.max_batch_cost)
            if units > 0.0:
                filled.tally.add(ticket, units)
                filled.grants[ticket] = units
        return filled

    def _equals(self) -> list[Ticket] | None:
        """What waits, in serving order, where grants change neither that order nor what the next one costs.

        That is one-shot work of one kind with no client waiting twice, as with robots: one sort and a few sums decide.
        None otherwise; the plain way, ticket by ticket, decides the same.
        """
        group, partition = self.group, self.partition
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

    def _fill_line(self, line: Sequence[Ticket]) -> Filled:
        """Fill from equals: at once as many as plainly fit, the others one by one."""
        filled = Filled({}, self.group.cost.tally())
        if line:
            n = filled.tally.repeat(line[0], min(len(line), self._places()), self.policy.max_batch_cost)
            filled.grants = dict.fromkeys(line[:n], 1.0)
            line = line[n:]
        return self._add(filled, line, inf)

    def _fill_waiting(self, base: Filled) -> Filled:
        """Fill from the queue in serving order, streaming: O(batch + passed over)."""
        if self._line is not None:
            return self._fill_line(self._line)
        cursor = Cursor(self.partition)
        return self._fill(base, iter(cursor.next, None), inf, cursor)

    def _fill(self, base: Filled, candidates: Iterable[Ticket], limit: float, cursor: Cursor | None = None) -> Filled:
        """Beside the residents, candidates in order while the cost stays within the budget and the time in `limit`."""
        return self._add(Filled({}, self._copy(base.grants)), candidates, limit, cursor)

    def _add(self, filled: Filled, candidates: Iterable[Ticket], limit: float, cursor: Cursor | None = None) -> Filled:
        """Add candidates in order, one by one, to what is filled already."""
        model, budget = self.group.cost, self.policy.max_batch_cost
        places, shares = self._places(), shares_of_places(self.group, self.partition, self.policy.max_batch_size)
        filled.places = places
        tally, grants, offenders = filled.tally, filled.grants, self.group.offenders
        blocked: set[object] = set()
        for ticket in candidates:
            if len(grants) >= places:
                filled.short_of = self._closed()
                break
            client = ticket.request.client
            if client in blocked:
                continue
            if ticket.held:  # thrown out while held: it waits for its resume and holds up nobody
                if cursor is not None:
                    cursor.take(0.0)
                continue
            apart = bool(offenders) and client in offenders
            if apart and grants:  # its turn comes when it is the first
                blocked.add(client)
                filled.short_of = filled.short_of or "apart"
                if cursor is not None:
                    cursor.skip()
                continue
            entitled = shares is None or shares[client] > 0
            units = tally.offer(ticket, budget, limit) if entitled else 0.0
            if units > 0.0:
                tally.add(ticket, units)
                grants[ticket] = units
                if shares is not None:
                    shares[client] -= 1
                if cursor is not None:
                    cursor.take(model.marginal(ticket, units) / ticket.request.weight)
                if apart:
                    filled.apart, filled.short_of = True, "apart"
                    break
                continue
            filled.passed_over = filled.passed_over or entitled
            blocked.add(client)
            if cursor is not None:
                cursor.skip()
            spent = tally.cost >= budget
            filled.short_of = "budget" if spent else filled.short_of or ("budget" if entitled else "share")
            if spent or len(blocked) >= MAX_PASSED_OVER:
                break
        return filled

    def _copy(self, grants: dict[Ticket, float]) -> Tally:
        tally = self.group.cost.tally()
        for ticket, units in grants.items():
            tally.add(ticket, units)
        return tally

    def _places(self) -> int:
        """Newcomers that may enter."""
        places = self.policy.max_batch_size - len(self.partition.residents)
        room = self.group.room_in(self.partition)
        places = places if room is None else min(places, room)
        return max(0, int(min(places, self.group.offenders.limit)))

    def _closed(self) -> str:
        """What keeps the others out when as many entered as may."""
        room = self.group.room_in(self.partition)
        short = room is not None and room < self.policy.max_batch_size - len(self.partition.residents)
        return "room" if short else "places"

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def _select_for_deadlines(self, base: Filled, full: Filled) -> tuple[Filled, list[Ticket]]:
        """The batch of largest expected value when deadlines are at risk, and who is shed."""
        chosen = full
        shed: list[Ticket] = []
        if full.grants and full.tally.seconds > 0.0 and at_risk(full, self.now):
            candidates, hopeless = self._candidates()
            chosen = Filled({}, full.tally)
            probe = next((t for t in hopeless if not self.group.evidence.refuses(t, self.now)), None)
            if probe is not None:
                self.group.evidence.probe(probe)
                hopeless.remove(probe)
                chosen = self._fill(base, [probe], inf)
            elif candidates:
                affine = line_of(self.group.cost, candidates[0])
                price = self._price(candidates[0], affine)
                alike = not base.grants and self._alike(candidates)
                fit = self._formula(affine, len(full.grants)) if alike else self._filling(base)
                members = window(candidates, full, fit, price, self.now)
                # beside residents places are shared, and offenders are passed over
                by_number = alike and not self.partition.residents and not self.group.offenders
                chosen = self._fill_line(members) if by_number else self._fill(base, members, inf)
            chosen.short_of = full.short_of or "budget"  # of the time that deadlines allow
            shed = list(dict.fromkeys((*hopeless, *self._overtaken(chosen))))
        return chosen, shed + self._infeasible(chosen, shed)

    def _candidates(self) -> tuple[list[Ticket], list[Ticket]]:
        """The waiting tickets, in serving order, that can be answered in time, and those that cannot even alone.

        Looks at 4 × the size cap.
        """
        cost, now, most = self.group.cost, self.now, 4 * self.policy.max_batch_size
        if self._line:
            ends = now + cost.remaining(self._line[0])
            some = self._line[:most]
            found = [t for t in some if ends <= t.deadline]
            return found, [t for t in some if ends > t.deadline]
        cursor = Cursor(self.partition)
        found, hopeless = [], []
        for ticket in islice(iter(cursor.next, None), most):
            cursor.take(cost.marginal(ticket, 1.0) / ticket.request.weight)
            if now + cost.remaining(ticket) > ticket.deadline:
                hopeless.append(ticket)
            elif not ticket.held:
                found.append(ticket)
        return found, hopeless

    def _alike(self, candidates: Sequence[Ticket]) -> bool:
        """Whether all cost the same."""
        if self._line is not None:
            return True
        one = candidates[0].request
        return self.group.cost.linear and all(t.request.cost_class == one.cost_class for t in candidates)

    def _filling(self, base: Filled) -> Fitter:
        """How window selection asks what fits a limit where costs differ: by filling."""
        return lambda some, limit: (list((filled := self._fill(base, some, limit)).grants), filled.tally.seconds)

    @staticmethod
    def _formula(affine: tuple[float, float, float], most: int) -> Fitter:
        """The same by formula, where all cost the same. most: what the budget and the places allow."""
        fixed, marginal, _ = affine

        def fit(some: Sequence[Ticket], limit: float) -> tuple[Sequence[Ticket], float]:
            n = min(most, len(some), int((limit - fixed) / marginal + 1e-9)) if marginal > 0.0 else most
            return some[: max(0, n)], fixed + marginal * n

        return fit

    def _price(self, ticket: Ticket, affine: tuple[float, float, float]) -> float:
        fixed, marginal, _ = affine
        rate = self.partition.arrivals.value(self.now)
        return price_of_time(rate, self.partition.usual_limit, fixed, marginal, value(ticket))

    def _infeasible(self, chosen: Filled, shed: list[Ticket]) -> list[Ticket]:
        """Waiting tickets that cannot be answered in time, neither now nor after this batch, tightest first."""
        after = self.now + (chosen.tally.blocks if chosen.grants else 0.0)
        if self._line:
            ends = after + self.group.cost.remaining(self._line[0])
            late = [t for t in self._line if ends > t.deadline and t not in chosen.grants and t not in shed]
            return sorted((t for t in late if self._refused(t, chosen)), key=lambda t: (t.deadline, t.seq))
        found: list[Ticket] = []
        for ticket in self.partition.deadlines.ascending():
            if ticket.state is not TicketState.WAITING or ticket in chosen.grants or ticket in shed:
                continue
            if after + self.group.cost.remaining(ticket) <= ticket.deadline:
                break
            if self._refused(ticket, chosen):
                found.append(ticket)
        return found

    def _refused(self, ticket: Ticket, chosen: Filled) -> bool:
        """Whether the estimate by which a ticket is late is acted on. A batch that runs now renews it."""
        evidence = self.group.evidence
        return not evidence.probes(ticket) if chosen.grants else evidence.refuses(ticket, self.now)

    def _overtaken(self, chosen: Filled) -> list[Ticket]:
        """Rather refuse an elder with a deadline than answer it after its client's younger one."""
        if self._line is not None:
            return []  # no client waits twice
        last = {self.partition.queue_of(ticket): ticket for ticket in chosen.grants}
        return [
            elder
            for queue, youngest in last.items()
            for elder in takewhile(lambda t, stop=youngest: t is not stop, queue)  # type: ignore[misc]
            if elder not in chosen.grants and elder.deadline < inf
        ]

    def _held(self, filled: Filled) -> bool:
        """Whether the batch waits for more; sets `held_until`."""
        until = self.holding.until(self.group, self.partition, self.policy, filled, self.now)
        if until > self.now:
            self.held_until = until
        return until > self.now
