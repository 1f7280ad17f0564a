"""What is asked of the whole application on Ray is answered for all replicas, whichever one gets the request."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from on_ray.server import PATIENCE, RayServer

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray installs it into its own environment")


def answered(server: RayServer) -> dict[str, float]:
    """Requests that each replica has answered with success."""
    page = server.ask("GET", "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    found: dict[str, float] = {}
    for sample in families["reflex_requests"].samples:
        if sample.name == "reflex_requests_total" and sample.labels["outcome"] == "ok":
            found[sample.labels["replica"]] = found.get(sample.labels["replica"], 0.0) + sample.value
    return found


def test_x7_metrics_are_those_of_all_replicas(pair: RayServer) -> None:
    both, before = pair.replicas(), answered(pair)
    assert set(before) == both
    asked = [pair.act(episode_id=f"counted-{n}").replica for n in range(16)]
    for _ in range(4):  # whichever replica answers
        found = answered(pair)
        assert {name: found[name] - before[name] for name in both} == {name: asked.count(name) for name in both}


def test_x7_an_operator_changes_all_replicas_or_is_told_where_to_look(pair: RayServer) -> None:
    def statuses() -> set[int]:
        return {pair.act(episode_id=f"drill-{n}").status for n in range(12)}

    assert pair.ask("POST", "/admin/faults", {"faults": ["prod:raise:1"]}).json == {"faults": ["prod:raise:1"]}
    assert statuses() <= {500, 503}  # a replica that crashes five times in a row is drained
    assert pair.ask("POST", "/admin/faults", {"faults": []}).status == 200
    assert pair.ask("POST", "/admin/reset", {"slot": "prod"}).status == 200
    assert statuses() == {200}
    wrong = pair.ask("POST", "/admin/faults", {"faults": ["nonsense"]})
    assert (wrong.status, wrong.json["field"]) == (422, "faults")
    for method, path, where in (
        ("POST", "/admin/load", "deploy the other version"),
        ("GET", "/diagnostics/journal", "--record DIR"),
    ):
        refused = pair.ask(method, path, {} if method == "POST" else None)
        assert (refused.status, refused.json["error"]) == (409, "invalid_request")
        assert where in refused.json["message"]
        assert refused.headers["x-request-id"] == refused.json["request_id"]


def test_x7_diagnostics_are_of_each_replica(pair: RayServer) -> None:
    both = pair.replicas()
    for what in ("cost-model", "rollout"):
        assert set(pair.ask("GET", f"/diagnostics/{what}").json["replicas"]) == both


def shown(server: RayServer) -> Iterator[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", "/dashboard/stream")
    answer = connection.getresponse()
    try:
        while line := answer.readline():
            yield json.loads(line)
    finally:
        connection.close()


def test_x7_the_page_shows_the_robots_of_all_replicas(pair: RayServer) -> None:
    both, robots = pair.replicas(), {f"robot-{n}" for n in range(6)}
    snapshots = shown(pair)
    for snapshot in snapshots:
        names = {client["name"] for client in snapshot["clients"]}
        if robots <= names and {batch["process"] for batch in snapshot["batches"]} == both:
            break
        for robot in sorted(robots):
            pair.act(robot_id=robot)
    snapshots.close()  # type: ignore[attr-defined]
    assert {process["name"] for process in snapshot["server"]["processes"]} == both
    assert all(process["memory"] > 0 for process in snapshot["server"]["processes"])


def test_x7_a_replica_that_starts_later_has_what_was_changed(pair: RayServer) -> None:
    def names() -> set[str]:
        return set(pair.ask("GET", "/diagnostics/cost-model").json.get("replicas", {}))

    both = names()
    assert pair.ask("POST", "/admin/faults", {"faults": ["prod:raise:1"]}).status == 200
    os.kill(min(pair.pids("ray::ServeReplica")), signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while not (len(now := names()) == 2 and now - both):
        assert time.monotonic() < end
    (new,) = now - both
    answers = [pair.act(episode_id=f"late-{n}") for n in range(24)]
    assert {answer.status for answer in answers if answer.replica == new} <= {500, 503}
    assert any(answer.replica == new for answer in answers)
    assert pair.ask("POST", "/admin/faults", {"faults": []}).status == 200
    assert pair.ask("POST", "/admin/reset", {"slot": "prod"}).status == 200
    assert {pair.act(episode_id=f"well-{n}").status for n in range(12)} == {200}
