"""`reflex export`, `demo-export` and `doctor`: write export directories, and check them."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.console import console
from reflex_runtime.cli.serving import PYTHON, kind_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import model_directory, policy_source, write_policy
from reflex_runtime.run.modules import imported
from reflex_runtime.settings.declare import whole

if TYPE_CHECKING:
    from reflex_runtime.robots.analysis.doctor import Check, Diagnosis


WIDE = 120  # columns if the output is not a terminal
_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "skip": "dim"}

_DOCTOR_DESCRIPTION = """\
Check a policy as `reflex serve` would load it: first its files without loading them, then the model itself (inputs and
batch axis, actions, determinism, a batch against single requests, requirements of --rtc), last this machine's clocks.
A failure or warning is followed by what was expected and what to do.
"""

_DOCTOR_EPILOG = """\
examples:
  reflex doctor ./my-export
  reflex doctor ./my-export --provider cuda --instruction "open the drawer" --rtc-horizon 8
  reflex doctor ./my-export --format json | jq '.checks[] | select(.status == "fail")'

Texts of --format json are for people and may change; ids, statuses and keys stay. ids of checks:
  config wires normalisation embodiment tokenizer memory provider model_load inputs dynamic_batch actions cameras
  determinism batch_parity rtc_boundary clock deterministic

exit codes: 0 nothing failed, 1 the export failed a check, 2 bad arguments, 3 only checks of this machine failed
"""


def add_doctor(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser("doctor", description=_DOCTOR_DESCRIPTION, epilog=_DOCTOR_EPILOG)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="export DIR, demo, lerobot:DIR, openpi:DIR, python:module:make, MODEL_DIR")
    add("--format", choices=("text", "json"), default="text", help="a table (default), or one JSON object")
    add("--provider", default="cpu", help="as with serve: cpu (default), cuda or an ONNX Runtime provider name")
    threads, rows = (partial(whole, flag, low=1, high=256) for flag in ("--threads", "--deterministic"))
    horizon = partial(whole, "--rtc-horizon", low=1, high=10_000)
    add("--threads", type=threads, default="1", metavar="N", help="as with serve (default 1)")
    add("--instruction", metavar="TEXT", help="an instruction that the policy must understand")
    add("--rtc-horizon", type=horizon, metavar="N", help="fail unless --rtc works with this horizon")
    more: Any = {"type": rows, "nargs": "?", "const": "8", "default": 0, "metavar": "ROWS"}
    add("--deterministic", **more, help="fail unless answers are the same bits in any batch (without ROWS 8)")
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Run the checks and print them; returns the exit code."""
    from reflex_runtime.robots.analysis.doctor import examine
    from reflex_runtime.robots.sources.export_directory import check_directory
    from reflex_runtime.robots.sources.load import is_export
    from reflex_runtime.run.onnx_session import PROVIDERS

    args.source = policy_source(args.source)
    kind = kind_of([args.source])
    if kind == "model":
        return _check_model(args)
    if args.source.startswith(PYTHON) and kind == "functions":
        imported(args.source.removeprefix(PYTHON), args.source, "python:package.module:make")  # its errors come first
        why = "is a function, but doctor checks policies and language models"
        raise ConfigError(f"{args.source}: {why}; reflex serve {args.source} checks it before the port opens")
    if is_export(args.source):
        check_directory(Path(args.source))
    if args.instruction is not None and not args.instruction.strip():
        raise ConfigError("--instruction=: is empty; give words, such as 'open the drawer', or leave it out")
    with redirect_stdout(sys.stderr):  # what a model prints would break the JSON
        diagnosis = examine(
            args.source, PROVIDERS.get(args.provider, args.provider), args.threads,
            instruction=args.instruction, rtc_horizon=args.rtc_horizon, rows=args.deterministic,
        )  # fmt: skip
    if args.format == "json":
        json.dump(diagnosis.as_dict(), sys.stdout, ensure_ascii=False, indent=2)
        print()
    else:
        _show(console(WIDE, columns=False), diagnosis)
    return diagnosis.exit_code


def _check_model(args: argparse.Namespace) -> int:
    """Check a language model without loading it, as the start of `reflex serve` does."""
    from reflex_runtime.llm.engine.load import check, describe

    directory = Path(model_directory(args.source))
    try:
        check(describe(directory))
    except ConfigError as error:
        raise ConfigError(f"{args.source} is a language model, not fit to serve: {error.message}") from None
    print(f"{args.source} is a language model, fit to serve: checked without its weights")
    return 0


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
        table.add_row(Text(check.status, style), Text(check.id, style), _result(check), _ms(check.duration))
    console.print(table)
    counts = diagnosis.as_dict()["counts"]
    total = sum(check.duration for check in diagnosis.checks)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    verdict = {0: "fit to serve", 1: "not fit to serve", 3: "this machine cannot serve it"}[diagnosis.exit_code]
    console.print(Text(f"{verdict}: {summary}, in {total:.1f} s", style="bold"))
    failed = [check for check in diagnosis.checks if check.status == "fail"]
    if failed:  # repeated, because the table may have scrolled away
        what = "; ".join(f"{check.id}: {check.actual} → {check.remediation}" for check in failed)
        console.print(Text(" ".join(what.split()), style=_STYLES["fail"]), soft_wrap=True)


def _result(check: Check) -> Text:
    """The result of a check, and after a failure or warning what was expected and what to do."""
    if check.status in ("pass", "skip"):
        return Text(check.actual, style="" if check.status == "pass" else "dim")
    arrow = ("\n→ ", _STYLES[check.status])
    return Text.assemble(check.actual, ("\nexpected: ", "dim"), check.expected, arrow, check.remediation)


def _ms(seconds: float) -> Text:
    return Text(f"{seconds * 1e3:.0f} ms" if seconds >= 5e-4 else "", style="dim")


_EXPORT_DESCRIPTION = """\
Write an export directory (ONNX, docs/exports.md) from a LeRobot checkpoint, to serve it without PyTorch and LeRobot:
ACT, Diffusion with DDIM, and SmolVLA. `reflex serve lerobot:DIR` serves other types, which have no export.

The export is compared with the checkpoint before it is put in place. Beyond the bound (1e-4 of the joint's unit of
normalisation, and 1e-6 of its largest action) nothing is written, and the exit status is 1.
"""

_EXPORT_EPILOG = """\
examples:
  pip install '.[robots,export]'
  reflex export lerobot:./outputs/train/act/checkpoints/last/pretrained_model ./act-export
  reflex doctor ./act-export && reflex serve ./act-export

An embodiment.json (docs/exports.md) beside the checkpoint's config.json is copied.

exit codes: 0 written and the same, 1 not the same (nothing is written), 2 bad arguments, or a type without export
"""


def add_export(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser("export", description=_EXPORT_DESCRIPTION, epilog=_EXPORT_EPILOG)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="lerobot:DIR, or DIR alone: config.json, model.safetensors, processors")
    add("out", metavar="OUT", type=Path, help="the directory to write; must not exist or be empty")
    add("--opset", default="18", metavar="N", help="ONNX opset of the graph, 18 (default) to 23")
    add("--force", action="store_true", help="replace the export at OUT when the new one was compared")
    parser.set_defaults(run=export)


def export(args: argparse.Namespace) -> int:
    """Write and compare; returns the exit code."""
    from reflex_runtime.robots.policy.spec import OPENPI, PYTHON
    from reflex_runtime.robots.sources.lerobot_export import BOUND, OPSETS, NotTheSame, export_checkpoint
    from reflex_runtime.robots.sources.load import is_export

    opset = whole("--opset", args.opset, *OPSETS)
    if args.source.startswith((OPENPI, PYTHON)):
        raise ConfigError(f"{args.source}: only LeRobot checkpoints are exported; serve it as it is")
    if is_export(args.source) and Path(args.source, "reflex_config.json").is_file():
        raise ConfigError(f"{args.source}: is an export already; serve it as it is")
    try:
        found = export_checkpoint(
            args.source, args.out, opset=opset, force=args.force, progress=lambda line: print(line, flush=True)
        )
    except NotTheSame as error:
        print(f"reflex export: {args.source}: {error.message}", file=sys.stderr)
        return 1
    print(
        f"largest difference in {found.compared} answers: {found.difference:.2g}, in units of normalisation "
        f"{found.in_units:.2g} (bound {BOUND:g})\n"
        f"wrote {args.out}; check it with: reflex doctor {args.out}; serve it with: reflex serve {args.out}"
    )
    return 0


def add_demo_export(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser("demo-export", description="Write the bundled policy to a directory for `reflex serve`.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must not exist or be empty")
    parser.add_argument("--force", action="store_true", help="overwrite the files in DIR")
    parser.set_defaults(run=demo_export)


def demo_export(args: argparse.Namespace) -> int:
    write_policy(args.directory, args.force)
    print(f"wrote the policy to {args.directory}; serve it with: reflex serve {args.directory}")
    return 0
