"""vLLM's queue of waiting requests in the core's order: by priority, then the client that was served least.

The core's own tiers keep a client's tickets in a dict, which is made anew when one comes back that is older than the
last. vLLM passes over requests and puts them back at every step, so here a client's are a heap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from reflex_runtime.core.order import Clients, ClientShare, LazyHeap
from reflex_runtime.vllm.entry import Entry

Order = tuple[float, int]  # when a request arrived at vLLM, of several front ends, and then here
ClientPlace = tuple[float, float, int]  # a client's counter, and the order of its first request
Requests = LazyHeap[Entry, Order]  # of one client and priority
Tier = LazyHeap[ClientShare, ClientPlace]  # the clients of one priority; their places may be too small


class FairQueue(RequestQueue):  # type: ignore[misc]
    """entries: of every request that is in the system, by its id; clients: theirs.

    taken: what clients were charged for requests that were popped, until the step is known.
    """

    def __init__(self, entries: Mapping[str, Entry], clients: Clients) -> None:
        self._entries, self._clients = entries, clients
        self._waiting: dict[tuple[int, ClientShare], Requests] = {}
        self._tiers: dict[int, Tier] = {}
        self.taken: dict[ClientShare, float] = {}
        self._queued: dict[str, Entry] = {}

    def add_request(self, request: Request) -> None:
        """Also one that was preempted or passed over: among those of its client it stands where it came."""
        entry = self._entries[request.request_id]
        key = request.priority, entry.client
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = LazyHeap()
        waiting.push((request.arrival_time, entry.seq), entry)
        self._queued[request.request_id] = entry
        self._place(*key)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        return self._first().own

    def pop_request(self) -> Request:
        """Its client moves back at once by what it asks for, so that one step is fair as well."""
        entry = self._first()
        self._remove(entry)
        asked = float(entry.own.num_tokens)
        self.taken[entry.client] = self.taken.get(entry.client, 0.0) + asked
        entry.client.counter += asked
        return entry.own

    def settle(self) -> None:
        """The step is known, and its members were charged what they got."""
        for client, asked in self.taken.items():
            self.give_back(client, asked)
        self.taken.clear()

    def give_back(self, client: ClientShare, tokens: float) -> None:
        """Correct an earlier charge. Places in heaps may be too small, never too large."""
        self._clients.shares.charge(client, -tokens)
        for priority in self._tiers:
            self._place(priority, client)

    def remove_request(self, request: Request) -> None:
        self._remove(self._queued[request.request_id])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Those of them that wait here."""
        for request in requests:
            entry = self._queued.get(request.request_id)
            if entry is not None:
                self._remove(entry)

    def __len__(self) -> int:
        return len(self._queued)

    def __bool__(self) -> bool:
        return bool(self._queued)

    def __iter__(self) -> Iterator[Request]:
        """Tier by tier, client by client."""
        for priority in sorted(self._tiers):
            for _, client in list(self._tiers[priority].ascending()):
                yield from [entry.own for _, entry in self._waiting[priority, client].ascending()]

    def _first(self) -> Entry:
        if not self._tiers:
            raise IndexError("the queue is empty")
        priority = min(self._tiers)
        tier = self._tiers[priority]
        while True:
            top = tier.first()
            assert top is not None
            place, client = top
            now, entry = self._head(priority, client)
            if now == place:
                return entry
            tier.push(now, client)

    def _head(self, priority: int, client: ClientShare) -> tuple[ClientPlace, Entry]:
        top = self._waiting[priority, client].first()
        assert top is not None
        order, entry = top
        return (client.counter, *order), entry

    def _place(self, priority: int, client: ClientShare) -> None:
        """Put the client where it belongs in a tier, if it waits there."""
        if (priority, client) in self._waiting:
            tier = self._tiers.get(priority)
            if tier is None:
                tier = self._tiers[priority] = LazyHeap()
            tier.put(client, self._head(priority, client)[0])

    def _remove(self, entry: Entry) -> None:
        priority, client = entry.own.priority, entry.client
        waiting = self._waiting[priority, client]
        waiting.discard(entry)
        del self._queued[entry.id]
        if waiting:
            self._place(priority, client)
            return
        del self._waiting[priority, client]
        self._tiers[priority].discard(client)
        if not self._tiers[priority]:
            del self._tiers[priority]
