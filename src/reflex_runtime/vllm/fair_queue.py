"""vLLM's queue of waiting requests in the core's order: by priority, then the client that was served least.

The core keeps a client's tickets in a dict and sorts it when an older ticket returns. vLLM removes requests and puts
them back in every step, so here a client's requests are a heap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from reflex_runtime.core.order import Clients, ClientShare, LazyHeap
from reflex_runtime.vllm.entry import Entry

Order = tuple[float, int]  # when a request arrived at a front end of vLLM, and its number here
Place = tuple[float, float, int]  # priority, counter of the client, number of its first request
Requests = LazyHeap[Entry, Order]  # of one client and priority


class FairQueue(RequestQueue):  # type: ignore[misc]
    """entries: those of all requests in the system, by id. clients: their clients.

    taken: tokens that clients were charged in advance for popped requests, until `settle`.
    """

    def __init__(self, entries: Mapping[str, Entry], clients: Clients) -> None:
        self._entries, self._clients = entries, clients
        self._queued: dict[str, Entry] = {}
        self._waiting: dict[ClientShare, dict[int, Requests]] = {}
        self._places: LazyHeap[tuple[int, ClientShare], Place] = LazyHeap()  # some may be too early, none too late
        self.taken: dict[ClientShare, float] = {}

    def add_request(self, request: Request) -> None:
        """Add a new request, or one that was preempted or skipped: it takes its place by arrival among its client's."""
        entry = self._queued[request.request_id] = self._entries[request.request_id]
        tiers = self._waiting.setdefault(entry.client, {})
        waiting = tiers.get(request.priority)
        if waiting is None:
            waiting = tiers[request.priority] = LazyHeap()
        waiting.push((request.arrival_time, entry.seq), entry)
        self._place(entry.client)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        while (top := self._places.first()) is not None:
            place, (priority, client) = top
            now, entry = self._head(priority, client)
            if now == place:
                return entry.own
            self._places.push(now, (priority, client))
        raise IndexError("the queue is empty")

    def pop_request(self) -> Request:
        """Remove the first request, and charge its client at once for all its tokens, so that one step is fair, too."""
        request = self.peek_request()
        client, tokens = self._queued[request.request_id].client, float(request.num_tokens)
        self.remove_request(request)
        self.taken[client] = self.taken.get(client, 0.0) + tokens
        client.counter += tokens
        return request

    def settle(self) -> None:
        """Return the charges in advance: the step is known, and its members are charged for what they got."""
        for client, tokens in self.taken.items():
            self.give_back(client, tokens)
        self.taken.clear()

    def give_back(self, client: ClientShare, tokens: float) -> None:
        """Return a charge of `tokens` to the client."""
        self._clients.shares.charge(client, -tokens)
        self._place(client)

    def remove_request(self, request: Request) -> None:
        entry = self._queued.pop(request.request_id)
        client, priority = entry.client, request.priority
        waiting = self._waiting[client][priority]
        waiting.discard(entry)
        if not waiting:
            del self._waiting[client][priority]
            self._places.discard((priority, client))
            if not self._waiting[client]:
                del self._waiting[client]
        self._place(client)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of the requests that wait here."""
        for request in requests:
            if request.request_id in self._queued:
                self.remove_request(request)

    def __len__(self) -> int:
        return len(self._queued)

    def __bool__(self) -> bool:
        return bool(self._queued)

    def __iter__(self) -> Iterator[Request]:
        """By priority, then by client."""
        for _, (priority, client) in list(self._places.ascending()):
            yield from [entry.own for _, entry in self._waiting[client][priority].ascending()]

    def _head(self, priority: int, client: ClientShare) -> tuple[Place, Entry]:
        top = self._waiting[client][priority].first()
        assert top is not None
        _, entry = top
        return (priority, client.counter, entry.seq), entry

    def _place(self, client: ClientShare) -> None:
        """Update the client's place in each priority in which it has waiting requests."""
        for priority in self._waiting.get(client, ()):
            self._places.put((priority, client), self._head(priority, client)[0])
