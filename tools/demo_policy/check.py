"""Step 5: is an export right, and what does a batch cost? Prints the figures that the README states.

- sharing: a row computed alone against the same row in batches of other rows;
- cost: median time of one call per batch size, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from evaluate import session
from numpy.typing import NDArray

Rows = dict[str, NDArray[Any]]
SIZES = (1, 2, 4, 8, 16, 32)


class Export:
    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "reflex_config.json").read_text())
        self.chunk = (self.config["chunk_size"], self.config["action_dim"])
        self.prefix = session(directory / "vlm_prefix.onnx")
        self.expert = session(directory / "expert_denoise.onnx")

    def rows(self, count: int, seed: int) -> Rows:
        rng = np.random.default_rng(seed)
        h, w = self.config["image_size"]
        return {
            "image": rng.integers(0, 256, (count, h, w, 3), np.uint8),
            "tokens": rng.integers(0, len(self.config["tokenizer"]) + 1, (count, self.config["max_tokens"]), np.int64),
            "state": rng.standard_normal((count, self.config["state_dim"])).astype(np.float32),
            "noise": rng.standard_normal((count, *self.chunk)).astype(np.float32),
        }

    def keys_values(self, rows: Rows) -> NDArray[np.float32]:
        past_kv: NDArray[np.float32] = self.prefix.run(None, {k: rows[k] for k in ("image", "tokens")})[0]
        return past_kv

    def step(self, x: NDArray[np.float32], at: float, rows: Rows, past_kv: NDArray[np.float32]) -> NDArray[np.float32]:
        feeds = {"x": x, "time": np.full(len(x), at, np.float32), "state": rows["state"], "past_kv": past_kv}
        moved: NDArray[np.float32] = self.expert.run(None, feeds)[0]
        return moved

    def in_steps(self, rows: Rows) -> NDArray[np.float32]:
        past_kv, x = self.keys_values(rows), rows["noise"]
        steps = self.config["num_denoising_steps"]
        for k in range(steps):
            x = self.step(x, k / steps, rows, past_kv)
        return x


def part(rows: Rows, which: slice) -> Rows:
    return {k: v[which] for k, v in rows.items()}


def median_ms(call: Any, repeat: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="export directory")
    parser.add_argument("--repeat", type=int, default=50)
    args = parser.parse_args()
    export = Export(args.export)
    rows = export.rows(32, seed=0)
    alone = np.concatenate([export.in_steps(part(rows, slice(i, i + 1))) for i in range(32)])
    worst = max(
        float(abs(export.in_steps(part(rows, slice(i, i + n))) - alone[i : i + n]).max())
        for n in SIZES
        for i in range(0, 32, n)
    )
    print(f"sharing: a row alone against the row in a batch, largest difference {worst:.1e}\n")
    print("| batch | all steps ms | per row | prefix ms | per row | one step ms | per row |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for n in SIZES:
        some = part(rows, slice(0, n))
        cells = [
            median_ms(partial(export.in_steps, some), args.repeat),
            median_ms(partial(export.keys_values, some), args.repeat),
            median_ms(partial(export.step, some["noise"], 0.4, some, export.keys_values(some)), args.repeat),
        ]
        print(f"| {n} | " + " | ".join(f"{ms:.2f} | {ms / n:.2f}" for ms in cells) + " |")


if __name__ == "__main__":
    main()
