"""What LoRA adapters cost a step: the CPU time of a step with 1 and 4 of rank 16, over that of a step without.

One thread, so that no time is spent waiting for another one; the runners take turns on the same step. The sequences of
a step have different adapters, and some have none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench.llm import VOCAB, write_model
from bench.report import Row, row, say
from reflex_runtime.llm.runners.checkpoint import Checkpoint
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
from reflex_runtime.llm.runners.runner import Runner, Step
from reflex_runtime.llm.runners.torch_runner import TorchRunner

ROUNDS = 15
RANK, MOST = 16, 4
PAST = 128  # tokens in the cache of each sequence that is generated
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = {"1 sequence": (1, 1), "16 sequences": (16, 1), "64 sequences": (64, 1), "a prompt of 512": (1, 512)}


def adapters(root: Path, scale: float) -> list[Row]:
    """Every row about adapters."""
    base = write_model(root / "llama", "float32")
    paths = {f"a{i}": _write_adapter(root / f"a{i}", base, i) for i in range(MOST)}
    made: dict[str, Callable[..., Any]] = {"openvino": OpenVinoRunner, "torch": TorchRunner}
    rows: list[Row] = []
    for name, kind in made.items():
        runners: dict[int, Runner] = {
            count: kind(base, num_blocks=800, threads=1, adapters=dict(list(paths.items())[:count]))
            for count in (0, 1, MOST)
        }
        for what, (sequences, new) in STEPS.items():
            say(f"  {name}, {what}")
            rounds = max(3, round(ROUNDS * scale / (1 if new == 1 else 3)))
            rows += _measured(f"{name}, {what}", runners, sequences, new, rounds)
        for runner in runners.values():
            runner.close()
    return rows


def _measured(what: str, runners: dict[int, Runner], sequences: int, new: int, rounds: int) -> list[Row]:
    times: dict[int, list[float]] = {count: [] for count in runners}
    for _ in range(rounds):
        for count, runner in runners.items():
            chosen = (np.arange(sequences) + 1) % (count + 1)  # a single sequence has the first one
            step = _step(runner, sequences, new, chosen.astype(np.int32) if count else None)
            runner.forward(step)
            began = time.process_time()
            runner.forward(step)
            times[count].append(time.process_time() - began)
    rows = [row("adapters", f"{what}, none", [1e3 * t for t in times[0]], "ms")]
    for count in list(runners)[1:]:
        ratios = [some / none for some, none in zip(times[count], times[0], strict=True)]
        rows.append(row("adapters", f"{what}, {count} of rank {RANK}", ratios, "x"))
    return rows


def _step(runner: Runner, sequences: int, new: int, chosen: Any) -> Step:
    """New tokens of so many sequences: of prompts, or one behind what is cached."""
    past = PAST if new == 1 else 0
    blocks, tokens = -(-(past + new) // runner.block_size), sequences * new
    return Step(
        np.arange(tokens, dtype=np.int64) % VOCAB,
        np.tile(np.arange(past, past + new, dtype=np.int64), sequences),
        np.full(sequences, past, np.int32),
        np.arange(0, tokens + 1, new, dtype=np.int32),
        np.arange(sequences * blocks, dtype=np.int32),
        np.arange(0, sequences * blocks + 1, blocks, dtype=np.int32),
        adapters=chosen,
    )


def _write_adapter(directory: Path, model: Path, seed: int) -> Path:
    """An adapter of all linear layers, with random matrices."""
    draw, tensors = np.random.default_rng(seed), {}
    for name, shape in Checkpoint.open(model).config.tensors().items():
        if name.endswith(tuple(f"{layer}.weight" for layer in LAYERS)):
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{stem}A.weight"] = draw.normal(0, 0.02, (RANK, shape[1])).astype(np.float32)
            tensors[f"{stem}B.weight"] = draw.normal(0, 0.02, (shape[0], RANK)).astype(np.float32)
    directory.mkdir(parents=True)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(said))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
