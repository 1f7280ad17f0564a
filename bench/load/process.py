"""The load generator in a process of its own: `python -m bench.load.process`.

A job as JSON on standard input; on standard output a line of JSON for each step of progress, the result as the last.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from bench.load.generator import LoadJob, LoadLine, play
from bench.machine import cores, pin
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.run.process import loop_factory


def main() -> int:
    """Read the job from standard input, run it, write lines to standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadJob)
    if job.pinned:
        pin(cores()[1])

    # with PYTHONUNBUFFERED that of `sys` is a raw file, whose write may end early
    out = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115

    def write(line: LoadLine) -> None:
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            rounds = runner.run(play(job, lambda told: write(LoadLine(told=told))))
    except ReflexError as error:
        write(LoadLine(error=error.message))
        return 1
    write(LoadLine(rounds=rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
