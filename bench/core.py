"""The scheduler alone, in process: no thread, no loop, virtual service times. In CPU time: neighbours count less."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

from bench.report import Row, row, say
from reflex_runtime.core import scheduler as scheduler_module
from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.forming import Former
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.statistics import percentile
from reflex_runtime.settings import ServeConfig

FIXED, MARGINAL = 0.020, 0.002  # seconds of a batch of n: FIXED + MARGINAL · n
WAITING = 64


def _scheduler(size: int = 64) -> tuple[Scheduler, float]:
    """A scheduler whose cost model has learned, and the time it is there."""
    scheduler = Scheduler([GroupConfig(flush=FlushPolicy.window(0.200, 0.005, size))])
    now = 0.0
    for n in (1, 2, 4, 8, 16, 32) * 20:
        for i in range(n):
            scheduler.submit(Request(client=i), now)
        while (batch := scheduler.next_batch(now)) is not None:
            elapsed = FIXED + MARGINAL * len(batch)
            now += elapsed
            scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
        now += 1.0
    scheduler.take_events()
    return scheduler, now


def _per_request(batches: int) -> float:
    """Seconds per request of submit, next_batch, complete and take_events while 64 wait; batches of 16."""
    scheduler, now = _scheduler(16)
    requests = [Request(client=i % 32) for i in range(WAITING)]
    for request in requests:
        scheduler.submit(request, now)
    asked = 0
    gc.collect()
    began = time.thread_time()
    for _ in range(batches):
        batch = scheduler.next_batch(now)
        assert batch is not None
        elapsed = FIXED + MARGINAL * len(batch)
        now += elapsed
        scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
        for _ in batch.grants:
            scheduler.submit(Request(client=asked % 32), now)
            asked += 1
        scheduler.take_events()
    return (time.thread_time() - began) / asked


def _next_batch(callers: int, rounds: int) -> float:
    """Seconds of `next_batch` a member, where so many callers come back together, by the settings of `reflex serve`."""
    scheduler, now, spent = Scheduler([ServeConfig().group("default")]), 0.0, 0.0
    for turn in range(-100, rounds):  # the first ones teach it, and callers come together
        for i in range(callers):
            scheduler.submit(Request(client=i), now)
        while not scheduler.idle:
            began = time.thread_time()
            batch = scheduler.next_batch(now)
            spent += (time.thread_time() - began) * (turn >= 0)
            if batch is None:
                now = scheduler.wake_at()
                continue
            elapsed = 0.016 + 0.0004 * len(batch)
            now += elapsed
            scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
        scheduler.take_events()
        now += 0.004 + 0.0005 * (turn % 7)
    return spent / (rounds * callers)


class _Timed(Former):
    """Notes how long a decision takes: from the question to the answer of `form`, before anything has changed."""

    seconds: ClassVar[list[float]] = []

    def __init__(self, *args: Any) -> None:
        self._began = time.thread_time()
        super().__init__(*args)

    def form(self) -> Batch | None:
        batch = super().form()
        self.seconds.append(time.thread_time() - self._began)
        return batch


def _decisions(limit: float | None, count: int) -> Iterator[tuple[float, float]]:
    """Seconds of single decisions with 64 candidates, and of carrying them out.

    limit: middle of their time limits in seconds, None for none. Carrying out is the rest of `next_batch`: the batch
    and its tickets' states, and settling those that are shed.
    """
    with mock.patch.object(scheduler_module, "Former", _Timed):
        for whole in _batches(limit, count):
            decided = _Timed.seconds[0]
            yield decided, whole - decided


def _batches(limit: float | None, count: int) -> Iterator[float]:
    """Seconds of each first `next_batch` with 64 candidates; `_Timed.seconds` begins with its decision."""
    scheduler, now = _scheduler()
    for _ in range(count):
        for i in range(WAITING):
            spread = None if limit is None else limit * (0.5 + i / WAITING)
            scheduler.submit(Request(client=i, time_limit=spread), now)
        _Timed.seconds.clear()
        began = time.thread_time()
        batch = scheduler.next_batch(now)
        yield time.thread_time() - began
        while batch is not None:
            elapsed = FIXED + MARGINAL * len(batch)
            now += elapsed
            scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
            batch = scheduler.next_batch(now)
        now += 10.0
        scheduler.take_events()
        assert scheduler.idle


def _holds(count: int) -> Iterator[float]:
    """Seconds of single decisions that hold: one of 64 clients is back, the others are expected."""
    scheduler, now = _scheduler()
    for _ in range(40):
        for i in range(WAITING):
            scheduler.submit(Request(client=i), now)
        now = _run(scheduler, now) + 0.001
    for k in range(count):
        scheduler.submit(Request(client=k % WAITING), now)
        began = time.thread_time()
        batch = scheduler.next_batch(now)
        yield time.thread_time() - began
        if batch is None:
            for i in range(WAITING):
                if i != k % WAITING:
                    scheduler.submit(Request(client=i), now + 0.0002)
            now += 0.0002
        now = _run(scheduler, now) + 0.001
        scheduler.take_events()


def _run(scheduler: Scheduler, now: float) -> float:
    """Until nothing is left; returns when that is."""
    while not scheduler.idle:
        batch = scheduler.next_batch(now)
        if batch is None:
            now = scheduler.wake_at()
            continue
        elapsed = FIXED + MARGINAL * len(batch)
        now += elapsed
        scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
    return now


def _among(waiting: int, partitions: int, batches: int) -> float:
    """Seconds per request while so many wait in so many partitions, each of another client; batches of at most 8."""
    flush = FlushPolicy.window(10.0, 0.0, 8)
    scheduler = Scheduler([GroupConfig(flush=flush, capacity=waiting + 1, promote_after=1e9)])
    for i in range(waiting):
        scheduler.submit(Request(partition=i % partitions, client=i), 0.0)
    scheduler.take_events()
    scheduler.wake_at()  # as a driver asks after every input; else the first batch would do it for all of them
    gc.collect()
    gc.freeze()  # what waits is not looked through again and again, as it is not in a server either
    now, asked = 0.0, waiting
    began = time.thread_time()
    for _ in range(batches):
        batch = scheduler.next_batch(now)
        assert batch is not None
        elapsed = FIXED + MARGINAL * len(batch)
        now += elapsed
        scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
        for ticket in batch.grants:
            scheduler.submit(Request(partition=ticket.request.partition, client=asked), now)
            asked += 1
        scheduler.take_events()
    spent = time.thread_time() - began
    gc.unfreeze()
    return spent / (asked - waiting)


def scaling(scale: float) -> list[Row]:
    """What a request costs the scheduler when many wait, and in many partitions, against 100 in one."""
    cases = [(n, 1) for n in (100, 1_000, 10_000, 100_000)] + [(8 * n, n) for n in (10, 100, 1_000, 10_000)]
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    batches = int(1500 * scale) + 100
    for i in range(rounds := max(3, int(5 * scale))):
        say(f"  scaling: round {i + 1} of {rounds}")
        for case in cases:
            times[case].append(_among(*case, batches) * 1e6)
    rows = [row("scaling", f"per request, {n} waiting in {p} partition(s)", t, "us") for (n, p), t in times.items()]
    for case, of in (((100_000, 1), (100, 1)), ((80_000, 10_000), (80, 10)), ((80_000, 10_000), (100_000, 1))):
        ratios = [mine / other for mine, other in zip(times[case], times[of], strict=True)]
        name = f"{case[0]} waiting in {case[1]} ÷ {of[0]} in {of[1]}"
        rows.append(row("scaling", name, ratios, "×", most=1.3))
    return rows


def core(scale: float) -> list[Row]:
    """Microseconds of the scheduler's own work. Rounds of all kinds take turns."""
    requests: list[float] = []
    members: dict[int, list[float]] = {32: [], 128: []}
    kinds: dict[str, list[list[float]]] = {name: [] for name in ("plain", "plain, out", "risk", "risk, out", "returns")}
    rounds = max(3, int(15 * scale))
    for i in range(rounds):
        if i % 5 == 0:
            say(f"  core: round {i + 1} of {rounds}")
        requests.append(_per_request(int(300 * scale) + 20) * 1e6)
        for callers, times in members.items():
            times.append(_next_batch(callers, int(100 * scale) + 10) * 1e6)
        count = int(60 * scale) + 10
        for kind, limit in (("plain", None), ("risk", 0.120)):
            decided, carried_out = zip(*_decisions(limit, count), strict=True)
            kinds[kind].append(list(decided))
            kinds[f"{kind}, out"].append(list(carried_out))
        kinds["returns"].append(list(_holds(count)))

    def at(kind: str, q: float) -> list[float]:
        return [percentile(sorted(times), q) * 1e6 for times in kinds[kind]]

    return [
        row("core", "per request, 64 waiting, batches of 16", requests, "us", most=10.0),
        row("core", "next_batch, a member, 32 callers come back together", members[32], "us", most=2.5),
        row("core", "next_batch, a member, 128 callers come back together", members[128], "us", most=2.0),
        row("core", "deciding (Former.form), 64 candidates, deadlines at risk, p50", at("risk", 0.5), "us", most=100.0),
        row("core", "deciding (Former.form), 64 candidates, deadlines at risk, p90", at("risk", 0.9), "us"),
        row("core", "carrying it out: batch of about 40, the hopeless settled, p50", at("risk, out", 0.5), "us"),
        row("core", "deciding (Former.form), 64 candidates, no deadline, p50", at("plain", 0.5), "us"),
        row("core", "carrying it out: batch of 64, p50", at("plain, out", 0.5), "us"),
        row("core", "decision that holds for 63 expected back, p50", at("returns", 0.5), "us", most=200.0),
    ]
