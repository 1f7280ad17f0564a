"""Reports, against a run small enough to be counted by hand."""

from __future__ import annotations

import pytest

from reflex_runtime.core.request import Priority, Request
from reflex_runtime.sim import Ran, Report, RequestEnd, Run, fair_shares, jain, percentile
from reflex_runtime.sim.report import columns

A, B = Request(client="a", time_limit=1.0), Request(client="b", time_limit=1.0, priority=Priority.URGENT)


def run() -> Run:
    """Ten seconds after one of warm-up: a asks four times, b twice; five answered, one of them late, one shed."""
    return Run(
        warmup=1.0,
        duration=11.0,
        answers=[
            RequestEnd(A, 0.5, 0.9, "ok", 1.0, 9.0),  # before the span
            RequestEnd(A, 1.0, 1.4, "ok", 1.0, 0.4),
            RequestEnd(A, 2.0, 2.5, "ok", 1.0, 0.4),
            RequestEnd(A, 3.0, 4.5, "ok", 1.0, 0.4),  # late
            RequestEnd(A, 5.0, 6.0, "shed", 1.0, 0.0),
            RequestEnd(B, 2.0, 2.2, "ok", 1.0, 0.4),
            RequestEnd(B, 9.0, 9.3, "ok", 1.0, 0.4),
        ],
        batches=[
            Ran(0.5, 0.6, 1, 9.0, "idle"),  # 0.1 s of it in the span
            Ran(1.1, 0.4, 1, 0.4, "idle"),
            Ran(2.0, 0.8, 2, 0.8, "urgent"),
            Ran(4.0, 0.4, 1, 0.4, "full"),
            Ran(10.8, 0.4, 1, 0.4, "idle"),  # half of it after the span
        ],
    )


def test_figures_equal_those_counted_by_hand() -> None:
    report = Report.of(run())
    assert report.offered == pytest.approx(0.6)
    assert report.throughput == pytest.approx(0.5)
    assert report.goodput == pytest.approx(0.4)
    assert report.on_time == pytest.approx(4 / 6)
    assert report.on_time_by == {"urgent": 1.0, "default": 0.5}
    assert (report.p50, report.p95, report.p99) == pytest.approx((0.4, 1.5, 1.5))
    assert report.mean == pytest.approx((0.4 + 0.5 + 1.5 + 0.2 + 0.3) / 5)
    assert report.busy == pytest.approx((0.1 + 0.4 + 0.8 + 0.4 + 0.2) / 10)
    assert report.wasted == pytest.approx(0.4 / 2.0)
    assert report.sizes == {1: 3, 2: 1}
    assert report.batch_size == pytest.approx(1.25)
    assert report.outcomes == {"ok": 5, "shed": 1}
    assert report.causes == {"idle": 2, "urgent": 1, "full": 1}
    # four on time: b asked 2 and is due 2, a the other 2; both have just that
    assert report.fairness == pytest.approx(1.0)
    assert "on time     66.7%" in report.text()


def test_answers_after_the_end_are_in_neither_rate() -> None:
    answers = [RequestEnd(A, 1.5, 1.9, "ok", 1.0, 0.1), RequestEnd(A, 1.9, 2.3, "ok", 1.0, 0.1)]
    report = Report.of(Run(1.0, 2.0, answers))
    assert (report.throughput, report.goodput, report.on_time) == (1.0, 1.0, 1.0)


def test_a_run_without_requests_has_no_shares() -> None:
    report = Report.of(Run(0.0, 5.0))
    assert (report.on_time, report.p99, report.wasted, report.fairness, report.batch_size) == (None,) * 5
    assert "–" in report.text()


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, q) for q in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == 7.0


def test_jain() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) is None


def test_fair_shares_give_the_modest_what_they_ask_and_split_the_rest() -> None:
    assert fair_shares(12.0, {"greedy": 100.0, "big": 50.0, "small": 2.0}) == {"small": 2.0, "big": 5.0, "greedy": 5.0}
    assert fair_shares(100.0, {"x": 1.0, "y": 2.0}) == {"x": 1.0, "y": 2.0}


def test_columns_line_up() -> None:
    assert columns(["rule", "share"], [["a", "1"], ["longer", "0.25"]]) == "rule    share\na           1\nlonger   0.25"
