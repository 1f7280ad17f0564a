"""Draws what `tuning` found: each setting on its axis, and the latencies before and after."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from reflex_runtime.sim.tuning import Knobs, TriedKnobs, Tuning
from reflex_runtime.telemetry.colours import FAINT, INK, PALETTE, RULE
from reflex_runtime.telemetry.picture import saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"budget": "--max-batch-cost-ms", "hold": "--batch-timeout-ms", "size": "--max-batch-size"}


def draw_tuning(tuning: Tuning, path: Path) -> list[Path]:
    """Draw into PATH.svg and PATH.png. ConfigError when a file cannot be written."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    return list(saved(path.with_suffix(""), lambda: _figure(tuning), flag="--picture"))


def _figure(tuning: Tuning) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.2), facecolor="white", layout="constrained")
    panels = figure.subplots(2, 3, gridspec_kw={"height_ratios": (3, 4)})
    for axes, name in zip(panels[0], _AXES, strict=True):
        _knob(axes, tuning, name)
    panels[0][0].set_ylabel(_unit(tuning))
    grid = panels[1][0].get_gridspec()
    for axes in panels[1]:
        axes.remove()
    _latencies(figure.add_subplot(grid[1, :]), tuning)
    flags = " ".join(tuning.after.knobs.flags(tuning.before.knobs))
    figure.suptitle(flags or f"nothing to change: {tuning.why}"[:120], fontsize=11, fontweight="bold", color=INK)
    return figure


def _unit(tuning: Tuning) -> str:
    return {"throughput": "answers/s", "on-time": "not in time, %"}.get(tuning.aim, f"{tuning.aim}, ms")


def _value(tuning: Tuning, one: TriedKnobs) -> float:
    figures = one.figures
    if tuning.aim == "throughput":
        return figures.throughput
    return (100.0 if tuning.aim == "on-time" else 1e3) * figures.of(tuning.aim)


def _knob(axes: Axes, tuning: Tuning, name: str) -> None:
    """The aim over one setting; the others as now, and as proposed."""
    for base, colour, label in ((tuning.before, FAINT, "now"), (tuning.after, PALETTE[4], "proposed")):
        line = _along(tuning.tried, base.knobs, name)
        values = [float(getattr(one.knobs, name)) for one in line]
        places = [_place(name, value) for value in values]
        axes.plot(places, [_value(tuning, one) for one in line], color=colour, marker="o", markersize=3, linewidth=1.2)
        at = _place(name, float(getattr(base.knobs, name)))
        axes.plot([at], [_value(tuning, base)], "o", color=colour, markersize=8, label=label, gid=f"{label}-{name}")
    axes.set_xscale("symlog" if name == "hold" else "log")
    axes.xaxis.set_major_formatter(lambda x, _: "default" if name == "hold" and x > 500 else f"{x:g}")
    axes.set_xlabel(_AXES[name])
    axes.set_ylim(bottom=0.0)
    axes.yaxis.grid(True, color=RULE, linewidth=0.6)
    if name == "budget":
        axes.legend(fontsize=7.5, frameon=False)


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
    for values, colour, label in zip(tuning.latencies, (FAINT, PALETTE[4]), ("now", "proposed"), strict=True):
        if values:
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step([1e3 * v for v in values], shares, color=colour, where="post", label=f"{label}, simulated")
    measured = sorted(one.served for one in tuning.load.requests if one.outcome == "ok")
    if measured:
        shares = [(i + 1) / len(measured) for i in range(len(measured))]
        dots = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 2))}
        axes.step([1e3 * v for v in measured], shares, where="post", label="now, measured", **dots)  # type: ignore[arg-type]
    axes.set(xlabel="latency of answered requests, ms", ylabel="share not above", ylim=(0, 1))
    axes.set_xlim(left=0.0)
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")
