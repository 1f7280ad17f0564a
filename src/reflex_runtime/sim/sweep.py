"""Runs the same prompts under many budgets, and finds the budget beyond which more has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from reflex_runtime.sim.tokens import Measured, Progress, TokenRuns

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
    places = [log2(b) if wide(budgets) else b for b in budgets]
    width, height = places[-1] - places[0] or 1, steps[0] - steps[-1] or 1
    under = [1.0 - (x - places[0]) / width - (s - steps[-1]) / height for x, s in zip(places, steps, strict=True)]
    return Knee(saturated, floor, budgets[under.index(max(under))])


def wide(budgets: Sequence[float]) -> bool:
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
