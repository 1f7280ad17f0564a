"""p99 is one thing: what a guard acts on is what the report and the simulator say."""

from __future__ import annotations

import random

from demo.run import Percentiles
from reflex_runtime.core.request import Request
from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.batch_metrics import Times
from reflex_runtime.robots.analysis.report import SlotReport
from reflex_runtime.robots.versions.ramp import GuardWatch, Objective, RampGuard, SloTracker
from reflex_runtime.sim import Report, RequestEnd, Run


def by_definition(values: list[float], percent: int) -> float:
    """The smallest value that at least so many per cent of the values do not exceed, in whole numbers."""
    return min(v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values))


def test_h9_guard_report_simulator_and_statistics_agree() -> None:
    for n in (1, 2, 7, 49, 50, 51, 99, 100, 101, 199, 200, 201, 500):
        for percent in (50, 90, 95, 99):
            agree(n, percent)


def agree(n: int, percent: int) -> None:
    rng = random.Random(n)
    values = [rng.expovariate(10.0) for _ in range(n)]
    wanted, share = by_definition(values, percent), percent / 100

    slo = SloTracker(Objective.parse(f"p{percent}=10s"), "log_only")
    window = GuardWatch(RampGuard.parse(f"p{percent}=10s"))
    times, report = Times(), SlotReport("a", latencies=sorted(values))
    for value in values:
        slo.served(value, 0.0)
        window.add(True, value)
        times.add(value)
    slo.check(0.0)
    simulated = Report.of(Run(0.0, 1.0, [RequestEnd(Request(), 0.0, value, "ok", 9.0, 0.0) for value in values]))

    assert percentile(sorted(values), share) == wanted
    assert slo.value == wanted
    assert window.numbers()[f"p{percent}_ms"] == round(wanted * 1e3, 3)
    assert report.latency(share) == wanted
    drawn = Percentiles.of(values)
    assert drawn is not None
    timing = times.take()()
    found = {50: (simulated.p50, timing.p50, drawn.p50), 90: (drawn.p90,)}
    found |= {95: (simulated.p95, timing.p95), 99: (simulated.p99, timing.p99, drawn.p99)}
    assert set(found[percent]) == {wanted}
