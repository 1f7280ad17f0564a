"""The scheduler in front of a GPU: `python -m bench.gpu [LAYERS …]` (needs torch with CUDA).

A transformer in bfloat16 of so many layers, captured as CUDA graphs at the sizes it pads to. Raw throughput at each
size is measured first, alone, with one batch in flight and with two on streams of their own. Then closed-loop callers
in the same process go through `Batcher`, four ways that take turns:

- together: all callers fit into one batch, so nobody waits while it runs and the device waits for Python;
- halves: a batch holds half of the callers, so that a full batch always waits and is formed ahead;
- afterwards: halves, each formed when the one before is complete (what forming ahead saves);
- streams: the halves in a `Batcher` each, on streams of their own: two batches in flight.

The share is of the raw graph at the batch size reached, measured right after; `of all` is the share of the raw graph
with all callers in a batch. Medians and spread are printed, and JSON is the last line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

from reflex_runtime import Batcher, FlushPolicy, GroupConfig, Request
from reflex_runtime.core.batch import Batch, BatchScheduled, Event
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.statistics import percentile
from reflex_runtime.run.processor import BaseProcessor

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTH, TOKENS, HEADS = 1024, 64, 16
CASES = {12: (1, 8, 32, 128), 24: (32,), 108: (32,)}  # layers: callers. About 0.6, 1 and 5 ms for one request
WAYS = ("together", "halves", "afterwards", "streams")
ROUNDS, LEARNING, SECONDS = 3, 0.5, 0.7


def encoder(layers: int) -> Any:
    """The model, on the GPU."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, device="cuda", dtype=torch.bfloat16
    )
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


class GraphedPolicy(BaseProcessor):
    """One CUDA graph per captured size on a stream of its own, inputs and outputs in pinned memory; a batch is padded
    to the next size."""

    captured_sizes = SIZES

    def __init__(self, model: Any) -> None:
        import torch

        self.torch, self.model, self.stream = torch, model, torch.cuda.Stream()
        most = SIZES[-1]
        self.host_in = torch.randn(most, TOKENS, WIDTH).to(torch.bfloat16).pin_memory()
        self.host_out = torch.zeros(most, WIDTH, dtype=torch.bfloat16).pin_memory()
        self.given = torch.zeros(most, TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
        with torch.inference_mode():
            self.graphs = {size: self._capture(size) for size in SIZES}

    def _capture(self, size: int) -> tuple[Any, Any]:
        torch = self.torch
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.model(self.given[:size])
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            answer = self.model(self.given[:size])[:, 0]
        return graph, answer

    def launch(self, n: int) -> None:
        """Copy in, replay, copy out; nothing waits."""
        size = next(s for s in SIZES if s >= n)
        graph, answer = self.graphs[size]
        with self.torch.inference_mode(), self.torch.cuda.stream(self.stream):
            self.given[:n].copy_(self.host_in[:n], non_blocking=True)
            graph.replay()
            self.host_out[:n].copy_(answer[:n], non_blocking=True)

    def call(self, n: int) -> None:
        """Launch and wait."""
        self.launch(n)
        self.stream.synchronize()

    def run(self, batch: Batch) -> Sequence[Any]:
        self.call(len(batch))
        batch.notes["captured"] = True
        return [0.0] * len(batch)


def raw(policies: Sequence[GraphedPolicy], n: int, seconds: float = 0.15) -> float:
    """Requests a second at batch size n, nothing else running, with one batch in flight for each policy."""
    calls, began = 0, time.perf_counter()
    for policy in policies[1:]:
        policy.launch(n)
    while (now := time.perf_counter()) - began < seconds:
        policies[calls % len(policies)].launch(n)
        calls += 1
        policies[calls % len(policies)].stream.synchronize()
    return calls * n / (now - began)


async def closed_loop(policies: Sequence[GraphedPolicy], callers: int, way: str) -> dict[str, float]:
    """Callers that ask again at once: requests a second, latency and batch size, after some learning."""
    sizes: list[int] = []
    latencies: list[float] = []

    def watch(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            sizes.append(len(event.batch))

    most = SIZES[-1] if way == "together" else max(1, callers // 2)
    used = policies[:2] if way == "streams" else policies[:1]
    async with AsyncExitStack() as stack:
        batchers = []
        for policy in used:
            group = GroupConfig(flush=FlushPolicy.window(0.100, 0.005, most), cost=lambda: TimeCost(sizes=SIZES))
            batcher: Batcher[Any] = Batcher({"default": policy}, [group], [watch])
            if way == "afterwards":
                batcher.device._ahead = None
            batchers.append(await stack.enter_async_context(batcher))
        until = time.perf_counter() + LEARNING

        async def caller(name: int, keep: bool) -> None:
            batcher = batchers[name % len(batchers)]
            while (began := time.perf_counter()) < until:
                await batcher.run(Request(None, client=name, shape="policy"))
                if keep:
                    latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(caller(i, False) for i in range(callers)))
        sizes.clear()
        began = time.perf_counter()
        until = began + SECONDS
        await asyncio.gather(*(caller(i, True) for i in range(callers)))
        took = time.perf_counter() - began
    latencies.sort()
    return {
        "rate": len(latencies) / took,
        "size": sum(sizes) / len(sizes),
        "p50_ms": percentile(latencies, 0.5) * 1e3,
        "p99_ms": percentile(latencies, 0.99) * 1e3,
    }


def measured(policies: Sequence[GraphedPolicy], callers: int) -> dict[str, list[dict[str, float]]]:
    """Rounds of every way, in turns, each beside its own reference."""
    ways = WAYS[:1] if callers == 1 else WAYS
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for i in range(ROUNDS):
        for way in ways[:: 1 if i % 2 else -1]:
            got = asyncio.run(closed_loop(policies, callers, way))
            used = policies[:2] if way == "streams" else policies[:1]
            got["share"] = got["rate"] / raw(used, max(1, round(got["size"])))
            got["of_all"] = got["rate"] / raw(policies[:1], callers)
            found[way].append(got)
    return found


def show(layers: int, callers: int, way: str, rounds: Sequence[dict[str, float]]) -> None:
    mid = {key: median(each[key] for each in rounds) for key in rounds[0]}
    shares = sorted(each["share"] for each in rounds)
    print(
        f"{layers:3d} layers, {callers:3d} callers, {way:10}: {mid['rate']:7.0f} requests/s, batch {mid['size']:5.1f}, "
        f"p50 {mid['p50_ms']:.2f} ms, p99 {mid['p99_ms']:.2f} ms, of raw {mid['share']:.2f} "
        f"({shares[0]:.2f} to {shares[-1]:.2f}), of all {mid['of_all']:.2f}",
        flush=True,
    )


def main() -> int:
    try:
        import torch
    except ImportError:
        print("bench.gpu needs torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": ROUNDS}
    for layers in [int(word) for word in sys.argv[1:]] or CASES:
        model = encoder(layers)
        policies = [GraphedPolicy(model), GraphedPolicy(model)]
        one = {n: median(raw(policies[:1], n) for _ in range(ROUNDS)) for n in SIZES}
        two = {n: median(raw(policies, n) for _ in range(ROUNDS)) for n in SIZES}
        for n in SIZES:
            print(
                f"{layers:3d} layers, batch {n:3d}: {one[n]:7.0f} requests/s, {n / one[n] * 1e3:.3f} ms a batch; "
                f"with two in flight {two[n] / one[n]:.2f} x",
                flush=True,
            )
        rounds = {callers: measured(policies, callers) for callers in CASES.get(layers, (1, 8, 32, 128))}
        for callers, ways in rounds.items():
            for way, each in ways.items():
                show(layers, callers, way, each)
        found[f"layers_{layers}"] = {"raw": one, "raw_two": two, "callers": rounds}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
