"""`reflex trace --prompts` with `--sweep` or `--slo`: many runs of the same prompts, and what they come to together."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from reflex_runtime.cli import trace_slo, trace_sweep
from reflex_runtime.cli.trace_prompts import setup_of
from reflex_runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from reflex_runtime.cli.trace_prompts import PromptsConfig
    from reflex_runtime.cli.trace_runs import Setup, StepTime

PATIENCE = 2.0  # seconds after which progress is told
NO_BUDGET = 1 << 20


def search(console: Console, args: argparse.Namespace, prefix: Path | None) -> int:
    """Sweep the budget, or search for a setting within bounds; returns the exit code. prefix: where to draw it."""
    budgets = trace_sweep.parse_sweep(args.sweep) if "sweep" in args else []
    bounds = trace_slo.Bounds.parse(args.slo) if "slo" in args else None
    for name in ("last", "first", "final", "group"):
        if getattr(args, name) is not None:
            flag = {"first": "from", "final": "to"}.get(name, name)
            value = getattr(args, name)
            raise ConfigError(f"--{flag}={value}: shows a part of one trace; --sweep and --slo make many runs")
    config, setup = setup_of(args)
    if bounds is not None:
        return _slo(console, config, setup, budgets, bounds)
    from reflex_runtime.cli.trace_runs import StepTime, measure

    mute = setup.mute(StepTime(1.0, 0.0))
    with _Progress(console) as progress:
        runs = []
        for number, budget in enumerate(budgets, 1):
            progress(f"{number} of {len(budgets)} budgets")
            runs.append(measure(mute, budget))
        floor = len(measure(mute, NO_BUDGET).tokens)
    found = trace_sweep.knee(runs, floor)
    console.print(trace_sweep.sweep_table(runs, found))
    if len(runs) > trace_sweep.ROWS:
        console.print(Text("budgets left out take as many steps as the row above them", style="dim"))
    for line in trace_sweep.in_words(found, runs):
        console.print(Text(line), soft_wrap=True)
    if prefix is not None and not args.no_picture:
        for path in trace_sweep.draw_sweep(runs, found, prefix):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    return 0


def _slo(console: Console, config: PromptsConfig, setup: Setup, budgets: list[int], bounds: trace_slo.Bounds) -> int:
    lengths = [len(setup.tokenizer.encode(p.text)) for p in setup.prompts]
    takes = setup.takes or _fitted(setup, console)
    budgets = budgets or trace_slo.budgets_for(sum(lengths), len(lengths))
    with _Progress(console) as progress:
        tried = trace_slo.try_all(setup.mute(takes), trace_slo.grid(budgets), progress)
    chosen = trace_slo.best(tried, bounds)
    console.print(Text(f"{len(tried):,} settings, each run in virtual time; a step takes {takes}"), soft_wrap=True)
    console.print(trace_slo.slo_table(tried, bounds, chosen))
    if chosen is None:
        print(f"reflex trace: --slo: {trace_slo.refusal(tried, bounds)}", file=sys.stderr)
        return 1
    flags = f"--max-num-batched-tokens {chosen.budget} --long-prefill-token-threshold {chosen.threshold}"
    line = f"most throughput within {bounds}: {flags} ({chosen.seconds * 1e3:.1f} ms in all)"
    console.print(Text(line, style="bold"), soft_wrap=True)
    return 0


def _fitted(setup: Setup, console: Console) -> StepTime:
    """What a step takes, from real runs of these prompts under three budgets: medians of steps of one size, since a
    model is slow at what it meets for the first time, and so is whoever is interrupted."""
    from reflex_runtime.cli.trace_runs import StepTime, measure

    took: defaultdict[int, list[float]] = defaultdict(list)
    budgets = (32, 256, 2048)
    with _Progress(console) as progress:
        for number, budget in enumerate(budgets * 3):
            progress(f"measuring the model, run {number + 1} of {3 * len(budgets)}")
            run = measure(setup, budget)
            if number >= len(budgets):  # the first round warms up
                for tokens, seconds in zip(run.tokens, run.elapsed, strict=True):
                    took[tokens].append(seconds)
    fitted = StepTime.fit((tokens, median(seconds)) for tokens, seconds in took.items())
    steps = sum(map(len, took.values()))
    console.print(Text(f"measured over {steps:,} steps of {setup.runner.name}: {fitted}"), soft_wrap=True)
    return fitted


class _Progress:
    """Says how far it is once somebody has waited for a while; where the output is no terminal, nothing."""

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
