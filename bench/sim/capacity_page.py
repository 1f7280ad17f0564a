"""The table and the picture of docs/capacity.md: how many devices 10, 100, 1,000 and 10,000 robots need.

    python -m bench.sim.capacity_page          the table, and docs/images/capacity.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.sim.fleet import FleetPlan, Outage, run_fleet, size_fleet
from reflex_runtime.observe.picture import Figure, saved
from reflex_runtime.observe.trace_tables import FAINT, PALETTE, RULE
from reflex_runtime.sim import Affine

DEVICES = {"20 + 2n ms": Affine(0.020, 0.002), "5 + 1n ms": Affine(0.005, 0.001)}
ROBOTS = (10, 100, 1_000, 10_000)
HEAD = "| robots | device | replicas | so that one may fail | busiest | p99, ms | not in time | with one lost |"


def main() -> None:
    """Write both."""
    print(HEAD)
    print("| ---: | --- " + "| ---: " * 6 + "|")
    found: dict[str, list[tuple[int, int]]] = {}
    for name, device in DEVICES.items():
        for robots in ROBOTS:
            print(f"{robots} robots, {name}", file=sys.stderr)
            plan = FleetPlan(robots, 0.5, 0.100, device, 0.05, duration=5.0 if robots > 1_000 else 15.0)
            sizing = size_fleet(plan)
            run = run_fleet(plan, sizing.needed)
            lost = run_fleet(plan, sizing.with_one_failed, [Outage(0, 0.0, plan.duration)])
            found.setdefault(name, []).append((robots, sizing.needed))
            report = run.report
            print(
                f"| {robots:,} | {name} | {sizing.needed} | {sizing.with_one_failed} | "
                f"{run.busiest:.0%} | {1e3 * (report.p99 or 0.0):.0f} | {1 - (report.on_time or 0.0):.2%} | "
                f"{1 - (lost.report.on_time or 0.0):.2%} |",
                flush=True,
            )
    for path in saved(Path("docs/images/capacity"), lambda: _figure(found)):
        if path.suffix == ".svg":
            path.unlink()


def _figure(found: dict[str, list[tuple[int, int]]]) -> Figure:
    figure = Figure(figsize=(7.0, 4.0), facecolor="white", layout="constrained")
    axes = figure.subplots()
    for (name, points), colour in zip(found.items(), (PALETTE[4], PALETTE[1]), strict=True):
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=f"a device of {name}")
        for robots, needed in points:
            axes.annotate(str(needed), (robots, needed), xytext=(-4, 5), textcoords="offset points", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="robots", ylabel="devices")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color=RULE, linewidth=0.6)
    axes.legend(frameon=False, labelcolor=FAINT)
    return figure


if __name__ == "__main__":
    main()
