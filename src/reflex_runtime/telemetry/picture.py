"""The picture of a batch trace: who shared which batch, because a schedule is understood by looking at it.

Panels over one axis of batches: a stacked bar with one segment per grant and one colour per client (or request), which
stage ran and of which group (where there are several), why each batch left, predicted against measured time, and how
long those that entered had waited. Too many batches to draw one by one are averaged, and the picture says so. The same
trace gives the same bytes.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, cast

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.telemetry.trace import Member, Trace, TracedBatch

if TYPE_CHECKING:  # the import takes a second, and a table needs only the colours
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Units = Literal["grants", "ms", "requests"]
UNITS: tuple[Units, ...] = ("grants", "ms", "requests")

BARS = 160  # more batches than this are averaged
SEGMENTS = 2400  # more grants than this are merged by colour
NAMED = 12  # colours with a name in the legend; in a merged picture the rest is one grey

# Paul Tol's "muted" scheme, safe for colour-blind readers; beyond it the colours repeat under a hatching.
PALETTE = (
    "#88CCEE", "#CC6677", "#117733", "#DDCC77", "#332288", "#AA4499", "#44AA99", "#882255", "#999933",
)  # fmt: skip
_HATCHES = ("", "////", "\\\\\\\\", "xxxx")  # lines only: a hatching of dots weighs megabytes in an SVG
_OTHERS = "#BBBBBB"
_INK, _FAINT, _RULE, _CEILING = "#222222", "#6B7280", "#E5E7EB", "#B91C1C"

_NEAR = 1.6  # a ceiling higher than this many times the tallest bar is told, not drawn

_CAUSES = {  # letter, colour: dark where a ceiling made the batch go, pale where nothing held it
    Cause.BUDGET.value: ("B", "#374151"),
    Cause.SIZE.value: ("S", "#6B7280"),
    Cause.SINGLE.value: ("1", "#B91C1C"),
    Cause.TIMEOUT.value: ("T", "#D97706"),
    Cause.URGENT.value: ("U", "#7C3AED"),
    Cause.DRAIN.value: ("D", "#9CA3AF"),
    Cause.IDLE.value: ("I", "#D1FAE5"),
    Cause.STEP.value: ("→", "#E0E7FF"),
}
_STAGES = ("#1E293B", "#CBD5E1", "#F59E0B", "#7C3AED", "#0D9488", "#BE123C")  # in order of appearance, then again

_CONNECTION = re.compile(r"""[(\[](['"])([^'"]+)\1, (\d+)[)\]]""")


# -- colours -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Colours:
    """One colour per client, or per request where all are of one client. by: `client` or `request`."""

    by: str
    names: tuple[str, ...]
    _index: dict[Hashable, int]

    @classmethod
    def of(cls, trace: Trace, batches: Sequence[TracedBatch]) -> Colours:
        """In order of appearance: clients in the trace, so that a window of it shows the same colours; requests in the
        batches shown, so that few of them need no hatching."""
        by = "client" if len({m.client for b in trace.batches for m in b.members}) > 1 else "request"
        index: dict[Hashable, int] = {}
        names = []
        for batch in trace.batches if by == "client" else batches:
            for m in batch.members:
                key: Hashable = m.client if by == "client" else m.seq
                if key not in index:
                    index[key] = len(index)
                    names.append(client_name(m) if by == "client" else request_name(m))
        return cls(by, tuple(names), index)

    def index(self, member: Member) -> int:
        """Number of the member's colour."""
        return self._index[member.client if self.by == "client" else member.seq]

    def hex(self, member: Member) -> str:
        """The member's colour, without its hatching."""
        return PALETTE[self.index(member) % len(PALETTE)]


def request_name(member: Member) -> str:
    """The request's id, or the number of its arrival when it has none."""
    return plain(member.id) if member.id else f"#{member.seq}"


def client_name(member: Member) -> str:
    """The client; one known only by its connection is `host:port`, which a server writes as the repr of a pair."""
    connection = _CONNECTION.fullmatch(member.client)
    if connection is None:
        return plain(member.client or "no client")
    host, port = connection.group(2, 3)
    name = plain(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", 99)
    return name if len(name) <= 21 else "…" + name[-20:]  # the port is what tells two of them apart


def plain(text: str, width: int = 18) -> str:
    """Callers' text on one line: what cannot be printed becomes a dot, what is too long an ellipsis."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def ink(face: str) -> str:
    """Dark or white, whichever reads better on a colour."""
    r, g, b = (int(face[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#FFFFFF" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.45 else _INK


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Segment:
    """colour: a number of `Colours`, -1 for the rest."""

    colour: int
    height: float
    labels: tuple[str, ...]  # longest first; the first that fits is written
    gid: str
    entered: bool = False


@dataclass(frozen=True, slots=True)
class _Bar:
    """One batch, or the mean of several neighbours; tallest: of them."""

    batches: Sequence[TracedBatch]
    segments: list[_Segment]
    tallest: float


@dataclass(frozen=True, slots=True)
class _Drawing:
    bars: list[_Bar]
    names: dict[int, str]  # legend
    notes: list[str]
    unit: str
    ceilings: dict[float, str]


def write_pictures(
    trace: Trace, batches: Sequence[TracedBatch], prefix: Path, units: Units = "grants"
) -> tuple[Path, Path]:
    """Draw the batches into PREFIX.svg and PREFIX.png and return both paths.

    units: what a segment's height is: `grants` the units granted, `requests` one each, `ms` the estimated cost in
    milliseconds, split by units granted. Raises ConfigError when the groups' units cannot share an axis, or a file
    cannot be written.
    """
    drawing = _prepare(trace, batches, units)
    return saved(prefix, lambda: _draw(drawing, trace, batches), "; choose another, or --no-picture")


def saved(prefix: Path, draw: Callable[[], Figure], hint: str = "") -> tuple[Path, Path]:
    """Draw in the house's style and save as PREFIX.svg and PREFIX.png; the same figure gives the same bytes.

    Raises ConfigError, with the hint, when a file cannot be written.
    """
    import matplotlib

    style: dict[str, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so every machine places text alike
        "font.size": 8.0,
        "text.parse_math": False,  # ids may hold dollar signs
        "text.color": _INK,
        "axes.edgecolor": _RULE,
        "axes.labelcolor": _FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
        "xtick.major.size": 0.0,
        "ytick.major.size": 0.0,
        "hatch.linewidth": 0.7,
        "svg.fonttype": "none",
        "svg.hashsalt": "reflex",
    }
    svg, png = prefix.with_name(prefix.name + ".svg"), prefix.with_name(prefix.name + ".png")
    with matplotlib.rc_context(cast(Any, style)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # ids may be in any script
        figure = draw()
        try:
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
            figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
        except OSError as error:
            raise ConfigError(f"--out={prefix}: cannot be written: {error.strerror or error}{hint}") from error
    return svg, png


def _prepare(trace: Trace, batches: Sequence[TracedBatch], units: Units) -> _Drawing:
    """Decide what is drawn; everything after this only places it."""
    unit = _axis_unit(batches, units)
    colours = Colours.of(trace, batches)
    grants = sum(b.size for b in batches)
    step = ceil(len(batches) / BARS)
    if step > 1 or grants > SEGMENTS:
        bars, names = _merge(batches, step, colours, units)
        notes = [f"{grants:,} grants are too many to draw one by one: those of one colour are one segment"]
        if step > 1:
            notes = [f"too many to draw one by one: a bar is the mean of {step} batches, its dash the tallest of them"]
    else:
        notes = [f"one colour per {colours.by}"]
        bars = [_single(b, colours, units) for b in batches]
        present = {s.colour for bar in bars for s in bar.segments}
        names = {i: n for i, n in enumerate(colours.names) if i in present}
        if len(names) > len(PALETTE) * len(_HATCHES):
            notes.append(f"colours repeat after {len(PALETTE) * len(_HATCHES)}")
    ceilings = {}
    for height, name in _ceilings(trace, batches, units).items():
        if height <= _NEAR * max(bar.tallest for bar in bars):
            ceilings[height] = name
        elif name.startswith("budget"):
            notes.append(f"{name} is off the scale")
    if trace.footer is not None and trace.footer.dropped:
        notes.append(f"{trace.footer.dropped:,} batches were never written and are missing")
    return _Drawing(bars, names, notes, unit, ceilings)


def _axis_unit(batches: Sequence[TracedBatch], units: Units) -> str:
    """What the y axis counts."""
    kinds = {b.unit for b in batches}
    if units == "requests":
        return "requests"
    if units == "ms":
        if kinds != {"seconds"}:
            others = sorted({f"{b.group!r} counts {b.unit or 'unknown units'}" for b in batches if b.unit != "seconds"})
            raise ConfigError(f"--units=ms: only for groups whose cost is in seconds; {', '.join(others)}")
        return "estimated ms"
    counted = {"requests" if kind == "seconds" else kind or "units" for kind in kinds}
    if len(counted) > 1:
        raise ConfigError(
            f"--units=grants: the groups count in different units ({', '.join(sorted(counted))}); "
            "choose one with --group, or --units requests"
        )
    return counted.pop()


def _height(batch: TracedBatch, member: Member, units: Units) -> float:
    if units == "requests":
        return 1.0
    if units == "grants":
        return member.units
    granted = sum(m.units for m in batch.members)
    return (batch.cost or 0.0) * 1e3 * member.units / granted if granted else 0.0


def _single(batch: TracedBatch, colours: Colours, units: Units) -> _Bar:
    """One segment per grant."""
    segments = []
    for m in batch.members:
        height = _height(batch, m, units)
        mark = "▸" if m.state == "waiting" else ""
        name, number = request_name(m), "" if height == 1.0 and batch.unit != "tokens" else f"{height:.3g}"
        labels = (f"{mark}{name} {number}".rstrip(), f"{mark}{number}", mark)
        segments.append(_Segment(colours.index(m), height, labels, f"grant-{batch.id}-{m.seq}", bool(mark)))
    return _Bar([batch], segments, sum(s.height for s in segments))


def _merge(
    batches: Sequence[TracedBatch], step: int, colours: Colours, units: Units
) -> tuple[list[_Bar], dict[int, str]]:
    """Means over `step` neighbours, one segment per colour, and the colours' names. Where the colours with a name would
    be less than half of the picture, only who entered and who stayed is told apart."""
    total = Counter(colours.index(m) for b in batches for m in b.members)
    kept = dict(total.most_common(NAMED))
    entered, stayed = 0, 4
    by_state = 2 * sum(kept.values()) < total.total()
    if by_state:
        names = {entered: "entered from the queue with the batch", stayed: "stayed from an earlier one"}
        if all(m.state == "waiting" for b in batches for m in b.members):
            names = {entered: f"any of {len(total):,} {colours.by}s"}
    else:
        names = {i: colours.names[i] for i in sorted(kept)}
        if len(total) > len(kept):
            names[-1] = f"{len(total) - len(kept)} others"
    bars = []
    for start in range(0, len(batches), step):
        chunk = batches[start : start + step]
        sums: dict[int, float] = dict.fromkeys(names, 0.0)
        tallest = 0.0
        for b in chunk:
            height = 0.0
            for m in b.members:
                i = (entered if m.state == "waiting" else stayed) if by_state else colours.index(m)
                h = _height(b, m, units)
                sums[i if i in sums else -1] += h
                height += h
            tallest = max(tallest, height)
        segments = [_Segment(i, s / len(chunk), (), f"mean-{chunk[0].id}-{i}") for i, s in sums.items() if s > 0.0]
        bars.append(_Bar(chunk, segments, tallest))
    return bars, names


def _ceilings(trace: Trace, batches: Sequence[TracedBatch], units: Units) -> dict[float, str]:
    """Height of each ceiling that this axis has, and its name."""
    found: dict[float, str] = {}
    for name in dict.fromkeys(b.group for b in batches):
        info = trace.groups.get(name)
        if info is None:
            continue
        if units == "ms" and info.budget is not None:
            found[info.budget * 1e3] = f"budget {info.budget * 1e3:g} ms"
        elif units == "grants" and info.unit != "seconds" and info.budget is not None:
            found[info.budget] = f"budget {info.budget:g} {info.unit}"
        elif units != "ms":
            found[float(info.max_size)] = f"at most {info.max_size} requests"
    return found


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw(drawing: _Drawing, trace: Trace, batches: Sequence[TracedBatch]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), facecolor="white")
    several = len({b.group for b in trace.batches}) > 1
    # Of the trace, so that a window of it shows the same colours.
    known = sorted(trace.batches, key=lambda b: b.group) if several else trace.batches
    stages = list(dict.fromkeys(_stage(b, several) for b in known))
    staged = len({_stage(b, several) for b in batches}) > 1
    ratios = (10, 0.8, 0.8, 3, 3) if staged else (10, 0.8, 3, 3)
    heights = {"height_ratios": ratios, "hspace": 0.5 if staged else 0.42}
    box = {"left": 0.075, "right": 0.985, "top": 0.835, "bottom": 0.08}
    panels = list(figure.subplots(len(ratios), 1, sharex=True, gridspec_kw=heights | box))
    main, why, time, wait = panels[0], *panels[-3:]
    for axes in (main, time, wait):
        axes.set_axisbelow(True)
        axes.yaxis.grid(True, color=_RULE, linewidth=0.6)
        axes.spines["left"].set_visible(False)
    slots = max(len(drawing.bars), 5)
    main.set_xlim(-0.6, slots - 0.4)
    marked = _draw_bars(main, drawing, slots)
    if staged:
        _draw_stages(panels[1], drawing.bars, stages, several)
    _draw_causes(why, drawing.bars)
    _draw_times(time, drawing.bars)
    _draw_waits(wait, drawing.bars)
    ticks = _ticks(drawing.bars)
    wait.set_xticks(list(ticks), list(ticks.values()))
    wait.set_xlabel("batch id")
    figure.align_ylabels([main, time, wait])
    if marked:
        drawing.notes.append("▸ entered from the queue with this batch")
    _draw_head(figure, drawing, trace, batches)
    return figure


def _ticks(bars: Sequence[_Bar]) -> dict[int, str]:
    """Round batch ids where there are some."""
    ids = [(x, b.id) for x, bar in enumerate(bars) for b in bar.batches]
    steps = (m * 10**e for e in range(16) for m in (1, 2, 5))
    step = next(s for s in steps if (ids[-1][1] - ids[0][1]) / s <= 14)
    ticks: dict[int, str] = {}
    for x, number in ids:
        if number % step == 0:
            ticks.setdefault(x, str(number))
    return ticks if len(ticks) > 1 else {0: str(ids[0][1]), len(bars) - 1: str(ids[-1][1])}


def _draw_head(figure: Figure, drawing: _Drawing, trace: Trace, batches: Sequence[TracedBatch]) -> None:
    from matplotlib.patches import Patch

    requests = len({m.seq for b in batches for m in b.members})
    tokens = sum(m.units for b in batches for m in b.members)
    counted = f"{tokens:,.0f} tokens of " if drawing.unit == "tokens" else ""
    some = "" if len(batches) == len(trace.batches) else f" of {len(trace.batches):,}"
    title = f"{counted}{requests:,} request{'s' * (requests != 1)} in {len(batches):,}{some} batches"
    figure.text(0.012, 0.965, title, fontsize=12.5, fontweight="bold", va="center")
    start, end = batches[0].scheduled_at, max(b.scheduled_at + b.elapsed for b in batches)
    told = [f"{start:.3f} s to {end:.3f} s", *drawing.notes]
    figure.text(0.012, 0.927, "   ·   ".join(told), color=_FAINT, va="center")
    handles = [Patch(label=name, **_fill(i)) for i, name in list(drawing.names.items())[: NAMED + 1]]
    if len(drawing.names) > NAMED + 1:
        handles.append(Patch(label=f"and {len(drawing.names) - NAMED - 1} more", facecolor="none", edgecolor="none"))
    width = sum(len(str(h.get_label())) * 5.6 + 30 for h in handles)
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(0.004, 0.885), frameon=False, fontsize=7.5,
        ncols=len(handles) if width <= 880 else ceil(len(handles) / 2),
        handlelength=1.0, handleheight=1.0, columnspacing=1.1, handletextpad=0.4, labelspacing=0.3, borderpad=0.2,
    ).set_gid("legend")  # fmt: skip


def _fill(colour: int) -> dict[str, Any]:
    """Face, hatching and a white edge that separates neighbours."""
    if colour < 0:
        return {"facecolor": _OTHERS, "edgecolor": "white", "linewidth": 0.5}
    return {
        "facecolor": PALETTE[colour % len(PALETTE)],
        "hatch": _HATCHES[colour // len(PALETTE) % len(_HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.5,
    }


def _draw_bars(axes: Axes, drawing: _Drawing, slots: int) -> bool:
    """One stack per bar; returns whether any shows who entered: in its label, or by a mark where none fits."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    marked = False
    small: dict[str, list[tuple[float, float]]] = {}
    tallest = max(bar.tallest for bar in drawing.bars) or 1.0
    top = 1.08 * max([tallest, *drawing.ceilings])
    axes.set_ylim(0.0, top)
    axes.set_ylabel(f"{drawing.unit} per batch")
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=drawing.unit != "estimated ms"))
    width = 0.86 if slots <= 60 else 0.94
    bar_px, unit_px = 815 * width / slots, axes.get_position().height * 600 / top  # of a picture 900 px wide
    for x, bar in enumerate(drawing.bars):
        bottom = 0.0
        for segment in bar.segments:
            fill = _fill(segment.colour)
            patch = Rectangle((x - width / 2, bottom), width, segment.height, **fill)
            patch.set_gid(segment.gid)
            axes.add_patch(patch)
            label = next((t for t in segment.labels if len(t) * 6.4 + 4 <= bar_px), "")
            at, colour = (x, bottom + segment.height / 2), ink(fill["facecolor"])
            if label and segment.height * unit_px >= 9:
                marked |= segment.entered
                axes.text(*at, label, ha="center", va="center", color=colour)
            elif segment.entered and segment.height * unit_px >= 3:
                small.setdefault(colour, []).append(at)
            bottom += segment.height
        if bar.tallest > bottom * (1 + 1e-9):
            axes.plot([x - width / 2, x + width / 2], [bar.tallest] * 2, color=_INK, linewidth=0.8)
    for colour, places in sorted(small.items()):
        size = min(4.0, 0.5 * bar_px)
        axes.plot(*zip(*places, strict=True), ">", color=colour, markersize=size, markeredgewidth=0, gid="entered")
    for height, name in drawing.ceilings.items():
        axes.axhline(height, color=_CEILING, linewidth=1.0, linestyle=(0, (5, 3)), gid="ceiling")
        axes.annotate(
            name, (1.0, height), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
            ha="right", va="bottom", color=_CEILING, fontsize=7.5,
        )  # fmt: skip
    return marked or bool(small)


def _stage(batch: TracedBatch, several: bool) -> str:
    """Which part of a request it was; with several groups, and of which."""
    return f"{batch.group} {batch.stage}".strip() if several else batch.stage


def _draw_stages(axes: Axes, bars: Sequence[_Bar], stages: Sequence[str], several: bool) -> None:
    from matplotlib.patches import Patch

    kinds = {stage: ("", _STAGES[i % len(_STAGES)]) for i, stage in enumerate(stages)}
    total = _strip(axes, "stage", [Counter(_stage(b, several) for b in bar.batches) for bar in bars], kinds)
    told = [stage for stage in stages if total[stage]]
    handles = [
        Patch(facecolor=kinds[s][1], label=f"{plain(s or 'no stage')} {total[s]:,}") for s in told[: len(_STAGES)]
    ]
    if len(told) > len(_STAGES):
        handles.append(Patch(label=f"and {len(told) - len(_STAGES)} more", facecolor="none", edgecolor="none"))
    _key(axes, handles)


def _draw_causes(axes: Axes, bars: Sequence[_Bar]) -> None:
    from matplotlib.patches import Patch

    total = _strip(axes, "why", [Counter(b.cause for b in bar.batches) for bar in bars], _CAUSES)
    handles = []
    for cause, (letter, colour) in _CAUSES.items():
        if total[cause]:
            reason = Cause(cause).reason.value
            name = cause if cause == reason else f"{cause} ({reason})"
            handles.append(Patch(facecolor=colour, label=f"{letter}  {name} {total[cause]:,}"))
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


def _draw_times(axes: Axes, bars: Sequence[_Bar]) -> None:
    several = "median " if any(len(bar.batches) > 1 for bar in bars) else ""
    xs = range(len(bars))
    measured = [median(b.elapsed for b in bar.batches) * 1e3 for bar in bars]
    drawn: list[Any] = [axes.bar(xs, measured, width=0.62, color="#CBD5E1", label=f"{several}measured")]
    predicted = [[b.expected for b in bar.batches if b.expected is not None] for bar in bars]
    known = [(x, median(p) * 1e3) for x, p in zip(xs, predicted, strict=True) if p]
    if known:
        left, right = [x - 0.42 for x, _ in known], [x + 0.42 for x, _ in known]
        lines = axes.hlines([y for _, y in known], left, right, color=_INK, linewidth=1.2, label=f"{several}predicted")
        drawn.append(lines)
    axes.set_ylabel("time, ms")
    axes.set_ylim(0.0, 1.12 * max([*measured, *(y for _, y in known)]) or 1.0)
    _key(axes, drawn)


def _draw_waits(axes: Axes, bars: Sequence[_Bar]) -> None:
    entered = [(x, [m.age * 1e3 for b in bar.batches for m in b.entered]) for x, bar in enumerate(bars)]
    waits = [(x, w) for x, w in entered if w]
    xs = [x for x, _ in waits]
    span = axes.vlines(
        xs, [min(w) for _, w in waits], [max(w) for _, w in waits],
        color="#94A3B8", linewidth=2.0, capstyle="round", label="shortest to longest of those that entered",
    )  # fmt: skip
    medians = [median(w) for _, w in waits]
    (dots,) = axes.plot(xs, medians, "o", color=_INK, markersize=2.8, clip_on=False, label="median")
    axes.set_ylabel("wait, ms")
    axes.set_ylim(0.0, 1.12 * max((max(w) for _, w in waits), default=0.0) or 1.0)
    _key(axes, [dots, span])


def _key(axes: Axes, handles: Sequence[Any]) -> None:
    """A small legend above the right end of a panel."""
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.008, 1.0), ncols=max(1, len(handles)), frameon=False,
        fontsize=7, labelcolor=_FAINT, handlelength=1.0, handleheight=0.8, handletextpad=0.4, columnspacing=1.2,
        borderpad=0.1, borderaxespad=0.45,
    )  # fmt: skip
