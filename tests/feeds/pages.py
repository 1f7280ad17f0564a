"""A status server on a free port, and what it answers."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Gauge

from reflex_runtime.feeds.pages import FeedPages, monitor_routes, status_server

PATIENCE = 60.0


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = ""
    admin_key: str = ""
    allow_host: tuple[str, ...] = ()


class Server:
    """A status server that a test starts and stops."""

    def __init__(self, settings: Any, pages: Callable[[], FeedPages]) -> None:
        self._settings, self._pages, self._closing = settings, pages, ExitStack()
        self.address = ("", 0)

    def start(self) -> None:
        url = urlsplit(self._closing.enter_context(status_server(self._settings, self._pages)))
        self.address = url.hostname or "", url.port or 0

    def stop(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Page:
    """A server with one series, a health that the test sets, and further pages."""

    def __init__(self, pages: Callable[[], FeedPages] | None = None, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        Gauge("weather", "Degrees", registry=self.registry).set(21.5)
        self.health: Mapping[str, Any] | Exception = {"status": "ok", "feeds": {}, "coordinators": {}}
        self.server = Server(Settings(**settings), pages or self._plain)

    def _plain(self) -> FeedPages:
        """/metrics and /health alone."""
        routes = {route.path: route for route in monitor_routes(self.registry, self.told)}
        return SimpleNamespace(routes=routes, find=lambda path: None, close=lambda: None)

    def told(self) -> Mapping[str, Any]:
        if isinstance(self.health, Exception):
            raise self.health
        return self.health

    @contextmanager
    def asked(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, which may not end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.address[1], timeout=PATIENCE)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with self.asked(path, method, body, **headers) as answer:
            return answer.status, answer.headers, answer.read()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.address[1]), timeout=PATIENCE)
