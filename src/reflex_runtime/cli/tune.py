"""`reflex tune`: which settings suit the load of a journal, and what they would bring."""

from __future__ import annotations

import argparse
from typing import Any

from reflex_runtime.cli.console import ProgressLine
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal_reader import read_journal

_EPILOG = """\
examples:
  reflex tune run.jsonl                        a file of reflex serve --trace FILE or --record DIR
  reflex tune run.jsonl --aim p99              what lowers the slowest answers
  curl -s 'http://127.0.0.1:8000/diagnostics/journal?seconds=30' > run.jsonl     watch a policy server that runs

The load and the device's times are taken from the recording, and the scheduler runs in virtual time with some fifty
settings. docs/tuning.md says how, and how near the predictions were in a benchmark.

exit codes: 0 done, also if nothing would help; 1 the journal cannot be read; 2 bad arguments
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "tune",
        description="Find the budget, hold and size of batches that suit a recorded load, and predict what they bring.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("journal", metavar="JOURNAL", help="a journal, .jsonl or .jsonl.gz")
    add(
        "--aim", choices=("p50", "p95", "p99", "throughput", "on-time"), metavar="WHAT",
        help="what to improve: p50, p95, p99 (of latency), throughput or on-time; by default on-time if more than "
        "one request in a hundred is not answered in time, else p95",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune; returns the exit code."""
    from reflex_runtime.sim.search import Tuner, told

    if args.journal.startswith(("http://", "https://")):
        watch = f"curl -s '{args.journal.rstrip('/')}/diagnostics/journal?seconds=30' > run.jsonl"
        raise ConfigError(f"JOURNAL={args.journal:.200}: must be a file, such as one of {watch}")
    tuner = Tuner(read_journal(args.journal, images=False), ProgressLine("simulated runs"))
    tuning = tuner.tune(args.aim)
    print(told(tuning, tuner.present.in_words(), args.journal))
    return 0
