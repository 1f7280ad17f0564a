"""Joins at step boundaries against whole chunks (contract B23): the table of `reflex simulate --stages`."""

from __future__ import annotations

import pytest

from reflex_runtime.sim.compare import Bench
from reflex_runtime.sim.stages import ALWAYS, CASES, RULE, WHOLE, Case, Plan, run_case, stages, stages_table
from reflex_runtime.sim.workload import Normal

BENCH = Bench(noise=0.03, duration=60.0, warmup=5.0)
BY_NAME = {case.name: case for case in CASES}


def figures(case: Case, plan: Plan) -> tuple[float, float]:
    """Mean and p99, in seconds."""
    report = run_case(case, plan, BENCH)
    assert report.mean is not None
    assert report.p99 is not None
    return report.mean, report.p99


@pytest.mark.parametrize("robots", [8, 16, 32])
@pytest.mark.parametrize("model", ["", "small model, "])
def test_b23_on_periodic_robots_no_mean_and_no_p99_is_worse_than_that_of_whole_chunks(robots: int, model: str) -> None:
    case = BY_NAME[f"{model}{robots} robots, 500 ± 25"]
    for whole, rule in zip(figures(case, WHOLE), figures(case, RULE), strict=True):
        assert rule <= 1.01 * whole  # 32 robots run as whole chunks, and another seed moves a p99 by one per cent


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


def test_the_table_has_a_row_per_case_and_a_column_per_plan() -> None:
    table = stages_table(stages(Bench(duration=2.0, warmup=0.0), cases=CASES[:2])).splitlines()
    assert table[0].split("  ")[0] == "mean / p99 ms"
    assert [line.split("  ")[0] for line in table[1:]] == ["8 robots, exp 500", "8 robots, 500 ± 25"]
    assert all(line.count(" / ") == 3 for line in table[1:])
