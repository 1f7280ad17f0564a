"""Who goes first: partitions, priority tiers, fair shares between clients.

A group has clients (their virtual counters run across all its partitions) and partitions; a partition has three tiers;
a tier has one first-in-first-out queue per client and serves the client with the smallest counter, then the oldest
head.
Counters only ever grow, so a stale heap entry is too small, surfaces early and is put right when it does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf

from reflex_runtime.core.heap import LazyHeap
from reflex_runtime.core.rate import Rate
from reflex_runtime.core.request import Priority, Ticket, TicketState

IDLE_CLIENTS = 4096  # counters remembered of clients that have nothing in the system
MAX_PASSED_OVER = 16  # tickets that did not fit and were passed over, per fill
LINED_UP = 256  # queues up to which a walk sorts them all: cheaper than taking each off the heap and putting it back


class Client:
    """Whoever has a share. counter: virtual time in cost units over weight. unsettled: its tickets in the system."""

    __slots__ = ("counter", "key", "unsettled")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.counter = 0.0
        self.unsettled = 0


class Clients:
    """The clients of one group, their counters and caps."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Client] = OrderedDict()
        self._active: LazyHeap[Client] = LazyHeap()
        self._rest = 0.0  # where whoever comes to an idle device starts: having had it to oneself is nobody's debt

    def __len__(self) -> int:
        """Clients that have something in the system."""
        return len(self._active)

    def get(self, key: Hashable) -> Client:
        """The client's record, made if it is new."""
        client = self._known.get(key)
        if client is None:
            client = self._known[key] = Client(key)
        return client

    def unsettled(self, key: Hashable) -> int:
        """Tickets the client has in the system."""
        client = self._known.get(key)
        return 0 if client is None else client.unsettled

    def enter(self, client: Client) -> None:
        """One more ticket of the client. A returning client is lifted to the active minimum: no banked credit."""
        if client.unsettled == 0:
            client.counter = max(client.counter, self.floor())
            self._active.push(client.counter, client)
            self._known.move_to_end(client.key)
        client.unsettled += 1

    def leave(self, client: Client) -> None:
        """One ticket of the client settled."""
        client.unsettled -= 1
        if client.unsettled == 0:
            self._active.discard(client)
            self._rest = max(self._rest, client.counter)
            if len(self._known) > IDLE_CLIENTS + len(self._active):
                self._evict()

    def charge(self, client: Client, units: float) -> None:
        """Add to the client's counter."""
        client.counter += units

    def floor(self) -> float:
        """The smallest counter of an active client; when there is none, the largest of those that left."""
        while (top := self._active.first()) is not None:
            key, client = top
            if key == client.counter:
                return key
            self._active.push(client.counter, client)
        return self._rest

    def _evict(self) -> None:
        """Forget the client that has been idle longest."""
        idle = next((k for k, c in self._known.items() if c.unsettled == 0), None)
        if idle is not None:
            del self._known[idle]


class ClientQueue:
    """One client's tickets of one priority in one tier of one partition, in order of arrival.

    entry: its valid entry in the tier's heap, (counter, seq of the head, queue), or None; other entries are garbage.
    """

    __slots__ = ("client", "entry", "tickets")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.entry: Entry | None = None

    @property
    def head(self) -> Ticket:
        """The ticket that leaves next."""
        return next(iter(self.tickets))


Entry = tuple[float, int, ClientQueue]


class Tier:
    """One tier of a partition."""

    __slots__ = ("_heap", "_queues", "oldest")

    def __init__(self) -> None:
        self._queues: dict[tuple[Hashable, Priority], ClientQueue] = {}
        self._heap: list[Entry] = []
        self.oldest: LazyHeap[Ticket] = LazyHeap()

    def append(self, ticket: Ticket, client: Client) -> None:
        """Queue a ticket among its client's others of the same priority, in order of arrival."""
        key = (client.key, ticket.request.priority)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ClientQueue(client)
        youngest = next(reversed(queue.tickets), ticket)
        queue.tickets[ticket] = None
        if youngest.seq > ticket.seq:  # it was preempted and goes back before those that came after it
            elders = list(takewhile(lambda t: t.seq < ticket.seq, queue.tickets))
            for t in (ticket, *reversed(elders)):
                queue.tickets.move_to_end(t, last=False)
        self.oldest.push(ticket.seq, ticket)
        if queue.entry is None or queue.head is ticket:
            self.open(queue)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands."""
        queue = self.queue_of(ticket)
        del queue.tickets[ticket]
        self.oldest.discard(ticket)
        if not queue.tickets:
            queue.entry = None
            del self._queues[(queue.client.key, ticket.request.priority)]

    def queue_of(self, ticket: Ticket) -> ClientQueue:
        """The queue a waiting ticket stands in."""
        return self._queues[(ticket.request.client, ticket.request.priority)]

    def queues(self) -> Iterable[ClientQueue]:
        """The queues that hold tickets, at most one per client and priority."""
        return self._queues.values()

    def waiting_of(self, client: Hashable) -> list[Ticket]:
        """The client's tickets in this tier."""
        found = (self._queues.get((client, priority)) for priority in Priority)
        return [ticket for queue in found if queue is not None for ticket in queue.tickets]

    def open(self, queue: ClientQueue) -> None:
        """Enter a queue with its present counter and head."""
        queue.entry = (queue.client.counter, queue.head.seq, queue)
        heappush(self._heap, queue.entry)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._queues):  # garbage of cancelled tickets
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapify(self._heap)

    def first(self) -> Entry | None:
        """The entry of the client to be served next."""
        heap = self._heap
        while heap:
            entry = heap[0]
            counter, seq, queue = entry
            if queue.entry is entry:
                if counter == queue.client.counter and seq == queue.head.seq:
                    return entry
                heappop(heap)
                self.open(queue)  # stale: put it where it belongs
            else:
                heappop(heap)
        return None

    def line_up(self) -> list[Entry] | None:
        """Its queues in serving order, the first at the end; None when they are too many to sort for one batch."""
        if len(self._queues) > LINED_UP:
            return None
        return sorted([(q.client.counter, next(iter(q.tickets)).seq, q) for q in self._queues.values()], reverse=True)

    def pop(self) -> None:
        """Take the first entry off the heap; `open` its queue again afterwards."""
        heappop(self._heap)[2].entry = None


class Cursor:
    """Walks a partition's waiting tickets in serving order while a batch is filled.

    What a client was provisionally granted moves it back at once, so that one fill is already fair. Nothing changes in
    the partition until the scheduler takes tickets out; `close` puts the heap entries back.
    """

    def __init__(self, partition: Partition) -> None:
        self._tiers = partition.tiers
        self._index = 0
        self._line = self._tiers[0].line_up()  # of the tier at hand; None: its heap is walked instead
        self._opened: list[ClientQueue] = []  # off their tier's heap for now
        self._ahead: list[tuple[float, int, Ticket, ClientQueue, Iterator[Ticket]]] = []
        self._charged: dict[Client, float] = {}
        self._blocked: set[Client] = set()
        self._current: tuple[Ticket, ClientQueue, Iterator[Ticket]] | None = None

    def next(self) -> Ticket | None:
        """The next ticket in order, or None at the end."""
        while self._index < len(self._tiers):
            while (found := self._best(self._tiers[self._index])) is not None:
                if found[1].client not in self._blocked:
                    self._current = found
                    return found[0]
            self.close()
            self._index += 1
            if self._index < len(self._tiers):
                self._line = self._tiers[self._index].line_up()
        return None

    def take(self, charge: float) -> None:
        """The ticket returned last is granted: its client moves back by `charge`."""
        assert self._current is not None
        _, queue, rest = self._current
        charged = self._charged[queue.client] = self._charged.get(queue.client, 0.0) + charge
        follower = next(rest, None)
        if follower is not None:
            heappush(self._ahead, (queue.client.counter + charged, follower.seq, follower, queue, rest))

    def skip(self) -> None:
        """The ticket returned last does not fit: its client's later tickets may not overtake it."""
        assert self._current is not None
        self._blocked.add(self._current[1].client)

    def close(self) -> None:
        """Put everything back."""
        for queue in self._opened:
            if queue.tickets:
                self._tiers[self._index].open(queue)
        self._opened.clear()
        self._ahead.clear()

    def _best(self, tier: Tier) -> tuple[Ticket, ClientQueue, Iterator[Ticket]] | None:
        """The first of those still in the tier's line or heap and those already moved back in this fill."""
        line = self._line
        while True:
            top = tier.first() if line is None else line[-1] if line else None
            if top is None or (self._ahead and self._ahead[0][:2] < top[:2]):
                if not self._ahead:
                    return None
                counter, seq, ticket, queue, rest = heappop(self._ahead)
                moved = queue.client.counter + self._charged.get(queue.client, 0.0)
                if counter == moved:
                    return ticket, queue, rest
                heappush(self._ahead, (moved, seq, ticket, queue, rest))  # its client has another queue in this tier
                continue
            queue = top[2]
            if line is None:
                tier.pop()
                self._opened.append(queue)
            else:
                line.pop()
            rest = iter(queue.tickets)
            ticket = next(rest)
            charged = self._charged.get(queue.client)
            if charged is None:
                return ticket, queue, rest
            heappush(self._ahead, (queue.client.counter + charged, ticket.seq, ticket, queue, rest))


class Partition:
    """Requests that may share a batch: the waiting ones by tier, the residents, and every unsettled one by arrival."""

    __slots__ = (
        "arrivals",
        "deadlines",
        "hold_epoch",
        "hold_until",
        "key",
        "paused_until",
        "promotions",
        "residents",
        "room",
        "tiers",
        "unsettled",
        "usual_limit",
        "was_held",
    )

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.tiers = (Tier(), Tier(), Tier())
        self.residents: OrderedDict[Ticket, None] = OrderedDict()
        self.unsettled: OrderedDict[Ticket, None] = OrderedDict()
        self.deadlines: LazyHeap[Ticket] = LazyHeap()  # of waiting and resident tickets that have one
        self.promotions: LazyHeap[Ticket] = LazyHeap()  # background tickets by the time they count as default
        self.paused_until = -inf
        self.room: int | None = None  # newcomers that may still enter; None when unlimited
        self.arrivals = Rate()
        self.usual_limit = 0.0  # slow mean of the time limits asked for, seconds; 0 when none was
        self.hold_until = -inf  # decided at input number `hold_epoch`; stands until the next input
        self.hold_epoch = -1
        self.was_held = False  # since its last batch

    @property
    def waiting(self) -> int:
        """Tickets that wait."""
        tiers = self.tiers
        return len(tiers[0].oldest) + len(tiers[1].oldest) + len(tiers[2].oldest)

    def contended(self) -> bool:
        """Whether more than one client waits."""
        first: Client | None = None
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
        return next((t for t in self.unsettled if t.state is not TicketState.RUNNING), None)

    def append(self, ticket: Ticket, client: Client, promote_at: float) -> None:
        """A new ticket."""
        self.unsettled[ticket] = None
        self.tiers[ticket.tier].append(ticket, client)
        if ticket.deadline < inf:
            self.deadlines.push(ticket.deadline, ticket)
        if ticket.tier is Priority.BACKGROUND and promote_at < inf:
            self.promotions.push(promote_at, ticket)

    def requeue(self, ticket: Ticket, client: Client, promote_at: float) -> None:
        """A preempted ticket goes to the front of its queue."""
        self.residents.pop(ticket, None)
        self.tiers[ticket.tier].append(ticket, client)
        if ticket.tier is Priority.BACKGROUND and promote_at < inf:
            self.promotions.push(promote_at, ticket)

    def take(self, ticket: Ticket) -> None:
        """A waiting ticket stops waiting."""
        self.tiers[ticket.tier].remove(ticket)
        self.promotions.discard(ticket)

    def promote(self, now: float, client_of: Callable[[Ticket], Client]) -> int:
        """Background tickets that waited long enough count as default, with their client's elders. Returns how many."""
        moved = 0
        while (top := self.promotions.first()) is not None and top[0] <= now:
            due = top[1]
            queue = self.tiers[Priority.BACKGROUND].queue_of(due)
            for ticket in list(queue.tickets):
                self.take(ticket)
                ticket.tier = Priority.DEFAULT
                self.tiers[Priority.DEFAULT].append(ticket, client_of(ticket))
                moved += 1
                if ticket is due:
                    break
        return moved

    def queue_of(self, ticket: Ticket) -> ClientQueue:
        """The queue a waiting ticket stands in."""
        return self.tiers[ticket.tier].queue_of(ticket)

    def waiting_of(self, client: Hashable) -> list[Ticket]:
        """The client's waiting tickets."""
        return [ticket for tier in self.tiers for ticket in tier.waiting_of(client)]

    def forget(self, ticket: Ticket) -> None:
        """The ticket settled."""
        self.unsettled.pop(ticket, None)
        self.residents.pop(ticket, None)
        self.deadlines.discard(ticket)
