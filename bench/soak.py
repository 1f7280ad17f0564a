"""A million requests through a `Batcher` in process: memory must not grow."""

from __future__ import annotations

import asyncio
import gc
import time

import psutil

from bench.report import Row, row, say
from reflex_runtime.core.request import Request
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.processors.fake import FakeProcessor

REQUESTS, CALLERS, STEPS = 1_000_000, 64, 10
LIMIT = 300.0  # seconds


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
    processor = FakeProcessor(0.0, 0.0, lambda seconds: None)
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
            processor.calls.clear()
            gc.collect()
            seen.append(process.memory_info().rss)
            rate = (step + 1) * share * CALLERS / (time.monotonic() - began)
            say(f"  soak: {step + 1} of {STEPS}, {seen[-1] / 2**20:.1f} MB, {rate:.0f} requests/s")
            if time.monotonic() - began > LIMIT:
                say("  soak: out of time, stopped early")
                break
    return seen
