"""`/metrics` and `/health` over HTTP, for `reflex feeds --port`: for a process that has no other server.

One thread accepts, and each connection has its own for one request. A slow caller has a few seconds in all and is then
cut off. Nothing polls, so stopping takes no longer than a wake-up.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.oldest import Oldest
from reflex_runtime.feeds.snapshot import RuntimeSnapshot

log = logging.getLogger("reflex.feeds.status")

REQUEST_S = 5.0  # seconds for a request to come in, and again for its answer to go out
LINGER_S = 1.0  # seconds to read what else was sent: closing before would cut off the answer on its way
HEAD_BYTES = 16 * 1024  # a request's line and headers; and as much of a body is read and thrown away
CONNECTIONS = 64  # at a time; with one more the oldest is cut off, as it is the slowest
RETRY_S = 0.05  # seconds until the next try to accept where one has failed
FAILING = 3  # batches in a row without an answer, from which on a coordinator is not well
WELL = frozenset({"running", "ended", "stopped"})  # states of a feed that need no attention


def health_of(snapshot: RuntimeSnapshot, lost: Mapping[str, object]) -> dict[str, Any]:
    """What `/health` says of a runtime, JSON-safe. lost: by coordinator, why it died, or None.

    `status` is `ok` when every feed is running, ended or was stopped, and every coordinator is alive and gave an answer
    within its last three batches; otherwise `failing`. A feed is not well before it is connected.
    """
    feeds = {name: {"state": feed.state, "age": feed.age} for name, feed in snapshot.feeds.items()}
    coordinators = {
        name: {"alive": lost.get(name) is None, "consecutive_errors": figures.consecutive_errors}
        for name, figures in snapshot.coordinators.items()
    }
    well = all(feed["state"] in WELL for feed in feeds.values()) and all(
        c["alive"] and c["consecutive_errors"] < FAILING for c in coordinators.values()
    )
    return {"status": "ok" if well else "failing", "feeds": feeds, "coordinators": coordinators}


class StatusServer:
    """Answers GET and HEAD of `/metrics` (Prometheus text) and `/health` (JSON) on a daemon thread.

    port: 0 takes a free one; `port` tells which after `start`. registry: what `/metrics` shows. health: called for each
    `/health`, on the connection's thread; 200 when its `status` is `ok`, otherwise 503.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.host, self.port = host, port
        self._pages: dict[str, Callable[[], _Page]] = {
            "/metrics": partial(_metrics, registry),
            "/health": partial(_health, health),
        }
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def start(self) -> None:
        """Bind and answer from now on. ConfigError when the address cannot be bound."""
        if self._server is not None:
            raise ConfigError("StatusServer.start: already started")
        listening = _bind(self.host, self.port)
        self.port = listening.getsockname()[1]
        self._server = _Server(listening, self._pages)
        self._wake, woken = socket.socketpair()
        self._thread = threading.Thread(
            target=self._accept, args=(self._server, woken), name="reflex-status", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and cut off open connections. May be called twice."""
        if self._server is None or self._thread is None or self._wake is None:
            return
        self._wake.close()
        self._thread.join()
        self._server.server_close()
        self._server.cut_off()
        self._server = self._thread = self._wake = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @staticmethod
    def _accept(server: _Server, woken: socket.socket) -> None:
        with woken, selectors.DefaultSelector() as selector:
            selector.register(server.socket, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while all(key.fileobj is not woken for key, _ in selector.select()):
                try:
                    connection, address = server.get_request()
                except BlockingIOError:  # it has left again
                    continue
                except OSError as error:  # such as no file descriptors; the next accept may succeed
                    log.warning("a connection could not be accepted: %s", error)
                    time.sleep(RETRY_S)
                    continue
                server.process_request(connection, address)


_Page = tuple[int, str, bytes]  # status, content type, body


def _metrics(registry: CollectorRegistry) -> _Page:
    return 200, CONTENT_TYPE_LATEST, generate_latest(registry)


def _health(health: Callable[[], Mapping[str, Any]]) -> _Page:
    told = health()
    return 200 if told.get("status") == "ok" else 503, "application/json", json.dumps(told).encode()


def _bind(host: str, port: int) -> socket.socket:
    listening = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(CONNECTIONS)
        listening.setblocking(False)  # a client that leaves before it is accepted must not block
    except (OSError, OverflowError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        shown = host if host.isprintable() and len(host) <= 200 else repr(host[:200])
        raise ConfigError(f"--host={shown} --port={port}: cannot be bound: {why}") from error
    return listening


class _Server(ThreadingHTTPServer):
    """The threads, one for each connection, and the connections that are open."""

    def __init__(self, listening: socket.socket, pages: Mapping[str, Callable[[], _Page]]) -> None:
        BaseServer.__init__(self, listening.getsockname(), _Handler)  # the other constructors bind
        self.socket = listening
        self.pages = pages
        self._open: Oldest[socket.socket] = Oldest()
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand the connection to a thread of its own."""
        with self._lock:
            self._open.put(request, time.monotonic())
            oldest = self._open.first() if len(self._open) > CONNECTIONS else None
            if oldest is not None:  # also if its thread does not notice for a while
                self._open.drop(oldest)
        if oldest is not None:
            self._cut(oldest)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self.handle_error(request, client_address)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """The connection is over: forget and close it."""
        with self._lock:
            self._open.drop(request)
        super().shutdown_request(request)

    def cut_off(self) -> None:
        """End every connection; its thread closes it."""
        with self._lock:
            for connection in self._open.all():
                self._cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a caller left or was too slow, which is not worth a line on the terminal."""
        log.debug("the connection from %s ended early", client_address, exc_info=True)

    @staticmethod
    def _cut(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: _Server
    server_version, sys_version = "reflex", ""

    def handle(self) -> None:
        """Read a request, answer it, and let the answer arrive."""
        self.rfile.close()
        self.rfile = io.BytesIO(self._head())  # parse_request reads lines from it
        self.raw_requestline = self.rfile.readline()
        if self.raw_requestline and self.parse_request():
            self._answer(*self._page())
        self._linger()

    def _head(self) -> bytes:
        """The request's line and headers; empty when none came in time, or too much did."""
        head, until = b"", time.monotonic() + REQUEST_S
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) >= HEAD_BYTES:
                self.requestline, self.command = "", "GET"
                self.send_error(431)
                return b""
            chunk = self._receive(until)
            if not chunk:
                return b""
            head += chunk
        self.connection.settimeout(REQUEST_S)
        return head

    def _receive(self, until: float) -> bytes:
        left = until - time.monotonic()
        if left <= 0.0:
            return b""
        self.connection.settimeout(left)
        received: bytes = self.connection.recv(4096)
        return received

    def _page(self) -> _Page:
        if self.command not in ("GET", "HEAD"):
            return _error(405, "method_not_allowed", f"{self.command}: only GET and HEAD are answered here")
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            return _error(404, "not_found", f"there is {' and '.join(self.server.pages)}, nothing else")
        try:
            return page()
        except Exception as error:
            log.exception("%s could not be answered", self.path)
            return _error(500, "internal", f"{type(error).__name__}: {error}")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is wrong with a request, in our form."""
        self.request_version = "HTTP/1.0"  # an unreadable request counts as HTTP 0.9, which has no status
        self._answer(*_error(code, "too_large" if code in (414, 431) else "invalid_request", message or "bad request"))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a monitor asks every few seconds."""

    def _linger(self) -> None:
        self.connection.shutdown(socket.SHUT_WR)
        left, until = HEAD_BYTES, time.monotonic() + LINGER_S
        while left > 0 and (chunk := self._receive(until)):
            left -= len(chunk)


def _error(status: int, code: str, message: str) -> _Page:
    return status, "application/json", json.dumps({"error": code, "message": message}).encode()
