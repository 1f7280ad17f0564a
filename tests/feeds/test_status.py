"""The status page over real sockets: what it answers, and that nobody can keep it from answering."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.feeds import status
from reflex_runtime.feeds.snapshot import FeedSnapshot, RuntimeSnapshot
from reflex_runtime.feeds.status import StatusServer, health_of
from reflex_runtime.telemetry.batch_metrics import BatchMetrics

PATIENCE = 60.0


class Page:
    """A server with one series, and a health that the test sets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Gauge("weather", "Degrees", registry=self.registry).set(21.5)
        self.health: Mapping[str, Any] | Exception = {"status": "ok", "feeds": {}, "coordinators": {}}
        self.server = StatusServer("127.0.0.1", 0, self.registry, self.told)

    def told(self) -> Mapping[str, Any]:
        if isinstance(self.health, Exception):
            raise self.health
        return self.health

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None
    ) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)

    def raw(self, sent: bytes) -> bytes:
        """Everything that comes back until the connection ends."""
        with self.connect() as connection:
            connection.sendall(sent)
            return received(connection)


def received(connection: socket.socket) -> bytes:
    found = b""
    try:
        while chunk := connection.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    with made.server:
        yield made


# -- answers -----------------------------------------------------------------------------------------------------------


def test_f14_metrics_are_prometheus_text(page: Page) -> None:
    code, headers, body = page.ask("/metrics?from=anyone")
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert "\nweather 21.5\n" in body
    assert headers["Content-Length"] == str(len(body.encode()))


@pytest.mark.parametrize(("said", "code"), [("ok", 200), ("failing", 503)])
def test_f14_health_is_200_only_when_all_is_well(page: Page, said: str, code: int) -> None:
    page.health = {"status": said, "feeds": {"cam1": {"state": "running", "age": 0.1}}}
    found, headers, body = page.ask("/health")
    assert (found, headers["Content-Type"], json.loads(body)) == (code, "application/json", page.health)


@pytest.mark.parametrize("path", ["/metrics", "/health", "/nothing"])
def test_head_is_get_without_a_body(page: Page, path: str) -> None:
    code, headers, body = page.ask(path, "GET")
    empty = page.ask(path, "HEAD")
    assert empty[0] == code
    assert empty[1]["Content-Length"] == headers["Content-Length"] == str(len(body))
    assert page.raw(f"HEAD {path} HTTP/1.1\r\n\r\n".encode()).endswith(b"\r\n\r\n")


def test_what_is_not_there_is_404_in_json(page: Page) -> None:
    code, headers, body = page.ask("/")
    assert (code, headers["Content-Type"]) == (404, "application/json")
    assert json.loads(body) == {"error": "not_found", "message": "there is /metrics and /health, nothing else"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
def test_only_get_and_head(page: Page, method: str) -> None:
    code, headers, body = page.ask("/metrics", method, b"x" * 10_000 if method == "POST" else None)
    assert (code, headers["Allow"], json.loads(body)["error"]) == (405, "GET, HEAD", "method_not_allowed")


def test_a_body_that_is_still_being_sent_does_not_cost_the_answer(page: Page) -> None:
    with page.connect() as connection:
        connection.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 8000\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.0 405")
        for _ in range(4):
            connection.sendall(b"x" * 2000)  # without a reset


def test_a_page_that_fails_is_a_500_and_the_next_one_is_answered(page: Page) -> None:
    page.health = RuntimeError("no feeds")
    code, _, body = page.ask("/health")
    assert (code, json.loads(body)) == (500, {"error": "internal", "message": "RuntimeError: no feeds"})
    assert page.ask("/metrics")[0] == 200


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n", b"431"),
    ],
)
def test_a_bad_request_is_answered_in_json(page: Page, sent: bytes, code: bytes) -> None:
    head, _, body = page.raw(sent).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == code
    assert json.loads(body).keys() == {"error", "message"}


def test_a_request_that_comes_in_pieces_is_one(page: Page) -> None:
    with page.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert received(connection).startswith(b"HTTP/1.0 200")


def test_nothing_is_written_to_the_terminal(
    page: Page, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page.ask("/metrics")
    page.ask("/nothing")
    page.raw(b"nonsense\r\n\r\n")
    page.connect().close()
    with page.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends with a reset
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
    monkeypatch.setattr(status._Handler, "_page", lambda self: 1 / 0)
    assert page.raw(b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    page.server.stop()
    assert capfd.readouterr() == ("", "")


# -- nobody holds it up ------------------------------------------------------------------------------------------------


def test_slow_callers_do_not_hold_up_others(page: Page) -> None:
    slow = [page.connect() for _ in range(status.CONNECTIONS - 1)]
    for connection in slow:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
    assert page.ask("/health")[0] == 200
    for connection in slow:
        connection.close()


def test_a_caller_that_never_ends_its_request_is_cut_off(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REQUEST_S", 0.2)
    with page.connect() as connection, pytest.raises(OSError, match=r"reset|[Bb]roken"):
        trickle(connection)


def trickle(connection: socket.socket) -> None:
    """A byte now and then does not keep it open."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        connection.sendall(b"x")
        threading.Event().wait(0.01)


def test_a_caller_that_says_nothing_is_cut_off(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REQUEST_S", 0.1)
    assert page.raw(b"") == b""


def test_too_many_connections_cost_the_oldest(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CONNECTIONS", 3)
    connections = [page.connect() for _ in range(4)]
    assert received(connections[0]) == b""
    for connection in connections[1:]:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.0 200")
    for connection in connections:
        connection.close()


def test_a_connection_that_was_cut_does_not_count_any_more(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its thread has not noticed: it is cut once, and then the next one is."""

    class Connection:
        cut = 0

        def shutdown(self, how: int) -> None:
            self.cut += 1

    monkeypatch.setattr(status, "CONNECTIONS", 3)
    monkeypatch.setattr(ThreadingHTTPServer, "process_request", lambda *_: None)
    connections = [Connection() for _ in range(6)]
    assert page.server._server is not None
    for connection in connections:
        page.server._server.process_request(connection, ("127.0.0.1", 1))
    assert [connection.cut for connection in connections] == [1, 1, 1, 0, 0, 0]


def test_connections_that_have_ended_do_not_count(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CONNECTIONS", 10)
    with page.connect() as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(40):
            assert page.ask("/health")[0] == 200
        slow.sendall(b"\r\n")
        assert received(slow).startswith(b"HTTP/1.0 200")


# -- life --------------------------------------------------------------------------------------------------------------


def test_stop_is_prompt_and_ends_what_is_open(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REQUEST_S", PATIENCE)  # for which it would wait
    threads = set(threading.enumerate())
    with page.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        page.ask("/health")  # the one before was accepted
        began = time.monotonic()
        page.server.stop()
        assert received(connection) == b""
        assert time.monotonic() - began < PATIENCE / 2
    with pytest.raises(ConnectionRefusedError):
        page.connect()
    page.server.stop()
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE)
    assert not [t for t in threading.enumerate() if t.name == "reflex-status"]


def test_it_may_start_again_at_the_same_port(page: Page) -> None:
    port = page.server.port
    assert port > 0
    page.ask("/health")
    page.server.stop()
    page.server.start()
    assert page.server.port == port
    assert page.ask("/health")[0] == 200
    with pytest.raises(ConfigError, match="already started"):
        page.server.start()


def test_a_port_in_use_is_a_config_error_in_one_line(page: Page) -> None:
    port = page.server.port
    with pytest.raises(ConfigError) as caught:
        StatusServer("127.0.0.1", port, page.registry, page.told).start()
    assert str(caught.value) == f"--host=127.0.0.1 --port={port}: cannot be bound: Address already in use"


@pytest.mark.parametrize(("host", "port"), [("no such host\n.invalid", 0), ("256.1.1.1", 0), ("127.0.0.1", 99999)])
def test_an_address_that_cannot_be_had_is_a_config_error(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot be bound") as caught:
        StatusServer(host, port, CollectorRegistry(), dict).start()
    assert "\n" not in str(caught.value)


def test_a_server_that_was_never_started_stops() -> None:
    StatusServer("127.0.0.1", 0, CollectorRegistry(), dict).stop()


# -- health_of ---------------------------------------------------------------------------------------------------------


def runtime(state: str = "running", errors: int = 0) -> RuntimeSnapshot:
    feeds = {
        "cam1": FeedSnapshot(name="cam1", mode="live", source="x", state=state, age=0.25),
        "file": FeedSnapshot(name="file", mode="file", source="y", state="ended"),
    }
    coordinators = {"detector": BatchMetrics(consecutive_errors=errors)}
    return RuntimeSnapshot(state="running", uptime=1.0, feeds=feeds, coordinators=coordinators)


def test_f14_health_names_every_feed_and_coordinator() -> None:
    told = health_of(runtime(), {"detector": None})
    assert told == {
        "status": "ok",
        "feeds": {"cam1": {"state": "running", "age": 0.25}, "file": {"state": "ended", "age": None}},
        "coordinators": {"detector": {"alive": True, "consecutive_errors": 0}},
    }
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(
    ("snapshot", "lost", "said"),
    [
        (runtime("stopped"), None, "ok"),
        (runtime("connecting"), None, "failing"),
        (runtime("reconnecting"), None, "failing"),
        (runtime("failed"), None, "failing"),
        (runtime(errors=2), None, "ok"),
        (runtime(errors=3), None, "failing"),
        (runtime(), ProcessorError("dead"), "failing"),
    ],
)
def test_f14_one_that_is_not_well_is_enough(snapshot: RuntimeSnapshot, lost: Any, said: str) -> None:
    told = health_of(snapshot, {"detector": lost})
    assert (told["status"], told["coordinators"]["detector"]["alive"]) == (said, lost is None)
