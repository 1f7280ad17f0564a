"""The order: groups, partitions, tiers, clients."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Any

from reflex_runtime.core.request import Priority

from .records import Seen, World
from .views import Views


class Order(Views):
    """Who goes first."""

    def groups_in_order(self) -> list[World]:
        """By device time over weight, of the tenant first; weight 0 only when no other group has anything that does not
        run."""
        ready = [
            w
            for w in self.worlds.values()
            if self.unsettled(w.name) and self.pauses.get((w.name, None), -inf) <= self.now
        ]
        if any(w.weight > 0 and any(t.state != "running" for t in self.unsettled(w.name)) for w in ready):
            ready = [w for w in ready if w.weight > 0]
        tenants = list({w.tenant or w.name: w for w in self.worlds.values()})
        return sorted(ready, key=lambda w: (w.tenant_time, tenants.index(w.tenant or w.name), w.device_time))

    def partitions_in_order(self, w: World) -> list[Hashable]:
        """Urgent first; then those whose deadline is at risk, least laxity first, unless they are far ahead of the one
        with the least device time; then by device time. If equal, oldest first."""
        here = {p: [t for t in self.unsettled(w.name, p) if t.state != "running"] for p in self.partitions(w.name)}
        here = {p: some for p, some in here.items() if some and (w.name, p) not in self.pauses}
        if not here:
            return []
        oldest = {p: min(some, key=lambda t: t.seq) for p, some in here.items()}
        urgent = [p for p in here if any(t.state == "waiting" and t.tier is Priority.URGENT for t in here[p])]
        by_share = sorted(here, key=lambda p: (w.device_times[p], oldest[p].seq))
        least = min(w.device_times[p] for p in self.partitions(w.name))
        at_risk = []
        for p in here:
            tightest = min(here[p], key=lambda t: t.deadline)
            if w.meter.in_seconds and tightest.deadline < inf and w.device_times[p] <= least + 0.1:
                laxity = tightest.deadline - self.now - w.meter.remaining(tightest)
                at_risk += [(laxity, oldest[p].seq, p)] if laxity < w.flush.max_batch_cost else []
        pressing = [p for _, _, p in sorted(at_risk, key=lambda found: found[:2])]
        return list(dict.fromkeys([*sorted(urgent, key=lambda p: oldest[p].seq), *pressing, *by_share]))

    def promote(self, w: World) -> None:
        """Background work that waited long enough counts as default, with its client's elders."""
        for partition in self.partitions(w.name):
            here = [t for t in self.waiting(w.name, partition) if t.tier is Priority.BACKGROUND]
            for due in [t for t in here if t.promote_at <= self.now]:
                for ticket in here:
                    if ticket.client == due.client and ticket.seq <= due.seq:
                        ticket.tier = Priority.DEFAULT

    def serving_order(
        self, w: World, waiting: list[Seen], blocked: set[Hashable], charged: dict[Hashable, float]
    ) -> Seen | None:
        """Of these, the one to look at next: lowest tier; there, of each client's first of each priority, the client
        with the least virtual time, then the older one."""
        open_ = [t for t in waiting if t.client not in blocked]
        if not open_:
            return None
        tier = min(t.tier for t in open_)
        firsts: dict[Any, Seen] = {}
        for ticket in sorted((t for t in open_ if t.tier is tier), key=lambda t: t.seq):
            firsts.setdefault((ticket.client, ticket.request.priority), ticket)

        return min(firsts.values(), key=lambda t: (w.counters[t.client] + charged.get(t.client, 0.0), t.seq))
