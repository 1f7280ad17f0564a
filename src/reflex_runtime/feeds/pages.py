"""The port of `reflex feeds`: /dashboard, /feeds, their pictures, /metrics, /health, /status and /docs.

The server runs on its own thread with its own event loop, so that callers do not delay feeds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

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
from reflex_runtime.web.openapi import HTML, PAGES, PLAIN_ERROR, TEXT, Operation, content, described, document_routes
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.serve import Host, ReflexServer, uvicorn_config
from reflex_runtime.web.supervisor import bind, url_of
from reflex_runtime.web.watchers import Watchers, dashboard_routes, grid_route

MOST: Final = 256  # feeds in the dashboard's snapshot: the first ones by name
ERROR: Final = 200  # characters of an error there
FAILING: Final = 3  # failed batches in a row after which the coordinator counts as failing
WELL: Final = frozenset({"running", "ended", "stopped"})  # states of a feed that need no attention


class FeedPages:
    """The pages of one coordinator and its feeds.

    registry: /metrics has its series. keys: of the server. find: gives the route of a path that is not in `routes`.
    """

    def __init__(
        self,
        runtime: Runtime,
        coordinator: BatchCoordinator,
        pictures: FeedPictures,
        registry: CollectorRegistry,
        keys: Keys = NO_KEYS,
    ) -> None:
        live, facts = partial(_FeedsLive, coordinator), partial(_server, runtime, coordinator)
        self._watchers = Watchers(live, coordinator.add_sink, coordinator.remove_sink, facts)
        self._pictures = pictures

        async def status(request: HttpRequest) -> HttpResponse:
            snapshot = runtime.snapshot()
            return HttpResponse(200, encode(health_of(snapshot, coordinator.lost) | snapshot.as_dict()))

        routes = monitor_routes(registry, lambda: health_of(runtime.snapshot(), coordinator.lost))
        routes += [*dashboard_routes(self._watchers), grid_route(), Route("/status", status, operators=True)]
        documents = document_routes(lambda request: document)
        every = [*documents, *routes, *pictures.every]
        document = described("Reflex feeds", every, _OPERATIONS, PLAIN_ERROR, keys)
        self.routes = {route.path: route for route in (*routes, *documents)} | pictures.routes
        self.find = pictures.find

    def close(self) -> None:
        """End every answer."""
        self._watchers.close()
        self._pictures.close()


def monitor_routes(registry: CollectorRegistry, health: Callable[[], Mapping[str, Any]]) -> list[Route]:
    """/metrics, Prometheus text of the registry; /health, 200 if its `status` is `ok`, else 503."""

    async def metrics(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, generate_latest(registry), CONTENT_TYPE_LATEST.encode())

    async def answer(request: HttpRequest) -> HttpResponse:
        found = health()
        return HttpResponse(200 if found["status"] == "ok" else 503, encode(found))

    return [Route("/metrics", metrics, open=True), Route("/health", answer, open=True)]


def health_of(snapshot: RuntimeSnapshot, lost: object) -> dict[str, Any]:
    """The answer of `/health`, JSON-safe. lost: why the coordinator died, or None.

    `status` is `ok` if every feed is running, ended or was stopped, and the coordinator is alive and answered within
    its last three batches; otherwise `failing`, also while a feed connects.
    """
    feeds = {name: {"state": feed.state, "age": feed.age} for name, feed in snapshot.feeds.items()}
    coordinators = {
        name: {"alive": lost is None, "consecutive_errors": figures.consecutive_errors}
        for name, figures in snapshot.coordinators.items()
    }
    well = all(feed["state"] in WELL for feed in feeds.values()) and all(
        one["alive"] and one["consecutive_errors"] < FAILING for one in coordinators.values()
    )
    return {"status": "ok" if well else "failing", "feeds": feeds, "coordinators": coordinators}


class FeedSeries:
    """A Prometheus collector. A scrape takes one snapshot of a runtime, so that its series belong together.

    snapshot: `Runtime.snapshot`, called on the thread of the scrape. registry: it registers itself there.
    """

    def __init__(self, snapshot: Callable[[], RuntimeSnapshot], registry: CollectorRegistry) -> None:
        self._snapshot = snapshot
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Every series, without samples."""
        return _series(RuntimeSnapshot(state="", uptime=0.0, feeds={}, coordinators={}))

    def collect(self) -> Iterable[Metric]:
        """Every series with its samples."""
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
    """The dashboard's figures. Events come on the coordinator's threads; a snapshot is taken while none is handled."""

    def __init__(self, coordinator: BatchCoordinator, now: float) -> None:
        super().__init__(now)
        self._coordinator = coordinator

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        return self._coordinator.between(partial(super().snapshot, now, server))


def _server(runtime: Runtime, coordinator: BatchCoordinator) -> dict[str, Any]:
    """The facts of the server and its feeds, for the dashboard."""
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
        "state": "ready" if health_of(now, coordinator.lost)["status"] == "ok" else "failing",
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
    same_names = ("state", "resolution", "fps", "age", "frames", "restarts")
    return {name: getattr(feed, name) for name in same_names} | {
        "p50": feed.latency.p50,
        "p95": feed.latency.p95,
        "answered": feed.processed,
        "drops": {reason: count for reason, count in feed.drops.items() if count},
        "error": (feed.error or "")[:ERROR],
    }


# -- /openapi.json and /docs -------------------------------------------------------------------------------------------

_MULTIPART: Final = "multipart/x-mixed-replace"
_NAME: Final = {"name": {"type": "string"}}
_OPERATIONS: Final = PAGES | {
    "/feeds": Operation("The page of all feeds", HTML),
    "/feeds/{name}.jpg": Operation("The next frame, small", content({}, "image/jpeg"), ("404",), parameters=_NAME),
    "/feeds/{name}.mjpeg": Operation(
        "Frames until you disconnect", content({}, _MULTIPART), ("404", "429"), parameters=_NAME
    ),
    "/feeds.mjpeg": Operation("Those of several feeds: ?feed=A&feed=B", content({}, _MULTIPART), ("404", "422", "429")),
    "/status": Operation("Every figure"),
    "/health": Operation("Whether every feed is well: 503 if not", unready=True),
    "/metrics": Operation("Prometheus series", TEXT),
}


log = logging.getLogger("reflex.feeds.status")


@contextmanager
def status_server(settings: FeedsConfig, pages: Callable[[], FeedPages]) -> Iterator[str]:
    """Inside, these pages are served at the yielded address. They are made and called on a thread of the server.

    Raises ConfigError if the address cannot be bound.
    """
    listening = bind(settings.host, settings.port)
    listening.set_inheritable(False)
    ready: Future[Callable[[], Any]] = Future()  # once it listens: the function that stops it

    def run() -> None:
        try:
            with listening, asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(_serve(settings, pages, listening, ready))
            if not ready.done():
                raise RuntimeError(f"the server of the status pages ended before it listened on port {settings.port}")
        except BaseException as error:
            if ready.done():
                log.exception("the server of the status pages failed")
            else:
                ready.set_exception(error)

    thread = threading.Thread(target=run, name="reflex-status", daemon=True)
    thread.start()
    try:
        stop = ready.result()
        try:
            yield url_of(listening)
        finally:
            with suppress(RuntimeError):  # the server's loop is closed already
                stop()
    finally:
        thread.join()


async def _serve(
    settings: FeedsConfig, make: Callable[[], FeedPages], listening: socket.socket, ready: Future[Callable[[], Any]]
) -> None:
    pages = make()
    limits = ServerConfig(  # for few callers
        host=settings.host, api_key=settings.api_key, admin_key=settings.admin_key, allow_host=settings.allow_host,
        max_connections=256, body_timeout_s=10.0, max_bodies_mb=1.0, max_body_bytes=1 << 16,
    )  # fmt: skip
    app = App(limits, pages.routes, PLAIN, pages.find, missing=partial(_missing, pages.routes))
    host = Host("ready")
    host.on_drain.append(pages.close)
    host.attach(app, drain_s=0.0)
    stop = partial(asyncio.get_running_loop().call_soon_threadsafe, host.stopping.set)
    server = ReflexServer(uvicorn_config(app, limits), host)
    server.on_listening = partial(ready.set_result, stop)
    await server.serve([listening])


def _missing(routes: Mapping[str, Route], path: str) -> str:
    there = [known for known in ("/dashboard", "/feeds", "/metrics", "/health") if known in routes]
    return f"there is no {path[:200]} here, but {', '.join(there)}"
