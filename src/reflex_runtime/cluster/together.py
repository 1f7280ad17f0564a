"""What is asked of the whole application on Ray, whichever replica it reaches: figures, the page, operators' changes.

Ray's proxy gives such a request to any replica. That one asks all of them, itself included, and answers for all.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from prometheus_client import Metric
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.core.events import Event
from reflex_runtime.telemetry.live import LiveSnapshot
from reflex_runtime.telemetry.merged_live import LiveParts, added
from reflex_runtime.telemetry.series import rendered
from reflex_runtime.web.form import JSON

WITHIN: Final = 5.0  # seconds for a replica to answer
_OF_ALL: Final = re.compile(
    r"(?:/policies/[^/]+)?(?:/metrics|/diagnostics/(?:cost-model|shadow|rollout)|/admin/(?:split|rollback|reset|faults))"
)
_KEPT: Final = ("/admin/split", "/admin/rollback", "/admin/faults")  # what a replica that starts later needs, too
_NOT_HERE: Final = {
    "/admin/load": "Ray starts replicas with what the application says, and each of them would be without what was "
    "loaded: deploy the other version (reflex ray, or args.source in deploy/ray/serve.yaml), and Ray replaces one "
    "replica after another",
    "/diagnostics/journal": "every replica has a schedule of its own, and Ray chooses which one answers: --record DIR "
    "writes one for each, which reflex tune reads",
}


class PeerRequest(NamedTuple):
    """A request as the replica that got it passes it to all. headers: the caller's own. client: its address."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes
    at: float  # when it was asked, by the clock of the machine that got it


class PeerAnswer(NamedTuple):
    """The answer of one replica, by its name."""

    name: str
    status: int
    content_type: bytes
    body: bytes


def concerns_all(method: str, path: str) -> bool:
    """Whether all replicas have to be asked."""
    return method in ("GET", "POST") and _OF_ALL.fullmatch(path) is not None


def why_not(path: str) -> str:
    """Why a path has no answer on Ray, and where to look; "" where it has one."""
    return next((why for end, why in _NOT_HERE.items() if path.endswith(end)), "")


def changes(request: PeerRequest) -> bool:
    """Whether it is a change that must hold in replicas that start later."""
    return request.method == "POST" and request.path.endswith(_KEPT)


def together(request: PeerRequest, answers: Sequence[PeerAnswer]) -> PeerAnswer:
    """One answer for all. answers: in the order of names, at least one."""
    first = answers[0]
    good = [answer for answer in answers if answer.status == 200]
    if request.method == "POST":
        return _changed(answers, good)
    if not good:
        return first
    if request.path.endswith("/metrics"):
        return first._replace(status=200, content_type=good[0].content_type, body=_labelled(good))
    each = {answer.name: msgspec.Raw(answer.body) for answer in good}
    return good[0]._replace(body=msgspec.json.encode({"replicas": each}))


def unsure(request: PeerRequest, found: Sequence[PeerAnswer | None]) -> str:
    """Why a change may not be done by all, though none refuses it; "" where all have answered."""
    silent = found.count(None)
    if request.method != "POST" or not silent or not any(one is not None and one.status == 200 for one in found):
        return ""
    how_many = f"{silent} of {len(found)} replicas"
    return f"{how_many} did not answer within {WITHIN:g} s and may not have done it; ask again, which is safe"


def _changed(answers: Sequence[PeerAnswer], good: Sequence[PeerAnswer]) -> PeerAnswer:
    """Done by all, or by none, or what to do."""
    if len(good) in (0, len(answers)):
        return answers[0]
    missing = next(answer for answer in answers if answer.status != 200)
    told = (msgspec.msgpack if b"msgpack" in missing.content_type else msgspec.json).decode(missing.body)
    message = f"{missing.name} refused what {len(good)} others have done; ask again, which is safe: {told['message']}"
    body = told | {"error": "not_ready", "message": message, "retry_safe": True}
    return missing._replace(status=503, content_type=JSON, body=msgspec.json.encode(body))


def _labelled(answers: Sequence[PeerAnswer]) -> bytes:
    """The pages of all replicas as one, with the replica of each series: counters of one that has ended leave with it,
    and none goes back."""
    families: dict[str, Metric] = {}
    for answer in answers:
        for family in text_string_to_metric_families(answer.body.decode()):
            found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found.samples += [
                Sample(sample.name, {**sample.labels, "replica": answer.name}, sample.value)
                for sample in family.samples
            ]
    return rendered(families.values())


class Peers(Protocol):
    """All replicas, the asking one included."""

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """What that method of every replica returns; None for one that does not answer in time or has ended."""


class RayLive:
    """The fold of the page: what every replica shows, asked of each, one moment late."""

    events: frozenset[type[Event]] = frozenset()

    def __init__(self, peers: Peers, asker: str) -> None:
        """asker: the name of the replica that asks, for its watchers."""
        self._peers, self._asker, self._parts = peers, asker, LiveParts()
        self._asking: asyncio.Task[None] | None = None

    def __call__(self, event: Event) -> None:
        """Nothing: its events come from the replicas."""

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """What the replicas have answered since the last one; and ask again."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        told = [snapshot.server for snapshot in self._parts.newest.values()]
        queues: dict[str, Any] = {}
        for one in told:
            for group, queue in one["queues"].items():
                queues[group] = added(queues[group], queue) if group in queues else queue
        processes = [process for one in told for process in one["processes"]]
        return self._parts.snapshot(now, {**server, "queues": queues, "processes": processes})

    async def _ask(self) -> None:
        found = [one for one in await self._peers.call("live", self._asker) if one is not None]
        shown = {name: msgspec.msgpack.decode(line, type=LiveSnapshot) for name, line in found}
        for name in [name for name in self._parts.newest if name not in shown]:
            self._parts.forget(name)
        for name, snapshot in sorted(shown.items()):
            for process in snapshot.server["processes"]:
                process["name"] = name
            behind = time.monotonic() - snapshot.at
            if abs(behind) > WITHIN:  # another machine, whose clock began elsewhere
                for batch in (*snapshot.batches, *snapshot.running):
                    batch.at += behind
            self._parts.take(name, snapshot)
