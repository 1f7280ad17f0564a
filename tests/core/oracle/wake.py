"""The wake: until when a batch is held, by the clock and for clients that are due."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf

from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority

from .cost import Members
from .records import NEARLY, World
from .views import Views

LATE = 2.0**-12  # seconds by which a client may be late and still be waited for
Due = tuple[float, float, float, bool, bool]


@dataclass
class Adapting:
    """The adaptive target: everything that ever came and returned, looked at again after each batch."""

    smallest: int = 2
    largest: int = 16
    target_batch_time: float = 0.012
    window: int = 100
    hold: float = 0.003
    log: list[tuple[str, Hashable, float, float]] = field(default_factory=list)  # what came and ended
    left: dict[Hashable, list[int]] = field(default_factory=dict)  # tokens that active streams may still say
    calls: list[tuple[Hashable, Sequence[float], float]] = field(default_factory=list)
    targets: dict[Hashable, int] = field(default_factory=dict)

    def known(self, partition: Hashable, now: float) -> tuple[float, float, list[float], float, float, float]:
        """(company, back, away, last arrival, unsettled, step), from everything that was told."""
        company = back = step = unsettled = 0.0
        last, away = -inf, list[float]()
        for what, where, at, figure in [*self.log, ("now", partition, now, 0.0)]:
            if where != partition:
                continue
            if what == "ended":
                away.append(at)
                step = step + (figure - step) / 4
                continue
            gone = [t for t in away if t < at - 4 * self.hold]
            away = away[len(gone) :]
            for _ in gone:
                back = back - back / 4
            if what == "came":
                company = company + ((figure > 0 and at - last <= self.hold and not away) - company) / 4
                if away:
                    away, back = away[1:], back + (1 - back) / 4
                last, unsettled = at, figure + 1
        return company, back, away, last, unsettled, step

    def company(self, partition: Hashable) -> float:
        return self.known(partition, -inf)[0]

    def ended(self, partition: Hashable, now: float, step: float) -> None:
        self.log.append(("ended", partition, now, step))

    def returned(self, partition: Hashable, waits: Sequence[float], seconds: float, crowded: bool) -> None:
        self.calls.append((partition, waits, seconds))
        last = [(w, s) for p, w, s in self.calls if p == partition][-self.window :]
        all_waits, all_seconds = sorted(wait for w, _ in last for wait in w), sorted(s for _, s in last)
        wait, call = all_waits[ceil(len(all_waits) * 95 / 100) - 1], all_seconds[ceil(len(last) / 2) - 1]
        target = self.target(partition)
        if wait < self.hold and call < self.target_batch_time and not crowded:
            self.targets[partition] = min(target + 2, self.largest)
        if wait > self.hold * 4 / 3 or call > 1.3 * self.target_batch_time:
            self.targets[partition] = max(target // 2, self.smallest)

    def target(self, partition: Hashable) -> int:
        return self.targets.get(partition, self.smallest)

    def policy(self, base: FlushPolicy, partition: Hashable, now: float) -> FlushPolicy:
        company, back, away, last, unsettled, step = self.known(partition, now)
        left = self.left.get(partition, [])
        ending = bool(left) and (max(left) == 1 or (max(left) <= 3 and len(left) > unsettled))
        if back >= 0.5 and (ending or away):
            together = ending or not left
            until = inf
            if not ending:  # for who is away, until so long after the last one ended or came
                until = max(away[-1], min(last, away[-1] + 3 * self.hold)) + self.hold
            urgent, default, background = base.hold_max
            hold = (urgent, 10 * default, 9 * default + background) if together else base.hold_max
            target = 10**6 if together and step >= 2 * self.hold else base.max_batch_size
            return replace(base, target=target, quiet=0.0, hold_max=hold, until=until)
        if company < 0.2:
            return replace(base, hold_min=(0.0, 0.0, 0.0), hold_max=(0.0, 0.0, 0.0))
        return replace(base, target=self.target(partition))


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
            rule = self.rule(w, partition)
            if size_reached and rule.target <= rule.max_batch_size:
                return False
            w.holds[partition] = self.hold_until(w, partition, members)
        if w.holds[partition] <= self.now:
            return False
        self.held_until = min(self.held_until, w.holds[partition])
        if not w.was_held.get(partition):
            w.was_held[partition], w.free_from[partition] = True, self.free_since
        return True

    def hold_until(self, w: World, partition: Hashable, members: Members) -> float:
        until = self.due(w, partition, len(members))
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
        waits = self.due_within(w, partition, longest, fixed, n)
        for_this, for_all = (0.0, 0.0, 0.0), (n / (self.now - since + seconds), 0.0, 0.0)  # worth, hold, expected
        for i, (wait, _, _, gathers, _) in enumerate(waits):
            some = waits[: i + 1]
            back, sums = sum(share for _, share, *_ in some), sum(mean for _, _, mean, *_ in some)
            until = min(wait + LATE, longest)
            delayed = n + sum(prepared for *_, prepared in waits[i + 1 :])
            gain = fixed * min(back, places) - sums - delayed * wait
            if gathers and wait > fixed / 4:
                gain = -inf
            if gain > for_this[0] + NEARLY:
                for_this = (gain, until, back)
            rate = n + min(places, sum(share for _, share, _, gathers, _ in some if gathers))
            rate /= self.now - since + wait + seconds
            if gathers and rate > for_all[0] * (1 + NEARLY):
                for_all = (rate, until, back)
        return max(for_this[1:], for_all[1:])

    def absent(self, w: World) -> dict[Hashable, float]:
        """Clients that were answered and have asked nothing since, and when that was."""
        last = {client: (at, answered) for client, at, answered in w.answers}
        return {client: at for client, (at, answered) in last.items() if answered}

    def due_within(self, w: World, partition: Hashable, longest: float, fixed: float, n: int) -> list[Due]:
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
                found.append((max(0.0, part[-1] - age), share, mean, gathers, w.prepares[client]))
        return self.once_prepared(w, partition, longest, fixed, n, sorted(found))

    def once_prepared(
        self, w: World, partition: Hashable, longest: float, fixed: float, n: int, found: list[Due]
    ) -> list[Due]:
        """The same when they are ready, behind those that are prepared now, one by one."""
        pace, last = 0.0, -inf
        for admitted, ready in w.made_ready:
            took, last = ready - max(last, admitted), ready
            pace = pace + (took - pace) / 8 if pace else took
        at = 0.0
        made: list[Due] = []
        here = [t for t in self.preparing if t.request.group == w.name and w.places_of[t.client] == partition]
        brief = pace * (n + len(here) + sum(share for _, share, _, _, prepared in found if prepared)) <= fixed
        for _ in here:
            at += pace
            made.append((at, 1.0, at, brief, True))
        for wait, share, mean, gathers, prepared in found:
            if prepared:
                at = max(at, wait) + pace * share
                mean, wait, gathers = mean + (at - wait) * share, at, gathers and brief
            made.append((wait, share, mean, gathers, False))
        return sorted(due for due in made if due[0] <= longest)

    def due(self, w: World, partition: Hashable, waiting: int) -> float:
        """Until when the clock alone holds what waits."""
        rule = self.rule(w, partition)
        flying = any((b.group, b.partition) == (w.name, partition) for b in self.in_flight)
        newest = max(t.arrived for t in self.all if (t.request.group, t.request.partition) == (w.name, partition))
        ends = []
        for ticket in self.waiting(w.name, partition):
            least, most = ticket.arrived + rule.hold_min[ticket.tier], ticket.arrived + rule.hold_max[ticket.tier]
            if flying and rule.group_commit:
                ends.append(min(most, rule.until))
            elif waiting >= rule.target:
                ends.append(least)
            elif rule.quiet and not flying:
                ends.append(min(most, max(least, newest + rule.quiet), rule.until))
            else:
                ends.append(min(most, rule.until))
        return min(ends)

    def rule(self, w: World, partition: Hashable) -> FlushPolicy:
        return w.flush if w.adapting is None else w.adapting.policy(w.flush, partition, self.now)

    def wake_at(self) -> float:
        times = [t.deadline for t in [*self.open, *self.preparing] if t.state in ("preparing", "waiting", "resident")]
        times += self.pauses.values()
        if len(self.in_flight) < self.max_batches:
            times.append(self.held_until if self.quiet else self.now)
        return min(times, default=inf)
