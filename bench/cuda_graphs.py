"""What captured batch sizes save: `python -m bench.cuda_graphs` (needs onnxruntime-gpu and a CUDA device).

The bundled policies on ONNX Runtime, with and without CUDA graphs. Rounds of the two alternate; a round's figure is the
median of its batches, printed is the median of the rounds with their range. Times are wall time around one batch, from
numpy arrays to numpy arrays. JSON is the last line of stdout.
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
from reflex_runtime.processors.onnx import CUDA

SIZES = (1, 8, 32)
ROUNDS, REPEATS = 7, 7


def rounds(kind: Kind) -> dict[tuple[str, int, bool], list[float]]:
    """Median seconds of every round, by (stage, batch size, whether captured)."""
    root = export_dir("v2", kind)
    policies: dict[bool, Policy] = {
        captured: load_policy(root, provider=CUDA, captured_sizes=SIZES if captured else ())
        for captured in (False, True)
    }
    found: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    for policy in policies.values():
        policy.warm_up(SIZES, REPEATS)
    for _ in range(ROUNDS):
        for captured, policy in policies.items():
            took: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
            for batch, elapsed in policy.warm_up(SIZES, REPEATS).batches:
                assert bool(batch.notes.get("captured")) is captured
                took[batch.stage or "whole", len(batch), captured].append(elapsed)
            for key, times in took.items():
                found[key].append(median(times))
    return found


def main() -> int:
    result: dict[str, Any] = {"rounds": ROUNDS, "repeats": REPEATS, "us": {}}
    print(f"{'call':24} {'batch':>5} {'without, us':>24} {'with graphs, us':>24} {'ratio':>6}")
    for kind in KINDS:
        try:
            found = rounds(kind)
        except ConfigError as error:
            print(f"bench.cuda_graphs: {error.message}", file=sys.stderr)
            return 2
        for stage, size in dict.fromkeys(key[:2] for key in found):
            plain, graphs = (sorted(1e6 * s for s in found[stage, size, captured]) for captured in (False, True))
            name = f"{kind} {stage}"
            shown = [f"{median(us):8.0f} ({us[0]:.0f} to {us[-1]:.0f})" for us in (plain, graphs)]
            print(f"{name:24} {size:5} {shown[0]:>24} {shown[1]:>24} {median(plain) / median(graphs):6.2f}")
            result["us"][f"{name} {size}"] = {"plain": plain, "graphs": graphs}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
