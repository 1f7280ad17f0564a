"""What `reflex feeds` shows to those who watch it: the live fold, its queue, and every feed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from reflex_runtime.feeds.described import described_routes
from reflex_runtime.feeds.pictures import FeedPictures
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.feeds.runtime.snapshot import FeedSnapshot
from reflex_runtime.feeds.status import WELL, answers, health_of
from reflex_runtime.observe.live import Live, LiveSnapshot, own_process
from reflex_runtime.run.coordinator import BatchCoordinator
from reflex_runtime.version import __version__
from reflex_runtime.web.dashboard import dashboard_routes, grid_route
from reflex_runtime.web.json import encode
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.watchers import Watchers

MOST: Final = 256  # feeds in a snapshot: by name
ERROR: Final = 200  # characters of an error


class FeedsLive(Live):
    """The fold over a coordinator's events, which come on its threads: a snapshot is taken between two of them."""

    def __init__(self, coordinator: BatchCoordinator, now: float) -> None:
        super().__init__(now)
        self._coordinator = coordinator

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        return self._coordinator.between(partial(super().snapshot, now, server))


class FeedPages:
    """/dashboard, /feeds, and the pictures of the feeds of one coordinator; see `StatusPages`.

    key: whether callers need one.
    """

    def __init__(
        self, runtime: Runtime, coordinator: BatchCoordinator, pictures: FeedPictures, key: bool = False
    ) -> None:
        told = partial(_server, runtime, coordinator)
        fold = partial(FeedsLive, coordinator)
        self._watchers = Watchers(fold, coordinator.add_sink, coordinator.remove_sink, told)
        self._pictures = pictures
        status = Route("/status", partial(_status, runtime, coordinator))
        pages = [*dashboard_routes(self._watchers), grid_route(), status, *described_routes(key)]
        self.routes = {route.path: route for route in pages} | pictures.routes

    def find(self, path: str) -> Route | None:
        """The route of a picture."""
        return self._pictures.find(path)

    def close(self) -> None:
        """End every answer."""
        self._watchers.close()
        self._pictures.close()


async def _status(runtime: Runtime, coordinator: BatchCoordinator, request: HttpRequest) -> HttpResponse:
    """Every figure of a `RuntimeSnapshot`, and what /health says of them."""
    snapshot = runtime.snapshot()
    told = health_of(snapshot, {coordinator.id: coordinator.lost})
    return HttpResponse(200, encode(told | snapshot.as_dict()))


def _server(runtime: Runtime, coordinator: BatchCoordinator) -> dict[str, Any]:
    feeds = runtime.feed_snapshots()
    well = answers(coordinator.lost is None, coordinator.consecutive_errors)
    well = well and all(feed.state in WELL for feed in feeds.values())
    error = _attention(feeds, coordinator)
    queues = coordinator.queues()
    waiting = queues[coordinator.id]["queued"]
    running = queues[coordinator.id]["unsettled"] - waiting
    return {
        "product": "feeds",
        "version": __version__,
        "state": "ready" if well else "failing",
        "error": error,
        "unit": "requests",
        "queues": queues,
        "processes": [own_process("running", None, running, waiting)],
        "feeds": {name: _feed(feed) for name, feed in sorted(feeds.items())[:MOST]},
        "feeds_known": len(feeds),
        "outputs": {name: output.as_dict() for name, output in runtime.output_snapshots().items()},
    }


def _attention(feeds: Mapping[str, FeedSnapshot], coordinator: BatchCoordinator) -> str:
    """What is not well, in a few words."""
    if coordinator.lost is not None:
        return f"{coordinator.id} died: {coordinator.lost.message}"[:ERROR]
    unwell = [f"{name} is {feed.state}" for name, feed in feeds.items() if feed.state not in WELL]
    return ", ".join(unwell[:3]) + (f" and {len(unwell) - 3} more" if len(unwell) > 3 else "")


def _feed(feed: FeedSnapshot) -> dict[str, Any]:
    """The figures of one feed. p50, p95: seconds from a frame's capture to its answer, of the last 512."""
    return {
        "state": feed.state,
        "mode": feed.mode,
        "source": feed.source[:ERROR],
        "resolution": feed.resolution,
        "fps": feed.fps,
        "age": feed.age,
        "p50": feed.latency.p50,
        "p95": feed.latency.p95,
        "frames": feed.frames,
        "answered": feed.processed,
        "waiting": feed.waiting,
        "drops": {reason: count for reason, count in feed.drops.items() if count},
        "restarts": feed.restarts,
        "sink_errors": feed.sink_errors,
        "corrupt": feed.corrupt,
        "zones": feed.zones,
        "lines": feed.lines,
        "error": (feed.error or "")[:ERROR],
    }
