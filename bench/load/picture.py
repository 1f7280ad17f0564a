"""The picture of a run: latencies and batches over time, and the distribution of latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load.generator import OK, LoadRound
from reflex_runtime.observe.picture import Figure, saved
from reflex_runtime.observe.trace_tables import FAINT, RULE

_COLOURS = ("#4477aa", "#cc6677")


def draw(rounds: Sequence[LoadRound], names: Sequence[str], prefix: Path, deadline: float) -> tuple[Path, Path]:
    """Write PREFIX.svg and PREFIX.png. names: of the servers. deadline: seconds, 0.0 for none."""
    return saved(prefix, lambda: _figure(rounds, names, deadline))


def _figure(rounds: Sequence[LoadRound], names: Sequence[str], deadline: float) -> Figure:
    figure = Figure(figsize=(9, 9), layout="constrained", facecolor="white")
    panels: tuple[Any, Any, Any] = tuple(figure.subplots(3, 1))
    over_time, batches, shares = panels
    unknown = []
    for index, name in enumerate(names):
        own = [r for r in rounds if r.side == index]
        good = [(r.at, s) for r in own for s in r.samples if s.kind == OK]
        lost = [(r.at, s) for r in own for s in r.samples if s.kind != OK]
        style = {"s": 3, "color": _COLOURS[index], "rasterized": True}
        latencies = [1e3 * (s.done - s.due) for _, s in good]
        over_time.scatter([at + s.due for at, s in good], latencies, label=f"{name}: {len(good)} answers", **style)
        if lost:
            crosses = [at + s.due for at, s in lost], [1e3 * (s.done - s.due) for _, s in lost]
            over_time.scatter(*crosses, s=14, marker="x", color=_COLOURS[index], label=f"{len(lost)} without an answer")
        known = [(at + s.done, s.batch) for at, s in good if s.batch]
        batches.scatter([at for at, _ in known], [size for _, size in known], **style)
        _counted(batches, own, _COLOURS[index])
        if not known:
            unknown.append(name)
        if latencies:
            ordered = sorted(latencies)
            slower = [1.0 - i / len(ordered) for i in range(len(ordered))]
            shares.step(ordered, slower, color=_COLOURS[index], where="post")
    over_time.set(xlabel="s, when it was to be sent", ylabel="latency, ms", ylim=(0, None))
    batches.set(xlabel="s, when it was answered", ylabel="requests in the batch", ylim=(0, None))
    note = "line: mean of the round, by the server's counters"
    batches.set_title(note + "".join(f"; {name}: answers do not say" for name in unknown), fontsize=8, color=FAINT)
    shares.set(xlabel="latency, ms", ylabel="share of answers that took longer", yscale="log")
    shares.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    over_time.sharex(batches)
    if deadline:
        over_time.axhline(1e3 * deadline, color=FAINT, linewidth=0.8, linestyle="--")
        shares.axvline(1e3 * deadline, color=FAINT, linewidth=0.8, linestyle="--")
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(True, color=RULE, linewidth=0.6)
    over_time.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=8, markerscale=3, frameon=False)
    return figure


def _counted(axes: Any, rounds: Sequence[LoadRound], colour: str) -> None:
    """Draw the mean batch size of each round, from the server's counters."""
    for r in rounds:
        if r.server.get("batches"):
            mean, end = r.server["requests"] / r.server["batches"], max((s.done for s in r.samples), default=r.seconds)
            axes.hlines(mean, r.at + end - r.seconds, r.at + end, colors=colour, linewidth=1.5)
