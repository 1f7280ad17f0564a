"""The picture of batches: which requests shared which batch.

Panels over one axis of batches: a stacked bar with one segment per grant and one colour per client (or request), stage
and group (if there are several), why each batch left, predicted against measured time, and the waits of requests that
entered. Steps over tokens show prefill, decode and preemptions, and below them the limit that kept others out, and how
many they were. Of too many batches the newest are drawn, with a note. The same batches give the same bytes. The only
module that imports matplotlib (the extra `plots`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by
from reflex_runtime.observe import trace_tables
from reflex_runtime.observe.files import replace
from reflex_runtime.observe.journal import BatchLine, Journal, plain
from reflex_runtime.observe.trace_tables import (
    FAINT,
    HATCHES,
    INK,
    PALETTE,
    RULE,
    WHY_WAITING,
    Colours,
    Waiter,
    count_of,
    fill,
    ink,
    is_decode,
    is_tokens,
    request_name,
    unit_of,
    who_waited,
)

with needed_by("a picture"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

__all__ = ["Axes", "Figure", "MaxNLocator", "Patch", "Rectangle", "drawn", "saved", "write_pictures"]

BARS = 160  # batches of a picture, and
SEGMENTS = 2400  # grants
NAMED = 12  # colours with a name in the legend

_DOT = "   ·   "
_NEAR = 1.6  # a ceiling higher than this many times the tallest bar is written, not drawn


# -- how a picture looks and is saved -------------------------------------------------------------------------------

_STYLE: Final[dict[str, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so every machine places text alike
    "font.size": 8.0,
    "text.parse_math": False,  # ids may hold dollar signs
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "reflex",
}


def saved(prefix: Path, draw: Callable[[], Figure], hint: str = "", flag: str = "--out") -> tuple[Path, Path]:
    """Draw in the common style and save as PREFIX.svg and PREFIX.png; the same figure gives the same bytes.

    Raises ConfigError, which names the flag and ends with the hint, when a file cannot be written.
    """
    svg, png = prefix.with_name(prefix.name + ".svg"), prefix.with_name(prefix.name + ".png")
    with matplotlib.rc_context(cast(Any, _STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # ids may be in any script
        figure = draw()
        try:
            replace(svg, drawn(figure, format="svg", metadata={"Date": None, "Creator": None}))
            replace(png, drawn(figure, format="png", dpi=trace_tables.DPI, metadata={"Software": None}))
        except OSError as error:
            raise ConfigError(f"{flag}={prefix}: cannot be written: {error.strerror or error}{hint}") from error
    return svg, png


def drawn(figure: Figure, **options: Any) -> bytes:
    """A figure as the bytes of a file. options: of `Figure.savefig`."""
    file = BytesIO()
    figure.savefig(file, **options)
    return file.getvalue()


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Drawing:
    bars: list[Bar]
    names: dict[int, str]  # legend
    notes: list[str]
    unit: str
    ceilings: dict[float, str]


def write_pictures(trace: Journal, batches: Sequence[BatchLine], prefix: Path) -> tuple[Path, Path]:
    """Draw the batches into PREFIX.svg and PREFIX.png, and return both. ConfigError when they cannot be written."""
    shown = _newest(batches)
    drawing = _prepare(trace, shown)
    if len(shown) < len(batches):
        drawing.notes.append("the newest; --from ID --to ID shows others")
    return saved(prefix, lambda: _draw(drawing, trace, shown), "; choose another, or --no-picture")


def _newest(batches: Sequence[BatchLine]) -> Sequence[BatchLine]:
    """The newest batches, as many as fit."""
    grants = 0
    for count, batch in enumerate(reversed(batches)):
        grants += batch.size
        if count == BARS or (count and grants > SEGMENTS):
            return batches[-count:]
    return batches


def _prepare(trace: Journal, batches: Sequence[BatchLine]) -> _Drawing:
    """Decide what is drawn; the rest only places it. The axis counts requests if groups count in different units."""
    kinds = {unit_of(b) for b in batches}
    unit = kinds.pop() if len(kinds) == 1 else "requests"
    colours = Colours.of(trace, batches)
    notes = [f"one colour per {colours.by}"]
    back = {}
    if is_tokens(batches):  # a request that leaves before its last batch was preempted
        back = {m.seq: (b.id, request_name(m)) for b in trace.batches for m in b.members}
    bars = [_bar(b, colours, unit, back) for b in batches]
    present = {s.colour for bar in bars for s in bar.segments}
    names = {i: n for i, n in enumerate(colours.names) if i in present}
    if len(names) > len(PALETTE) * len(HATCHES):
        notes.append(f"colours repeat after {len(PALETTE) * len(HATCHES)}")
    ceilings = {}
    for height, name in _ceilings(trace, batches, unit).items():
        if height <= _NEAR * max(bar.height for bar in bars):
            ceilings[height] = name
        elif name.startswith("budget"):
            notes.append(f"{name} is off the scale")
    if trace.footer is not None and trace.footer.dropped:
        notes.append(f"{trace.footer.dropped:,} batches were never written and are missing")
    return _Drawing(bars, names, notes, unit, ceilings)


def _bar(batch: BatchLine, colours: Colours, unit: str, back: Mapping[int, tuple[int, str]]) -> Bar:
    """One segment per grant. back: last batch and name of each request; empty where nothing is preempted."""
    segments = []
    for m in batch.members:
        height = 1.0 if unit == "requests" else m.units
        mark = "▸" if m.state == "waiting" else ""
        name, number = request_name(m), "" if height == 1.0 and batch.unit != "tokens" else f"{height:.3g}"
        labels = (f"{mark}{name} {number}".rstrip(), f"{mark}{number}", mark)
        gid = f"grant-{batch.id}-{m.seq}"
        segments.append(Segment(colours.index(m), height, labels, gid, bool(mark), is_decode(m)))
    thrown = [back[seq][1] for seq in batch.left if seq in back and back[seq][0] >= batch.id]
    return Bar(batch, segments, sum(s.height for s in segments), " ".join(f"↩{name}" for name in thrown))


def _ceilings(trace: Journal, batches: Sequence[BatchLine], unit: str) -> dict[float, str]:
    """Height and name of each ceiling on this axis."""
    found: dict[float, str] = {}
    for name in dict.fromkeys(b.group for b in batches):
        info = trace.groups.get(name)
        if info is not None and info.unit == unit and info.budget is not None:
            found[info.budget] = f"budget {info.budget:g} {unit}"
        elif info is not None:
            found[float(info.max_size)] = f"at most {info.max_size} requests"
    return found


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw(drawing: _Drawing, trace: Journal, batches: Sequence[BatchLine]) -> Figure:
    figure = Figure(figsize=(9.0, 6.0), facecolor="white")
    several = len({b.group for b in trace.batches}) > 1
    # Of the trace, so that a window of it shows the same colours.
    known = sorted(trace.batches, key=lambda b: b.group) if several else trace.batches
    stages = list(dict.fromkeys(stage_of(b, several) for b in known))
    staged = len({stage_of(b, several) for b in batches}) > 1
    ratios = (10, 0.8, 0.8, 3, 3) if staged else (10, 0.8, 3, 3)
    heights = {"height_ratios": ratios, "hspace": 0.5 if staged else 0.42}
    box = {"left": 0.075, "right": 0.985, "top": 0.835, "bottom": 0.08}
    panels = list(figure.subplots(len(ratios), 1, sharex=True, gridspec_kw=heights | box))
    main, why, time, wait = panels[0], *panels[-3:]
    tokens = is_tokens(batches)
    for axes in (main, time, wait):
        axes.set_axisbelow(True)
        axes.yaxis.grid(True, color=RULE, linewidth=0.6)
        axes.spines["left"].set_visible(False)
    slots = max(len(drawing.bars), 5)
    main.set_xlim(-0.6, slots - 0.4)
    marked = draw_bars(main, drawing.bars, drawing.unit, drawing.ceilings, slots)
    if staged:
        kinds = {stage: ("", _STAGES[i % len(_STAGES)], plain(stage or "no stage")) for i, stage in enumerate(stages)}
        label = "stage" if any(b.stage for b in batches) else "group"
        _strip(panels[1], label, [stage_of(bar.batch, several) for bar in drawing.bars], kinds)
    draw_times(time, drawing.bars)
    if tokens:
        draw_shortages(why, drawing.bars)
        draw_waiters(wait, drawing.bars, who_waited(trace.batches, {b.id for b in batches}))
    else:
        causes = {cause: (letter, colour, f"{letter}  {cause}") for cause, (letter, colour) in _CAUSES.items()}
        _strip(why, "why", [bar.batch.cause for bar in drawing.bars], causes)
        draw_waits(wait, drawing.bars)
    ticks = _ticks(drawing.bars)
    wait.set_xticks(list(ticks), list(ticks.values()))
    wait.set_xlabel("step" if tokens else "batch id")
    figure.align_ylabels([main, time, wait])
    if marked:
        drawing.notes.append(f"▸ entered from the queue with this {'step' if tokens else 'batch'}")
    if any(s.light for bar in drawing.bars for s in bar.segments):
        drawing.notes.append("dark prefill, pale decode")
    if any(bar.mark for bar in drawing.bars):
        drawing.notes.append("↩ preempted before the step")
    _draw_head(figure, drawing, trace, batches)
    return figure


def _ticks(bars: Sequence[Bar]) -> dict[int, str]:
    """Round batch ids, if there are some."""
    ids = [(x, bar.batch.id) for x, bar in enumerate(bars)]
    steps = (m * 10**e for e in range(16) for m in (1, 2, 5))
    step = next(s for s in steps if (ids[-1][1] - ids[0][1]) / s <= 14)
    ticks: dict[int, str] = {}
    for x, number in ids:
        if number % step == 0:
            ticks.setdefault(x, str(number))
    return ticks if len(ticks) > 1 else {0: str(ids[0][1]), len(bars) - 1: str(ids[-1][1])}


def _draw_head(figure: Figure, drawing: _Drawing, trace: Journal, batches: Sequence[BatchLine]) -> None:
    requests = len({m.seq for b in batches for m in b.members})
    tokens = sum(m.units for b in batches for m in b.members)
    counted = f"{tokens:,.0f} tokens of " if drawing.unit == "tokens" else ""
    some = "" if len(batches) == len(trace.batches) else f"{len(batches):,} of "
    drawn = count_of(len(trace.batches), "step" if is_tokens(batches) else "batch")
    title = f"{counted}{count_of(requests, 'request')} in {some}{drawn}"
    figure.text(0.012, 0.965, title, fontsize=12.5, fontweight="bold", va="center")
    start, end = trace.seconds(batches[0]), max(trace.seconds(b) + b.elapsed for b in batches)
    notes = [f"{start:.3f} s to {end:.3f} s", *drawing.notes]
    below = figure.text(0.012, 0.927, _DOT.join(notes), color=FAINT, va="center")
    if below.get_window_extent().x1 > figure.bbox.x1:
        half = ceil(len(notes) / 2)
        below.set_text(f"{_DOT.join(notes[:half])}\n{_DOT.join(notes[half:])}")
    handles = [Patch(label=name, **fill(i)) for i, name in list(drawing.names.items())[: NAMED + 1]]
    if len(drawing.names) > NAMED + 1:
        handles.append(Patch(label=f"and {len(drawing.names) - NAMED - 1} more", facecolor="none", edgecolor="none"))
    width = sum(len(str(h.get_label())) * 5.6 + 30 for h in handles)
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(0.004, 0.885), frameon=False, fontsize=7.5,
        ncols=len(handles) if width <= 880 else ceil(len(handles) / 2),
        handlelength=1.0, handleheight=1.0, columnspacing=1.1, handletextpad=0.4, labelspacing=0.3, borderpad=0.2,
    ).set_gid("legend")  # fmt: skip


_CAUSES = {  # letter, colour: dark where a ceiling ended the wait, blue where a hold did, pale where there was none
    Cause.FULL.value: ("F", "#374151"),
    Cause.SIZE.value: ("S", "#6B7280"),
    Cause.SINGLE.value: ("1", "#B91C1C"),
    Cause.HELD.value: ("H", "#60A5FA"),
    Cause.URGENT.value: ("U", "#7C3AED"),
    Cause.DRAIN.value: ("D", "#9CA3AF"),
    Cause.IDLE.value: ("I", "#D1FAE5"),
    Cause.STEP.value: ("→", "#E0E7FF"),
    Cause.APART.value: ("A", "#DB2777"),
}
_STAGES = ("#1E293B", "#CBD5E1", "#F59E0B", "#7C3AED", "#0D9488", "#BE123C")  # in order of appearance; then repeated
_CEILING = "#B91C1C"
MOST_KINDS = 9  # in the legend of a strip
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
    """Part of a bar. colour: a number of `Colours`. light: a decode."""

    colour: int
    height: float
    labels: tuple[str, ...]  # longest first; the first that fits is written
    gid: str
    entered: bool = False
    light: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One batch. mark: written above it."""

    batch: BatchLine
    segments: list[Segment]
    height: float
    mark: str


def draw_bars(axes: Axes, bars: Sequence[Bar], unit: str, ceilings: Mapping[float, str], slots: int) -> bool:
    """One stack per bar; returns whether any shows who entered: in its label, or by a mark where none fits."""
    marked = False
    small: dict[str, list[tuple[float, float]]] = {}
    tallest = max(bar.height for bar in bars) or 1.0
    top = 1.08 * max([tallest, *ceilings])
    axes.set_ylim(0.0, top)
    axes.set_ylabel(f"{unit} per {'step' if unit == 'tokens' else 'batch'}")
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
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
            mark = bar.mark if len(bar.mark) * 6.4 <= bar_px else "↩"
            axes.annotate(
                mark, (x, bottom), xytext=(0, 1), textcoords="offset points", ha="center", va="bottom", color=_CEILING,
                fontsize=7.5, gid=f"preempted-{bar.batch.id}",
            )  # fmt: skip
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


def draw_shortages(axes: Axes, bars: Sequence[Bar]) -> None:
    """What kept others out of each step."""
    spelt = len(bars) <= 12  # a letter is easily taken for a request
    kinds = {}
    for kind, (letter, colour) in _SHORT.items():
        name = WHY_WAITING.get(kind, "")
        kinds[kind] = (kind, colour, name) if spelt else (letter, colour, name and f"{letter}  {name}")
    _strip(axes, "short of", [bar.batch.short_of for bar in bars], kinds)


def _strip(axes: Axes, label: str, found: Sequence[str], kinds: Mapping[str, tuple[str, str, str]]) -> None:
    """A strip of colours under the bars. found: of each bar. kinds: letter, colour and name of each; one without a name
    is not in the legend."""
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    for x, kind in enumerate(found):
        if kind not in kinds:
            continue
        letter, colour, _ = kinds[kind]
        patch = Rectangle((x - 0.47, 0.0), 0.94, 1.0, facecolor=colour, linewidth=0)
        patch.set_gid(f"{label}-{x}-{colour}")
        axes.add_patch(patch)
        if letter and len(found) <= 60:
            axes.text(x, 0.47, letter, ha="center", va="center", color=ink(colour), fontsize=7.5)
    total = Counter(found)
    labels = [(f"{name} {total[kind]:,}", colour) for kind, (_, colour, name) in kinds.items() if name and total[kind]]
    handles = [Patch(facecolor=colour, label=text) for text, colour in labels[:MOST_KINDS]]
    if len(labels) > MOST_KINDS:
        handles.append(Patch(label=f"and {len(labels) - MOST_KINDS} more", facecolor="none", edgecolor="none"))
    _key(axes, handles)


def draw_times(axes: Axes, bars: Sequence[Bar]) -> None:
    """Predicted against measured time."""
    source = "modelled" if all("modelled" in bar.batch.notes for bar in bars) else "measured"
    measured = [bar.batch.elapsed * 1e3 for bar in bars]
    drawn: list[Any] = [axes.bar(range(len(bars)), measured, width=0.62, color="#CBD5E1", label=source)]
    known = [(x, bar.batch.expected * 1e3) for x, bar in enumerate(bars) if bar.batch.expected is not None]
    if known:
        left, right = [x - 0.42 for x, _ in known], [x + 0.42 for x, _ in known]
        lines = axes.hlines([y for _, y in known], left, right, color=INK, linewidth=1.2, label="predicted")
        drawn.append(lines)
    axes.set_ylabel("time, ms")
    axes.set_ylim(0.0, 1.12 * max([*measured, *(y for _, y in known)]) or 1.0)
    _key(axes, drawn)


def draw_waits(axes: Axes, bars: Sequence[Bar]) -> None:
    """The waits of requests that entered."""
    entered = [(x, [m.age * 1e3 for m in bar.batch.entered]) for x, bar in enumerate(bars)]
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
    """How many requests each step left out: those that had run before, and new ones."""
    kinds = {"queued": "#94A3B8", "resident": "#FBBF24", "preempted": "#B91C1C"}
    bottom = [0.0] * len(bars)
    drawn = []
    for kind, colour in kinds.items():
        counts = [sum(w.state == kind for w in waited.get(bar.batch.id, ())) for bar in bars]
        if any(counts):
            drawn.append(axes.bar(range(len(bars)), counts, 0.62, bottom, color=colour, label=_LEFT_OUT[kind]))
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    axes.set_ylabel("waiting")
    axes.set_ylim(0.0, 1.12 * max(bottom) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    _key(axes, drawn)
    if not drawn:
        axes.text(0.5, 0.4, "none", transform=axes.transAxes, color=FAINT, ha="center", va="center")


_LEFT_OUT = {"queued": "not entered yet", "resident": "resident, granted nothing", "preempted": "preempted"}


def _key(axes: Axes, handles: Sequence[Any]) -> None:
    """A small legend above the right end of a panel."""
    if not handles:
        return
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.008, 1.0), ncols=len(handles), frameon=False,
        fontsize=7, labelcolor=FAINT, handlelength=1.0, handleheight=0.8, handletextpad=0.4, columnspacing=1.2,
        borderpad=0.1, borderaxespad=0.45,
    )  # fmt: skip
