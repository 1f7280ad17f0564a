"""The same robots without and with batching, side by side: answers a second, waits, and calls of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reflex_runtime.observe.journal import Journal, client_label
from reflex_runtime.observe.picture import Figure, Patch, saved
from reflex_runtime.observe.trace_tables import FAINT, INK, PALETTE, RULE

WINDOW: Final = 1.5  # seconds that are drawn of each run


@dataclass(frozen=True, slots=True)
class Lanes:
    """What happened to the robots of a run in a window. Pairs of begin and length, in seconds from its begin, by robot.

    waits: a request waited, for its first call or between two. calls: it was in a call of the model. rate: requests
    that ended well, a second, over all the time in which every robot was at work; if there was none, over the run.
    """

    waits: dict[str, list[tuple[float, float]]]
    calls: dict[str, list[tuple[float, float]]]
    rate: float

    @classmethod
    def of(cls, run: Journal, window: float = WINDOW) -> Lanes:
        """From the middle of the time that the rate is of."""
        members = [(batch, m, client_label(m.client)) for batch in run.batches for m in batch.members]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for batch, _, robot in members:
            first.setdefault(robot, batch.at)
            last[robot] = batch.finished
        ends = [batch.finished for batch, m, _ in members if m.outcome == "done"]
        work = (max(first.values()), min(last.values())) if first else (0.0, 0.0)
        if ends and not any(work[0] < end <= work[1] for end in ends):  # a short run: one left before another came
            work = (min(batch.at - m.age for batch, m, _ in members), max(ends))
        answered = sum(work[0] < end <= work[1] for end in ends)
        begin = (sum(work) - window) / 2
        waits: dict[str, list[tuple[float, float]]] = {robot: [] for robot in sorted(first)}
        calls: dict[str, list[tuple[float, float]]] = {robot: [] for robot in sorted(first)}
        since: dict[int, float] = {}
        for batch, m, robot in members:
            waited = since.get(m.seq, batch.at - m.age)
            since[m.seq] = batch.finished
            for lanes, start, end in ((waits, waited, batch.at), (calls, batch.at, batch.finished)):
                if (start := max(start, begin)) < (end := min(end, begin + window)):
                    lanes[robot].append((start - begin, end - start))
        return cls(waits, calls, answered / (work[1] - work[0]) if answered else 0.0)


def draw_gain(alone: Journal, together: Journal, prefix: Path) -> tuple[Path, Path]:
    """Draw PREFIX.svg and PREFIX.png; returns both paths. alone: the run with one request in each call."""
    return saved(prefix, lambda: _draw([Lanes.of(alone), Lanes.of(together)]))


def _draw(runs: Sequence[Lanes]) -> Figure:
    robots = sorted({*runs[0].calls, *runs[1].calls}, key=lambda name: (len(name), name))
    height = 1.4 + 0.28 * len(robots)
    figure = Figure(figsize=(9.0, height))
    both = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.06, right=0.985, top=1 - 0.87 / height, bottom=0.42 / height, wspace=0.06)
    title = f"The same {len(robots)} robots, without and with batching"
    figure.text(0.012, 1 - 0.12 / height, title, size=12, weight="bold", va="top")
    for axes, run, name in zip(both, runs, ("one request in each call", "batched"), strict=True):
        _lanes(axes, run, robots)
        axes.set_title(f"{run.rate:.0f} answers a second", loc="left", size=14, weight="bold", color=INK)
        axes.set_title(name, loc="right", size=9, color=FAINT)
    both[0].set_yticks(range(len(robots)), robots)
    both[0].invert_yaxis()
    keys = [Patch(color=INK, label="in a call of the model"), Patch(color=INK, alpha=0.25, lw=0, label="waits")]
    keys.append(Patch(facecolor="white", edgecolor=RULE, label="acts, and looks"))
    figure.legend(
        handles=keys,
        loc="upper right",
        bbox_to_anchor=(0.995, 1 - 0.04 / height),
        ncols=3,
        frameon=False,
        labelcolor=FAINT,
        handlelength=1.2,
    )
    return figure


def _lanes(axes: Any, run: Lanes, robots: Sequence[str]) -> None:
    for lane, robot in enumerate(robots):
        colour = PALETTE[lane % len(PALETTE)]
        axes.broken_barh(run.waits.get(robot, []), (lane - 0.36, 0.72), color=colour, alpha=0.25, lw=0)
        axes.broken_barh(run.calls.get(robot, []), (lane - 0.36, 0.72), facecolor=colour, edgecolor="white", lw=0.4)
    axes.set_xlim(0, WINDOW)
    axes.set_xlabel("seconds", labelpad=1)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
