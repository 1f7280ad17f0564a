"""The PyTorch runner of language models on a GPU: `python -m bench.gpu_llm [equal | speed]`.

A Llama of 350 M parameters with random weights, stored in bfloat16. First its tokens are compared with those of
`generate` of transformers, greedy, on four prompts: in float32 and in bfloat16; prompts in chunks of 64 tokens beside
each other, then again, when their first blocks are cached. Where they differ, how near the two tokens' logits were
decides whether it is rounding.

Then tokens a second at 1, 8 and 64 running sequences, and the parts of a decode step: *graph* is the recorded graph
replayed alone, *runner* what the runner needs besides (inputs to the device, logits to the host), *Python* the
scheduler, sampling and tokens. The reference is `generate` of transformers on as many prompts of one length as a
static batch, bfloat16. JSON is the last line. Needs torch with CUDA, and transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.llm import Ask, Ours, write_model
from reflex_runtime.llm.runners.torch_runner import TorchRunner

SHAPE = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
DEVICE, CACHE = "cuda", 4 << 30
PROMPTS, TOKENS = (5, 33, 200, 700), 32
RUNNING, EACH, LENGTH = (1, 8, 64), 128, 64
ROUNDS = 3


def engine(directory: Path, dtype: str, **config: Any) -> Ours:
    runner = TorchRunner(directory, device=DEVICE, dtype=dtype, kv_cache_bytes=CACHE)
    return Ours(directory, dtype, runner, max_num_batched_tokens=2048, max_num_seqs=64, **config)


def written(ours: Ours, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The tokens after each prompt, all asked at once."""
    names = [ours.add(Ask(prompt, TOKENS)) for prompt in prompts]
    found: dict[str, list[int]] = {}
    while ours.busy:
        found |= {output.request_id: list(output.token_ids) for output in ours.engine.step()}
    return [found[name] for name in names]


def compared(directory: Path, dtype: str) -> dict[str, Any]:
    """How many of the prompts got the tokens of the reference, and how near the logits were where they first differ."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(DEVICE).eval()
    rng = np.random.default_rng(5)
    prompts = [tuple(int(t) for t in rng.integers(3, SHAPE["vocab_size"], n)) for n in PROMPTS]
    expected, margins = [], []
    with torch.inference_mode():
        for prompt in prompts:
            given = torch.tensor([prompt], device=DEVICE)
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
                do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            expected.append([int(t) for t in out.sequences[0, len(prompt) :]])
            margins.append([row[0].float().topk(2).values.diff().abs().item() for row in out.logits])
    del model
    ours = engine(directory, dtype, long_prefill_token_threshold=64, enable_prefix_caching=True)
    result: dict[str, Any] = {"prompts": len(prompts)}
    for how in ("chunked", "cached"):
        made = written(ours, prompts)
        first = [
            next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
            for mine, theirs in zip(made, expected, strict=True)
        ]
        result[how] = {
            "equal": sum(at is None for at in first),
            "differs at": [at for at in first if at is not None],
            "best two apart there": [margins[i][at] for i, at in enumerate(first) if at is not None],
        }
    result["median of the best two apart"] = median(m for each in margins for m in each)
    ours.engine.close()
    return result


def speed(directory: Path) -> list[dict[str, Any]]:
    """Decode steps at each number of running sequences."""
    import torch

    rng = np.random.default_rng(6)
    ours = engine(directory, "bfloat16", enable_prefix_caching=False)
    runner: Any = ours.engine.processor.runner
    rows: list[dict[str, Any]] = []
    for running in RUNNING:
        longest = 0.0
        rates, steps, forwards = [], [], []
        for i in range(ROUNDS + 1):
            for _ in range(running):
                ours.add(Ask(tuple(int(t) for t in rng.integers(300, SHAPE["vocab_size"], LENGTH)), EACH))
            seconds, count = 0.0, 0
            while ours.busy:
                ours.step()
                if ours.scheduled == running:  # all decode
                    seconds, count = seconds + ours.seconds, count + 1
                    if not i:
                        longest = max(longest, ours.seconds)
                    else:
                        steps.append(ours.seconds)
                        forwards.append(ours.forward)
            if i:  # the first records the graphs
                rates.append(count * running / seconds)
        alone = replayed(runner, running) if runner._recorded else float("nan")
        step, forward = median(steps), median(forwards)
        row = {
            "running": running, "tokens_s": median(rates), "low": min(rates), "high": max(rates),
            "step_ms": 1e3 * step, "graph_ms": 1e3 * alone, "runner_ms": 1e3 * (forward - alone),
            "python_ms": 1e3 * (step - forward), "python_share": (step - forward) / step,
            "recording_ms": 1e3 * (longest - step),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{running:3d} running: {row['tokens_s']:7.0f} tokens/s ({row['low']:.0f} to {row['high']:.0f}), "
            f"step {row['step_ms']:.2f} ms = graph {row['graph_ms']:.2f} + runner {row['runner_ms']:.2f} + Python "
            f"{row['python_ms']:.2f} ({100 * row['python_share']:.1f} %); a recording {row['recording_ms']:.0f} ms",
            flush=True,
        )
    if DEVICE == "cuda":
        print(f"{len(runner._recorded)} graphs; torch has {torch.cuda.memory_reserved() / 2**30:.2f} GiB", flush=True)
    ours.engine.close()
    return rows


def replayed(runner: Any, running: int) -> float:
    """Seconds of the graph of the last decode steps, replayed alone."""
    import torch

    size = max(1 << (running - 1).bit_length(), 1)
    recorded = runner._recorded[max(key for key in runner._recorded if key[0] == size)]
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        recorded.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def reference(directory: Path) -> dict[int, float]:
    """Tokens a second of transformers, as many prompts in a static batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(DEVICE).eval()
    found = {}
    with torch.inference_mode():
        for running in RUNNING:
            given = torch.randint(300, SHAPE["vocab_size"], (running, LENGTH), device=DEVICE)
            for count in (4, EACH // 2):  # the first is a warm-up
                began = time.perf_counter()
                model.generate(
                    given, attention_mask=torch.ones_like(given), max_new_tokens=count, min_new_tokens=count,
                    do_sample=False, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                found[running] = running * count / (time.perf_counter() - began)
            print(f"{running:3d} running: transformers {found[running]:.0f} tokens/s", flush=True)
    return found


def main() -> int:
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_llm needs a CUDA device", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="reflex-bench-") as root:
        directory = write_model(Path(root, "llama"), "bfloat16", **SHAPE)
        result: dict[str, Any] = {}
        for dtype in ("float32", "bfloat16") if "speed" not in sys.argv else ():
            result[dtype] = compared(directory, dtype)
            print(f"{dtype}: {result[dtype]}", flush=True)
        if "equal" not in sys.argv:
            result["speed"] = speed(directory)
            result["transformers"] = reference(directory)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
