"""Exports whose actions say what reached the graph: column k of every action is the mean of input k."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEIGHT, WIDTH, CHUNK = 4, 6, 3
IR, OPSET = 8, 17
TYPES = {"u": TensorProto.UINT8, "f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}

Ports = Mapping[str, tuple[str, list[int]]]  # letter of the type, sizes after the batch axis


def write_means(file: Path, inputs: Ports, width: int, output: str = "chunk") -> None:
    """output: [batch, CHUNK, width], zeros in the columns behind those of the inputs."""
    nodes: list[Any] = []
    constants = [numpy_helper.from_array(np.array([1, 2], np.int64), "one_two")]
    for name, (_, dims) in inputs.items():
        nodes.append(helper.make_node("Cast", [name], [f"{name}_f"], to=TensorProto.FLOAT))
        axes = list(range(1, len(dims) + 1))
        if axes:
            nodes.append(helper.make_node("ReduceMean", [f"{name}_f"], [f"{name}_m"], axes=axes, keepdims=0))
        else:
            nodes.append(helper.make_node("Identity", [f"{name}_f"], [f"{name}_m"]))
        nodes.append(helper.make_node("Unsqueeze", [f"{name}_m", "one_two"], [f"{name}_c"]))
    columns = [f"{name}_c" for name in inputs]
    if width > len(columns):
        constants.append(numpy_helper.from_array(np.zeros(1, np.float32), "nought"))
        nodes.append(helper.make_node("Mul", [columns[0], "nought"], ["empty"]))
        columns += ["empty"] * (width - len(columns))
    constants.append(numpy_helper.from_array(np.zeros((1, CHUNK, width), np.float32), "rows"))
    nodes.append(helper.make_node("Concat", columns, ["row"], axis=2))
    nodes.append(helper.make_node("Add", ["row", "rows"], [output]))
    ports = [helper.make_tensor_value_info(n, TYPES[t], ["batch", *dims]) for n, (t, dims) in inputs.items()]
    out = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", CHUNK, width])]
    graph = helper.make_graph(nodes, "means", ports, out, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    onnx.checker.check_model(model)
    file.write_bytes(model.SerializeToString())


def write_export(root: Path, ports: Ports, width: int, /, **keys: Any) -> Path:
    """A monolithic export; every port is a role, under its own name with `/` for `__`."""
    root.mkdir(parents=True, exist_ok=True)
    write_means(root / "model.onnx", ports, width)
    settings: dict[str, Any] = {
        "model_id": "means",
        "model_type": "means",
        "export_kind": "monolithic",
        "state_dim": 2,
        "action_dim": width,
        "chunk_size": CHUNK,
        "num_denoising_steps": 1,
        "inputs": {name.replace("__", "/"): name for name in ports},
        "outputs": {"actions": "chunk"},
    }
    (root / "reflex_config.json").write_text(json.dumps(settings | keys))
    return root
