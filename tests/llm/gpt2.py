"""A GPT-2 with random weights, exported to OpenVINO op by op, in the form that `optimum-cli export openvino` writes.

It has what no checkpoint of ours has: learned positions, LayerNorm with biases, one matrix for queries, keys and
values, and GELU. `transformers` runs the same weights as the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from llm.models import Oracle, library

HIDDEN, HEADS, LAYERS, VOCAB, POSITIONS = 64, 4, 2, 256, 512


def exported(directory: Path, *, slopes: bool = False) -> Oracle:
    """Save the export to `directory`; its reference is returned, whose checkpoint lies beside it.

    slopes: older keys count less, by head, in a form that OpenVINO's paged attention does not know and drops.
    """
    import torch

    sizes = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": POSITIONS}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = library().GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
        model = library().GPT2LMHeadModel(settings).eval()
        for parameter in model.parameters():  # biases start at 0, which would hide them
            parameter.data += 0.1 * torch.randn_like(parameter)
    checkpoint = directory.with_name(f"{directory.name}-checkpoint")
    model.save_pretrained(checkpoint)
    directory.mkdir()
    weights = {name: value.numpy() for name, value in model.transformer.state_dict().items()}
    ov.save_model(_graph(weights, slopes), directory / "openvino_model.xml", compress_to_fp16=False)
    (directory / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return Oracle(checkpoint)


def _graph(weights: dict[str, Any], slopes: bool) -> ov.Model:
    names = ("input_ids", "attention_mask", "position_ids", "beam_idx")
    inputs = [_parameter(name, [-1] * (1 + (name != "beam_idx"))) for name in names]
    ids, mask, positions, beams = inputs
    sinks: list[Any] = []
    states = ops.add(ops.gather(weights["wte.weight"], ids, 0), ops.gather(weights["wpe.weight"], positions, 0))
    seen = _seen(ids, mask, slopes)

    def linear(x: Any, name: str) -> Any:
        return ops.add(ops.matmul(x, weights[f"{name}.weight"], False, False), weights[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        even = ops.mvn(x, [-1], True, 1e-5, "INSIDE_SQRT")
        return ops.add(ops.multiply(even, weights[f"{name}.weight"]), weights[f"{name}.bias"])

    def heads(x: Any) -> Any:
        return ops.transpose(ops.reshape(x, [0, 0, HEADS, HIDDEN // HEADS], True), [0, 2, 1, 3])

    def remember(name: str, current: Any) -> Any:
        batch = ops.gather(ops.shape_of(ids), [0], 0)
        empty = ops.broadcast(np.float32(0), ops.concat([batch, np.array([HEADS, 0, HIDDEN // HEADS])], 0))
        past = ops.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, HEADS, -1, HIDDEN // HEADS]))
        both = ops.concat([ops.gather(past, beams, 0), current], 2)
        sinks.append(ops.assign(both, name))
        return both

    for layer in range(LAYERS):
        prefix = f"h.{layer}."
        parts = ops.split(linear(norm(states, f"{prefix}ln_1"), f"{prefix}attn.c_attn"), 2, 3).outputs()
        queries, keys, values = (heads(part) for part in parts)
        keys, values = (remember(f"past_key_values.{layer}.{n}", x) for n, x in (("key", keys), ("value", values)))
        mixed = ops.transpose(ops.scaled_dot_product_attention(queries, keys, values, seen), [0, 2, 1, 3])
        states = ops.add(states, linear(ops.reshape(mixed, [0, 0, -1], True), f"{prefix}attn.c_proj"))
        inner = ops.gelu(linear(norm(states, f"{prefix}ln_2"), f"{prefix}mlp.c_fc"), "tanh")
        states = ops.add(states, linear(inner, f"{prefix}mlp.c_proj"))
    logits = ops.matmul(norm(states, "ln_f"), weights["wte.weight"], False, True)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits, name="logits")], sinks, inputs, "gpt2")


def _seen(ids: Any, mask: Any, slopes: bool) -> Any:
    """[batch, 1 or heads, tokens, past + tokens]: what is added to scores."""
    total = ops.gather(ops.shape_of(mask), 1, 0)
    tokens = ops.gather(ops.shape_of(ids), 1, 0)
    keys = ops.reshape(ops.range(0, total, 1, "i64"), [1, 1, 1, -1], False)
    queries = ops.reshape(ops.range(ops.subtract(total, tokens), total, 1, "i64"), [1, 1, -1, 1], False)
    real = ops.unsqueeze(ops.convert(mask, "boolean"), [1, 2])
    scores = ops.select(ops.logical_and(ops.less_equal(keys, queries), real), np.float32(0), np.float32(-65504))
    if not slopes:
        return scores
    distances = ops.convert(ops.subtract(keys, queries), "f32")
    return ops.add(scores, ops.multiply(distances, 0.3 * np.arange(HEADS, dtype=np.float32).reshape(1, -1, 1, 1)))


def _parameter(name: str, shape: list[int]) -> Any:
    node = ops.parameter(shape, ov.Type.i32 if name == "beam_idx" else ov.Type.i64, name=name)
    node.output(0).set_names({name})
    return node
