"""The status pages over real sockets: what they answer, and that they start and stop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from feeds.pages import Page
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.feeds.pages import health_of
from reflex_runtime.feeds.runtime.health import FeedSnapshot, RuntimeSnapshot
from reflex_runtime.observe.batch_metrics import BatchMetrics
from reflex_runtime.web.serve import ReflexServer
from serving.place import Place


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
    assert b"\nweather 21.5\n" in body


@pytest.mark.parametrize(("said", "code"), [("ok", 200), ("failing", 503)])
def test_f14_health_is_200_only_when_all_is_well(page: Page, said: str, code: int) -> None:
    page.health = {"status": said, "feeds": {"cam1": {"state": "running", "age": 0.1}}}
    found, headers, body = page.ask("/health")
    assert (found, headers["Content-Type"], json.loads(body)) == (code, "application/json", page.health)


def test_f14_monitors_need_no_key_and_other_names_are_refused_without_one() -> None:
    with (keyed := Page(api_key="s3cret")).server, (page := Page()).server:
        assert [keyed.ask(path, Host="cams.example")[0] for path in ("/metrics", "/health")] == [200, 200]
        code, _, body = page.ask("/metrics", Host="cams.example")
        assert (code, json.loads(body)["error"]) == (403, "forbidden")


def test_what_is_not_there_is_404_in_json(page: Page) -> None:
    code, headers, body = page.ask("/")
    assert (code, headers["Content-Type"]) == (404, "application/json")
    assert json.loads(body)["message"] == "there is no / here, but /metrics, /health"


def test_only_get_and_head(page: Page) -> None:
    code, headers, body = page.ask("/metrics", "POST")
    assert (code, headers["Allow"], json.loads(body)["error"]) == (405, "GET", "method_not_allowed")
    assert page.ask("/metrics", "HEAD")[0] == 200


def test_a_page_that_fails_is_a_500_and_the_next_one_is_answered(page: Page) -> None:
    page.health = RuntimeError("no feeds")
    code, _, body = page.ask("/health")
    assert (code, json.loads(body)["error"]) == (500, "internal")
    assert page.ask("/metrics")[0] == 200


# -- life --------------------------------------------------------------------------------------------------------------


def test_stop_is_prompt_and_ends_what_is_open() -> None:
    with Place() as place, (page := Page(port=place.port)).server:
        with page.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            page.ask("/health")  # the one before was accepted
            page.server.stop()
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            page.connect()
        page.server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "reflex-status"]


def test_a_port_in_use_is_a_config_error_in_one_line(page: Page) -> None:
    port = page.server.address[1]
    with pytest.raises(ConfigError, match=rf"--host=127\.0\.0\.1 --port={port}: cannot be bound: Address"):
        Page(port=port).server.start()


@pytest.mark.parametrize("host", ["no such host\n.invalid", "256.1.1.1"])
def test_an_address_that_cannot_be_had_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot be bound") as caught:
        Page(host=host).server.start()
    assert "\n" not in str(caught.value)


def test_a_server_that_ends_before_it_listens_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(self: ReflexServer, sockets: Any) -> None:
        assert sockets

    monkeypatch.setattr(ReflexServer, "serve", serve)
    with pytest.raises(RuntimeError, match="ended before it listened on port 0"):
        Page().server.start()


def test_pages_that_cannot_be_made_fail_the_start_and_leave_no_thread() -> None:
    def pages() -> Any:
        raise ConfigError("no pages")

    made = Page(pages)
    with pytest.raises(ConfigError, match="no pages"):
        made.server.start()
    made.server.stop()
    with pytest.raises(ConnectionRefusedError):
        made.connect()


# -- health_of ---------------------------------------------------------------------------------------------------------


def runtime(state: str = "running", errors: int = 0) -> RuntimeSnapshot:
    feeds = {
        "cam1": FeedSnapshot(name="cam1", mode="live", source="x", state=state, age=0.25),
        "file": FeedSnapshot(name="file", mode="file", source="y", state="ended"),
    }
    coordinators = {"detector": BatchMetrics(consecutive_errors=errors)}
    return RuntimeSnapshot(state="running", uptime=1.0, feeds=feeds, coordinators=coordinators)


def test_f14_health_names_every_feed_and_coordinator() -> None:
    told = health_of(runtime(), None)
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
    told = health_of(snapshot, lost)
    assert (told["status"], told["coordinators"]["detector"]["alive"]) == (said, lost is None)
