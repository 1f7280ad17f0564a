"""Files of `schema_version` 1, read as what version 2 would say.

`--trace` and `--record` had formats of their own then: a trace counted times from its origin and had no requests; a
recording had the warm-up in its header and only tickets as members of its batches. What neither had keeps its default,
and so does all but `seq` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec

from reflex_runtime.core.batch import Cause
from reflex_runtime.observe.journal import BatchLine, Member, RequestLine, WarmUpLine

_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class _Header(msgspec.Struct):
    origin: float = 0.0
    started_at: str = ""
    groups: dict[str, dict[str, Any]] = {}
    warm: dict[str, dict[str, Any]] = {}


class _Routing(msgspec.Struct):
    slot: str = "prod"


class _Request(msgspec.Struct):
    seq: int
    timestamp: _Time | None = None
    routing: _Routing | None = None
    error: Any = None


class _RecordedBatch(msgspec.Struct):
    """expected: 0 when unknown. members, entered: tickets."""

    id: int
    slot: str
    stage: str
    cause: Cause
    at: float
    finished: float
    elapsed: float
    expected: float
    members: list[int]
    entered: list[int]
    crashed: bool = False
    notes: dict[str, Any] = {}
    looked: list[float] = []
    apart: bool = False

    def line(self) -> BatchLine:
        entered = set(self.entered)
        members = [
            Member(seq, "", "", 1.0, 1.0, "waiting" if seq in entered else "resident", 0.0) for seq in self.members
        ]
        return BatchLine(
            id=self.id, group=self.slot, stage=self.stage, reason=self.cause.reason.value, cause=self.cause.value,
            at=self.at, finished=self.finished, elapsed=self.elapsed, expected=self.expected or None, cost=None,
            unit="seconds", size=len(members), queued=None, crashed=self.crashed, apart=self.apart, notes=self.notes,
            members=members, looked=self.looked,
        )  # fmt: skip


class _TracedBatch(msgspec.Struct):
    """scheduled_at: seconds from the origin."""

    scheduled_at: float
    elapsed: float


class _Refused(msgspec.Struct):
    request_id: str
    schedule: dict[str, Any]


class Schema1:
    """Translates the lines of one file. header: what its first line is in version 2; warm: lines that follow it."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        known = msgspec.convert(header, _Header)
        self._is_trace = "python_version" in header
        self._origin = known.origin
        self._began = msgspec.convert(known.started_at or "1970-01-01T00:00:00Z", _Time)
        groups = {name: _group(told) for name, told in known.groups.items()}
        self.header = {**header, "payloads": not self._is_trace, "groups": groups}
        warm = [{"kind": "warm", "slot": slot, **line} for slot, line in known.warm.items()]
        self.warm = msgspec.convert(warm, list[WarmUpLine])

    def line(self, found: dict[str, Any]) -> Any:
        """What a line is in version 2: an object, or the fields of one. ValidationError if it is none of version 1."""
        kind = found.get("kind")
        if kind == "batch" and self._is_trace:
            times = msgspec.convert(found, _TracedBatch)
            at = self._origin + times.scheduled_at
            return {**found, "at": at, "finished": at + times.elapsed}
        if kind == "batch":
            return msgspec.convert(found, _RecordedBatch).line()
        if kind == "request":
            return self._request(found)
        if kind == "refused":
            refused = msgspec.convert(found, _Refused)
            when = {"ticket": None, "at": refused.schedule.get("arrived"), "outcome": "rejected"}
            return {"kind": "ended", **when, "request_id": refused.request_id, "schedule": refused.schedule}
        if kind == "divergence":
            return {**found, "kind": "shadow"}
        return {"total_requests": 0, "batches": 0, **found} if kind == "footer" else found

    def _request(self, found: dict[str, Any]) -> dict[str, Any]:
        known = msgspec.convert(found, _Request)
        came = known.timestamp or self._began
        missing = {
            "timestamp": came,
            "arrival": (came - self._began).total_seconds(),
            "slot": (known.routing or _Routing()).slot,
            "request": {},
            "response": None,
            "latency": {"total_ms": 0.0, "queue_ms": 0.0, "batch_ms": 0.0},
            "outcome": "ok" if known.error is None else "failed",
        }
        line = missing | found
        if isinstance(line["request"], dict):
            line["request"] = {"request_id": str(known.seq)} | line["request"]
        return line


def _group(told: dict[str, Any]) -> dict[str, Any]:
    """A recording's said nothing of units: costs were seconds where a model of times learned them."""
    if "unit" in told:
        return told
    flush = msgspec.convert(told.get("flush", {}), dict[str, Any])
    unit = "requests" if told.get("cost") is None else "seconds"
    return {"unit": unit, "budget": flush.get("max_batch_cost"), "max_size": flush.get("max_batch_size", 0), **told}


def complete(requests: Sequence[RequestLine], batches: Sequence[BatchLine]) -> None:
    """Tell of a recording's members what only the lines of their requests say."""
    asked = {line.schedule.ticket: (line, line.schedule) for line in requests if line.schedule is not None}
    last = {seq: batch for batch in batches for seq in batch.seqs}
    for batch in batches:
        for member in batch.members:
            if not member.id and member.seq in asked:
                line, schedule = asked[member.seq]
                member.id, member.client, member.limit = line.request.request_id, schedule.client, schedule.time_limit
                member.asked, member.age = schedule.wants, batch.at - schedule.arrived
                ended = "done" if line.outcome == "ok" else line.outcome
                member.outcome = "apart" if batch.apart else "more" if last[member.seq] is not batch else ended
