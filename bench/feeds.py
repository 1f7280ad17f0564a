"""Many feeds, one processor: what the coordinator costs, whether it keeps a model busy, whether it is fair.

The rivals take turns within every round. A processor that does nothing shows the cost of batching itself; CPU time is
that of the whole process, so that threads which wake each other for nothing are paid for.
"""

from __future__ import annotations

import gc
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from bench.report import Row, row, say
from reflex_runtime.core.errors import Rejected
from reflex_runtime.core.statistics import percentile
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.runtime.pipeline import Pipeline, SourceError
from reflex_runtime.feeds.runtime.runtime import Runtime
from reflex_runtime.feeds.sources.shapes import DETECTOR, Shapes
from reflex_runtime.run.batched import batched
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchEntry

FEEDS = 8
AHEAD = 256  # most unanswered futures


def feeds(scale: float) -> list[Row]:
    """Every row about feeds."""
    rows = [*_latency(scale), *_detector(scale), *_fairness(scale), *_idle(scale)]
    return [*rows, *_overhead(scale)]  # last: some rivals leave threads behind that never rest


class Nothing:
    """A processor that does nothing."""

    id = "nothing"

    def on_start(self) -> None:
        return

    def process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        return [entry.sequence for entry in entries]

    def on_stop(self) -> None:
        return


# -- what batching costs -----------------------------------------------------------------------------------------------


class Rival(Protocol):
    """Something that batches blocking calls."""

    def ask(self, feed: str, item: int) -> Any: ...
    def close(self) -> None: ...


class Ours:
    """The coordinator."""

    def __init__(self) -> None:
        self._coordinator = BatchCoordinator(Nothing(), BatchConfig(max_batch_size=FEEDS, max_latency=0.005))
        self._handle = self._coordinator.start()

    def ask(self, feed: str, item: int) -> Any:
        return self._handle.submit_and_wait(feed, item, sequence=item)

    def close(self) -> None:
        self._coordinator.stop()


class QueueThread:
    """What one writes by hand: a bounded queue, a thread that collects by count and time, an event per caller."""

    def __init__(self, size: int = FEEDS, latency: float = 0.005) -> None:
        self._queue: queue.Queue[tuple[int, list[Any], threading.Event] | None] = queue.Queue(4 * size)
        self._size, self._latency = size, latency
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, feed: str, item: int) -> Any:
        answer: list[Any] = []
        done = threading.Event()
        self._queue.put_nowait((item, answer, done))
        if not done.wait(5.0):
            raise TimeoutError
        return answer[0]

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            members = [first]
            until = time.monotonic() + self._latency
            while len(members) < self._size:
                try:
                    more = self._queue.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if more is None:
                    return
                members.append(more)
            results = [item for item, _, _ in members]
            for (_, answer, done), result in zip(members, results, strict=True):
                answer.append(result)
                done.set()


class Decorated:
    """Our own `@batched`."""

    def __init__(self) -> None:
        @batched(max_batch_size=FEEDS, max_latency=0.005)
        def run(items: list[int]) -> list[int]:
            return items

        self._run = run

    def ask(self, feed: str, item: int) -> Any:
        return self._run(item)

    def close(self) -> None:
        self._run.close()


def _mixedbread() -> Callable[[], Rival] | None:
    """The package `batched`, when it is installed."""
    try:
        from batched import dynamically  # type: ignore[import-not-found]
    except ImportError:
        return None

    class Mixedbread:
        def __init__(self) -> None:
            @dynamically(batch_size=FEEDS, timeout_ms=5.0, small_batch_threshold=FEEDS)  # type: ignore[untyped-decorator]
            def run(items: list[int]) -> list[int]:
                return items

            self._run = run

        def ask(self, feed: str, item: int) -> Any:
            return self._run(item)

        def close(self) -> None:
            stop = getattr(self._run, "stop", None)
            if callable(stop):
                stop()

    return Mixedbread


def _torchrl() -> Callable[[], Rival] | None:
    """TorchRL's inference server in one process, when it is installed. Its items are dictionaries of tensors."""
    try:
        import torch  # type: ignore[import-not-found]
        from tensordict import TensorDict  # type: ignore[import-not-found]
        from torchrl.modules.inference_server import (  # type: ignore[import-not-found]
            InferenceServer,
            ThreadingTransport,
        )
    except ImportError:
        return None

    class TorchRL:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            transport = ThreadingTransport()
            self._server = InferenceServer(
                lambda batch: batch, transport, max_batch_size=FEEDS, min_batch_size=FEEDS, timeout=0.005
            )
            self._server.start()
            self._client = transport.client()

        def ask(self, feed: str, item: int) -> Any:
            return int(self._client(TensorDict({"n": torch.tensor(item)}, []))["n"])

        def close(self) -> None:
            self._server.shutdown()

    return TorchRL


def _overhead(scale: float) -> list[Row]:
    rounds = max(3, round(9 * scale))
    rows: list[Row] = []
    for size, bar in ((FEEDS, None), (64, 30_000)):
        say(f"  futures, batches of at most {size}")
        rates = [_futures(size, round(60_000 * scale)) for _ in range(rounds)]
        rows.append(row("feeds", f"submit, batches of at most {size}: items a second", rates, "/s", least=bar))
    rivals: dict[str, Callable[[], Rival]] = {"ours": Ours, "by hand": QueueThread, "@batched": Decorated}
    others = {"batched (PyPI)": _mixedbread(), "TorchRL": _torchrl()}
    rivals |= {name: rival for name, rival in others.items() if rival is not None}
    cpu: dict[str, list[float]] = {name: [] for name in rivals}
    pace: dict[str, list[float]] = {name: [] for name in rivals}
    for i in range(rounds):
        say(f"  submit_and_wait from {FEEDS} threads: round {i + 1} of {rounds}")
        order = list(rivals)[i % len(rivals) :] + list(rivals)[: i % len(rivals)]
        for name in order:
            seconds, used = _blocking(rivals[name], round(2_000 * scale))
            cpu[name].append(used * 1e6)
            pace[name].append(1.0 / seconds)
    for name in rivals:
        rows.append(row("feeds", f"{FEEDS} blocking threads, {name}: CPU per item", cpu[name], "us"))
        rows.append(row("feeds", f"{FEEDS} blocking threads, {name}: items a second", pace[name], "/s"))
    ratios = [a / b for a, b in zip(cpu["ours"], cpu["by hand"], strict=True)]
    rows.append(row("feeds", "submit_and_wait: CPU over a queue thread by hand", ratios, "x", most=1.3))
    return rows


def _futures(size: int, items: int) -> float:
    """Items a second through `submit`, one thread submitting for eight feeds with at most `AHEAD` unanswered."""
    config = BatchConfig(max_batch_size=size, max_latency=0.005, queue_capacity=AHEAD, max_in_flight_per_feed=0)
    names = [f"cam{i}" for i in range(FEEDS)]
    with BatchCoordinator(Nothing(), config) as handle:
        gc.collect()
        pending: deque[Future[Any]] = deque()
        answered = right = 0
        began = time.perf_counter()
        for i in range(items):
            pending.append(handle.submit(names[i % FEEDS], i, sequence=i))
            while len(pending) == AHEAD or (pending and i == items - 1):
                for _ in range(min(len(pending), AHEAD // 2)):
                    right += pending.popleft().result() == answered
                    answered += 1
        seconds = time.perf_counter() - began
    assert right == items, "an answer was wrong, or missing"
    return items / seconds


def _blocking(make: Callable[[], Rival], each: int) -> tuple[float, float]:
    """(seconds, CPU seconds) per item, of eight threads that ask and ask again."""
    rival = make()
    go = threading.Barrier(FEEDS + 1)
    right: list[int] = []

    def feed(name: str) -> None:
        go.wait()
        right.append(sum(rival.ask(name, i) == i for i in range(each)))

    threads = [threading.Thread(target=feed, args=(f"cam{i}",)) for i in range(FEEDS)]
    for thread in threads:
        thread.start()
    go.wait()
    began, used = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    rival.close()
    assert sum(right) == each * FEEDS, "an answer was wrong, or missing"
    return seconds / (each * FEEDS), used / (each * FEEDS)


def _latency(scale: float) -> list[Row]:
    """What one feed waits beyond the processor, which is idle whenever it asks."""
    medians, tails = [], []
    for _ in range(max(3, round(9 * scale))):
        with BatchCoordinator(Nothing(), BatchConfig(max_latency=0.050)) as handle:
            times = []
            for i in range(round(2_000 * scale)):
                began = time.perf_counter()
                handle.submit_and_wait("cam", i)
                times.append(time.perf_counter() - began)
        times.sort()
        medians.append(1e3 * statistics.median(times))
        tails.append(1e3 * percentile(times, 0.99))
    return [
        row("feeds", "one feed, idle processor: added latency, p50", medians, "ms", most=0.3),
        row("feeds", "one feed, idle processor: added latency, p99", tails, "ms"),
    ]


# -- a real model ------------------------------------------------------------------------------------------------------


def _detector(scale: float) -> list[Row]:
    """Eight closed-loop feeds on the bundled detector, against the detector called by hand with as many frames.

    With batches of half the feeds the processor works on one half while the other comes back; with all in one batch it
    waits for the callers.
    """
    rounds, seconds = max(3, round(7 * scale)), max(1.0, 4.0 * scale)
    pictures = [Shapes(seed=i).picture(0) for i in range(FEEDS)]
    sizes = (FEEDS // 2, FEEDS)
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    shares: dict[int, list[float]] = {size: [] for size in sizes}
    reached: dict[int, list[float]] = {size: [] for size in sizes}
    pays: list[float] = []
    for i in range(rounds):
        say(f"  detector: round {i + 1} of {rounds}")
        for size in sizes if i % 2 else reversed(sizes):
            rate, mean = _closed_loop(pictures, size, seconds)
            rates[size].append(rate)
            reached[size].append(mean)
            shares[size].append(rate / _by_hand(pictures[: round(mean)], seconds))
        pays.append(rates[sizes[0]][-1] / _by_hand(pictures[:1], seconds / 2))
    rows = []
    for size in sizes:
        what = f"{FEEDS} closed-loop feeds, detector, batches of at most {size}"
        rows.append(row("feeds", f"{what}: frames a second", rates[size], "/s"))
        rows.append(row("feeds", f"{what}: frames per batch", reached[size], ""))
        rows.append(row("feeds", f"{what}: over the detector by hand", shares[size], "x", least=0.95))
    return [*rows, row("feeds", f"batches of {sizes[0]} over the detector by hand, frame by frame", pays, "x")]


def _closed_loop(pictures: Sequence[Any], size: int, seconds: float) -> tuple[float, float]:
    """(frames a second, mean batch size)."""
    config = BatchConfig(max_batch_size=size, max_latency=0.020)
    with BatchCoordinator(OnnxFrames(DETECTOR), config) as handle:
        answered = [0] * FEEDS
        go = threading.Barrier(FEEDS + 1)
        end = 0.0

        def feed(number: int) -> None:
            go.wait()
            while time.perf_counter() < end:
                handle.submit_and_wait(f"cam{number}", pictures[number])
                answered[number] += 1

        threads = [threading.Thread(target=feed, args=(i,)) for i in range(FEEDS)]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        end = began + seconds
        go.wait()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - began
        metrics = handle.metrics()
    return sum(answered) / taken, metrics.processed / metrics.batches_dispatched


def _by_hand(pictures: Sequence[Any], seconds: float) -> float:
    """Frames a second of the processor itself, called in a loop."""
    detector = OnnxFrames(DETECTOR)
    detector.on_start()
    entries = [BatchEntry(f"cam{i}", picture, None, 0, None, 0.0) for i, picture in enumerate(pictures)]
    frames, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        detector.process(entries)
        frames += len(entries)
    rate = frames / (time.perf_counter() - began)
    detector.on_stop()
    return rate


# -- doing nothing -----------------------------------------------------------------------------------------------------


class Silent:
    """A camera that is there and sends nothing."""

    name, live, total = "silent", True, None

    def __init__(self) -> None:
        self._over = threading.Event()

    def open(self) -> None:
        return

    def read(self) -> None:
        self._over.wait()
        raise SourceError("interrupted", retryable=False)

    def close(self) -> None:
        return

    def interrupt(self) -> None:
        self._over.set()


def _idle(scale: float) -> list[Row]:
    """What 64 feeds cost that have nothing to do, and how long they take to stop."""
    idle, stops = [], []
    for _ in range(max(3, round(5 * scale))):
        runtime = Runtime()
        batch = runtime.coordinator(Nothing(), BatchConfig(max_batch_size=16, queue_capacity=64))
        for i in range(64):
            runtime.feed(f"cam{i}", Silent(), Pipeline(batch=batch))
        runtime.start()
        time.sleep(0.5)  # every thread is where it waits
        began, used = time.perf_counter(), time.process_time()
        time.sleep(max(1.0, 5.0 * scale))
        idle.append(100 * (time.process_time() - used) / (time.perf_counter() - began))
        began = time.perf_counter()
        assert runtime.stop().clean
        stops.append(1e3 * (time.perf_counter() - began))
    return [
        row("feeds", "64 silent feeds: share of a core", idle, "%", most=2.0),
        row("feeds", "64 silent feeds: stop", stops, "ms", most=200.0),
    ]


# -- fairness ----------------------------------------------------------------------------------------------------------


class Paced(Nothing):
    """Takes 2 ms and 1 ms a frame."""

    def process(self, entries: Sequence[BatchEntry]) -> Sequence[Any]:
        time.sleep(0.002 + 0.001 * len(entries))
        return [entry.sequence for entry in entries]


def _fairness(scale: float) -> list[Row]:
    """Seven feeds and one that is thirty times faster, offering several times what the processor does."""
    jains, least = [], []
    for _ in range(max(3, round(5 * scale))):
        shares = _served(seconds=max(1.0, 4.0 * scale))
        slow = shares[1:]
        jains.append(sum(slow) ** 2 / (len(slow) * sum(n * n for n in slow)))
        least.append(min(slow) / (sum(shares) / len(shares)))
    return [
        row("feeds", "one feed 30 x faster, overload: Jain index over the other seven", jains, "", least=0.99),
        row("feeds", "one feed 30 x faster, overload: least of the seven over its fair share", least, "x", least=0.95),
    ]


def _served(seconds: float) -> list[int]:
    """Frames served of each feed; the first offers 30 times as many as the others do."""
    done = [0] * FEEDS
    config = BatchConfig(max_batch_size=4, max_latency=0.005, max_in_flight_per_feed=2, queue_capacity=64)
    with BatchCoordinator(Paced(), config) as handle:
        end = time.monotonic() + seconds

        def feed(number: int, period: float) -> None:
            due = time.monotonic()
            while due < end:
                time.sleep(max(0.0, due - time.monotonic()))
                due += period
                try:
                    future = handle.submit(f"cam{number}", None)
                except Rejected:
                    continue
                future.add_done_callback(lambda f: done.__setitem__(number, done[number] + (f.exception() is None)))

        threads = [threading.Thread(target=feed, args=(i, 0.0002 if i == 0 else 0.006)) for i in range(FEEDS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done
