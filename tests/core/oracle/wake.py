"""The wake: until when a batch is held, by the clock and for clients that are due."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf

from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority

from .cost import Members
from .records import NEARLY, Seen, World
from .views import Views

LATE = 2.0**-12  # seconds by which a client may be late and still be waited for
Due = tuple[float, float, float, bool]


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


def thoughts(waits: Sequence[Due]) -> float:
    """Expected number of clients, of those predicted by their think times."""
    return sum(share for _, share, _, by_think in waits if by_think)


class Wake(Views):
    """When a batch leaves, and when to ask again."""

    def holds(self, w: World, partition: Hashable, members: Members, passed_over: bool, size_reached: bool) -> bool:
        """Whether to wait for company. What was promised stands until the next input."""
        budget = w.flush.max_batch_cost
        if self.draining or passed_over or w.meter.cost([], members, budget) >= budget * (1 - NEARLY):
            return False
        if partition not in w.holds:
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
        if w.flush.returns > 0 and not any(t.tier is Priority.URGENT for t in self.waiting(w.name, partition)):
            until = max(until, self.now + self.hold_for_returns(w, partition, members))
        deadlines = [t.deadline for t in self.unsettled(w.name, partition) if t.state != "running"]
        seconds, sigma = w.meter.seconds(members, w.flush.max_batch_cost)
        if until > self.now and min(deadlines) < inf and seconds > 0.0:
            one_more = seconds + w.meter.line(members[0][0])[1]
            until = min(until, min(deadlines) - one_more * (1.0 + 2.0 * sigma))
        return until

    def hold_for_returns(self, w: World, partition: Hashable, members: Members) -> float:
        """Seconds for which clients that are due are worth waiting for."""
        budget, n = w.flush.max_batch_cost, len(members)
        seconds, _ = w.meter.seconds(members, budget)
        oldest = min(t.arrived for t in self.waiting(w.name, partition))
        since = w.free_from[partition] if w.was_held.get(partition) else self.free_since
        longest = max(oldest, since) + w.flush.returns - self.now
        free, room = self.places(w, partition)
        places = int(min(free, inf if room is None else room, w.most())) - n
        fixed, marginal = w.meter.line(members[0][0])
        if fixed is None:
            fixed = seconds
        elif marginal > 0.0 and w.meter.in_seconds:
            places = int(min(places, (budget - seconds) / marginal + NEARLY))
        if seconds <= 0.0 or longest <= 0.0 or places <= 0.0 or fixed <= 0.0:
            return 0.0
        if min(self.absent(w), places) * fixed <= n * 0.0001:  # not worth ending a hold
            return 0.0
        waits, thinkers = self.due_within(w, partition, longest)
        best = (0.0, 0.0)  # gain, hold
        for i, (wait, *_) in enumerate(waits):
            back, sums = sum(share for _, share, _, _ in waits[: i + 1]), sum(mean for _, _, mean, _ in waits[: i + 1])
            gain = fixed * min(back, places) - sums - n * wait
            if gain > best[0] + NEARLY:
                best = (gain, min(wait + LATE, longest))
        newest = max(t.arrived for t in self.all if (t.request.group, t.request.partition) == (w.name, partition))
        if newest <= self.free_since == self.now >= w.merge_again and 0 < thinkers <= places:
            back = [wait for i, (wait, *_) in enumerate(waits) if thoughts(waits[: i + 1]) >= 0.9 * thinkers]
            if back and best[1] < back[0] + LATE < min(fixed, longest):
                w.merging = (partition, self.now + (back[0] + LATE))
                w.merge_again = self.now + 64 * fixed
        merging, until = w.merging
        return max(best[1], until - self.now) if waits and merging == partition else best[1]

    def is_absent(self, mine: list[Seen]) -> bool:
        """Whether the client of these was answered and has asked nothing since."""
        return all(t.state == "settled" for t in mine) and max(mine, key=lambda t: t.ended).result == "ok"

    def absent(self, w: World) -> int:
        by_client: dict[Hashable, list[Seen]] = {}
        for ticket in self.all:
            if ticket.request.group == w.name:
                by_client.setdefault(ticket.client, []).append(ticket)
        return sum(self.is_absent(mine) for mine in by_client.values())

    def due_within(self, w: World, partition: Hashable, longest: float) -> tuple[list[Due], int]:
        """When absent clients may ask: (seconds from now, probability, that times their mean, by think time), in order;
        and how many of them are predicted by their think time."""
        found: list[Due] = []
        thinkers = 0
        for client in {t.client for t in self.all if t.request.group == w.name}:
            mine = [t for t in self.all if t.request.group == w.name and t.client == client]
            last = max(mine, key=lambda t: t.ended)
            if not self.is_absent(mine):
                continue
            if mine[-1].request.partition != partition:
                continue
            gaps = [after.arrived - before.arrived for before, after in pairwise(mine)][-32:]
            thinks = self.thinks(mine)[-32:]
            by_clock = len(gaps) >= 3 and spread(gaps) < spread(thinks) - 0.0001
            assert last.settled_at is not None
            age = self.now - (mine[-1].arrived if by_clock else last.settled_at)
            possible = sorted(x for x in (gaps if by_clock else thinks) if x >= age - LATE)
            soon = [x for x in possible if x <= age + longest]
            size = ceil(len(soon) / 3)
            if soon and soon[-1] - soon[0] <= LATE:
                size = len(soon)
            for part in [soon[i : i + size] for i in range(0, len(soon), size)] if soon else []:
                share = len(part) / len(possible)
                found.append((max(0.0, part[-1] - age), share, sum(part) / len(possible) - share * age, not by_clock))
            thinkers += bool(soon) and not by_clock
        return sorted(found), thinkers

    def thinks(self, mine: list[Seen]) -> list[float]:
        """Times from an answer that left the client nothing to wait for to its next request."""
        found = []
        for i, ticket in enumerate(mine):
            last = max(mine[:i], key=lambda t: t.ended, default=None)
            if last is None or last.result != "ok" or not all(0 <= t.ended < ticket.ended_before for t in mine[:i]):
                continue
            assert last.settled_at is not None
            found.append(ticket.arrived - last.settled_at)
        return found

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
