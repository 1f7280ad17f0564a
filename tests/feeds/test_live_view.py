"""What those who watch feeds get: batches with feeds as members, and every feed's figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from feeds.fakes import Camera, Detector
from feeds.pages import Page
from reflex_runtime.feeds.pages import FeedPages
from reflex_runtime.feeds.pictures import FeedPictures
from reflex_runtime.feeds.runtime.pipeline import Pipeline, SourceError
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.run.coordinator import BatchConfig
from reflex_runtime.web.access import Keys


def test_x4_the_stream_of_feeds_has_their_batches_their_figures_and_what_is_not_well() -> None:
    runtime, detector = Runtime(), Detector()
    coordinator = runtime.coordinator(detector, BatchConfig(max_batch_size=4, max_latency=0.0))
    pictures = FeedPictures(lambda: runtime.names)
    page = Page(lambda: FeedPages(runtime, coordinator, pictures, CollectorRegistry()))
    door, lost = Camera(), Camera(refuse=[SourceError("no route")] * 1000)
    runtime.feed("door", door, Pipeline(batch=coordinator), [pictures.take], max_age=None)
    runtime.feed("yard", lost, Pipeline(batch=coordinator), [pictures.take])
    with page.server, runtime, page.asked("/dashboard/stream") as stream:
        first = snapshot(stream, lambda told: told["server"]["feeds"]["yard"]["restarts"] > 0)
        assert first["server"]["product"] == "feeds"
        door.give(1)
        told = snapshot(stream, lambda told: told["batches"])
        (batch,) = told["batches"]
        assert [batch["group"], [member[0] for member in batch["members"]]] == ["detector", ["door"]]
        server = snapshot(stream, lambda told: told["server"]["feeds"]["door"]["answered"] == 1)["server"]
        assert server["feeds"]["door"]["p95"] > 0
        assert server["feeds"]["yard"]["error"] == "no route"
        assert (server["state"], server["error"]) == ("failing", "yard is reconnecting")
        assert server["queues"]["detector"]["queued"] == 0
        assert page.ask("/dashboard")[0] == 200
        assert len(coordinator._audience._sinks) == 3
    assert len(coordinator._audience._sinks) == 2  # the fold has left with its watcher


def snapshot(stream: Any, found: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The next one of which it is so."""
    while True:
        told: dict[str, Any] = json.loads(stream.readline())
        if found(told):
            return told


def test_h7_the_document_describes_every_path_and_who_may_ask() -> None:
    runtime = Runtime()
    coordinator = runtime.coordinator(Detector(), BatchConfig())
    pictures = FeedPictures(lambda: runtime.names)
    page = Page(lambda: FeedPages(runtime, coordinator, pictures, CollectorRegistry(), keys=Keys("k")), api_key="k")
    with page.server:
        document = json.loads(page.ask("/openapi.json")[2])
        pages = page.server._pages()  # those that are served
        own = {path for path in pages.routes if not path.startswith("/dashboard/")}
        own |= {"/feeds/{name}.jpg", "/feeds/{name}.mjpeg"}
        assert own - {"/openapi.json", "/docs"} <= document["paths"].keys()
        for path, methods in document["paths"].items():
            assert methods.keys() - {"parameters"} == {"get"}
            status = page.ask(path.replace("{name}", "x"))[0]
            assert (status == 401) == ("security" in methods["get"]), (path, status)


def test_i18_nothing_can_be_changed_over_http() -> None:
    runtime = Runtime()
    coordinator = runtime.coordinator(Detector(), BatchConfig())
    pictures = FeedPictures(lambda: runtime.names)
    page = Page(lambda: FeedPages(runtime, coordinator, pictures, CollectorRegistry(), keys=Keys("k")), api_key="k")
    with page.server:
        asked = (("POST", "/feeds"), ("DELETE", "/feeds/door"), ("PATCH", "/feeds/door"), ("POST", "/admin/load"))
        for method, path in asked:
            assert page.ask(path, method, b"{}", X_Reflex_Key="k")[0] in (404, 405)
