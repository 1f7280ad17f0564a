"""`reflex trace` shows the batches of a journal as a table in colour and as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from reflex_runtime.cli.console import ProgressLine, console
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import model_directory
from reflex_runtime.llm.engine.prompts import (
    ONLY_PROMPTS,
    PromptsConfig,
    budgets_of,
    record,
    setup_of,
    sweep,
    text_lines,
)
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.observe.trace_tables import ROWS, selected, show_batches
from reflex_runtime.settings.declare import add_options, flag, one_line, whole

if TYPE_CHECKING:
    from reflex_runtime.llm.engine.sequence import RequestOutput

NOT_DRAWN = "no picture, which needs matplotlib: in a clone, pip install '.[plots]'"
NOT_KEPT = "nothing was written; --out PREFIX keeps the trace and draws it"
WIDE = 160  # columns if the output is not a terminal and COLUMNS is not set

_DESCRIPTION = """\
Show the batches of a journal, a file of `reflex serve --trace FILE` or `--record DIR`, in a row each: when and where it
ran, why it began then, its requests (`▸` entered with it), predicted and measured time, waits. A trace of tokens has
a row for each step. With --prompts, run prompts and show their steps. docs/trace.md explains every column.
"""

_EPILOG = """\
examples:
  reflex trace run.jsonl                         table, summary, run.svg and run.png
  reflex trace run.jsonl --from 120 --to 180     a window, by batch id

  reflex trace --prompts "hello world" "goodbye" --max-num-batched-tokens 8      watch continuous batching
  reflex trace --prompts "hello world" "goodbye" --sweep 4..64                   steps over budget, and the knee

exit codes: 0 fine, 1 the file cannot be read (file and line are named), 2 bad arguments
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("trace", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", nargs="?", help="the journal, .jsonl or .jsonl.gz")
    files = "write PREFIX.svg and PREFIX.png, with --prompts PREFIX.jsonl too (default: FILE without its suffix)"
    add("-o", "--out", type=Path, metavar="PREFIX", help=files)
    add("--last", type=lambda n: whole("--last", n, 1), metavar="N", help="only the last N batches, N >= 1")
    add("--from", type=lambda n: whole("--from", n, 0), dest="first", metavar="ID", help="only batches from this id on")
    add("--to", type=lambda n: whole("--to", n, 0), dest="final", metavar="ID", help="only batches up to this id")
    add("--group", metavar="SLOT", help="only batches of this group (a slot or a workload)")
    add("--no-picture", action="store_true", help="only the table")
    add("--no-color", action="store_true", help="no colours in the table")
    prompts: Any = parser.add_argument_group("prompts, run now on the engine of reflex serve")
    prompts.add_argument("--prompts", nargs="+", metavar="TEXT", help="run these; @FILE: each line of the file")
    add_options(prompts, PromptsConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show a journal, or run prompts and show their steps; returns the exit code."""
    shown = console(WIDE, no_color=args.no_color)
    _check(args)
    if not args.prompts:
        return _show(shown, args, args.file)
    if "sweep" in args:
        return _sweep(shown, args)
    setup, prompts = setup_of(args, model_directory)
    with TemporaryDirectory(prefix="reflex-") as scratch:
        prefix = args.out or Path(scratch, "prompts")
        file = prefix.with_name(prefix.name + ".jsonl")
        return _show(shown, args, file, record(setup, prompts, file))


def _sweep(console: Console, args: argparse.Namespace) -> int:
    for name in ("last", "first", "final", "group"):
        if (value := getattr(args, name)) is not None:
            option = {"first": "from", "final": "to"}.get(name, name)
            raise ConfigError(f"--{option}={value}: not with --sweep: it shows a part of one trace")
    budgets = budgets_of(args.sweep)
    picture = None if args.no_picture else args.out
    for line in sweep(*setup_of(args, model_directory), budgets, ProgressLine("budgets"), picture):
        console.print(line, soft_wrap=isinstance(line, Text))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError unless there is a file or prompts, without options of the other, and the library that draws."""
    if args.prompts and args.file is not None:
        raise ConfigError(f"FILE={one_line(args.file)}: not with --prompts; leave one of them out")
    if not args.prompts:
        for name in ONLY_PROMPTS:
            if name in args:
                raise ConfigError(f"{flag(name)}={one_line(getattr(args, name))}: only with --prompts TEXT")
        if args.file is None:
            raise ConfigError("FILE: is missing; give a trace, or --prompts TEXT …")
    if args.out is not None and not args.no_picture:
        import reflex_runtime.observe.picture  # noqa: F401  # so that a missing library is found before the runs


def _show(
    console: Console, args: argparse.Namespace, file: Path, outputs: Mapping[str, RequestOutput] | None = None
) -> int:
    """Print and draw a trace. outputs: those of its prompts, if they were run now."""
    last, first, final = args.last, args.first, args.final
    if first is not None and final is not None and first > final:
        raise ConfigError(f"--to={final}: must be >= --from, which is {first}")
    trace = read_journal(file, images=False)
    batches = selected(trace, args.group, first, final, last)
    pictures: Sequence[Path] = ()
    kept = args.out is not None or not outputs
    drawn = bool(batches) and kept and not args.no_picture
    missing = args.out is None and find_spec("matplotlib") is None
    if drawn and not missing:
        from reflex_runtime.observe.picture import write_pictures

        name = file.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
        beside = file.with_name(name or "trace")
        pictures = write_pictures(trace, batches, args.out or beside)
    show_batches(console, trace, batches, last is not None or first is not None, str(file) if kept else "prompts")
    texts = text_lines(trace, outputs, console.width) if outputs else []
    if len(texts) > ROWS:
        texts[ROWS // 2 : -ROWS // 2] = [Text(f"… {len(texts) - ROWS:,} texts left out …", style="dim")]
    for line in texts:
        console.print(line)
    for path in (file, *pictures) if outputs and kept else pictures:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    if not kept or (drawn and missing):
        print(NOT_DRAWN if kept else NOT_KEPT, file=sys.stderr)  # the table may go into a pipe
    return 0
