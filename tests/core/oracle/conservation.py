"""Conservation: every ticket that was admitted ends once; where calls fail, its members run again apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

from reflex_runtime.core.batch import Apart, Failed, Outcome

from .records import Expected, Origin, Seen, Trial, World, kind
from .views import Views


class Conservation(Views):
    """The end of tickets, a resident's way back, and the parts of a call that failed."""

    def settle(self, ticket: Seen, result: str) -> None:
        assert ticket.state != "settled"
        w = self.worlds[ticket.request.group]
        if ticket.state == "preparing":
            self.preparing.remove(ticket)
            w.made_ready.append((ticket.admitted, self.now))
            ticket.state, ticket.result = "settled", result
            self.settled.append((ticket.seq, result))
            return
        if ticket.state == "resident" or (ticket.state == "running" and ticket.has_place and result != "ok"):
            w.left.append(ticket)
        ticket.state, ticket.result, ticket.has_place = "settled", result, False
        ticket.ended = len(self.all) - len(self.open)
        self.open.remove(ticket)
        ticket.settled_at = self.now
        if ticket in w.probes:
            w.probes.remove(ticket)
            if result == "ok" and self.now <= ticket.deadline:
                w.renewed += [(ticket.request.shape, -inf, 0.0), (kind(ticket), -inf, 0.0)]
            elif ticket.granted:
                w.renewed += [(key, self.now, ticket.shared) for key in (ticket.request.shape, kind(ticket))]
        self.memory = [(t, u) for t, u in self.memory if t is not ticket]
        w.holds.pop(ticket.request.partition, None)  # what it was held for has changed
        if not self.unsettled(w.name, client=ticket.client):
            prepared = [t for t in self.preparing if (t.request.group, t.client) == (w.name, ticket.client)]
            if result == "ok" and not prepared:
                w.answers.append((ticket.client, self.now, True))
                w.last[ticket.client] = self.now
            w.rest = max(w.rest, w.counters[ticket.client])
        if not self.unsettled(w.name, ticket.request.partition):
            w.device_rest = max(w.device_rest, w.device_times[ticket.request.partition])
        self.settled.append((ticket.seq, result))

    def preempt(self, w: World, ticket: Seen) -> None:
        """It starts over, from the front of its queue: queues are in order of arrival, so nothing else to do."""
        ticket.recomputed += ticket.computed
        ticket.lost = ticket.computed
        ticket.wants += ticket.computed
        ticket.computed = 0.0
        ticket.stage = ticket.request.stage
        ticket.state, ticket.has_place = "waiting", False
        w.left.append(ticket)
        self.preempted.append(ticket.seq)

    def to_blame(self, w: World, batch: Expected, outcomes: Sequence[Outcome]) -> bool:
        """Whether the processor is to blame: nobody was served and no known offender was alone; of a call that failed,
        once all its parts have run, nobody was served."""
        lost = [isinstance(o, Failed) for o in outcomes]
        if isinstance(outcomes[0], Apart):
            return False
        if batch.trial is None:
            client = batch.grants[0][0].client
            return all(lost) and not (len(lost) == 1 and w.offenders.get(client, inf) < w.served)
        origin = batch.trial.origin
        origin.pending -= 1
        origin.served |= not all(lost)
        if not all(lost) and batch.trial.other is not None:
            batch.trial.other.fails = True
        return origin.pending == 0 and not origin.served

    def stays(self, ticket: Seen) -> None:
        self.turns += 1
        ticket.state, ticket.has_place, ticket.turn = "resident", True, self.turns

    def isolate(self, w: World, batch: Expected) -> None:
        """A call that failed: its members stay, to run again in two halves."""
        origin = Origin() if batch.trial is None else batch.trial.origin
        origin.pending -= batch.trial is not None
        self.halve(w, batch.partition, list(batch.grants), origin)
        for ticket, units in batch.grants:
            ticket.recomputed += units
            self.stays(ticket)
            if w.pool is not None:
                i = max(i for i, held in enumerate(self.memory) if held == (ticket, units))
                del self.memory[i]
            if ticket.cancelled or ticket.abandoned:
                self.settle(ticket, "cancelled")
            elif self.closed and not self.draining:
                self.settle(ticket, "shutting_down")
            elif ticket.deadline <= self.now:
                self.settle(ticket, "deadline_exceeded")

    def halve(self, w: World, partition: Hashable, grants: list[tuple[Seen, float]], origin: Origin) -> None:
        middle = max(1, len(grants) // 2)
        halves = [Trial(some, origin) for some in (grants[:middle], grants[middle:]) if some]
        if len(halves) == 2:
            halves[0].other, halves[1].other = halves[1], halves[0]
        origin.pending += len(halves)
        w.suspects.setdefault(partition, []).extend(halves)

    def trial(self, w: World, partition: Hashable) -> Trial | None:
        """The part of a failed call to run now. One that must fail, since the other half did not, is halved unseen."""
        waiting = w.suspects.get(partition, [])
        while waiting:
            first = waiting[0]
            still = [(t, u) for t, u in first.grants if t.state == "resident" and not t.held]
            first.fails = first.fails and still == first.grants
            first.grants = still
            if w.pool is not None and not (first.fails and len(still) > 1):
                first.grants = []
                for ticket, units in still:
                    if self.used() + units <= w.pool:
                        self.memory.append((ticket, units))
                        first.grants.append((ticket, units))
            if first.grants and not (first.fails and len(first.grants) > 1):
                return waiting.pop(0)
            del waiting[0]
            first.origin.pending -= 1
            self.halve(w, partition, first.grants, first.origin)
        return None
