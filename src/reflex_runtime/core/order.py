"""Who goes first: partitions, priority tiers, fair shares between clients.

A group has clients (their counters run across all its partitions) and partitions; a partition has three tiers; a tier
has one first-in-first-out queue per client and serves the client with the smallest counter, of equals the oldest.
Clients that come once are equals.

Shares. Clients share a device fairly, and so do partitions, groups and tenants. Each member has a counter: the device
time or cost it was charged, over its weight. The smallest counter is next. A member that becomes active starts at the
smallest active counter, so idle time earns no credit. If the device was idle, it starts at the largest counter of those
that left, so using an idle device costs nothing. Counters grow, so a stale entry of a heap is too small, and is
corrected when it comes to the front: most charges touch no heap.

Turns. Of a group's partitions, the next turn is for

1. partitions where an urgent ticket waits, the one with the oldest ticket first;
2. partitions with a deadline at risk, least laxity first, as long as they are within their share of device time;
3. all partitions by device time, the one with the oldest ticket first where it is equal.

A deadline is at risk if another partition's batch could make it late. A partition is within its share up to `CREDIT`
above the least device time of an active one. So deadlines come first within a share, and no partition waits longer than
its share explains. (Without it six partitions lose 1.7 %; it stays because the contract promises it.)

All orders are heaps that change only with a partition's own tickets: it is put into `touched`, and the next decision
updates the heaps. A turn costs O(log partitions), however many tickets wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from math import inf
from typing import Generic, TypeVar

from reflex_runtime.core.batch import Suspects
from reflex_runtime.core.cost import CostModel
from reflex_runtime.core.request import BACKGROUND, DEFAULT, RUNNING, URGENT, Priority, Ticket

T = TypeVar("T", bound=Hashable)
Place = tuple[float, int]
K = TypeVar("K", float, Place, tuple[float, float, int])

FEW = 8  # stale entries that may stay, however few valid ones there are
SORTED = 256  # entries that are sorted at once; of more they come off the heap one by one
AT_ONCE = 256  # touched partitions; with more of them every arrival refreshes the heaps


class LazyHeap(Generic[T, K]):
    """Smallest key first; `discard` is O(1), `first` and `push` amortised O(log n)."""

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[K, int, T]] = []
        self._entries: dict[T, tuple[K, int, T]] = {}  # the valid one of each item
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        """The items, in no particular order."""
        return iter(self._entries)

    def push(self, key: K, item: T) -> None:
        """Insert the item, or move it to another key. Equal keys leave in order of insertion."""
        heap, entries = self._heap, self._entries
        self._serial += 1
        entry = entries[item] = (key, self._serial, item)
        heappush(heap, entry)
        if len(heap) > FEW + 2 * len(entries):
            self._compact()

    def discard(self, *items: T) -> None:
        """Remove these items if they are in the heap."""
        entries = self._entries
        for item in items:
            entries.pop(item, None)
        if len(self._heap) > FEW + 2 * len(entries):
            self._compact()

    def put(self, item: T, key: K | None) -> None:
        """Set the item's key; None discards it."""
        if key is None:
            self.discard(item)
        elif (entry := self._entries.get(item)) is None or entry[0] != key:
            self.push(key, item)

    def _compact(self) -> None:
        self._heap = list(self._entries.values())
        heapify(self._heap)

    def first(self) -> tuple[K, T] | None:
        """Smallest key and its item, or None."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[0], entry[2]
            heappop(heap)
        return None

    def ascending(self) -> Iterator[tuple[K, T]]:
        """Keys and items in order. Nothing may be pushed or discarded meanwhile; O(log k) for the k-th of them."""
        self.first()
        if len(self._heap) <= SORTED:
            return iter([(key, item) for key, _, item in sorted(self._entries.values())])
        return self._walk()

    def _walk(self) -> Iterator[tuple[K, T]]:
        heap, entries = self._heap, self._entries
        ahead = [(heap[0], 0)] if heap else []  # entries whose parent was passed, with their places in the heap
        while ahead:
            entry, at = heappop(ahead)
            if entries.get(entry[2]) is entry:
                yield entry[0], entry[2]
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(ahead, (heap[child], child))


# -- fair shares -------------------------------------------------------------------------------------------------------


class ShareHolder:
    """A member of a fair share."""

    __slots__ = ("counter",)

    def __init__(self) -> None:
        self.counter = 0.0


class Shares(ShareHolder):
    """The active members. A counter may grow at any time; only `charge` may make it smaller.

    over: shares in which all these members together are one member, or None.
    """

    __slots__ = ("_active", "_over", "_rest")

    def __init__(self, over: Shares | None = None) -> None:
        super().__init__()
        self._active: LazyHeap[ShareHolder, float] = LazyHeap()  # by counters that they have or had
        self._rest = 0.0
        self._over = over

    def __len__(self) -> int:
        return len(self._active)

    def enter(self, member: ShareHolder) -> None:
        if self._over is not None and not self._active:
            self._over.enter(self)
        if member.counter < (floor := self.floor()):
            member.counter = floor
        self._active.push(member.counter, member)

    def leave(self, member: ShareHolder) -> None:
        self._active.discard(member)
        if member.counter > self._rest:
            self._rest = member.counter
        if self._over is not None and not self._active:
            self._over.leave(self)

    def charge(self, member: ShareHolder, amount: float) -> None:
        """Add to an active member's counter. Negative amounts correct an earlier charge."""
        member.counter += amount
        if amount < 0.0:
            self._active.push(member.counter, member)
        if self._over is not None:
            self._over.charge(self, amount)

    def floor(self) -> float:
        """The smallest active counter; when there is none, the largest of those that left."""
        while (top := self._active.first()) is not None:
            counter, member = top
            if counter == member.counter:
                return counter
            self._active.push(member.counter, member)
        return self._rest


# -- partitions, tiers, clients ----------------------------------------------------------------------------------------


IDLE_CLIENTS = 4096  # counters kept of clients without tickets
MAX_PASSED_OVER = 16  # tickets that did not fit and were passed over, per fill


class ClientShare(ShareHolder):
    """A client in a group. counter: in cost units over weight. unsettled: number of its tickets.

    queues: those of its tickets that wait, in any partition, by tier and priority.
    """

    __slots__ = ("key", "queues", "unsettled")

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.key = key
        self.unsettled = 0
        self.queues: dict[tuple[Tier, Priority], ClientQueue] = {}


class Clients:
    """The clients of one group, their counters and caps."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ClientShare] = {}
        self._idle: OrderedDict[Hashable, float] = OrderedDict()  # since when, the longest idle first
        self.shares = Shares()

    def __len__(self) -> int:
        """Clients that have unsettled tickets."""
        return len(self.shares)

    @property
    def left_at(self) -> float:
        """When the latest of the clients without tickets left; -inf if there is none."""
        return next(reversed(self._idle.values()), -inf)

    def get(self, key: Hashable) -> ClientShare | None:
        """The client, if it is known."""
        return self._known.get(key)

    def enter(self, key: Hashable) -> ClientShare:
        """One more ticket of the client."""
        client = self._known.get(key)
        if client is None:
            client = self._known[key] = ClientShare(key)
            self.shares.enter(client)
        elif client.unsettled == 0:
            del self._idle[key]
            self.shares.enter(client)
        client.unsettled += 1
        return client

    def shrink(self, factor: float) -> None:
        """Bring all counters closer together: what was charged is now worth this part of it. All grow."""
        most = max([client.counter for client in self._known.values()])
        for client in self._known.values():
            client.counter = most - (most - client.counter) * factor

    def leave(self, client: ClientShare, now: float) -> None:
        """One ticket of the client settled."""
        client.unsettled -= 1
        if client.unsettled == 0:
            self.shares.leave(client)
            self._idle[client.key] = now
            if len(self._idle) > IDLE_CLIENTS:
                del self._known[self._idle.popitem(last=False)[0]]


class ByArrival(dict[Ticket, None]):
    """Waiting tickets, the oldest first."""

    __slots__ = ()

    @property
    def first(self) -> Ticket | None:
        return next(iter(self), None)

    def add(self, ticket: Ticket) -> None:
        """Add a ticket: at the end, unless it was preempted or promoted."""
        if self and next(reversed(self)).seq > ticket.seq:
            before = sorted((*self, ticket), key=lambda t: t.seq)
            self.clear()
            self.update(dict.fromkeys(before))
        else:
            self[ticket] = None


class ClientQueue:
    """One client's tickets of one priority in one tier of one partition. key: in its client's `queues`."""

    __slots__ = ("client", "key", "tickets", "tier")

    def __init__(self, client: ClientShare, tier: Tier, key: tuple[Tier, Priority]) -> None:
        self.client, self.tier, self.key = client, tier, key
        self.tickets = ByArrival()

    @property
    def place(self) -> Place:
        """Its place in its tier: its client's counter, then the number of its first ticket."""
        return self.client.counter, next(iter(self.tickets)).seq


class Tier:
    """One tier of a partition: its waiting tickets, and its queues by their place.

    The place of a queue grows when its client is charged, so that in the heap may be too small.
    """

    __slots__ = ("queues", "tickets")

    def __init__(self) -> None:
        self.tickets = ByArrival()
        self.queues: LazyHeap[ClientQueue, Place] = LazyHeap()

    def by_place(self) -> Iterator[tuple[Place, ClientQueue]]:
        """The queues by place. Only the first place is exact; others may be too small."""
        queues = self.queues
        while (top := queues.first()) is not None and (place := top[1].place) != top[0]:
            queues.push(place, top[1])
        return queues.ascending()


def in_order(
    partition: Partition, charge: Callable[[Ticket], float], passed_over: Collection[Hashable]
) -> Iterator[Ticket]:
    """A partition's waiting tickets in serving order, while a batch is filled. The partition does not change meanwhile.

    charge: of the latest ticket, if it is granted: its client moves back at once, so that a single fill is fair.
    passed_over: clients whose later tickets must not overtake; it may grow meanwhile. A walk over k tickets costs
    O(k log k), however many wait.
    """
    charged: dict[ClientShare, float] = {}
    for tier in partition.tiers:
        queues = tier.by_place()
        first = next(queues, None)  # of the queues that were not looked into
        # The next tickets of the others, as a heap: place, ticket, its queue, and the tickets that follow in that.
        ahead: list[tuple[Place, Ticket, ClientQueue, Iterator[Ticket]]] = []
        while ahead or first is not None:
            if first is not None and (not ahead or first[0] < ahead[0][0]):
                place, queue = first
                first = next(queues, None)
                rest = iter(queue.tickets)
                ticket = next(rest)
            else:
                place, ticket, queue, rest = heappop(ahead)
            client = queue.client
            if client.key in passed_over:
                continue
            counter = client.counter + charged[client] if client in charged else client.counter
            if place[0] < counter or place[1] < ticket.seq:  # it was charged, or its first ticket left: it comes later
                heappush(ahead, ((counter, ticket.seq), ticket, queue, rest))
                continue
            yield ticket
            follower = next(rest, None)
            if follower is None and len(client.queues) == 1:
                continue  # nothing of its client is left to be charged
            charged[client] = charged.get(client, 0.0) + charge(ticket)
            if follower is not None:
                heappush(ahead, ((client.counter + charged[client], follower.seq), follower, queue, rest))


_EMPTY = Tier()  # shared by all tiers without tickets: most partitions use one of three


class Partition(ShareHolder):
    """Tickets that may share a batch: waiting ones by tier, residents, and all unsettled ones by arrival."""

    def __init__(self, key: Hashable, promotions: LazyHeap[Ticket, float]) -> None:
        """promotions: its group's background tickets by the time they count as default."""
        super().__init__()  # counter: its device time in seconds
        self.key, self._promotions = key, promotions
        self.tiers = [_EMPTY, _EMPTY, _EMPTY]
        self.residents: dict[Ticket, None] = {}
        self.suspects = Suspects()
        self.unsettled: dict[Ticket, None] = {}  # tickets, by arrival
        self.deadlines: LazyHeap[Ticket, float] = LazyHeap()  # of waiting and resident tickets that have one
        self.paused_until = -inf
        self.hold_until = -inf  # decided after input number `hold_input`; only `Holding` writes the hold_ fields
        self.hold_input = -1
        self.hold_for = 0  # clients that come before it is decided again
        self.hold_came = False  # whether some of them have
        self.hold_since: float | None = None  # when the device was free for a held batch; None without one

    @property
    def waiting(self) -> int:
        """Tickets that wait."""
        return sum([len(tier.tickets) for tier in self.tiers])

    def contended(self) -> bool:
        """Whether more than one client waits."""
        return len({queue.client for tier in self.tiers for queue in tier.queues}) > 1

    def heads(self) -> list[float | None]:
        """Arrival of each tier's oldest waiting ticket."""
        return [first.arrived if (first := tier.tickets.first) is not None else None for tier in self.tiers]

    def oldest(self) -> Ticket | None:
        """The oldest ticket that waits or is resident."""
        return next((t for t in self.unsettled if t.state is not RUNNING), None)

    def append(self, ticket: Ticket, client: ClientShare) -> None:
        """Queue a ticket among its client's others of the same priority."""
        tier = self.tiers[ticket.tier]
        if tier is _EMPTY:
            tier = self.tiers[ticket.tier] = Tier()
        tier.tickets.add(ticket)
        key = (tier, ticket.request.priority)
        queue = client.queues.get(key)
        if queue is None:
            queue = client.queues[key] = ClientQueue(client, tier, key)
            queue.tickets[ticket] = None
        else:
            queue.tickets.add(ticket)
        ticket.queue = queue
        if next(iter(queue.tickets)) is ticket:
            tier.queues.push((client.counter, ticket.seq), queue)

    def requeue(self, ticket: Ticket) -> None:
        """A preempted ticket goes to the front of its queue."""
        self.residents.pop(ticket, None)
        self.append(ticket, ticket.queue.client)

    def take(self, tickets: Iterable[Ticket]) -> None:
        """Remove waiting tickets, because they run or leave."""
        emptied: list[ClientQueue] = []
        for ticket in tickets:
            queue: ClientQueue = ticket.queue
            del queue.tier.tickets[ticket], queue.tickets[ticket]
            if not queue.tickets:
                emptied.append(queue)
                del queue.client.queues[queue.key]
            if ticket.tier is BACKGROUND:
                self._promotions.discard(ticket)
        for tier in {queue.tier for queue in emptied}:
            tier.queues.discard(*emptied)

    def promote(self, due: Ticket) -> int:
        """Count a background ticket as default, with its client's older ones. Returns how many."""
        elders = [*takewhile(lambda ticket: ticket is not due, due.queue.tickets), due]
        for ticket in elders:
            self.take((ticket,))
            ticket.tier = DEFAULT
            self.append(ticket, ticket.queue.client)
        return len(elders)

    def clear(self) -> None:
        """Drop all entries of an empty partition's queues."""
        for tier in self.tiers:
            if tier is not _EMPTY:
                tier.queues = LazyHeap()  # stale entries refer to queues, and those to their tier: a reference cycle
        self.tiers = [_EMPTY, _EMPTY, _EMPTY]
        self.suspects.clear()
        self.deadlines = LazyHeap()


# -- turns of partitions -----------------------------------------------------------------------------------------------


CREDIT = 0.100  # seconds of device time that deadlines at risk may take ahead of a partition's share
NEAREST = 16  # partitions with the earliest deadlines, of which those at risk are taken


class Turns:
    """The active partitions of one group.

    budget: cost of the longest batch another partition may run, in the cost model's unit.
    touched: partitions whose tickets, device time or pause have changed.
    """

    def __init__(self, cost: CostModel, budget: float) -> None:
        self._cost, self._budget = cost, budget
        self.shares = Shares()
        self.touched: dict[Partition, None] = {}
        # Those that could take a turn, by share; those where an urgent ticket waits have a share of -inf.
        self._by_share: LazyHeap[Partition, tuple[float, int]] = LazyHeap()
        self._deadlines: LazyHeap[Partition, float] = LazyHeap()  # the earliest of each

    def came(self, partition: Partition) -> None:
        """A ticket has come. Many new partitions are sorted in as they come, not all at once in the next decision."""
        self.touched[partition] = None
        if len(self.touched) > AT_ONCE:
            self._refresh()

    def expires_at(self) -> float:
        """The earliest deadline of a waiting or resident ticket; inf when none has one."""
        if self.touched:
            self._refresh()
        return top[0] if (top := self._deadlines.first()) is not None else inf

    def first_to_expire(self) -> Ticket:
        return _first(_first(self._deadlines).deadlines)

    def in_order(self, now: float) -> Iterator[Partition]:
        """The partitions that could take a turn, each once, in the order above."""
        self._refresh()
        if len(self._by_share) == 1:
            top = self._by_share.first()
            assert top is not None
            yield top[1]
            return
        seen: set[Partition] = set()
        at_risk = self._at_risk(now)
        for (share, _), partition in self._by_share.ascending():
            some = [partition] if share == -inf else [*at_risk, partition]
            at_risk = at_risk if share == -inf else []
            for one in some:
                if one not in seen:
                    seen.add(one)
                    yield one

    def _at_risk(self, now: float) -> list[Partition]:
        if self._cost.unit != "seconds":
            return []
        most = self.shares.floor() + CREDIT
        found: list[tuple[float, int, Partition]] = []
        for _, partition in islice(self._deadlines.ascending(), NEAREST):
            tightest, oldest = _first(partition.deadlines), partition.oldest()
            if oldest is None or partition not in self._by_share or partition.counter > most:
                continue
            laxity = tightest.deadline - now - self._cost.remaining(tightest)
            if laxity < self._budget:
                found.append((laxity, oldest.seq, partition))
        return [partition for _, _, partition in sorted(found)]

    def _refresh(self) -> None:
        touched = self.touched
        while touched:
            partition, _ = touched.popitem()
            oldest = partition.oldest() if partition.paused_until == -inf else None
            first = partition.deadlines.first()
            share = -inf if partition.tiers[URGENT].tickets else partition.counter
            self._by_share.put(partition, None if oldest is None else (share, oldest.seq))
            self._deadlines.put(partition, None if first is None else first[0])


def _first(heap: LazyHeap[T, float]) -> T:
    """The first of a heap that is not empty."""
    top = heap.first()
    assert top is not None
    return top[1]
