"""What a request costs (contract B7, B8, B9) and the fit behind it."""

from __future__ import annotations

from math import inf, nan
from random import Random
from statistics import median

import pytest

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.cost import RollingMedian, TimeCost, UnitCost
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.statistics import MAX_CLASSES, AffineFit, solve

from .helpers import ask_many, measure, scheduler_of, take, trained
from .jumps import DEVICES, FACTORS, medians, wrong


def ticket(**request: object) -> Ticket:
    return Ticket(Request(**request), 0, 0.0)  # type: ignore[arg-type]


# -- B7 ----------------------------------------------------------------------------------------------------------------


def test_b7_50_ms_until_three_measurements() -> None:
    known = RollingMedian()
    for seconds in (0.010, 0.020):
        known.observe(seconds)
        assert known.value == 0.050
    known.observe(0.030)
    assert known.value == 0.020


def test_b7_rolling_median_of_the_last_100() -> None:
    random, known, seen = Random(1), RollingMedian(), []
    for _ in range(250):
        seconds = random.uniform(0.001, 0.1)
        seen.append(seconds)
        known.observe(seconds)
        if len(seen) >= 3:
            assert known.value == median(seen[-100:])


@pytest.mark.parametrize("bad", [nan, 0.0, -0.010, inf])
def test_b7_samples_that_are_nan_or_not_above_zero_are_ignored(bad: float) -> None:
    known = RollingMedian()
    for seconds in (0.010, bad, 0.010, bad, bad):
        known.observe(seconds)
    assert (known.samples, known.value) == (2, 0.050)
    model = TimeCost()
    for _ in range(5):
        measure(model, ["", ""], bad)
    assert model.estimate(ticket()) == 0.050
    assert model.snapshot() == []


def test_b7_a_sample_is_wall_over_batch_size() -> None:
    model = TimeCost()
    for _ in range(3):
        measure(model, [""] * 4, 0.100)
    assert model.estimate(ticket()) == 0.025


def test_b7_samples_come_from_batches_of_one_class() -> None:
    model = TimeCost()
    for _ in range(5):
        measure(model, ["hit", "miss"], 0.450)
    assert model.estimate(ticket(cost_class="hit")) == 0.050
    for _ in range(3):
        measure(model, ["hit", "hit"], 0.100)
        measure(model, ["miss"], 0.400)
    assert model.estimate(ticket(cost_class="hit")) == 0.050
    assert model.estimate(ticket(cost_class="miss")) == 0.400


def test_b7_a_failed_batch_teaches_nothing() -> None:
    scheduler = scheduler_of(flush=FlushPolicy(max_batch_size=2))
    for _ in range(5):
        ask_many(scheduler, 2)
        scheduler.complete(take(scheduler, 0.0), [Done(), Failed(ProcessorError("bad"))], 0.010, 0.0)
    assert scheduler.cost_model("default").snapshot() == []


# -- B8 ----------------------------------------------------------------------------------------------------------------


def test_b8_ready_from_three_samples_and_two_batch_sizes_on() -> None:
    fit = AffineFit()
    for _ in range(10):
        fit.observe({"": 2.0}, 0.030)
    assert not fit.ready
    fit.observe({"": 4.0}, 0.050)
    assert fit.ready
    fit = AffineFit()
    fit.observe({"": 1.0}, 0.020)
    fit.observe({"": 2.0}, 0.030)
    assert not fit.ready
    fit.observe({"": 1.0}, 0.020)
    assert fit.ready


def test_b8_the_affine_model_takes_over_for_budgeting_when_ready() -> None:
    model = TimeCost()
    for n in (2, 2, 2):
        measure(model, [""] * n, 0.020 + 0.010 * n)
    assert model.tally().offer(ticket(), 0.1) == 1.0
    assert model.fixed(ticket()) == 0.0
    assert model.marginal(ticket(), 1.0) == pytest.approx(0.020)  # the median of wall ÷ size
    for n in (4, 1, 8, 2) * 10:
        measure(model, [""] * n, 0.020 + 0.010 * n)
    assert model.fixed(ticket()) == pytest.approx(0.020, rel=0.02)
    assert model.marginal(ticket(), 1.0) == pytest.approx(0.010, rel=0.02)
    tally = model.tally()
    for _ in range(5):
        tally.add(ticket(), 1.0)
    assert tally.cost == pytest.approx(0.070, rel=0.02)
    assert tally.seconds == tally.cost


@pytest.mark.parametrize(("fixed", "marginal"), [(0.020, 0.002), (0.0, 0.010), (0.100, 0.030), (0.001, 0.0002)])
def test_b8_fixed_and_marginal_are_recovered_from_noisy_batches(fixed: float, marginal: float) -> None:
    random, fit = Random(3), AffineFit()
    for i in range(300):
        n = random.randint(1, 16)
        fit.observe({"": float(n)}, (fixed + marginal * n) * random.gauss(1.0, 0.05))
        if i == 20:  # so long the 50 ms it starts from may count as drift
            settled = fit.alarms
    for n in (1, 4, 16):
        assert fit.predict({"": float(n)}) == pytest.approx(fixed + marginal * n, rel=0.06)
    assert fit.sigma == pytest.approx(0.05, abs=0.03)
    assert fit.alarms == settled <= 1


def test_b8_one_wild_outlier_moves_the_prediction_little() -> None:
    random, fit = Random(4), AffineFit()
    for _ in range(200):
        n = random.randint(1, 8)
        fit.observe({"": float(n)}, (0.020 + 0.002 * n) * random.gauss(1.0, 0.03))
    before = fit.predict({"": 4.0})
    fit.observe({"": 4.0}, 10 * before)
    assert fit.predict({"": 4.0}) == pytest.approx(before, rel=0.10)
    assert fit.alarms == 0


@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_b8_drift_is_detected_and_forgotten_within_a_few_batches(factor: float) -> None:
    random, fit = Random(5), AffineFit()
    for _ in range(200):
        n = random.randint(1, 8)
        fit.observe({"": float(n)}, (0.020 + 0.002 * n) * random.gauss(1.0, 0.03))
    for _ in range(8):
        n = random.randint(1, 8)
        fit.observe({"": float(n)}, factor * (0.020 + 0.002 * n) * random.gauss(1.0, 0.03))
    assert fit.alarms >= 1
    assert fit.predict({"": 4.0}) == pytest.approx(factor * 0.028, rel=0.15)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [*FACTORS, *(1.0 / f for f in FACTORS)])
def test_b8_a_jump_is_followed_within_five_batches_and_not_passed(device: str, factor: float) -> None:
    found = medians(DEVICES[device], factor)
    assert found.overshoot <= 1.25
    assert found.batches <= 5


@pytest.mark.parametrize("added", [0.5, -0.5])
def test_b8_a_delay_that_comes_and_goes_is_not_taken_for_a_slope(added: float) -> None:
    found = medians(DEVICES["affine"], added=added)
    assert found.overshoot <= 1.25
    assert found.batches <= 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("share", "times"), [(0.05, 50.0), (0.10, 10.0)])
def test_b8_many_outliers_are_no_drift(device: str, share: float, times: float) -> None:
    assert wrong(DEVICES[device], share, times) < 0.02


@pytest.mark.parametrize("late", [0, 1, 2])
def test_b8_one_of_the_first_batches_may_be_slow(late: int) -> None:
    """It loads a library, or compiles: before anything is known, the batches beside it outweigh it."""
    fit = AffineFit()
    for i, n in enumerate((1, 2, 4, 1, 2, 4)):
        fit.observe({"": float(n)}, 5.0 if i == late else 0.020 + 0.002 * n)
        if fit.ready:
            assert fit.predict({"": 1.0}) == pytest.approx(0.022, rel=0.1)
    assert fit.predict({"": 4.0}) == pytest.approx(0.028, rel=0.1)


def test_b8_a_new_class_in_the_batches_before_a_jump_is_noticed() -> None:
    """What was measured since a change is learned anew, also when it was before another class became known."""
    fit = AffineFit()
    for n in (1, 2, 4, 8) * 10:
        fit.observe({"": float(n)}, 0.020 + 0.002 * n)
    for _ in range(3):
        fit.observe({"": 2.0}, 10 * 0.024)
    fit.observe({"new": 1.0}, 10 * 0.022)
    fit.observe({"": 2.0}, 10 * 0.024)
    assert fit.alarms == 1
    assert fit.predict({"": 2.0}) == pytest.approx(0.240, rel=0.05)


@pytest.mark.parametrize("dear", [0.200, 0.001])
def test_b8_a_new_class_is_no_drift_of_the_others(dear: float) -> None:
    fit = AffineFit()
    for n in (1, 2, 4, 8) * 30:
        fit.observe({"cheap": float(n)}, 0.020 + 0.010 * n)
    for n in (1, 2, 4) * 20:
        fit.observe({"other": float(n)}, 0.020 + dear * n)
    assert fit.alarms == 0
    assert fit.predict({"cheap": 8.0}) == pytest.approx(0.100, rel=0.05)
    assert fit.predict({"other": 4.0}) == pytest.approx(0.020 + 4 * dear, rel=0.05)


def test_b8_slope_and_fixed_stay_physical_when_all_batches_have_one_size() -> None:
    random, fit = Random(6), AffineFit()
    for n in (1, 2, 4, 8) * 10:
        fit.observe({"": float(n)}, 0.020 + 0.002 * n)
    for _ in range(500):
        fit.observe({"": 4.0}, 0.028 * random.gauss(1.0, 0.05))
    assert fit.fixed == pytest.approx(0.020, rel=0.5)
    assert fit.predict({"": 4.0}) == pytest.approx(0.028, rel=0.05)
    assert fit.predict({"": 8.0}) == pytest.approx(0.036, rel=0.25)


def test_b8_fixed_is_never_negative_and_marginal_never_zero() -> None:
    random, fit = Random(7), AffineFit()
    for _ in range(200):
        n = random.randint(1, 8)
        fit.observe({"": float(n)}, 0.001 * n * n)  # not affine at all
        assert fit.fixed >= 0.0
        assert (fit.slope("") or 0.0) > 0.0


def test_b8_the_median_alone_when_affine_is_off() -> None:
    model = trained(0.020, 0.010, affine=False)
    assert model.fixed(ticket()) == 0.0
    assert model.fits("") is None
    assert model.marginal(ticket(), 1.0) == model.estimate(ticket())


def test_b8_the_snapshot_shows_every_key() -> None:
    model = trained(0.020, 0.010)
    measure(model, ["dear"] * 2, 0.100, shape="other")
    rows = model.snapshot()
    assert {(r["shape"], r["class"], r["stage"]) for r in rows} == {
        ("", "", None),
        ("", "", ""),
        ("other", "dear", None),
        ("other", "dear", ""),
    }
    (median_row,) = (r for r in rows if r["stage"] is None and r["shape"] == "")
    (fit_row,) = (r for r in rows if r["stage"] == "" and r["shape"] == "")
    assert (median_row["samples"], fit_row["samples"]) == (32, 32)
    assert median_row["median_ms"] == pytest.approx(17.5)
    assert fit_row["fixed_ms"] == pytest.approx(20.0, rel=0.02)
    assert fit_row["marginal_ms"] == pytest.approx(10.0, rel=0.02)
    assert fit_row["residual"] < 0.1


def test_b8_the_solver_solves() -> None:
    random = Random(8)
    for n in range(1, 6):
        rows = [[random.uniform(-1, 1) for _ in range(n)] for _ in range(n)]
        matrix = [[sum(a * b for a, b in zip(r, c, strict=True)) + (r is c) for c in rows] for r in rows]
        want = [random.uniform(-1, 1) for _ in range(n)]
        vector = [sum(a * b for a, b in zip(row, want, strict=True)) for row in matrix]
        assert solve(matrix, vector) == pytest.approx(want)


def test_b8_classes_beyond_the_fourth_share_the_last_slope() -> None:
    fit = AffineFit()
    for _ in range(20):
        for k in range(MAX_CLASSES + 2):
            fit.observe({k: 1.0}, 0.010 * (1 + min(k, MAX_CLASSES - 1)))
    assert len(fit.classes) == MAX_CLASSES
    assert fit.slope(MAX_CLASSES + 1) == fit.slope(MAX_CLASSES - 1)


# -- B9 ----------------------------------------------------------------------------------------------------------------


def test_b9_hits_and_misses_are_estimated_apart() -> None:
    random, model = Random(9), TimeCost()
    for _ in range(200):
        hits, misses = random.randint(0, 4), random.randint(0, 2)
        if hits + misses:
            measure(model, ["hit"] * hits + ["miss"] * misses, 0.010 + 0.040 * hits + 0.390 * misses)
    assert model.remaining(ticket(cost_class="hit")) == pytest.approx(0.050, rel=0.05)
    assert model.remaining(ticket(cost_class="miss")) == pytest.approx(0.400, rel=0.05)


def test_b9_shapes_are_estimated_apart() -> None:
    model = trained(0.020, 0.010)
    assert model.estimate(ticket(shape="never seen")) == 0.050
    for _ in range(3):
        measure(model, [""], 0.007, shape="small")
    assert model.estimate(ticket(shape="small")) == 0.007
    assert model.estimate(ticket()) == pytest.approx(0.0175)


def test_b9_the_least_recently_used_shape_is_forgotten() -> None:
    model = TimeCost(max_keys=4)
    for shape in range(10):
        for _ in range(3):
            measure(model, [""], 0.010, shape=shape)
            measure(model, [""], 0.020, shape="used")
    assert model.estimate(ticket(shape=0)) == 0.050
    assert model.estimate(ticket(shape="used")) == 0.020
    assert len(model.snapshot()) == 8


# -- B4, in the tally --------------------------------------------------------------------------------------------------


def fill(model: TimeCost, budget: float, classes: list[str], limit: float = inf) -> int:
    tally, n = model.tally(), 0
    for k in classes:
        t = ticket(cost_class=k)
        if not tally.offer(t, budget, limit):
            break
        tally.add(t, 1.0)
        n += 1
    return n


def test_b4_a_batch_fills_up_to_its_budget_and_no_further() -> None:
    model = trained(0.020, 0.010, affine=True)
    assert fill(model, 0.1001, [""] * 50) == 8
    assert fill(TimeCost(), 0.100, [""] * 50) == 2  # cold start: 50 ms each


def test_b4_company_that_is_nearly_free_may_pass_the_budget() -> None:
    model = trained(0.150, 0.001, sizes=(1, 2, 4, 8, 16, 32) * 40)
    assert fill(model, 0.100, [""] * 100) == pytest.approx(38, abs=2)  # 150 + n ≤ 1.25 × 151
    assert fill(trained(0.0, 0.150), 0.100, [""] * 100) == 1


def test_b4_nearly_free_only_once_two_sizes_have_been_measured() -> None:
    model = TimeCost()
    for _ in range(10):
        measure(model, [""], 0.150)
    assert fill(model, 0.100, [""] * 10) == 1


def test_b4_the_limit_in_seconds_knows_no_exception() -> None:
    model = trained(0.150, 0.001, sizes=(1, 2, 4, 8, 16, 32) * 40)
    assert fill(model, 0.100, [""] * 100, limit=0.160) == pytest.approx(10, abs=1)
    assert fill(model, 0.100, [""] * 100, limit=0.140) == 0


def test_where_batches_since_a_slow_down_are_alike_the_fixed_part_takes_it() -> None:
    model = trained(0.002, 0.008, sizes=(1, 2, 4) * 3)
    for _ in range(8):
        measure(model, [""] * 4, 0.060 + 0.034)
    assert model.fixed(ticket()) > 0.050
    assert model.marginal(ticket(), 1.0) < 0.011


def test_padding_predicts_the_padded_size() -> None:
    model = TimeCost(sizes=(4, 8))
    for n in (4, 8, 4, 8) * 10:
        measure(model, [""] * n, 0.020 + 0.010 * n)
    tally = model.tally()
    for size in (4, 4, 4, 4, 8):
        tally.add(ticket(), 1.0)
        assert tally.cost == pytest.approx(0.020 + 0.010 * size, rel=0.05)


def test_a_model_needs_a_stage() -> None:
    with pytest.raises(ConfigError, match=r"TimeCost\.stages"):
        TimeCost(stages=())


def test_counting_knows_nothing_of_time() -> None:
    model = UnitCost()
    measure_free = (model.remaining(ticket()), model.tally().seconds, model.fixed(ticket()))
    assert measure_free == (0.0, 0.0, 0.0)
    assert not model.snapshot()


def test_timed_units_count_requests_and_predict_times_once_three_were_measured() -> None:
    model = UnitCost()
    assert (model.told_apart(ticket()), model.snapshot()) == (False, [])
    two = model.tally()
    for _ in range(2):
        two.add(ticket(), 1.0)
    for _ in range(3):
        assert two.seconds == 0.0
        measure(model, [""] * 2, 0.024)
    assert two.seconds == pytest.approx(0.024, rel=0.1)  # what so many take is known, and no more
    assert not model.told_apart(ticket())
    for n in (4, 2, 8, 2) * 8:
        measure(model, [""] * n, 0.020 + 0.002 * n)
    assert model.told_apart(ticket())
    tally = model.tally()
    for _ in range(8):
        tally.add(ticket(), 1.0)
    assert (tally.cost, tally.dearest, tally.until_boundary) == (8.0, 1.0, 0.0)
    assert tally.seconds == pytest.approx(0.036, rel=0.03)
    assert (model.unit, model.remaining(ticket()), model.marginal(ticket(), 1.0)) == ("requests", 0.0, 1.0)
    [row] = model.snapshot()
    assert row["fixed_ms"] == pytest.approx(20.0, rel=0.1)
    assert row["marginal_ms"] == pytest.approx(2.0, rel=0.3)


def test_a_share_of_batches_without_a_budget_is_that_of_the_largest() -> None:
    model = trained(0.020, 0.002)
    assert model.share(ticket(), inf, 10) == pytest.approx(0.002 + 0.020 / 10, rel=0.05)
