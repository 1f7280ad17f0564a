"""Sends spans to an OpenTelemetry collector: the SDK's queue and thread, and its exporter over OTLP/HTTP.

What is added here are counts of what became of spans, a line of the log now and then, and an end that waits no longer
than it may. A collector that is down or slow costs spans, and never delays an answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SpanLink
from opentelemetry.trace import SpanContext as SdkContext
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags, TraceState
from prometheus_client import CollectorRegistry

from reflex_runtime.observe.metrics import SPANS, SeriesSet
from reflex_runtime.observe.trace_context import Span, SpanContext
from reflex_runtime.pacing import Throttle
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.observe")

CAPACITY: Final = 8192  # spans that wait to be sent
CHUNK: Final = 512  # spans sent at once: the default of the SDK
GATHER_MS: Final = 500.0  # until fewer of them are sent
RESULTS: Final = ("exported", "queue_full", "failed")
SELDOM: Final = 60.0  # seconds between two lines about spans that were lost
_SAMPLED, _UNSET = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)


class SpanExport(SpanExporter):
    """The queue of spans, and what sends them.

    endpoint: of the collector, http(s)://HOST:PORT; /v1/traces is added unless its path ends so. OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES and the variables OTEL_EXPORTER_OTLP_… (headers, certificates, timeout, compression) count.
    """

    def __init__(self, endpoint: str, registry: CollectorRegistry, capacity: int = CAPACITY) -> None:
        self._where, self._capacity = endpoint, capacity
        spans = SeriesSet(SPANS, registry)
        self._series = {result: spans.counter("reflex_spans_total", result) for result in RESULTS}
        self._put = self._taken = self._settled = 0  # spans that were queued, that went out, whose end is known
        self._closed = self._given_up = False
        self._lost, self._reason = Throttle(SELDOM), LastReason()
        own: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = "reflex"
        self._resource, self._scope = Resource.create(own), InstrumentationScope("reflex_runtime", __version__)
        self._exporter = OTLPSpanExporter(_traces(endpoint), session=_session(endpoint))
        self._processor = BatchSpanProcessor(self, capacity, GATHER_MS, min(CHUNK, capacity))

    def put(self, span: Span) -> bool:
        """Queue a span; False where there is no room, which is counted. Never waits."""
        if self._closed or self._put - self._taken >= self._capacity:  # the SDK would drop the oldest, uncounted
            self._series["queue_full"].inc()
            return False
        self._put += 1
        self._processor.on_end(self._readable(span))
        return True

    def close(self, timeout: float) -> bool:
        """Try to send what waits. Returns whether that was over within so many seconds; what was not sent counts."""
        self._closed = True
        ending = threading.Thread(target=self._processor.shutdown, name="reflex-spans-end", daemon=True)
        ending.start()
        ending.join(timeout)
        if not ending.is_alive():
            return True
        self._given_up, left = True, self._put - self._settled
        self.shutdown()  # ends the pauses between attempts
        self._series["failed"].inc(left)
        log.warning("%s: %d spans were not sent within %g s and are lost", self._where, left, timeout)
        return False

    # -- on the SDK's thread -------------------------------------------------------------------------------------------

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken += len(spans)
        self._reason.text = ""
        result = SpanExportResult.FAILURE if self._given_up else self._exporter.export(spans)
        if self._given_up:  # they are counted
            return result
        self._settled += len(spans)
        sent = result is SpanExportResult.SUCCESS
        self._series["exported" if sent else "failed"].inc(len(spans))
        if not sent and self._lost.count(time.monotonic()):
            lost, full = self._series["failed"].value, self._series["queue_full"].value
            why = self._reason.text[:300] or "it did not take them"
            log.warning("%s takes no spans: %s (%d lost, and %d without room)", self._where, why, lost, full)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        """The span as the SDK has it."""
        ahead = time.time_ns() - time.monotonic_ns()
        parent = SdkContext(span.context.trace_id, span.parent, True, _SAMPLED) if span.parent else None
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[SpanEvent(name, timestamp=int(at * 1e9) + ahead) for name, at in span.moments],
            links=[SpanLink(_context(link)) for link in span.links],
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=int(span.start * 1e9) + ahead,
            end_time=int(span.end * 1e9) + ahead,
            instrumentation_scope=self._scope,
        )


class LastReason(logging.Handler):
    """Keeps the last thing that the library says of a failure, in place of a line for each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        library = logging.getLogger("opentelemetry.exporter")
        library.propagate = False
        library.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _traces(endpoint: str) -> str:
    plain = endpoint.rstrip("/")
    return plain if plain.endswith("/v1/traces") else f"{plain}/v1/traces"


def _session(endpoint: str) -> requests.Session:
    """Without the environment's proxy for a collector on this machine."""
    session = requests.Session()
    host = urlsplit(endpoint).hostname or ""
    session.trust_env = not (host in ("localhost", "::1") or host.startswith("127."))
    return session


def _context(context: SpanContext) -> SdkContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SdkContext(context.trace_id, context.span_id, False, TraceFlags(int(context.sampled)), state)
