"""Journals of simulated runs: what a server would have recorded, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, Event, Failed, RequestRejected, RequestSettled
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.journal import (
    BatchLine,
    EndedLine,
    Header,
    Journal,
    JournalRequest,
    Latency,
    Member,
    RequestLine,
    SchedulerRequest,
)
from reflex_runtime.observe.journal_writer import info_of
from reflex_runtime.sim import Report, Service, WorkloadPart, simulate

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


class _Lines:
    def __init__(self) -> None:
        self.requests: list[RequestLine] = []
        self.batches: list[BatchLine] = []
        self.ended: list[EndedLine] = []
        self._looked: dict[int, tuple[float, ...]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchScheduled):
            self._looked[event.batch.id] = event.idle_polls
        elif isinstance(event, BatchFinished):
            self._batch(event)
        elif isinstance(event, RequestRejected):
            self.ended.append(EndedLine(None, event.at, event.error.outcome))
            self._request(event.request, None, event.at, event.at, event.error.outcome)
        elif isinstance(event, RequestSettled):
            ticket = event.ticket
            error = ticket.outcome.error if isinstance(ticket.outcome, Failed) else None
            outcome = "ok" if error is None else error.outcome if isinstance(error, ReflexError) else "failed"
            if error is not None:
                self.ended.append(EndedLine(ticket.seq, event.at, outcome))
            self._request(ticket.request, ticket.seq, ticket.arrived, event.at, outcome)

    def _request(self, request: Request, seq: int | None, at: float, ended: float, outcome: str) -> None:
        asked = SchedulerRequest(seq, at, str(request.client), int(request.priority), request.time_limit)
        latency = Latency(1e3 * (ended - at), 0.0, 0.0)
        number = len(self.requests)
        self.requests.append(
            RequestLine(
                number, WHEN, at, request.group, JournalRequest(f"r{number}"), None, latency,
                outcome=outcome, schedule=asked,
            )
        )

    def _batch(self, event: BatchFinished) -> None:
        batch = event.batch
        members = [
            Member(t.seq, "", str(t.request.client), units, 1.0, "waiting", batch.scheduled_at - t.arrived)
            for t, units in batch.grants.items()
        ]
        self.batches.append(
            BatchLine(
                id=batch.id, group=batch.group, reason=batch.reason.value, cause=batch.cause.value,
                at=batch.scheduled_at, finished=event.at, elapsed=event.elapsed, expected=batch.expected,
                cost=batch.cost, unit="seconds", size=len(members), queued=0, members=members,
                looked=list(self._looked[batch.id]),
            )
        )  # fmt: skip


def journal_of(
    group: GroupConfig, load: WorkloadPart | Sequence[WorkloadPart], device: Service, seconds: float, **more: Any
) -> tuple[Journal, Report]:
    """What a server with this group would record of the load, and the figures."""
    lines = _Lines()
    run = simulate(Scheduler([group]), load, device, duration=seconds, sinks=[lines], **more)
    header = Header(groups={group.name: info_of(group)})
    journal = Journal(
        Path("run.jsonl"), header, lines.requests, lines.batches, lines.ended, [], {}, None, False
    )
    return journal, Report.of(run)


def write(journal: Journal, path: Path) -> Path:
    """The journal as a file."""
    lines = [journal.header, *journal.requests, *journal.batches, *journal.ended]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path
