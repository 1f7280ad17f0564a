"""A naive model of the scheduler, written to be obviously right.

Lists, sorting and summing over and over: nothing is kept that can be computed again, nothing is fast. It shares no code
with the core apart from value types, errors and, for learned time, the cost model (which has its own tests). It knows
every rule but the window selection, which has a slow check of its own in `test_select.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf, log
from typing import Any

from reflex_runtime.core.batch import Apart, Done, Failed, More, Outcome
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority, Request
from reflex_runtime.core.time_cost import TimeCost

NEARLY = 1e-9
LATE = 2.0**-12  # seconds by which a client may be late and still be waited for
Due = tuple[float, float, float, bool]


@dataclass(eq=False)
class Seen:
    """A request and what became of it."""

    seq: int
    request: Request
    arrived: float
    deadline: float
    tier: Priority
    stage: str
    wants: float
    promote_at: float
    state: str = "waiting"
    granted: float = 0.0
    computed: float = 0.0
    recomputed: float = 0.0
    shared: float = 0.0
    share: float = 0.0  # seconds it counts for while it waits
    has_place: bool = False  # it is or was resident and has not left since
    lost: float = -1.0
    held: bool = False
    abandoned: bool = False
    cancelled: bool = False
    probe: bool = False  # let in against the estimate
    settled_at: float | None = None
    ended: int = -1  # how many had ended before it did
    ended_before: int = 0  # how many had ended before it came
    result: str = ""

    @property
    def client(self) -> Hashable:
        return self.request.client

    def __repr__(self) -> str:
        return f"#{self.seq}"


def kind(ticket: Seen) -> Hashable:
    """What has an estimate of its own."""
    return ticket.request.shape, ticket.request.cost_class


# -- how much --------------------------------------------------------------------------------------------------------

Members = Sequence[tuple[Seen, float]]


class Units:
    """Every member costs 1."""

    in_seconds = False

    def room(self, base: Members, members: Members, ticket: Seen, budget: float) -> float:
        n = len(base) + len(members)
        return 1.0 if n == 0 or n + 1 <= budget else 0.0

    def cost(self, base: Members, members: Members, budget: float) -> float:
        return float(len(base) + len(members))

    def dearest(self, base: Members, members: Members, budget: float) -> float:
        return 1.0 if base or members else 0.0

    def seconds(self, members: Members, budget: float) -> tuple[float, float]:
        return 0.0, 0.0

    def charge(self, ticket: Seen, units: float) -> float:
        return 1.0

    def fixed(self, ticket: Seen) -> float:
        return 0.0

    def remaining(self, ticket: Seen) -> float:
        return 0.0

    def share(self, ticket: Seen, flush: FlushPolicy) -> float:
        return 0.0

    def line(self, ticket: Seen) -> tuple[float | None, float]:
        """Fixed and marginal seconds of batches of such tickets; no fixed ones until they can be told apart."""
        return 0.0, 0.0

    def learn(self, members: Members, stage: str, elapsed: float) -> None:
        pass

    def ended(self, ticket: Seen) -> None:
        pass


class Tokens(Units):
    """A member costs what it is granted, which is what it wants as far as that is left."""

    def __init__(self, threshold: float = inf) -> None:
        self.threshold = threshold

    def room(self, base: Members, members: Members, ticket: Seen, budget: float) -> float:
        return max(0.0, min(ticket.wants, budget - self.cost(base, members, budget), self.threshold))

    def cost(self, base: Members, members: Members, budget: float) -> float:
        return sum(units for _, units in [*base, *members])

    def dearest(self, base: Members, members: Members, budget: float) -> float:
        return max((units for _, units in [*base, *members]), default=0.0)

    def charge(self, ticket: Seen, units: float) -> float:
        return units


@dataclass
class _Batch:
    grants: dict[Seen, float]
    stage: str

    def __len__(self) -> int:
        return len(self.grants)


class Seconds(Units):
    """Learned time, by the real cost model: another instance of it, that sees only what the oracle did."""

    in_seconds = True

    def __init__(self, **config: Any) -> None:
        self.model = TimeCost(**config)

    def _tally(self, base: Members, members: Members, budget: float) -> Any:
        tally = self.model.tally()
        for ticket, units in base:
            tally.add(ticket, units)  # type: ignore[arg-type]
        for ticket, units in members:
            tally.offer(ticket, budget)  # type: ignore[arg-type]
            tally.add(ticket, units)  # type: ignore[arg-type]
        return tally

    def room(self, base: Members, members: Members, ticket: Seen, budget: float) -> float:
        return float(self._tally(base, members, budget).offer(ticket, budget))

    def cost(self, base: Members, members: Members, budget: float) -> float:
        return float(self._tally(base, members, budget).cost)

    def dearest(self, base: Members, members: Members, budget: float) -> float:
        return float(self._tally(base, members, budget).dearest)

    def seconds(self, members: Members, budget: float) -> tuple[float, float]:
        tally = self._tally([], members, budget)
        return tally.seconds, tally.sigma

    def line(self, ticket: Seen) -> tuple[float | None, float]:
        (one, _), (two, _) = (self.seconds([(ticket, 1.0)] * n, inf) for n in (1, 2))
        fixed = max(0.0, one - max(0.0, two - one))
        return (fixed if self.model.told_apart(ticket) else None), max(0.0, two - one)  # type: ignore[arg-type]

    def charge(self, ticket: Seen, units: float) -> float:
        return self.model.marginal(ticket, units)  # type: ignore[arg-type]

    def fixed(self, ticket: Seen) -> float:
        return self.model.fixed(ticket)  # type: ignore[arg-type]

    def remaining(self, ticket: Seen) -> float:
        return self.model.remaining(ticket)  # type: ignore[arg-type]

    def share(self, ticket: Seen, flush: FlushPolicy) -> float:
        return self.model.share(ticket, flush.max_batch_cost, flush.max_batch_size)  # type: ignore[arg-type]

    def learn(self, members: Members, stage: str, elapsed: float) -> None:
        self.model.observe(_Batch(dict(members), stage), elapsed)  # type: ignore[arg-type]

    def ended(self, ticket: Seen) -> None:
        self.model.settled(ticket)  # type: ignore[arg-type]


# -- how many to wait for --------------------------------------------------------------------------------------------


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


# -- who is waited for -------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> float:
    """Interquartile range."""
    found, n = sorted(values), len(values)
    return found[3 * n // 4] - found[n // 4] if n else inf


def thoughts(waits: Sequence[Due]) -> float:
    """Expected number of clients, of those predicted by their think times."""
    return sum(share for _, share, _, by_think in waits if by_think)


# -- the model -------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """One group as the oracle sees it."""

    name: str
    flush: FlushPolicy
    meter: Units
    capacity: int = 1000
    cap: int = 0
    weight: float = 1.0
    latest_only: bool = False
    share_room: bool = False
    promote_after: float = 1.0
    pool: float | None = None  # units of memory
    there: float = 0.0  # of what a ticket wants, already done at entry
    max_queued_units: float = inf
    max_queued_seconds: float = inf
    displace_background: bool = False
    adapting: Adapting | None = None
    device_time: float = 0.0
    per_item: float = 0.0
    counters: dict[Hashable, float] = field(default_factory=dict)
    rest: float = 0.0
    device_times: dict[Hashable, float] = field(default_factory=dict)  # of partitions, virtual
    device_rest: float = 0.0
    rooms: dict[Hashable | None, int | None] = field(default_factory=dict)  # None: of the whole group
    was_held: dict[Hashable, bool] = field(default_factory=dict)
    free_from: dict[Hashable, float] = field(default_factory=dict)  # of what is held: since when the device was free
    holds: dict[Hashable, float] = field(default_factory=dict)  # promised, until the next input
    left: list[Seen] = field(default_factory=list)
    merging: tuple[Hashable, float] = (None, -inf)  # the partition that waits for another group, until when
    merge_again: float = -inf
    answers: list[tuple[Hashable, float, bool]] = field(default_factory=list)  # client, when, answered (else it came)
    probes: list[Seen] = field(default_factory=list)  # those let in although the estimate says they cannot make it
    renewed: list[tuple[Hashable, float, float]] = field(default_factory=list)  # shape or kind, when, seconds it took
    suspects: dict[Hashable, list[Trial]] = field(default_factory=dict)
    served: int = 0
    offenders: dict[Hashable, int] = field(default_factory=dict)  # clients, and how many were answered when they failed
    shared: list[bool] = field(default_factory=list)  # of clients that were no offenders: which request failed alone

    def most(self) -> float:
        """How many may share a call: as many as succeed as likely as not, at the share of guilty ones lately."""
        share = 0.0
        for guilty in self.shared:
            share = share + (1.0 - share) / 32 if guilty else share - share / 32
            share = 0.0 if share < 2.0**-10 else share
        return max(1.0, log(2.0) / share // 1.0) if share else inf


@dataclass(eq=False)
class Origin:
    """A batch whose call failed, and all that is known of who made it fail."""

    pending: int = 0
    served: bool = False
    guilty: bool = False


@dataclass(eq=False)
class Trial:
    """Members of a call that failed, to run together again."""

    grants: list[tuple[Seen, float]]
    origin: Origin
    other: Trial | None = None
    fails: bool = False


@dataclass
class Expected:
    """A batch the oracle expects."""

    id: int
    group: str
    partition: Hashable
    stage: str
    cause: str
    cost: float
    expected: float
    grants: list[tuple[Seen, float]]
    admitted: list[Seen]
    left: list[Seen]
    short_of: str = ""
    cached: dict[Seen, float] = field(default_factory=dict)
    trial: Trial | None = None
    crashed: bool = False


@dataclass
class Stepped:
    """A step of a group with memory, as far as it is decided."""

    base: list[tuple[Seen, float]] = field(default_factory=list)
    entered: list[tuple[Seen, float]] = field(default_factory=list)
    thrown_out: list[Seen] = field(default_factory=list)
    cached: dict[Seen, float] = field(default_factory=dict)
    stage: str | None = None
    memory_short: bool = False
    passed_over: bool = False
    short_of: str = ""

    def runs(self, ticket: Seen) -> bool:
        return any(ticket is t for t, _ in self.base)


class Oracle:
    def __init__(self, worlds: Sequence[World], max_batches: int = 1) -> None:
        self.worlds = {w.name: w for w in worlds}
        self.max_batches = max_batches
        self.all: list[Seen] = []  # those that may run or have run, in that order
        self.open: list[Seen] = []  # of those, all that have not settled
        self.preparing: list[Seen] = []
        self.tickets = 0
        self.in_flight: list[Expected] = []
        self.settled: list[tuple[int, str]] = []  # (seq, result) since last asked
        self.preempted: list[int] = []
        self.pauses: dict[tuple[str, Hashable | None], float] = {}  # None: the whole group
        self.memory: list[tuple[Seen, float]] = []
        self.now = -inf
        self.batches = 0
        self.closed = self.draining = False
        self.quiet = False  # next_batch found nothing and nothing came since
        self.held_until = inf
        self.free_since = -inf

    # -- views, all computed from the list of those that have not settled ----------------------------------------------

    def unsettled(self, group: str, partition: Hashable = ..., client: Hashable = ...) -> list[Seen]:
        return [
            t
            for t in self.open
            if t.request.group == group
            and (partition is ... or t.request.partition == partition)
            and (client is ... or t.client == client)
        ]

    def waiting(self, group: str, partition: Hashable = ..., client: Hashable = ...) -> list[Seen]:
        return [t for t in self.unsettled(group, partition, client) if t.state == "waiting"]

    def queued(self, group: str, client: Hashable = ...) -> list[Seen]:
        """Those that take a place: they wait, or are prepared."""
        mine = [t for t in self.preparing if t.request.group == group and (client is ... or t.client == client)]
        return self.waiting(group, client=client) + mine

    def partitions(self, group: str) -> list[Hashable]:
        return list(dict.fromkeys(t.request.partition for t in self.unsettled(group)))

    def clients(self, group: str) -> list[Hashable]:
        return list(dict.fromkeys(t.client for t in self.unsettled(group)))

    def used(self) -> float:
        return sum(units for _, units in self.memory)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def input(self, now: float) -> None:
        self.now = max(self.now, now)
        self.quiet = False
        for world in self.worlds.values():
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
            ticket.state = "preparing"
            self.preparing.append(ticket)
        return ticket

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
        request, now = ticket.request, self.now
        if not self.unsettled(w.name):
            peers = [p for p in self.worlds.values() if (p.weight > 0) == (w.weight > 0)]
            busy = [p.device_time for p in peers if p is not w and self.unsettled(p.name)]
            w.device_time = max(w.device_time, min(busy) if busy else max(p.device_time for p in peers))
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
        w.answers.append((ticket.client, now, False))
        if w.adapting is not None:
            others = len(self.unsettled(w.name, request.partition)) - 1
            w.adapting.log.append(("came", request.partition, now, others))

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
        self.preparing.remove(ticket)
        ticket.state = "waiting"
        ticket.seq = self.tickets
        self.tickets += 1
        w = self.worlds[made.group]
        ticket.share = w.meter.share(ticket, w.flush)
        self.enter(w, ticket)

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

    def set_room(self, group: str, n: int | None, now: float, partition: Hashable | None = None) -> None:
        self.input(now)
        self.worlds[group].rooms[partition] = n

    def pause(self, group: str, until: float, now: float, partition: Hashable | None = None) -> None:
        self.input(now)
        for (g, p), end in list(self.pauses.items()):
            if (g, p) == (group, partition) or (g == group and p is not None and end <= now):
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
        w.device_time += (elapsed - batch.expected) / (w.weight or 1.0)
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
                ticket.state, ticket.has_place = "resident", True
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

    def to_blame(self, w: World, batch: Expected, outcomes: Sequence[Outcome]) -> bool:
        """Whether the processor is to blame: nobody was served and no known offender was alone; of a call that failed,
        once all its parts have run, nobody was served or nobody was guilty."""
        lost = [isinstance(o, Failed) for o in outcomes]
        if isinstance(outcomes[0], Apart):
            return False
        if batch.trial is None:
            client = batch.grants[0][0].client
            return all(lost) and not (len(lost) == 1 and w.offenders.get(client, inf) < w.served)
        origin = batch.trial.origin
        origin.pending -= 1
        origin.guilty |= any(lost)
        origin.served |= not all(lost)
        if not all(lost) and batch.trial.other is not None:
            batch.trial.other.fails = True
        return origin.pending == 0 and (not origin.served or not origin.guilty)

    def isolate(self, w: World, batch: Expected) -> None:
        """A call that failed: its members stay, to run again in two halves."""
        origin = Origin() if batch.trial is None else batch.trial.origin
        origin.pending -= batch.trial is not None
        self.halve(w, batch.partition, list(batch.grants), origin)
        for ticket, units in batch.grants:
            ticket.recomputed += units
            ticket.state, ticket.has_place = "resident", True
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

    def settle(self, ticket: Seen, result: str) -> None:
        assert ticket.state != "settled"
        w = self.worlds[ticket.request.group]
        if ticket.state == "preparing":
            self.preparing.remove(ticket)
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
            if result == "ok":
                w.answers.append((ticket.client, self.now, True))
            w.rest = max(w.rest, w.counters[ticket.client])
        if not self.unsettled(w.name, ticket.request.partition):
            w.device_rest = max(w.device_rest, w.device_times[ticket.request.partition])
        self.settled.append((ticket.seq, result))

    # -- questions ---------------------------------------------------------------------------------------------------

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

    def wake_at(self) -> float:
        times = [t.deadline for t in [*self.open, *self.preparing] if t.state in ("preparing", "waiting", "resident")]
        times += self.pauses.values()
        if len(self.in_flight) < self.max_batches:
            times.append(self.held_until if self.quiet else self.now)
        return min(times, default=inf)

    # -- who ---------------------------------------------------------------------------------------------------------

    def groups_in_order(self) -> list[World]:
        """By device time over weight; weight 0 only when no other group has anything that does not run."""
        ready = [
            w
            for w in self.worlds.values()
            if self.unsettled(w.name) and self.pauses.get((w.name, None), -inf) <= self.now
        ]
        if any(w.weight > 0 and any(t.state != "running" for t in self.unsettled(w.name)) for w in ready):
            ready = [w for w in ready if w.weight > 0]
        return sorted(ready, key=lambda w: w.device_time)

    def partitions_in_order(self, w: World) -> list[Hashable]:
        """Urgent first; then the one with the least device time if it waited long; then those whose deadline is at
        risk, least laxity first, unless they are far ahead of that one; then by device time. If equal, oldest first."""
        here = {p: [t for t in self.unsettled(w.name, p) if t.state != "running"] for p in self.partitions(w.name)}
        here = {p: some for p, some in here.items() if some and (w.name, p) not in self.pauses}
        if not here:
            return []
        oldest = {p: min(some, key=lambda t: t.seq) for p, some in here.items()}
        urgent = [p for p in here if any(t.state == "waiting" and t.tier is Priority.URGENT for t in here[p])]
        by_share = sorted(here, key=lambda p: (w.device_times[p], oldest[p].seq))
        patient = [p for p in by_share[:1] if self.now >= oldest[p].arrived + w.promote_after]
        least = min(w.device_times[p] for p in self.partitions(w.name))
        at_risk = []
        for p in here:
            tightest = min(here[p], key=lambda t: t.deadline)
            if w.meter.in_seconds and tightest.deadline < inf and w.device_times[p] <= least + 0.1:
                laxity = tightest.deadline - self.now - w.meter.remaining(tightest)
                at_risk += [(laxity, oldest[p].seq, p)] if laxity < w.flush.max_batch_cost else []
        pressing = [p for _, _, p in sorted(at_risk, key=lambda found: found[:2])]
        return list(dict.fromkeys([*sorted(urgent, key=lambda p: oldest[p].seq), *patient, *pressing, *by_share]))

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
        with the least virtual time, the older one if equal."""
        open_ = [t for t in waiting if t.client not in blocked]
        if not open_:
            return None
        tier = min(t.tier for t in open_)
        firsts: dict[Any, Seen] = {}
        for ticket in sorted((t for t in open_ if t.tier is tier), key=lambda t: t.seq):
            firsts.setdefault((ticket.client, ticket.request.priority), ticket)
        return min(firsts.values(), key=lambda t: (w.counters[t.client] + charged.get(t.client, 0.0), t.seq))

    # -- forming -----------------------------------------------------------------------------------------------------

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

    def places(self, w: World, partition: Hashable) -> tuple[int, int | None]:
        """Free resident places, and how many may enter at all, None for any number."""
        placed = [t for t in self.unsettled(w.name, partition) if t.has_place]
        rooms = [room for room in (w.rooms.get(partition), w.rooms.get(None)) if room is not None]
        return w.flush.max_batch_size - len(placed), min(rooms, default=None)

    def shares(self, w: World, partition: Hashable) -> dict[Hashable, int] | None:
        """Places each client may still take, when others wait beside residents."""
        placed = [t for t in self.unsettled(w.name, partition) if t.has_place]
        clients = {t.client for t in self.waiting(w.name, partition)}
        if not placed or len(clients) < 2:
            return None
        even = ceil(w.flush.max_batch_size / len(self.clients(w.name)))
        return {c: even - len([p for p in placed if p.client == c]) for c in clients}

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

    # -- forming where there is memory ---------------------------------------------------------------------------------

    def step_with_memory(self, w: World, partition: Hashable) -> tuple[Stepped, bool]:
        """The step, and whether all places are taken. Those that wait one by one, in serving order; before each the
        residents that are no less urgent than its priority; at last all other residents."""
        s = Stepped()
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

    def victims(self, among: list[Seen], s: Stepped, nothing_runs: bool) -> list[Seen]:
        """Those that may be thrown out, in order: held first, then the lowest tier, then the newest; of those that hold
        more than they lost the last time, then the others, but these only when nothing runs."""
        found = [t for t in among if not s.runs(t) and (t.computed > t.lost or nothing_runs)]
        return sorted(found, key=lambda t: (t.computed > t.lost, t.held, t.tier, t.seq), reverse=True)

    def throw_out(self, s: Stepped, victim: Seen) -> None:
        self.memory = [(t, u) for t, u in self.memory if t is not victim]
        s.thrown_out.append(victim)

    def held_by(self, tickets: list[Seen]) -> float:
        return sum(u for t, u in self.memory if t in tickets)

    def let_step(self, w: World, partition: Hashable, s: Stepped, tier: int) -> None:
        """The residents of one tier."""
        assert w.pool is not None
        able = [t for t in self.present(w, partition, s) if t.tier == tier and not t.held]
        for ticket in sorted(able, key=lambda t: (t.wants > 1.0, t.seq)):
            if ticket in s.thrown_out or len(s.base) + len(s.entered) >= w.flush.max_batch_size:
                continue
            s.stage = ticket.stage if s.stage is None else s.stage
            units = w.meter.room(s.base, s.entered, ticket, w.flush.max_batch_cost)
            if ticket.stage != s.stage or units <= 0.0:
                continue
            if self.used() + units > w.pool:
                alone = not s.base and not s.entered
                mine = (ticket.held, ticket.tier, ticket.seq)
                behind = [t for t in self.present(w, partition, s) if (t.held, t.tier, t.seq) > mine]
                victims = self.victims(behind, s, alone)
                if self.used() - self.held_by(victims) + units > w.pool:
                    victims = self.victims([ticket], s, alone)
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
        todo = [t for t in over if not t.held and t.tier > reached]
        victims = self.victims(over, s, not s.base and not s.entered and not todo)
        if s.memory_short and not over:
            return "memory", True
        if (free <= 0 and not victims) or len(s.base) + len(s.entered) >= w.flush.max_batch_size:
            return "places", True
        if room is not None and len(s.entered) >= room:
            return "room", True
        if not over and shares is not None and shares[ticket.client] <= 0:
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

    # -- when ----------------------------------------------------------------------------------------------------------

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
            cause = "single_request_over_budget"
        elif w.pool is None and len(batch) == len(joining) == 1 and joining[0][0].client in w.offenders:
            cause = "apart"
        elif joining and (cost >= budget * (1 - NEARLY) or passed_over):
            cause = "budget_reached"
        elif joining and size_reached:
            cause = "size_reached"
        elif any(t.tier is Priority.URGENT for t, _ in joining):
            cause = "urgent"
        elif base:
            cause = "step"
        elif self.draining:
            cause = "drain"
        else:
            cause = "timeout" if w.was_held.get(partition) else "idle"
        short_of = "stage" if len(joining) < len(members) else short_of
        made = self.schedule(w, partition, batch, [t for t, _ in joining], cost_of, cause)
        made.short_of = short_of if self.waiting(w.name, partition) else ""
        made.cached = cached
        return made

    def enters_first(self, w: World, base: Members, entering: Members) -> bool:
        takes = w.meter.fixed(entering[0][0]) + sum(w.meter.charge(t, 1.0) for t, _ in entering)
        for ticket, _ in base:
            late = self.now + takes + w.meter.remaining(ticket) > ticket.deadline
            if ticket.deadline < inf and not ticket.request.streams and late:
                return False
        fixed, each = w.meter.fixed(base[0][0]), w.meter.charge(base[0][0], 1.0)

        def stepped(left: dict[Seen, float], at: float) -> dict[Seen, float]:
            """When each of them ends, step by step."""
            ends = {t: at for t, steps in left.items() if steps <= 0}
            left = {t: steps - 1 for t, steps in left.items() if steps > 0}
            return ends | (stepped(left, at + fixed + each * len(left)) if left else {})

        old, new = {t: t.wants for t, _ in base}, {t: t.wants - 1 for t, _ in entering}
        join, wait = stepped(old | new, self.now + takes), stepped(old, self.now)
        wait |= stepped(new, max(wait.values()) + takes)
        joined, waited = [end - t.arrived for t, end in join.items()], [end - t.arrived for t, end in wait.items()]
        if sum(joined) >= sum(waited) * (1 - NEARLY) or max(joined) > max(waited) * (1 + NEARLY):
            return False
        return not self.takes_turns(w, w.meter.remaining(entering[0][0]))

    def takes_turns(self, w: World, seconds: float) -> bool:
        """Whether every active client is regular, and all of them fit the device one after the other."""
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
        load, active = 0.0, 0
        for i, client in enumerate(reversed(order)):
            longest = max((max(thinks[c][-32:], default=0.0) for c in order[len(order) - 1 - i :]), default=0.0)
            if client in away and self.now - away[client] > 2 * longest:
                break
            habits = sorted(thinks[client][-32:])
            if len(habits) < 8 or habits[3 * len(habits) // 4] - habits[len(habits) // 4] > seconds / 2:
                return False
            load, active = load + seconds / (seconds + habits[len(habits) // 2]), active + 1
        return active > 0 and load <= 1

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
        fixed = w.meter.fixed(batch[0][0])
        expected = fixed
        for ticket, units in batch:
            charge = w.meter.charge(ticket, units)
            expected += charge
            if ticket not in w.probes:  # the estimate of such a one is in doubt
                w.counters[ticket.client] += (charge + fixed / len(batch)) / ticket.request.weight
            ticket.state = "running"
            ticket.granted += units
        for where in (partition, None):
            if w.rooms.get(where) is not None:
                w.rooms[where] -= len(admitted)  # type: ignore[operator]
        w.was_held[partition] = False
        self.batches += 1
        left, w.left = w.left, []
        expected = expected if w.meter.in_seconds else 0.0
        w.device_time += expected / (w.weight or 1.0)
        w.device_times[partition] += expected
        made = Expected(
            self.batches, w.name, partition, batch[0][0].stage, cause, cost, expected, list(batch), admitted, left
        )
        self.in_flight.append(made)
        self.quiet = False
        return made

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


Meter = Callable[[], Units]
