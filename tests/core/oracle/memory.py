"""Steps where residents hold memory: the pool is a ceiling, and who gives way is an order."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .order import Order
from .records import Seen, Stepped, World


class Memory(Order):
    """A step tier by tier."""

    def step_with_memory(self, w: World, partition: Hashable) -> tuple[Stepped, bool]:
        """The step, and whether all places are taken. Those that wait one by one, in serving order; before each the
        residents that are no less urgent than its priority; at last all other residents."""
        s = Stepped(part=self.part(w, partition))
        s.turns = [t for t in self.present(w, partition, s) if not t.held]
        if s.part < len(s.turns):
            s.turns.sort(key=lambda t: (t.tier, t.turn))
            clients = list(dict.fromkeys(t.client for t in s.turns))
            s.turns = [t for c in clients for t in [t for t in s.turns if t.client == c][: int(s.part)]]
        left, shares = self.waiting(w.name, partition), self.shares(w, partition)
        charged: dict[Hashable, float] = {}
        blocked: set[Hashable] = set()
        reached = -1  # residents up to this tier have had their turn
        while (ticket := self.serving_order(w, left, blocked, charged)) is not None:
            left.remove(ticket)
            if ticket.held:
                continue
            for tier in range(reached + 1, ticket.request.priority + 1):
                self.let_step(w, partition, s, tier)
            reached = max(reached, ticket.request.priority)
            over = [t for t in self.present(w, partition, s) if t.tier > ticket.request.priority]
            why, stop = self.let_in(w, partition, s, ticket, over, reached, shares)
            if not why:
                units = s.entered[-1][1]
                charge = w.meter.charge(ticket, units) / ticket.request.weight
                charged[ticket.client] = charged.get(ticket.client, 0.0) + charge
                if shares is not None:
                    shares[ticket.client] -= 1
                continue
            if stop:
                s.short_of = why
                break
            s.passed_over = s.passed_over or why in ("budget", "memory")
            blocked.add(ticket.client)
            full = w.meter.cost(s.base, s.entered, w.flush.max_batch_cost) >= w.flush.max_batch_cost
            s.short_of = "memory" if why == "memory" else "budget" if full else s.short_of or why
            if why == "memory" or full or len(blocked) >= 16:
                break
        for tier in range(reached + 1, 3):
            self.let_step(w, partition, s, tier)
        if s.thrown_out and not s.short_of:
            s.short_of = "memory" if s.memory_short else "places"
        free, room = self.places(w, partition)
        free += len(s.thrown_out)
        return s, len(s.entered) >= (free if room is None else min(free, room))

    def present(self, w: World, partition: Hashable, s: Stepped) -> list[Seen]:
        """Residents that do not run in another batch and have not been thrown out."""
        here = self.unsettled(w.name, partition)
        return [t for t in here if t.state == "resident" and t not in s.thrown_out]

    def beyond(self, w: World, partition: Hashable, s: Stepped) -> list[Seen]:
        """Residents that, with those of their client before them, hold more than its even part of what all hold. None
        that is the first of its client."""
        here = sorted(self.present(w, partition, s), key=lambda t: (t.tier, t.seq))
        found = []
        for i, ticket in enumerate(here):
            before = [t.computed for t in here[:i] if t.client == ticket.client]
            even = sum(t.computed for t in here) / len(self.clients(w.name))
            if sum(before) and sum(before) + ticket.computed > even and len(self.clients(w.name)) > 1:
                found.append(ticket)
        return found

    def victims(self, w: World, partition: Hashable, among: list[Seen], s: Stepped, nothing_runs: bool) -> list[Seen]:
        """Those that may be thrown out, in order: held first, then the lowest tier, then those beyond their client's
        part, then the newest; of those that hold more than they lost the last time, then the others, but these only
        when nothing runs."""
        found = [t for t in among if not s.runs(t) and (t.computed > t.lost or nothing_runs)]
        much = self.beyond(w, partition, s)
        return sorted(found, key=lambda t: (t.computed > t.lost, t.held, t.tier, t in much, t.seq), reverse=True)

    def throw_out(self, s: Stepped, victim: Seen) -> None:
        self.memory = [(t, u) for t, u in self.memory if t is not victim]
        s.thrown_out.append(victim)

    def held_by(self, tickets: list[Seen]) -> float:
        return sum(u for t, u in self.memory if t in tickets)

    def let_step(self, w: World, partition: Hashable, s: Stepped, tier: int) -> None:
        """The residents of one tier."""
        assert w.pool is not None
        able = [t for t in s.turns if t.tier == tier and t in self.present(w, partition, s)]
        for ticket in sorted(able, key=lambda t: t.wants > 1.0):
            if ticket in s.thrown_out or len(s.base) + len(s.entered) >= w.flush.max_batch_size:
                continue
            s.stage = ticket.stage if s.stage is None else s.stage
            units = w.meter.room(s.base, s.entered, ticket, w.flush.max_batch_cost)
            if ticket.stage != s.stage or units <= 0.0:
                continue
            if self.used() + units > w.pool:
                alone = not s.base and not s.entered
                much, here = self.beyond(w, partition, s), self.present(w, partition, s)
                mine = (ticket.held, ticket.tier, ticket in much, ticket.seq)
                behind = [t for t in here if (t.held, t.tier, t in much, t.seq) > mine]
                victims = self.victims(w, partition, behind, s, alone)
                if self.used() - self.held_by(victims) + units > w.pool:
                    victims = self.victims(w, partition, [ticket], s, alone)
                for victim in victims:
                    if self.used() + units > w.pool:
                        self.throw_out(s, victim)
                        s.memory_short = True
            if ticket not in s.thrown_out and self.used() + units <= w.pool:
                self.memory.append((ticket, units))
                s.base.append((ticket, units))

    def let_in(
        self, w: World, partition: Hashable, s: Stepped, ticket: Seen, over: list[Seen], reached: int, shares: Any
    ) -> tuple[str, bool]:
        """(why it cannot enter, whether that keeps out all that come after it)."""
        assert w.pool is not None
        budget = w.flush.max_batch_cost
        free, room = self.places(w, partition)
        free += len(s.thrown_out) - len(s.entered)
        todo = [t for t in over if t in s.turns and t.tier > reached]
        victims = self.victims(w, partition, over, s, not s.base and not s.entered and not todo)
        if s.memory_short and not over:
            return "memory", True
        if (free <= 0 and not victims) or len(s.base) + len(s.entered) >= w.flush.max_batch_size:
            return "places", True
        if room is not None and len(s.entered) >= room:
            return "room", True
        step = len([t for t in s.turns if t.client == ticket.client])
        came = sum(u for t, u in s.entered if t.client == ticket.client)
        if not over and (came >= max(1.0, s.part - step) or (shares is not None and shares[ticket.client] <= 0)):
            return "share", False
        if (s.base or s.entered) and ticket.stage != s.stage:
            return "stage", False
        out = victims[:1] if free <= 0 else []
        cached = min(w.there, ticket.wants - 1.0)
        ticket.wants -= cached
        decodes = [(t, 1.0) for t in todo if t.wants <= 1.0 and t.stage == ticket.stage and t not in out]
        units = w.meter.room([*s.base, *decodes], s.entered, ticket, budget) if over else 0.0
        if units <= 0.0:
            units = w.meter.room(s.base, s.entered, ticket, budget)
            units = min(1.0, units) if over else units
        enough = self.used() + units <= w.pool or self.used() - self.held_by(victims) + units <= w.pool
        if units <= 0.0 or not enough:
            ticket.wants += cached
            return ("memory" if units > 0.0 else "budget"), False
        for victim in victims:
            if victim in out or self.used() + units > w.pool:
                s.memory_short = s.memory_short or victim not in out
                self.throw_out(s, victim)
        self.memory.append((ticket, units))
        ticket.computed = cached
        if cached:
            s.cached[ticket] = cached
        s.entered.append((ticket, units))
        s.stage = ticket.stage
        return "", False
