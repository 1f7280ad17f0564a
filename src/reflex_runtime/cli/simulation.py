"""`reflex simulate` and `reflex tune`: the scheduler in virtual time, on a simulated load or on that of a journal."""

from __future__ import annotations

import argparse
from typing import Any

from reflex_runtime.cli.console import ProgressLine
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import add_options
from reflex_runtime.settings.read import load
from reflex_runtime.sim.options import SimulateConfig, simulated

_SIMULATE_EPILOG = """\
examples:
  reflex simulate --rate 300 --deadline-ms 100                    Poisson arrivals at 300/s
  reflex simulate --rate 300 --arrivals bursty                    the same load in bursts
  reflex simulate --arrivals closed --callers 8 --think around:100,5    eight robots that act for 100 ± 5 ms

The device takes fixed + marginal x n milliseconds for n requests. docs/simulator.md explains every figure.
"""


def add_simulate(verbs: argparse._SubParsersAction[Any]) -> None:
    what = "Run the scheduler on a simulated load and device in virtual time, and report the result."
    parser = verbs.add_parser("simulate", description=what, epilog=_SIMULATE_EPILOG)
    add_options(parser, SimulateConfig)
    parser.set_defaults(run=simulate)


def simulate(args: argparse.Namespace) -> int:
    """Simulate, and print the report."""
    print(simulated(load(SimulateConfig, "simulate", None, {}, vars(args))).text())
    return 0


_TUNE_EPILOG = """\
examples:
  reflex tune run.jsonl                        a file of reflex serve --trace FILE or --record DIR
  reflex tune run.jsonl --aim p99              what lowers the slowest answers
  curl -s 'http://127.0.0.1:8000/diagnostics/journal?seconds=30' > run.jsonl     record a running policy server

exit codes: 0 done, also if nothing would help; 1 the journal cannot be read; 2 bad arguments
"""


def add_tune(verbs: argparse._SubParsersAction[Any]) -> None:
    what = "Find the budget, hold and size of batches that suit a recorded load, and predict what they bring."
    parser = verbs.add_parser("tune", description=what, epilog=_TUNE_EPILOG)
    parser.add_argument("journal", metavar="JOURNAL", help="a journal, .jsonl or .jsonl.gz")
    aims = ("p50", "p95", "p99", "throughput", "on-time")
    what = "p50, p95, p99 (of latency), throughput or on-time; by default on-time if over 1 %% are late, else p95"
    parser.add_argument("--aim", choices=aims, metavar="WHAT", help=what)
    parser.set_defaults(run=tune)


def tune(args: argparse.Namespace) -> int:
    """Tune; returns the exit code."""
    from reflex_runtime.observe.journal import read_journal
    from reflex_runtime.sim.search import Tuner, text_of

    if args.journal.startswith(("http://", "https://")):
        how = f"curl -s '{args.journal.rstrip('/')}/diagnostics/journal?seconds=30' > run.jsonl"
        raise ConfigError(f"JOURNAL={args.journal:.200}: must be a file; write one: {how}")
    journal = read_journal(args.journal, images=False)
    if not journal.requests:
        journal.header.without_requests(journal.path)
    tuner = Tuner(journal, ProgressLine("simulated runs"))
    tuning = tuner.tune(args.aim)
    print(text_of(tuning, tuner.present.in_words(), args.journal))
    return 0
