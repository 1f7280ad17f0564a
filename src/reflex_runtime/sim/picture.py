"""The picture of a simulated run: latency, batch sizes, and the distribution of latencies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from reflex_runtime.sim.run import Run
from reflex_runtime.telemetry.picture import saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "budget_reached": "#4477aa",
    "size_reached": "#66ccee",
    "single_request_over_budget": "#aa3377",
    "timeout": "#ccbb44",
    "idle": "#bbbbbb",
    "urgent": "#ee6677",
    "step": "#228833",
    "drain": "#000000",
    "apart": "#882255",
}


def draw_run(run: Run, path: Path, title: str = "") -> list[Path]:
    """Every request's latency and every batch's size over time, and the latency distribution.

    path: its suffix is replaced by .svg and .png; returns both.
    """
    return _saved(path, lambda: _run_figure(run, title))


def _run_figure(run: Run, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1)
    good = [a for a in run.answers if a.on_time]
    late = [a for a in run.answers if a.outcome == "ok" and not a.on_time]
    lost = [a for a in run.answers if a.outcome != "ok"]
    kinds = ((good, "#4477aa", "on time"), (late, "#ee6677", "late"), (lost, "#bbbbbb", "no answer"))
    for answers, colour, label in kinds:
        if answers:
            points = [a.arrived for a in answers], [a.latency * 1e3 for a in answers]
            top.scatter(*points, s=3, color=colour, label=f"{label} ({len(answers)})", rasterized=True)
    top.set(title=title, xlabel="arrival, s", ylabel="latency, ms")
    causes = {b.cause for b in run.batches}
    for cause in (c for c in _COLOURS if c in causes):
        batches = [b for b in run.batches if b.cause == cause]
        label = f"{cause} ({len(batches)})"
        points = [b.started for b in batches], [float(b.size) for b in batches]
        middle.scatter(*points, s=6, color=_COLOURS[cause], label=label, rasterized=True)
    middle.set(xlabel="start, s", ylabel="batch size, requests")
    latencies = sorted(a.latency * 1e3 for a in run.answers if a.outcome == "ok" and a.arrived >= run.warmup)
    bottom.step(latencies, [(i + 1) / len(latencies) for i in range(len(latencies))], color="#4477aa", where="post")
    bottom.set(xlabel="latency of answered requests, ms", ylabel="share not above", ylim=(0, 1))
    for axes in (top, middle):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, markerscale=3)
    return figure


def _saved(path: Path, draw: Callable[[], Figure]) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return list(saved(path.with_suffix(""), draw, flag="--picture"))
