"""`reflex tune` in virtual time: what it says of a load, what it proposes, and whether that is what comes."""

from __future__ import annotations

import dataclasses
from itertools import islice, pairwise
from math import inf
from random import Random

import pytest
from msgspec.structs import replace

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.sim import (
    Affine,
    Around,
    Arrival,
    Callers,
    Every,
    Fixed,
    Noisy,
    Open,
    Poisson,
    RecordedArrivals,
    Report,
    WorkloadPart,
    simulate,
    tuning,
)
from reflex_runtime.sim.observed import RecordedCaller, RecordedGroup, SeenRequest, cohorts_of, observe
from reflex_runtime.sim.replay import MeasuredDevice
from reflex_runtime.sim.sharing import alone, stolen_in
from reflex_runtime.sim.tuning import Knobs, Tuner, Tuning, present
from sim.journals import journal_of

DEVICE = Noisy(Affine(0.020, 0.002), 0.03)
EIGHT = Callers(8, Around(0.003, 0.001))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few settings, simulated for a short time."""
    for name, value in (
        ("HOLDS", (0.0, 0.005, inf)), ("BUDGETS", (0.05, 0.1, 0.2)), ("SIZES", (2, 16)), ("MOST", 500), ("LEAST", 0.5),
        ("AGAIN", 3), ("LONG", 3.0),
    ):  # fmt: skip
        monkeypatch.setattr(tuning, name, value)


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


def test_callers_that_are_delayed_together_are_so_again() -> None:
    robots = [RecordedCaller([Request(client=f"r{i}")], [], False, 0.0) for i in range(4)]
    (first, second, *_) = RecordedGroup(robots, [[0.001, 0.002], [0.050, 0.051]]).streams("0")
    assert (first.next(0.0), second.next(0.0)) != (None, None)
    for answered in range(1, 9):
        one, two = first.next(float(answered)), second.next(float(answered))
        assert one is not None
        assert two is not None
        assert two.at - one.at == pytest.approx(0.001)


def test_what_passes_between_two_batches_is_found() -> None:
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 4)), Callers(16, Fixed(0.001)), DEVICE, 5.0)
    for batch in journal.batches:  # as if each call had begun 2 ms after the batch was formed
        batch.elapsed -= 0.002
    assert observe(journal).between == pytest.approx(0.002)


# -- cores that callers and device share -------------------------------------------------------------------------------


def test_a_request_that_comes_while_a_batch_runs_makes_it_longer() -> None:
    """Every 10 ms one comes; a batch of one takes 22 ms, and the two that come meanwhile take a millisecond each."""
    scheduler = Scheduler([GroupConfig(flush=FlushPolicy.by_size(1, 0.0))])
    load = Open(Every(0.010, phase=0.0))
    run = simulate(scheduler, load, Affine(0.020, 0.002), duration=0.015, stolen=0.001)
    assert [round(batch.seconds, 6) for batch in run.batches] == [0.023, 0.022]
    assert [round(batch.started, 6) for batch in run.batches] == [0.0, 0.023]


def test_what_requests_take_from_a_batch_is_found_and_taken_off() -> None:
    load = Open(Poisson(25.0), [Request(client=f"c{i}") for i in range(8)])
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 1)), load, DEVICE, 20.0, stolen=0.004)
    came = [one.came for one in observe(journal).requests]
    found = stolen_in(journal.batches, came, False)
    assert found.seconds == pytest.approx(0.004, rel=0.25)
    assert abs(found.seconds - 0.004) < 3.0 * found.error
    assert observe(journal).stolen == found
    taken = [batch.elapsed for batch in alone(journal.batches, came, 0.004)]
    assert sum(taken) / len(taken) == pytest.approx(0.022, rel=0.03)
    still, _ = journal_of(served(Knobs(0.1, 0.0, 1)), load, DEVICE, 20.0)
    assert observe(still).stolen.seconds < 0.001


def test_callers_come_back_as_beside_a_free_device_or_beside_a_batch() -> None:
    """Two in turns: one is always answered while the other's batch begins. Alone, none is."""
    robots = [RecordedCaller([Request(client=f"r{i}")], [], False, 0.001 * i) for i in range(2)]
    group = RecordedGroup(robots, [[0.005]], [[0.030]])
    one = GroupConfig(flush=FlushPolicy.by_size(1, 0.0))
    gaps = {}
    for name, callers in (("alone", robots[:1]), ("both", robots)):
        part = RecordedGroup(callers, group.cohorts, group.beside)
        run = simulate(Scheduler([one]), part, Affine(0.010, 0.010), duration=2.0)
        asked = sorted(answer.arrived for answer in run.answers if answer.request.client == "r0")
        gaps[name] = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps["alone"] == pytest.approx([0.025] * len(gaps["alone"]))
    assert max(gaps["both"]) > 0.049


def test_think_times_beside_a_batch_are_told_apart_from_those_beside_a_free_device() -> None:
    """Two are answered together ten times; each second time another batch begins at once."""
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 6)), Callers(1, Fixed(0.1)), DEVICE, 1.0)
    seen, batches = [], []
    for i in range(10):
        after = 0.045 if i % 2 else 0.004
        seen += [SeenRequest(Request(client=name), i - 0.5, i - 0.5, float(i), "ok", 0.5) for name in ("a", "b")]
        seen += [SeenRequest(Request(client=name), i + after, i + after, i + 0.4, "ok", 0.1) for name in ("a", "b")]
        batches.append(replace(journal.batches[0], at=i + (0.0002 if i % 2 else 0.0041)))
    free, beside = cohorts_of(seen, batches)
    told = [[round(think, 3) for think in cohort] for cohort in free if len(cohort) > 1 and max(cohort) < 0.09]
    assert told == [[0.004, 0.004]] * 5
    assert [[round(think, 3) for think in cohort] for cohort in beside] == [[0.045, 0.045]] * 5
    few, all_of_them = cohorts_of(seen, batches[1:2])
    assert all_of_them == []
    assert len(few) == len(free) + len(beside)


def test_a_device_beyond_the_sizes_seen_may_be_steeper() -> None:
    journal, _ = journal_of(served(Knobs(0.1, inf, 4)), Callers(4, Fixed(0.001)), Affine(0.020, 0.002), 2.0)
    flat, steep = (MeasuredDevice(journal.batches, journal.warm.values(), steeper) for steeper in (0.0, 1.0))
    seen = flat.usual(4)
    assert steep.usual(4) == seen
    assert steep.usual(8) - seen == pytest.approx(2 * (flat.usual(8) - seen))


def test_a_resampled_journal_always_has_times_of_the_device() -> None:
    """Nearly all of its batches crashed: drawn anew with the others, they would leave none that has a time."""
    journal, _ = journal_of(served(Knobs(0.1, inf, 256)), EIGHT, DEVICE, 6.0)
    batches = [replace(batch, crashed=n >= 5) for n, batch in enumerate(journal.batches)]
    assert len(batches) > 100
    tuner = Tuner(dataclasses.replace(journal, batches=batches))
    for turn in range(8):
        assert tuner._resampled(turn).device.usual(8) < 1.0


def test_too_few_requests_are_an_error() -> None:
    journal, _ = journal_of(served(Knobs(0.1, inf, 256)), Open(Every(2.0, phase=1.0)), DEVICE, 2.0)
    with pytest.raises(ConfigError, match="1 requests came to the scheduler; too few"):
        observe(journal)


# -- what is proposed, and what comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "load", "flags"),
    [
        (Knobs(0.1, 0.0, 256), EIGHT, "--batch-timeout-ms"),
        (Knobs(0.1, inf, 2), EIGHT, "--max-batch-size"),
        (Knobs(0.05, inf, 256), Open(Poisson(330.0), [Request(time_limit=0.1)]), "--max-batch-cost-ms"),
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
    least, most = tuning.expected
    assert least.p50 <= said.p50 <= most.p50 < 2.0 * least.p50


def test_x3_the_same_journal_is_tuned_alike() -> None:
    journal, _ = journal_of(served(Knobs(0.1, 0.0, 256)), EIGHT, DEVICE, 4.0)
    first, second = (Tuner(journal) for _ in range(2))
    assert first.tried(first.present) == second.tried(second.present)
    changed = first.present._replace(hold=inf)
    assert first.changes(first.present, changed) == second.changes(first.present, changed)


def test_it_says_when_the_device_is_saturated_and_when_there_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST", 2.0)
    full = tuned(Knobs(0.2, inf, 256), Callers(64, Fixed(0.001)), 6.0)
    assert "the device is saturated" in full.why
    idle = tuned(Knobs(0.1, inf, 256), Callers(2, Around(2.0, 0.5)), 30.0)
    assert "there is no load" in idle.why
    assert (full.after, idle.after) == (full.before, idle.before)


def test_a_bound_on_waiting_work_is_in_the_header_and_in_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST", 2.0)
    group = GroupConfig(flush=FlushPolicy.window(0.1), max_queued_seconds=0.2)
    journal, report = journal_of(group, Open(Poisson(900.0), [Request(client=f"c{i}") for i in range(8)]), DEVICE, 4.0)
    assert report.outcomes["rejected"] > 0
    tuner = Tuner(journal)
    assert tuner.figures(present(journal)).on_time == pytest.approx(tuner.measured().on_time, abs=0.05)
