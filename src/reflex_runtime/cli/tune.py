"""`reflex tune`: which settings suit the load of a server or of a journal, and what they would bring."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from reflex_runtime.cli.console import ProgressLine
from reflex_runtime.cli.server_address import add_key, key_of
from reflex_runtime.cli.watched_journal import watched_journal
from reflex_runtime.observe.journal_reader import Journal, read_journal

_EPILOG = """\
examples:
  reflex tune http://127.0.0.1:8000            watch a policy server for 30 s
  reflex tune http://127.0.0.1:8000 --seconds 120 --api-key KEY
  reflex tune run.jsonl                        a file of reflex serve --trace FILE or --record DIR
  reflex tune run.jsonl --aim p99              what lowers the slowest answers

The load and the device's times are taken from the recording, and the scheduler runs in virtual time with some fifty
settings. docs/tuning.md says how, and how near the predictions were in a benchmark.

exit codes: 0 done, also if nothing would help; 1 the journal cannot be read; 2 bad arguments, or a server
that cannot be watched
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "tune",
        description="Find the budget, hold and size of batches that suit a recorded load, and predict what they bring.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("source", metavar="URL|JOURNAL", help="a policy server, http://…, or a journal, .jsonl or .jsonl.gz")
    add(
        "--seconds", type=float, default=30.0, metavar="N",
        help="how long a server is watched, 1 to 600 (default %(default)g); without effect on a journal",
    )  # fmt: skip
    add_key(parser)
    add(
        "--aim", choices=("p50", "p95", "p99", "throughput", "on-time"), metavar="WHAT",
        help="what to improve: p50, p95, p99 (of latency), throughput or on-time; by default on-time if more than "
        "one request in a hundred is not answered in time, else p95",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune; returns the exit code."""
    from reflex_runtime.sim.search import Tuner, told

    journals: AbstractContextManager[Journal] = (
        watched_journal(args.source, args.seconds, key_of(args))
        if args.source.startswith(("http://", "https://"))
        else nullcontext(read_journal(args.source, images=False))
    )
    with journals as journal:
        tuner = Tuner(journal, ProgressLine("simulated runs"))
        tuning = tuner.tune(args.aim)
    print(told(tuning, tuner.present.in_words(), args.source))
    return 0
