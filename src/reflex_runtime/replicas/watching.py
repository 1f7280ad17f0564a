"""What all replicas show those who watch, as one snapshot: of the front's dashboard and `reflex top`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from reflex_runtime.core.events import Event
from reflex_runtime.replicas.replica import Replica
from reflex_runtime.telemetry.live import BATCHES, CLIENTS, LiveBatch, LiveClient, LiveGroup, LiveSnapshot
from reflex_runtime.telemetry.processes import LiveProcess
from reflex_runtime.web.dashboard import STREAM

_DECODE = msgspec.json.Decoder(LiveSnapshot).decode


class MergedLive:
    """The fold of the front: it reads the stream of every live replica while somebody watches.

    replicas: all; the ones that are live at a snapshot are in it. headers: with the key, where there is one.
    """

    events: frozenset[type[Event]] = frozenset()

    def __init__(self, replicas: list[Replica], headers: list[tuple[bytes, bytes]]) -> None:
        self._replicas, self._headers = replicas, headers
        self._watches: dict[str, tuple[int | None, int]] = {}  # by replica: the pid of its process, and the watch
        self._newest: dict[str, LiveSnapshot] = {}
        self._new: dict[str, LiveSnapshot] = {}  # not shown yet
        self._number = 0

    def __call__(self, event: Event) -> None:
        """Nothing: its events come from the replicas."""

    def watch(self) -> None:
        """Ask every replica that is live, and not asked yet."""
        for replica in self._replicas:
            name, pid = replica.name, replica.client.pid
            if replica.live and self._watches.get(name, (None, 0))[0] != pid:
                self._watches[name] = pid, replica.watch(STREAM, self._taker(name), self._headers)
            elif not replica.live:
                self._newest.pop(name, None)

    def end(self) -> None:
        """Nobody watches any more."""
        for replica in self._replicas:
            if replica.name in self._watches:
                replica.unwatch(self._watches[replica.name][1])
        self._watches.clear()

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """What has come since the last one."""
        self.watch()
        self._number += 1
        new, self._new = self._new, {}
        all_of = list(self._newest.values())
        batches = [batch for name, snapshot in new.items() for batch in self._own(name, snapshot.batches)]
        running = [batch for name, snapshot in self._newest.items() for batch in self._own(name, snapshot.running)]
        batches.sort(key=lambda batch: batch.at)
        left_out = sum(snapshot.left_out for snapshot in new.values()) + max(0, len(batches) - BATCHES)
        clients = _clients(client for snapshot in all_of for client in snapshot.clients)
        return LiveSnapshot(
            at=now,
            number=self._number,
            batches=batches[-BATCHES:],
            running=running,
            left_out=left_out,
            groups=_groups([snapshot.groups for snapshot in all_of]),
            clients=clients,
            clients_known=max(len(clients), sum(snapshot.clients_known for snapshot in all_of)),
            server={**server, **merged_server({name: own.server for name, own in self._newest.items()}, server)},
        )

    def _own(self, name: str, batches: list[LiveBatch]) -> Iterator[LiveBatch]:
        """Batches of a replica, with numbers that no other replica's have."""
        at = next(n for n, replica in enumerate(self._replicas) if replica.name == name)
        for batch in batches:
            yield msgspec.structs.replace(batch, id=batch.id * len(self._replicas) + at)

    def _taker(self, name: str) -> Callable[[bytes], None]:
        def take(line: bytes) -> None:
            snapshot = _DECODE(line)
            before = self._new.get(name)
            if before is not None:  # two came between two of ours
                snapshot.batches = [*before.batches, *snapshot.batches][-BATCHES:]
                snapshot.left_out += before.left_out
            self._new[name] = self._newest[name] = snapshot

        return take


def merged_server(servers: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any]) -> dict[str, Any]:
    """The queues of all replicas added, and of each policy the versions, beside what the front itself tells. The
    process of each replica has the requests that wait and run there. servers: by replica."""
    queues: dict[str, Any] = {}
    for server in servers.values():
        for group, queue in server.get("queues", {}).items():
            queues[group] = _sum(queues[group], queue) if group in queues else queue
    policies = {name: dict(told) for name, told in own.get("policies", {}).items()}
    for server in [*servers.values()][:1]:
        for name, told in server.get("policies", {}).items():
            policies.setdefault(name, {}).update({key: told[key] for key in ("groups", "versions") if key in told})
    return {"queues": queues, "policies": policies, "processes": _processes(servers, own.get("processes", []))}


def _processes(servers: Mapping[str, Mapping[str, Any]], known: Iterable[LiveProcess]) -> list[LiveProcess]:
    found = []
    for process in known:
        for told in servers.get(process.name, {}).get("processes", [])[:1]:
            process = msgspec.structs.replace(process, running=told["running"], waiting=told["waiting"])
        found.append(process)
    return found


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _sum(value, other[key]) if key in other else value for key, value in one.items()}
    number = isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool)
    return one + other if number else one


def _clients(found: Iterable[LiveClient]) -> list[LiveClient]:
    """Those answered last. One that has moved is where it was answered last."""
    newest: dict[str, LiveClient] = {}
    for client in found:
        before = newest.get(client.name)
        if before is None or client.age < before.age:
            newest[client.name] = client
    last = sorted(newest.values(), key=lambda client: client.age)[:CLIENTS]
    return sorted(last, key=lambda client: client.name)


def _groups(several: list[list[LiveGroup]]) -> list[LiveGroup]:
    found: dict[str, list[LiveGroup]] = {}
    for groups in several:
        for group in groups:
            found.setdefault(group.name, []).append(group)
    return [_group(groups, len(several)) for groups in found.values()]


def _group(groups: list[LiveGroup], replicas: int) -> LiveGroup:
    """One group of several replicas. Rates and counts are added, busy is the mean over the devices, p50 the mean of the
    replicas' by their answers, and p95 and p99 those of the slowest replica."""
    outcomes: dict[str, int] = {}
    for group in groups:
        for kind, count in group.outcomes.items():
            outcomes[kind] = outcomes.get(kind, 0) + count

    def worst(name: str) -> float | None:
        return max((value for group in groups if (value := getattr(group, name)) is not None), default=None)

    def mean(name: str, weight: str) -> float | None:
        known = [(getattr(g, name), getattr(g, weight)) for g in groups if getattr(g, name) is not None]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    return LiveGroup(
        groups[0].name, sum(g.busy for g in groups) / replicas, sum(g.batches for g in groups),
        sum(g.requests for g in groups), sum(g.rate for g in groups), mean("p50", "requests"), worst("p95"),
        worst("p99"), mean("error", "batches"), outcomes, sum(g.tokens for g in groups), mean("first_p50", "requests"),
        worst("first_p99"), mean("gap_p50", "requests"), worst("gap_p99"),
    )  # fmt: skip
