"""Requests that make the model raise are their own fault, as long as others are served (contract B18, V6)."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import pytest

from core.helpers import ask, finish, scheduler_of, take
from core.test_isolation import ERROR, closed_loop, some
from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.robots.versions.breaker import Breaker
from reflex_runtime.robots.versions.rollout import Rollout
from serving.harness import STATE, Server
from serving.requests import marked
from thinned import thinned

DEVICES = [(0.0, 0.002), (0.001, 0.002), (0.020, 0.002), (0.050, 0.0)]  # fixed part and that of each request


@pytest.mark.parametrize("device", thinned(DEVICES, [DEVICES[0], DEVICES[-1]]))
def test_v6_a_fifth_of_all_requests_bad_drains_no_slot(device: tuple[float, float]) -> None:
    rollout = Rollout(("prod",), Breaker(("prod",)))
    failed = closed_loop(*device, some(0.2), seconds=30.0, sink=rollout)[1]
    assert failed > 100
    assert rollout.breaker.verdict == "ok"


def test_v6_a_fifth_of_the_clients_bad_drains_no_slot() -> None:
    rollout = Rollout(("prod",), Breaker(("prod",)))
    failed = closed_loop(0.02, 0.002, lambda client, number: client % 5 == 0, sink=rollout)[1]
    assert failed > 20
    assert rollout.breaker.verdict == "ok"


@pytest.mark.parametrize("clients", [1, 40])
def test_v6_a_slot_that_serves_nobody_is_drained_all_the_same(clients: int) -> None:
    """After it has served for long, and whoever asks."""
    rollout = Rollout(("prod",), Breaker(("prod",)))
    failed = closed_loop(0.0, 0.002, lambda client, number: number > 20, clients, seconds=4.0, sink=rollout)[1]
    assert failed > 50
    assert rollout.breaker.verdict == "degraded"
    (change,) = rollout.changes
    assert "5 calls crashed in a row" in change.why


@pytest.mark.parametrize(("share", "requests"), [(0.02, 2_000), (0.2, 10_000), (0.5, 2_000)])
def test_v6_bad_requests_that_come_one_by_one_drain_no_slot_while_others_are_answered(
    share: float, requests: int
) -> None:
    """40 clients, each served alone. Runs of five bad ones come by chance: none of 0.02, a few of 0.2, many of 0.5."""
    rollout = Rollout(("prod",), Breaker(("prod",)))
    random = Random(3)
    scheduler = scheduler_of(name="prod", cost=UnitCost)
    for i in range(requests):
        ticket = ask(scheduler, float(i), group="prod", client=i % 40)
        finish(scheduler, take(scheduler, float(i)), i + 0.5, 0.5, Failed(ERROR) if random.random() < share else Done())
        for event in scheduler.take_events():
            rollout(event)
        assert rollout.breaker.verdict == "ok", (i, rollout.changes)
    assert ticket.outcome is not None


def test_v6_one_client_alone_is_told_from_a_slot_by_its_rate() -> None:
    """Nobody else is answered, so a fifth of its calls crashing is the slot's crash rate."""
    rollout = Rollout(("a", "b"), Breaker(("a", "b")))
    random = Random(3)
    scheduler = scheduler_of(name="b", cost=UnitCost)
    for i in range(200):
        ask(scheduler, float(i), group="b", client="only")
        finish(scheduler, take(scheduler, float(i)), i + 0.5, 0.5, Failed(ERROR) if random.random() < 0.2 else Done())
        for event in scheduler.take_events():
            rollout(event)
    assert rollout.breaker.verdict == "drain-b"


@pytest.mark.long  # many requests
def test_b18_a_fifth_of_all_requests_bad_fails_a_fifth_and_the_server_stays_ready(tiny: Path) -> None:
    with Server(tiny, "--inject-fault", "prod:raise:0.2") as server:
        seen: list[tuple[str, int]] = []

        def ask(robot: int) -> None:
            for i in range(60):
                name = f"robot-{robot}-{i}"
                seen.append((name, server.act(state=STATE, request_id=name, robot_id=f"r{robot}").status))

        threads = [threading.Thread(target=ask, args=(robot,)) for robot in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bad = marked("raise", 0.2, [name for name, _ in seen])
        assert {status for name, status in seen if name in bad} == {500}
        assert {status for name, status in seen if name not in bad} == {200}
        assert server.get("/health").json["status"] == "ok"
        assert server.get("/health").json["state"] == "ready"
