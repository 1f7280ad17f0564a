"""Step 3: a checkpoint becomes an export directory that the runtime can serve, its weights integers of 6 bits.

Normalisation lives in `reflex_config.json`, not in the graphs: the runtime subtracts and divides before, multiplies and
adds after. So the same numbers are applied once, in one place, and can be read without a tool.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from model import (
    ACTION_DIM,
    CHUNK,
    HEAD_WIDTH,
    HEADS,
    LAYERS,
    MAX_TOKENS,
    PREFIX_TOKENS,
    STATE_DIM,
    STEPS,
    DenoiseStep,
    Expert,
    Prefix,
)
from torch import Tensor, nn
from words import TOKENIZER

from demo.tasks import CONTROL_HZ
from small_weights import shrink

OPSET = 17
LEVELS = 31  # of a weight on each side of 0: six bits, which a wheel compresses to six
IMAGE_SIZE = [64, 64]

EMBODIMENT = {
    "name": "metaworld-sawyer",
    "action_space": "relative",
    "action_names": ["delta_x", "delta_y", "delta_z", "gripper"],
    "action_ranges": [[-1.0, 1.0]] * ACTION_DIM,
    "action_units": ["cm", "cm", "cm", "effort, 1 closes"],
    "gripper_index": 3,
    "state_names": ["x", "y", "z", "gripper_open"],
    "cameras": {"image": IMAGE_SIZE},
    "control_rate_hz": CONTROL_HZ,
}


def config(model_id: str, norm: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_id": model_id,
        "model_type": "flow_matching",
        "export_kind": "decomposed",
        "opset": OPSET,
        "state_dim": STATE_DIM,
        "action_dim": ACTION_DIM,
        "chunk_size": CHUNK,
        "num_denoising_steps": STEPS,
        "image_size": IMAGE_SIZE,
        "images": {"image": IMAGE_SIZE},
        "max_tokens": MAX_TOKENS,
        "tokenizer": TOKENIZER,
        "state_norm": norm["state"],
        "action_norm": norm["action"],
        "embodiment": "embodiment.json",
        "decomposed": {
            "vlm_prefix_onnx": "vlm_prefix.onnx",
            "expert_denoise_onnx": "expert_denoise.onnx",
            "past_kv_tensor_names": ["past_kv"],
            "expert_takes_state": True,
        },
        "inputs": {
            "image": "image", "tokens": "tokens", "noise": "x", "time": "time", "state": "state", "past_kv": "past_kv",
        },
        "outputs": {"past_kv": "past_kv", "actions": "x_next"},
    }  # fmt: skip


def write_onnx(module: nn.Module, path: Path, inputs: dict[str, Tensor], output: str) -> None:
    """Write one graph. Batch is the leading, symbolic axis of every input and output, and the only symbolic one."""
    names = [*inputs, output]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracing exporter is deprecated but gives the smaller graph here
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=[output],
            dynamic_axes={name: {0: "batch"} for name in names},
            opset_version=OPSET,
            dynamo=False,
        )
    with torch.no_grad():
        shape = list(module(*inputs.values()).shape)
    model = onnx.load(path)
    dims = model.graph.output[0].type.tensor_type.shape.dim
    for dim, size in list(zip(dims, shape, strict=True))[1:]:
        dim.dim_value = size  # the tracer leaves some of them symbolic, and a reader would take those for free
    shrink(model, LEVELS)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def write_directory(target: Path, write: Any, settings: dict[str, Any]) -> None:
    """Complete beside the target first, then one rename: nobody reads half an export."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=target.parent))
    scratch.chmod(0o755)
    write(scratch)
    for name, content in (("reflex_config.json", settings), ("embodiment.json", EMBODIMENT)):
        (scratch / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if target.exists():
        shutil.rmtree(target)
    scratch.rename(target)
    size = sum(f.stat().st_size for f in target.iterdir())
    print(f"{target}: {size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="the export directory")
    parser.add_argument("--model-id", required=True, help="e.g. demo-metaworld-v1")
    args = parser.parse_args()
    saved = torch.load(args.checkpoint, weights_only=True)
    prefix, expert = Prefix(len(TOKENIZER)), Expert()
    prefix.load_state_dict(saved["prefix"])
    expert.load_state_dict(saved["expert"])

    rows = 2  # any size but 1, which the tracer might take for a constant
    image = torch.randint(0, 256, (rows, *IMAGE_SIZE, 3), dtype=torch.uint8)
    tokens = torch.randint(0, len(TOKENIZER), (rows, MAX_TOKENS))
    state, noise = torch.randn(rows, STATE_DIM), torch.randn(rows, CHUNK, ACTION_DIM)
    past_kv = torch.randn(rows, LAYERS, 2, HEADS, PREFIX_TOKENS, HEAD_WIDTH)

    def write(into: Path) -> None:
        write_onnx(prefix, into / "vlm_prefix.onnx", {"image": image, "tokens": tokens}, "past_kv")
        inputs = {"x": noise, "time": torch.rand(rows), "state": state, "past_kv": past_kv}
        write_onnx(DenoiseStep(expert), into / "expert_denoise.onnx", inputs, "x_next")

    write_directory(args.out, write, config(args.model_id, saved["norm"]))


if __name__ == "__main__":
    main()
