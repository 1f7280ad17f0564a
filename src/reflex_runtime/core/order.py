"""Who goes first: partitions, priority tiers, fair shares between clients.

A group has clients (their virtual counters run across all its partitions) and partitions; a partition has three tiers;
a tier has one first-in-first-out queue per client and serves the client with the smallest counter. Clients that come
once have equal ones, and owe nothing: of equals the earliest deadline goes first (`Ticket.due`), then the oldest. With
limits of 60, 100 and 300 ms in bursts it brings 7 % of the answers on time, with limits for every second request 4 %.
Counters only ever grow, so a stale heap entry is too small, surfaces early and is put right when it does.

Virtual time: clients, and partitions, share a device fairly. Each member has a counter: the device time or cost it was
charged, over its weight. The smallest counter is next. A member that becomes active starts at the smallest active
counter, so idle time earns no credit. If the device was idle, it starts at the largest counter of those that left, so
using an idle device costs nothing.

Counters grow, so a stale entry of the heap is too small, surfaces early and is put right when it does: most charges
touch no heap.

Turns. Of a group's partitions, the next turn is for

1. partitions where an urgent ticket waits, the one with the oldest ticket first;
2. partitions with a deadline at risk, least laxity first, as long as they are within their share of device time;
3. all partitions by device time, the one with the oldest ticket first where it is equal.

A deadline is at risk if another partition's batch could make it late. A partition is within its share up to `CREDIT`
above the least device time of an active one. So deadlines come first within a share, and no partition waits longer than
its share explains.

All orders are heaps that change only with a partition's own tickets: `touched` has the partition, and the next question
updates the heaps. A turn costs O(log partitions), however many wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf
from typing import Generic, Protocol, TypeVar

from reflex_runtime.core.batch import Suspects
from reflex_runtime.core.cost import CostModel
from reflex_runtime.core.request import BACKGROUND, DEFAULT, RUNNING, SETTLED, URGENT, Priority, Ticket

T = TypeVar("T", bound=Hashable)
K = TypeVar("K", float, tuple[float, int])

FEW = 8  # dead entries that may stay however few live
AT_ONCE = 256  # partitions that one question looks at; with more of them every arrival does its part


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

    def push(self, key: K, item: T) -> None:
        """Insert the item, or move it to another key. Equal keys leave in order of insertion."""
        self._serial += 1
        entry = self._entries[item] = (key, self._serial, item)
        heappush(self._heap, entry)
        if len(self._heap) > FEW + 2 * len(self._entries):
            self._compact()

    def discard(self, item: T) -> None:
        """Forget the item if it is there."""
        if self._entries.pop(item, None) is not None and len(self._heap) > FEW + 2 * len(self._entries):
            self._compact()

    def put(self, item: T, key: K | None) -> None:
        """Set the item's key; None discards it."""
        entry = self._entries.get(item)
        if key is None:
            if entry is not None:
                self.discard(item)
        elif entry is None or entry[0] != key:
            self.push(key, item)

    def _compact(self) -> None:
        entries = self._entries
        self._heap = [entry for entry in self._heap if entries.get(entry[2]) is entry]
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

    def pop(self) -> tuple[K, T] | None:
        """Remove and return the first."""
        top = self.first()
        if top is not None:
            heappop(self._heap)
            del self._entries[top[1]]
        return top

    def ascending(self) -> Iterator[T]:
        """Items in order of key. Nothing may be pushed or discarded meanwhile; O(log k) for the k-th of them."""
        self.first()
        heap, entries = self._heap, self._entries
        ahead = [(heap[0], 0)] if heap else []  # those whose parents have come, with their places
        while ahead:
            entry, at = heappop(ahead)
            if entries.get(entry[2]) is entry:
                yield entry[2]
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(ahead, (heap[child], child))


# -- virtual time ------------------------------------------------------------------------------------------------------


CHEAPER, DEARER = 0.75, 1.25  # of a price: what changes it
KINDS = 1024  # whose prices are kept


class ShareHolder(Protocol):
    """A member of a fair share: a client or a partition.

    standing: its valid entry in the heap, None while it is not active; other entries are garbage.
    """

    counter: float
    standing: Standing | None


Standing = tuple[float, int, ShareHolder]


class Shares:
    """The active members. Amortised O(log active).

    The counter of a member may grow at any time. Only `charge` may make it smaller.
    """

    __slots__ = ("_active", "_heap", "_rest", "_serial")

    def __init__(self) -> None:
        self._active = 0
        self._heap: list[Standing] = []  # (a counter that a member has or had, a number that no other has, the member)
        self._serial = 0
        self._rest = 0.0

    def __len__(self) -> int:
        return self._active

    def enter(self, member: ShareHolder) -> None:
        floor = self.floor()
        if member.counter < floor:
            member.counter = floor
        self._active += 1
        self._push(member)

    def leave(self, member: ShareHolder) -> None:
        self._active -= 1
        member.standing = None
        if member.counter > self._rest:
            self._rest = member.counter

    def charge(self, member: ShareHolder, amount: float) -> None:
        """Add to an active member's counter. Negative amounts correct an earlier charge."""
        member.counter += amount
        if amount < 0.0:
            self._push(member)

    def floor(self) -> float:
        """The smallest active counter; when there is none, the largest of those that left."""
        heap = self._heap
        while heap:
            entry = heap[0]
            counter, serial, member = entry
            if member.standing is not entry:
                heappop(heap)
            elif member.counter == counter:
                return counter
            else:
                member.standing = (member.counter, serial, member)
                heapreplace(heap, member.standing)
        return self._rest

    def _push(self, member: ShareHolder) -> None:
        self._serial += 1
        member.standing = (member.counter, self._serial, member)
        heappush(self._heap, member.standing)
        if len(self._heap) > FEW + 2 * self._active:
            self._heap = [entry for entry in self._heap if entry[2].standing is entry]
            heapify(self._heap)


class Prices:
    """What requests are charged: their cost in a batch of the usual size, as it was when it last changed by more than a
    quarter.

    Not their part of the batch they were in: a client did not choose that it was small. And not each estimate: equal
    requests with slightly different charges overtake each other by a whole round (128 callers on one core: p99 593
    instead of 397 ms).
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, float] = {}

    def of(self, kind: Hashable, cost: float) -> float:
        """The price of a request of this kind, that costs so much by the present estimate."""
        known = self._known.get(kind, 0.0)
        if not CHEAPER * known <= cost <= DEARER * known:
            if len(self._known) >= KINDS:
                self._known.clear()
            known = self._known[kind] = cost
        return known


# -- partitions, tiers, clients ----------------------------------------------------------------------------------------


IDLE_CLIENTS = 4096  # counters kept of clients without tickets
MAX_PASSED_OVER = 16  # tickets that did not fit and were passed over, per fill
LINED_UP = 256  # most waiting tickets that are sorted for one batch


class ClientShare:
    """A client in a group. counter: virtual time in cost units over weight. unsettled: number of its tickets.

    queues: those of its tickets that wait, in any partition, by tier and priority. standing: for `Shares`.
    """

    __slots__ = ("counter", "key", "queues", "standing", "unsettled")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.counter = 0.0
        self.unsettled = 0
        self.queues: dict[tuple[Tier, Priority], ClientQueue] = {}
        self.standing: Standing | None = None

    def waiting(self) -> list[Ticket]:
        """Its tickets that wait, in no particular order."""
        return [ticket for queue in self.queues.values() for ticket in queue]


class Clients:
    """The clients of one group, their counters and caps."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ClientShare] = {}
        self._idle: OrderedDict[Hashable, float] = OrderedDict()  # since when, the longest idle first
        self.shares = Shares()

    def __len__(self) -> int:
        """Clients that have something in the system."""
        return len(self.shares)

    @property
    def left_at(self) -> float:
        """When the last one left of those that have nothing in the system; -inf if there is none."""
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

    def leave(self, client: ClientShare, now: float) -> None:
        """One ticket of the client settled."""
        client.unsettled -= 1
        if client.unsettled == 0:
            self.shares.leave(client)
            self._idle[client.key] = now
            if len(self._idle) > IDLE_CLIENTS:
                del self._known[self._idle.popitem(last=False)[0]]


class ClientQueue:
    """One client's tickets of one priority in one tier of one partition, in order of arrival.

    The tickets are linked by their `elder` and `younger`: most clients wait with one, and need no container for it.
    head, last: that leaves next, and that came last; None once all have left.
    entry: its valid entry in the tier's heap, (counter, due and seq of the head, queue), or None; others are garbage.
    """

    __slots__ = ("client", "entry", "head", "last", "waiting")

    def __init__(self, client: ClientShare, ticket: Ticket) -> None:
        self.client = client
        self.entry: Entry | None = None
        self.head: Ticket | None = ticket
        self.last: Ticket | None = ticket
        self.waiting = 1  # tickets
        ticket.queue = self

    def __lt__(self, other: ClientQueue) -> bool:
        return False  # entries that agree up to here are of one ticket, and all but one of them garbage

    def __iter__(self) -> Iterator[Ticket]:
        ticket = self.head
        while ticket is not None:
            yield ticket
            ticket = ticket.younger

    @property
    def newest(self) -> Ticket:
        """The ticket that came last."""
        assert self.last is not None
        return self.last

    def insert(self, ticket: Ticket) -> None:
        """Add one more ticket behind those that came before it: at the end, unless it was preempted."""
        last = self.last
        assert last is not None
        if last.seq < ticket.seq:
            last.younger, ticket.elder = ticket, last
            self.last = ticket
        else:
            younger = next(t for t in self if t.seq > ticket.seq)
            self._link(younger.elder, ticket)
            self._link(ticket, younger)
        ticket.queue = self
        self.waiting += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove the ticket from any place in the queue."""
        self._link(ticket.elder, ticket.younger)
        ticket.elder = ticket.younger = None
        self.waiting -= 1

    def _link(self, elder: Ticket | None, younger: Ticket | None) -> None:
        if elder is None:
            self.head = younger
        else:
            elder.younger = younger
        if younger is None:
            self.last = elder
        else:
            younger.elder = elder


Entry = tuple[float, float, int, ClientQueue]


class ByArrival:
    """The waiting tickets of a tier, oldest first. Nearly all enter in that order; those that left are forgotten late.

    A ticket's `line` is the one it waits in.
    """

    __slots__ = ("_line", "_returned", "waiting")

    def __init__(self) -> None:
        self._line: deque[Ticket] = deque()  # those that entered in order, and some that have left
        self._returned: list[tuple[int, Ticket]] = []  # a heap of the others: preempted or promoted
        self.waiting = 0  # tickets

    def push(self, ticket: Ticket) -> None:
        ticket.line = self
        self.waiting += 1
        line = self._line
        if not line or line[-1].seq <= ticket.seq:
            line.append(ticket)
        else:
            heappush(self._returned, (ticket.seq, ticket))

    def tidy(self) -> None:
        """Forget those that left the line: a ticket leaves it with `line` None, and one less in `waiting`."""
        line, returned = self._line, self._returned
        while line and line[0].line is not self:
            line.popleft()
        while returned and returned[0][1].line is not self:
            heappop(returned)
        if len(line) + len(returned) > FEW + 2 * self.waiting:
            here = {t for t in (*line, *(t for _, t in returned)) if t.line is self}
            self._line = deque(sorted(here, key=lambda t: t.seq))
            self._returned = []

    def first(self) -> tuple[int, Ticket] | None:
        """The oldest and its number, or None."""
        line, returned = self._line, self._returned
        if returned and not (line and line[0].seq < returned[0][0]):
            return returned[0]
        return (line[0].seq, line[0]) if line else None


class Tier:
    """One tier of a partition."""

    __slots__ = ("_heap", "_open", "oldest")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._open = 0  # queues that hold tickets
        self.oldest = ByArrival()

    def append(self, ticket: Ticket, client: ClientShare) -> None:
        """Queue a ticket among its client's others of the same priority, in order of arrival."""
        key = (self, ticket.request.priority)
        queue = client.queues.get(key)
        self.oldest.push(ticket)
        if queue is None:
            queue = client.queues[key] = ClientQueue(client, ticket)
            self._open += 1
            self.open(queue)
        else:
            queue.insert(ticket)
            if queue.head is ticket:
                self.open(queue)

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket from any place; `tidy` of `oldest` follows, once for many."""
        queue: ClientQueue = ticket.queue
        ticket.line = None
        self.oldest.waiting -= 1
        if queue.waiting > 1:
            queue.remove(ticket)
            assert queue.entry is not None
            assert queue.head is not None
            if queue.head.due < queue.entry[1]:  # an entry may only be too small
                self.open(queue)
            return
        queue.head = queue.last = queue.entry = None
        self._open -= 1
        del queue.client.queues[(self, ticket.request.priority)]

    def queues(self) -> Iterator[ClientQueue]:
        """The queues that hold tickets, at most one per client and priority, in no particular order."""
        return (entry[3] for entry in self._heap if entry[3].entry is entry)

    def open(self, queue: ClientQueue) -> None:
        """Enter a queue with its present counter and head."""
        assert queue.head is not None
        queue.entry = (queue.client.counter, queue.head.due, queue.head.seq, queue)
        heappush(self._heap, queue.entry)
        if len(self._heap) > FEW + 2 * self._open:  # garbage of cancelled tickets
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapify(self._heap)

    def first(self) -> Entry | None:
        """The entry of the client to be served next."""
        while heap := self._heap:
            entry = heap[0]
            counter, _, seq, queue = entry
            if queue.entry is entry:
                head = queue.head
                if counter == queue.client.counter and head is not None and seq == head.seq:
                    return entry
                heappop(heap)
                self.open(queue)  # stale: put it where it belongs
            else:
                heappop(heap)
        return None

    def entries(self) -> list[Entry]:
        """The heap, whose first entry is valid; of the others some may be garbage or have a counter too small."""
        self.first()
        return self._heap


class Cursor:
    """Walks a partition's waiting tickets in serving order while a batch is filled.

    A provisional grant moves its client back at once, so that a single fill is fair. The partition does not change.
    Only the needed part of a tier's heap is read, so a walk over k tickets costs O(k log k) however many wait.
    """

    def __init__(self, partition: Partition) -> None:
        self._tiers = partition.tiers
        self._index = 0
        # What may come next, as a heap of (counter, due, seq, its queue, where the heap of the tier has it or -1, its
        # ticket if its queue was looked into).
        self._ahead: list[_Step] = []
        self._entries: list[Entry] = self._tiers[0].entries()
        self._see(0)
        self._charged: dict[ClientShare, float] = {}
        self._blocked: set[ClientShare] = set()
        self._current: tuple[ClientQueue, Ticket] | None = None

    @staticmethod
    def fixed_order(partition: Partition) -> list[Ticket] | None:
        """All waiting tickets in serving order, if no client waits twice, so that no grant can change the order.

        Otherwise None, and also if they are too many to sort for one batch: then the walk goes ticket by ticket.
        """
        if partition.waiting > LINED_UP:
            return None
        line: list[Ticket] = []
        clients: set[ClientShare] = set()
        for tier in partition.tiers:
            if not tier.oldest.waiting:
                continue
            heads = []
            for queue in tier.queues():
                client, head = queue.client, queue.head
                if queue.waiting > 1 or client in clients or head is None:
                    return None
                clients.add(client)
                heads.append((client.counter, head.due, head.seq, head))
            heads.sort()
            line += [head for _, _, _, head in heads]
        return line

    def next(self) -> Ticket | None:
        """The next ticket in order, or None at the end."""
        ahead, charged = self._ahead, self._charged
        while True:
            while not ahead:
                if self._index + 1 >= len(self._tiers):
                    return None
                self._index += 1
                self._entries = self._tiers[self._index].entries()
                self._see(0)
            counter, _, seq, queue, at, ticket = heappop(ahead)
            if at >= 0:
                self._see(2 * at + 1)
                self._see(2 * at + 2)
                if queue.entry is not self._entries[at]:
                    continue  # garbage
            if queue.client in self._blocked:
                continue
            if ticket is None:
                ticket = queue.head
                assert ticket is not None
            moved = queue.client.counter + charged.get(queue.client, 0.0)
            if counter < moved or seq < ticket.seq:  # it was charged, or its first ticket left: it comes later
                heappush(ahead, (moved, ticket.due, ticket.seq, queue, -1, ticket))
                continue
            self._current = queue, ticket
            return ticket

    def _see(self, at: int) -> None:
        """One more entry of the tier's heap may come next: its parent has come."""
        if at < len(self._entries):
            heappush(self._ahead, (*self._entries[at], at, None))

    def take(self, charge: float) -> None:
        """Grant the ticket returned last: its client moves back by `charge`."""
        assert self._current is not None
        queue, ticket = self._current
        client = queue.client
        charged = self._charged[client] = self._charged.get(client, 0.0) + charge
        follower = ticket.younger
        if follower is not None:
            heappush(self._ahead, (client.counter + charged, follower.due, follower.seq, queue, -1, follower))

    def skip(self) -> None:
        """Skip the ticket returned last, and its client's later tickets, which must not overtake it."""
        assert self._current is not None
        self._blocked.add(self._current[0].client)


_Step = tuple[float, float, int, ClientQueue, int, Ticket | None]


_EMPTY = Tier()  # shared by all tiers without tickets: most partitions use one of three


class Partition:
    """Tickets that may share a batch: the waiting ones by tier, the residents, and every unsettled one by arrival."""

    __slots__ = (
        "_line",
        "counter",
        "deadlines",
        "hold_came",
        "hold_for",
        "hold_input",
        "hold_since",
        "hold_until",
        "in_flight",
        "key",
        "paused_until",
        "promotions",
        "residents",
        "room",
        "standing",
        "suspects",
        "tiers",
        "unsettled",
    )

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.counter = 0.0  # virtual: its device time in seconds
        self.standing: Standing | None = None  # for `Shares`
        self.tiers = [_EMPTY, _EMPTY, _EMPTY]
        self.residents: dict[Ticket, None] = {}
        self.suspects = Suspects()
        self.unsettled = 0  # tickets
        self._line: deque[Ticket] = deque()  # those, by arrival, and some that have settled
        self.deadlines: LazyHeap[Ticket, float] = LazyHeap()  # of waiting and resident tickets that have one
        self.promotions: LazyHeap[Ticket, float] = LazyHeap()  # background tickets by the time they count as default
        self.paused_until = -inf
        self.room: int | None = None  # newcomers that may still enter; None when unlimited
        self.in_flight = 0  # batches
        self.hold_until = -inf  # decided after input number `hold_input`; these are `Holding`'s
        self.hold_input = -1
        self.hold_for = 0  # clients that are to come before it is decided again
        self.hold_came = False  # whether some of them have
        self.hold_since: float | None = None  # when the device was free for what is held; None otherwise

    @property
    def waiting(self) -> int:
        """Tickets that wait."""
        tiers = self.tiers
        return tiers[0].oldest.waiting + tiers[1].oldest.waiting + tiers[2].oldest.waiting

    def contended(self) -> bool:
        """Whether more than one client waits."""
        first: ClientShare | None = None
        for tier in self.tiers:
            for queue in tier.queues():
                if first is not None and queue.client is not first:
                    return True
                first = queue.client
        return False

    def heads(self) -> list[float | None]:
        """Arrival of each tier's oldest waiting ticket."""
        return [top[1].arrived if (top := tier.oldest.first()) is not None else None for tier in self.tiers]

    def oldest(self) -> Ticket | None:
        """The oldest ticket that waits or is resident."""
        return next((t for t in self._line if t.state is not RUNNING and t.state is not SETTLED), None)

    def tickets(self) -> Iterator[Ticket]:
        """Those that have not settled, by arrival."""
        return (t for t in self._line if t.state is not SETTLED)

    def enter(self, ticket: Ticket, client: ClientShare) -> None:
        self.unsettled += 1
        self._line.append(ticket)
        self._append(ticket, client)

    def forget_settled(self) -> None:
        """Drop the tickets at the front of its line that have settled; all of them, if they are many."""
        line = self._line
        while line and line[0].state is SETTLED:
            line.popleft()
        if len(line) > FEW + 2 * self.unsettled:
            self._line = deque(self.tickets())

    def _append(self, ticket: Ticket, client: ClientShare) -> None:
        tier = self.tiers[ticket.tier]
        if tier is _EMPTY:
            tier = self.tiers[ticket.tier] = Tier()
        tier.append(ticket, client)

    def requeue(self, ticket: Ticket) -> None:
        """A preempted ticket goes to the front of its queue."""
        self.residents.pop(ticket, None)
        self._append(ticket, ticket.queue.client)

    def take(self, ticket: Ticket) -> None:
        """A waiting ticket stops waiting; `tidy` follows, once for many."""
        self.tiers[ticket.tier].remove(ticket)
        if ticket.tier is BACKGROUND:
            self.promotions.discard(ticket)

    def tidy(self) -> None:
        """Forget the tickets that were taken."""
        for tier in self.tiers:
            if tier is not _EMPTY:
                tier.oldest.tidy()

    def promote(self, now: float) -> int:
        """Count background tickets that waited long enough as default, with their client's older ones. Returns how
        many."""
        moved = 0
        while (top := self.promotions.first()) is not None and top[0] <= now:
            due = top[1]
            for ticket in list(due.queue):
                self.take(ticket)
                ticket.tier = DEFAULT
                self._append(ticket, ticket.queue.client)
                moved += 1
                if ticket is due:
                    break
            self.tidy()
        return moved

    def clear(self) -> None:
        """Drop all entries of an empty partition's queues."""
        self.tiers = [_EMPTY, _EMPTY, _EMPTY]
        self._line.clear()
        self.suspects.clear()
        self.deadlines, self.promotions = LazyHeap(), LazyHeap()


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
        # Those that could take a turn, and of them those where an urgent ticket waits.
        self._by_share: LazyHeap[Partition, tuple[float, int]] = LazyHeap()
        self._urgent: LazyHeap[Partition, float] = LazyHeap()
        self._deadlines: LazyHeap[Partition, float] = LazyHeap()  # the earliest of each
        self._promotions: LazyHeap[Partition, float] = LazyHeap()
        self._pauses: LazyHeap[Partition, float] = LazyHeap()

    def came(self, partition: Partition) -> None:
        """A ticket has come. Many new partitions are sorted as they come, and not by the next question all at once."""
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

    def resumes_at(self) -> float:
        """When the next pause of a partition ends; inf when none is paused."""
        self._refresh()
        return top[0] if (top := self._pauses.first()) is not None else inf

    def resume(self, now: float) -> None:
        """End the pauses that are over."""
        self._refresh()
        while (top := self._pauses.first()) is not None and top[0] <= now:
            top[1].paused_until = -inf
            self.touched[top[1]] = None
            self._refresh()

    def promote(self, now: float) -> int:
        """Count background tickets that waited long enough as default. Returns how many."""
        self._refresh()
        moved = 0
        while (top := self._promotions.first()) is not None and top[0] <= now:
            moved += top[1].promote(now)
            self.touched[top[1]] = None
            self._refresh()
        return moved

    def in_order(self, now: float) -> Iterator[Partition]:
        """The partitions that could take a turn, each once, in the order above."""
        self._refresh()
        if len(self._by_share) == 1:
            top = self._by_share.first()
            assert top is not None
            yield top[1]
            return
        seen: set[Partition] = set()
        for some in (self._urgent.ascending(), self._at_risk(now), self._by_share.ascending()):
            for partition in some:
                if partition not in seen:
                    seen.add(partition)
                    yield partition

    def _at_risk(self, now: float) -> list[Partition]:
        if self._cost.unit != "seconds":
            return []
        most = self.shares.floor() + CREDIT
        found: list[tuple[float, int, Partition]] = []
        for partition in islice(self._deadlines.ascending(), NEAREST):
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
            due = partition.promotions.first()
            self._by_share.put(partition, None if oldest is None else (partition.counter, oldest.seq))
            urgent = oldest is not None and partition.tiers[URGENT].oldest.waiting
            self._urgent.put(partition, oldest.seq if oldest is not None and urgent else None)
            self._deadlines.put(partition, None if first is None else first[0])
            self._promotions.put(partition, None if due is None else due[0])
            self._pauses.put(partition, partition.paused_until if partition.paused_until > -inf else None)


def _first(heap: LazyHeap[T, float]) -> T:
    """The first of a heap that is not empty."""
    top = heap.first()
    assert top is not None
    return top[1]
