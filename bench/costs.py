"""What a small request costs, stage by stage: servers that do one thing more each, asked in turns (docs/costs.md)."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from bench.apps.ablated import STAGES
from bench.load import Answered
from bench.report import Row, row, say
from bench.servers import Server, hello, running

HELLO = "bare ASGI hello"


def ablated(export: Path, stage: str) -> Server:
    """`reflex serve` with the stages up to this one."""
    return Server(stage, ["-m", "bench.apps.ablated", str(export), "PORT", stage])


def costs(tiny: Path, scale: float) -> list[Row]:
    """CPU of the server per request by stage: differences of neighbours within a round, with 32 callers and with one.

    The last stage replaces the one before: with it batches run on the device thread, which brief ones do not.
    """
    found: dict[tuple[str, int], list[Answered]] = defaultdict(list)
    with running(hello(tiny), *(ablated(tiny, stage) for stage in STAGES)) as servers:
        for i in range(rounds := max(3, round(5 * scale))):
            say(f"  costs: round {i + 1} of {rounds}")
            for server in servers[:: -1 if i % 2 else 1]:
                for callers in (32, 1):
                    found[server.name, callers].append(server.load(callers=callers, seconds=max(0.3, 0.8 * scale)))
    return [line for callers in (32, 1) for line in _rows(found, callers)]


def _rows(found: dict[tuple[str, int], list[Answered]], callers: int) -> list[Row]:
    case = f"a small request, {callers} caller{'s' * (callers > 1)}"

    def cpu(name: str) -> list[float]:
        return [a.cpu / a.requests * 1e6 for a in found[name, callers]]

    rows = [row(case, f"CPU, {HELLO}", cpu(HELLO), "us"), row(case, STAGES["http"][0], cpu("http"), "us")]
    for before, stage in pairwise(STAGES):
        more = [b - a for a, b in zip(cpu(before), cpu(stage), strict=True)]
        rows.append(row(case, STAGES[stage][0], more, "us"))
    rows.append(row(case, "all but the hand-over", cpu("sinks"), "us"))
    rows.append(row(case, "p50", [a.quantile(0.5) * 1e3 for a in found["sinks", callers]], "ms"))
    return rows
