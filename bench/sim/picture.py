"""The picture of `python -m bench.sim compare`: on-time share over offered load, one line per rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reflex_runtime.observe.picture import Figure, saved
from reflex_runtime.sim.report import Report


def draw_overload(results: Mapping[str, Mapping[str, Report]], path: Path, slo: float) -> list[Path]:
    """Write PATH.svg and PATH.png. slo: seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return list(saved(path.with_suffix(""), lambda: _overload_figure(results, slo), flag="--picture"))


def _overload_figure(results: Mapping[str, Mapping[str, Report]], slo: float) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (rule, by_rate), marker in zip(results.items(), "osv^DPX*", strict=False):
        poisson = {float(name.removesuffix("/s")): report for name, report in by_rate.items() if name.endswith("/s")}
        rates, shares = list(poisson), [report.on_time or 0.0 for report in poisson.values()]
        axes.plot(rates, shares, marker=marker, label=rule, linewidth=2.5 if rule == "window" else 1.2)
    axes.set(xlabel="offered, requests/s", ylabel=f"answered within {slo * 1e3:g} ms", ylim=(-0.02, 1.02))
    axes.legend(fontsize=8)
    return figure
