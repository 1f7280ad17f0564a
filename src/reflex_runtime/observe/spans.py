"""The spans of a server (`--otel`): a fold over its events on OpenTelemetry's SDK, and the queue to the collector.

A batch has a trace of its own, and its span has links to the spans of all its requests. Times of events are monotonic
seconds. docs/tracing.md lists every attribute. If a collector is down or slow, spans are lost, and no answer is
delayed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import (
    BatchFinished,
    Event,
    Failed,
    RequestAnswered,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.metrics import SPANS, SeriesSet
from reflex_runtime.pacing import Throttle
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.observe")
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # no line for each invalid header of a caller

CLOSE_S: Final = 2.0  # longest wait of a drain for the collector
LINKS: Final = 128  # most links of a batch to its requests: the SDK's default limit
CAPACITY: Final = 8192  # spans that wait to be sent
CHUNK: Final = 512  # spans of a message: the SDK's default
GATHER_MS: Final = 500.0  # longest wait for a full message
LONGEST: Final = 200  # characters of a text
LONGEST_HEADER: Final = 512  # bytes of a caller's traceparent or tracestate: each span that waits holds them
APART_NS: Final = 20_000  # most nanoseconds between the readings of two clocks that are compared
TRIES: Final = 8
SELDOM: Final = 60.0  # seconds between two log lines about lost spans
RESULTS: Final = ("exported", "queue_full", "failed")

_W3C: Final = TraceContextTextMapPropagator()
_FIELDS: Final = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


def note(span: Span, attributes: Mapping[str, AttributeValue]) -> None:
    """Set attributes; texts are cut, and those that UTF-8 cannot carry are escaped."""
    if span.is_recording():
        span.set_attributes({name: _short(v) if isinstance(v, str) else v for name, v in attributes.items()})


def _short(text: str) -> str:
    """A text as an attribute: encodable as UTF-8, and cut."""
    return text[:LONGEST].encode("utf-8", "backslashreplace").decode()


def moment(span: Span, name: str, at: float) -> None:
    """Add an event to a span. at: monotonic seconds."""
    span.add_event(name, timestamp=_ns(at))


class Spans:
    """A sink that makes the spans of requests and batches. Called on one thread, that of the events.

    The SDK's sampler decides which requests are recorded (`OTEL_TRACES_SAMPLER`): by default those without a parent and
    those whose parent is. A batch is recorded if one of its requests is.
    """

    events: frozenset[type[Any]] = frozenset({BatchFinished, RequestAnswered, RequestSettled})

    def __init__(self, export: SpanExport) -> None:
        self._export = export
        self._requests, self._batches = export.tracer(None), export.tracer(ALWAYS_ON)
        self._members: dict[Ticket, Span] = {}  # recorded, and not settled

    def begin(self, name: str, headers: Mapping[bytes, bytes], started: float) -> Span:
        """The span of a request. headers: in lower case, with its parent. started: monotonic seconds."""
        sent = {
            text: value.decode("latin-1")
            for field, text in _FIELDS.items()
            if (value := headers.get(field)) is not None and len(value) <= LONGEST_HEADER
        }
        return self._requests.start_span(name, _W3C.extract(sent, Context()), SpanKind.SERVER, start_time=_ns(started))

    def joined(self, ticket: Ticket, span: Span) -> None:
        """Link the batches of this ticket with the span. Called before the ticket is published as settled."""
        if span.get_span_context().trace_flags.sampled:
            self._members[ticket] = span

    note, moment = staticmethod(note), staticmethod(moment)

    @staticmethod
    def traceparent(span: Span) -> str:
        """The header that makes a recorded span the parent of others; "" for one that is not recorded."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if span.is_recording() else ""

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Send the spans that wait. Blocks; returns whether all were sent within so many seconds."""
        return self._export.close(timeout)

    # -- the sink ------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            self._members.pop(event.ticket, None)
        elif isinstance(event, BatchFinished):
            if self._members:
                self._finished(event)
        elif isinstance(event, RequestAnswered) and event.span is not None and event.span.is_recording():
            note(event.span, {"reflex.slot": event.slot})
            end_request(event.span, event.at, event.outcome, event.status, event.error, event.ticket)

    def _finished(self, event: BatchFinished) -> None:
        batch, members = event.batch, self._members
        links = [found.get_span_context() for ticket in batch.grants if (found := members.get(ticket)) is not None]
        if not links:
            return
        context = batch_span(self._batches, event, links[:LINKS])
        for ticket in batch.admitted:
            entered = members.get(ticket)
            if entered is not None and entered.is_recording():  # it has ended if its caller left meanwhile
                entered.add_link(context)


class StepSpans(Spans):
    """The spans of a language model's steps. A sequence's parent may be a span of another process: `traceparent`."""

    events = Spans.events | {RequestQueued}

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            if parent := getattr(event.ticket.request.payload, "traceparent", ""):
                self.joined(event.ticket, get_current_span(_W3C.extract({"traceparent": parent}, Context())))
        else:
            super().__call__(event)


class FrameSpans(Spans):
    """The spans of the frames of feeds, which have no answer: from admission to the end in the scheduler."""

    events = frozenset({RequestQueued, RequestRejected, BatchFinished, RequestSettled})

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            self.joined(event.ticket, self._frame(event.ticket.request, event.at))
        elif isinstance(event, RequestSettled):
            if (span := self._members.pop(event.ticket, None)) is not None:
                outcome = event.ticket.outcome
                _end_frame(span, event.at, outcome.error if isinstance(outcome, Failed) else None, event.ticket)
        elif isinstance(event, RequestRejected):
            _end_frame(self._frame(event.request, event.at), event.at, event.error, None)
        else:
            super().__call__(event)

    def _frame(self, request: Any, at: float) -> Span:
        span = self._requests.start_span(f"frame {request.group}", Context(), start_time=_ns(at))
        note(span, {"reflex.feed": str(request.client), "reflex.group": request.group})
        return span


KINDS: Final[dict[str, type[Spans]]] = {"requests": Spans, "steps": StepSpans, "frames": FrameSpans}


def _end_frame(span: Span, at: float, error: BaseException | None, ticket: Ticket | None) -> None:
    if error is None:
        end_request(span, at, "ok", 200, None, ticket)
    elif isinstance(error, ReflexError):
        end_request(span, at, error.outcome, error.http_status, error, ticket)
    else:
        end_request(span, at, "failed", 500, ReflexError(str(error)), ticket)


def end_request(
    span: Span, at: float, outcome: str, status: int, error: ReflexError | None, ticket: Ticket | None
) -> None:
    """End the span of a request with its answer. ticket: None if it was not queued."""
    found: dict[str, AttributeValue] = {"reflex.outcome": outcome}
    if error is not None:
        found["error.type"] = error.code
    if ticket is not None:
        moment(span, "reflex.queued", ticket.admitted)
        if ticket.arrived > ticket.admitted:
            moment(span, "reflex.prepared", ticket.arrived)
        if ticket.started is not None:
            moment(span, "reflex.started", ticket.started)
            found["reflex.queue.seconds"] = ticket.started - ticket.arrived
            found["reflex.device.seconds"] = ticket.shared
            found["reflex.batches"] = ticket.batches
        if (batch := ticket.admission) is not None:
            found["reflex.batch.id"] = batch.id
            found["reflex.batch.size"] = batch.size
            found["reflex.batch.cause"] = batch.cause
    note(span, found)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR, _short("" if error is None else error.message) or outcome))
    span.end(_ns(at))


def batch_span(tracer: Tracer, event: BatchFinished, members: Sequence[SpanContext]) -> SpanContext:
    """Make the span of a batch. members: spans of its requests, `LINKS` at most."""
    batch = event.batch
    found: dict[str, AttributeValue] = {
        "reflex.group": batch.group,
        "reflex.batch.id": batch.id,
        "reflex.batch.size": len(batch),
        "reflex.batch.entered": len(batch.admitted),
        "reflex.batch.unlinked": len(batch) - len(members),
        "reflex.batch.cause": batch.cause.value,
        "reflex.batch.reason": batch.reason.value,
        "reflex.batch.cost": batch.cost,
    }
    if batch.stage:
        found["reflex.batch.stage"] = batch.stage
    if batch.predicted > 0.0:
        found["reflex.batch.expected_seconds"] = batch.predicted
    if batch.short_of:
        found["reflex.batch.short_of"] = batch.short_of
    if event.apart:
        found["reflex.batch.apart"] = True
    if event.crashed or event.apart:
        found["error.type"] = "processor_failed"
    for name, value in batch.notes.items():
        if isinstance(value, bool | int | float):
            found[f"reflex.note.{name}"] = value
    name = f"batch {batch.group} {batch.stage}".rstrip()
    links = [Link(member) for member in members]
    start = _ns(batch.scheduled_at)
    span = tracer.start_span(name, Context(), links=links, start_time=start)
    note(span, found)
    if event.crashed or event.apart:
        why = "its members run again in smaller batches" if event.apart else "no result"
        span.set_status(Status(StatusCode.ERROR, why))
    span.end(start + int(event.elapsed * 1e9))
    return span.get_span_context()


def _ns(at: float) -> int:
    """Nanoseconds since the epoch of a monotonic second."""
    before, wall, after = 0, 0, 0
    for _ in range(TRIES):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < APART_NS:  # else the thread was interrupted, and the span would be moved by the pause
            break
    return int(at * 1e9) + wall - after


# -- to the collector --------------------------------------------------------------------------------------------------


class SpanExport(SpanProcessor, SpanExporter):
    """The SDK's queue, thread and exporter; counts the ends of spans, and bounds the wait at the end.

    endpoint: of the collector, http(s)://HOST:PORT; /v1/traces is added unless its path ends so. OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES and the variables OTEL_EXPORTER_OTLP_… (headers, certificates, timeout, compression) count.
    """

    def __init__(self, endpoint: str, registry: CollectorRegistry, capacity: int = CAPACITY) -> None:
        self._where, self._capacity = endpoint, capacity
        spans = SeriesSet(SPANS, registry)
        self._series = {result: spans.counter("reflex_spans_total", result) for result in RESULTS}
        self._queued = self._taken = self._settled = 0  # spans queued, taken from the queue, sent or lost
        self._closed = self._given_up = False
        self._lost, self._reason = Throttle(SELDOM), LastReason()
        own: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = "reflex"
        self._resource = Resource.create(own)
        traces = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._exporter = OTLPSpanExporter(traces, session=_session(endpoint))
        self._processor = BatchSpanProcessor(self, capacity, GATHER_MS, min(CHUNK, capacity))

    def tracer(self, sampler: Sampler | None) -> Tracer:
        """Makes spans that end here. sampler: by default that of the environment."""
        provider = TracerProvider(sampler, self._resource, shutdown_on_exit=False)
        provider.add_span_processor(self)
        return provider.get_tracer("reflex_runtime", __version__)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span. Never waits; a span without room is counted and dropped."""
        if self._closed or self._queued - self._taken >= self._capacity:  # the SDK would drop the oldest, uncounted
            self._series["queue_full"].inc()
            return
        self._queued += 1
        self._processor.on_end(span)

    def close(self, timeout: float) -> bool:
        """Send the spans that wait. Returns whether that ended within so many seconds; the rest counts as failed."""
        self._closed = True
        ending = threading.Thread(target=self._processor.shutdown, name="reflex-spans-end", daemon=True)
        ending.start()
        ending.join(timeout)
        if not ending.is_alive():
            return True
        self._given_up, left = True, self._queued - self._settled
        self.shutdown()  # ends the pauses between attempts
        self._series["failed"].inc(left)
        log.warning("%s: %d spans were not sent within %g s and are lost", self._where, left, timeout)
        return False

    # -- on the SDK's thread -------------------------------------------------------------------------------------------

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken += len(spans)
        self._reason.text = ""
        result = SpanExportResult.FAILURE if self._given_up else self._exporter.export(spans)
        if self._given_up:  # `close` has counted them
            return result
        self._settled += len(spans)
        sent = result is SpanExportResult.SUCCESS
        self._series["exported" if sent else "failed"].inc(len(spans))
        if not sent and self._lost.count(time.monotonic()):
            lost, full = self._series["failed"].value, self._series["queue_full"].value
            why = self._reason.text[:300] or "it did not take them"
            told = "%s takes no spans; is a collector running there? %s (%d lost, and %d without room)"
            log.warning(told, self._where, why, lost, full)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._processor.force_flush(timeout_millis)


class LastReason(logging.Handler):
    """Keeps the library's last log message on a failure, instead of a line for each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        library = logging.getLogger("opentelemetry.exporter")
        library.propagate = False
        library.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _session(endpoint: str) -> requests.Session:
    """A session that does not use the environment's proxy for a collector on this machine."""
    session = requests.Session()
    host = urlsplit(endpoint).hostname or ""
    session.trust_env = not (host in ("localhost", "::1") or host.startswith("127."))
    return session
