"""Spans of requests and batches: facts, copied where events come, and what they say, worked out where they are sent.

Pure. Times are seconds on the clock of the events. docs/tracing.md lists every attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry

from reflex_runtime.core.request import AdmittedBatch, Ticket
from reflex_runtime.telemetry.series import Counter, CounterChild
from reflex_runtime.telemetry.trace_context import SpanContext

LINKS: Final = 128  # of a batch to its requests: the default limit of the OpenTelemetry SDK
LONGEST: Final = 200  # characters of a text
RESULTS: Final = ("exported", "queue_full", "failed")

Attribute = str | bool | int | float | list[str]


class Span(NamedTuple):
    """A span that has ended, as it is sent.

    parent: a span id, 0 without. server: it answers a caller. error: why it failed, None where it did not; a caller's
    own mistake or cancellation is no failure. moments: (name, time). links: the spans it refers to.
    """

    name: str
    context: SpanContext
    parent: int
    server: bool
    start: float
    end: float
    attributes: dict[str, Attribute]
    error: str | None = None
    moments: tuple[tuple[str, float], ...] = ()
    links: tuple[SpanContext, ...] = ()


class SpanFacts(Protocol):
    """What is known of a span, without a payload: cheap to make, and held until it is sent."""

    def span(self) -> Span: ...


class TicketRun(NamedTuple):
    """The way of a request through the scheduler. Times as of its `Ticket`; started None where it never ran."""

    admitted: float
    ready: float
    started: float | None
    first: AdmittedBatch | None
    batches: int
    device: float

    @classmethod
    def of(cls, ticket: Ticket) -> TicketRun:
        return cls(ticket.admitted, ticket.arrived, ticket.started, ticket.admission, ticket.batches, ticket.shared)


class RequestFacts(NamedTuple):
    """A request that has its answer. server: a caller waited for it. code, message: of its error, "" without.
    batch: its first. more: attributes of the product. moments: of the product."""

    name: str
    context: SpanContext
    parent: int
    start: float
    end: float
    outcome: str
    status: int
    code: str
    message: str
    run: TicketRun | None
    batch: SpanContext | None
    more: Mapping[str, Attribute]
    moments: tuple[tuple[str, float], ...] = ()
    server: bool = True

    def span(self) -> Span:
        found: dict[str, Attribute] = {**self.more, "reflex.outcome": self.outcome}
        moments = self.moments
        if self.code:
            found["error.type"] = self.code
        if self.run is not None:
            found |= _ran(self.run)
            moments = (*_moments(self.run), *moments)
        failed = self.status >= 500
        return Span(
            self.name, self.context, self.parent, self.server, self.start, self.end,
            {name: _short(value) for name, value in found.items()},
            str(_short(self.message)) or self.outcome if failed else None,
            moments, () if self.batch is None else (self.batch,),
        )  # fmt: skip


def _moments(run: TicketRun) -> tuple[tuple[str, float], ...]:
    queued = [("reflex.queued", run.admitted)]
    if run.ready > run.admitted:
        queued.append(("reflex.prepared", run.ready))
    if run.started is not None:
        queued.append(("reflex.started", run.started))
    return tuple(queued)


def _ran(run: TicketRun) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    if run.started is not None:
        found["reflex.queue.seconds"] = run.started - run.ready
        found["reflex.device.seconds"] = run.device
        found["reflex.batches"] = run.batches
    if run.first is not None:
        found["reflex.batch.id"] = run.first.id
        found["reflex.batch.size"] = run.first.size
        found["reflex.batch.cause"] = run.first.cause
    return found


class BatchFacts(NamedTuple):
    """A batch that has ended. links: its requests that are recorded, of `size`; at most `LINKS` are sent. notes: of its
    processor."""

    context: SpanContext
    links: tuple[SpanContext, ...]
    start: float
    elapsed: float
    id: int
    group: str
    stage: str
    cause: str
    reason: str
    cost: float
    expected: float
    size: int
    entered: int
    short_of: str
    crashed: bool
    apart: bool
    notes: Mapping[str, Any]

    def span(self) -> Span:
        links = self.links[:LINKS]
        found: dict[str, Attribute] = {
            "reflex.group": self.group,
            "reflex.batch.id": self.id,
            "reflex.batch.size": self.size,
            "reflex.batch.entered": self.entered,
            "reflex.batch.unlinked": self.size - len(links),
            "reflex.batch.cause": self.cause,
            "reflex.batch.reason": self.reason,
            "reflex.batch.cost": self.cost,
        }
        if self.stage:
            found["reflex.batch.stage"] = self.stage
        if self.expected > 0.0:
            found["reflex.batch.expected_seconds"] = self.expected
        if self.short_of:
            found["reflex.batch.short_of"] = self.short_of
        if self.apart:
            found["reflex.batch.apart"] = True
        if self.crashed or self.apart:
            found["error.type"] = "processor_failed"
        for name, value in self.notes.items():
            if isinstance(value, bool | int | float):
                found[f"reflex.note.{name}"] = value
        error = "its members run again in smaller batches" if self.apart else "no result" if self.crashed else None
        return Span(
            f"batch {self.group} {self.stage}".rstrip(), self.context, 0, False, self.start, self.start + self.elapsed,
            {name: _short(value) for name, value in found.items()}, error, (), links,
        )  # fmt: skip


def _short(value: Attribute) -> Attribute:
    """Text that UTF-8 can carry, and not too much of it."""
    return value[:LONGEST].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def span_series(registry: CollectorRegistry) -> dict[str, CounterChild]:
    """The counters of what became of spans, by `RESULTS`. Each is written by one thread."""
    spans = Counter("reflex_spans_total", "Spans by what became of them", ("result",), registry)
    return {result: spans.labels(result) for result in RESULTS}
