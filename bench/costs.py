"""What a small request costs, stage by stage: servers that do one thing more each, asked in turns (docs/costs.md)."""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

from bench.apps.ablated import STAGES
from bench.load import Answered
from bench.report import Row, row, say
from bench.servers import Server, hello, reflex, running
from reflex_runtime.core.batch import Done
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.order import Shares
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.statistics import Rate
from reflex_runtime.core.think_times import Gathering, ThinkTimes
from reflex_runtime.core.time_cost import Backlog, Evidence, TimeCost
from reflex_runtime.settings import ServeConfig

HELLO = "bare ASGI hello"
REFLEX = "reflex"
FLOOR = ("json", "scheduler", "model")  # what is left without promises, see `bench.apps.floor`
FIXED, MARGINAL, AWAY = 0.0001, 0.00001, 0.0003  # seconds of a batch, of each member, and until callers ask again
SIZES = (1, 8, 32)  # of batches, for the scheduler alone


def ablated(export: Path, stage: str) -> Server:
    """`reflex serve` with the stages up to this one."""
    return Server(stage, ["-m", "bench.apps.ablated", str(export), "PORT", stage])


def floor(export: Path, stage: str) -> Server:
    """The least that a server does up to this stage."""
    return Server(f"least: {stage}", ["-m", "bench.apps.floor", str(export), "PORT", stage])


def costs(tiny: Path, scale: float) -> list[Row]:
    """CPU of the server per request by stage: differences of neighbours within a round, with 32 callers and with one.

    The last stage replaces the one before: with it batches run on the device thread, which brief ones do not.
    """
    found: dict[tuple[str, int], list[Answered]] = defaultdict(list)
    plain = (hello(tiny), reflex(tiny), *(floor(tiny, stage) for stage in FLOOR))
    with running(*plain, *(ablated(tiny, stage) for stage in STAGES)) as servers:
        for i in range(rounds := max(3, round(5 * scale))):
            say(f"  costs: round {i + 1} of {rounds}")
            for server in servers[:: -1 if i % 2 else 1]:
                for callers in (32, 1):
                    found[server.name, callers].append(server.load(callers=callers, seconds=max(0.3, 0.8 * scale)))
    return [line for callers in (32, 1) for line in _rows(found, callers)] + alone(scale) + parts(scale)


def alone(scale: float) -> list[Row]:
    """The scheduler alone, with the settings of `reflex serve`: CPU and function calls per request, in virtual time."""
    cycles = {n: _cycle(n) for n in SIZES}
    cpu: dict[int, list[float]] = defaultdict(list)
    gc.collect()
    gc.disable()
    try:
        for _ in range(max(3, round(15 * scale))):
            for n, cycle in cycles.items():
                times = 1 + round(200 * scale / n)
                began = time.thread_time()
                for _ in range(times):
                    cycle()
                cpu[n].append((time.thread_time() - began) / times / n * 1e6)
    finally:
        gc.enable()
    rows: list[Row] = []
    for n, cycle in cycles.items():
        case = f"the scheduler alone, batches of {n}"
        rows.append(row(case, "CPU per request", cpu[n], "us"))
        rows.append(row(case, "function calls per request", [_calls(cycle) / n], ""))
    return rows


def _nothing(*_: Any) -> None: ...


# What may be left out of the scheduler without another decision in the loop of `_cycle`: methods that do nothing then.
PARTS: dict[str, list[tuple[type, str]]] = {
    "when each client usually returns (holds)": [(ThinkTimes, "enters"), (ThinkTimes, "answered")],
    "fair shares of clients and partitions": [(Shares, "enter"), (Shares, "leave"), (Shares, "charge")],
    "seconds waiting in the queue (its bound)": [(Backlog, "add"), (Backlog, "remove")],
    "what batches cost is learned": [(TimeCost, "observe")],
    "estimates that refuse are renewed": [(Evidence, "scheduled"), (Evidence, "returned")],
    "rate of arrivals, whether gathering pays": [(Rate, "arrive"), (Gathering, "answered"), (Gathering, "left")],
    "planned budget": [(Planner, "arrived")],
}


def parts(scale: float) -> list[Row]:
    """CPU per request of parts of the scheduler: with all of them, less the same without one, in the same round."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    gc.collect()
    gc.disable()
    try:
        for _ in range(max(3, round(15 * scale))):
            for n in (1, 32):
                whole = _seconds(n, scale, [])
                found["all", n].append(whole * 1e6)
                for part, methods in PARTS.items():
                    found[part, n].append((whole - _seconds(n, scale, methods)) * 1e6)
    finally:
        gc.enable()
    return [row(f"the scheduler alone, batches of {n}", part, us, "us") for (part, n), us in found.items()]


def _seconds(n: int, scale: float, without: list[tuple[type, str]]) -> float:
    """CPU per request. without: methods that do nothing."""
    cycle = _cycle(n)  # it learns with all of them
    with ExitStack() as stack:
        for owner, name in without:
            stack.enter_context(mock.patch.object(owner, name, _nothing))
        times = 1 + round(200 * scale / n)
        began = time.thread_time()
        for _ in range(times):
            cycle()
        return (time.thread_time() - began) / times / n


def serving_group() -> GroupConfig:
    """The group of a policy, as `reflex serve` makes it by default."""
    config = ServeConfig()
    flush = FlushPolicy.window(None, inf, config.max_batch_size)
    return GroupConfig("prod", flush, config.max_queue, max_queued_seconds=config.max_queue_s, controller=Planner())


def _cycle(n: int) -> Callable[[], None]:
    """What makes n callers ask once, and answers them, with a cost model that has learned."""
    scheduler, now = Scheduler([serving_group()]), 0.0

    def ask(some: int) -> None:
        nonlocal now
        for client in range(some):
            scheduler.submit(Request(group="prod", partition="p", client=client % n, shape="s", cost_class="c"), now)
        while not scheduler.idle:
            batch = scheduler.next_batch(now)
            if batch is None:
                now = max(now, scheduler.wake_at())
                continue
            elapsed = FIXED + MARGINAL * len(batch)
            now += elapsed
            scheduler.complete(batch, [Done()] * len(batch), elapsed, now)
        scheduler.take_events()
        now += AWAY

    for some in (1, 2, 4, 8, *[n] * 50):
        ask(some)
    return lambda: ask(n)


def _calls(action: Callable[[], None]) -> int:
    """Function calls that it makes, those of built-in functions included."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def _rows(found: dict[tuple[str, int], list[Answered]], callers: int) -> list[Row]:
    case = f"a small request, {callers} caller{'s' * (callers > 1)}"

    def cpu(name: str) -> list[float]:
        return [a.cpu / a.requests * 1e6 for a in found[name, callers]]

    rows = [row(case, STAGES["http"][0], cpu("http"), "us")]
    for before, stage in pairwise(STAGES):
        more = [b - a for a, b in zip(cpu(before), cpu(stage), strict=True)]
        rows.append(row(case, STAGES[stage][0], more, "us"))
    rows.append(row(case, "all but the hand-over", cpu("sinks"), "us"))
    for name in (HELLO, *(f"least: {stage}" for stage in FLOOR), REFLEX):
        times = [mine / bare for mine, bare in zip(cpu(name), cpu(HELLO), strict=True)]
        rows.append(row(case, f"CPU, {name}", cpu(name), "us"))
        rows.append(row(case, f"CPU over that of {HELLO}, {name}", times, "x", most=1.7 if name == REFLEX else None))
        p50 = [a.quantile(0.5) * 1e3 for a in found[name, callers]]
        rows.append(row(case, f"p50, {name}", p50, "ms", most=0.35 if (name, callers) == (REFLEX, 1) else None))
    return rows
