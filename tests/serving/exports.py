"""Exports small enough to start a server on in no time, made for what a test has to see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

STATE, CHUNK, ACTIONS = 2, 3, 2
WEIGHTS = np.array([[0.5, -0.25], [0.125, 1.0]], np.float32)


def write_tiny(
    root: Path, batch: str | int = "batch", weight: int = 0, fails: bool = False,
    weights: NDArray[np.float32] = WEIGHTS, cameras: Sequence[str] = (), noise: bool = True, **settings: Any,
) -> Path:
    """A policy of state alone: actions = tanh(noise + state · weights), CHUNK times; the weights say both sizes.

    batch: the leading axis. weight: how many times each row is multiplied with a matrix of 4 MB for nothing; 64 take a
    few milliseconds. fails: it loads, and raises in every call. cameras: pictures of 6 × 8 that it asks for and
    ignores. noise: whether it asks for it; else it is zero. settings: further keys of its configuration.
    """
    root.mkdir(parents=True, exist_ok=True)
    states, actions = weights.shape
    nodes = [
        helper.make_node("MatMul", ["pose", "weights"], ["moved"]),
        helper.make_node("Unsqueeze", ["moved", "one"], ["term"]),
    ]
    constants = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(np.array([1]), "one")]
    term = "term"
    if weight:
        constants += [
            numpy_helper.from_array(np.zeros((states, 1000), np.float32), "wide"),
            numpy_helper.from_array(np.full((1000, 1000), 1e-3, np.float32), "heavy"),
            numpy_helper.from_array(np.zeros((1000, 1), np.float32), "narrow"),
        ]
        nodes += [
            helper.make_node("MatMul", ["pose", "wide"], ["h0"]),
            *(helper.make_node("MatMul", [f"h{i}", "heavy"], [f"h{i + 1}"]) for i in range(weight)),
            helper.make_node("MatMul", [f"h{weight}", "narrow"], ["last"]),
            helper.make_node("Unsqueeze", ["last", "one"], ["nothing"]),
            helper.make_node("Add", ["term", "nothing"], ["sum"]),
        ]
        term = "sum"
    if fails:  # two numbers a row never make rows of seven
        constants += [numpy_helper.from_array(np.array([-1, 7]), "seven_wide")]
        nodes += [
            helper.make_node("Reshape", ["pose", "seven_wide"], ["sevens"], name="make_rows_of_seven"),
            helper.make_node("ReduceMean", ["sevens"], ["mean"], keepdims=0),
            helper.make_node("Add", [term, "mean"], ["off"]),
        ]
        term = "off"
    if not noise:
        constants.append(numpy_helper.from_array(np.zeros((1, CHUNK, actions), np.float32), "x"))
    nodes += [helper.make_node("Add", ["x", term], ["y"]), helper.make_node("Tanh", ["y"], ["chunk"])]

    def port(name: str, *dims: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *dims])

    pictures = [helper.make_tensor_value_info(name, TensorProto.UINT8, [batch, 6, 8, 3]) for name in cameras]
    asked = [port("pose", states), *([port("x", CHUNK, actions)] if noise else []), *pictures]
    graph = helper.make_graph(nodes, "tiny", asked, [port("chunk", CHUNK, actions)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    (root / "model.onnx").write_bytes(model.SerializeToString())
    config: dict[str, Any] = {
        "model_id": "tiny",
        "model_type": "flow_matching",
        "export_kind": "monolithic",
        "state_dim": states,
        "action_dim": actions,
        "chunk_size": CHUNK,
        "num_denoising_steps": 1,
        "inputs": {"state": "pose", **({"noise": "x"} if noise else {}), **{name: name for name in cameras}},
        "outputs": {"actions": "chunk"},
    }
    if cameras:
        config["images"] = {name: [6, 8] for name in cameras}
    (root / "reflex_config.json").write_text(json.dumps(config | settings))
    return root


def expected(state: list[float], seed: int, weights: NDArray[np.float32] = WEIGHTS) -> NDArray[np.float32]:
    """What `write_tiny` answers, computed the plain way."""
    noise = np.random.Generator(np.random.PCG64(seed)).standard_normal(
        (CHUNK, weights.shape[1]), dtype=np.float32
    )
    return np.tanh(noise + np.array(state, np.float32) @ weights)
