"""The pages of `reflex feeds --port`: /dashboard, /feeds, /metrics, /health and the feeds' pictures, over the HTTP
layer of all servers, on a thread with an event loop of its own. A caller cannot delay a feed."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.snapshot import RuntimeSnapshot
from reflex_runtime.run.process import loop_factory
from reflex_runtime.web.app import App
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.json import encode
from reflex_runtime.web.listen import bind, url_of
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.serve import ReflexServer, ServerLife, uvicorn_config

log = logging.getLogger("reflex.feeds.status")

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
        answers(bool(c["alive"]), c["consecutive_errors"]) for c in coordinators.values()
    )
    return {"status": "ok" if well else "failing", "feeds": feeds, "coordinators": coordinators}


def answers(alive: bool, consecutive_errors: int) -> bool:
    """Whether a coordinator is well."""
    return alive and consecutive_errors < FAILING


class StatusSettings(Protocol):
    """host, port: port 0 takes a free one. api_key, allow_host: see `web.trust`."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def api_key(self) -> str: ...
    @property
    def allow_host(self) -> tuple[str, ...]: ...


class StatusPages(Protocol):
    """Further pages. find: the route of a path that is not in `routes`. close: end what is still being answered."""

    @property
    def routes(self) -> Mapping[str, Route]: ...
    def find(self, path: str) -> Route | None: ...
    def close(self) -> None: ...


class StatusServer:
    """Answers GET and HEAD of `/metrics` (Prometheus text), `/health` (JSON) and further pages on a daemon thread.

    registry: what `/metrics` shows. health: called for each `/health`; 200 when its `status` is `ok`, otherwise 503.
    pages: made and called on the thread. address, url: where it listens, once it has started.
    """

    def __init__(
        self,
        settings: StatusSettings,
        registry: CollectorRegistry,
        health: Callable[[], Mapping[str, Any]],
        pages: Callable[[], StatusPages] | None = None,
    ) -> None:
        self.address, self.url = (settings.host, settings.port), ""
        self._settings = _StatusLimits(settings)
        self._own = {
            "/metrics": Route("/metrics", partial(_metrics, registry), open=True),
            "/health": Route("/health", partial(_health, health), open=True),
        }
        self._pages = pages
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], Any] = lambda: None

    def start(self) -> None:
        """Bind and answer from now on. ConfigError when the address cannot be bound."""
        if self._thread is not None:
            raise ConfigError("StatusServer.start: already started")
        listening = bind(*self.address)
        listening.set_inheritable(False)
        self.address, self.url = listening.getsockname()[:2], url_of(listening)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(listening, ready), name="reflex-status", daemon=True)
        self._thread.start()
        ready.result()

    def stop(self) -> None:
        """Stop answering and cut off open connections. May be called twice."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._stop()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _main(self, listening: socket.socket, ready: Future[None]) -> None:
        try:
            with listening, asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(self._serve(listening, ready))
        except BaseException as error:
            if ready.done():
                log.exception("the status pages are gone")
            else:
                ready.set_exception(error)

    @property
    def port(self) -> int:
        return self.address[1]

    async def _serve(self, listening: socket.socket, ready: Future[None]) -> None:
        pages = self._pages() if self._pages is not None else None
        routes = {**self._own, **(pages.routes if pages is not None else {})}
        find = pages.find if pages is not None else lambda path: None
        app = App(self._settings, routes, PLAIN, find, missing=partial(_missing, routes))
        life = ServerLife(app, _Pages(pages), drain_s=0.0)
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, life.stop.set)
        server = ReflexServer(uvicorn_config(app, self._settings), life)
        server.on_listening = partial(ready.set_result, None)
        await server.serve([listening])


class _Pages:
    """The pages, as `web.serve` takes a product: they are there at once."""

    state, error, unusable, writes_files = "ready", "", False, False

    def __init__(self, pages: StatusPages | None) -> None:
        self._pages = pages

    async def start(self) -> None:
        """Nothing is loaded."""

    def drain(self) -> None:
        if self._pages is not None:
            self._pages.close()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        return True

    def turn_files(self) -> None:
        """There are none."""


class _StatusLimits:
    """The settings of the HTTP layer: those of the feeds, and limits for a server that is asked by few."""

    max_connections: Final = 256
    idle_timeout_s: Final = 75.0
    head_timeout_s: Final = 10.0
    body_timeout_s: Final = 10.0
    max_bodies_mb: Final = 1.0
    max_body_bytes: Final = 1 << 16
    drain_timeout_s: Final = 0.0
    ssl_certfile: Final = ""
    ssl_keyfile: Final = ""

    def __init__(self, settings: StatusSettings) -> None:
        self.host, self.api_key, self.allow_host = settings.host, settings.api_key, settings.allow_host


async def _metrics(registry: CollectorRegistry, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, generate_latest(registry), CONTENT_TYPE_LATEST.encode())


async def _health(health: Callable[[], Mapping[str, Any]], request: HttpRequest) -> HttpResponse:
    told = health()
    return HttpResponse(200 if told.get("status") == "ok" else 503, encode(told))


def _missing(routes: Mapping[str, Route], path: str) -> str:
    there = [known for known in ("/dashboard", "/feeds", "/metrics", "/health") if known in routes]
    return f"there is no {path[:200]} here, but {', '.join(there)}"
