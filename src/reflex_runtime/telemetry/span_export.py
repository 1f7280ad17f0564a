"""Sends spans to an OpenTelemetry collector, over OTLP/HTTP, on a thread of its own.

Callers only append to a bounded queue. A collector that is down or slow costs spans, which are counted and logged
seldom, and never delays an answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SpanLink
from opentelemetry.trace import SpanContext as SdkContext
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags, TraceState
from prometheus_client import CollectorRegistry

from reflex_runtime.pacing import Throttle
from reflex_runtime.telemetry.spans import SpanFacts, span_series
from reflex_runtime.telemetry.trace_context import SpanContext
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.telemetry")

CAPACITY: Final = 8192  # spans that wait to be sent
CHUNK: Final = 512  # spans sent at once: the default of the OpenTelemetry SDK
GATHER: Final = 0.5  # seconds the thread waits for more spans after the first
SELDOM: Final = 60.0  # seconds between two lines about spans that were lost
_TURN: Final = 0.0005  # seconds of work after which the thread releases the interpreter
_BREATH: Final = 0.0001  # seconds that it pauses then
_UNSET, _KINDS = Status(StatusCode.UNSET), {True: SpanKind.SERVER, False: SpanKind.INTERNAL}
_EXPORTERS: Final = "opentelemetry.exporter"  # the logger of the library


class SpanExport:
    """The queue of spans, and the thread that sends them.

    endpoint: of the collector, http(s)://HOST:PORT; /v1/traces is added unless its path ends so. OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES and the variables OTEL_EXPORTER_OTLP_… (headers, certificates, timeout, compression) count.
    """

    def __init__(self, endpoint: str, registry: CollectorRegistry, capacity: int = CAPACITY) -> None:
        self._where, self._capacity = endpoint, capacity
        self._series = span_series(registry)
        self._queue: deque[SpanFacts] = deque()
        self._some, self._hurry = threading.Event(), threading.Event()
        self._told = self._closed = self._given_up = False
        self._sending = 0  # spans on their way
        self._lost, self._reason = Throttle(SELDOM), LastReason()
        own: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = "reflex"
        self._resource, self._scope = Resource.create(own), InstrumentationScope("reflex_runtime", __version__)
        self._exporter = OTLPSpanExporter(_traces(endpoint), session=_session(endpoint))
        self._thread = threading.Thread(target=self._main, name="reflex-spans", daemon=True)
        self._thread.start()

    def put(self, facts: SpanFacts) -> bool:
        """Queue a span; False where there is no room, which is counted. Never waits."""
        if self._closed or len(self._queue) >= self._capacity:
            self._series["queue_full"].inc()
            return False
        self._queue.append(facts)
        if not self._told:
            self._told = True
            self._some.set()
        elif len(self._queue) == CHUNK:
            self._hurry.set()
        return True

    def close(self, timeout: float) -> bool:
        """Try to send what waits. Returns whether that was over within so many seconds; what was not sent counts."""
        self._closed = True
        self._hurry.set()
        self._some.set()
        self._thread.join(timeout)
        left = len(self._queue) + self._sending
        if self._thread.is_alive():
            self._given_up = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends its pauses between attempts
            self._series["failed"].inc(left)
            log.warning("%s: %d spans were not sent within %g s and are lost", self._where, left, timeout)
            return False
        return True

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        while not (self._closed and not self._queue) and not self._given_up:
            self._some.wait()
            self._hurry.wait(GATHER)
            self._hurry.clear()
            self._some.clear()
            self._told = False
            while self._queue and not self._given_up:
                self._send([self._queue.popleft() for _ in range(min(CHUNK, len(self._queue)))])
        if not self._given_up:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send(self, facts: list[SpanFacts]) -> None:
        self._sending = len(facts)
        self._reason.text = ""
        try:
            sent = self._exporter.export(_Paced(self, facts)) is SpanExportResult.SUCCESS
        except Exception as error:
            sent, self._reason.text = False, f"{type(error).__name__}: {error}"
        if self._given_up:  # they are counted
            return
        self._sending = 0
        self._series["exported" if sent else "failed"].inc(len(facts))
        now = time.monotonic()
        if not sent and self._lost.count(now):
            lost, full = self._series["failed"].value, self._series["queue_full"].value
            why = self._reason.text[:300] or "it did not take them"
            log.warning("%s takes no spans: %s (%d lost, and %d without room)", self._where, why, lost, full)

    def made(self, facts: SpanFacts) -> ReadableSpan:
        """The span as the SDK has it."""
        span, ahead = facts.span(), time.time_ns() - time.monotonic_ns()
        parent = None
        if span.parent:
            parent = SdkContext(span.context.trace_id, span.parent, True, TraceFlags(TraceFlags.SAMPLED))
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[SpanEvent(name, timestamp=_ns(at, ahead)) for name, at in span.moments],
            links=[SpanLink(_context(link)) for link in span.links],
            kind=_KINDS[span.server],
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=_ns(span.start, ahead),
            end_time=_ns(span.end, ahead),
            instrumentation_scope=self._scope,
        )

    @property
    def hurries(self) -> bool:
        """Whether it no longer pauses for others."""
        return self._closed


class _Paced(Sequence[ReadableSpan]):
    """Spans that are made as they are read, in short slices, so that other threads get the interpreter."""

    def __init__(self, export: SpanExport, facts: list[SpanFacts]) -> None:
        self._export, self._facts = export, facts

    def __len__(self) -> int:
        return len(self._facts)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReadableSpan]: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | Sequence[ReadableSpan]:
        if isinstance(index, slice):
            return _Paced(self._export, self._facts[index])
        return self._export.made(self._facts[index])

    def __iter__(self) -> Iterator[ReadableSpan]:
        breath = time.monotonic() + _TURN
        for facts in self._facts:
            yield self._export.made(facts)
            if time.monotonic() > breath and not self._export.hurries:
                time.sleep(_BREATH)
                breath = time.monotonic() + _TURN


class LastReason(logging.Handler):
    """Keeps the last thing that the library says of a failure, in place of a line for each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        library = logging.getLogger(_EXPORTERS)
        library.propagate = False
        library.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _traces(endpoint: str) -> str:
    plain = endpoint.rstrip("/")
    return plain if plain.endswith("/v1/traces") else f"{plain}/v1/traces"


def _session(endpoint: str) -> Any:
    """Without the environment's proxy for a collector on this machine."""
    session = requests.Session()
    host = urlsplit(endpoint).hostname or ""
    session.trust_env = not (host in ("localhost", "::1") or host.startswith("127."))
    return session


def _context(context: SpanContext) -> SdkContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SdkContext(context.trace_id, context.span_id, False, TraceFlags(int(context.sampled)), state)


def _ns(at: float, ahead: int) -> int:
    """A time of the events as nanoseconds since the epoch. ahead: what the wall clock has more, in nanoseconds."""
    return int(at * 1e9) + ahead
