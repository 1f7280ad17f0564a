"""The port of `reflex feeds`: /dashboard, /feeds, their pictures, /metrics, /health, /status and /docs.

Its server is on a thread with an event loop of its own: a caller cannot delay a feed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reflex_runtime.feeds.pictures import FeedPictures
from reflex_runtime.feeds.runtime.health import FeedSnapshot, RuntimeSnapshot
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.observe.batch_metrics import plain
from reflex_runtime.observe.live import Live, LiveSnapshot, own_process
from reflex_runtime.observe.metrics import COORDINATORS, FEEDS, FEEDS_AT_COORDINATORS, OUTPUTS
from reflex_runtime.run.coordinator import BatchCoordinator
from reflex_runtime.run.process import loop_factory
from reflex_runtime.settings import FeedsConfig, ServerConfig
from reflex_runtime.version import __version__
from reflex_runtime.web.access import NO_KEYS, Keys
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.fields import encode
from reflex_runtime.web.openapi import (
    HTML,
    PAGES,
    PLAIN_ERROR,
    TEXT,
    Operation,
    content,
    described,
    document_routes,
)
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.serve import Host, ReflexServer, ServerLife, uvicorn_config
from reflex_runtime.web.supervisor import bind, url_of
from reflex_runtime.web.watchers import Watchers, dashboard_routes, grid_route

MOST: Final = 256  # feeds in a snapshot: by name
ERROR: Final = 200  # characters of an error
FAILING: Final = 3  # batches in a row without an answer, from which on a coordinator is not well
WELL: Final = frozenset({"running", "ended", "stopped"})  # states of a feed that need no attention


class FeedPages:
    """The pages of one coordinator and its feeds.

    registry: what /metrics shows. keys: of the server. find: the route of a path that is not in `routes`.
    """

    def __init__(
        self,
        runtime: Runtime,
        coordinator: BatchCoordinator,
        pictures: FeedPictures,
        registry: CollectorRegistry,
        keys: Keys = NO_KEYS,
    ) -> None:
        told = partial(_server, runtime, coordinator)
        self._watchers = Watchers(partial(_FeedsLive, coordinator), coordinator.add_sink, coordinator.remove_sink, told)
        self._pictures = pictures

        def health(snapshot: RuntimeSnapshot) -> dict[str, Any]:
            return health_of(snapshot, {coordinator.id: coordinator.lost})

        async def status(request: HttpRequest) -> HttpResponse:
            snapshot = runtime.snapshot()
            return HttpResponse(200, encode(health(snapshot) | snapshot.as_dict()))

        routes = monitor_routes(registry, lambda: health(runtime.snapshot()))
        routes += [*dashboard_routes(self._watchers), grid_route(), Route("/status", status, operators=True)]
        routes += _documents([*routes, *pictures.every], keys)
        self.routes = {route.path: route for route in routes} | pictures.routes
        self.find = pictures.find

    def close(self) -> None:
        """End every answer."""
        self._watchers.close()
        self._pictures.close()


def monitor_routes(registry: CollectorRegistry, health: Callable[[], Mapping[str, Any]]) -> list[Route]:
    """/metrics, Prometheus text of the registry; /health, 200 when its `status` is `ok`, otherwise 503."""

    async def metrics(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, generate_latest(registry), CONTENT_TYPE_LATEST.encode())

    async def told(request: HttpRequest) -> HttpResponse:
        found = health()
        return HttpResponse(200 if found.get("status") == "ok" else 503, encode(found))

    return [Route("/metrics", metrics, open=True), Route("/health", told, open=True)]


def health_of(snapshot: RuntimeSnapshot, lost: Mapping[str, object]) -> dict[str, Any]:
    """The answer of `/health`, JSON-safe. lost: by coordinator, why it died, or None.

    `status` is `ok` when every feed is running, ended or was stopped, and every coordinator is alive and gave an answer
    within its last three batches; otherwise `failing`. A feed is not well before it is connected.
    """
    feeds = {name: {"state": feed.state, "age": feed.age} for name, feed in snapshot.feeds.items()}
    coordinators = {
        name: {"alive": lost.get(name) is None, "consecutive_errors": figures.consecutive_errors}
        for name, figures in snapshot.coordinators.items()
    }
    well = all(feed["state"] in WELL for feed in feeds.values()) and all(
        one["alive"] and one["consecutive_errors"] < FAILING for one in coordinators.values()
    )
    return {"status": "ok" if well else "failing", "feeds": feeds, "coordinators": coordinators}


class FeedSeries:
    """A Prometheus collector over a runtime. Nothing is counted here: a scrape takes one snapshot, so all series of a
    page belong to the same moment.

    snapshot: `Runtime.snapshot`, called on the thread of the scrape. registry: it is registered there.
    """

    def __init__(self, snapshot: Callable[[], RuntimeSnapshot], registry: CollectorRegistry) -> None:
        self._snapshot = snapshot
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Every series by name, type and help, without samples and without a snapshot."""
        return _series(RuntimeSnapshot(state="", uptime=0.0, feeds={}, coordinators={}))

    def collect(self) -> Iterable[Metric]:
        """Every series as it is now."""
        return _series(self._snapshot())


def _series(now: RuntimeSnapshot) -> Iterator[Metric]:
    both = {(c, name): share for c, figures in now.coordinators.items() for name, share in figures.feeds.items()}
    yield from (row.collect(("feed",), {(name,): feed for name, feed in now.feeds.items()}) for row in FEEDS)
    by_name = {(name,): figures for name, figures in now.coordinators.items()}
    yield from (row.collect(("coordinator",), by_name) for row in COORDINATORS)
    yield from (row.collect(("coordinator", "feed"), both) for row in FEEDS_AT_COORDINATORS)
    yield from (row.collect(("output",), {(name,): out for name, out in now.outputs.items()}) for row in OUTPUTS)


# -- the live view -----------------------------------------------------------------------------------------------------


class _FeedsLive(Live):
    """The fold over a coordinator's events, which come on its threads: a snapshot is taken between two of them."""

    def __init__(self, coordinator: BatchCoordinator, now: float) -> None:
        super().__init__(now)
        self._coordinator = coordinator

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        return self._coordinator.between(partial(super().snapshot, now, server))


def _server(runtime: Runtime, coordinator: BatchCoordinator) -> dict[str, Any]:
    now, queues = runtime.snapshot(), coordinator.queues()
    waiting = queues[coordinator.id]["queued"]
    running = queues[coordinator.id]["unsettled"] - waiting
    if coordinator.lost is not None:
        error = f"{coordinator.id} died: {coordinator.lost.message}"[:ERROR]
    else:
        unwell = [f"{name} is {feed.state}" for name, feed in now.feeds.items() if feed.state not in WELL]
        error = ", ".join(unwell[:3]) + (f" and {len(unwell) - 3} more" if len(unwell) > 3 else "")
    return {
        "product": "feeds",
        "version": __version__,
        "state": "ready" if health_of(now, {coordinator.id: coordinator.lost})["status"] == "ok" else "failing",
        "error": error,
        "unit": "requests",
        "queues": queues,
        "processes": [own_process("running", None, running, waiting)],
        "feeds": {name: _feed(feed) for name, feed in sorted(now.feeds.items())[:MOST]},
        "feeds_known": len(now.feeds),
        "outputs": plain(now.outputs),
    }


def _feed(feed: FeedSnapshot) -> dict[str, Any]:
    """The figures of one feed. p50, p95: seconds from a frame's capture to its answer, of the last 512."""
    as_they_are = ("state", "resolution", "fps", "age", "frames", "restarts")
    return {name: getattr(feed, name) for name in as_they_are} | {
        "p50": feed.latency.p50,
        "p95": feed.latency.p95,
        "answered": feed.processed,
        "drops": {reason: count for reason, count in feed.drops.items() if count},
        "error": (feed.error or "")[:ERROR],
    }


# -- /openapi.json and /docs -------------------------------------------------------------------------------------------

_ERRORS: Final = {
    "401": "the key is missing or wrong",
    "403": "without a key: a host name that is not this server's, or a page of another site",
    "404": "no such feed",
    "405": "only GET is taken",
    "408": "the request did not come in time",
    "422": "too many feeds are asked for",
    "429": "too many watch",
}
_SEVERAL: Final = "multipart/x-mixed-replace"
_NAME: Final = {"name": {"type": "string"}}
_OPERATIONS: Final = PAGES | {
    "/feeds": Operation("The page of all feeds", HTML),
    "/feeds/{name}.jpg": Operation("The next frame, small", content({}, "image/jpeg"), ("404",), parameters=_NAME),
    "/feeds/{name}.mjpeg": Operation("Frames until you leave", content({}, _SEVERAL), ("404", "429"), parameters=_NAME),
    "/feeds.mjpeg": Operation(
        "The same of several feeds: ?feed=A&feed=B", content({}, _SEVERAL), ("404", "422", "429")
    ),
    "/status": Operation("Every figure"),
    "/health": Operation("Whether every feed is well: 503 if not", unready=True),
    "/metrics": Operation("Prometheus series", TEXT),
}


def _documents(others: Iterable[Route], keys: Keys) -> list[Route]:
    """The document of these and the other routes, and its page."""
    routes = document_routes(lambda request: document)
    document = described("Reflex feeds", [*routes, *others], _OPERATIONS, PLAIN_ERROR, _ERRORS, keys)
    return routes


log = logging.getLogger("reflex.feeds.status")


class StatusServer:
    """Answers with these pages, which are made and called on its thread. address, url: where it listens, once it does.

    A context manager. ConfigError when the address cannot be bound.
    """

    def __init__(self, settings: FeedsConfig, pages: Callable[[], FeedPages]) -> None:
        self.address, self.url = (settings.host, settings.port), ""
        self._settings, self._pages = _limits_of(settings), pages
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], Any] = lambda: None

    def start(self) -> None:
        """Bind and answer from now on."""
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

    def __exit__(self, *_: object) -> None:
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

    async def _serve(self, listening: socket.socket, ready: Future[None]) -> None:
        pages = self._pages()
        app = App(self._settings, pages.routes, PLAIN, pages.find, missing=partial(_missing, pages.routes))
        host = Host("ready")
        host.on_drain.append(pages.close)
        life = ServerLife(app, host, drain_s=0.0)
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, life.stop.set)
        server = ReflexServer(uvicorn_config(app, self._settings), life)
        server.on_listening = partial(ready.set_result, None)
        await server.serve([listening])


def _limits_of(settings: FeedsConfig) -> ServerConfig:
    """The settings of the HTTP layer: those of the feeds, and limits for a server with few callers."""
    return ServerConfig(
        host=settings.host,
        api_key=settings.api_key,
        admin_key=settings.admin_key,
        allow_host=settings.allow_host,
        max_connections=256,
        body_timeout_s=10.0,
        max_bodies_mb=1.0,
        max_body_bytes=1 << 16,
    )


def _missing(routes: Mapping[str, Route], path: str) -> str:
    there = [known for known in ("/dashboard", "/feeds", "/metrics", "/health") if known in routes]
    return f"there is no {path[:200]} here, but {', '.join(there)}"
