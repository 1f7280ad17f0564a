"""Runs the same prompts under many budgets, and finds the budget beyond which more has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reflex_runtime.sim.tokens import Measured, Progress, TokenRuns
from reflex_runtime.telemetry.colours import FAINT, INK, PALETTE, RULE
from reflex_runtime.telemetry.picture import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_LIMIT = 1 << 20


class Knee(NamedTuple):
    """Where a larger budget stops paying.

    saturated: the smallest budget beyond which more has no effect; None if the sweep ends before it. floor: steps
    needed without any limit. bend: the budget at which the curve bends most: the point farthest below the straight
    line between its ends, on the axis that it is drawn on.
    """

    saturated: int | None
    floor: int
    bend: int


def sweep(runs: TokenRuns, budgets: Sequence[int], progress: Progress = lambda _: None) -> tuple[list[Measured], Knee]:
    """Run the prompts under every budget, ascending; returns the runs and where a larger budget stops paying."""
    found = []
    for number, budget in enumerate(budgets, 1):
        progress(f"{number} of {len(budgets)} budgets")
        found.append(runs.measure(budget))
    return found, knee(found, len(runs.measure(NO_LIMIT).tokens))


def knee(runs: Sequence[Measured], floor: int) -> Knee:
    """The knee and the bend of runs with ascending budgets."""
    budgets, steps = [r.budget for r in runs], [len(r.tokens) for r in runs]
    saturated = None
    for budget, count in zip(reversed(budgets), reversed(steps), strict=True):
        if count > floor:
            break
        saturated = budget
    places = [log2(b) if _wide(budgets) else b for b in budgets]
    width, height = places[-1] - places[0] or 1, steps[0] - steps[-1] or 1
    under = [1.0 - (x - places[0]) / width - (s - steps[-1]) / height for x, s in zip(places, steps, strict=True)]
    return Knee(saturated, floor, budgets[under.index(max(under))])


def _wide(budgets: Sequence[float]) -> bool:
    """Whether the budgets span so much that a logarithmic axis is needed."""
    return budgets[-1] > 32 * budgets[0]


def in_words(found: Knee, runs: Sequence[Measured]) -> list[str]:
    """Both points in words."""
    steps = {r.budget: len(r.tokens) for r in runs}
    last = runs[-1].budget
    if found.saturated is None:
        lines = [f"no knee up to {last}: {steps[last]} steps there, {found.floor} without a limit"]
    else:
        peaks = {r.budget: max(r.tokens) for r in runs}
        fits = "everything fits, and " if peaks[found.saturated] == peaks[last] else ""
        lines = [f"knee at {found.saturated}: {fits}more budget buys nothing ({found.floor} steps, as without a limit)"]
    if found.bend != found.saturated:
        lines.append(
            f"sharpest bend at {found.bend}: the curve is farthest below the line between its ends; beyond it a token "
            f"of budget buys less ({steps[found.bend]} steps)"
        )
    return lines


def draw_sweep(runs: Sequence[Measured], found: Knee, prefix: Path, hint: str = "") -> tuple[Path, Path]:
    """Steps over budget into PREFIX.svg and PREFIX.png, the knee named. Raises ConfigError, with the hint, when a
    file cannot be written."""
    return saved(prefix, lambda: _figure(runs, found), hint)


def _figure(runs: Sequence[Measured], found: Knee) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    budgets, steps = [r.budget for r in runs], [len(r.tokens) for r in runs]
    figure = Figure(figsize=(9.0, 5.0), facecolor="white")
    box = {"left": 0.075, "right": 0.985, "top": 0.89 - 0.042 * len(in_words(found, runs)), "bottom": 0.10}
    panels = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (10, 3), "hspace": 0.16, **box})
    axes, waste = panels
    for one in (axes, waste):
        one.set_axisbelow(True)
        one.yaxis.grid(True, color=RULE, linewidth=0.6)
        one.spines["left"].set_visible(False)
    if _wide(budgets):
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
