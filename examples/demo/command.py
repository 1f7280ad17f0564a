"""The command: simulated robots on the bundled policy, without and with batching, or `--ab` on two versions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.ab import run_ab
from demo.gain import Lanes, draw_gain
from demo.openpi_robot import need_client
from demo.run import DemoResult, need_simulator, run_demo
from demo.server import draw, progress, serving
from demo.tasks import CONTROL_HZ
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import POLICY
from reflex_runtime.observe.journal import read_journal

_DESCRIPTION = """\
Start a server on a free port and drive simulated robots against it in closed loop: each robot is a process with its own
physics (Meta-World tasks in MuJoCo, a schematic camera) and acts in real time. They play twice, first with one request
in each call of the model and then with batching, and a picture shows both. Under two minutes on two cores.
With --ab two versions share the episodes 80/20. Half-way the new one is broken on purpose: it is drained, repaired,
probed, and returns while the robots go on. Then A against B, as `reflex report` shows it.
Needs the extra `demo`; in a clone: pip install '.[demo]'
"""

TIME_LIMIT = 120.0  # seconds of a run; 40 s are usual


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="demo", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--robots", type=int, metavar="N", help="robots (default 6, with --ab 8, range 1 to 64)")
    add("--episodes", type=int, metavar="N", help="episodes each robot plays (default 2, with --ab 40, range 1 to 100)")
    add("--ab", action="store_true", help="compare v1 and v2 at 80/20, with a fault in v2 half-way")
    add(
        "--call-ms", type=float, metavar="MS",
        help="time added to every call, to stand for a larger model; not with --ab (default 8, range 0 to 1000)",
    )  # fmt: skip
    add(
        "--wire", choices=("msgpack", "openpi"), default="msgpack",
        help="how robots ask: POST /act, or openpi's websocket with its stock client; not with --ab (default msgpack)",
    )  # fmt: skip
    add("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="trace and pictures (default demo-out)")
    add("--serve", default="", metavar="OPTIONS", help="options for the server, as in --serve '--max-batch-cost-ms 20'")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Exit status 0 unless a robot failed. Robots that are late on a slow machine have not."""
    args = parser().parse_args(words)
    try:
        check(args)
        return run_ab(Console(), args, args.out / "batches.jsonl") if args.ab else run_twice(Console(), args)
    except ConfigError as error:
        print(f"demo: {error.message}", file=sys.stderr)
        return 2


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults, and make the directory. ConfigError for what does not go."""
    if args.ab and args.call_ms is not None:
        raise ConfigError(f"--call-ms={args.call_ms:g}: not with --ab; leave one of the two out")
    if args.wire == "openpi":
        if args.ab:
            raise ConfigError("--wire=openpi: not with --ab: openpi cannot say how an episode ended; leave one out")
        need_client()
    args.call_ms = 8.0 if args.call_ms is None else args.call_ms
    if not 0.0 <= args.call_ms <= 1000.0:
        raise ConfigError(f"--call-ms={args.call_ms:g}: must be in [0, 1000] ms")
    args.robots = (8 if args.ab else 6) if args.robots is None else args.robots
    args.episodes = (40 if args.ab else 2) if args.episodes is None else args.episodes
    for flag, value, high in (("--robots", args.robots, 64), ("--episodes", args.episodes, 100)):
        if not 1 <= value <= high:
            raise ConfigError(f"{flag}={value}: must be in [1, {high}]")
    need_simulator()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={args.out}: cannot make this directory: {error.strerror}") from None


def run_twice(console: Console, args: argparse.Namespace) -> int:
    """The same robots, first with one request in each call and then with batching."""
    options = [*args.serve.split(), "--inject-latency-ms", f"{args.call_ms:g}"]
    traces = args.out / "alone.jsonl", args.out / "batches.jsonl"
    alone = _play(args, traces[0], "one request in each call", [*options, "--max-batch-size", "1"])
    batched = _play(args, traces[1], "batched", options)
    show(console, alone, batched, args)
    status = say_what_is_missing(console, alone, batched, args)
    if batched.calls:
        draw(console, traces[1], args.out / "batches")
        before, after = (read_journal(trace) for trace in traces)
        _, picture = draw_gain(before, after, args.out / "gain")
        rates = " and ".join(f"{Lanes.of(run).rate:.0f}" for run in (before, after))
        console.print(f"{picture}: when each robot waited, without and with batching ({rates} answers a second)")
    return status


def say_what_is_missing(console: Console, alone: DemoResult, batched: DemoResult, args: argparse.Namespace) -> int:
    """One line for robots that were late, one for each that failed. Returns the exit status."""
    if late := max(alone.late, batched.late):
        fewer = f"; try --robots {args.robots // 2}" if args.robots > 1 else ""
        slow = f"this machine is too slow for {args.robots} robots at once{fewer}"
        console.print(f"{late} of {args.robots} robots were late, {TIME_LIMIT:.0f} s were not enough: {slow}")
    failures = [*alone.failures, *batched.failures]
    for failure in failures:
        console.print(f"[red]{failure}[/red]")
    return 1 if failures else 0


def _play(args: argparse.Namespace, trace: Path, name: str, options: list[str]) -> DemoResult:
    """One run of all robots against a server of its own."""
    print(f"{args.robots} robots start, {name}; at most {TIME_LIMIT:.0f} s", file=sys.stderr)
    server = partial(serving, POLICY, trace, trace.with_suffix(".log"), options)
    with progress(Console(stderr=True), args.robots * args.episodes, name) as on_progress:
        return run_demo(
            server, args.robots, args.episodes, control_hz=CONTROL_HZ, wire=args.wire, time_limit=TIME_LIMIT,
            on_progress=on_progress,
        )  # fmt: skip


def show(console: Console, alone: DemoResult, batched: DemoResult, args: argparse.Namespace) -> None:
    """Success, latency and calls of both runs."""
    call = f", every call {args.call_ms:g} ms longer" if args.call_ms else ""
    table = Table(title=f"{args.robots} robots on the bundled policy{call}", title_justify="left")
    for title in ("", "one request in each call", "batched"):
        table.add_column(title, justify="right" if title else "left")
    runs = (alone, batched)
    for task in sorted({*alone.by_task, *batched.by_task}):
        solved = ("{}/{}".format(*run.by_task[task]) if task in run.by_task else "–" for run in runs)
        table.add_row(f"solved: {task}", *solved)
    for percentile in ("p50", "p99"):
        waits = (_ms(run, percentile) for run in runs)
        table.add_row(f"a robot waits for its chunk, {percentile}", *waits, style="bold")
    table.add_row("requests in a call, mean", *(f"{run.mean_batch_size or 0:.1f}" for run in runs))
    table.add_row("chunks, refused", *(f"{run.calls}, {run.refused}" for run in runs))
    console.print(table)


def _ms(run: DemoResult, percentile: str) -> str:
    return f"{getattr(run.latency_ms, percentile):.0f} ms" if run.latency_ms is not None else "–"
