"""The scheduler in front of a GPU: `python -m bench.gpu` (needs torch with CUDA; nothing else of the benchmark does).

A transformer in bfloat16, captured as CUDA graphs at the sizes it pads to. Raw throughput at each size is measured
first, alone; then closed-loop callers go through `Batcher`, one batch at a time, and the ratio at the batch size they
reached says what the scheduler costs. Each case is repeated; medians and spread are printed, and JSON is the last line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from reflex_runtime import Batcher, FlushPolicy, GroupConfig, Request
from reflex_runtime.core.batch import Batch
from reflex_runtime.core.events import BatchScheduled, Event
from reflex_runtime.core.percentile import percentile
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.processors.base import BaseProcessor

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTH, LAYERS, TOKENS, HEADS = 1024, 12, 64, 16
ROUNDS, SECONDS = 3, 3.0


class GraphedPolicy(BaseProcessor):
    """One CUDA graph per captured size, inputs and outputs in pinned memory; a batch is padded to the next size."""

    captured_sizes = SIZES

    def __init__(self) -> None:
        import torch

        self.torch = torch
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, device="cuda", dtype=torch.bfloat16
        )
        self.model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
        most = SIZES[-1]
        self.host_in = torch.zeros(most, TOKENS, WIDTH, dtype=torch.bfloat16).pin_memory()
        self.host_out = torch.zeros(most, WIDTH, dtype=torch.bfloat16).pin_memory()
        self.given = torch.zeros(most, TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.graphs: dict[int, tuple[Any, Any]] = {}
        with torch.inference_mode():
            for size in SIZES:
                self.graphs[size] = self._capture(size)

    def _capture(self, size: int) -> tuple[Any, Any]:
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.model(self.given[:size])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self.model(self.given[:size])[:, 0]
        return graph, answer

    def call(self, n: int) -> None:
        """Copy in, replay, copy out, wait."""
        size = next(s for s in SIZES if s >= n)
        graph, answer = self.graphs[size]
        self.given[:n].copy_(self.host_in[:n], non_blocking=True)
        graph.replay()
        self.host_out[:n].copy_(answer[:n], non_blocking=True)
        self.torch.cuda.synchronize()

    def run(self, batch: Batch) -> Sequence[Any]:
        with self.torch.inference_mode():
            self.call(len(batch))
        batch.notes["captured"] = True
        return [0.0] * len(batch)


def raw(policy: GraphedPolicy, n: int, seconds: float = 0.5) -> float:
    """Requests a second at batch size n, nothing else running."""
    calls, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        policy.call(n)
        calls += 1
    return calls * n / (now - began)


async def closed_loop(policy: GraphedPolicy, callers: int) -> dict[str, float]:
    """Callers that ask again at once: requests a second, latency and batch size, after a second of learning."""
    sizes: list[int] = []
    latencies: list[float] = []

    def watch(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            sizes.append(len(event.batch))

    group = GroupConfig(flush=FlushPolicy.window(0.100, 0.005, SIZES[-1]), cost=lambda: TimeCost(sizes=SIZES))
    async with Batcher({"default": policy}, [group], [watch]) as batcher:
        until = time.perf_counter() + 1.0

        async def caller(name: int, keep: bool) -> None:
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


def main() -> int:
    try:
        import torch
    except ImportError:
        print("bench.gpu needs torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device", file=sys.stderr)
        return 2
    policy = GraphedPolicy()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": ROUNDS}
    found["raw"] = {n: median(raw(policy, n) for _ in range(ROUNDS)) for n in (*SIZES, 96)}
    for n, rate in found["raw"].items():
        print(f"raw, batch {n:3d}: {rate:9.0f} requests/s, {n / rate * 1e3:7.3f} ms a batch", flush=True)
    for callers in (1, 8, 32, 128):
        rounds = []
        for _ in range(ROUNDS):
            got = asyncio.run(closed_loop(policy, callers))
            got["ratio"] = got["rate"] / raw(policy, max(1, round(got["size"])))  # interleaved with its own reference
            rounds.append(got)
        found[f"callers_{callers}"] = rounds
        ratios = sorted(r["ratio"] for r in rounds)
        mid = {k: median(r[k] for r in rounds) for k in rounds[0]}
        print(
            f"{callers:3d} callers: {mid['rate']:9.0f} requests/s, batch {mid['size']:6.1f}, "
            f"p50 {mid['p50_ms']:.2f} ms, p99 {mid['p99_ms']:.2f} ms, "
            f"of raw {mid['ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
