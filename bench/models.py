"""The policies that are served: one that costs nothing, and one whose batch of 32 costs about five times a single.

Both take eight numbers of state and answer a chunk of 4 actions with 4 joints, so that answers are small and what is
measured is the serving. The heavy one does a fixed amount of arithmetic per call and an amount per row, on weights
that stay in the core's own cache: its cost is then the same whatever the neighbours do to the memory bus. It is still
measured in every run. With cameras they also take pictures of 224 by 224, and look at every sixteenth pixel both ways.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STATE, CHUNK, JOINTS, SIDE = 8, 4, 4, 224
WIDTH, TOKENS = 256, 16  # of a row inside the heavy policy
FIXED, LAYERS = 40, 100  # products of square matrices per call, and layers per row: 7 to 10 ms for a single


def write_export(
    root: Path, heavy: bool, cameras: Sequence[str] = (), side: int = SIDE, times: int = 1, **settings: Any
) -> Path:
    """An export directory with the tiny policy, or the heavy one. side: of the pictures, in pixels. times: how much
    more the heavy one computes. settings: further keys of its configuration."""
    root.mkdir(parents=True, exist_ok=True)
    pictures = [
        helper.make_tensor_value_info(name, TensorProto.UINT8, ["batch", side, side, 3]) for name in cameras
    ]
    (root / "model.onnx").write_bytes(_heavy(pictures, times) if heavy else _tiny(pictures))
    config: dict[str, Any] = {
        "model_id": "bench-heavy" if heavy else "bench-tiny",
        "model_type": "mlp",
        "export_kind": "monolithic",
        "state_dim": STATE,
        "action_dim": JOINTS,
        "chunk_size": CHUNK,
        "num_denoising_steps": 1,
        "inputs": {"state": "state", **{name: name for name in cameras}},
        "outputs": {"actions": "actions"},
    }
    if cameras:
        config["images"] = {name: [side, side] for name in cameras}
    config |= settings
    (root / "reflex_config.json").write_text(json.dumps(config))
    return root


def picture(form: str, size: tuple[int, int], plain: bool = False, **how: Any) -> str:
    """A picture in base64: soft noise, or one colour. how: for its encoder."""
    import PIL.Image

    data = io.BytesIO()
    noise = PIL.Image.effect_noise((16, 16), 60).convert("RGB").resize(size)
    (PIL.Image.new("RGB", size, "teal") if plain else noise).save(data, form, **how)
    return base64.b64encode(data.getvalue()).decode()


def _tiny(pictures: list[Any]) -> bytes:
    seen, nodes, constants = _look([picture.name for picture in pictures])
    nodes += [
        helper.make_node("MatMul", [seen, "w"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["actions"]),
    ]
    constants += [_weights("w", STATE, CHUNK * JOINTS), _constant("shape", [-1, CHUNK, JOINTS])]
    return _model(nodes, constants, pictures)


def _look(cameras: Sequence[str]) -> tuple[str, list[Any], list[Any]]:
    """What adds the brightness of some pixels to the state: (its name, nodes, constants)."""
    if not cameras:
        return "state", [], []
    constants = [_constant("corner", [0, 0]), _constant("far", [1 << 20, 1 << 20]), _constant("sides", [1, 2])]
    constants += [_constant("sixteenth", [16, 16]), _constant("second", [1])]
    nodes, seen = [], "state"
    for name in cameras:
        nodes += [
            helper.make_node("Slice", [name, "corner", "far", "sides", "sixteenth"], [f"{name}_pixels"]),
            helper.make_node("Cast", [f"{name}_pixels"], [f"{name}_floats"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", [f"{name}_floats"], [f"{name}_mean"], axes=[1, 2, 3], keepdims=0),
            helper.make_node("Unsqueeze", [f"{name}_mean", "second"], [f"{name}_column"]),
            helper.make_node("Add", [seen, f"{name}_column"], [f"{name}_seen"]),
        ]
        seen = f"{name}_seen"
    return seen, nodes, constants


def _heavy(pictures: list[Any], times: int) -> bytes:
    """Rows are TOKENS × WIDTH and pass through LAYERS dense layers. The fixed part depends on the batch, or it would be
    computed once at load, and is then scaled until it changes no answer."""
    constants = [_weights(f"w{i}", WIDTH, WIDTH) for i in range(4)]
    constants += [_weights("w_in", STATE, WIDTH), _weights("w_out", WIDTH, JOINTS), _weights("square", WIDTH, WIDTH)]
    places = np.linspace(-1, 1, TOKENS * WIDTH, dtype=np.float32).reshape(1, TOKENS, WIDTH)
    constants += [numpy_helper.from_array(places, "places"), numpy_helper.from_array(np.float32(1e-30), "tiny")]
    constants += [_constant("row", [-1, 1, WIDTH]), _constant("axis", [1])]
    constants += [_constant("begin", [0]), _constant("end", [CHUNK])]
    seen, nodes, looking = _look([picture.name for picture in pictures])
    constants += looking
    nodes += [
        helper.make_node("ReduceMax", [seen], ["peak"], keepdims=0),
        helper.make_node("Mul", ["peak", "tiny"], ["nothing"]),
        helper.make_node("Add", ["square", "nothing"], ["f0"]),
    ]
    for k in range(times * FIXED):
        nodes.append(helper.make_node("MatMul", [f"f{k}", "square"], [f"p{k}"]))
        nodes.append(helper.make_node("Relu", [f"p{k}"], [f"f{k + 1}"]))
    nodes += [
        helper.make_node("ReduceMax", [f"f{times * FIXED}"], ["most"], keepdims=0),
        helper.make_node("Mul", ["most", "tiny"], ["still_nothing"]),
        helper.make_node("MatMul", [seen, "w_in"], ["wide"]),
        helper.make_node("Reshape", ["wide", "row"], ["rows"]),
        helper.make_node("Add", ["rows", "places"], ["placed"]),
        helper.make_node("Add", ["placed", "still_nothing"], ["h0"]),
    ]
    for k in range(times * LAYERS):
        nodes.append(helper.make_node("MatMul", [f"h{k}", f"w{k % 4}"], [f"m{k}"]))
        nodes.append(helper.make_node("Relu", [f"m{k}"], [f"h{k + 1}"]))
    nodes.append(helper.make_node("Slice", [f"h{times * LAYERS}", "begin", "end", "axis"], ["kept"]))
    nodes.append(helper.make_node("MatMul", ["kept", "w_out"], ["actions"]))
    return _model(nodes, constants, pictures)


def _weights(name: str, rows: int, columns: int) -> Any:
    values = np.random.default_rng(len(name) + rows).normal(size=(rows, columns)) * (2.0 / rows) ** 0.5
    return numpy_helper.from_array(values.astype(np.float32), name)


def _constant(name: str, values: list[int]) -> Any:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def _model(nodes: list[Any], constants: list[Any], pictures: list[Any]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info("state", TensorProto.FLOAT, ["batch", STATE]), *pictures],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["batch", CHUNK, JOINTS])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
