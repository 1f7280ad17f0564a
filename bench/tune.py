"""Does what `reflex tune` predicts come true? Real servers, with the present settings and with the proposed ones.

A server with settings that do not suit its load is recorded, and the recording is tuned. Then a second server, with the
flags that were proposed, takes turns with the first under the same load, in short rounds: a machine that is slow for a
minute is so for both. The measured change is the median of those between two neighbouring rounds. It has to lie within
10 % of the predicted one. Where nothing is proposed, both servers have the same
settings: what differs then is the noise of this machine, which no prediction can meet, and there is no bar.

Latencies are those of the load generator; the prediction is made from the journal alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from bench.load import Answered
from bench.report import Row, row, say
from bench.servers import Server, running
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.sim.search import Tuner, Tuning

MOST = 10.0  # per cent that a predicted change may miss
ROUNDS = 6  # of each server
SHORT = 0.5  # of the seconds of the recording: a round's


class Workload(NamedTuple):
    """name, the flags that do not suit it, and what is asked."""

    name: str
    flags: tuple[str, ...]
    job: dict[str, Any]


WORKLOADS = (
    Workload("16 callers, no hold", ("--batch-timeout-ms", "0"), {"callers": 16}),
    Workload("24 callers, batches of 4", ("--max-batch-size", "4"), {"callers": 24}),
    Workload(
        "180/s, 100 ms deadline, batches of 2",
        ("--max-batch-size", "2", "--deadline-ms", "100"),
        {"rate": 180.0, "callers": 64},
    ),
)


def tune(heavy: Path, scale: float, pinned: bool = False) -> list[Row]:
    """pinned: server on one core, so that its event loop and its model share it."""
    rows: list[Row] = []
    for workload in WORKLOADS:
        rows += _workload(heavy, workload, max(2.0, 5.0 * scale), pinned)
    return rows


def _workload(heavy: Path, workload: Workload, seconds: float, pinned: bool) -> list[Row]:
    case = f"{workload.name}{', one core' if pinned else ''}"
    with tempfile.TemporaryDirectory(prefix="reflex-tune-") as root:
        trace = Path(root, "run.jsonl")
        say(f"  {case}: recording")
        with running(_server(heavy, [*workload.flags, "--trace", str(trace)], pinned)) as (first,):
            _load(first, workload, seconds, 0)
            tuning, flags = _tuned(trace, workload)
            say(f"  {case}: {' '.join(flags) or tuning.why}")
            flags += ["--trace", str(trace.with_name("after.jsonl"))]  # which costs both the same
            with running(_server(heavy, flags, pinned)) as (second,):
                before, after = [], []
                for turn in range(1, ROUNDS + 1):
                    before.append(_load(first, workload, SHORT * seconds, turn))
                    after.append(_load(second, workload, SHORT * seconds, turn))
    return _rows(f"{case}, the same settings twice" if tuning.why else case, tuning, before, after)


def _server(heavy: Path, flags: Sequence[str], pinned: bool) -> Server:
    command = ["-m", "reflex_runtime", "serve", str(heavy), "--port", "PORT", "--no-supervise", *flags]
    return Server("reflex", command, pinned=pinned)


def _load(server: Server, workload: Workload, seconds: float, seed: int) -> Answered:
    return server.load(seconds=seconds, seed=seed, **workload.job)


def _tuned(trace: Path, workload: Workload) -> tuple[Tuning, list[str]]:
    """The result, and all flags of the server with what was proposed."""
    time.sleep(1.0)  # the last lines are written
    tuner = Tuner(read_journal(trace))
    tuning = tuner.tune()
    knobs = tuning.after.knobs
    flags = {"--max-batch-cost-ms": f"{knobs.budget * 1e3:g}", "--max-batch-size": str(knobs.size)}
    if knobs.hold < inf:
        flags["--batch-timeout-ms"] = f"{knobs.hold * 1e3:g}"
    kept = zip(workload.flags[::2], workload.flags[1::2], strict=True)
    flags |= {flag: value for flag, value in kept if flag == "--deadline-ms"}
    return tuning, [word for pair in flags.items() for word in pair]


def _rows(case: str, tuning: Tuning, before: Sequence[Answered], after: Sequence[Answered]) -> list[Row]:
    said, now = tuning.predicted, tuning.measured
    rows = []
    for name, seen, unit in (
        ("p50", lambda a: a.quantile(0.5) * 1e3, "ms"),
        ("p95", lambda a: a.quantile(0.95) * 1e3, "ms"),
        ("throughput", lambda a: a.rate, "/s"),
    ):
        was, became = [seen(a) for a in before], [seen(a) for a in after]
        changes = [new / old for old, new in zip(was, became, strict=True)]
        measured = statistics.median(changes)
        forecast = float(getattr(said, name)) / float(getattr(now, name))
        off = 100.0 * abs(forecast / measured - 1.0)
        rows.append(row(case, f"{name}, before", was, unit))
        rows.append(row(case, f"{name}, after", became, unit))
        rows.append(row(case, f"{name}, measured change", changes, "x"))
        rows.append(row(case, f"{name}, predicted change", [forecast], "x"))
        rows.append(row(case, f"{name}, prediction off by", [off], "%", most=None if tuning.why else MOST))
    for what, rounds in (("before", before), ("after", after)):
        refused = [100.0 * (a.failed / max(1, a.failed + a.requests)) for a in rounds]
        rows.append(row(case, f"refused, {what}", refused, "%"))
    return rows
