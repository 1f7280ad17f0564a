"""The picture of a report: success with its Wilson bands and the e-values over time, the decisions marked in both."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.records.report import Moment, RolloutReport, evidence
from reflex_runtime.policies.rollout.comparison import wilson
from reflex_runtime.telemetry.picture import plain, saved

if TYPE_CHECKING:  # the import takes a second
    from matplotlib.axes import Axes

_COLOURS = {"a": "#332288", "b": "#CC6677", "prod": "#332288", "shadow": "#999933"}
_BETS = (("a is better", "#332288"), ("b is better", "#CC6677"), ("b is not worse", "#117733"))
_MARK = "#6B7280"
_UNITS = ((120.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (inf, 3600.0, "hours"))
_POINTS = 2000  # more moments than this are thinned


def draw_report(report: RolloutReport, prefix: Path) -> tuple[Path, Path]:
    """Draw into PREFIX.svg and PREFIX.png; the same report gives the same bytes.

    ConfigError when no episode has an outcome, so that there is nothing to draw, or a file cannot be written.
    """
    if not report.moments:
        raise ConfigError(f"--out={prefix}: no episode has an outcome (POST /episodes/ID/outcome): nothing to draw")
    return saved(prefix, lambda: _draw(report))


def _draw(report: RolloutReport) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2 if report.comparison is not None else 3.6), layout="constrained")
    panels = figure.subplots(2 if report.comparison is not None else 1, 1, sharex=True, squeeze=False)[:, 0]
    moments = _thinned(report.moments)
    span = report.ended - report.started
    unit, name = next((u, n) for most, u, n in _UNITS if span < most)

    def at(seconds: float) -> float:
        return (seconds - report.started) / unit

    _draw_success(panels[0], report, moments, at)
    if report.comparison is not None:
        _draw_evidence(panels[1], report, moments, at)
    for axes in panels:
        for event in report.timeline:
            axes.axvline(at(event.at), color=_MARK, linewidth=0.7, linestyle=(0, (2, 3)))
        for slot, begun, over in _drained(report):
            axes.axvspan(
                at(begun), at(over), color=_COLOURS.get(slot, _MARK), alpha=0.12, linewidth=0, gid=f"drained-{slot}"
            )
    top = panels[0].get_xaxis_transform()
    for number, (seconds, label) in enumerate(_labels(report, 0.015 * span)[:12]):
        panels[0].text(
            at(seconds), 1.01 + 0.045 * (number % 2), f" {label}", transform=top, fontsize=7, color=_MARK, va="bottom"
        )
    panels[-1].set_xlabel(f"{name} since the recording began")
    return figure


def _labels(report: RolloutReport, near: float) -> list[tuple[float, str]]:
    """What stands above the marks: those that are too near each other share a label. near: seconds."""
    told: list[tuple[float, float, list[str]]] = []  # of the first, of the last, their names
    for event in report.timeline:
        if told and event.at - told[-1][1] <= near:
            first, _, names = told[-1]
            told[-1] = (first, event.at, [*names, event.action])
        else:
            told.append((event.at, event.at, [event.action]))
    return [(first, ", ".join(dict.fromkeys(map(plain, names)))) for first, _, names in told]


def _drained(report: RolloutReport) -> Sequence[tuple[str, float, float]]:
    """Slot, begin and end of every drain; one that did not return was drained to the end."""
    open_since: dict[str, float] = {}
    spans = []
    for event in report.timeline:
        numbers = event.fields.get("numbers")
        slot = str(event.fields.get("slot") or (numbers.get("slot") if isinstance(numbers, dict) else ""))
        if event.action == "drain":
            open_since.setdefault(slot, event.at)
        elif event.action == "return" and slot in open_since:
            spans.append((slot, open_since.pop(slot), event.at))
    return [*spans, *((slot, since, report.ended) for slot, since in open_since.items())]


def _draw_success(axes: Axes, report: RolloutReport, moments: Sequence[Moment], at: Any) -> None:
    for slot in report.slots:
        told = [(at(m.at), *m.counts[slot]) for m in moments if m.counts.get(slot, (0, 0))[1]]
        if not told:
            continue
        xs = [x for x, _, _ in told]
        bands = [wilson(k, n) for _, k, n in told]
        colour = _COLOURS.get(slot, _MARK)
        _, k, n = told[-1]
        axes.fill_between(
            xs, [low * 100 for low, _ in bands], [high * 100 for _, high in bands],
            step="post", color=colour, alpha=0.15, linewidth=0,
        )  # fmt: skip
        rates = [100 * successes / episodes for _, successes, episodes in told]
        axes.step(xs, rates, where="post", color=colour, linewidth=1.6, label=f"{slot}: {k} of {n}", gid=f"slot-{slot}")
    axes.set_ylim(0, 102)  # a line at 100 % is to be seen
    axes.set_ylabel("episodes that succeeded, %\n(band: 95 % Wilson interval)")
    axes.legend(loc="lower right", frameon=False)


def _draw_evidence(axes: Axes, report: RolloutReport, moments: Sequence[Moment], at: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    comparison = report.comparison
    assert comparison is not None
    for number, (name, colour) in enumerate(_BETS):
        values = [(at(m.at), max(m.e[number], 1e-3)) for m in moments if m.e is not None]
        label = f"{name}: {evidence(values[-1][1])}" if values else name
        axes.step([x for x, _ in values], [y for _, y in values], where="post", color=colour, label=label)
    enough = 1.0 / comparison.alpha
    axes.axhline(enough, color="#B91C1C", linewidth=1.0, linestyle=(0, (5, 3)), label=f"decides: {enough:,.0f}")
    axes.set_yscale("log")
    told = [value for m in moments if m.e is not None for value in m.e]
    axes.set_ylim(bottom=max(5e-4, 0.5 * min([0.2, *told])), top=8.0 * max([enough, *told]))  # and room for the legend
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
    axes.set_ylabel("e-value")
    axes.legend(loc="upper left", frameon=False, ncols=4)


def _thinned(moments: Sequence[Moment]) -> Sequence[Moment]:
    step = max(1, len(moments) // _POINTS)
    return [*moments[::step], moments[-1]]
