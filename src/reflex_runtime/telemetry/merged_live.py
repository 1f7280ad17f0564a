"""The newest snapshots of several processes as one: those of replicas, or of runtime processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from reflex_runtime.telemetry.live import BATCHES, CLIENTS, LiveBatch, LiveClient, LiveGroup, LiveSnapshot

APART: Final = 1024  # between the numbers of two batches of one process


class LiveParts:
    """What is known of each process, by its name."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of processes, in order of appearance
        self.newest: dict[str, LiveSnapshot] = {}
        self._new: dict[str, LiveSnapshot] = {}  # not shown yet
        self._number = 0

    def take(self, name: str, snapshot: LiveSnapshot) -> None:
        """One has come."""
        self._numbers.setdefault(name, len(self._numbers))
        before = self._new.get(name)
        if before is not None:  # two came between two of ours
            snapshot.batches = [*before.batches, *snapshot.batches][-BATCHES:]
            snapshot.left_out += before.left_out
        self._new[name] = self.newest[name] = snapshot

    def forget(self, name: str) -> None:
        """The process has ended, or shows nothing now."""
        self.newest.pop(name, None)

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """What has come since the last one. server: what is told of all of them."""
        self._number += 1
        new, self._new = self._new, {}
        all_of = list(self.newest.values())
        batches = [batch for name, snapshot in new.items() for batch in self._own(name, snapshot.batches)]
        running = [batch for name, snapshot in self.newest.items() for batch in self._own(name, snapshot.running)]
        batches.sort(key=lambda batch: batch.at)
        left_out = sum(snapshot.left_out for snapshot in new.values()) + max(0, len(batches) - BATCHES)
        shown = [client for snapshot in all_of for client in snapshot.clients]
        clients = _clients(shown)
        return LiveSnapshot(
            at=now,
            number=self._number,
            batches=batches[-BATCHES:],
            running=running,
            left_out=left_out,
            groups=_groups([snapshot.groups for snapshot in all_of]),
            clients=sorted(clients[:CLIENTS], key=lambda client: client.name),
            clients_known=sum(snapshot.clients_known for snapshot in all_of) - (len(shown) - len(clients)),
            server=server,
        )

    def _own(self, name: str, batches: list[LiveBatch]) -> Iterator[LiveBatch]:
        """Batches of a process, with numbers that no other process's have."""
        for batch in batches:
            number = batch.id * APART + self._numbers[name]
            yield msgspec.structs.replace(batch, id=number, process=name)


def added(one: Any, other: Any) -> Any:
    """Two queues, as a scheduler tells them, as one: numbers are added, all else is that of the first that has it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return other | {key: added(value, other[key]) if key in other else value for key, value in one.items()}
    number = isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool)
    return one + other if number else one


def _clients(found: Iterable[LiveClient]) -> list[LiveClient]:
    """One of each name, whose requests may be spread over processes: rates and counts are added, p95 is the worst, and
    the rest is as where it was answered last."""
    by_name: dict[str, LiveClient] = {}
    for client in found:
        before = by_name.get(client.name)
        by_name[client.name] = client if before is None else _client(*sorted((before, client), key=lambda c: c.age))
    return sorted(by_name.values(), key=lambda client: client.age)


def _client(newer: LiveClient, older: LiveClient) -> LiveClient:
    known = [client.p95 for client in (newer, older) if client.p95 is not None]
    return msgspec.structs.replace(
        newer,
        rate=newer.rate + older.rate,
        answers=newer.answers + older.answers,
        p95=max(known, default=None),
        lost=newer.lost + older.lost,
        why=newer.why or older.why,
    )


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
