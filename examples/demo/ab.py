"""`--ab`: v1 against v2, a drill half-way, and the report of it."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from demo.drill import AGAIN, Drill, Solved, even_run
from demo.run import DemoResult, run_demo
from demo.server import busiest, draw, progress, serving
from demo.tasks import CONTROL_HZ
from reflex_runtime.demo import POLICY
from reflex_runtime.observe.journal import BatchLine
from reflex_runtime.robots.analysis.report import report

V1: Final = Path(__file__).parent / "v1"
"""An earlier version of the bundled policy: it solves fewer tasks."""

SPLIT: Final = 80
COOLDOWN: Final = 2.0  # seconds; the server's default is 30, for nights and not for demonstrations


def run_ab(console: Console, args: argparse.Namespace, trace: Path) -> int:
    """Exit status 0 when every robot played all its episodes."""
    total = args.robots * args.episodes
    run, of_b = even_run(args.robots, args.episodes, SPLIT)
    kept = args.out / "recordings"
    options = ["--policy-a", V1, "--policy-b", POLICY, "--split", SPLIT, "--no-rtc", "--record", kept]
    options += ["--probe-cooldown-s", COOLDOWN]
    before = _recordings(kept)
    began = time.monotonic()

    def tell(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {what}", highlight=False, soft_wrap=True)

    drill, tally = Drill(total, tell), Solved()

    @contextlib.contextmanager
    def server() -> Iterator[str]:
        with serving(V1, trace, args.out / "server.log", [*map(str, options), *args.serve.split()]) as url:
            tell(f"{args.robots} robots play {total} episodes, {of_b} of them on b (v2), the others on a (v1)")
            drill.begin(url)
            try:
                yield url
            finally:
                drill.close()

    with progress(console, total) as on_progress:

        def follow(event: Mapping[str, Any]) -> None:
            on_progress(event)
            tally(event)
            drill(event)

        result = run_demo(
            server,
            args.robots,
            args.episodes,
            run=run,
            again=AGAIN,
            control_hz=CONTROL_HZ,
            time_limit=60.0 + 5.0 * args.episodes,
            on_progress=follow,
        )
    console.print()
    _show(console, result, tally, args)
    _show_latency(console, result)
    _survived(console, drill)
    if result.late:
        slow = "this machine is too slow for so many; try fewer (--robots)"
        console.print(f"{result.late} of {args.robots} robots were late: {slow}")
    for failure in result.failures:
        console.print(f"[red]{failure}[/red]")
    if result.calls:
        console.print()
        _report(console, sorted(_recordings(kept) - before))
        console.print()
        draw(console, trace, args.out / "batches", around_the_crashes)
    return 1 if result.failures else 0


def around_the_crashes(batches: Sequence[BatchLine]) -> Sequence[BatchLine]:
    """From shortly before the first crash to shortly after the last, as far as single batches can be drawn."""
    crashed = [i for i, batch in enumerate(batches) if batch.crashed]
    if not crashed:
        return busiest(batches)
    first = max(0, crashed[0] - 10)
    return batches[first : min(first + 120, crashed[-1] + 20)]


def _recordings(kept: Path) -> set[Path]:
    return {path for path in kept.iterdir() if path.is_file()} if kept.is_dir() else set()


def _show(console: Console, result: DemoResult, tally: Solved, args: argparse.Namespace) -> None:
    """Success by task and version."""
    table = Table(title=f"episodes solved by {args.robots} robots", title_justify="left")
    table.add_column("task")
    columns = {"a": "a: v1", "b": "b: v2", "moved": "moved from b to a"}
    tasks = list(result.by_task)
    if tally.cell(tasks, "nobody"):
        columns["nobody"] = "without an answer"
    for title in columns.values():
        table.add_column(title, justify="right")
    for task in tasks:
        table.add_row(task, *(tally.cell([task], by) for by in columns))
    table.add_row("all", *(tally.cell(tasks, by) for by in columns), style="bold")
    console.print(table)


def _show_latency(console: Console, result: DemoResult) -> None:
    """How long robots waited for a chunk."""
    if result.latency_ms is not None:
        p = result.latency_ms
        console.print(
            f"{result.calls} chunks in {result.wall_s:.0f} s, {result.refused} refused; "
            f"latency p50 {p.p50:.1f} ms, p90 {p.p90:.1f}, p99 {p.p99:.1f}; "
            f"mean batch {result.mean_batch_size or 0:.1f} requests"
        )


def _survived(console: Console, drill: Drill) -> None:
    """What the drill cost the robots."""
    if drill.failed:
        robots = ", ".join(sorted(drill.failed))
        console.print(
            f"the drill: b failed {drill.failed.total()} calls, of {robots}; at most {drill.most} in a row, and a "
            f"robot gives up at {AGAIN + 1}",
            highlight=False,
            soft_wrap=True,
        )
    if drill.missing:
        console.print(f"[yellow]the drill is not complete: {drill.missing}[/yellow]")


def _report(console: Console, recordings: list[Path]) -> None:
    """A against B, as `reflex report` tells it."""
    found = report(recordings)
    console.print(found.text(), markup=False, highlight=False, soft_wrap=True)
    files = " ".join(str(path) for path in recordings)
    console.print(f"\nthis is reflex report {files}", soft_wrap=True)
