"""The spans of a server: a fold over its events, for OpenTelemetry (`--otel`).

A batch is a span of a trace of its own, and refers to the spans of its requests by links: it belongs to all of them.
Times are seconds on the clock of the events. docs/tracing.md lists every attribute.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import Failed
from reflex_runtime.core.errors import ConfigError, ReflexError, not_installed
from reflex_runtime.core.events import (
    BatchFinished,
    Event,
    RequestAnswered,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.trace_context import Attribute, Span, SpanContext, parent_in

CLOSE_S: Final = 2.0  # seconds that a drain waits for the collector at most
LINKS: Final = 128  # of a batch to its requests: the default limit of the OpenTelemetry SDK
LONGEST: Final = 200  # characters of a text
_NEEDED: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(slots=True)
class RequestSpan:
    """The span of a request that is being answered.

    parent: id of the caller's span, 0 without. batch: the span of its first batch, once that has ended. attributes,
    moments: what the product has to say.
    """

    name: str
    context: SpanContext
    parent: int = 0
    batch: SpanContext | None = None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    moments: tuple[tuple[str, float], ...] = ()


class Spans:
    """A sink that makes the spans of one server. All of it happens on one thread, that of the events.

    put: takes a span that has ended; never waits. sample: the share of requests without a parent that are
    recorded; one with a parent is recorded if its parent is. A batch is recorded if one of its requests is.
    """

    events: frozenset[type[Any]] = frozenset({BatchFinished, RequestAnswered, RequestSettled})

    def __init__(
        self, put: Callable[[Span], object], sample: float = 1.0, close: Callable[[float], bool] | None = None
    ) -> None:
        """close: sends what is left within so many seconds; whether all was sent."""
        self._put, self._sample, self._close = put, sample, close
        self._members: dict[Ticket, RequestSpan] = {}  # recorded, and not settled
        self._random = random.Random()  # seeded by the system: a fork makes its own `Spans`

    def begin(self, name: str, headers: Mapping[bytes, bytes] | None = None) -> RequestSpan:
        """The span of a request that has come. headers: with its parent, where its wire has any."""
        parent = parent_in(headers or {})
        if parent is None:
            return RequestSpan(name, self._new(self._random.random() < self._sample))
        own = parent._replace(span_id=self._random.getrandbits(64) or 1)
        return RequestSpan(name, own, parent.span_id)

    def joined(self, ticket: Ticket, span: RequestSpan) -> None:
        """The request is this ticket: batches that it is in refer to it. Called before it is told as settled."""
        if span.context.sampled:  # its outcome may be there already: events come late
            self._members[ticket] = span

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Send what is left. Blocks; returns whether all of it was sent within so many seconds."""
        return self._close is None or self._close(timeout)

    # -- the sink ------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            self._members.pop(event.ticket, None)
        elif isinstance(event, BatchFinished):
            if self._members:
                self._finished(event)
        elif isinstance(event, RequestAnswered) and event.span is not None:
            self._answered(event)

    def _finished(self, event: BatchFinished) -> None:
        batch, members = event.batch, self._members
        links = [found for ticket in batch.grants if (found := members.get(ticket)) is not None]
        if not links:
            return
        context = self._new(True)
        for ticket in batch.admitted:
            if (entered := members.get(ticket)) is not None:
                entered.batch = context
        self._put(batch_span(event, context, tuple(span.context for span in links[:LINKS])))

    def _answered(self, event: RequestAnswered) -> None:
        span: RequestSpan = event.span
        if not span.context.sampled:
            return
        span.attributes["reflex.slot"] = event.slot
        code, message = ("", "") if event.error is None else (event.error.code, event.error.message)
        start = event.at - event.latency
        self._put(request_span(span, start, event.at, event.outcome, event.status, code, message, event.ticket))

    def _new(self, sampled: bool) -> SpanContext:
        bits = self._random.getrandbits
        return SpanContext(bits(128) or 1, bits(64) or 1, sampled)


class StepSpans(Spans):
    """The same for a model whose requests come as sequences that know their span; see `Sequence.span`."""

    events = Spans.events | {RequestQueued}

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            context = getattr(event.ticket.request.payload, "span", None)
            if context is not None:
                self.joined(event.ticket, RequestSpan("", context))
        else:
            super().__call__(event)


class FrameSpans(Spans):
    """The same for the frames of feeds: nobody answers them, so that a span is a frame's way through the scheduler."""

    events = frozenset({RequestQueued, RequestRejected, BatchFinished, RequestSettled})

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            if self._random.random() < self._sample:
                self.joined(event.ticket, RequestSpan("frame", self._new(True)))
        elif isinstance(event, RequestSettled):
            span, ticket = self._members.pop(event.ticket, None), event.ticket
            if span is not None:
                error = ticket.outcome.error if isinstance(ticket.outcome, Failed) else None
                self._put(_frame(span, ticket.request, ticket.admitted, event.at, error, ticket))
        elif isinstance(event, RequestRejected):
            if self._random.random() < self._sample:
                span = RequestSpan("frame", self._new(True))
                self._put(_frame(span, event.request, event.at, event.at, event.error, None))
        else:
            super().__call__(event)


def _frame(
    span: RequestSpan, request: Request, start: float, end: float, error: BaseException | None, ticket: Ticket | None
) -> Span:
    span.name = f"{span.name} {request.group}"
    span.attributes = {"reflex.feed": str(request.client), "reflex.group": request.group}
    if error is None:
        told = "ok", 200, "", ""
    elif isinstance(error, ReflexError):
        told = error.outcome, error.http_status, error.code, error.message
    else:
        told = "failed", 500, "internal", str(error)
    return request_span(span, start, end, *told, ticket)._replace(server=False)


def request_span(
    span: RequestSpan, start: float, end: float, outcome: str, status: int, code: str, message: str,
    ticket: Ticket | None,
) -> Span:  # fmt: skip
    """Of a request that has its answer. code, message: of its error, "" without. ticket: None if it was not queued."""
    found: dict[str, Attribute] = {**span.attributes, "reflex.outcome": outcome}
    moments: list[tuple[str, float]] = []
    if code:
        found["error.type"] = code
    if ticket is not None:
        moments.append(("reflex.queued", ticket.admitted))
        if ticket.arrived > ticket.admitted:
            moments.append(("reflex.prepared", ticket.arrived))
        if ticket.started is not None:
            moments.append(("reflex.started", ticket.started))
            found["reflex.queue.seconds"] = ticket.started - ticket.arrived
            found["reflex.device.seconds"] = ticket.shared
            found["reflex.batches"] = ticket.batches
        if (batch := ticket.admission) is not None:
            found["reflex.batch.id"] = batch.id
            found["reflex.batch.size"] = batch.size
            found["reflex.batch.cause"] = batch.cause
    error = (_short(message) or outcome) if status >= 500 else None
    links = () if span.batch is None else (span.batch,)
    return Span(span.name, span.context, span.parent, True, start, end, _plain(found), error,
                (*moments, *span.moments), links)  # fmt: skip


def batch_span(event: BatchFinished, context: SpanContext, links: tuple[SpanContext, ...]) -> Span:
    """Of a batch that has ended. links: its requests that are recorded, `LINKS` at most."""
    batch = event.batch
    found: dict[str, Attribute] = {
        "reflex.group": batch.group,
        "reflex.batch.id": batch.id,
        "reflex.batch.size": len(batch),
        "reflex.batch.entered": len(batch.admitted),
        "reflex.batch.unlinked": len(batch) - len(links),
        "reflex.batch.cause": batch.cause.value,
        "reflex.batch.reason": batch.reason.value,
        "reflex.batch.cost": batch.cost,
    }
    if batch.stage:
        found["reflex.batch.stage"] = batch.stage
    if batch.expected > 0.0:
        found["reflex.batch.expected_seconds"] = batch.expected
    if batch.short_of:
        found["reflex.batch.short_of"] = batch.short_of
    if event.apart:
        found["reflex.batch.apart"] = True
    if event.crashed or event.apart:
        found["error.type"] = "processor_failed"
    for name, value in batch.notes.items():
        if isinstance(value, bool | int | float):
            found[f"reflex.note.{name}"] = value
    error = "its members run again in smaller batches" if event.apart else "no result" if event.crashed else None
    return Span(
        f"batch {batch.group} {batch.stage}".rstrip(), context, 0, False, batch.scheduled_at,
        batch.scheduled_at + event.elapsed, _plain(found), error, (), links,
    )  # fmt: skip


def _plain(found: dict[str, Attribute]) -> dict[str, Attribute]:
    return {name: _short(value) if isinstance(value, str) else value for name, value in found.items()}


def _short(text: str) -> str:
    """What UTF-8 can carry, and not too much of it."""
    return text[:LONGEST].encode("utf-8", "backslashreplace").decode()


def check_otel(endpoint: str) -> None:
    """ConfigError where the packages for `--otel` are missing, or the environment names no share."""
    sampled_share()
    if endpoint:
        try:
            there = all(map(find_spec, _NEEDED))
        except ModuleNotFoundError:  # not even the package around it
            there = False
        if not there:
            raise not_installed("opentelemetry", "--otel")


def sampled_share() -> float:
    """The share of requests without a parent that are recorded, by the variables of OpenTelemetry's SDK; else all."""
    sampler, given = os.environ.get("OTEL_TRACES_SAMPLER", ""), os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1")
    if not sampler.endswith("traceidratio"):
        return 0.0 if sampler.endswith("always_off") else 1.0
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG={given:.99}: must be a number in [0, 1]")
    return share


def spans_of(endpoint: str, registry: CollectorRegistry, kind: type[Spans] = Spans) -> Spans | None:
    """The spans of a server, sent to this collector; None without one. registry: for their series."""
    if not endpoint:
        return None
    check_otel(endpoint)
    from reflex_runtime.observe.span_export import SpanExport

    export = SpanExport(endpoint, registry)
    return kind(export.put, sampled_share(), export.close)
