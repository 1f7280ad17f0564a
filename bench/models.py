"""The policies that are served: one that costs nothing, and one whose batch of 32 costs about five times a single.

Both take eight numbers of state and answer a chunk of 4 actions with 4 joints, so that answers are small and what is
measured is the serving. The second is an MLP walked ten times with the same weights, as a flow-matching policy does: a
single row is bound by reading the weights, a batch by arithmetic, and the ratio follows from the machine. It is measured
in every run, never assumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STATE, CHUNK, JOINTS = 8, 4, 4
WIDTH, LAYERS, STEPS = 1024, 8, 8  # a single takes 5 to 10 ms on one core of 2025


def write_export(root: Path, heavy: bool) -> Path:
    """An export directory with the tiny policy, or the heavy one."""
    root.mkdir(parents=True, exist_ok=True)
    model = _model(WIDTH, LAYERS, STEPS) if heavy else _model(JOINTS, 0, 0)
    (root / "model.onnx").write_bytes(model)
    config = {
        "model_id": "bench-heavy" if heavy else "bench-tiny",
        "model_type": "mlp",
        "export_kind": "monolithic",
        "state_dim": STATE,
        "action_dim": JOINTS,
        "chunk_size": CHUNK,
        "num_denoising_steps": max(1, STEPS if heavy else 1),
        "inputs": {"state": "state"},
        "outputs": {"actions": "actions"},
    }
    (root / "reflex_config.json").write_text(json.dumps(config))
    return root


def _model(width: int, layers: int, steps: int) -> bytes:
    rng = np.random.default_rng(0)

    def weights(name: str, rows: int, columns: int) -> Any:
        values = rng.normal(size=(rows, columns)) / rows**0.5
        return numpy_helper.from_array(values.astype(np.float32), name)

    constants = [weights("w_in", STATE, width), *(weights(f"w{i}", width, width) for i in range(layers))]
    constants += [
        weights("w_out", width, CHUNK * JOINTS),
        numpy_helper.from_array(np.array([-1, CHUNK, JOINTS], np.int64), "shape"),
    ]
    nodes = [helper.make_node("MatMul", ["state", "w_in"], ["h0"])]
    for k in range(steps * layers):
        nodes.append(helper.make_node("MatMul", [f"h{k}", f"w{k % layers}"], [f"m{k}"]))
        nodes.append(helper.make_node("Tanh", [f"m{k}"], [f"h{k + 1}"]))
    nodes.append(helper.make_node("MatMul", [f"h{steps * layers}", "w_out"], ["flat"]))
    nodes.append(helper.make_node("Reshape", ["flat", "shape"], ["actions"]))
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info("state", TensorProto.FLOAT, ["batch", STATE])],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["batch", CHUNK, JOINTS])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
