"""The panels of a batch picture: bars, stages, causes or shortages, times, waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.batch import Cause
from reflex_runtime.telemetry.colours import FAINT, INK, fill, ink, plain
from reflex_runtime.telemetry.journal import BatchLine
from reflex_runtime.telemetry.steps import WHY_WAITING, Waiter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAUSES = {  # letter, colour: dark where a ceiling ended the wait, pale where the batch did not wait
    Cause.BUDGET.value: ("B", "#374151"),
    Cause.SIZE.value: ("S", "#6B7280"),
    Cause.SINGLE.value: ("1", "#B91C1C"),
    Cause.TIMEOUT.value: ("T", "#D97706"),
    Cause.URGENT.value: ("U", "#7C3AED"),
    Cause.DRAIN.value: ("D", "#9CA3AF"),
    Cause.IDLE.value: ("I", "#D1FAE5"),
    Cause.STEP.value: ("→", "#E0E7FF"),
    Cause.APART.value: ("A", "#DB2777"),
}
_STAGES = ("#1E293B", "#CBD5E1", "#F59E0B", "#7C3AED", "#0D9488", "#BE123C")  # in order of appearance; then repeated
_CEILING = "#B91C1C"
_SHORT = {  # what kept the others out of a step of tokens
    "budget": ("B", "#374151"),
    "places": ("P", "#7C3AED"),
    "memory": ("M", "#B91C1C"),
    "share": ("S", "#D97706"),
    "room": ("R", "#6B7280"),
    "": ("", "#F3F4F6"),
}


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a bar. colour: a number of `Colours`, -1 for the rest. light: a decode."""

    colour: int
    height: float
    labels: tuple[str, ...]  # longest first; the first that fits is written
    gid: str
    entered: bool = False
    light: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One batch, or the mean of several neighbours; tallest: of them. mark: written above it."""

    batches: Sequence[BatchLine]
    segments: list[Segment]
    tallest: float
    mark: str = ""


def draw_bars(axes: Axes, bars: Sequence[Bar], unit: str, ceilings: Mapping[float, str], slots: int) -> bool:
    """One stack per bar; returns whether any shows who entered: in its label, or by a mark where none fits."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    marked = False
    small: dict[str, list[tuple[float, float]]] = {}
    tallest = max(bar.tallest for bar in bars) or 1.0
    top = 1.08 * max([tallest, *ceilings])
    axes.set_ylim(0.0, top)
    axes.set_ylabel(f"{unit} per {'step' if unit == 'tokens' else 'batch'}")
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=unit != "estimated ms"))
    width = 0.86 if slots <= 60 else 0.94
    bar_px, unit_px = 815 * width / slots, axes.get_position().height * 600 / top  # of a picture 900 px wide
    for x, bar in enumerate(bars):
        bottom = 0.0
        for segment in bar.segments:
            look = fill(segment.colour, segment.light)
            patch = Rectangle((x - width / 2, bottom), width, segment.height, **look)
            patch.set_gid(segment.gid)
            axes.add_patch(patch)
            label = next((t for t in segment.labels if len(t) * 6.4 + 4 <= bar_px), "")
            at, colour = (x, bottom + segment.height / 2), ink(look["facecolor"])
            if label and segment.height * unit_px >= 9:
                marked |= segment.entered
                axes.text(*at, label, ha="center", va="center", color=colour)
            elif segment.entered and segment.height * unit_px >= 3:
                small.setdefault(colour, []).append(at)
            bottom += segment.height
        if bar.mark:
            told = bar.mark if len(bar.mark) * 6.4 <= bar_px else "↩"
            axes.annotate(
                told, (x, bottom), xytext=(0, 1), textcoords="offset points", ha="center", va="bottom", color=_CEILING,
                fontsize=7.5, gid=f"preempted-{bar.batches[0].id}",
            )  # fmt: skip
        if bar.tallest > bottom * (1 + 1e-9):
            axes.plot([x - width / 2, x + width / 2], [bar.tallest] * 2, color=INK, linewidth=0.8)
    for colour, places in sorted(small.items()):
        size = min(4.0, 0.5 * bar_px)
        axes.plot(*zip(*places, strict=True), ">", color=colour, markersize=size, markeredgewidth=0, gid="entered")
    for height, name in ceilings.items():
        axes.axhline(height, color=_CEILING, linewidth=1.0, linestyle=(0, (5, 3)), gid="ceiling")
        axes.annotate(
            name, (1.0, height), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
            ha="right", va="bottom", color=_CEILING, fontsize=7.5,
        )  # fmt: skip
    return marked or bool(small)


def stage_of(batch: BatchLine, several: bool) -> str:
    """Which part of a request it was; with several groups, and of which."""
    return f"{batch.group} {batch.stage}".strip() if several else batch.stage


def draw_stages(axes: Axes, bars: Sequence[Bar], stages: Sequence[str], several: bool) -> None:
    from matplotlib.patches import Patch

    kinds = {stage: ("", _STAGES[i % len(_STAGES)]) for i, stage in enumerate(stages)}
    total = _strip(axes, "stage", [Counter(stage_of(b, several) for b in bar.batches) for bar in bars], kinds)
    told = [stage for stage in stages if total[stage]]
    handles = [
        Patch(facecolor=kinds[s][1], label=f"{plain(s or 'no stage')} {total[s]:,}") for s in told[: len(_STAGES)]
    ]
    if len(told) > len(_STAGES):
        handles.append(Patch(label=f"and {len(told) - len(_STAGES)} more", facecolor="none", edgecolor="none"))
    _key(axes, handles)


def draw_causes(axes: Axes, bars: Sequence[Bar]) -> None:
    """Why each batch left."""
    from matplotlib.patches import Patch

    total = _strip(axes, "why", [Counter(b.cause for b in bar.batches) for bar in bars], _CAUSES)
    handles = []
    for cause, (letter, colour) in _CAUSES.items():
        if total[cause]:
            reason = Cause(cause).reason.value
            name = cause if cause == reason else f"{cause} ({reason})"
            handles.append(Patch(facecolor=colour, label=f"{letter}  {name} {total[cause]:,}"))
    _key(axes, handles)


def draw_shortages(axes: Axes, bars: Sequence[Bar]) -> None:
    """What kept others out of each step."""
    from matplotlib.patches import Patch

    spelt = len(bars) <= 12  # a letter is easily taken for a request
    kinds = {kind: (kind if spelt else letter, colour) for kind, (letter, colour) in _SHORT.items()}
    total = _strip(axes, "short of", [Counter(b.short_of for b in bar.batches) for bar in bars], kinds)
    handles = [
        Patch(facecolor=colour, label=f"{'' if spelt else letter + '  '}{WHY_WAITING[kind]} {total[kind]:,}")
        for kind, (letter, colour) in _SHORT.items()
        if kind and total[kind]
    ]
    if handles:
        _key(axes, handles)


def _strip(axes: Axes, label: str, bars: Sequence[Counter[str]], kinds: Mapping[str, tuple[str, str]]) -> Counter[str]:
    """A strip of colours under the bars; where a bar is several batches, in proportion. kinds: letter and colour of
    each; returns their counts."""
    from matplotlib.patches import Rectangle

    axes.set_ylim(0, 1)
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    total: Counter[str] = Counter()
    for x, counts in enumerate(bars):
        total += counts
        bottom = 0.0
        for kind, (letter, colour) in kinds.items():
            share = counts[kind] / counts.total()
            if share:
                patch = Rectangle((x - 0.47, bottom), 0.94, share, facecolor=colour, linewidth=0)
                patch.set_gid(f"{label}-{x}-{colour}")
                axes.add_patch(patch)
            if letter and share == 1.0 and len(bars) <= 60:
                axes.text(x, 0.47, letter, ha="center", va="center", color=ink(colour), fontsize=7.5)
            bottom += share
    return total


def draw_times(axes: Axes, bars: Sequence[Bar]) -> None:
    """Predicted against measured time."""
    several = "median " if any(len(bar.batches) > 1 for bar in bars) else ""
    told = "modelled" if all("modelled" in b.notes for bar in bars for b in bar.batches) else "measured"
    xs = range(len(bars))
    measured = [median(b.elapsed for b in bar.batches) * 1e3 for bar in bars]
    drawn: list[Any] = [axes.bar(xs, measured, width=0.62, color="#CBD5E1", label=several + told)]
    predicted = [[b.expected for b in bar.batches if b.expected is not None] for bar in bars]
    known = [(x, median(p) * 1e3) for x, p in zip(xs, predicted, strict=True) if p]
    if known:
        left, right = [x - 0.42 for x, _ in known], [x + 0.42 for x, _ in known]
        lines = axes.hlines([y for _, y in known], left, right, color=INK, linewidth=1.2, label=f"{several}predicted")
        drawn.append(lines)
    axes.set_ylabel("time, ms")
    axes.set_ylim(0.0, 1.12 * max([*measured, *(y for _, y in known)]) or 1.0)
    _key(axes, drawn)


def draw_waits(axes: Axes, bars: Sequence[Bar]) -> None:
    """How long those that entered had waited."""
    entered = [(x, [m.age * 1e3 for b in bar.batches for m in b.entered]) for x, bar in enumerate(bars)]
    waits = [(x, w) for x, w in entered if w]
    xs = [x for x, _ in waits]
    span = axes.vlines(
        xs, [min(w) for _, w in waits], [max(w) for _, w in waits],
        color="#94A3B8", linewidth=2.0, capstyle="round", label="shortest to longest of those that entered",
    )  # fmt: skip
    medians = [median(w) for _, w in waits]
    (dots,) = axes.plot(xs, medians, "o", color=INK, markersize=2.8, clip_on=False, label="median")
    axes.set_ylabel("wait, ms")
    axes.set_ylim(0.0, 1.12 * max((max(w) for _, w in waits), default=0.0) or 1.0)
    _key(axes, [dots, span])


def draw_waiters(axes: Axes, bars: Sequence[Bar], waited: Mapping[int, Sequence[Waiter]]) -> None:
    """How many requests each step left out: those that had run before, and new ones; means where a bar is several."""
    from matplotlib.ticker import MaxNLocator

    kinds = {"queued": "#94A3B8", "resident": "#FBBF24", "preempted": "#B91C1C"}
    bottom = [0.0] * len(bars)
    drawn = []
    for kind, colour in kinds.items():
        counts = [
            sum(w.state == kind for b in bar.batches for w in waited.get(b.id, ())) / len(bar.batches) for bar in bars
        ]
        if any(counts):
            drawn.append(axes.bar(range(len(bars)), counts, 0.62, bottom, color=colour, label=_LEFT_OUT[kind]))
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    axes.set_ylabel("waiting")
    axes.set_ylim(0.0, 1.12 * max(bottom) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    if drawn:
        _key(axes, drawn)
    else:
        axes.text(0.5, 0.4, "none", transform=axes.transAxes, color=FAINT, ha="center", va="center")


_LEFT_OUT = {"queued": "not entered yet", "resident": "resident, granted nothing", "preempted": "preempted"}


def _key(axes: Axes, handles: Sequence[Any]) -> None:
    """A small legend above the right end of a panel."""
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.008, 1.0), ncols=max(1, len(handles)), frameon=False,
        fontsize=7, labelcolor=FAINT, handlelength=1.0, handleheight=0.8, handletextpad=0.4, columnspacing=1.2,
        borderpad=0.1, borderaxespad=0.45,
    )  # fmt: skip
