"""The weights of an OpenVINO graph: left in 16 bits where they are stored so, or rounded to 8 or 4 bits.

OpenVINO keeps a weight in memory as its file has it only if the conversion behind it is marked as decompression, or
reads 4 or 8 bits. It computes any other conversion of a constant when it compiles, into a copy in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.run.process import telemetry_off

telemetry_off()
import openvino as ov  # noqa: E402
from openvino import opset15 as ops  # noqa: E402

VERSION: Final = 1  # changes with how weights are rounded, so that graphs kept by older code are not used
_MARK: Final = "decompression_0"
_GROUP: Final = 64  # numbers of a row that share a scale in 4 bits, at most
_LEAST: Final = 4096  # numbers; a smaller matrix is not worth it

Node = Any  # openvino.Node; the library's stubs leave most operations untyped


def keep_stored(model: Any) -> None:
    """Mark every conversion of a 16-bit constant, so that weights stay in 16 bits in memory."""
    for node in model.get_ops():
        if node.get_type_name() == "Convert" and _stored(node) in ("bf16", "f16"):
            node.get_rt_info()[_MARK] = ""


def compress(model: Any, bits: int, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Round the matrices of a graph to 8 or 4 bits, in place; one matrix at a time is in memory in float32.

    8 bits: a scale for each row. 4 bits: a scale for each 64 numbers of a row, or for the largest part of 64 that the
    row is a multiple of; tables of embeddings, tied or not, and the matrix of the logits have 8. Other weights stay.
    """
    places: dict[str, list[Any]] = {}
    constants: dict[str, tuple[Node, bool]] = {}
    for node, place in _matrices(model):
        source = place.get_source_output().get_node()
        places.setdefault(source.get_friendly_name(), []).append(place)
        wide = node.get_type_name() == "Gather" or constants.get(source.get_friendly_name(), (None, False))[1]
        constants[source.get_friendly_name()] = source, wide
    last = model.output("logits").get_node()
    outer = _feeds(last)
    for done, (name, (source, wide)) in enumerate(constants.items()):
        progress(done, len(constants))
        weights = _float32(source)
        group = 0 if bits == 8 or wide or name in outer else _group(weights.shape[1])
        small = _rounded(weights, group)
        small.set_friendly_name(f"{name}/compressed")
        for place in places[name]:
            place.replace_source_output(small.output(0))
    model.validate_nodes_and_infer_types()


def _stored(node: Node) -> str:
    """The type that a node's constant has, or nothing where it does not read one."""
    source = node.input_value(0).get_node()
    return source.get_element_type().get_type_name() if source.get_type_name() == "Constant" else ""


def _matrices(model: Any) -> Iterator[tuple[Node, Any]]:
    """The inputs that read a matrix [rows, numbers] of 16 or 32 bits, a table or one [outputs, inputs]."""
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "MatMul" and node.get_attributes().get("transpose_b"):
            place = node.input(1)
        elif kind == "Gather":
            place = node.input(0)
        else:
            continue
        source = place.get_source_output().get_node()
        origin = source.input_value(0).get_node() if source.get_type_name() == "Convert" else source
        shape = list(origin.get_output_partial_shape(0).to_shape()) if origin.get_type_name() == "Constant" else []
        floats = origin.get_element_type().get_type_name() in ("f32", "f16", "bf16")
        if floats and len(shape) == 2 and shape[0] * shape[1] >= _LEAST:
            yield node, place


def _feeds(result: Node) -> set[str]:
    """Names of what the last product before a result reads."""
    node = result
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            return set()
        node = node.input_value(0).get_node()
    return {node.input_value(1).get_node().get_friendly_name()}


def _float32(source: Node) -> npt.NDArray[np.float32]:
    constant = source.input_value(0).get_node() if source.get_type_name() == "Convert" else source
    if constant.get_element_type() == ov.Type.bf16:  # numpy has no such type: the upper half of a float32
        raw = constant.get_data(dtype=np.float32)
        return np.asarray(raw, np.float32)
    return np.asarray(constant.data, np.float32)


def _group(size: int) -> int:
    """The largest power of two up to `_GROUP` that divides a row; 0, a scale for each row of 8 bits, below 16."""
    group = _GROUP
    while size % group:
        group //= 2
    return group if group >= 16 else 0


def _rounded(weights: npt.NDArray[np.float32], group: int) -> Node:
    """A weight as float32 out of fewer bits. group: 0 for 8 bits and a scale for each row, else 4 bits."""
    if not group:
        scale = np.maximum(np.abs(weights).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        small = np.rint(weights / scale).astype(np.int8)
        return ops.multiply(ops.convert(ops.constant(small), "f32"), ops.constant(scale))
    parts = weights.reshape(len(weights), -1, group)
    # of each group the number that is furthest from zero is exact, and has the side that reaches to -8
    widest = np.take_along_axis(parts, np.abs(parts).argmax(2)[..., None], 2)
    scale = widest / np.float32(-8)
    scale[scale == 0] = 1
    small = np.clip(np.rint(parts / scale), -8, 7).astype(np.int8).reshape(-1, 2)
    packed = (small[:, 0] & 15 | small[:, 1] << 4).astype(np.uint8)
    tensor = ov.Tensor(ov.Type.i4, ov.Shape(parts.shape))
    np.copyto(tensor.data.reshape(-1).view(np.uint8), packed)  # a tensor made of an array would not keep the array
    constant = ops.constant(tensor, shared_memory=True)
    product = ops.multiply(ops.convert(constant, "f32"), ops.constant(scale))
    return ops.reshape(product, ops.constant(np.array(weights.shape, np.int64)), False)
