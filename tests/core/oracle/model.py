"""Inputs and questions, as the scheduler has them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import inf

from reflex_runtime.core.batch import Apart, Done, Failed, More, Outcome
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Priority, Request

from .batches import Batches
from .records import Expected, Seen, World, kind


class Oracle(Batches):
    """The naive scheduler."""

    def input(self, now: float) -> None:
        self.now = max(self.now, now)
        self.stood, self.quiet = self.quiet, False
        for world in self.worlds.values():
            self.promised[world.name] = dict(world.holds)
            world.holds.clear()

    def submit(self, request: Request, now: float, ready: bool = True) -> Seen | str:
        """The ticket, or the code of the refusal."""
        self.input(now)
        w = self.worlds[request.group]
        limit = inf if request.time_limit is None else request.time_limit
        ticket = Seen(
            seq=self.tickets,
            request=request,
            arrived=now,
            admitted=now,
            deadline=now + limit,
            tier=request.priority,
            stage=request.stage,
            wants=request.wants,
            promote_at=now + min(w.promote_after, 0.5 * limit),
        )
        replaced = self.queued(w.name, client=request.client) if w.latest_only else []
        if self.closed:
            return "shutting_down"
        displaced = None
        if len(self.queued(w.name)) - len(replaced) >= w.capacity:
            background: list[Seen] = []
            if w.displace_background and not replaced and request.priority is Priority.URGENT:
                self.promote(w)
                background = [t for t in self.waiting(w.name) if t.tier is Priority.BACKGROUND]
            counts = {c: len(self.waiting(w.name, client=c)) for c in self.clients(w.name)}
            most = max(counts.values(), default=0)
            if background:
                displaced = max(background, key=lambda t: t.seq)
            elif not w.share_room or replaced or most < counts.get(request.client, 0) + 2:
                return "queue_full"
            else:
                displaced = max((t for t in self.waiting(w.name) if counts[t.client] == most), key=lambda t: t.seq)
        stay = [t for t in self.queued(w.name) if t not in replaced and t is not displaced]
        if stay and sum(t.wants for t in stay) + request.wants > w.max_queued_units:
            return "queue_full"
        if self.waits_too_long(w, ticket, stay):
            return "queue_full"
        preparing = [t for t in self.preparing if (t.request.group, t.client) == (w.name, request.client)]
        here = len(self.unsettled(w.name, client=request.client)) + len(preparing)
        if w.cap and here - len(replaced) >= w.cap:
            return "client_at_capacity"
        if w.pool is not None and request.wants > w.pool:
            return "too_large"
        if self.cannot_make_it(w, ticket) and self.refuses(w, ticket):
            return "deadline_unreachable"
        for old in replaced:
            self.settle(old, "superseded")
        if displaced is not None:
            self.settle(displaced, "queue_full")
        self.tickets += 1
        ticket.share = w.meter.share(ticket, w.flush)
        if ready:
            self.enter(w, ticket)
        else:
            w.last[ticket.client] = -inf
            ticket.state = "preparing"
            self.preparing.append(ticket)
        if displaced is None and not replaced and self.changes_nothing(w, ticket):
            self.stand()
        return ticket

    def stand(self) -> None:
        """What was found before the last input stands."""
        self.quiet = True
        for world in self.worlds.values():
            world.holds = dict(self.promised[world.name])

    def changes_nothing(self, w: World, ticket: Seen) -> bool:
        """Whether one that came leaves the device waiting: it cannot run yet, or others are expected beside it."""
        partition = ticket.request.partition
        if not self.stood:
            return False
        if ticket.state == "preparing":
            return True
        if self.promised[w.name].get(partition, -inf) <= self.now or self.partitions(w.name) != [partition]:
            return False
        if ticket.client in w.offenders or self.places(w, partition)[1] is not None:
            return False
        plain = ticket.tier is Priority.DEFAULT and ticket.deadline == inf and w.flush.returns > 0
        if not plain or any(t.state == "resident" for t in self.unsettled(w.name, partition)):
            return False
        w.hold_for[partition] -= 1
        w.came[partition] = True
        return w.hold_for[partition] > 0

    def waits_too_long(self, w: World, ticket: Seen, stay: list[Seen]) -> bool:
        """More seconds wait in its priority and above than may, and its client has its even share of them."""
        request = ticket.request
        seconds = w.meter.share(ticket, w.flush)
        counted = [t for t in self.queued(w.name) if t.share > 0.0 and t.request.priority is not Priority.BACKGROUND]
        ahead = [t for t in stay if t in counted and t.request.priority <= request.priority]
        if request.priority is Priority.BACKGROUND or not ahead or not seconds:
            return False
        clients = {request.client, *(t.client for t in counted)}
        own = [t.share for t in stay if t in counted and t.client == request.client]
        most = w.max_queued_seconds * (1 + 1e-9)
        return sum(t.share for t in ahead) + seconds > most and sum(own) + seconds > most / len(clients)

    def enter(self, w: World, ticket: Seen) -> None:
        request = ticket.request
        w.answers.append((ticket.client, self.now, False))
        w.places_of[ticket.client], w.last[ticket.client] = request.partition, -inf
        if not self.unsettled(w.name):
            peers = [p for p in self.worlds.values() if (p.weight > 0) == (w.weight > 0)]
            mates = self.mates(w)
            if not any(self.unsettled(p.name) for p in mates):
                busy = [p.tenant_time for p in peers if self.unsettled(p.name)]
                lifted = max(w.tenant_time, min(busy) if busy else max(p.tenant_time for p in peers))
                for p in mates:
                    p.tenant_time = lifted
            busy = [p.device_time for p in mates if p is not w and self.unsettled(p.name)]
            w.device_time = max(w.device_time, min(busy) if busy else max(p.device_time for p in mates))
        if not self.unsettled(w.name, request.partition):
            busy = [w.device_times[p] for p in self.partitions(w.name)]
            mine = w.device_times.get(request.partition, 0.0)
            w.device_times[request.partition] = max(mine, min(busy, default=w.device_rest))
        if not self.unsettled(w.name, client=request.client):
            active = [w.counters[c] for c in self.clients(w.name)]
            w.counters[request.client] = max(w.counters.get(request.client, 0.0), min(active, default=w.rest))
        ticket.ended_before = len(self.all) - len(self.open)
        if self.cannot_make_it(w, ticket):
            w.probes = [t for t in w.probes if kind(t) != kind(ticket)] + [ticket]
            ticket.probe = True
        self.all.append(ticket)
        self.open.append(ticket)

    def prepared(self, ticket: Seen, made: Request | ReflexError, now: float) -> None:
        self.input(now)
        if ticket.state != "preparing":
            return
        if isinstance(made, ReflexError):
            self.settle(ticket, made.code)
            return
        if ticket.deadline < inf:
            made = replace(made, time_limit=max(0.0, ticket.deadline - now))
        ticket.request, ticket.stage, ticket.wants, ticket.arrived = made, made.stage, made.wants, now
        limit = inf if made.time_limit is None else made.time_limit
        ticket.promote_at = now + min(self.worlds[made.group].promote_after, 0.5 * limit)
        if self.cannot_make_it(self.worlds[made.group], ticket) and self.refuses(self.worlds[made.group], ticket):
            self.settle(ticket, "deadline_unreachable")
            return
        self.worlds[made.group].made_ready.append((ticket.admitted, now))
        self.preparing.remove(ticket)
        ticket.state = "waiting"
        ticket.seq = self.tickets
        self.tickets += 1
        w = self.worlds[made.group]
        ticket.share = w.meter.share(ticket, w.flush)
        self.enter(w, ticket)
        if self.changes_nothing(w, ticket):
            self.stand()

    def cannot_make_it(self, w: World, ticket: Seen) -> bool:
        """By the estimate."""
        return ticket.deadline < inf and self.now + w.meter.remaining(ticket) > ticket.deadline

    def refuses(self, w: World, ticket: Seen) -> bool:
        """Whether an estimate may refuse it: while a batch of its shape runs and for a second after, and of its class
        for ten times what that took; not after one that was tried was in time; and while one is being tried, unless
        that still waits and has less time."""
        limit = ticket.request.time_limit or 0.0
        for probe in w.probes:
            if kind(probe) == kind(ticket):
                return probe.state != "waiting" or limit <= (probe.request.time_limit or 0.0)
        for key, span in ((ticket.request.shape, 0.0), (kind(ticket), 10.0)):
            if not any(k == key for k, _, _ in w.renewed):
                w.renewed.append((key, self.now, 0.0))
            at, seconds = [(at, seconds) for k, at, seconds in w.renewed if k == key][-1]
            runs = any(key in (t.request.shape, kind(t)) for b in self.in_flight for t, _ in b.grants)
            if not (runs and w.meter.in_seconds) and self.now - at >= max(1.0, span * seconds):
                return False
        return True

    def cancel(self, ticket: Seen, now: float) -> None:
        self.input(now)
        if ticket.state == "running":
            ticket.cancelled = True
        elif ticket.state != "settled":
            self.settle(ticket, "cancelled")

    def abandon(self, ticket: Seen, now: float) -> None:
        self.input(now)
        ticket.abandoned = True

    def hold(self, ticket: Seen, now: float) -> None:
        self.input(now)
        ticket.held = True

    def resume(self, ticket: Seen, now: float) -> None:
        self.input(now)
        ticket.held = False

    def set_room(self, group: str, n: int | None, now: float) -> None:
        self.input(now)
        self.worlds[group].room = n

    def pause(self, group: str, until: float, now: float, partition: Hashable | None = None) -> None:
        self.input(now)
        for (g, p), end in list(self.pauses.items()):
            if (g, p) == (group, partition) or end <= now:
                del self.pauses[g, p]
        if until > now:
            self.pauses[group, partition] = until

    def close(self, now: float, drain: bool) -> None:
        self.input(now)
        self.closed, self.draining = True, drain
        if not drain:
            for ticket in [*self.open, *self.preparing]:
                if ticket.state in ("preparing", "waiting", "resident"):
                    self.settle(ticket, "shutting_down")

    def complete(self, batch: Expected, outcomes: Sequence[Outcome], elapsed: float, now: float) -> None:
        self.input(now)
        self.in_flight.remove(batch)
        self.free_since = now
        w = self.worlds[batch.group]
        self.charge(w, elapsed - batch.expected)
        w.device_times[batch.partition] += elapsed - batch.expected
        batch.crashed = self.to_blame(w, batch, outcomes)
        if isinstance(outcomes[0], Apart):
            self.isolate(w, batch)
            return
        if not any(isinstance(o, Failed) for o in outcomes):
            w.meter.learn(batch.grants, batch.stage, elapsed)
            for one in batch.grants if w.meter.in_seconds else ():
                w.renewed += [(one[0].request.shape, now, elapsed), (kind(one[0]), now, elapsed)]
            each = elapsed / len(batch.grants)
            w.per_item = w.per_item + 0.1 * (each - w.per_item) if w.per_item else each
        for (ticket, units), outcome in zip(batch.grants, outcomes, strict=True):
            ticket.shared += elapsed / len(batch.grants)
            if ticket in w.probes:
                w.counters[ticket.client] += elapsed / len(batch.grants) / ticket.request.weight
            if isinstance(outcome, More):
                ticket.computed += units
                ticket.wants = outcome.wants
                ticket.stage = ticket.stage if outcome.stage is None else outcome.stage
                self.stays(ticket)
                if ticket.request.streams and outcome.value is not None:
                    ticket.deadline = inf
                if ticket.cancelled or ticket.abandoned:
                    self.settle(ticket, "cancelled")
                elif self.closed and not self.draining:
                    self.settle(ticket, "shutting_down")
                elif ticket.deadline <= self.now:
                    self.settle(ticket, "deadline_exceeded")
                continue
            if isinstance(outcome, Done):
                w.meter.ended(ticket)
                ticket.computed += units
                w.served += 1
                if w.offenders.pop(ticket.client, None) is None:
                    w.shared.append(False)
            elif len(outcomes) == 1:
                if ticket.client not in w.offenders:
                    w.shared.append(True)
                w.offenders[ticket.client] = w.served
            result = "ok" if isinstance(outcome, Done) else "processor_failed"
            self.settle(ticket, "cancelled" if ticket.cancelled else result)

    def next_batch(self, now: float) -> Expected | None:
        self.now = max(self.now, now)
        for ticket in [*self.open, *self.preparing]:
            if ticket.state in ("preparing", "waiting", "resident") and ticket.deadline <= self.now:
                self.settle(ticket, "deadline_exceeded")
        for (group, partition), until in list(self.pauses.items()):
            if until <= self.now:
                del self.pauses[group, partition]
        if len(self.in_flight) >= self.max_batches:
            return None
        for ticket in [*self.open, *self.preparing]:
            if ticket.abandoned and ticket.state in ("preparing", "waiting", "resident"):
                self.settle(ticket, "cancelled")
        self.held_until = inf
        for w in self.groups_in_order():
            self.promote(w)
            for partition in self.partitions_in_order(w):
                batch = self.form(w, partition)
                if batch is not None:
                    return batch
        self.quiet = True
        return None
