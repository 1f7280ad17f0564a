"""Reflex over LitServe, mosec and a queue by hand: the rows of `python -m bench.functions --json` as a chart.

    python -m bench.functions_chart     # bench/functions.json to docs/images/compare.svg

A point is the median of the rounds, a line their smallest and largest ratio. Of a server with several settings the best
one counts for each number of callers, by its answers a second.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reflex_runtime.observe.picture import Figure, saved
from reflex_runtime.observe.trace_tables import FAINT, INK, PALETTE, RULE

ROOT = Path(__file__).parent.parent
RATIO = re.compile(r"(answers a second|p99) over (LitServe|mosec|by hand)(?:, (\d+) ms)?$")
CASE = re.compile(r"(.+), (\d+) callers$")
OTHERS = ("LitServe", "mosec", "by hand")
FIGURES = {"answers a second": "answers a second: more is better", "p99": "p99 latency: less is better"}
COLOURS = {"8": PALETTE[0], "32": PALETTE[2], "128": PALETTE[5]}  # by callers
Ratio = Mapping[str, Any]  # a row: value, low, high


def main() -> int:
    """Draw the committed figures."""
    kept = json.loads((ROOT / "bench" / "functions.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        svg, _ = saved(Path(folder, "compare"), lambda: chart(ratios(kept["rows"]), kept["date"]))
        text = "\n".join(line.rstrip() for line in svg.read_text().splitlines())
    (ROOT / "docs" / "images" / "compare.svg").write_text(text + "\n")
    return 0


def ratios(rows: Sequence[Ratio]) -> dict[tuple[str, str], dict[tuple[str, str], Ratio]]:
    """By function and other server: a row for each figure and number of callers, of the other's best setting."""
    settings: dict[tuple[str, str, str], dict[str, dict[str, Ratio]]] = {}
    for row in rows:
        case, what = CASE.match(row["case"]), RATIO.match(row["what"])
        if case and what:
            found = settings.setdefault((case[1], what[2], case[2]), {})
            found.setdefault(what[3] or "", {})[what[1]] = row
    best: dict[tuple[str, str], dict[tuple[str, str], Ratio]] = {}
    for (function, other, callers), found in settings.items():
        chosen = min(found.values(), key=lambda of: of["answers a second"]["value"])
        for figure, row in chosen.items():
            best.setdefault((function, other), {})[figure, callers] = row
    return best


def chart(found: Mapping[tuple[str, str], Mapping[tuple[str, str], Ratio]], date: str) -> Figure:
    """A row for each function and server, a column for each figure, a colour for each number of callers."""
    lanes = sorted(found, key=lambda lane: (lane[0].startswith("a function"), OTHERS.index(lane[1])))
    figure = Figure(figsize=(9.0, 4.2))
    figure.text(0.012, 0.975, "Reflex over other servers", size=12, weight="bold", va="top")
    note = f"1 = the same. Point: median; line: smallest and largest round. CPU, one core a server, {date}"
    figure.text(0.012, 0.015, note, color=FAINT)
    columns = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.14, right=0.985, top=0.82, bottom=0.14, wspace=0.05)
    for axes, (what, title) in zip(columns, FIGURES.items(), strict=True):
        axes.set_title(title, loc="left", size=9, color=INK)
        for y, lane in enumerate(lanes):
            for i, (callers, colour) in enumerate(COLOURS.items()):
                if (row := found[lane].get((what, callers))) is not None:
                    _point(axes, row, y + 0.26 * (i - 1), colour)
        _scale(axes, lanes)
    for i, function in enumerate(dict.fromkeys(function for function, _ in lanes)):
        place = (-0.235, len(OTHERS) * (i + 0.5) - 0.5)
        columns[0].text(*place, function.replace("function that ", "function\nthat ").replace(" + ", " +\n"),
            transform=columns[0].get_yaxis_transform(), rotation=90, ha="center", va="center", weight="bold",
        )  # fmt: skip
    handles = [columns[0].plot([], [], "o", color=colour, label=f"{n} callers")[0] for n, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=3, frameon=False, labelcolor=FAINT, handlelength=1)
    return figure


def _point(axes: Any, row: Ratio, y: float, colour: str) -> None:
    axes.plot([row["low"], row["high"]], [y, y], color=colour, lw=1.3, alpha=0.7, solid_capstyle="round")
    axes.plot(row["value"], y, "o", ms=5, color=colour)
    value, place = f"{row['value']:.2f}", (row["high"], y)
    text = axes.annotate(value, place, (4, 0), textcoords="offset points", size=6.5, va="center")
    text.set_bbox({"color": "white", "pad": 0.3, "lw": 0})


def _scale(axes: Any, lanes: Sequence[tuple[str, str]]) -> None:
    axes.set_xscale("log")
    ticks = (0.25, 0.5, 1, 2, 4, 8)
    axes.set_xlim(0.1, 18)
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1.0, color=INK, lw=0.9)
    axes.axhline(2.5, color=RULE, lw=0.9)  # between the two functions
    axes.set_yticks(range(len(lanes)), [other for _, other in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
