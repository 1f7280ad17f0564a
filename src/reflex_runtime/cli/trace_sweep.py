"""`reflex trace --sweep`: steps over budget, and the budget from which more of it buys nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table
from rich.text import Text

from reflex_runtime.config import one_line
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.percentile import percentile
from reflex_runtime.telemetry.colours import FAINT, INK, PALETTE, RULE
from reflex_runtime.telemetry.picture import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from reflex_runtime.cli.trace_runs import Measured

MOST_BUDGETS = 512
HIGHEST = 1 << 20
ROWS = 40  # more budgets than this are shown where something changes


def parse_sweep(text: str) -> list[int]:
    """The budgets of LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR; the last is HIGH."""
    found = re.fullmatch(r"([0-9]{1,7})\.\.([0-9]{1,7})(?::(?:([0-9]{1,7})|x([0-9]{1,3}(?:\.[0-9]{1,3})?)))?", text)
    if found is not None:
        low, high = int(found[1]), int(found[2])
        step, factor = int(found[3] or 1), float(found[4] or 0.0)
        if 1 <= low <= high <= HIGHEST and step >= 1 and (found[4] is None or factor > 1.0):
            budgets = list(range(low, high + 1, step)) if found[4] is None else _powers(low, high, factor)
            budgets += [high] * (budgets[-1] < high)
            if len(budgets) <= MOST_BUDGETS:
                return budgets
    raise ConfigError(
        f"--sweep={one_line(text)}: must be LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR within [1, {HIGHEST}], "
        f"of at most {MOST_BUDGETS} budgets, such as 4..64 or 64..4096:x2"
    )


def _powers(low: int, high: int, factor: float) -> list[int]:
    budgets, at = [low], float(low)
    while (at := at * factor) <= high:
        if int(at) > budgets[-1]:
            budgets.append(int(at))
    return budgets


class Knee(NamedTuple):
    """Where a larger budget stops paying.

    saturated: the smallest budget from which more buys nothing, None where the sweep ends before. floor: steps that
    are needed without any limit. bend: the budget at which the curve turns most: farthest below the straight line
    between its ends, on the axis it is drawn on.
    """

    saturated: int | None
    floor: int
    bend: int


def knee(runs: Sequence[Measured], floor: int) -> Knee:
    """Find both in runs of ascending budgets."""
    budgets, steps = [int(r.budget) for r in runs], [len(r.tokens) for r in runs]
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
    """Whether doublings are what the budgets are about, and a logarithmic axis shows them."""
    return budgets[-1] > 32 * budgets[0]


def in_words(found: Knee, runs: Sequence[Measured]) -> list[str]:
    """Both points in words."""
    steps = {int(r.budget): len(r.tokens) for r in runs}
    last = int(runs[-1].budget)
    if found.saturated is None:
        lines = [f"no knee up to {last}: {steps[last]} steps there, {found.floor} without a limit"]
    else:
        peaks = {int(r.budget): max(r.tokens) for r in runs}
        fits = "everything fits, and " if peaks[found.saturated] == peaks[last] else ""
        lines = [f"knee at {found.saturated}: {fits}more budget buys nothing ({found.floor} steps, as without a limit)"]
    if found.bend != found.saturated:
        lines.append(
            f"sharpest bend at {found.bend}: the curve is farthest below the line between its ends; beyond it a token "
            f"of budget buys less ({steps[found.bend]} steps)"
        )
    return lines


def sweep_table(runs: Sequence[Measured], found: Knee) -> Table:
    """One row per budget; of many budgets those at which steps or first tokens change."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ("budget", "steps", "peak\nstep", "mean\nstep", "budget\nunused", "first token in\nstep p50 / last", "")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == len(columns) - 1 else "right", no_wrap=True, vertical="bottom")
    seen: tuple[float, ...] = ()
    for run in runs:
        first = sorted(run.first_step)
        key = (len(run.tokens), percentile(first, 0.5), int(first[-1]))
        here = int(run.budget) in (found.saturated, found.bend, int(runs[-1].budget))
        if len(runs) > ROWS and key == seen and not here:
            continue
        seen = key
        note = "◀ knee" if run.budget == found.saturated else "◀ sharpest bend" if run.budget == found.bend else ""
        cells = [f"{run.budget:g}", str(key[0]), str(max(run.tokens)), f"{sum(run.tokens) / key[0]:.1f}"]
        cells += [f"{run.wasted:.0%}", f"{key[1]:g} / {key[2]}", note]
        table.add_row(*map(Text, cells), style="bold" if note else "")
    return table


def draw_sweep(runs: Sequence[Measured], found: Knee, prefix: Path) -> tuple[Path, Path]:
    """Steps over budget into PREFIX.svg and PREFIX.png, the knee named."""
    return saved(prefix, lambda: _figure(runs, found), "; choose another, or --no-picture")


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
