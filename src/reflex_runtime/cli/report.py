"""`reflex report`: A against B out of journals, as text or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import JournalError
from reflex_runtime.settings.declare import one_of

_DESCRIPTION = """\
Sum up what `reflex serve` wrote with --record DIR or --trace FILE: per slot its requests, episodes, success with a
95 % Wilson interval, latency, guard and errors; a compared with b by e-values, which stay valid however often you look;
the shadow's divergence; and a timeline of decisions.
"""

_EPILOG = """\
examples:
  reflex report recordings/                       everything that was recorded there
  reflex report monday.jsonl.gz tuesday.jsonl.gz  two files as one run
  reflex report recordings/ --format json         for programs

An e-value of 1,000 decides: if both are equally good, the chance that it ever reaches 1,000 is at most 1 in 1,000.

exit codes: 0 fine, 1 a file cannot be read (file and line are named), 2 bad arguments
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="FILE|DIR", help="journals, or directories of them")
    add("--policy", metavar="NAME", help="the policy to report, where several were served (docs/several-policies.md)")
    add("--format", default="text", metavar="text|json", help="form of the output (default text)")
    add(
        "--margin",
        default="5",
        metavar="POINTS",
        help="b counts as not worse if its success is at most this much lower, in (0, 100) percentage points",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Report; returns the exit code."""
    from reflex_runtime.robots.analysis.report import report

    if args.format not in ("text", "json"):
        raise ConfigError(f"--format={args.format}: {one_of(args.format, ('text', 'json'))}")
    try:
        margin = float(args.margin)
    except ValueError:
        margin = 0.0
    if not 0.0 < margin < 100.0:
        raise ConfigError(f"--margin={args.margin}: must be a number in (0, 100), of percentage points")
    try:
        found = report(args.paths, margin=margin / 100.0, policy=args.policy)
    except JournalError as error:
        print(f"reflex report: {error.message}", file=sys.stderr)
        return 1
    print(json.dumps(found.as_dict(), indent=1) if args.format == "json" else found.text())
    return 0
