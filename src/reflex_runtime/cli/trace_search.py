"""`reflex trace --prompts … --sweep`: the same prompts at many budgets, and where more buys nothing."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.trace_prompts import setup_of
from reflex_runtime.cli.trace_table import ROWS
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import percentile
from reflex_runtime.settings.declare import one_line

if TYPE_CHECKING:
    from reflex_runtime.sim.sweep import Knee
    from reflex_runtime.sim.tokens import Measured

PATIENCE = 2.0  # seconds until progress is shown
MOST_BUDGETS = 512
HIGHEST = 1 << 20


def search(console: Console, args: argparse.Namespace, prefix: Path | None) -> int:
    """Run the prompts at every budget and show the knee; returns the exit code. prefix: where to draw it."""
    from reflex_runtime.sim.sweep import in_words, sweep
    from reflex_runtime.sim.tokens import StepTime, TokenRuns

    budgets = budgets_of(args.sweep)
    for name in ("last", "first", "final", "group"):
        if (value := getattr(args, name)) is not None:
            told = {"first": "from", "final": "to"}.get(name, name)
            raise ConfigError(f"--{told}={value}: shows a part of one trace; --sweep makes many runs")
    setup = setup_of(args)
    with _SearchProgress(console) as progress:
        runs, found = sweep(TokenRuns(setup.engines.mute(StepTime(1.0, 0.0)), setup.prompts), budgets, progress)
    console.print(sweep_table(runs, found))
    if len(runs) > ROWS:
        console.print(Text("budgets left out take as many steps as the row above them", style="dim"))
    for line in in_words(found, runs):
        console.print(Text(line), soft_wrap=True)
    if prefix is not None and not args.no_picture:
        from reflex_runtime.sim.picture import draw_sweep

        for path in draw_sweep(runs, found, prefix, "; choose another, or --no-picture"):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    return 0


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
