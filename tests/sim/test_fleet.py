"""Robots on several replicas: who owns whom, what is lost with a replica, and how many are needed."""

from __future__ import annotations

import re

import pytest
from bench.sim.__main__ import main
from bench.sim.fleet import FleetPlan, Outage, name_of, run_fleet, size_fleet
from bench.sim.rendezvous import owner

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.sim import Affine

PLAN = FleetPlan(40, 0.5, 0.100, Affine(0.020, 0.002), 0.03, duration=6.0, warmup=1.0)
SHORT = ("fleet", "--duration-s", "6", "--warmup-s", "1", "--robots", "40")


def test_x7_replicas_share_the_robots_by_hash_and_none_is_lost() -> None:
    found = run_fleet(PLAN, 2)
    owned = [owner(f"caller-{i}", [name_of(0), name_of(1)]) for i in range(40)]
    assert found.robots == max(owned.count(name_of(0)), owned.count(name_of(1)))
    assert set(found.report.outcomes) == {"ok"}
    assert len(found.report.clients) == 40
    one = run_fleet(PLAN, 1)
    assert found.busiest < one.busy
    assert (found.report.p50 or 0.0) < (one.report.p50 or 1.0)


def test_x3_the_same_fleet_runs_alike_also_with_a_loss() -> None:
    first, second = (run_fleet(PLAN, 2, [Outage(0, 2.0, 4.0)]) for _ in range(2))
    assert [answer[1:] for answer in first.run.answers] == [answer[1:] for answer in second.run.answers]
    assert first.report == second.report


def test_x7_a_replica_that_dies_loses_what_it_had_and_its_robots_ask_another_at_once() -> None:
    found = run_fleet(PLAN, 2, [Outage(0, 3.0, 4.5)])
    lost = [a for a in found.run.answers if a.outcome == "drained"]
    owned = {f"caller-{i}" for i in range(40) if owner(f"caller-{i}", [name_of(0), name_of(1)]) == name_of(0)}
    assert lost
    assert {a.ended for a in lost} == {3.0}
    assert {a.request.client for a in lost} <= owned
    for one in lost:
        again = min(a.arrived for a in found.run.answers if a.request.client == one.request.client and a.arrived > 3.0)
        assert again == pytest.approx(3.001)
    assert {a.request.client for a in found.run.answers if a.arrived > 4.5} == {f"caller-{i}" for i in range(40)}
    steady = run_fleet(PLAN, 2)
    assert found.busiest > steady.busiest


@pytest.mark.long
def test_x7_the_busiest_replica_decides_how_many_are_needed() -> None:
    plan = PLAN._replace(robots=310, duration=4.0)
    sizing = size_fleet(plan)
    assert 1 < sizing.needed < sizing.with_one_failed
    assert sizing.on_time >= plan.target
    enough, few = run_fleet(plan, sizing.needed), run_fleet(plan, sizing.needed - 1)
    assert (enough.report.on_time or 0.0) > 0.99 > (few.report.on_time or 1.0)


def test_a_limit_that_no_number_keeps_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--slo-ms=10: a single request takes 22 ms; no number of replicas"):
        size_fleet(PLAN._replace(slo=0.010))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    assert main([*SHORT, *words]) == 0
    return dict(re.split(r"\s{2,}|(?<=loss) ", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_robots_and_chunk_ms_are_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    usual, slow = (told(capsys, "--replicas", "2", "--chunk-ms", ms)["answered"] for ms in ("500", "1500"))
    assert float(usual.split()[0]) == pytest.approx(40 / 0.54, rel=0.1)
    assert float(slow.split()[0]) == pytest.approx(40 / 1.54, rel=0.1)


@pytest.mark.long
def test_replicas_target_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "--replicas", "3")["replicas"] == "3"
    auto = told(capsys, "--replicas", "auto", "--robots", "120", "--target", "0.98")
    assert auto["replicas"].endswith("so that one may fail")
    assert "asked for 98.00%" in auto["why"]
    lost = told(capsys, "--replicas", "2", "--fail", "1@2-4")
    assert lost["during the loss"].startswith("2 to 4 s: p99 ")
    assert "drained" in lost["outcomes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "2", "--fail", "0@4"), "--fail=0@4: must be NUMBER@SECONDS-SECONDS"),
        (("--replicas", "2", "--fail", "0@4-60"), "within --duration-s"),
        (("--replicas", "2", "--fail", "2@1-2"), "needs a replica in [0, 2)"),
        (("--replicas", "1", "--fail", "0@1-2"), "the only replica"),
    ],
)
def test_wrong_words_are_one_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *words]) == 2
    assert message in capsys.readouterr().err
