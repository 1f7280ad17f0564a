"""What all replicas show those who watch, as one snapshot: of the front's dashboard and `reflex top`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from reflex_runtime.core.events import Event
from reflex_runtime.replicas.replica import Replica
from reflex_runtime.telemetry.live import LiveProcess, LiveSnapshot
from reflex_runtime.telemetry.merged_live import LiveParts, added
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
        self._parts = LiveParts()

    def __call__(self, event: Event) -> None:
        """Nothing: its events come from the replicas."""

    def watch(self) -> None:
        """Ask every replica that is live, and not asked yet."""
        for replica in self._replicas:
            name, pid = replica.name, replica.client.pid
            if replica.live and self._watches.get(name, (None, 0))[0] != pid:
                self._watches[name] = pid, replica.watch(STREAM, self._taker(name), self._headers)
            elif not replica.live:
                self._parts.forget(name)

    def end(self) -> None:
        """Nobody watches any more."""
        for replica in self._replicas:
            if replica.name in self._watches:
                replica.unwatch(self._watches[replica.name][1])
        self._watches.clear()

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """What has come since the last one."""
        self.watch()
        told = merged_server({name: own.server for name, own in self._parts.newest.items()}, server)
        return self._parts.snapshot(now, {**server, **told})

    def _taker(self, name: str) -> Callable[[bytes], None]:
        return lambda line: self._parts.take(name, _DECODE(line))


def merged_server(servers: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any]) -> dict[str, Any]:
    """The queues of all replicas added, and of each policy the versions, beside what the front itself tells. The
    process of each replica has the requests that wait and run there. servers: by replica."""
    queues: dict[str, Any] = {}
    for server in servers.values():
        for group, queue in server.get("queues", {}).items():
            queues[group] = added(queues[group], queue) if group in queues else queue
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
