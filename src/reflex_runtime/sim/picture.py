"""The pictures of a simulated run, and of the steps of prompts over the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reflex_runtime.observe.journal_view import FAINT, INK, PALETTE, RULE
from reflex_runtime.observe.plots import Axes, Figure, MaxNLocator, saved
from reflex_runtime.sim.run import Run
from reflex_runtime.sim.tokens import Knee, Measured, in_words, wide

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
    path.parent.mkdir(parents=True, exist_ok=True)
    return list(saved(path.with_suffix(""), lambda: _run_figure(run, title), flag="--picture"))


def _run_figure(run: Run, title: str) -> Figure:
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


def draw_sweep(runs: Sequence[Measured], found: Knee, prefix: Path, hint: str = "") -> tuple[Path, Path]:
    """Steps over budget into PREFIX.svg and PREFIX.png, the knee named. Raises ConfigError, with the hint, when a
    file cannot be written."""
    return saved(prefix, lambda: _sweep_figure(runs, found), hint)


def _sweep_figure(runs: Sequence[Measured], found: Knee) -> Figure:
    budgets, steps = [r.budget for r in runs], [len(r.tokens) for r in runs]
    figure = Figure(figsize=(9.0, 5.0), facecolor="white")
    box = {"left": 0.075, "right": 0.985, "top": 0.89 - 0.042 * len(in_words(found, runs)), "bottom": 0.10}
    panels = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (10, 3), "hspace": 0.16, **box})
    axes, waste = panels
    for one in (axes, waste):
        one.set_axisbelow(True)
        one.yaxis.grid(True, color=RULE, linewidth=0.6)
        one.spines["left"].set_visible(False)
    if wide(budgets):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.plot(
        budgets, steps, color=PALETTE[4], linewidth=1.4, marker="o", markersize=3.2, drawstyle="steps-post", gid="steps"
    )
    axes.axhline(found.floor, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), gid="floor")
    axes.annotate(
        f"{found.floor} steps: needed without a limit", (1.0, found.floor), xycoords=("axes fraction", "data"),
        xytext=(0, -3), textcoords="offset points", ha="right", va="top", color=FAINT, fontsize=7.5,
    )  # fmt: skip
    axes.set_ylim(0.0, 1.12 * max(steps))
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.set_ylabel("steps")
    for name, budget, colour in (("sharpest bend", found.bend, PALETTE[8]), ("knee", found.saturated, PALETTE[1])):
        if budget is not None and (name == "knee" or budget != found.saturated):
            _name_point(axes, name, (budget, steps[budgets.index(budget)]), colour)
    if found.bend != found.saturated:
        ends = [budgets[0], budgets[-1]], [steps[0], steps[-1]]
        axes.plot(*ends, color=PALETTE[8], linewidth=0.8, linestyle=(0, (1, 3)), gid="between-ends")
    waste.plot(budgets, [100.0 * r.wasted for r in runs], color=PALETTE[6], linewidth=1.2, drawstyle="steps-post")
    waste.set_ylim(0.0, 105.0)
    waste.set_ylabel("unused\nbudget, %")
    waste.set_xlabel("max_num_batched_tokens: the budget of a step, tokens")
    _head(figure, runs, found)
    return figure


def _name_point(axes: Axes, name: str, at: tuple[float, float], colour: str) -> None:
    axes.plot(*([x] for x in at), "o", color=colour, markersize=8, gid=name.split()[-1])
    axes.annotate(
        f"{name} {at[0]:g}", at, xytext=(6, 9 if name == "knee" else 30), textcoords="offset points", color=colour,
        fontsize=9, fontweight="bold",
    )  # fmt: skip


def _head(figure: Figure, runs: Sequence[Measured], found: Knee) -> None:
    count = len(runs[0].first_step)
    title = f"steps over budget: {count:,} request{'s' * (count != 1)}, {sum(runs[0].tokens):,} tokens"
    figure.text(0.012, 0.955, title, fontsize=12.5, fontweight="bold", va="center", color=INK)
    for i, line in enumerate(in_words(found, runs)):
        figure.text(0.012, 0.905 - 0.042 * i, line, color=FAINT, va="center")
