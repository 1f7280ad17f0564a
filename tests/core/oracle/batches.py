"""A batch: who is in it, under the ceiling, in the order; its cause; what it is charged."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from reflex_runtime.core.request import Priority

from .conservation import Conservation
from .cost import Members
from .memory import Memory
from .records import NEARLY, Expected, Seen, World
from .wake import Wake

WIDEST = 0.67  # spread of a regular client's think times, in chunks


class Batches(Memory, Wake, Conservation):
    """Forming batches."""

    def form(self, w: World, partition: Hashable) -> Expected | None:
        while self.unsettled(w.name, partition):
            trial = self.trial(w, partition)
            if trial is not None:
                made = self.schedule(w, partition, trial.grants, [], (trial.grants, []), "apart")
                made.trial, made.short_of = trial, "apart" if self.waiting(w.name, partition) else ""
                return made
            if w.pool is not None:
                s, full = self.step_with_memory(w, partition)
                for ticket in s.thrown_out:
                    self.preempt(w, ticket)
                if s.base or s.entered:
                    return self.staged(w, partition, s.base, s.entered, s.passed_over, full, s.short_of, s.cached)
                if s.thrown_out:
                    continue
                return None
            base = self.residents(w, partition)
            members, passed_over, size_reached, short_of = self.newcomers(w, partition, base)
            sure = passed_over or any(t.client in w.offenders for t, _ in members)
            if not base and (not members or self.holds(w, partition, members, sure, size_reached)):
                return None
            return self.staged(w, partition, base, members, passed_over, size_reached, short_of, {})
        return None

    def residents(self, w: World, partition: Hashable) -> list[tuple[Seen, float]]:
        """Residents of one stage in order, within budget and size."""
        everyone = [t for t in self.unsettled(w.name, partition) if t.state == "resident" and not t.held]
        able = sorted(everyone, key=lambda t: (t.tier, t.wants > 1.0, t.seq))
        base: list[tuple[Seen, float]] = []
        for ticket in able:
            units = w.meter.room([], base, ticket, w.flush.max_batch_cost)
            if units > 0.0 and len(base) < w.flush.max_batch_size and ticket.stage == able[0].stage:
                base.append((ticket, units))
        return base

    def newcomers(
        self, w: World, partition: Hashable, base: Members
    ) -> tuple[list[tuple[Seen, float]], bool, bool, str]:
        """(who enters, whether something did not fit, whether all places are taken, what kept the others out)."""
        budget = w.flush.max_batch_cost
        free, room = self.places(w, partition)
        places = max(0, int(min(free, inf if room is None else room, w.most())))
        left, shares = self.waiting(w.name, partition), self.shares(w, partition)
        members: list[tuple[Seen, float]] = []
        charged: dict[Hashable, float] = {}
        blocked: set[Hashable] = set()
        passed_over, why = False, ""
        while (ticket := self.serving_order(w, left, blocked, charged)) is not None:
            if len(members) >= places:
                why = "room" if room is not None and room < free else "places"
                break
            left.remove(ticket)
            if ticket.held:
                continue
            if members and ticket.client in w.offenders:
                blocked.add(ticket.client)
                why = why or "apart"
                continue
            entitled = shares is None or shares[ticket.client] > 0
            units = w.meter.room(base, members, ticket, budget) if entitled else 0.0
            if units > 0.0:
                members.append((ticket, units))
                charge = w.meter.charge(ticket, units) / ticket.request.weight
                charged[ticket.client] = charged.get(ticket.client, 0.0) + charge
                if shares is not None:
                    shares[ticket.client] -= 1
                if ticket.client in w.offenders:
                    why = "apart"
                    break
                continue
            passed_over = passed_over or entitled
            blocked.add(ticket.client)
            full = w.meter.cost(base, members, budget) >= budget
            why = "budget" if full else why or ("budget" if entitled else "share")
            if full or len(blocked) >= 16:
                break
        return members, passed_over, len(members) >= places, why

    def staged(
        self,
        w: World,
        partition: Hashable,
        base: Members,
        members: Members,
        passed_over: bool,
        size_reached: bool,
        short_of: str,
        cached: dict[Seen, float],
    ) -> Expected:
        """A batch has one stage: newcomers of another stage than the residents' go first if that pays, else wait."""
        budget = w.flush.max_batch_cost
        stage = base[0][0].stage if base else members[0][0].stage
        entering = [(t, u) for t, u in members if t.stage != stage]
        entering = [(t, u) for t, u in entering if t.stage == entering[0][0].stage]
        joining = [(t, u) for t, u in members if t.stage == stage]
        batch = [*base, *joining]
        cost_of: tuple[Members, Members] = (base, members)
        if base and entering and self.enters_first(w, base, entering):
            batch = joining = entering
        elif len(joining) < len(members):
            cost_of = (batch, [])
        cost = w.meter.cost(*cost_of, budget)
        dearest = w.meter.dearest(*cost_of, budget)
        if joining and dearest > budget * (1 + NEARLY):
            cause = "over_budget"
        elif w.pool is None and len(batch) == len(joining) == 1 and joining[0][0].client in w.offenders:
            cause = "apart"
        elif joining and (cost >= budget * (1 - NEARLY) or passed_over):
            cause = "full"
        elif joining and size_reached:
            cause = "size_reached"
        elif any(t.tier is Priority.URGENT for t, _ in joining):
            cause = "urgent"
        elif base:
            cause = "step"
        elif self.draining:
            cause = "drain"
        else:
            cause = "held" if w.was_held.get(partition) else "idle"
        short_of = "stage" if len(joining) < len(members) else short_of
        made = self.schedule(w, partition, batch, [t for t, _ in joining], cost_of, cause)
        made.short_of = short_of if self.waiting(w.name, partition) else ""
        made.cached = cached
        return made

    def enters_first(self, w: World, base: Members, entering: Members) -> bool:
        takes = w.meter.fixed(entering[0][0]) + sum(w.meter.charge(t, 1.0) for t, _ in entering)
        fixed, each = w.meter.fixed(base[0][0]), w.meter.charge(base[0][0], 1.0)

        old, new, spread = [t for t, _ in base], [t for t, _ in entering], w.meter.spread(base)
        longest = max(t.wants for t in old)
        joined = {t: takes + t.wants * (fixed + each * len(old + new)) for t in old}
        for t in old:
            missed = self.now + joined[t] * (1 + 2 * spread) > t.deadline
            if missed and not t.request.streams and self.now + t.wants * (fixed + each) <= t.deadline:
                return False
        last = max(self.now - t.arrived for t in new) + longest * (fixed + each * len(old)) + takes
        last += (max(t.wants for t in new) - 1) * (fixed + each * len(new))
        if max(self.now - t.arrived + joined[t] for t in old) > last * (1 + NEARLY):
            return False
        gain, loss = len(new) * longest * fixed, sum(takes + t.wants * each * len(new) for t in old)
        in_turns = self.in_turns(w, w.meter.remaining(entering[0][0]))
        return in_turns > 1 and gain > max(1, 3 - in_turns) * loss * (1 + NEARLY)

    def in_turns(self, w: World, seconds: float) -> float:
        """The share of the device that the active clients take one after the other; inf if one is not regular."""
        thinks: dict[Hashable, list[float]] = {}
        away: dict[Hashable, float] = {}
        order: list[Hashable] = []  # by last answer
        for client, at, answered in w.answers:
            if answered:
                away[client] = at
                thinks.setdefault(client, [])
                order = [c for c in order if c != client] + [client]
            elif client in away:
                thinks[client].append(at - away.pop(client))
        share, active = 0.0, 0
        if not seconds:
            return inf  # nothing was measured
        for i, client in enumerate(reversed(order)):
            longest = max((max(thinks[c][-32:], default=0.0) for c in order[len(order) - 1 - i :]), default=0.0)
            if client in away and self.now - away[client] > 2 * longest:
                break
            habits = sorted(thinks[client][-32:])
            if not habits or habits[3 * len(habits) // 4] - habits[len(habits) // 4] > WIDEST * seconds:
                return inf
            share, active = share + seconds / (seconds + habits[len(habits) // 2]), active + 1
        return share if active else inf

    def price(self, w: World, ticket: Seen, units: float, marginal: float, size: int, cause: str) -> float:
        """What it is charged: the cost in a batch of the usual size, as it was when it last changed by more than a
        quarter; at least its part of a call that was made for it alone. When it falls, what was charged before it is
        worth less, by its part of the kinds."""
        usual = 0.0
        for n in w.sizes:
            usual = usual + (n - usual) / 32 if usual else float(n)
        cost = marginal + w.meter.fixed(ticket) / (usual or size)
        key = (ticket.request.shape, ticket.stage, ticket.request.cost_class, units)
        known = w.prices.get(key, 0.0)
        if not 0.75 * known <= cost <= 1.25 * known:
            most, worth = max(w.counters.values()), (cost / known) ** (1 / len(w.prices)) if known else 1.0
            for client, counter in w.counters.items() if worth < 1.0 else ():
                w.counters[client] = most - (most - counter) * worth
            w.prices[key] = cost
        own = marginal + w.meter.fixed(ticket) / size
        return max(w.prices[key], own) if cause == "apart" else w.prices[key]

    def schedule(
        self,
        w: World,
        partition: Hashable,
        batch: Members,
        admitted: list[Seen],
        cost_of: tuple[Members, Members],
        cause: str,
    ) -> Expected:
        budget = w.flush.max_batch_cost
        cost = w.meter.cost(*cost_of, budget)
        expected = w.meter.fixed(batch[0][0])
        for ticket, units in batch:
            charge = w.meter.charge(ticket, units)
            expected += charge
            if ticket not in w.probes:  # the estimate of such a one is in doubt
                price = self.price(w, ticket, units, charge, len(batch), cause)
                w.counters[ticket.client] += price / ticket.request.weight
            ticket.state = "running"
            ticket.granted += units
        if w.room is not None:
            w.room -= len(admitted)
        w.was_held[partition] = False
        w.sizes.append(len(batch))
        self.batches += 1
        left, w.left = w.left, []
        expected = expected if w.meter.in_seconds else 0.0
        self.charge(w, expected)
        w.device_times[partition] += expected
        made = Expected(
            self.batches, w.name, partition, batch[0][0].stage, cause, cost, expected, list(batch), admitted, left
        )
        self.in_flight.append(made)
        self.quiet = False
        return made
