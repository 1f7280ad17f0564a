"""Joins at step boundaries against whole chunks (contract B23): the table of `python -m bench.sim stages`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench.sim.__main__ import main
from bench.sim.compare import Bench
from bench.sim.stages import (
    ALWAYS,
    CASES,
    LARGE,
    RULE,
    WHOLE,
    Case,
    Normal,
    Plan,
    ratio_cases,
    run_case,
    stages,
    stages_table,
)

from reflex_runtime.core import forming
from thinned import thinned

PAGE = Path(__file__).parents[2] / "docs/simulator.md"
BENCH = Bench(noise=0.03, duration=60.0, warmup=5.0)
BY_NAME = {case.name: case for case in CASES}
RATIOS = [case for case in ratio_cases([1, 10]) if "±" in case.name]


def figures(case: Case, plan: Plan, bench: Bench = BENCH) -> tuple[float, float]:
    """Mean and p99, in seconds."""
    report = run_case(case, plan, bench)
    assert report.mean is not None
    assert report.p99 is not None
    return report.mean, report.p99


@pytest.mark.parametrize("robots", thinned([8, 16, 32], [8]))
@pytest.mark.parametrize("model", ["", "small model, "])
def test_b23_on_periodic_robots_no_mean_and_no_p99_is_worse_than_that_of_whole_chunks(robots: int, model: str) -> None:
    case, bench = BY_NAME[f"{model}{robots} robots, 500 ± 25"], replace(BENCH, duration=30.0)
    for whole, rule in zip(figures(case, WHOLE, bench), figures(case, RULE, bench), strict=True):
        assert rule <= 1.01 * whole  # 32 robots run as whole chunks, and another seed moves a p99 by one per cent


@pytest.mark.parametrize("case", thinned(RATIOS, [c for c in RATIOS if c.robots == 8]), ids=lambda c: c.name)
def test_b23_at_no_ratio_of_prefix_to_step_are_periodic_robots_worse_off_than_with_whole_chunks(case: Case) -> None:
    """The mean within a per cent and the p99 within three, which is what another seed moves them in a minute of eight
    robots; more of them give as many answers in less time."""
    bench = replace(BENCH, duration=min(60.0, 5.0 + 480.0 / case.robots))
    (mean, p99), (mean_whole, p99_whole) = figures(case, RULE, bench), figures(case, WHOLE, bench)
    assert mean <= 1.01 * mean_whole
    assert p99 <= 1.03 * p99_whole


def test_b23_robots_that_fit_one_after_the_other_stay_apart() -> None:
    """Four robots of 78 ms each per 330 ms: to be in step with another one would cost each of them a fifth."""
    case = Case("4 robots, 250 ± 12", 4, Normal(0.250, 0.012))
    whole, always, rule = (figures(case, plan)[0] for plan in (WHOLE, ALWAYS, RULE))
    assert always > 1.3 * whole
    assert rule <= 1.01 * whole


def test_b23_a_chunk_takes_as_long_in_one_call_as_in_its_steps() -> None:
    alone = Case("one robot", 1, Normal(0.500, 0.025))
    found = [run_case(alone, plan, Bench(noise=0.0, duration=10.0)).mean for plan in (WHOLE, ALWAYS, RULE)]
    assert found == pytest.approx([0.0775] * 3)


@pytest.mark.long
def test_b23_without_joins_a_decomposed_policy_answers_as_whole_chunks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without noise, to the microsecond, holds included: the columns differ in joins only."""
    monkeypatch.setattr(forming.Former, "_enters", lambda *_: False)
    for case in (BY_NAME["16 robots, 250 ± 12"], BY_NAME["8 robots, exp 150"]):
        whole, rule = (run_case(case, plan, Bench(noise=0.0, duration=20.0)) for plan in (WHOLE, RULE))
        assert rule.mean == pytest.approx(whole.mean, abs=1e-6)
        assert rule.p99 == pytest.approx(whole.p99, abs=1e-6)


def test_the_table_has_a_row_per_case_and_a_column_per_plan() -> None:
    table = stages_table(stages(Bench(duration=2.0, warmup=0.0), cases=CASES[:2])).splitlines()
    assert table[0].split("  ")[0] == "mean / p99 ms"
    assert [line.split("  ")[0] for line in table[1:]] == ["8 robots, exp 500", "8 robots, 500 ± 25"]
    assert all(line.count(" / ") == 3 for line in table[1:])


@pytest.mark.parametrize("ratio", [0.5, 1.0, 10.0, 30.0])
def test_a_device_of_a_ratio_answers_one_robot_as_fast_as_before(ratio: float) -> None:
    device = LARGE.with_ratio(ratio)
    assert device.prefix.of(1) == pytest.approx(ratio * device.step.of(1))
    assert device.chunk.of(1) == pytest.approx(LARGE.chunk.of(1))
    for line, usual in ((device.prefix, LARGE.prefix), (device.step, LARGE.step)):
        assert line.fixed / line.of(1) == pytest.approx(usual.fixed / usual.of(1))
    assert LARGE.with_ratio(16.5 / 6.1).step.fixed == pytest.approx(LARGE.step.fixed)


@pytest.mark.parametrize(
    ("flags", "cases", "name"),
    [
        ("stages", CASES, "8 robots, 500 ± 25"),
        ("stages --ratios 1,10", ratio_cases([1, 10]), "10:1, 4 robots, 500 ± 25"),
    ],
)
@pytest.mark.long
def test_the_tables_of_the_page_are_what_its_commands_print(flags: str, cases: Sequence[Case], name: str) -> None:
    """A row of each, with the duration, warm-up and noise that the page names."""
    page = PAGE.read_text()
    command = re.search(rf"`python -m bench.sim {flags} (--duration-s .*?)`", " ".join(page.split()))
    assert command is not None
    _, duration, _, warmup, _, noise = command[1].split()
    bench = Bench(duration=float(duration), warmup=float(warmup), noise=float(noise))
    case = next(case for case in cases if case.name == name)
    printed = stages_table(stages(bench, cases=[case])).splitlines()[1]
    rows = [line.split() for line in page.splitlines() if line.strip().startswith(f"{name}  ")]
    assert rows == [printed.split()]


def test_stages_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages", "--duration-s", "1", "--warmup-s", "0.2"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "mean / p99 ms"
    assert "16 robots, 500 ± 25" in {row.split("  ")[0] for row in rows}


def test_the_table_by_ratios_has_eight_rows_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages", "--ratios", "1,30", "--duration-s", "1", "--warmup-s", "0.2"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "mean / p99 ms"
    assert [row.split(",")[0] for row in rows] == ["1:1"] * 8 + ["30:1"] * 8


@pytest.mark.parametrize("text", ["1,x", "1,1", "0.01", "nan"])
def test_wrong_ratios_are_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages", "--ratios", text]) == 2
    assert capsys.readouterr().err.startswith(f"bench.sim: --ratios={text}: must be different numbers in [0.1, 1000]")
