"""Forms one batch of one partition: fill it, choose what to leave out, decide whether it is sent now.

Nothing here changes a queue. The result is a `Formed` batch for the scheduler to carry out, or the time until which the
partition is held. Only resources are reserved, and groups with resources are never held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.cost import Tally, line_of, tally_of
from reflex_runtime.core.filling import Filling
from reflex_runtime.core.flush import Fill, FlushPolicy, cause_of
from reflex_runtime.core.group import Group
from reflex_runtime.core.holding import Holding
from reflex_runtime.core.isolation import Part
from reflex_runtime.core.joining import StagedRequest, gain_over_loss, price
from reflex_runtime.core.leaving import too_late
from reflex_runtime.core.order import Cursor, Partition
from reflex_runtime.core.request import Priority, Ticket
from reflex_runtime.core.select import Filled, Fitter, at_risk, price_of_time, value, window


@dataclass(slots=True)
class Formed:
    """A batch that may go. shed: waiting tickets that can no longer be answered in time. short_of, cached, extra: as in
    `Batch`. preempted: residents that lost their place, in the order it happened. more_late: whether more must be shed
    of those that are too late if they run after `after`."""

    stage: str
    grants: dict[Ticket, float]
    cost: float
    cause: Cause
    newcomers: list[Ticket]
    shed: list[Ticket] = field(default_factory=list)
    short_of: str = ""
    preempted: list[Ticket] = field(default_factory=list)
    cached: dict[Ticket, float] = field(default_factory=dict)
    extra: dict[Ticket, float] = field(default_factory=dict)
    part: Part | None = None
    more_late: bool = False
    after: float = 0.0


class Former:
    """Forms a batch of one partition at one time."""

    def __init__(self, group: Group, partition: Partition, holding: Holding, now: float) -> None:
        self.group, self.partition, self.holding, self.now = group, partition, holding, now
        self.held_until = inf
        self._more_late, self._after = False, now
        self.policy = self._policy()

    def _policy(self) -> FlushPolicy:
        base = self.group.config.flush
        controller = self.group.config.controller
        if controller is None or (head := self._head()) is None:
            return base
        policy = controller.policy(base, lambda: line_of(self.group.cost, head), self.now, self.partition.key)
        if base.times_fixed:
            self.group.budget = max(base.max_batch_cost, policy.max_batch_cost)
        return policy

    def _head(self) -> Ticket | None:
        for tier in self.partition.tiers:
            if (top := tier.oldest.first()) is not None:
                return top[1]
        return None

    # -- the decision ------------------------------------------------------------------------------------------------

    def form(self) -> Formed | None:
        """The batch to send now, or None; then `held_until` says when to look again (inf: not without an input)."""
        while (part := self.partition.suspects.next()) is not None:
            if (formed := self._form_part(part)) is not None:
                return formed
        filling = Filling(self.group, self.partition, self.policy)
        filled = filling.fill()
        shed: list[Ticket] = []
        if self.policy.shed and len(self.partition.deadlines):
            filled, shed = self._select_for_deadlines(filling, filled)
        if filling.base or (filled.grants and not self._held(filled)):
            formed = self._finish(filling.base, filled)
        else:
            formed = Formed("", {}, 0.0, Cause.IDLE, [])
        formed.shed, formed.preempted = shed, list(filling.preempted)
        formed.cached, formed.extra = filling.cached, filling.extra
        formed.more_late, formed.after = self._more_late, self._after
        return formed if formed.grants or shed or formed.preempted else None

    def form_full(self) -> Formed | None:
        """The batch, if it is full and no deadline is at risk: more requests could not change it, and it is never held.

        For a partition without residents.
        """
        filled = Filling(self.group, self.partition, self.policy).fill()
        full = filled.grants and (filled.size_reached or filled.passed_over)
        if not full or (self.policy.shed and at_risk(filled, self.now)):
            return None
        return self._finish({}, filled)

    def _form_part(self, part: Part) -> Formed | None:
        """Members of a failed call, as they ran in it: sent at once, without others. None if others have taken their
        reserved resources meanwhile."""
        resources = self.group.config.resources
        if resources is not None:
            part.grants = {t: units for t, units in part.grants.items() if resources.reserve(t, units)}
        if not part.grants:
            return None
        tally = tally_of(self.group.cost, part.grants)
        stage = next(iter(part.grants)).stage
        return Formed(stage, part.grants, tally.cost, Cause.APART, [], short_of="apart", part=part)

    def _finish(self, base: dict[Ticket, float], filled: Filled) -> Formed:
        grants, newcomers, tally = self._stage(base, filled)
        fill = Fill(
            cost=tally.cost,
            dearest=tally.dearest,
            passed_over=filled.passed_over,
            size_reached=filled.size_reached,
            urgent=bool(newcomers) and newcomers[0].tier is Priority.URGENT,  # tiers enter in order
            newcomers=bool(newcomers),
            residents=bool(base),
            held=self.partition.hold_since is not None,
            draining=self.holding.draining,
            apart=filled.apart and len(grants) == len(newcomers) == 1,
        )
        cause = cause_of(fill, self.policy.max_batch_cost)
        stage = next(iter(grants)).stage
        short_of = "stage" if len(newcomers) < len(filled.grants) else filled.short_of
        return Formed(stage, grants, tally.cost, cause, newcomers, short_of=short_of)

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
        """Whether new requests run their first stage before the residents' next step (`joining`)."""
        model, now = self.group.cost, self.now
        first = [t for t in entering if t.stage == entering[0].stage]
        takes = model.fixed(first[0]) + sum(model.marginal(t, 1.0) for t in first)
        one = next(iter(base))
        gain = gain_over_loss(
            [StagedRequest(now - t.arrived, t.wants, inf if t.request.streams else t.deadline - now) for t in base],
            [StagedRequest(now - t.arrived, t.wants - 1.0) for t in first],
            takes,
            model.fixed(one),
            model.marginal(one, 1.0),
            sigma,
        )
        return gain > price(inf) and gain > price(self.group.think_times.in_turns(model.remaining(first[0]), now))

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def _select_for_deadlines(self, filling: Filling, full: Filled) -> tuple[Filled, list[Ticket]]:
        """The batch of largest expected value when deadlines are at risk, and the tickets that are shed."""
        chosen = full
        shed: list[Ticket] = []
        if full.grants and full.tally.seconds > 0.0 and at_risk(full, self.now):
            candidates, hopeless = self._candidates(filling.line)
            chosen = Filled({}, full.tally)
            probe = next((t for t in hopeless if not self.group.evidence.refuses(t, self.now)), None)
            if probe is not None:
                self.group.evidence.probe(probe)
                hopeless.remove(probe)
                chosen = filling.fill_from([probe])
            elif candidates:
                affine = line_of(self.group.cost, candidates[0])
                price = self._price(candidates[0], affine)
                alike = not filling.base and (filling.line is not None or self._alike(candidates))
                fit = _formula(affine, len(full.grants)) if alike else _by_filling(filling)
                members = window(candidates, full, fit, price, self.now)
                # beside residents places are shared, and offenders are passed over
                by_number = alike and not self.partition.residents and not self.group.offenders
                chosen = filling.fill_line(members) if by_number else filling.fill_from(members)
            chosen.short_of = full.short_of or "budget"  # of the time that deadlines allow
            overtaken = [] if filling.line is not None else self._overtaken(chosen)  # there no client waits twice
            shed = list(dict.fromkeys((*hopeless, *overtaken)))
        return chosen, shed + self._infeasible(chosen, shed, filling.line)

    def _candidates(self, line: Sequence[Ticket] | None) -> tuple[list[Ticket], list[Ticket]]:
        """The waiting tickets, in serving order, that can be answered in time, and those that cannot even if run alone.

        Looks at 4 × the size cap.
        """
        cost, now, most = self.group.cost, self.now, 4 * self.policy.max_batch_size
        if line:
            ends = now + cost.remaining(line[0])
            some = line[:most]
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
        one = candidates[0].request
        return self.group.cost.linear and all(t.request.cost_class == one.cost_class for t in candidates)

    def _price(self, ticket: Ticket, affine: tuple[float, float, float]) -> float:
        fixed, marginal, _ = affine
        rate = self.partition.arrivals.value(self.now)
        return price_of_time(rate, self.partition.usual_limit, fixed, marginal, value(ticket))

    def _infeasible(self, chosen: Filled, shed: list[Ticket], line: Sequence[Ticket] | None) -> list[Ticket]:
        """Waiting tickets that cannot be answered in time, neither now nor after this batch, tightest first: the first
        ones of very many (`_more_late`)."""
        after = self.now + (chosen.tally.until_boundary if chosen.grants else 0.0)
        if line:
            ends = after + self.group.cost.remaining(line[0])
            late = [t for t in line if ends > t.deadline and t not in chosen.grants and t not in shed]
            return sorted((t for t in late if self._refused(t, chosen)), key=lambda t: (t.deadline, t.seq))
        spared = {*chosen.grants, *shed}
        found, self._more_late = too_late(
            self.group, self.partition, after, spared, lambda ticket: self._refused(ticket, chosen)
        )
        self._after = after
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
            for elder in takewhile(lambda t, stop=youngest: t is not stop, queue)  # type: ignore[misc]
            if elder not in chosen.grants and elder.deadline < inf
        ]

    def _held(self, filled: Filled) -> bool:
        """Whether the batch waits for more; sets `held_until`."""
        until = self.holding.until(self.group, self.partition, self.policy, filled, self.now)
        if until > self.now:
            self.held_until = until
        return until > self.now


def _by_filling(filling: Filling) -> Fitter:
    """What fits a limit, for window selection when costs differ: by filling."""
    return lambda some, limit: (list((filled := filling.fill_from(some, limit)).grants), filled.tally.seconds)


def _formula(affine: tuple[float, float, float], most: int) -> Fitter:
    """What fits a limit, when all cost the same: by formula. most: the limit of budget and places."""
    fixed, marginal, _ = affine

    def fit(some: Sequence[Ticket], limit: float) -> tuple[Sequence[Ticket], float]:
        n = min(most, len(some), int((limit - fixed) / marginal + 1e-9)) if marginal > 0.0 else most
        return some[: max(0, n)], fixed + marginal * n

    return fit
