"""`reflex demo`: simulated robots, closed loop, on a real policy behind a real server, with its batches drawn."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.cli.demo_shared import draw, progress, serving, show_latency
from reflex_runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from reflex_runtime.demo.run import DemoResult
    from reflex_runtime.telemetry.journal import BatchLine

    Window = Callable[[Sequence[BatchLine]], Sequence[BatchLine]]

_DESCRIPTION = """\
Start a server on a free port, drive simulated robots against it in closed loop (each robot is a process with its own
physics: Meta-World tasks in MuJoCo, a schematic camera), and show what the batching did. Under two minutes on two
cores.
With --ab two versions share the episodes 80/20, and half-way the new one is broken on purpose: it is drained, mended,
probed, and comes back while the robots go on. Then A against B, as `reflex report` tells it.
Needs the extra `demo`; in a clone: pip install '.[demo]'
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "demo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--robots", type=int, metavar="N", help="robots (default 6, with --ab 8, range 1 to 64)")
    parser.add_argument(
        "--episodes", type=int, metavar="N", help="episodes each robot plays (default 2, with --ab 40, range 1 to 100)"
    )
    parser.add_argument(
        "--ab", action="store_true", help="v1 against v2 at 80/20, with a fault in v2 half-way, and the report"
    )
    parser.add_argument("--variant", choices=("v1", "v2"), help="trained policy (default v2, the better)")
    parser.add_argument(
        "--kind",
        choices=("monolithic", "decomposed"),
        default="decomposed",
        help="one model, or prefix and denoise steps, which robots join and leave (default decomposed)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), metavar="DIR", help="trace and pictures (default demo-out)"
    )
    parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="options for the server, as in --serve '--max-batch-cost-ms 20'"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when every robot played all its episodes."""
    from rich.console import Console

    from reflex_runtime.cli.demo_ab import run_ab
    from reflex_runtime.demo.exports import export_dir
    from reflex_runtime.demo.run import run_demo

    if args.ab and args.variant:
        raise ConfigError(f"--variant={args.variant}: --ab runs both")
    args.variant = args.variant or "v2"
    args.robots = (8 if args.ab else 6) if args.robots is None else args.robots
    args.episodes = (40 if args.ab else 2) if args.episodes is None else args.episodes
    for flag, value, high in (("--robots", args.robots, 64), ("--episodes", args.episodes, 100)):
        if not 1 <= value <= high:
            raise ConfigError(f"{flag}={value}: must be in [1, {high}]")
    missing = [name for name in ("metaworld", "cv2") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed: in a clone, pip install '.[demo]'")
    args.out.mkdir(parents=True, exist_ok=True)
    trace = args.out / "batches.jsonl"
    console = Console()
    if args.ab:
        return run_ab(console, args, trace)
    server = partial(serving, export_dir(args.variant, args.kind), trace, args.out / "server.log", args.serve.split())
    with progress(Console(stderr=True), args.robots * args.episodes) as on_progress:
        result = run_demo(server, args.robots, args.episodes, on_progress=on_progress)
    show(console, result, args)
    draw(console, trace, args.out / "batches")
    for failure in result.failures:
        console.print(f"[red]{failure}[/red]")
    return 1 if result.failures else 0


def show(console: Console, result: DemoResult, args: argparse.Namespace) -> None:
    """Success, latency and batches."""
    from rich.table import Table

    tasks = Table(title=f"{args.robots} robots on {args.variant} {args.kind}", title_justify="left")
    tasks.add_column("task")
    tasks.add_column("solved", justify="right")
    solved = played = 0
    for name, (ok, n) in result.by_task.items():
        tasks.add_row(name, f"{ok}/{n}")
        solved, played = solved + ok, played + n
    tasks.add_row("all", f"{solved}/{played}", style="bold")
    console.print(tasks)
    show_latency(console, result)
