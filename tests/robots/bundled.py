"""The bundled policy, its earlier version, and the same network as one graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from reflex_runtime.demo import POLICY

V1 = Path(__file__).parents[2] / "examples" / "demo" / "v1"
KINDS = ("monolithic", "decomposed")


def bundled(kind: str, root: Path) -> Path:
    """An export of the bundled policy. root: where it is written if it is monolithic."""
    return POLICY if kind == "decomposed" else write_whole(root)


def write_whole(root: Path) -> Path:
    """The prefix and all denoise steps in one graph, as a monolithic export."""
    config = json.loads((POLICY / "reflex_config.json").read_text())
    steps, decomposed = config["num_denoising_steps"], config.pop("decomposed")
    prefix, step = (onnx.load(POLICY / decomposed[name]).graph for name in ("vlm_prefix_onnx", "expert_denoise_onnx"))
    shared = {held.name for held in step.initializer}
    held = {f"step.{held.name}": numpy_helper.to_array(held) for held in step.initializer}
    held |= {"zero": np.zeros(1, np.float32), "axis": np.array([1], np.int64)}
    nodes = list(prefix.node)
    nodes += [helper.make_node("Mul", ["state", "zero"], ["zeros"])]
    nodes += [helper.make_node("ReduceSum", ["zeros", "axis"], ["begin"], keepdims=0)]
    for k in range(steps):
        now = {"x": f"x{k}" if k else "noise", "x_next": f"x{k + 1}" if k + 1 < steps else "actions"}
        now |= {"state": "state", "past_kv": "past_kv", "time": f"time{k}", "": ""}
        held[f"at{k}"] = np.array([k / steps], np.float32)
        nodes.append(helper.make_node("Add", ["begin", f"at{k}"], [f"time{k}"]))
        for node in step.node:
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            copied.name = ""
            for names in (copied.input, copied.output):
                names[:] = [now.get(n) or (f"step.{n}" if n in shared else f"step{k}.{n}" if n else n) for n in names]
            nodes.append(copied)
    inputs = [*prefix.input, *(_renamed(given, "noise") for given in step.input if given.name in ("state", "x"))]
    outputs = [_renamed(step.output[0], "actions")]
    weights = [*prefix.initializer, *(numpy_helper.from_array(value, name) for name, value in held.items())]
    graph = helper.make_graph(nodes, "whole", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", config["opset"])], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    roles = {"image": "image", "tokens": "tokens", "state": "state", "noise": "noise"}
    config |= {"export_kind": "monolithic", "inputs": roles, "outputs": {"actions": "actions"}}
    root.mkdir(parents=True, exist_ok=True)
    onnx.save(model, root / "model.onnx")
    (root / "reflex_config.json").write_text(json.dumps(config))
    (root / "embodiment.json").write_bytes((POLICY / "embodiment.json").read_bytes())
    return root


def _renamed(given: Any, name: str) -> Any:
    """A description of a tensor; x of a step is the noise of the whole."""
    copied = onnx.ValueInfoProto()
    copied.CopyFrom(given)
    copied.name = given.name if given.name == "state" else name
    return copied
