"""An OTLP/HTTP receiver for tests: real sockets, and what came as `Got`, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .harness import PATIENCE


class Got(NamedTuple):
    """A span that came. Ids are in hexadecimal digits; parent is "" without one. links: (trace, span)."""

    name: str
    trace: str
    span: str
    parent: str
    state: str
    kind: int
    status: int
    message: str
    start: int
    end: int
    attributes: dict[str, Any]
    moments: dict[str, int]
    links: list[tuple[str, str]]
    resource: dict[str, Any]

    @property
    def ids(self) -> tuple[str, str]:
        return self.trace, self.span


class Collector:
    """Use it in a with statement. answers: with this status. held: a request waits until `release`."""

    def __init__(self, answers: int = 200, held: bool = False) -> None:
        self.answers = answers
        self.spans: list[Got] = []
        self.headers: list[dict[str, str]] = []
        self.asked = 0
        self._come = threading.Condition()
        self._open = threading.Event()
        if not held:
            self._open.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def release(self) -> None:
        """Answer what waits, and from now on at once."""
        self._open.set()

    def wait(self, count: int = 1, where: Callable[[Got], bool] = lambda span: True) -> list[Got]:
        """The spans that fulfil a condition, once there are so many."""

        def found() -> list[Got]:
            return [span for span in self.spans if where(span)]

        with self._come:
            assert self._come.wait_for(lambda: len(found()) >= count, PATIENCE), self.spans
            return found()

    def wait_asked(self, count: int = 1) -> None:
        """Until so many requests have come, answered or not."""
        with self._come:
            assert self._come.wait_for(lambda: self.asked >= count, PATIENCE)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """A request; the status that answers it."""
        with self._come:
            self.asked += 1
            self._come.notify_all()
        assert self._open.wait(PATIENCE)
        if self.answers != 200:
            return self.answers
        data = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        with self._come:
            self.headers.append(headers)
            self.spans += _spans(ExportTraceServiceRequest.FromString(data)) if path == "/v1/traces" else []
            self._come.notify_all()
        return 200


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(collector.take(self.path, told, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _spans(sent: ExportTraceServiceRequest) -> list[Got]:
    return [
        Got(
            s.name, s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(), s.trace_state, s.kind, s.status.code,
            s.status.message, s.start_time_unix_nano, s.end_time_unix_nano, _attributes(s.attributes),
            {event.name: event.time_unix_nano for event in s.events},
            [(link.trace_id.hex(), link.span_id.hex()) for link in s.links], _attributes(of.resource.attributes),
        )
        for of in sent.resource_spans for scope in of.scope_spans for s in scope.spans
    ]  # fmt: skip


def _attributes(found: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in found}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
