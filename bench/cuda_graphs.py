"""What captured batch sizes save: `python -m bench.cuda_graphs` (needs onnxruntime-gpu and a CUDA device).

The bundled policies on ONNX Runtime, three ways: without graphs, batch after batch of one size; without, every batch of
another size than the last; with graphs, every batch of another size. Rounds of the three alternate; a round's figure is
the median of its batches, printed is the median of the rounds with their range. Times are wall time around one batch,
from numpy arrays to numpy arrays. JSON is the last line of stdout.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from statistics import median
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo.exports import KINDS, Kind, export_dir
from reflex_runtime.policies import Policy, load_policy
from reflex_runtime.policies.policy.spec import DeviceOptions
from reflex_runtime.processors.onnx import CUDA

SIZES = (1, 8, 32)
ROUNDS, REPEATS = 7, 5
WAYS = ("one size", "changing", "graphs")

Key = tuple[str, int, str]  # stage, batch size, way


def rounds(kind: Kind) -> dict[Key, list[float]]:
    """Median seconds of every round."""
    root = export_dir("v2", kind)
    plain = load_policy(root, device=DeviceOptions(CUDA))
    graphs = load_policy(root, device=DeviceOptions(CUDA, captured_sizes=SIZES))
    found: dict[Key, list[float]] = defaultdict(list)
    for i in range(ROUNDS + 1):
        took: dict[Key, list[float]] = defaultdict(list)
        for size in SIZES:
            measure(plain, "one size", (size,), took)
        measure(plain, "changing", SIZES, took)
        measure(graphs, "graphs", SIZES, took)
        if i:  # the first is a warm-up
            for key, times in took.items():
                found[key].append(median(times))
    return found


def measure(policy: Policy, way: str, sizes: tuple[int, ...], took: dict[Key, list[float]]) -> None:
    for batch, elapsed in policy.warm_up(sizes, REPEATS).batches:
        assert bool(batch.notes.get("captured")) == (way == "graphs")
        took[batch.stage or "whole", len(batch), way].append(elapsed)


def main() -> int:
    result: dict[str, Any] = {"rounds": ROUNDS, "repeats": REPEATS, "us": {}}
    print(f"{'us a call':20} {'batch':>5}", *(f"{way:>24}" for way in WAYS))
    for kind in KINDS:
        try:
            found = rounds(kind)
        except ConfigError as error:
            print(f"bench.cuda_graphs: {error.message}", file=sys.stderr)
            return 2
        for stage, size in sorted({key[:2] for key in found}):
            name = f"{kind} {stage}"
            us = {way: sorted(1e6 * s for s in found[stage, size, way]) for way in WAYS}
            shown = (f"{median(t):.0f} ({t[0]:.0f} to {t[-1]:.0f})" for t in us.values())
            print(f"{name:20} {size:5}", *(f"{text:>24}" for text in shown))
            result["us"][f"{name} {size}"] = us
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
