"""A checkpoint as an OpenVINO graph, built op by op from the files, without a framework.

The graph is an ordinary stateful decoder (input_ids, attention_mask, position_ids, beam_idx → logits), which other
tools can run. Do not change the form of its parts: OpenVINO's paged-attention transformation, and the CPU plugin's
fusions of RMSNorm and rotary positions, recognise these subgraphs by their form. `VERSION` changes with the form, so
that graphs in caches of older code are not used. Weights keep their 16 bits, or are rounded to 8 or 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.llm.runners.adapters import AdapterStack
from reflex_runtime.llm.runners.checkpoint import EMBEDDING, Checkpoint
from reflex_runtime.run.process import telemetry_off

telemetry_off()
import openvino as ov  # noqa: E402
from openvino import opset15 as ops  # noqa: E402

ADAPTER_IDS: Final = "adapter_ids"
VERSION: Final = 3
ROUNDING: Final = 1  # changes when weights are rounded in another way, as `VERSION` with the form of the graph

_MARK: Final = "decompression_0"
_GROUP: Final = 64  # most numbers of a row that share a scale in 4 bits
_LEAST: Final = 4096  # numbers of a matrix; smaller ones are not rounded

_TYPES = {"F32": ov.Type.f32, "F16": ov.Type.f16, "BF16": ov.Type.bf16}
_NEVER = float(np.finfo(np.float32).min)  # masks a score; minus infinity would turn a masked row into NaN

Node = Any  # openvino.Node; the library's stubs leave most operations untyped


def build(checkpoint: Checkpoint) -> Any:
    """The `openvino.Model` of a checkpoint. Weights keep their types and their places in the mapped files.

    The checkpoint must outlive the model and all that is compiled from it: they read its memory.
    Inputs are int64 [batch, tokens] (attention_mask: [batch, past + tokens]) and int32 beam_idx [batch]; the output is
    float32 logits [batch, tokens, vocab_size]; keys and values are state.
    """
    return _Decoder(checkpoint).model()


class _Decoder:
    """The graph while it is built; each method adds one part and returns its output node."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._input_ids = _parameter("input_ids", [-1, -1])
        self._mask = _parameter("attention_mask", [-1, -1])
        self._positions = _parameter("position_ids", [-1, -1])
        self._beams = _parameter("beam_idx", [-1], ov.Type.i32)
        self._sinks: list[Node] = []

    def model(self) -> Any:
        config = self._config
        cosine, sine = self._rotary()
        tokens = ops.gather(ops.shape_of(self._input_ids), i64(1), i64(0))
        masks = {window: causal_mask(self._mask, tokens, window) for window in dict.fromkeys(config.windows)}
        states = ops.gather(self._constant(EMBEDDING), self._input_ids, i64(0))
        states = _float(states)
        for layer, window in enumerate(config.windows):
            prefix = f"model.layers.{layer}."
            normed = self._norm(states, f"{prefix}input_layernorm.weight")
            states = ops.add(states, self._attention(layer, normed, cosine, sine, masks[window]))
            normed = self._norm(states, f"{prefix}post_attention_layernorm.weight")
            states = ops.add(states, self._feed_forward(f"{prefix}mlp.", normed))
        logits = ops.matmul(self._norm(states, "model.norm.weight"), self._matrix(self._checkpoint.head), False, True)
        logits.output(0).set_names({"logits"})
        result = ops.result(logits, name="logits")
        inputs = [self._input_ids, self._mask, self._positions, self._beams]
        return ov.Model([result], self._sinks, inputs, config.architectures[0])

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _norm(self, states: Node, weight: str) -> Node:
        squares = ops.power(states, _f32(2.0))
        mean = ops.reduce_mean(squares, i64([-1]), keep_dims=True)
        scale = ops.divide(_f32(1.0), ops.sqrt(ops.add(mean, _f32(self._config.rms_norm_eps))))
        return ops.multiply(_float(self._constant(weight)), ops.multiply(states, scale))

    def _linear(self, states: Node, name: str) -> Node:
        product = ops.matmul(states, self._matrix(f"{name}.weight"), False, True)
        product.set_friendly_name(name)  # adapters find it by its layer
        bias = f"{name}.bias"
        return ops.add(product, _float(self._constant(bias))) if bias in self._config.tensors() else product

    def _feed_forward(self, prefix: str, states: Node) -> Node:
        gate = ops.swish(self._linear(states, f"{prefix}gate_proj"))
        return self._linear(ops.multiply(gate, self._linear(states, f"{prefix}up_proj")), f"{prefix}down_proj")

    def _attention(self, layer: int, states: Node, cosine: Node, sine: Node, mask: Node) -> Node:
        config, prefix = self._config, f"model.layers.{layer}.self_attn."
        queries = self._heads(states, f"{prefix}q_proj", config.num_attention_heads)
        keys = self._heads(states, f"{prefix}k_proj", config.num_key_value_heads)
        if config.qk_norm:
            queries, keys = self._norm(queries, f"{prefix}q_norm.weight"), self._norm(keys, f"{prefix}k_norm.weight")
        queries, keys, values = (
            ops.transpose(heads, i64([0, 2, 1, 3]))
            for heads in (queries, keys, self._heads(states, f"{prefix}v_proj", config.num_key_value_heads))
        )
        queries, keys = self._rotate(queries, cosine, sine), self._rotate(keys, cosine, sine)
        keys, values = (
            spread_heads(
                remembered(f"{layer}.{name}", states, self._input_ids, self._beams, self._sinks),
                config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            )
            for name, states in (("key", keys), ("value", values))
        )  # fmt: skip
        mixed = ops.scaled_dot_product_attention(queries, keys, values, mask)
        merged = ops.reshape(ops.transpose(mixed, i64([0, 2, 1, 3])), i64([0, 0, -1]), True)
        return self._linear(merged, f"{prefix}o_proj")

    def _heads(self, states: Node, name: str, heads: int) -> Node:
        """[batch, tokens, heads, head_dim]."""
        return ops.reshape(self._linear(states, name), i64([0, 0, heads, self._config.head_dim]), True)

    # -- positions -----------------------------------------------------------------------------------------------------

    def _rotary(self) -> tuple[Node, Node]:
        """Cosine and sine of every position, [batch, 1, tokens, head_dim]."""
        positions = ops.convert(ops.unsqueeze(self._positions, i64(2)), "f32")
        half = ops.multiply(positions, ops.constant(self._config.inverse_frequencies().reshape(1, 1, -1)))
        angles = ops.unsqueeze(ops.concat([half, half], 2), i64(1))
        factor = self._config.attention_factor
        waves = (ops.cos(angles), ops.sin(angles))
        return waves if factor == 1.0 else tuple(ops.multiply(wave, _f32(factor)) for wave in waves)

    def _rotate(self, heads: Node, cosine: Node, sine: Node) -> Node:
        half, end = self._config.head_dim // 2, np.iinfo(np.int64).max
        low = ops.slice(heads, i64([0]), i64([half]), i64([1]), i64([3]))
        high = ops.slice(heads, i64([half]), i64([end]), i64([1]), i64([3]))
        turned = ops.concat([ops.multiply(high, _f32(-1.0)), low], -1)
        return ops.add(ops.multiply(heads, cosine), ops.multiply(turned, sine))

    # -- weights -------------------------------------------------------------------------------------------------------

    def _constant(self, name: str) -> Node:
        dtype, data, shape = self._checkpoint.raw(name)
        return ops.constant(ov.Tensor(data, ov.Shape(shape), _TYPES[dtype]), shared_memory=True)

    def _matrix(self, name: str) -> Node:
        """The weight [outputs, inputs] as float32, whatever type is stored."""
        return _float(self._constant(name))


# -- parts that are the same in every graph ----------------------------------------------------------------------------


def remembered(name: str, current: Node, queries: Node, beams: Node, sinks: list[Node]) -> Node:
    """[batch, heads, past + tokens, head_dim]: the state followed by `current`. It becomes the new state; `sinks` gets
    the node that stores it. queries: any node whose first dimension is the batch.
    """
    shape = current.output(0).get_partial_shape()
    heads, size = shape[1].get_length(), shape[3].get_length()
    batch = ops.gather(ops.shape_of(queries), i64([0]), i64(0))
    empty = ops.broadcast(_f32(0.0), ops.concat([batch, i64([heads]), i64([0]), i64([size])], 0))
    variable = f"past_key_values.{name}present.{name}"
    past = ops.read_value(empty, variable, ov.Type.f32, ov.PartialShape([-1, heads, -1, size]))
    both = ops.concat([ops.gather(past, beams, i64(0)), current], 2)
    sinks.append(ops.assign(both, variable))
    return both


def spread_heads(states: Node, heads: int, kv_heads: int, size: int) -> Node:
    """Repeat each key-value head for every query head that shares it."""
    groups = heads // kv_heads
    if groups == 1:
        return states
    spread = ops.broadcast(ops.unsqueeze(states, i64(2)), i64([1, 1, groups, 1, 1]), broadcast_spec="BIDIRECTIONAL")
    return ops.reshape(spread, i64([0, heads, -1, size]), True)


def causal_mask(mask: Node, tokens: Node, window: int | None) -> Node:
    """[batch, 1, tokens, past + tokens]: each token sees no padding, no later token, and none beyond `window`.

    mask: [batch, past + tokens], 0 for padding. tokens: how many are new. The operands that are always true look
    useless, but OpenVINO's paging keeps a window only if it has this form.
    """
    total = ops.gather(ops.shape_of(mask), i64(1), i64(0))
    places = ops.range(i64(0), total, i64(1), "i64")
    keys = ops.reshape(places, i64([1, 1, 1, -1]), False)
    queries = ops.range(ops.subtract(total, tokens), total, i64(1), "i64")
    queries = ops.reshape(queries, i64([1, 1, -1, 1]), False)
    causal = ops.less_equal(keys, queries)
    real = ops.unsqueeze(ops.convert(mask, "boolean"), i64([1, 2]))
    if window is None:
        return ops.logical_and(causal, real)
    true = ops.constant(np.array(True))
    near = ops.greater(keys, ops.add(queries, i64(-window)))
    seen = ops.bitwise_and(ops.bitwise_and(true, near), causal)
    seen = ops.bitwise_and(ops.bitwise_and(true, seen), real)
    spread = ops.broadcast(seen, ops.shape_of(seen))
    scores = ops.select(spread, _f32(0.0), _f32(_NEVER))
    return ops.slice(scores, i64([0]), ops.unsqueeze(total, i64(0)), i64([1]), i64([3]))


def _parameter(name: str, shape: list[int], kind: Any = ov.Type.i64) -> Node:
    node = ops.parameter(shape, kind, name=name)  # paging looks for both names, the node's and its output's
    node.output(0).set_names({name})
    return node


def _float(node: Node) -> Node:
    return node if node.get_element_type() == ov.Type.f32 else ops.convert(node, "f32")


def i64(value: Any) -> Node:
    return ops.constant(np.array(value, np.int64))


def _f32(value: float) -> Node:
    return ops.constant(np.array(value, np.float32))


def add_adapters(model: Any, stack: AdapterStack) -> None:
    """Add adapters to a graph of `build`, in place; its products have the names of their layers.

    The graph gets an input `adapter_ids` of the shape of `input_ids`: the number of each token's adapter, 0 for none.
    """
    ids = ops.parameter([-1, -1], ov.Type.i32, name=ADAPTER_IDS)
    ids.output(0).set_names({ADAPTER_IDS})
    rows = ops.gather(ops.constant(stack.table), ids, ops.constant(np.array(0, np.int64)))
    products = {node.get_friendly_name(): node for node in model.get_ops() if node.get_type_name() == "MatMul"}
    for layer, (a, b) in stack.layers.items():
        product = products[layer]
        places = list(product.output(0).get_target_inputs())
        low = ops.multiply(ops.matmul(product.input_value(0), ops.constant(a), False, True), rows)
        total = ops.add(product, ops.matmul(low, ops.constant(b), False, True))
        for place in places:
            place.replace_source_output(total.output(0))
    model.add_parameters([ids])
    model.validate_nodes_and_infer_types()


# -- weights in fewer bits ---------------------------------------------------------------------------------------------
#
# OpenVINO keeps a weight in its stored type only if the conversion that reads it is marked as decompression, or reads 4
# or 8 bits. Any other conversion of a constant is computed at compile time, which makes a copy in float32.


def keep_stored(model: Any) -> None:
    """Mark every conversion of a 16-bit constant, so that weights stay in 16 bits in memory."""
    for node in model.get_ops():
        if node.get_type_name() == "Convert" and _stored(node) in ("bf16", "f16"):
            node.get_rt_info()[_MARK] = ""


def compress(model: Any, bits: int) -> None:
    """Round the matrices of a graph to 8 or 4 bits, in place; only one matrix at a time is in memory in float32.

    8 bits: a scale for each row. 4 bits: a scale for each group of a row, see `_group`; but tables of embeddings, tied
    or not, and the matrix of the logits get 8 bits. Other weights stay.
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
    for name, (source, wide) in constants.items():
        weights = _float32(source)
        group = 0 if bits == 8 or wide or name in outer else _group(weights.shape[1])
        small = _rounded(weights, group)
        small.set_friendly_name(f"{name}/compressed")
        for place in places[name]:
            place.replace_source_output(small.output(0))
    model.validate_nodes_and_infer_types()


def _stored(node: Node) -> str:
    """The type of the constant that a node reads; "" if it reads none."""
    source = node.input_value(0).get_node()
    return source.get_element_type().get_type_name() if source.get_type_name() == "Constant" else ""


def _matrices(model: Any) -> Iterator[tuple[Node, Any]]:
    """The nodes and their inputs that read a matrix of 16 or 32 bits: a table, or weights [outputs, inputs]."""
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
    """The name of the weights of the last product before a result; empty if there is no product."""
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
    """The largest power of two up to `_GROUP` that divides the row's size; 0, for 8 bits, if that is below 16."""
    group = _GROUP
    while size % group:
        group //= 2
    return group if group >= 16 else 0


def _rounded(weights: npt.NDArray[np.float32], group: int) -> Node:
    """A float32 weight computed from fewer bits. group: 0 for 8 bits with a scale for each row; else the size of the
    groups of 4 bits."""
    if not group:
        scale = np.maximum(np.abs(weights).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        small = np.rint(weights / scale).astype(np.int8)
        return ops.multiply(ops.convert(ops.constant(small), "f32"), ops.constant(scale))
    parts = weights.reshape(len(weights), -1, group)
    # the number furthest from zero in each group becomes -8, so it stays exact
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
