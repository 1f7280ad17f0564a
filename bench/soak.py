"""Memory must not grow: over a million requests through a `Batcher` in process, and over minutes of mixed traffic
through a whole server."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.load import STATE, quantile
from bench.models import SIDE, write_export
from bench.pictures import picture
from bench.report import Row, row, say
from bench.servers import Server, reflex
from reflex_runtime.core.request import Request
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import FunctionProcessor

REQUESTS, CALLERS, STEPS = 1_000_000, 64, 10
LIMIT = 300.0  # seconds
QUIET = 2.0  # seconds in which nobody asks


def soak(scale: float) -> list[Row]:
    """Resident memory after each tenth of the requests, against that after the first."""
    seen = asyncio.run(_soak(int(REQUESTS * scale)))
    growth = [(now - seen[0]) / 2**20 for now in seen[1:]]
    case = f"soak, {int(REQUESTS * scale):,} requests"
    rows = [row(case, "resident memory after the first tenth", [seen[0] / 2**20], "MB")]
    rows.append(row(case, "growth since, at each further tenth", growth, "MB", most=4.0))
    rows.append(row(case, "growth from the first tenth to the last", [growth[-1]], "MB", most=4.0))
    return rows


async def _soak(requests: int) -> list[int]:
    processor = FunctionProcessor(lambda numbers: numbers)
    process = psutil.Process()
    seen: list[int] = []
    began = time.monotonic()
    async with Batcher({"default": processor}) as batcher:

        async def caller(name: str, count: int) -> None:
            for i in range(count):
                # Names change, as robots and episodes do; every tenth brings a deadline.
                limit = 10.0 if i % 10 == 0 else None
                await batcher.run(Request(i, client=f"{name}-{i // 100}", time_limit=limit))

        for step in range(STEPS):
            share = requests // STEPS // CALLERS
            await asyncio.gather(*(caller(f"{step}-{c}", share) for c in range(CALLERS)))
            gc.collect()
            seen.append(process.memory_info().rss)
            rate = (step + 1) * share * CALLERS / (time.monotonic() - began)
            say(f"  soak: {step + 1} of {STEPS}, {seen[-1] / 2**20:.1f} MB, {rate:.0f} requests/s")
            if time.monotonic() - began > LIMIT:
                say("  soak: out of time, stopped early")
                break
    return seen


# -- a whole server ----------------------------------------------------------------------------------------------------


def mixed(root: Path, minutes: float) -> list[Row]:
    """A server with a camera and a recorder, asked in turns by robots of every kind; resident memory after each turn.

    A turn is some seconds each of: callers without and with pictures, episodes that change, deadlines that cannot be
    met, requests that are refused, more than the server can do, and many that hang up.
    """
    export = write_export(root / "mixed", heavy=False, cameras=("image",))
    body = STATE | {"image": picture("JPEG", (SIDE, SIDE))}
    server = reflex(export, "--record", str(root / "recorded"), "--max-queue", "200", ready=body)
    seen: list[float] = []
    probes: list[float] = []
    answers, turn, end = 0, 0, time.monotonic() + 60.0 * minutes
    try:
        while time.monotonic() < end or len(seen) < 3:
            for job in _turn(body, turn):
                answered = server.load(probe="/health", **job)
                answers += answered.requests + answered.failed
                probes += answered.probes
            turn += 1
            seen.append(_resident(server))
            say(f"  mixed soak: turn {turn}, {seen[-1]:.1f} MB, {answers:,} answers")
        time.sleep(QUIET)
        idle = _resident(server)
    finally:
        server.stop()
    case = f"mixed soak, {minutes:g} min, {answers:,} answers in {turn} turns"
    after = max(1, len(seen) // 10)
    return [
        row(case, "resident memory after the first tenth", [seen[after - 1]], "MB"),
        row(case, "growth from the first tenth to the last turn", [seen[-1] - seen[after - 1]], "MB", most=8.0),
        row(case, "largest over the first tenth's", [max(seen) - seen[after - 1]], "MB", most=32.0),
        row(case, f"resident memory {QUIET:g} s after the last turn", [idle], "MB"),
        row(case, "/health p99 throughout", [quantile(probes, 0.99) * 1e3], "ms"),
    ]


def _turn(body: dict[str, Any], turn: int) -> Iterator[dict[str, Any]]:
    """The jobs of one turn. Episodes have other names in each."""
    named = {"body": body | {"robot_id": f"robot-{turn}"}}
    yield {"callers": 32, "seconds": 2.0, "body": body}
    yield {"callers": 8, "seconds": 2.0, "episodes": 8, **named}
    yield {"callers": 64, "seconds": 2.0, "body": body | {"deadline_ms": 2.0}}  # most are refused or expire
    yield {"callers": 8, "seconds": 1.0, "body": {"state": [1.0]}}  # 422
    yield {"callers": 300, "seconds": 2.0, "body": body | {"deadline_ms": 200.0}}  # more than the queue takes
    yield {"callers": 128, "seconds": 1.0, "warm": 0.0, "body": body}  # the load generator leaves without its answers


def _resident(server: Server) -> float:
    return sum(psutil.Process(pid).memory_info().rss for pid in server.pids()) / 2**20
