"""`reflex tune` in virtual time: what it says of a load, what it proposes, and whether that is what comes."""

from __future__ import annotations

from itertools import islice
from math import inf
from random import Random

import pytest
from bench.sim.loads import Every

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.sim import (
    Affine,
    Around,
    Arrival,
    Callers,
    Fixed,
    Noisy,
    Open,
    Poisson,
    RecordedArrivals,
    Report,
    WorkloadPart,
    search,
)
from reflex_runtime.sim.recorded import RecordedCaller, observe
from reflex_runtime.sim.search import Knobs, Tuner, Tuning, present
from sim.journals import journal_of

DEVICE = Noisy(Affine(0.020, 0.002), 0.03)
LATE_AT_330 = Open(Poisson(330.0), [Request(time_limit=0.1)])
EIGHT = Callers(8, Around(0.003, 0.001))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few settings, simulated for a short time."""
    for name, value in (
        ("HOLDS", (0.0, 0.005, inf)), ("BUDGETS", (0.05, 0.1, 0.2)), ("SIZES", (2, 16)), ("MOST", 500), ("LEAST", 0.5),
        ("LONG", 3.0),
    ):  # fmt: skip
        monkeypatch.setattr(search, name, value)


def served(knobs: Knobs) -> GroupConfig:
    return GroupConfig(flush=FlushPolicy.window(*knobs))


def measured(knobs: Knobs, load: WorkloadPart, seconds: float = 6.0, seed: int = 5) -> Report:
    """What really comes with other settings: the true load, not the one fitted to a journal."""
    return journal_of(served(knobs), load, DEVICE, seconds, seed=seed)[1]


def tuned(knobs: Knobs, load: WorkloadPart, seconds: float = 6.0) -> Tuning:
    return Tuner(journal_of(served(knobs), load, DEVICE, seconds)[0]).tune()


# -- the load ----------------------------------------------------------------------------------------------------------


def test_callers_that_ask_so_long_after_their_answer_return() -> None:
    journal, report = journal_of(served(Knobs(0.1, inf, 256)), EIGHT, DEVICE, 10.0)
    load = observe(journal)
    assert load.clients == {"returns": 8}
    assert load.steady
    assert sorted(load.pauses["returns"])[0] >= 0.002
    assert max(load.pauses["returns"]) <= 0.004 + 1e-9
    assert len(load.requests) == pytest.approx(report.offered * 10.0)


def test_callers_with_regular_gaps_ask_by_the_clock() -> None:
    robots = [RecordedCaller([Request(client=f"r{i}")], [0.1], True, 0.013 * i) for i in range(4)]
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 256)), robots, DEVICE, 10.0)
    load = observe(journal)
    assert load.clients == {"by the clock": 4}
    assert load.pauses["by the clock"] == pytest.approx([0.1] * len(load.pauses["by the clock"]))


def test_a_caller_by_the_clock_asks_at_once_after_a_late_answer() -> None:
    (stream,) = RecordedCaller([Request()], [0.1], True, 0.5).streams("0")
    first, on_time, late = stream.next(0.0), stream.next(0.55), stream.next(0.75)
    assert first is not None
    assert on_time is not None
    assert late is not None
    assert (first.at, on_time.at, late.at) == (0.5, pytest.approx(0.6), 0.75)


def test_requests_that_come_before_the_answer_do_not_wait() -> None:
    journal, _ = journal_of(served(Knobs(0.1, inf, 256)), Open(Poisson(200.0), [Request(client="a")]), DEVICE, 5.0)
    load = observe(journal)
    assert (load.clients, load.steady) == ({"does not wait": 1}, False)
    assert load.open_rate == pytest.approx(200.0, rel=0.1)


def test_connections_of_a_pool_do_not_wait() -> None:
    """Each asks when its turn comes, long after its answer; all of them are one stream of requests."""
    times = list(islice(Poisson(60.0).times(Random(1)), 400))
    pool = RecordedArrivals([Arrival(at, Request(client=f"c{i % 30}")) for i, at in enumerate(times)])
    journal, _ = journal_of(served(Knobs(0.1, inf, 256)), pool, DEVICE, times[-1])
    assert observe(journal).clients == {"does not wait": 30}


def test_what_passes_between_two_batches_is_found() -> None:
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 4)), Callers(16, Fixed(0.001)), DEVICE, 5.0)
    for batch in journal.batches:  # as if each call had begun 2 ms after the batch was formed
        batch.elapsed -= 0.002
    assert observe(journal).between == pytest.approx(0.002)


def test_too_few_requests_are_an_error() -> None:
    journal, _ = journal_of(served(Knobs(0.1, inf, 256)), Open(Every(2.0, phase=1.0)), DEVICE, 2.0)
    three = RecordedArrivals([Arrival(1.0, Request(client=i)) for i in range(3)])
    at_once, _ = journal_of(served(Knobs(0.1, inf, 256)), three, DEVICE, 2.0)
    with pytest.raises(ConfigError, match="its 3 requests came at one moment"):
        observe(at_once)
    with pytest.raises(ConfigError, match="has 1 requests, too few"):
        observe(journal)


# -- what is proposed, and what comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "load", "flags"),
    [
        (Knobs(0.1, 0.0, 256), EIGHT, "--batch-timeout-ms"),
        pytest.param(Knobs(0.1, inf, 2), EIGHT, "--max-batch-size", marks=pytest.mark.long),
        pytest.param(Knobs(0.05, inf, 256), LATE_AT_330, "--max-batch-cost-ms", marks=pytest.mark.long),
    ],
)
def test_the_predicted_change_is_the_one_that_comes(knobs: Knobs, load: WorkloadPart, flags: str) -> None:
    tuning = tuned(knobs, load)
    assert not tuning.why
    assert any(flag.startswith(flags) for flag in tuning.after.knobs.flags(knobs)) or flags == "--batch-timeout-ms"
    before, after = measured(knobs, load), measured(tuning.after.knobs, load)
    said, now = tuning.predicted, tuning.measured
    assert said.throughput / now.throughput == pytest.approx(after.throughput / before.throughput, rel=0.1)
    assert said.p50 / now.p50 == pytest.approx((after.p50 or 0.0) / (before.p50 or 1.0), rel=0.1)
    assert said.on_time - now.on_time == pytest.approx((after.on_time or 0.0) - (before.on_time or 0.0), abs=0.1)


@pytest.mark.long
def test_x3_the_same_journal_is_tuned_alike() -> None:
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 256)), EIGHT, DEVICE, 4.0)
    first, second = (Tuner(journal) for _ in range(2))
    assert first.tried(first.present) == second.tried(second.present)


@pytest.mark.long
def test_it_says_when_the_device_is_saturated_and_when_there_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LEAST", 2.0)
    full = tuned(Knobs(0.2, inf, 256), Callers(64, Fixed(0.001)), 6.0)
    assert "the device is saturated" in full.why
    idle = tuned(Knobs(0.1, inf, 256), Callers(2, Around(2.0, 0.5)), 30.0)
    assert "there is no load" in idle.why
    assert (full.after, idle.after) == (full.before, idle.before)


def test_a_bound_on_waiting_work_is_in_the_header_and_in_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LEAST", 2.0)
    group = GroupConfig(flush=FlushPolicy.window(0.1), max_queued_seconds=0.2)
    journal, report = journal_of(group, Open(Poisson(900.0), [Request(client=f"c{i}") for i in range(8)]), DEVICE, 4.0)
    assert report.outcomes["rejected"] > 0
    tuner = Tuner(journal)
    assert tuner.figures(present(journal)).on_time == pytest.approx(tuner.measured().on_time, abs=0.05)
