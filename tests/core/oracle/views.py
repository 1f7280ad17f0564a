"""The state of the model, and what is read off it: nothing is kept that can be computed again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, inf

from .records import Expected, Seen, World


class Views:
    """Lists of all there is."""

    def __init__(self, worlds: Sequence[World], max_batches: int = 1) -> None:
        self.worlds = {w.name: w for w in worlds}
        self.max_batches = max_batches
        self.all: list[Seen] = []  # those that may run or have run, in that order
        self.open: list[Seen] = []  # of those, all that have not settled
        self.preparing: list[Seen] = []
        self.tickets = 0
        self.turns = 0
        self.in_flight: list[Expected] = []
        self.settled: list[tuple[int, str]] = []  # (seq, result) since last asked
        self.preempted: list[int] = []
        self.pauses: dict[tuple[str, Hashable | None], float] = {}  # None: the whole group
        self.memory: list[tuple[Seen, float]] = []
        self.now = -inf
        self.batches = 0
        self.closed = self.draining = False
        self.quiet = False  # next_batch found nothing and nothing came since
        self.stood = False  # quiet, before the last input
        self.promised: dict[str, dict[Hashable, float]] = {}  # holds, before the last input
        self.held_until = inf
        self.free_since = -inf

    def unsettled(self, group: str, partition: Hashable = ..., client: Hashable = ...) -> list[Seen]:
        return [
            t
            for t in self.open
            if t.request.group == group
            and (partition is ... or t.request.partition == partition)
            and (client is ... or t.client == client)
        ]

    def mates(self, w: World) -> list[World]:
        """The groups of its tenant, itself among them."""
        return [p for p in self.worlds.values() if p is w or (w.tenant and p.tenant == w.tenant)]

    def charge(self, w: World, seconds: float) -> None:
        """Charge device seconds to a group and its tenant."""
        w.device_time += seconds / (w.weight or 1.0)
        for p in self.mates(w):
            p.tenant_time += seconds / (w.weight or 1.0)

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

    def places(self, w: World, partition: Hashable) -> tuple[int, int | None]:
        """Free resident places, and how many may enter at all, None for any number."""
        placed = [t for t in self.unsettled(w.name, partition) if t.has_place]
        return w.flush.max_batch_size - len(placed), w.room

    def shares(self, w: World, partition: Hashable) -> dict[Hashable, int] | None:
        """Places each client may still take, when others wait beside residents; else all but one of 64."""
        placed = [t for t in self.unsettled(w.name, partition) if t.has_place]
        clients = {t.client for t in self.waiting(w.name, partition)}
        places = w.flush.max_batch_size
        even = places - (places // 64 if w.pool is not None else 0)
        if placed and len(clients) >= 2:
            even = ceil(places / len(self.clients(w.name)))
        elif even == places:
            return None
        return {c: even - len([p for p in placed if p.client == c]) for c in clients}

    def part(self, w: World, partition: Hashable) -> float:
        """Most members of a client in a step: the most that keep its members within what clients may cause each other.
        Whoever has no resident counts as one member, and so does one that left a second ago while one is alone."""
        active = self.clients(w.name)
        gone = [t.settled_at for t in self.all if t.request.group == w.name and t.client not in active]
        n = len(active)
        if n == 1 and any(at is not None and self.now < at + 1.0 for at in gone):
            n = 2
        placed = {t.client for t in self.unsettled(w.name, partition) if t.has_place}
        asked = sorted(len(self.unsettled(w.name, client=c)) for c in placed)
        asked = [1] * (n - max(1, len(asked))) + asked
        most = w.meter.shared((n - 1) * asked[0], n * asked[0]) if n > 1 else inf
        part = 1
        while most < inf and sum(min(part + 1, a) for a in asked[: n - 1]) + part + 1 <= most:
            part += 1
        return part if most < inf else inf
