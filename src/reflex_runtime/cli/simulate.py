"""`reflex simulate`: what batching would do to a load, in virtual time, without a model or a server."""

from __future__ import annotations

import argparse
from typing import Any

from reflex_runtime.settings.declare import add_options
from reflex_runtime.settings.read import load
from reflex_runtime.sim.options import SimulateConfig, simulated

_EPILOG = """\
examples:
  reflex simulate --rate 300 --deadline-ms 100                    Poisson arrivals at 300/s
  reflex simulate --rate 300 --arrivals bursty                    the same load in bursts
  reflex simulate --arrivals closed --callers 8 --think around:100,5    eight robots that act for 100 ± 5 ms

The device takes fixed + marginal x n milliseconds for n requests. docs/simulator.md explains every figure.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        description="Run the real scheduler on a simulated load and device in virtual time, and report the result.",
        epilog=_EPILOG,
    )
    add_options(parser, SimulateConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the report."""
    print(simulated(load(SimulateConfig, "simulate", None, {}, vars(args))).text())
    return 0
