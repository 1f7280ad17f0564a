"""What a server has beside answers, with replicas in real processes: a ramp, recordings, spans, several policies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policies.serving.test_several_policies import (
    HAND,
    WEIGHTS,
    Robots,
    arm,
    ask_arm,
    ask_hand,
    both,
    hand,
    post,
    robots,
)
from reflex_runtime.placing import identity_of
from reflex_runtime.rendezvous import owner
from serving.collector import Collector
from serving.harness import Server
from serving.pair import Pair, episodes, outcome, rollout, two, until, version_of
from serving.requests import recorded

__all__ = ["robots"]

NAMES = ("replica-0", "replica-1")


def of(name: str, kind: str = "r") -> str:
    """A robot whose requests the replica of this name answers."""
    return next(f"{kind}{i}" for i in range(100) if owner(identity_of(f"{kind}{i}", None), NAMES) == name)


# -- a ramp, recordings and spans of one server ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def server(pair: Pair, collector: Collector, folder: Path) -> Iterator[Server]:
    ramp = ("--ramp", "50,100", "--ramp-every", "1s", "--guard", "error=50%")
    with two(pair, "--replicas", "2", *ramp, "--record", str(folder), "--otel", collector.url, split=None) as running:
        yield running


def test_v12_x7_a_ramp_counts_the_answers_of_all_replicas_and_all_follow_it(server: Server) -> None:
    (early,) = episodes("a", 1)
    asked = 0

    def goes_on() -> None:
        nonlocal asked
        for _ in range(20):
            asked += 1
            server.act(episode_id=f"load-{asked}", seed=1)
        assert version_of(server.act(episode_id=early, seed=1), 1) == "v1"

    goes_on()
    until(lambda: rollout(server)["ramp"]["state"] == "finished", goes_on)
    told = rollout(server)
    assert told["split"] == 0
    assert told["router"]["episodes"]["a"] + told["router"]["episodes"]["b"] == asked + 1  # those of both replicas
    found = [server.act(episode_id=f"late-{i}", seed=1) for i in range(12)]
    assert {answer.headers["x-reflex-replica"] for answer in found} == set(NAMES)
    assert {version_of(answer, 1) for answer in found} == {"v2"}
    assert version_of(server.act(episode_id=early, seed=1), 1) == "v1"  # it had started


def test_x6_x7_every_replica_sends_its_spans(server: Server, collector: Collector) -> None:
    for name in NAMES:
        assert server.act(robot_id=of(name), request_id=f"seen-{name}").status == 200
    ours = {f"seen-{name}": name for name in NAMES}
    spans = collector.wait(2, lambda span: span.attributes.get("reflex.request.id") in ours)
    batches = [collector.wait(1, lambda batch, span=span: span.ids in batch.links)[0] for span in spans]  # type: ignore[misc]
    assert len({batch.resource["process.pid"] for batch in batches}) == 2


def test_x7_every_replica_records_what_it_answers(server: Server, folder: Path) -> None:
    """The last test of this server, which it ends."""
    for name in NAMES:
        assert server.act(robot_id=of(name), episode_id=f"end-{name}", request_id=f"last-{name}").status == 200
        # 404 until the front has heard of the episode, a moment after the replica has answered.
        until(lambda name=name: (told := outcome(server, f"end-{name}")).status == 200 and told.json["counted"])
    asked = server.metrics()("reflex_requests_total", outcome="ok")
    until(lambda: server.get("/health").json["recording"]["recorded"] >= asked)
    assert server.stop() == 0
    found = {name: {line.request_id for line in recorded(folder / name)} for name in NAMES}
    assert sum(map(len, found.values())) == asked
    for name in NAMES:
        assert f"last-{name}" in found[name]


# -- several policies --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(robots: Robots) -> Iterator[Server]:
    with both(robots, "--replicas", "2") as running:
        yield running


def answers(server: Server, ask: Any, right: Any, **more: Any) -> bool:
    """Whether each of the two replicas answers this policy rightly."""
    found = [ask(server, robot_id=of(name)) for name in NAMES]
    assert [answer.headers["x-reflex-replica"] for answer in found] == list(NAMES)
    return all(right(answer, **more) for answer in found)


def test_p38_x7_one_of_several_policies_is_exchanged_in_every_replica(several: Server, robots: Robots) -> None:
    """And stays so in one that is started again, as do the faults of the other policy."""
    assert answers(several, ask_arm, arm)
    assert answers(several, ask_hand, hand)
    assert post(several, "/policies/hand/admin/load", slot="prod", path=str(robots.hand2)).status == 200
    assert answers(several, ask_hand, hand, weights=-HAND)
    assert answers(several, ask_arm, arm, weights=WEIGHTS)
    assert post(several, "/policies/arm/admin/faults", faults=["prod:raise:1"]).status == 200
    before = several.get("/health").json["replicas"][0]["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: (now := several.get("/health").json["replicas"][0])["state"] == "ready" and now["pid"] != before)
    assert answers(several, ask_hand, hand, weights=-HAND)
    assert [ask_arm(several, robot_id=of(name)).status for name in NAMES] == [500, 500]
    assert post(several, "/policies/arm/admin/faults", faults=[]).status == 200
    assert answers(several, ask_arm, arm)
    assert set(several.get("/health").json["policies"]) == {"arm", "hand"}


def test_p32_x7_episodes_and_outcomes_are_of_one_policy(several: Server) -> None:
    assert arm(ask_arm(several, episode_id="ep"))
    told = post(several, "/policies/arm/episodes/ep/outcome", success=True)
    assert (told.status, told.json["counted"]) == (200, True)
    assert post(several, "/policies/hand/episodes/ep/outcome", success=True).status == 404
    outcomes = several.get("/policies/arm/diagnostics/rollout").json["outcomes"]
    assert outcomes["prod"]["episodes"] == 1
    assert several.get("/policies/hand/diagnostics/rollout").json["outcomes"]["prod"]["episodes"] == 0
