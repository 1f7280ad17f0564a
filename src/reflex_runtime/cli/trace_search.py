"""`reflex trace --prompts … --sweep` and `--slo`: the same prompts at many budgets, and which of them to choose."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.trace_prompts import Setup, setup_of
from reflex_runtime.cli.trace_table import ROWS
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.percentile import percentile
from reflex_runtime.options import one_line, seconds

if TYPE_CHECKING:
    from reflex_runtime.sim.slo import Bounds, Tried
    from reflex_runtime.sim.sweep import Knee
    from reflex_runtime.sim.tokens import Measured, StepTime, TokenRuns

PATIENCE = 2.0  # seconds until progress is shown
MOST_BUDGETS = 512
HIGHEST = 1 << 20
MOST_SETTINGS = 2048


def search(console: Console, args: argparse.Namespace, prefix: Path | None) -> int:
    """Sweep the budget, or search for a setting within bounds; returns the exit code. prefix: where to draw it."""
    budgets = budgets_of(args.sweep) if "sweep" in args else []
    bounds = bounds_of(args.slo) if "slo" in args else None
    for name in ("last", "first", "final", "group"):
        if getattr(args, name) is not None:
            told = {"first": "from", "final": "to"}.get(name, name)
            value = getattr(args, name)
            raise ConfigError(f"--{told}={value}: shows a part of one trace; --sweep and --slo make many runs")
    setup = setup_of(args)
    if bounds is not None:
        return _slo(console, setup, budgets, bounds)
    return _sweep(console, setup, budgets, None if args.no_picture else prefix)


def _sweep(console: Console, setup: Setup, budgets: list[int], prefix: Path | None) -> int:
    from reflex_runtime.sim.sweep import draw_sweep, in_words, sweep
    from reflex_runtime.sim.tokens import StepTime

    with _SearchProgress(console) as progress:
        runs, found = sweep(_mute(setup, StepTime(1.0, 0.0)), budgets, progress)
    console.print(sweep_table(runs, found))
    if len(runs) > ROWS:
        console.print(Text("budgets left out take as many steps as the row above them", style="dim"))
    for line in in_words(found, runs):
        console.print(Text(line), soft_wrap=True)
    if prefix is not None:
        for path in draw_sweep(runs, found, prefix, "; choose another, or --no-picture"):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    return 0


def _slo(console: Console, setup: Setup, budgets: list[int], bounds: Bounds) -> int:
    from reflex_runtime.sim.slo import best, budgets_for, grid, refusal, try_all

    lengths = [len(setup.engines.tokenizer.encode(p.text)) for p in setup.prompts]
    takes = setup.takes or _fitted(setup, console)
    settings = grid(budgets or budgets_for(sum(lengths), len(lengths)))
    if len(settings) > MOST_SETTINGS:
        told = f"{len(settings):,} settings of budget and threshold; must be at most {MOST_SETTINGS}"
        raise ConfigError(f"--sweep: {told}")
    with _SearchProgress(console) as progress:
        tried = try_all(_mute(setup, takes), settings, progress)
    chosen = best(tried, bounds)
    console.print(Text(f"{len(tried):,} settings, each run in virtual time; a step takes {takes}"), soft_wrap=True)
    console.print(slo_table(tried, bounds, chosen))
    if chosen is None:
        print(f"reflex trace: --slo: {refusal(tried, bounds)}", file=sys.stderr)
        return 1
    flags = f"--max-num-batched-tokens {chosen.budget} --long-prefill-token-threshold {chosen.threshold}"
    line = f"most throughput within {bounds}: {flags} ({chosen.seconds * 1e3:.1f} ms in all)"
    console.print(Text(line, style="bold"), soft_wrap=True)
    return 0


def _mute(setup: Setup, takes: StepTime) -> TokenRuns:
    from reflex_runtime.sim.tokens import TokenRuns

    return TokenRuns(setup.engines.mute(takes), setup.prompts)


def _fitted(setup: Setup, console: Console) -> StepTime:
    from reflex_runtime.sim.tokens import TokenRuns

    with _SearchProgress(console) as progress:
        fitted, steps = TokenRuns(setup.engines, setup.prompts).fit(progress)
    console.print(Text(f"measured over {steps:,} steps of {setup.engines.runner.name}: {fitted}"), soft_wrap=True)
    return fitted


class _SearchProgress:
    """Progress after `PATIENCE` seconds, on a terminal only."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("")
        self._from = time.monotonic() + PATIENCE
        self._shown = False

    def __enter__(self) -> Callable[[str], None]:
        return self._tell

    def _tell(self, what: str) -> None:
        if time.monotonic() >= self._from:
            self._status.update(what)
            if not self._shown:
                self._status.start()
                self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._status.stop()


# -- arguments ---------------------------------------------------------------------------------------------------------


def budgets_of(text: str) -> list[int]:
    """The budgets of LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR; the last is HIGH."""
    found = re.fullmatch(r"([0-9]{1,7})\.\.([0-9]{1,7})(?::(?:([0-9]{1,7})|x([0-9]{1,3}(?:\.[0-9]{1,3})?)))?", text)
    if found is not None:
        low, high = int(found[1]), int(found[2])
        step, factor = int(found[3] or 1), float(found[4] or 0.0)
        if 1 <= low <= high <= HIGHEST and step >= 1 and (found[4] is None or factor > 1.0):
            budgets = list(range(low, high + 1, step)) if found[4] is None else _powers(low, high, factor)
            budgets += [high] * (budgets[-1] < high)
            if len(budgets) <= MOST_BUDGETS:
                return budgets
    raise ConfigError(
        f"--sweep={one_line(text)}: must be LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR within [1, {HIGHEST}], "
        f"of at most {MOST_BUDGETS} budgets, such as 4..64 or 64..4096:x2"
    )


def _powers(low: int, high: int, factor: float) -> list[int]:
    budgets, at = [low], float(low)
    while (at := at * factor) <= high:
        if int(at) > budgets[-1]:
            budgets.append(int(at))
    return budgets


def bounds_of(text: str) -> Bounds:
    """Read `ttft=200ms,gap=40ms`; either may be left out."""
    from reflex_runtime.sim.slo import Bounds

    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, time = part.strip().partition("=")
        bound = seconds(time, "ms", "s")
        if name not in Bounds._fields or name in found or not 0.0 < bound <= 86_400.0:
            raise ConfigError(
                f"--slo={one_line(text)}: must be ttft=TIME,gap=TIME, or one of them, with TIME such as 200ms or "
                "0.2s in (0, 86400] s"
            )
        found[name] = bound
    return Bounds(**found)


# -- tables ------------------------------------------------------------------------------------------------------------


def sweep_table(runs: Sequence[Measured], found: Knee) -> Table:
    """One row per budget; of many budgets those at which steps or first tokens change."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ("budget", "steps", "peak\nstep", "mean\nstep", "budget\nunused", "first token in\nstep p50 / last", "")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == len(columns) - 1 else "right", no_wrap=True, vertical="bottom")
    seen: tuple[float, ...] = ()
    for run in runs:
        first = sorted(run.first_step)
        key = (len(run.tokens), percentile(first, 0.5), int(first[-1]))
        here = run.budget in (found.saturated, found.bend, runs[-1].budget)
        if len(runs) > ROWS and key == seen and not here:
            continue
        seen = key
        note = "◀ knee" if run.budget == found.saturated else "◀ sharpest bend" if run.budget == found.bend else ""
        cells = [f"{run.budget:g}", str(key[0]), str(max(run.tokens)), f"{sum(run.tokens) / key[0]:.1f}"]
        cells += [f"{run.wasted:.0%}", f"{key[1]:g} / {key[2]}", note]
        table.add_row(*map(Text, cells), style="bold" if note else "")
    return table


def slo_table(tried: Sequence[Tried], bounds: Bounds, chosen: Tried | None) -> Table:
    """One row per setting; of many, those that show the choice: the chosen one, and each budget's best."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ("budget", "threshold", "total ms", "tokens/s", "ttft ms\nlongest", "gap ms\nlongest", "")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 6 else "right", no_wrap=True, vertical="bottom")
    for t in _shown(tried, bounds, chosen):
        cells = [Text(str(t.budget)), Text(str(t.threshold or "off")), Text(f"{t.seconds * 1e3:.1f}")]
        cells.append(Text(f"{t.tokens / t.seconds:.0f}" if t.seconds else "–"))
        cells.append(Text(f"{t.ttft * 1e3:.1f}", "" if t.meets_ttft(bounds) else "red"))
        cells.append(Text(f"{t.gap * 1e3:.1f}", "" if t.meets_gap(bounds) else "red"))
        missed = [name for name, kept in (("ttft", t.meets_ttft(bounds)), ("gap", t.meets_gap(bounds))) if not kept]
        cells.append(Text("◀ most throughput" if t is chosen else f"{', '.join(missed)} missed" if missed else "kept"))
        table.add_row(*cells, style="bold" if t is chosen else "dim" if missed else "")
    return table


def _shown(tried: Sequence[Tried], bounds: Bounds, chosen: Tried | None) -> list[Tried]:
    from reflex_runtime.sim.slo import best

    if len(tried) <= ROWS:
        return list(tried)
    found = []
    for budget in dict.fromkeys(t.budget for t in tried):
        of = [t for t in tried if t.budget == budget]
        found += [t for t in of if t in (chosen, best(of, bounds), of[0])]
    return found
