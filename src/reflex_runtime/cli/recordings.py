"""`reflex replay` runs a journal again, through a model or the scheduler; `reflex report` sums journals up."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from reflex_runtime.cli.console import ProgressLine
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import policy_source
from reflex_runtime.observe.files import create, refused, write_all
from reflex_runtime.observe.journal import Journal, read_journal
from reflex_runtime.observe.journal_writer import hardware
from reflex_runtime.settings.declare import whole

_REPLAY_DESCRIPTION = """\
Replay a recording of `reflex serve --record DIR`. With --model its requests go through a model, and actions, cache and
times are compared. With --schedule its arrivals, or those of a trace, go through the scheduler in virtual time, with
the recorded settings or those of the options.
"""

_REPLAY_EPILOG = """\
examples:
  reflex replay run.jsonl.gz --model ./v1                      compare the answers of v1 with the recorded ones
  reflex replay run.jsonl.gz --model ./v1 --compose recorded   the same batches too: equal to the last bit
  reflex replay run.jsonl.gz --schedule --max-batch-cost-ms 50  the same arrivals with half the budget

Actions are the same if the cosine is at least 0.999 and no value differs by more than 1e-3; latency, if the median time
of batches differs by at most 5 % on the same machine. Models that see images need --record-images full.

exit codes: 0 fine, 1 the file cannot be read, 2 bad arguments or model, 3 something that --fail-on names differs
"""


def add_replay(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("replay", description=_REPLAY_DESCRIPTION, epilog=_REPLAY_EPILOG)
    parser.add_argument("file", type=Path, metavar="FILE", help="the journal, .jsonl or .jsonl.gz")
    add = parser.add_argument_group("through a model").add_argument
    add("--model", metavar="SOURCE", help="the policy to run: an export directory, or demo")
    add("--slot", metavar="SLOT", help="only requests that this slot answered (default: all, listed per slot)")
    add("--recorded-by", metavar="HASH", help="only requests that the model with this hash answered")
    what: Any = {"choices": ("actions", "latency", "cache", "all"), "metavar": "WHAT"}
    add("--diff", default="all", **what, help="differences to show: actions, latency, cache or all (default all)")
    how = ("alone", "recorded")
    add("--compose", default="alone", choices=how, metavar="HOW", help="alone (default), or in recorded batches")
    add("--n", type=lambda n: whole("--n", n, 1), metavar="N", help="only the first N answered requests, N >= 1")
    add("--fail-on", **what, help="exit with 3 if this differs: actions, latency, cache or all")
    add("--provider", default="cpu", metavar="NAME", help="cpu, cuda or an ONNX Runtime provider name (default cpu)")
    threads = partial(whole, "--threads", low=1, high=256)
    add("--threads", type=threads, default="1", metavar="N", help="ONNX Runtime threads per call (default 1)")
    add = parser.add_argument_group("through the scheduler").add_argument
    add("--schedule", action="store_true", help="run the recorded arrivals through the scheduler, in virtual time")
    for flag, unit, low, high, kind in (
        ("--max-batch-cost-ms", "MS", 10, 10_000, "budget"), ("--batch-timeout-ms", "MS", 0, 1000, "limit for holds"),
        ("--max-batch-size", "N", 1, 4096, "size cap"),
    ):  # fmt: skip
        read = partial(whole, flag, low=low, high=high)
        add(flag, type=read, metavar=unit, help=f"another {kind}, in [{low}, {high}]")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the whole result to this file")
    parser.set_defaults(run=replay)


def replay(args: argparse.Namespace) -> int:
    """Replay; returns the exit code."""
    if args.schedule == (args.model is not None):
        raise ConfigError("give either --model DIR, to run its model, or --schedule, to run the scheduler")
    found = _schedule(args) if args.schedule else _model(args)
    if args.output is not None:
        with refused(f"--output={args.output}"), create(args.output) as file:
            write_all(file, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        print(f"wrote {args.output}", file=sys.stderr)
    return 3 if found.get("failed") else 0


# -- through a model ---------------------------------------------------------------------------------------------------


def _model(args: argparse.Namespace) -> dict[str, Any]:
    from reflex_runtime.robots import DeviceOptions, Policy, load_policy, read_source, served_by
    from reflex_runtime.robots.analysis.replay import DIFFS, replay_model
    from reflex_runtime.robots.policy.processors import ActionGuard
    from reflex_runtime.run.onnx_session import PROVIDERS
    from reflex_runtime.run.processor import Processor

    chosen: dict[str | None, Any] = {None: (), "all": DIFFS}
    diffs, fail_on = (chosen.get(what, (what,)) for what in (args.diff, args.fail_on))
    spec = read_source(policy_source(args.model))
    recording = read_journal(args.file)
    if recording.header.model_type == "function":
        raise ConfigError(f"{args.file}: is a recording of functions, which no policy can answer; use --schedule")
    if args.slot is not None and args.slot not in recording.slots:
        there = ", ".join(recording.slots) or "none"
        raise ConfigError(f"--slot={args.slot}: not in this recording, which has {there}")
    _note_other_model(recording, args.slot, spec.model_hash, args.model)
    guarded = any(line.guard is not None for line in recording.requests)

    def make(slot: str) -> tuple[Policy, Processor]:
        provider = PROVIDERS.get(args.provider, args.provider)
        policy = load_policy(spec, slot, device=DeviceOptions(provider, args.threads))
        return policy, served_by(policy, ActionGuard(spec.embodiment)) if guarded else policy

    replay = replay_model(
        recording,
        make,
        compose=args.compose,
        slots=() if args.slot is None else (args.slot,),
        recorded_by=args.recorded_by or "",
        limit=args.n,
        progress=ProgressLine("requests"),
    )
    same = _same_hardware(recording.header.hardware)
    failed = [diff for diff in fail_on if replay.failed(diff, same)]
    print(f"{args.file}: {len(recording.requests)} requests{_unfinished(recording)}", *replay.lines(diffs), sep="\n")
    if "latency" in diffs and not same and replay.failed("latency"):
        print("reflex replay: warning: recorded on other hardware, so latency is not judged", file=sys.stderr)
    if failed:
        print(f"reflex replay: different in {', '.join(failed)} (--fail-on {args.fail_on})", file=sys.stderr)
    return {
        "file": str(args.file),
        "model": args.model,
        "model_hash": spec.model_hash,
        "compose": args.compose,
        "same_hardware": same,
        "failed": failed,
        "different": [diff for diff in DIFFS if replay.failed(diff, same)],
        "left_out": dict(replay.left_out),
        "all": replay.summary(),
        "slots": {slot: replay.summary(slot) for slot in sorted({item.slot for item in replay.items})},
        "items": replay.items,
    }


def _note_other_model(recording: Journal, slot: str | None, found: str, model: str) -> None:
    slots = [slot] if slot is not None else recording.slots
    hashes = {line.model_hash for line in recording.requests if line.slot in slots} - {""}
    recorded = (hashes or {recording.header.hash_of(name) for name in slots}) - {""}
    if recorded and found not in recorded:
        print(f"reflex replay: note: {model} is {found}, recorded was {', '.join(sorted(recorded))}", file=sys.stderr)


def _same_hardware(recorded: Any) -> bool:
    """Whether this machine equals the recorded one in the keys that both have."""
    return not isinstance(recorded, dict) or all(recorded.get(key, one) == one for key, one in hardware().items())


# -- through the scheduler ---------------------------------------------------------------------------------------------


def _schedule(args: argparse.Namespace) -> dict[str, Any]:
    from reflex_runtime.sim.recorded import Changes, recorded_report, replay_schedule, side_by_side
    from reflex_runtime.sim.report import columns, doubt

    cost, hold, size = args.max_batch_cost_ms, args.batch_timeout_ms, args.max_batch_size
    recording = read_journal(args.file, images=False)
    if not recording.requests:
        recording.header.without_requests(recording.path)
    reports = {"recorded": recorded_report(recording), "replayed": replay_schedule(recording)}
    changes = [] if cost is None else [f"{cost} ms"]
    changes += [] if hold is None else [f"{hold} ms hold"]
    changes += [] if size is None else [f"size {size}"]
    if changes:
        cost, hold = (None if ms is None else ms / 1e3 for ms in (cost, hold))
        reports[", ".join(changes)] = replay_schedule(recording, Changes(cost, hold, size))
    print(f"{args.file}: {len(recording.requests)} requests{_unfinished(recording)}")
    seen, replayed = reports["recorded"], reports["replayed"]
    warning = doubt((replayed.p50, seen.p50), (replayed.throughput, seen.throughput))
    if warning:
        print(f"reflex replay: warning: {warning}", file=sys.stderr)
    rows = side_by_side(reports)
    print(columns(rows[0], rows[1:]))
    return {
        "file": str(args.file),
        "failed": [],
        "warning": warning,
        "reports": {n: {k: v for k, v in asdict(r).items() if k != "clients"} for n, r in reports.items()},
    }


# -- report ------------------------------------------------------------------------------------------------------------


def _unfinished(recording: Journal) -> str:
    if recording.footer is not None:
        dropped = recording.footer.dropped
        return f", {dropped} lines dropped" if dropped else ""
    return ", no footer: the recorder was stopped" + (" and its last line is cut off" if recording.torn else "")


_REPORT_DESCRIPTION = """\
Sum up what `reflex serve` wrote with --record DIR or --trace FILE: requests, success, latency and errors of each slot,
a against b by e-values, the shadow, and a timeline of decisions.
"""

_REPORT_EPILOG = """\
examples:
  reflex report recordings/                       all recordings of a directory
  reflex report monday.jsonl.gz tuesday.jsonl.gz  two files as one run

exit codes: 0 fine, 1 a file cannot be read (file and line are named), 2 bad arguments
"""


def add_report(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("report", description=_REPORT_DESCRIPTION, epilog=_REPORT_EPILOG)
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="FILE|DIR", help="journals, or directories of them")
    add("--policy", metavar="NAME", help="the policy to report, if several were served (docs/several-policies.md)")
    add("--format", default="text", choices=("text", "json"), help="text (default), or JSON")
    lower = "b is not worse if its success is lower by at most POINTS"
    add("--margin", type=float, default=5.0, metavar="POINTS", help=lower)
    parser.set_defaults(run=report)


def report(args: argparse.Namespace) -> int:
    """Report; returns the exit code."""
    from reflex_runtime.robots.analysis.report import report

    if not 0.0 < args.margin < 100.0:
        raise ConfigError(f"--margin={args.margin:g}: must be a number in (0, 100), of percentage points")
    found = report(args.paths, margin=args.margin / 100.0, policy=args.policy)
    print(json.dumps(found.as_dict(), indent=1) if args.format == "json" else found.text())
    return 0
