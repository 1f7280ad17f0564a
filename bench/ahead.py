"""Whether the device waits for Python: full batches formed while the one before runs, against forming each afterwards.

The processor sleeps in C without the interpreter's lock, as a GPU or a native library computes. Its time is what it
really took, as measured for each call on a machine that does nothing else. In `quarters` a batch holds a quarter of the
callers, so that a full batch always waits. In `together` all callers fit into one batch: then nobody waits while it
runs, and forming ahead can change nothing; it is the control.
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.report import Row, row, say
from reflex_runtime.core.batch import Batch
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import BaseProcessor

WARM_UP = 0.4  # seconds
PRECISE = 29, 1  # prctl(PR_SET_TIMERSLACK, 1 ns): by default a sleep ends up to 50 us late

_libc = ctypes.CDLL(None)


class Asleep(BaseProcessor):
    """Takes so many seconds, whatever the batch. took: of each call, in the device thread's view."""

    def __init__(self, seconds: float) -> None:
        self._microseconds = round(1e6 * seconds)
        self.took: list[float] = []
        self.sizes: list[int] = []

    def start(self) -> None:
        _libc.prctl(*PRECISE, 0, 0, 0)

    def run(self, batch: Batch) -> Sequence[Any]:
        began = time.perf_counter()
        _libc.usleep(self._microseconds)
        self.took.append(time.perf_counter() - began)
        self.sizes.append(len(batch))
        return [None] * len(batch)


class Measured:
    """One run. busy: share of the time that the processor computed. rate: requests a second. p50: milliseconds."""

    def __init__(self, busy: float, rate: float, p50: float, cpu: float) -> None:
        self.busy, self.rate, self.p50, self.cpu = busy, rate, p50, cpu


async def _closed(callers: int, size: int, seconds: float, duration: float, ahead: bool) -> Measured:
    processor = Asleep(seconds)
    group = GroupConfig(flush=FlushPolicy.window(0.100, 0.005, size))
    batcher = Batcher({"default": processor}, [group])
    if not ahead:
        batcher.device._ahead = None
    latencies: list[float] = []
    stopped = False

    async def ask(client: int) -> None:
        request = Request(client=client)
        while not stopped:
            began = time.perf_counter()
            await batcher.run(request)
            latencies.append(time.perf_counter() - began)

    async with batcher:
        tasks = [asyncio.create_task(ask(i)) for i in range(callers)]
        await asyncio.sleep(WARM_UP)
        for kept in (latencies, processor.took, processor.sizes):
            kept.clear()
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(duration)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        # The shortest calls ended without a wait for the interpreter's lock: that is what the processor takes.
        calls, took = len(processor.took), statistics.quantiles(processor.took, n=10)[0]
        measured = Measured(calls * took / wall, len(latencies) / wall, 1e3 * statistics.median(latencies), cpu / wall)
        stopped = True
        await asyncio.gather(*tasks)
    return measured


def ahead(scale: float) -> list[Row]:
    """Every row. Old and new take turns within a round."""
    cases = [(c, c // 4, t) for t in (0.0006, 0.001, 0.005) for c in (32, 128)]
    cases += [(1, 256, 0.001), (32, 256, 0.001), (128, 256, 0.005)]
    found: dict[tuple[int, int, float], list[tuple[Measured, Measured]]] = {case: [] for case in cases}
    rounds, duration = max(3, int(5 * scale)), 0.4 + 0.4 * scale
    for i in range(rounds):
        say(f"  ahead: round {i + 1} of {rounds}")
        for case in cases:
            order = (False, True) if i % 2 else (True, False)
            pair = {how: asyncio.run(_closed(*case, duration, how)) for how in order}
            found[case].append((pair[False], pair[True]))
    rows: list[Row] = []
    for (callers, size, seconds), pairs in found.items():
        name = f"{callers} callers, {'quarters' if size < callers else 'together'}, {1e3 * seconds:g} ms"
        bar = None if size >= callers else 0.9
        rows.append(row("ahead", f"{name}: busy", [new.busy for _, new in pairs], "", least=bar))
        rows.append(row("ahead", f"{name}: busy, formed afterwards", [old.busy for old, _ in pairs], ""))
        rows.append(row("ahead", f"{name}: requests/s ÷ formed afterwards", [n.rate / o.rate for o, n in pairs], "×"))
        rows.append(row("ahead", f"{name}: p50 ÷ formed afterwards", [n.p50 / o.p50 for o, n in pairs], "×"))
        rows.append(row("ahead", f"{name}: CPU, cores", [new.cpu for _, new in pairs], ""))
    return rows
