"""The files of a checkpoint of openpi, but for its weights, and a stand-in for its tokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from reflex_runtime.robots.sources.openpi_checkpoint import CONFIGS, ROBOTS


class Processor:
    """A byte is a token; 2 begins a text."""

    def __init__(self, model_file: str) -> None:
        if Path(model_file).read_bytes() != b"tokenizer":
            raise RuntimeError("not parsed")

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return [2] * add_bos + [byte + 10 for byte in text.encode()]

    def unk_id(self) -> int:
        return 3


def stats(robot: str, padded: int = 0) -> dict[str, Any]:
    found = {}
    for number, (key, dim) in enumerate((("state", ROBOTS[robot].state_dim), ("actions", ROBOTS[robot].action_dim))):
        rng = np.random.default_rng(number)
        low, wide = rng.uniform(-1, 0, dim), rng.uniform(0.5, 1, dim)
        values = {"mean": low + wide / 2, "std": wide / 3, "q01": low, "q99": low + wide}
        found[key] = {name: [*vector.tolist(), *[0.0] * padded] for name, vector in values.items()}
    return {"norm_stats": found}


def write(root: Path, config: str, asset: str = "robot", **keys: Any) -> Path:
    root.mkdir(parents=True)
    name = "time_mlp_in.weight" if config.startswith("pi05") else "action_time_mlp_in.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    (root / "config.json").write_text(json.dumps({"action_dim": 32, "action_horizon": 12, "precision": "bfloat16"}))
    (root / "paligemma_tokenizer.model").write_bytes(b"tokenizer")
    (root / "assets" / asset).mkdir(parents=True)
    robot = CONFIGS[config].robot if config in CONFIGS else "libero"
    (root / "assets" / asset / "norm_stats.json").write_text(json.dumps(stats(robot, padded=3)))
    (root / "reflex_openpi.json").write_text(json.dumps({"config": config, **keys}))
    return root
