"""`reflex doctor`: checks an export before it is served, and says how to mend what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import whole

if TYPE_CHECKING:
    from reflex_runtime.robots.analysis.doctor import Check, Diagnosis

WIDE = 120  # columns if the output is not a terminal
_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "skip": "dim"}

_DESCRIPTION = """\
Check an export directory, or another policy. First without loading it: its files, configuration, normalisation, the
robot's file, text, memory for two versions, the provider. Then load it as `reflex serve` does and run it: the graphs'
inputs and batch axis, actions, determinism, a batch compared with its members alone, the needs of --rtc. Last, the
clocks of this machine. Of lerobot:DIR, openpi:DIR and python:package.module:make, the check `source` stands for those
of files and graphs.

A check passes, fails, warns, or is skipped because one that it needs failed. Below a failure or warning stands what was
expected and what to do.
"""

_EPILOG = """\
examples:
  reflex doctor ./my-export
  reflex doctor ./my-export --provider cuda --instruction "open the drawer" --rtc-horizon 8
  reflex doctor ./my-export --format json | jq '.checks[] | select(.status == "fail")'

--format json prints one object:
  schema_version 1, reflex_version, export_dir, model_id and model_hash (null when the configuration cannot be read),
  provider, threads, exit_code, counts {pass, fail, warn, skip}, and checks, a list of {id, status, expected, actual,
  remediation, environment, duration_ms} in their order. Texts are for people and may change; ids, statuses and keys
  stay. environment is true if the fault is in this machine and not in the export.
ids:
  files config wires normalisation embodiment tokenizer memory provider model_load inputs dynamic_batch actions cameras
  determinism batch_parity rtc_boundary clock, and for what is no export: source

exit codes: 0 nothing failed, 1 the export failed a check, 2 bad arguments, 3 only checks of this machine failed
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="export directory, lerobot:DIR, openpi:DIR or python:module:make")
    add("--format", choices=("text", "json"), default="text", help="a table (default), or one JSON object")
    add("--provider", default="cpu", help="as with serve: cpu (default), cuda or an ONNX Runtime provider name")
    add("--threads", default="1", metavar="N", help="as with serve: ONNX Runtime threads per call (default 1)")
    add(
        "--instruction",
        metavar="TEXT",
        help="an instruction that the policy must understand (default: one from its own vocabulary)",
    )
    add("--rtc-horizon", metavar="N", help="fail unless the export can be served with --rtc and this horizon")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; returns the exit code."""
    from reflex_runtime.robots.analysis.doctor import examine
    from reflex_runtime.robots.sources.export_directory import check_directory
    from reflex_runtime.robots.sources.load import is_export
    from reflex_runtime.run.onnx_session import PROVIDERS

    if is_export(args.source):
        check_directory(Path(args.source))
    threads = whole("--threads", args.threads, 1, 256)
    horizon = None if args.rtc_horizon is None else whole("--rtc-horizon", args.rtc_horizon, 1, 10_000)
    if args.instruction is not None and not args.instruction.strip():
        raise ConfigError("--instruction=: is empty; give words, such as 'open the drawer', or leave it out")
    with redirect_stdout(sys.stderr):  # what a model prints would break the JSON
        diagnosis = examine(
            args.source,
            PROVIDERS.get(args.provider, args.provider),
            threads,
            instruction=args.instruction,
            rtc_horizon=horizon,
        )
    if args.format == "json":
        json.dump(diagnosis.as_dict(), sys.stdout, ensure_ascii=False, indent=2)
        print()
    else:
        _show(Console(highlight=False, width=None if sys.stdout.isatty() else WIDE), diagnosis)
    return diagnosis.exit_code


def _show(console: Console, diagnosis: Diagnosis) -> None:
    spec = diagnosis.spec
    name = "" if spec is None else f" {spec.model_id} ({spec.model_hash}),"
    threads = f"{diagnosis.threads} thread{'s' if diagnosis.threads > 1 else ''}"
    console.print(Text(f"{diagnosis.source}:{name} {diagnosis.provider}, {threads}"), style="dim", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(no_wrap=True, justify="right")
    for check in diagnosis.checks:
        style = _STYLES[check.status]
        table.add_row(Text(check.status, style), Text(check.id, style), _told(check), _ms(check.duration))
    console.print(table)
    counts = diagnosis.as_dict()["counts"]
    total = sum(check.duration for check in diagnosis.checks)
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    verdict = {0: "fit to serve", 1: "not fit to serve", 3: "this machine cannot serve it"}[diagnosis.exit_code]
    console.print(Text(f"{verdict}: {told}, in {total:.1f} s", style="bold"))


def _told(check: Check) -> Text:
    """The result of a check; for a failure or warning also what was expected and what to do."""
    if check.status in ("pass", "skip"):
        return Text(check.actual, style="" if check.status == "pass" else "dim")
    arrow = ("\n→ ", _STYLES[check.status])
    return Text.assemble(check.actual, ("\nexpected: ", "dim"), check.expected, arrow, check.remediation)


def _ms(seconds: float) -> Text:
    return Text(f"{seconds * 1e3:.0f} ms" if seconds >= 5e-4 else "", style="dim")
