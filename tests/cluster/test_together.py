"""What all replicas on Ray answer together, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.cluster.together import (
    WITHIN,
    PeerAnswer,
    PeerRequest,
    RayLive,
    changes,
    concerns_all,
    together,
    unsure,
    why_not,
)
from reflex_runtime.telemetry.live import LiveBatch, LiveSnapshot


def request(path: str, method: str = "GET") -> PeerRequest:
    return PeerRequest(method, path, b"", [], None, b"", 0.0)


def answer(name: str, status: int = 200, body: Any = None, text: str = "") -> PeerAnswer:
    return PeerAnswer(name, status, b"text/plain" if text else b"application/json", text.encode() or encoded(body))


def told_of(answer: PeerAnswer) -> Any:
    return msgspec.json.decode(answer.body)


def encoded(body: Any) -> bytes:
    return msgspec.json.encode(body)


@pytest.mark.parametrize(
    ("method", "path", "all_of", "kept"),
    [
        ("GET", "/metrics", True, False),
        ("GET", "/policies/arm/metrics", True, False),
        ("POST", "/admin/split", True, True),
        ("POST", "/policies/arm/admin/rollback", True, True),
        ("POST", "/admin/faults", True, True),
        ("POST", "/admin/reset", True, False),
        ("GET", "/diagnostics/rollout", True, False),
        ("HEAD", "/metrics", False, False),
        ("POST", "/act", False, False),
        ("GET", "/health", False, False),
        ("POST", "/episodes/metrics/outcome", False, False),
        ("GET", "/policies/a/b/metrics", False, False),
    ],
)
def test_x7_what_is_asked_of_all_replicas(method: str, path: str, all_of: bool, kept: bool) -> None:
    assert concerns_all(method, path) is all_of
    assert changes(request(path, method)) is kept


def test_x7_what_has_no_answer_on_ray_says_where_to_look() -> None:
    assert "deploy the other version" in why_not("/policies/arm/admin/load")
    assert "--record DIR" in why_not("/diagnostics/journal")
    assert why_not("/admin/split") == why_not("/dashboard") == ""


def test_x7_a_page_of_metrics_has_the_replica_of_each_series() -> None:
    page = '# HELP x_total X\n# TYPE x_total counter\nx_total{slot="a"} %d.0\n'
    pages = [answer("r0", text=page % 3), answer("r1", 503, {}), answer("r2", text=page % 4)]
    told = together(request("/metrics"), pages)
    assert (told.status, told.content_type) == (200, b"text/plain")
    (family,) = text_string_to_metric_families(told.body.decode())
    found = {(sample.labels["replica"], sample.labels["slot"]): sample.value for sample in family.samples}
    assert found == {("r0", "a"): 3.0, ("r2", "a"): 4.0}


def test_x7_diagnostics_are_by_replica_and_a_wrong_key_is_told_as_it_is() -> None:
    path = request("/diagnostics/rollout")
    told = together(path, [answer("r0", 200, {"x": 1}), answer("r1", 200, {"x": 2})])
    assert msgspec.json.decode(told.body) == {"replicas": {"r0": {"x": 1}, "r1": {"x": 2}}}
    refused = answer("r0", 401, {"error": "unauthorized"})
    assert together(path, [refused, refused._replace(name="r1")]) == refused
    assert together(request("/metrics"), [refused]) == refused


def test_x7_a_change_is_done_by_all_or_says_who_has_not() -> None:
    split = request("/admin/split", "POST")
    done, wrong = answer("r0", 200, {"split": 20}), answer("r0", 422, {"error": "invalid_request"})
    assert together(split, [done, done._replace(name="r1")]) == done
    assert together(split, [wrong, wrong._replace(name="r1")]) == wrong
    other = answer("r1", 503, {"error": "shutting_down", "message": "it ends", "request_id": "q", "retry_safe": True})
    told = together(split, [done, other])
    body = msgspec.json.decode(told.body)
    assert (told.status, body["error"], body["request_id"], body["retry_safe"]) == (503, "not_ready", "q", True)
    assert body["message"] == "r1 refused what 1 others have done; ask again, which is safe: it ends"
    packed = other._replace(content_type=b"application/msgpack", body=msgspec.msgpack.encode(told_of(other)))
    assert together(split, [done, packed]) == told  # of a caller that accepts it


def test_x7_a_change_that_one_has_not_answered_is_not_called_done() -> None:
    done, wrong = answer("r0", 200, {"split": 20}), answer("r0", 401, {"error": "unauthorized"})
    split = request("/admin/split", "POST")
    told = unsure(split, [done, None, done])
    assert told == "1 of 3 replicas did not answer within 5 s and may not have done it; ask again, which is safe"
    sure = [(split, [done, done]), (split, [wrong, None]), (split, [None]), (request("/metrics"), [done, None])]
    assert [unsure(asked, found) for asked, found in sure] == [""] * 4


class Several:
    """Stands for all replicas; shown: their snapshots, by name, as of the next question."""

    def __init__(self) -> None:
        self.shown: dict[str, LiveSnapshot] = {}

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        assert (method, arguments) == ("live", ("r1",))
        return [*((name, msgspec.msgpack.encode(snapshot)) for name, snapshot in self.shown.items()), None]


def snapshot(at: float, queued: int) -> LiveSnapshot:
    batch = LiveBatch(1, "prod", "", "idle", at - 1.0, 0.0, 1.0, 1, 0, "", [], took=0.5)
    told = {"queues": {"prod": {"queued": queued}}, "processes": [{"name": "server", "pid": 7}]}
    return LiveSnapshot(at, 1, [batch], [], 0, [], [], 0, told)


def test_x7_the_page_has_the_queues_and_processes_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.cluster.together.time.monotonic", lambda: 100.0)

    async def check() -> None:
        peers = Several()
        peers.shown = {"r0": snapshot(99.9, 1), "r1": snapshot(5000.0, 2)}  # the clock of another machine
        live = RayLive(peers, "r1")
        live.snapshot(100.0, {})
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))  # type: ignore[arg-type]
        found = live.snapshot(100.0, {"product": "policies"})
        assert found.server["queues"] == {"prod": {"queued": 3}}
        assert [process["name"] for process in found.server["processes"]] == ["r0", "r1"]
        assert [(batch.process, batch.at) for batch in found.batches] == [("r0", 98.9), ("r1", 99.0)]
        del peers.shown["r0"]
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))  # type: ignore[arg-type]
        assert [process["name"] for process in live.snapshot(100.0, {}).server["processes"]] == ["r1"]

    asyncio.run(check())
    assert WITHIN < 4900.0
