"""Draws what `tuning` found: each setting on its axis, and the latencies before and after."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from reflex_runtime.core.percentile import percentile
from reflex_runtime.sim.tuning import Knobs, TriedKnobs, TunedFigures, Tuning
from reflex_runtime.telemetry.colours import FAINT, INK, PALETTE, RULE
from reflex_runtime.telemetry.picture import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {
    "budget": "longest batch, ms\n--max-batch-cost-ms",
    "hold": "longest hold, ms\n--batch-timeout-ms",
    "size": "largest batch, requests\n--max-batch-size",
}
_HIGHEST = 3.0  # times the present value that is shown; what is worse leaves the panel at its top
_WIDE = 104  # characters of a line of the title
_TICKS = 6  # of an axis
_TAIL = 0.995  # share of the answers whose latencies are shown


def draw_tuning(tuning: Tuning, path: Path) -> list[Path]:
    """Draw into PATH.svg and PATH.png. ConfigError when a file cannot be written."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    return list(saved(path.with_suffix(""), lambda: _figure(tuning), flag="--picture"))


def _figure(tuning: Tuning) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.4), facecolor="white", layout="constrained")
    panels = figure.subplots(2, 3, gridspec_kw={"height_ratios": (3, 4)})
    top = _top(tuning)
    for axes, name in zip(panels[0], _AXES, strict=True):
        _knob(axes, tuning, name, top)
    panels[0][0].set_ylabel(_unit(tuning))
    if not tuning.why:
        panels[0][0].legend(fontsize=8, frameon=False)
    grid = panels[1][0].get_gridspec()
    for axes in panels[1]:
        axes.remove()
    _latencies(figure.add_subplot(grid[1, :]), tuning)
    title = "\n".join(fill(line, _WIDE) for line in _title(tuning).splitlines())
    figure.suptitle(title, fontsize=10, fontweight="bold", color=INK)
    return figure


def _title(tuning: Tuning) -> str:
    """What to set and what it will bring, or why nothing helps."""
    if tuning.why:
        return f"nothing to change: {tuning.why}"
    knobs, now = tuning.after.knobs, tuning.before.knobs
    flags = " ".join(knobs.flags(now))
    if knobs.hold == inf != now.hold:
        flags = f"{flags}, no --batch-timeout-ms".removeprefix(", ")
    least, most = sorted(_shown(tuning, figures) for figures in tuning.expected)
    was, will = _shown(tuning, tuning.measured), _shown(tuning, tuning.predicted)
    return f"{flags}\n{_unit(tuning)}: {was:.3g} now, {will:.3g} predicted ({least:.3g} to {most:.3g})"


def _unit(tuning: Tuning) -> str:
    return {"throughput": "answers/s", "on-time": "not in time, %"}.get(tuning.aim, f"{tuning.aim}, ms")


def _shown(tuning: Tuning, figures: TunedFigures) -> float:
    """The figure that is aimed at, in the unit of the picture."""
    if tuning.aim == "throughput":
        return figures.throughput
    return (100.0 if tuning.aim == "on-time" else 1e3) * figures.of(tuning.aim)


def _top(tuning: Tuning) -> float:
    """The end of the axis of all three panels, so that they compare."""
    highest = _HIGHEST * max(_shown(tuning, one.figures) for one in (tuning.before, tuning.after))
    return 1.08 * max(min(highest, max(_shown(tuning, one.figures) for one in tuning.tried)), 1e-3)


def _knob(axes: Axes, tuning: Tuning, name: str, top: float) -> None:
    """The aim over one setting; the others as now, and as proposed."""
    lines, ticks = [(tuning.before, FAINT, "now"), (tuning.after, PALETTE[4], "proposed")], set[float]()
    for base, colour, label in lines[:1] if tuning.why else lines:
        line = _along(tuning.tried, base.knobs, name)
        places = [_place(name, float(getattr(one.knobs, name))) for one in line]
        values = [_shown(tuning, one.figures) for one in line]
        axes.plot(places, values, color=colour, marker="o", markersize=3, linewidth=1.2)
        at = _place(name, float(getattr(base.knobs, name)))
        spot = [_shown(tuning, base.each[0])]  # of the seed that the line is of
        ticks |= {*places, at}
        axes.plot([at], spot, "o", color=colour, markersize=8, label=label, gid=f"{label}-{name}")
    axes.set_xscale("symlog" if name == "hold" else "log")
    axes.minorticks_off()
    axes.set_xticks(sorted(ticks)[:: -(-len(ticks) // _TICKS)])
    axes.xaxis.set_major_formatter(lambda x, _: "default" if name == "hold" and x > 500 else f"{x:g}")
    axes.set_xlabel(_AXES[name])
    axes.set_ylim(0.0, top)
    axes.yaxis.grid(True, color=RULE, linewidth=0.6)


def _along(tried: Sequence[TriedKnobs], base: Knobs, name: str) -> list[TriedKnobs]:
    """The tried settings that differ from `base` in this one only."""
    others = [field for field in Knobs._fields if field != name]
    found = [one for one in tried if all(getattr(one.knobs, f) == getattr(base, f) for f in others)]
    return sorted(found, key=lambda one: float(getattr(one.knobs, name)))


def _place(name: str, value: float) -> float:
    if name == "size":
        return value
    return 1000.0 if value == inf else value * 1e3


def _latencies(axes: Axes, tuning: Tuning) -> None:
    runs = list(zip(tuning.latencies, (FAINT, PALETTE[4]), ("now", "proposed"), strict=True))
    shown = 0.0
    for values, colour, label in runs[:1] if tuning.why else runs:
        if values:
            shown = max(shown, percentile(values, _TAIL))
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step([1e3 * v for v in values], shares, color=colour, where="post", label=f"{label}, simulated")
    measured = sorted(one.served for one in tuning.load.requests if one.outcome == "ok")
    if measured:
        shares = [(i + 1) / len(measured) for i in range(len(measured))]
        shown = max(shown, percentile(measured, _TAIL))
        dots = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 2))}
        axes.step([1e3 * v for v in measured], shares, where="post", label="now, measured", **dots)  # type: ignore[arg-type]
    axes.set(xlabel="latency of answered requests, ms", ylabel="share not above", ylim=(0, 1))
    axes.yaxis.grid(True, color=RULE, linewidth=0.6)
    axes.set_xlim(0.0, 1.05e3 * shown or None)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
