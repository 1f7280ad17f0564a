"""What captured batch sizes save: `python -m bench.cuda_graphs [SOURCE …]` (needs a CUDA device).

A SOURCE is what `reflex serve` takes. By default the bundled policies on ONNX Runtime (needs onnxruntime-gpu) and a
policy in PyTorch (`bench.apps.torch_vla`; needs torch with CUDA); what this machine cannot run is left out, with the
reason.

Three ways: without graphs, batch after batch of one size; without, every batch of another size than the last; with
graphs, every batch of another size. Rounds of the three alternate; a round's figure is the median of its batches,
printed is the median of the rounds with their range. Times are wall time around one batch, from numpy arrays to numpy
arrays. The largest difference is that of any action with graphs from the same request's without, in batches of the
captured sizes and of others. JSON is the last line of stdout.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import POLICY
from reflex_runtime.robots import Policy, load_policy
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.run.onnx_session import CUDA

SIZES = (1, 8, 32)
COMPARED = (1, 3, 8, 9, 33)  # batch sizes: captured, padded, and beyond the largest
ROUNDS, REPEATS = 7, 5
WAYS = ("one size", "changing", "graphs")

Key = tuple[str, int, str]  # stage, batch size, way


def rounds(plain: Policy, graphs: Policy) -> dict[Key, list[float]]:
    """Median seconds of every round."""
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
        captured = way == "graphs" and batch.stage in policy.padded_stages
        assert batch.notes.get("captured", False) == captured
        took[batch.stage or "whole", len(batch), way].append(elapsed)


def difference(plain: Policy, graphs: Policy) -> float:
    """The largest difference of an action; requests join one a step."""
    worst = 0.0
    for n in COMPARED:
        for starts in ([0] * n, list(range(n))):
            ones, others = (
                policy.answers([policy.sample(seed, "look") for seed in range(n)], starts) for policy in (plain, graphs)
            )
            worst = max(worst, *(np.abs(a.actions - b.actions).max() for a, b in zip(ones, others, strict=True)))
    return float(worst)


def sources(given: list[str]) -> dict[str, str]:
    """What to measure, by the name in the table."""
    if given:
        return {source: source for source in given}
    return {"decomposed": str(POLICY), "torch": "python:bench.apps.torch_vla:make"}


def main() -> int:
    result: dict[str, Any] = {"rounds": ROUNDS, "repeats": REPEATS, "us": {}, "difference": {}}
    print(f"{'us a call':20} {'batch':>5}", *(f"{way:>24}" for way in WAYS))
    for case, source in sources(sys.argv[1:]).items():
        try:
            plain = load_policy(source, device=DeviceOptions(CUDA))
            graphs = load_policy(source, device=DeviceOptions(CUDA, captured_sizes=SIZES))
            found = rounds(plain, graphs)
        except ConfigError as error:
            print(f"bench.cuda_graphs: {case}: {error.message}", file=sys.stderr)
            continue
        for stage, size in sorted({key[:2] for key in found}):
            name = f"{case} {stage}"
            us = {way: sorted(1e6 * s for s in found[stage, size, way]) for way in WAYS}
            shown = (f"{median(t):.0f} ({t[0]:.0f} to {t[-1]:.0f})" for t in us.values())
            print(f"{name:20} {size:5}", *(f"{text:>24}" for text in shown))
            result["us"][f"{name} {size}"] = us
        result["difference"][case] = difference(plain, graphs)
        print(f"{case}: largest difference of an action {result['difference'][case]:.2g}")
    print(json.dumps(result))
    return 0 if result["us"] else 2


if __name__ == "__main__":
    sys.exit(main())
