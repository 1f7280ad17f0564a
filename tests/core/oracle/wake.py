"""The wake: until when a batch is held, by the clock and for clients that are due."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import ceil, inf

from reflex_runtime.core.request import Priority

from .cost import Members
from .records import NEARLY, World
from .views import Views

LATE = 2.0**-12  # seconds by which a client may be late and still be waited for
Due = tuple[float, float, float, bool, bool]


def spread(values: Sequence[float]) -> float:
    """Interquartile range."""
    found, n = sorted(values), len(values)
    return found[3 * n // 4] - found[n // 4] if n else inf


class Wake(Views):
    """When a batch leaves, and when to ask again."""

    def holds(self, w: World, partition: Hashable, members: Members, passed_over: bool, size_reached: bool) -> bool:
        """Whether to wait for company. What was promised stands until the next input."""
        budget = w.flush.max_batch_cost
        if self.draining or passed_over or w.meter.cost([], members, budget) >= budget * (1 - NEARLY):
            return False
        if partition not in w.holds or (w.came.get(partition) and w.holds[partition] <= self.now):
            if size_reached:
                return False
            w.holds[partition] = self.hold_until(w, partition, members)
        if w.holds[partition] <= self.now:
            return False
        self.held_until = min(self.held_until, w.holds[partition])
        if not w.was_held.get(partition):
            w.was_held[partition], w.free_from[partition] = True, self.free_since
        return True

    def hold_until(self, w: World, partition: Hashable, members: Members) -> float:
        until = self.due(w, partition)
        deadlines = [t.deadline for t in self.unsettled(w.name, partition) if t.state != "running"]
        w.hold_for[partition], w.came[partition] = 0, False
        if w.flush.returns > 0 and not any(t.tier is Priority.URGENT for t in self.waiting(w.name, partition)):
            seconds, expected = self.hold_for_returns(w, partition, members)
            if self.now + seconds > until:
                until = self.now + seconds
                w.hold_for[partition] = int(expected + NEARLY) if min(deadlines) == inf else 0
        seconds, sigma = w.meter.seconds(members, w.flush.max_batch_cost)
        if until > self.now and min(deadlines) < inf and seconds > 0.0:
            one_more = seconds + w.meter.line(members[0][0])[1]
            until = min(until, min(deadlines) - one_more * (1.0 + 2.0 * sigma))
        return until

    def hold_for_returns(self, w: World, partition: Hashable, members: Members) -> tuple[float, float]:
        """Seconds for which clients that are due are worth waiting for, and how many are expected to come."""
        budget, n = w.flush.max_batch_cost, len(members)
        seconds, _ = w.meter.seconds(members, budget)
        oldest = min(t.arrived for t in self.waiting(w.name, partition))
        since = max(oldest, w.free_from[partition] if w.was_held.get(partition) else self.free_since)
        longest = since + min(w.flush.returns, budget) - self.now
        free, room = self.places(w, partition)
        places = int(min(free, inf if room is None else room, w.most())) - n
        fixed, marginal = w.meter.line(members[0][0])
        if fixed is None:
            fixed = seconds
        elif marginal > 0.0 and w.meter.in_seconds:
            places = int(min(places, (budget - seconds) / marginal + NEARLY))
        if seconds <= 0.0 or longest <= 0.0 or places <= 0.0 or fixed <= 0.0:
            return 0.0, 0.0
        preparing = [t for t in self.preparing if t.request.group == w.name]
        if min(len(self.absent(w)) + len(preparing), places) * fixed <= n * 0.0001:  # not worth ending a hold
            return 0.0, 0.0
        waits, idle = self.due_within(w, partition, longest, fixed), self.now - since
        met = sum(ticket.arrived < since for ticket, _ in members)
        as_one = idle + self.all_back([(wait, share) for wait, share, _, gathers, _ in waits if gathers], met)
        for_this, for_all = (0.0, 0.0, 0.0), (n / (self.now - since + seconds), 0.0, 0.0)  # worth, hold, expected
        for i, (wait, _, _, gathers, _) in enumerate(waits):
            some = waits[: i + 1]
            back, sums = sum(share for _, share, *_ in some), sum(mean for _, _, mean, *_ in some)
            until = min(wait + LATE, longest)
            delayed = n + sum(prepared for *_, prepared in waits[i + 1 :])
            gain = fixed * min(back, places) - sums - delayed * (wait if waits[i][4] else until)
            if gain > for_this[0] + NEARLY:
                for_this = (gain, until, back)
            rate = n + min(places, sum(share for _, share, _, gathers, _ in some if gathers))
            rate /= idle + wait + seconds
            if gathers and as_one <= fixed and idle + wait <= fixed and rate > for_all[0] * (1 + NEARLY):
                for_all = (rate, until, back)
        return max(for_this[1:], for_all[1:])

    def all_back(self, waits: Sequence[tuple[float, float]], met: int) -> float:
        """When seven eighths of them are back, if those that came to a busy device came one by one with them."""
        total = sum(share for _, share in waits)
        for i, (wait, _) in enumerate(waits):
            if sum(share for _, share in waits[: i + 1]) >= total * 7 / 8 - NEARLY:
                return wait + (wait - waits[0][0]) * met / total
        return inf

    def absent(self, w: World) -> dict[Hashable, float]:
        """Clients that were answered and have asked nothing since, and when that was."""
        return {client: at for client, at in w.last.items() if at > -inf}

    def due_within(self, w: World, partition: Hashable, longest: float, fixed: float) -> list[Due]:
        """When others may join: (seconds from now, probability, that times their mean, whether callers are gathered for
        it, whether it is prepared first), in order."""
        found: list[Due] = []
        for client, answered in self.absent(w).items():
            if w.places_of[client] != partition:
                continue
            mine = [(at, is_answer) for c, at, is_answer in w.answers if c == client]
            came = [at for at, is_answer in mine if not is_answer]
            gaps = [after - before for before, after in pairwise(came)][-32:]
            thinks = [b[0] - a[0] for a, b in pairwise(mine) if a[1] and not b[1]][-32:]
            by_clock = len(gaps) >= 3 and spread(gaps) < spread(thinks) - 0.0001
            age = self.now - (came[-1] if by_clock else answered)
            known = sorted(gaps if by_clock else thinks)
            gathers = not by_clock and bool(known) and known[len(known) // 2] <= fixed
            possible = [x for x in known if x >= age - LATE]
            soon = [x for x in possible if x <= age + longest]
            size = ceil(len(soon) / 3)
            if soon and soon[-1] - soon[0] <= LATE:
                size = len(soon)
            for part in [soon[i : i + size] for i in range(0, len(soon), size)] if soon else []:
                share = len(part) / len(possible)
                mean = sum(part) / len(possible) - share * age
                found.append((max(0.0, part[-1] - age), share, mean, gathers, False))
        return sorted([*found, *self.once_prepared(w, partition, longest)])

    def once_prepared(self, w: World, partition: Hashable, longest: float) -> list[Due]:
        """Those that are prepared now are ready one by one."""
        pace, last = 0.0, -inf
        for admitted, ready in w.made_ready:
            took, last = ready - max(last, admitted), ready
            pace = pace + (took - pace) / 8 if pace else took
        here = [t for t in self.preparing if t.request.group == w.name and t.request.partition == partition]
        times = [(i + 1) * pace for i in range(len(here))]
        return [(at, 1.0, at, True, True) for at in times if at <= longest]

    def due(self, w: World, partition: Hashable) -> float:
        """Until when the clock alone holds what waits."""
        return min(ticket.arrived + w.flush.hold_max[ticket.tier] for ticket in self.waiting(w.name, partition))

    def wake_at(self) -> float:
        times = [t.deadline for t in [*self.open, *self.preparing] if t.state in ("preparing", "waiting", "resident")]
        times += self.pauses.values()
        if len(self.in_flight) < self.max_batches:
            times.append(self.held_until if self.quiet else self.now)
        return min(times, default=inf)
