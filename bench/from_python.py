"""The library from a caller's side: `Batcher`, `@batched` on both kinds of functions, and what one writes by hand.

One function, asked by callers that ask again as soon as they are answered: coroutines of one loop, or threads. A
function that takes no time shows the CPU of an item; one that sleeps a + b·n, as a model that releases the GIL, shows
whether all callers share one call. All ways take turns within every round. CPU is that of the process, callers
included.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.report import Row, row, say
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.run.batched import batched
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import FunctionProcessor

Ask = Callable[[int], Any]
SIZE, HOLD = 64, 0.005  # most items in a call, and the longest hold in seconds: the same for all
FULL = {8: 7.5, 32: 28.0}  # callers, and the mean items of a call that count as full groups
PRACTICE = 50  # calls before it is measured, and while it is
STEPS = (0.0, 0.002, 0.010)  # seconds of a call with all callers; half of it is a, the part that does not grow


@dataclass
class Found:
    """One measurement: CPU seconds per item, items per call, items a second."""

    cpu: float
    size: float
    rate: float


class Model:
    """The function under test. calls, items: how much it did."""

    def __init__(self, step: float, callers: int) -> None:
        self._fixed, self._each = step / 2, step / 2 / callers
        self.calls = self.items = 0

    def _count(self, items: list[int]) -> float:
        self.calls += 1
        self.items += len(items)
        return self._fixed + self._each * len(items)

    def __call__(self, items: list[int]) -> list[int]:
        seconds = self._count(items)
        if seconds > 0.0:
            time.sleep(seconds)
        return items

    async def awaited(self, items: list[int]) -> list[int]:
        """The same, awaited."""
        seconds = self._count(items)
        if seconds > 0.0:
            await asyncio.sleep(seconds)
        return items


# -- ways to batch -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def by_hand(model: Model) -> AsyncIterator[Ask]:
    """What one writes on asyncio: a list, and a task that runs what is in it on a thread, then answers."""
    waiting: list[tuple[int, asyncio.Future[int]]] = []
    news = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(item: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = loop.create_future()
        waiting.append((item, future))
        news.set()
        return future

    async def work() -> None:
        while await news.wait():
            members = waiting[:SIZE]
            del waiting[:SIZE]
            if not waiting:
                news.clear()
            results = await loop.run_in_executor(pool, model, [item for item, _ in members])
            for (_, future), result in zip(members, results, strict=True):
                if not future.done():
                    future.set_result(result)

    with ThreadPoolExecutor(1) as pool:
        worker = asyncio.create_task(work())
        yield ask
        worker.cancel()


@asynccontextmanager
async def batcher(model: Model, any_thread: bool = False) -> AsyncIterator[Ask]:
    """`Batcher.run`; each caller is a client. any_thread: brief calls may be made on the loop."""
    flush = FlushPolicy(max_batch_size=SIZE, returns=HOLD, shed=True)
    processor = FunctionProcessor(model, any_thread=any_thread)

    async with Batcher({"default": processor}, [GroupConfig(flush=flush)]) as made:

        def ask(item: int) -> Awaitable[Any]:
            return made.run(Request(item, client=item))

        yield ask


@asynccontextmanager
async def on_def(model: Model) -> AsyncIterator[Ask]:
    """`@batched` on a `def`, awaited with `aio`."""
    made = batched(max_batch_size=SIZE, max_latency=HOLD)(model)
    yield made.aio
    await asyncio.to_thread(made.close)


@asynccontextmanager
async def on_async_def(model: Model) -> AsyncIterator[Ask]:
    """`@batched` on an `async def`."""
    made: Any = batched(max_batch_size=SIZE, max_latency=HOLD)(model.awaited)
    yield made
    await made.close()


@contextmanager
def queue_thread(model: Model) -> Iterator[Ask]:
    """What one writes for threads: a queue, a thread that takes what is there, an event per item."""
    waiting: queue.SimpleQueue[tuple[int, list[int], threading.Event] | None] = queue.SimpleQueue()

    def ask(item: int) -> int:
        answer: list[int] = []
        done = threading.Event()
        waiting.put((item, answer, done))
        done.wait()
        return answer[0]

    def work() -> None:
        while (first := waiting.get()) is not None:
            members = [first]
            while len(members) < SIZE and not waiting.empty():
                if (more := waiting.get()) is None:
                    return
                members.append(more)
            results = model([item for item, _, _ in members])
            for (_, answer, done), result in zip(members, results, strict=True):
                answer.append(result)
                done.set()

    thread = threading.Thread(target=work)
    thread.start()
    yield ask
    waiting.put(None)
    thread.join()


@contextmanager
def on_def_from_threads(model: Model) -> Iterator[Ask]:
    """`@batched` on a `def`, called from threads."""
    made = batched(max_batch_size=SIZE, max_latency=HOLD)(model)
    yield made
    made.close()


FROM_TASKS: dict[str, Any] = {
    "by hand": by_hand,
    "Batcher": batcher,
    "Batcher, any_thread": partial(batcher, any_thread=True),
    "@batched def": on_def,
    "@batched async def": on_async_def,
}
FROM_THREADS: dict[str, Any] = {"queue and thread by hand": queue_thread, "@batched def": on_def_from_threads}
CALLERS_OF = {"tasks": FROM_TASKS, "new tasks": FROM_TASKS, "threads": FROM_THREADS}


# -- callers -----------------------------------------------------------------------------------------------------------


def _mark(model: Model) -> tuple[float, int, int, float]:
    return time.process_time(), model.calls, model.items, time.perf_counter()


def _since(before: tuple[float, int, int, float], model: Model) -> Found:
    cpu, calls, items, seconds = (b - a for a, b in zip(before, _mark(model), strict=True))
    return Found(cpu / items, items / calls, items / seconds)


async def _tasks(way: Any, model: Model, callers: int, new: bool, practice: float, seconds: float) -> Found:
    """Callers that are tasks. new: each item has a task of its own, as every request of a web server has."""
    over = False

    async def one(item: int, ask: Ask) -> None:
        await ask(item)

    async def caller(item: int, ask: Ask) -> None:
        while not over:
            await (asyncio.create_task(one(item, ask)) if new else ask(item))

    async with way(model) as ask:
        tasks = [asyncio.create_task(caller(i, ask)) for i in range(callers)]
        await asyncio.sleep(practice)
        before = _mark(model)
        await asyncio.sleep(seconds)
        found = _since(before, model)
        over = True
        await asyncio.gather(*tasks)
    return found


def _threads(way: Any, model: Model, callers: int, practice: float, seconds: float) -> Found:
    """Callers that are threads."""
    over = threading.Event()

    def caller(item: int, ask: Ask) -> None:
        while not over.is_set():
            ask(item)

    with way(model) as ask:
        threads = [threading.Thread(target=caller, args=(i, ask)) for i in range(callers)]
        for thread in threads:
            thread.start()
        time.sleep(practice)
        before = _mark(model)
        time.sleep(seconds)
        found = _since(before, model)
        over.set()
        for thread in threads:
            thread.join()
    return found


def _measure(who: str, way: Any, step: float, callers: int, scale: float) -> Found:
    model = Model(step, callers)
    gc.collect()
    practice, seconds = (0.1, 0.3 * scale) if step == 0.0 else (PRACTICE * step, PRACTICE * step * scale)
    if who == "threads":
        return _threads(way, model, callers, practice, seconds)
    return asyncio.run(_tasks(way, model, callers, who == "new tasks", practice, seconds))


def from_python(scale: float) -> list[Row]:
    """Rows for every way, number of callers and time of a call."""
    kinds = [(who, name, way) for who, ways in CALLERS_OF.items() for name, way in ways.items()]
    found: dict[tuple[float, int, str, str], list[Found]] = {}
    rounds = max(2, int(4 * scale))
    for number in range(rounds):
        say(f"  library: round {number + 1} of {rounds}")
        for step, callers in itertools.product(STEPS, FULL):
            for who, name, way in kinds if number % 2 else reversed(kinds):
                found.setdefault((step, callers, who, name), []).append(_measure(who, way, step, callers, scale))
    rows: list[Row] = []
    for step, callers, (who, ways) in itertools.product(STEPS, FULL, CALLERS_OF.items()):
        of = {name: found[step, callers, who, name] for name in ways}
        usual = found[step, callers, "tasks" if who == "threads" else who, "Batcher"]
        what = f"{callers} {who}, calls of {step * 1e3:g} ms"
        rows += _costs(what, of, usual)
        if step > 0.0:
            rows += _groups(what, of, FULL[callers])
    return rows


def _costs(what: str, of: dict[str, list[Found]], usual: list[Found]) -> list[Row]:
    """CPU per item. usual: of `Batcher`, for as many callers that are tasks."""
    rows = []
    for name, ways in of.items():
        rows.append(row("library", f"{what}: CPU per item, {name}", [f.cpu * 1e6 for f in ways], "us"))
        if name.startswith("Batcher"):
            ratios = [mine.cpu / other.cpu for mine, other in zip(ways, of["by hand"], strict=True)]
            rows.append(row("library", f"{what}: CPU per item, {name} over by hand", ratios, "x", most=1.2))
        if name.startswith("@batched"):
            ratios = [mine.cpu / other.cpu for mine, other in zip(ways, usual, strict=True)]
            rows.append(row("library", f"{what}: CPU per item, {name} over Batcher", ratios, "x", most=1.2))
    return rows


def _groups(what: str, of: dict[str, list[Found]], full: float) -> list[Row]:
    rows = []
    hand, *ours = of
    for name in ours:
        rows.append(row("library", f"{what}: items per call, {name}", [f.size for f in of[name]], "", least=full))
        ratios = [mine.rate / other.rate for mine, other in zip(of[name], of[hand], strict=True)]
        rows.append(row("library", f"{what}: items a second, {name} over {hand}", ratios, "x"))
    return rows
