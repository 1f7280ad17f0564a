"""The snapshots of several processes as one."""

from __future__ import annotations

from typing import Any

import pytest

from reflex_runtime.observe.live import (
    APART,
    BATCHES,
    CLIENTS,
    LiveBatch,
    LiveClient,
    LiveGroup,
    LiveParts,
    LiveSnapshot,
    added,
)


def batch(id: int, at: float) -> LiveBatch:
    return LiveBatch(id, "default", "", "idle", at, 0.0, 1.0, 1, 0, "", [], took=0.1)


def client(name: str, age: float, answers: int = 1, **more: Any) -> LiveClient:
    told = {"wire": "act", "rate": 1.0, "p95": None, "lost": 0, "why": ""} | more
    return LiveClient(name=name, group="default", age=age, answers=answers, **told)


def group(name: str = "default", **more: Any) -> LiveGroup:
    told = {"busy": 0.5, "batches": 1, "requests": 1, "rate": 1.0, "p50": 0.1, "p95": 0.2, "p99": 0.3, "error": 1.0}
    return LiveGroup(**(told | {"name": name, "outcomes": {"ok": 1}} | more))


def snapshot(**more: Any) -> LiveSnapshot:
    told = {"batches": [], "running": [], "left_out": 0, "groups": [], "clients": [], "clients_known": 0, "server": {}}
    return LiveSnapshot(**({"at": 0.0, "number": 1} | told | more))


def test_x4_a_caller_whose_requests_are_spread_over_processes_is_one() -> None:
    parts = LiveParts()
    one = client("c", 0.5, 3, p95=0.2, lost=1, why="queue_full")
    parts.take("w0", snapshot(clients=[one, client("a", 2.0)], clients_known=7))
    parts.take("w1", snapshot(clients=[client("c", 0.1, 4, p95=0.1, rate=2.0, wire="oip")], clients_known=1))
    found = parts.snapshot(0.0, {})
    both = client("c", 0.1, 7, p95=0.2, rate=3.0, lost=1, why="queue_full", wire="oip")
    assert found.clients == [client("a", 2.0), both]
    assert found.clients_known == 7  # the one that both know is one
    parts.take("w1", snapshot(clients=[client(f"n{i}", 9.0 - i / 99) for i in range(CLIENTS)], clients_known=CLIENTS))
    found = parts.snapshot(0.0, {})
    assert len(found.clients) == CLIENTS
    assert {"a", "c"} < {one.name for one in found.clients}  # answered last
    assert found.clients_known == 7 + CLIENTS


def test_x4_batches_of_two_processes_have_numbers_of_their_own_and_come_in_the_order_of_time() -> None:
    parts = LiveParts()
    parts.take("w0", snapshot(batches=[batch(0, 1.0), batch(1, 3.0)], running=[batch(2, 4.0)], left_out=1))
    parts.take("w1", snapshot(batches=[batch(0, 2.0)], left_out=2))
    parts.take("w1", snapshot(batches=[batch(1, 2.5)], left_out=3))  # before anybody looked
    found = parts.snapshot(0.0, {"product": "llm"})
    assert [(b.id, b.at) for b in found.batches] == [(0, 1.0), (1, 2.0), (APART + 1, 2.5), (APART, 3.0)]
    assert [b.id for b in found.running] == [2 * APART]
    assert [b.process for b in found.batches] == ["w0", "w1", "w1", "w0"]
    assert (found.left_out, found.number, found.server) == (6, 1, {"product": "llm"})
    again = parts.snapshot(1.0, {})
    assert (again.batches, [b.id for b in again.running], again.number) == ([], [2 * APART], 2)
    parts.forget("w0")
    assert parts.snapshot(2.0, {}).running == []
    for name in ("w0", "w1"):
        parts.take(name, snapshot(batches=[batch(i, float(i)) for i in range(BATCHES)]))
    found = parts.snapshot(3.0, {})
    assert (len(found.batches), found.left_out) == (BATCHES, BATCHES)


def test_x4_batches_of_two_snapshots_that_do_not_fit_are_counted_as_left_out() -> None:
    parts = LiveParts()
    for first in (0, BATCHES):
        parts.take("w0", snapshot(batches=[batch(first + i, float(first + i)) for i in range(BATCHES)]))
    found = parts.snapshot(0.0, {})
    assert (len(found.batches), found.left_out) == (BATCHES, BATCHES)


def test_x4_groups_of_processes_are_one_with_the_worst_tail() -> None:
    parts = LiveParts()
    parts.take("w0", snapshot(groups=[group(tokens=10.0, first_p50=0.1, gap_p99=0.5, p99=0.9)]))
    parts.take("w1", snapshot(groups=[group(tokens=5.0, requests=3, first_p50=0.3, p50=0.3, outcomes={"failed": 2})]))
    parts.take("w2", snapshot())
    (found,) = parts.snapshot(0.0, {}).groups
    assert (found.tokens, found.rate, found.requests) == (15.0, 2.0, 4)
    assert (found.p50, found.p99, found.first_p50, found.gap_p99) == pytest.approx((0.25, 0.9, 0.25, 0.5))
    assert found.outcomes == {"ok": 1, "failed": 2}
    assert found.busy == pytest.approx(1.0 / 3.0)  # of three devices


def test_x4_queues_are_added_and_what_is_no_number_stays() -> None:
    one = {"queued": 2, "paused": False, "by": {"urgent": 1}, "name": "x"}
    assert added(one, {"queued": 3, "paused": True, "by": {"urgent": 2, "more": 1}, "name": "y"}) == {
        "queued": 5, "paused": False, "by": {"urgent": 3, "more": 1}, "name": "x",
    }  # fmt: skip
