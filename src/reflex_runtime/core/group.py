"""A group: a slot or a workload with its own capacity, caps, cost model, weight and pause.

Residents occupy resources between steps (memory blocks, slots). The scheduler reserves before it schedules, commits
when the step succeeded and rolls back when it failed, so a step is a transaction.

A tenant is several groups that take turns as one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Protocol

from reflex_runtime.core.batch import Batch, Cause, Offenders
from reflex_runtime.core.cost import Backlog, CostModel, Evidence, TimeCost
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import Controller, FlushPolicy, Planner
from reflex_runtime.core.order import Clients, ClientShare, LazyHeap, Partition, ShareHolder, Shares, Turns
from reflex_runtime.core.request import BACKGROUND, URGENT, Request, Ticket


class Resources(Protocol):
    """Memory of residents. All methods are called with the scheduler's lock held and must not wait."""

    def fits(self, request: Request) -> bool:
        """Whether the request could run if it were alone; False refuses it with TooLarge."""

    def begin(self, ticket: Ticket) -> float:
        """The ticket is about to enter: claim its cached units; returns the number that need no computing."""

    def reserve(self, ticket: Ticket, units: float) -> bool:
        """Reserve `units` more for the ticket; False if there is no room."""

    def extend(self, ticket: Ticket, units: float, more: float) -> float:
        """Reserve up to `more` units beyond the `units` that were just reserved; returns how many."""

    def would_fit(self, ticket: Ticket, units: float, released: Collection[Ticket]) -> bool:
        """Whether `reserve(ticket, units)` would succeed once these others were released. Changes nothing."""

    def commit(self, batch: Batch) -> None:
        """The step succeeded."""

    def rollback(self, batch: Batch) -> None:
        """The step failed: undo its reservations."""

    def release(self, ticket: Ticket) -> None:
        """The ticket left or was preempted: free everything it holds."""


# -- the group ---------------------------------------------------------------------------------------------------------


IDLE_PARTITIONS = 256
USUAL = 1.0 / 32.0  # weight of a batch in the usual size
CHEAPER, DEARER = 0.75, 1.25  # cost over its price, beyond which the price changes
KINDS = 1024  # kinds of requests whose prices are kept


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of a group.

    capacity: most waiting tickets; beyond it QueueFull.
    max_queued_units: most units (tokens, steps) that waiting tickets may want together; beyond it QueueFull. An empty
        queue admits any ticket. It bounds the wait if requests differ in length.
    max_queued_seconds: most predicted device seconds that may wait ahead of a request, in its priority or an earlier
        one; beyond it QueueFull, unless its client has less than its even share of them waiting. Unmeasured work
        counts as 0. Background work neither counts nor is refused.
    max_in_flight_per_client: most unsettled tickets per client, 0 for no cap.
    weight: share of device time against other groups; 0 runs only when nothing else waits.
    tenant: groups of one tenant take turns as one group of their weight, which is the same for all of them, and share
        its turns evenly; "" is a group by itself.
    gap_chance: for groups of weight 0: a batch starts only if, with this probability, no other group has a new request
        before it ends, at their present rate. 0 starts at any time.
    latest_only: a newer request of a client replaces its waiting older ones.
    share_room: whether a request replaces, in a full queue, the newest one of the client with most waiting, if that has
        at least two more. Otherwise the client with the highest rate fills the queue.
    displace_background: whether an urgent request takes the place of the newest waiting background one in a full queue.
    promote_after: seconds after which background work counts as default; half its time limit when that is set.
    cost, resources, controller: made once per group.
    """

    name: str = "default"
    flush: FlushPolicy = field(default_factory=lambda: FlushPolicy.window(0.100))
    capacity: int = 1000
    max_in_flight_per_client: int = 0
    weight: float = 1.0
    tenant: str = ""
    gap_chance: float = 0.0
    latest_only: bool = False
    share_room: bool = False
    promote_after: float = 1.0
    cost: Callable[[], CostModel] = TimeCost
    resources: Resources | None = None
    controller: Controller | None = None
    max_queued_units: float = inf
    max_queued_seconds: float = inf
    displace_background: bool = False

    def __post_init__(self) -> None:
        gap_fits = 0.0 <= self.gap_chance < 1.0 and (self.gap_chance == 0.0 or self.weight == 0.0)
        for name, good, rule in (
            ("capacity", self.capacity >= 1, ">= 1 tickets"),
            ("max_queued_units", self.max_queued_units > 0, "> 0 units"),
            ("max_queued_seconds", self.max_queued_seconds > 0, "> 0 seconds"),
            ("max_in_flight_per_client", self.max_in_flight_per_client >= 0, ">= 0"),
            ("weight", self.weight >= 0 and isfinite(self.weight), "finite and >= 0"),
            ("gap_chance", gap_fits, "in [0, 1), and needs weight 0"),
            ("promote_after", self.promote_after >= 0, ">= 0 seconds"),
        ):
            if not good:
                raise ConfigError(f"GroupConfig.{name}={getattr(self, name)!r}: must be {rule}")
        if self.gap_chance and self.resources is not None:
            raise ConfigError("GroupConfig.gap_chance: a group with resources cannot be put off")
        if self.flush.times_fixed and not isinstance(self.controller, Planner):
            raise ConfigError("FlushPolicy.times_fixed: needs a group whose controller is a Planner")
        holds = (*self.flush.hold_max, self.flush.returns, self.flush.shed)
        if self.resources is not None and any(holds):
            raise ConfigError("GroupConfig.resources: needs a flush policy without holds and shedding (every_step)")


class Tenant(Shares):
    """Groups that take turns as one; active ones have tickets that may run. counter: device time over its weight.

    number: its place among others of the same counter. peers: that it shares with.
    """

    def __init__(self, name: str, weight: float, number: int, peers: Shares) -> None:
        super().__init__(peers)
        self.name, self.weight, self.number = name, weight, number


class Group(ShareHolder):
    """The state of one group. Only the scheduler and `forming` touch it."""

    def __init__(self, config: GroupConfig, tenant: Tenant) -> None:
        super().__init__()  # counter: its device time over its weight
        self.config = config
        self.tenant = tenant
        self.name = config.name
        self.cost = config.cost()
        self.evidence = Evidence()
        self.clients = Clients()
        self._prices: dict[Hashable, float] = {}
        self.offenders = Offenders()
        flush = config.flush
        self.turns = Turns(self.cost, flush.max_batch_cost)
        self.partitions: dict[Hashable, Partition] = {}
        self._idle: OrderedDict[Partition, None] = OrderedDict()  # of those, without tickets; the longest idle first
        self.active: dict[Hashable, Partition] = {}  # those with unsettled tickets
        self.preparing: dict[Hashable, dict[Ticket, None]] = {}  # admitted but not ready to run, by client
        self.queued = 0  # tickets that wait or are prepared
        self.queued_units = 0.0  # units that those want
        self.backlog = Backlog()  # seconds of those, if they are bounded
        self.unsettled = 0
        self.paused_until = -inf
        self.room: int | None = None  # newcomers that may still enter; None when unlimited
        self.budget = flush.max_batch_cost  # of the batch that was formed last
        self.usual_size = 0.0  # of its batches, a slow mean
        self.seconds_per_item = 0.0
        self.left: list[Ticket] = []  # residents gone since the last batch
        self.promotions: LazyHeap[Ticket, float] = LazyHeap()  # background tickets by the time they count as default
        self.promoted = 0
        self.steps = False  # whether a request has ever come back for another step

    def partition(self, key: Hashable) -> Partition:
        """The partition, made if it is new."""
        found = self.partitions.get(key)
        if found is None:
            found = self.partitions[key] = Partition(key, self.promotions)
            self._rest(found)
        return found

    def _rest(self, partition: Partition) -> None:
        """The partition is idle. Forget the one that has been idle longest if there are too many."""
        self._idle[partition] = None
        if len(self._idle) > IDLE_PARTITIONS:
            oldest = next(iter(self._idle))
            if oldest.paused_until == -inf:
                del self._idle[oldest], self.partitions[oldest.key]
            else:
                self._idle.move_to_end(oldest)  # its settings are kept; another is forgotten next time

    def enter(self, ticket: Ticket, now: float) -> None:
        """An admitted ticket joins its queue."""
        request = ticket.request
        partition = self.active.get(request.partition)
        if partition is None:
            if not self.active:
                self.tenant.enter(self)
            partition = self.active[request.partition] = self.partition(request.partition)
            self._idle.pop(partition, None)
            self.turns.shares.enter(partition)
        partition.unsettled[ticket] = None
        partition.append(ticket, self.clients.enter(request.client))
        if ticket.deadline < inf:
            partition.deadlines.push(ticket.deadline, ticket)
            if now + self.cost.remaining(ticket) > ticket.deadline:  # admitted all the same
                self.evidence.probe(ticket)
        if ticket.tier is BACKGROUND:
            self._age(ticket)
        self.turns.came(partition)
        if self.config.controller is not None:
            self.config.controller.arrived(ticket, now)
        self._count(ticket)
        self.unsettled += 1

    def prepare(self, ticket: Ticket) -> None:
        """Count an admitted ticket that cannot run yet; it only takes a place."""
        self.preparing.setdefault(ticket.request.client, {})[ticket] = None
        self._count(ticket)
        self.unsettled += 1

    def end_preparing(self, ticket: Ticket) -> None:
        """Free the place of `prepare`: the ticket enters now, or has ended."""
        client = ticket.request.client
        tickets = self.preparing[client]
        del tickets[ticket]
        if not tickets:
            del self.preparing[client]
        self.dequeue((ticket,))
        self.unsettled -= 1

    def unsettled_of(self, client: Hashable) -> int:
        """The client's tickets that have not ended."""
        known = self.clients.get(client)
        return (0 if known is None else known.unsettled) + len(self.preparing.get(client, ()))

    def to_displace(self, request: Request, now: float) -> Ticket | None:
        """In a full queue: the waiting ticket that this request replaces, if any."""
        found = None
        if self.config.displace_background and request.priority is URGENT:
            self.promote(now)  # a ticket that counts as default by now is not displaced
            queued = (ticket for p in self.active.values() for ticket in p.tiers[BACKGROUND].tickets)
            found = max(queued, key=lambda ticket: ticket.seq, default=None)
        if found is None and self.config.share_room:
            found = self._newest_of_most(request.client)
        return found

    def _newest_of_most(self, client: Hashable) -> Ticket | None:
        """The newest ticket of the client with most waiting, if this client may take its place.

        Looks at every ticket that waits; of several clients with as many, the newest ticket gives way.
        """
        waiting = [t for partition in self.active.values() for tier in partition.tiers for t in tier.tickets]
        counts = Counter(ticket.request.client for ticket in waiting)
        most = max(counts.values(), default=0)
        if most < counts[client] + 2:
            return None
        return max((t for t in waiting if counts[t.request.client] == most), key=lambda ticket: ticket.seq)

    def began(self, batch: Batch, partition: Partition) -> None:
        """The batch was started: charge its clients and its partition."""
        kinds: set[tuple[Hashable, Hashable]] = set()
        model, evidence, n = self.cost, self.evidence, len(batch)
        expected, marginal = model.fixed(next(iter(batch.grants))), 0.0
        kind: object = None  # of the ticket before: usually all are of one
        price: float | None = None
        for ticket, units in batch.grants.items():
            request = ticket.request
            same, kind = kind, (request.shape, ticket.stage, request.cost_class, request.wants, units)
            if kind != same:
                marginal, price = model.marginal(ticket, units), None
                kinds.add((request.shape, request.cost_class))
            expected += marginal
            if evidence.pending and evidence.probes(ticket):
                batch.notes["probe"] = True  # its estimate may be wrong: it is charged its measured time when it ends
                continue
            if price is None:
                price = self.price(ticket, units, marginal, n, batch.cause)
            ticket.queue.client.counter += price / request.weight
        if model.unit == "seconds":
            evidence.scheduled(batch, kinds)
            batch.expected, batch.guessed = expected, not model.remaining(ticket)
        self.charge(partition, batch.expected)
        self.usual_size += (n - self.usual_size) * (USUAL if self.usual_size else 1.0)

    def take(self, batch: Batch) -> None:
        """The tickets that enter with the batch stop waiting."""
        self.dequeue(batch.admitted, sum(batch.cached.values()))
        if self.room is not None:
            self.room -= len(batch.admitted)

    def leave(self, ticket: Ticket, partition: Partition, answered: bool, now: float) -> bool:
        """A ticket settled; it has already stopped waiting. `settled` follows. Returns whether its client has no
        other."""
        if partition.residents:
            partition.residents.pop(ticket, None)
        del partition.unsettled[ticket]
        if self.evidence.pending and self.evidence.probes(ticket):
            self.evidence.settled(ticket, answered, now)
        client: ClientShare = ticket.queue.client
        self.clients.leave(client, now)
        self.unsettled -= 1
        return client.unsettled == 0 and client.key not in self.preparing

    def settled(self, partition: Partition) -> None:
        """Tickets of the partition have left."""
        self.turns.touched[partition] = None
        if not partition.unsettled:
            del self.active[partition.key]
            self.turns.shares.leave(partition)
            partition.clear()
            self._rest(partition)
            if not self.active:
                self.tenant.leave(self)

    def requeue(self, ticket: Ticket) -> None:
        """A resident was preempted: it waits again, first of its client."""
        partition = self.active[ticket.request.partition]
        partition.requeue(ticket)
        self.turns.touched[partition] = None
        if ticket.tier is BACKGROUND:
            self._age(ticket)
        self._count(ticket)

    def _count(self, ticket: Ticket) -> None:
        self.queued += 1
        self.queued_units += ticket.wants
        if self.config.max_queued_seconds < inf:
            self.backlog.add(ticket, ticket.seconds or self.seconds_of(ticket))  # admission may have computed them

    def seconds_of(self, ticket: Ticket) -> float:
        """Device seconds that a waiting ticket counts for in the backlog: its share of a full batch of its kind."""
        return self.cost.share(ticket, self.budget, self.config.flush.max_batch_size)

    def dequeue(self, tickets: Collection[Ticket], cached: float = 0.0) -> None:
        """Tickets stopped waiting. cached: units that they wanted, but that were found computed."""
        self.queued -= len(tickets)
        units = sum([ticket.wants for ticket in tickets]) + cached
        self.queued_units = self.queued_units - units if self.queued else 0.0  # no rounding is carried on
        self.backlog.remove(tickets)

    def _age(self, ticket: Ticket) -> None:
        """Note when a background ticket counts as default."""
        limit = ticket.request.time_limit
        promote_at = ticket.arrived + min(self.config.promote_after, inf if limit is None else 0.5 * limit)
        if promote_at < inf:
            self.promotions.push(promote_at, ticket)

    def promote(self, now: float) -> None:
        """Count background tickets that waited long enough as default."""
        while (top := self.promotions.first()) is not None and top[0] <= now:
            partition = self.active[top[1].request.partition]
            self.promoted += partition.promote(top[1])
            self.turns.touched[partition] = None

    def price(self, ticket: Ticket, units: float, marginal: float, size: int, cause: Cause) -> float:
        """The charge of a client of weight 1 for these units: their cost in a batch of the usual size, because it did
        not choose that this one is small, and at least its part of a call made for it alone."""
        fixed, request = self.cost.fixed(ticket), ticket.request
        kind = (request.shape, ticket.stage, request.cost_class, units)
        price = self.steady_price(kind, marginal + fixed / (self.usual_size or size))
        return max(price, marginal + fixed / size) if cause is Cause.APART else price

    def steady_price(self, kind: Hashable, cost: float) -> float:
        """The cost of a kind of request, as it was when its estimate last changed by more than a quarter. If it falls,
        earlier charges are worth less, by its part of the kinds.

        Equal requests with different charges overtake each other by whole rounds (128 callers on one core: p99 496
        instead of 398 ms; 250 at the start: up to six seconds).
        """
        known = self._prices.get(kind, 0.0)
        if not CHEAPER * known <= cost <= DEARER * known:
            if cost < known:
                self.clients.shrink((cost / known) ** (1.0 / len(self._prices)))
            if len(self._prices) >= KINDS:
                self._prices.clear()
            known = self._prices[kind] = cost
        return known

    def charge(self, partition: Partition, seconds: float) -> None:
        """Charge device seconds to the partition; a negative number corrects an earlier charge."""
        virtual = seconds / (self.config.weight or 1.0)
        self.tenant.charge(self, virtual)
        self.turns.shares.charge(partition, seconds)
        self.turns.touched[partition] = None

    def ran(self, seconds: float) -> None:
        """Learn from requests that ended: the device seconds of each, all steps together."""
        known = self.seconds_per_item
        self.seconds_per_item = seconds if known == 0.0 else known + 0.1 * (seconds - known)

    def drain_time(self) -> float:
        """Predicted seconds until all waiting tickets have run."""
        return self.queued * self.seconds_per_item

    def superseded_by(self, request: Request) -> list[Ticket]:
        """Waiting tickets of the same client, which a newer request replaces."""
        client = self.clients.get(request.client)
        waiting = [] if client is None else [t for queue in client.queues.values() for t in queue.tickets]
        return [*self.preparing.get(request.client, ()), *sorted(waiting, key=lambda ticket: ticket.seq)]

    def crashed(self, partition: Partition, batch: Batch, failed: int, faults: int) -> bool:
        """Whether a batch counts as a crash of the processor, not as the fault of a member.

        faults: of the failed members, those that were in the call; the others had left when it began.
        """
        part = batch.part
        if part is None:
            known = len(batch) == 1 and self.offenders.others_answered(next(iter(batch.grants)).request.client)
            return faults > 0 and failed == len(batch) and not known
        origin = part.origin
        origin.pending -= 1
        origin.served = origin.served or failed < len(batch)
        if faults < len(batch):
            partition.suspects.succeeded(part)
        return origin.pending == 0 and not origin.served

    def describe(self, now: float) -> dict[str, Any]:
        """The group's state, for diagnostics; the scheduler adds how many tickets wait."""
        return {
            "preparing": sum(map(len, self.preparing.values())),
            "residents": sum(len(p.residents) for p in self.active.values()),
            "unsettled": self.unsettled,
            "clients": len(self.clients),
            "partitions": len(self.active),
            "promoted": self.promoted,
            "paused": self.paused_until > now,
            "seconds_per_item": self.seconds_per_item,
            "max_batch_cost": self.budget,
            "queued_seconds": self.backlog.seconds,
        }


# -- tenants -----------------------------------------------------------------------------------------------------------


def tenants_of(configs: Iterable[GroupConfig]) -> list[Tenant]:
    """The tenant of each group. Those of weight 0 share the time that the others leave."""
    made: dict[Hashable, Tenant] = {}
    shares = {True: Shares(), False: Shares()}
    found = []
    for config in configs:
        new = Tenant(config.tenant, config.weight, len(made), shares[config.weight > 0.0])
        tenant = made.setdefault(config.tenant or new, new)
        if tenant.weight != config.weight:
            raise ConfigError(
                f"GroupConfig.weight={config.weight!r}: is {tenant.weight!r} in another group of tenant {tenant.name!r}"
            )
        found.append(tenant)
    return found


def turns_of(groups: Iterable[Group], now: float, in_flight: Collection[Batch]) -> list[Group]:
    """Groups as they take turns: least device time over weight, of the tenant, then their own; weight 0 only when
    nothing else waits."""
    ready = [g for g in groups if g.active and g.paused_until <= now]
    if len(ready) > 1:
        if any(g.config.weight > 0.0 and _waits(g, in_flight) for g in ready):
            ready = [g for g in ready if g.config.weight > 0.0]
        ready.sort(key=lambda g: (g.tenant.counter, g.tenant.number, g.counter))
    return ready


def _waits(group: Group, in_flight: Collection[Batch]) -> bool:
    """Whether the group has anything that does not run."""
    return group.unsettled > sum(len(batch) for batch in in_flight if batch.group == group.name)
