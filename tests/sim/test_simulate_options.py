"""The effect of each option of `reflex simulate`, in the figures it prints."""

from __future__ import annotations

import re

import pytest

from reflex_runtime.cli import main

SHORT = ("--duration-s", "12", "--seed", "3")
ALONE = ("--rate", "1", "--noise", "0")  # requests that meet no other


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[float]]:
    """The numbers of each row."""
    assert main(["simulate", *SHORT, *words]) == 0
    rows = capsys.readouterr().out.splitlines()
    return {row.split()[0]: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", row.partition(" ")[2])] for row in rows}


def p50(found: dict[str, list[float]]) -> float:
    return found["latency"][1]


def largest(found: dict[str, list[float]]) -> float:
    return found["batch"][1]


def test_rate_is_what_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(capsys, "--rate", "50")["offered"][0] == pytest.approx(50.0, rel=0.2)
    assert figures(capsys)["offered"][0] == pytest.approx(200.0, rel=0.1)


@pytest.mark.long
def test_arrivals_of_each_kind_are_others(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("poisson", "bursty", "diurnal", "heavy", "closed")
    assert len({str(figures(capsys, "--arrivals", kind)) for kind in kinds}) == len(kinds)


def test_callers_and_think_make_the_load_of_closed_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    closed = ("--arrivals", "closed", "--callers", "3", "--think", "478")
    found = figures(capsys, *closed)
    assert found["fairness"][-1] == 3.0
    assert found["offered"][0] == pytest.approx(3 / (0.478 + 0.024), rel=0.1)


@pytest.mark.long
def test_callers_are_the_clients_of_open_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(capsys, "--callers", "3")["fairness"][-1] == 3.0
    assert figures(capsys)["fairness"][-1] > 1000.0  # each request is a client's own


def test_without_a_budget_batches_are_as_long_as_those_of_reflex_serve(capsys: pytest.CaptureFixture[str]) -> None:
    crowd = ("--arrivals", "closed", "--callers", "100", "--noise", "0", "--deadline-ms", "0", "--fixed-ms", "40")
    assert largest(figures(capsys, *crowd)) == 100.0  # 240 ms, up to 16 times the fixed part
    assert largest(figures(capsys, *crowd, "--max-batch-cost-ms", "100")) <= 30.0


def test_fixed_ms_and_marginal_ms_are_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert p50(figures(capsys, *ALONE)) == 22.0
    assert p50(figures(capsys, *ALONE, "--fixed-ms", "40")) == 42.0
    assert p50(figures(capsys, *ALONE, "--marginal-ms", "30")) == 50.0


def test_noise_spreads_the_times_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--arrivals", "closed", "--callers", "1", "--noise")
    _, still, _, p95, *_ = figures(capsys, *one, "0")["latency"]
    assert still == p95
    _, middle, _, p95, *_ = figures(capsys, *one, "0.5")["latency"]
    assert p95 > 1.3 * middle


def test_deadline_ms_is_the_limit_of_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(capsys, *ALONE, "--deadline-ms", "15")["on"][0] == 0.0
    assert figures(capsys, *ALONE)["on"][0] == 100.0


@pytest.mark.long
def test_max_batch_cost_ms_bounds_the_predicted_time(capsys: pytest.CaptureFixture[str]) -> None:
    crowd = ("--arrivals", "closed", "--callers", "30", "--noise", "0", "--deadline-ms", "0")
    assert largest(figures(capsys, *crowd, "--max-batch-cost-ms", "60")) in (19.0, 20.0)  # 20 + 20 · 2
    assert largest(figures(capsys, *crowd)) == 30.0


def test_batch_timeout_ms_is_the_longest_hold(capsys: pytest.CaptureFixture[str]) -> None:
    crowd = ("--arrivals", "closed", "--callers", "8", "--think", "around:10,5")
    held, at_once = (figures(capsys, *crowd, *more)["batch"][0] for more in ((), ("--batch-timeout-ms", "0")))
    assert held > 1.3 * at_once


@pytest.mark.long
def test_max_batch_size_is_the_most_requests_in_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert largest(figures(capsys, "--max-batch-size", "3")) == 3.0


@pytest.mark.parametrize(("seconds", "span"), [("9", "8.1"), pytest.param("42", "40", marks=pytest.mark.long)])
def test_duration_s_bounds_the_span(seconds: str, span: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--duration-s", seconds]) == 0
    assert f" over {span} s" in capsys.readouterr().out
