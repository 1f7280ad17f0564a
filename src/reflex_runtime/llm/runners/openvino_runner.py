"""Steps on the CPU: a model compiled by OpenVINO with paged attention, and its key-value blocks.

OpenVINO gets one flat batch per call and a table of blocks. The size of a block and the type of its numbers are those
of the compiled model. Its graph is built from a checkpoint, or read from an export.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.extras import needed_by
from reflex_runtime.llm.runners.adapters import AdapterStack, not_adaptable
from reflex_runtime.llm.runners.checkpoint import ModelConfig
from reflex_runtime.llm.runners.openvino_graph import add_adapters, keep_stored
from reflex_runtime.llm.runners.openvino_source import MODEL_FILE, GraphCache, OpenVinoExport, last_line, source
from reflex_runtime.llm.runners.runner import (
    GIB,
    Step,
    blocks_in,
    check_paging,
    context_length,
    free_bytes,
    probe,
)
from reflex_runtime.run.process import telemetry_off

_HINTS: Final = {"float32": "f32", "bfloat16": "bf16"}
_NEAR: Final = {"f32": 0.01, "bf16": 0.05}  # how much paging may change logits, as a share of their spread
_OF_REFERENCE: Final = {"f32": 0.01, "bf16": 0.15}  # the same if the expected logits were computed in float32
_WINDOW: Final = 10  # the place of the sliding window among the inputs of a paged layer
_ROW_BY_ROW: Final = {"Add", "Convert", "Divide", "Multiply", "Subtract", "Tanh"}  # operations after the last product
KERNELS: Final = 256  # kernels for shapes that OpenVINO keeps; with its default of 5,000 memory grows for hours


class OpenVinoRunner:
    """A `Runner` on the CPU.

    directory: a checkpoint, or an export to OpenVINO. dtype: of products and blocks, "float32" or "bfloat16"; "auto" is
    bfloat16 if the model's is and the processor has such instructions, else float32. num_blocks: None for as many as
    fit into kv_cache_bytes. threads: None: OpenVINO chooses. max_model_len: None for the model's. cache_dir: for
    converted graphs, see `GraphCache`. weights: "int8" and "int4" round the matrices, which saves memory and time, and
    changes answers. adapters: directories of LoRA adapters, by name; only for checkpoints of our own architectures.

    Raises ConfigError for an unusable directory, a value out of range, more blocks than memory, a missing library.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        dtype: str = "float32",
        num_blocks: int | None = None,
        kv_cache_bytes: int = GIB,
        threads: int | None = None,
        max_model_len: int | None = None,
        cache_dir: Path | None = None,
        weights: str = "auto",
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        ov = _library()
        core, root = ov.Core(), Path(directory)
        made = source(core, root, weights, GraphCache(root, cache_dir))
        self._kept = made.checkpoint  # the graph reads its weights from the checkpoint's memory
        config, model = made.config, made.model
        self.adapters: tuple[str, ...] = ()
        if adapters:
            if not isinstance(config, ModelConfig):
                raise not_adaptable()
            stack = AdapterStack.read(adapters, config)
            add_adapters(model, stack)
            self.adapters = stack.names
        dtype = _dtype(dtype, config, core)
        self.max_model_len = context_length(max_model_len, config.max_position_embeddings)
        hint = _HINTS[dtype]
        settings = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint, "NUM_STREAMS": 1}
        settings |= {"CPU_RUNTIME_CACHE_CAPACITY": KERNELS} | ({"INFERENCE_NUM_THREADS": threads} if threads else {})
        keep_stored(model)
        expected = made.expected
        if made.checkpoint is None and expected is None:
            # to compute them, the graph is compiled a second time
            expected = made.kept_logits(hint, lambda: unpaged(core, model, settings, probe(config.vocab_size)))
        page(model, root, config.windows, self.max_model_len)
        compiled = core.compile_model(model, "CPU", settings)
        self.vocab_size = config.vocab_size
        self.name = f"openvino {hint}" + ("" if weights == "auto" else f" {weights} weights")
        caches = [port for port in compiled.inputs if "_cache." in port.get_any_name()]
        values = next(port for port in caches if port.get_any_name().startswith("value_"))
        self.block_size = values.get_partial_shape()[2].get_length()  # 8-bit keys have rows of scales beside the tokens
        block = sum(_block_bytes(port) for port in caches)
        self.num_blocks = blocks_in(kv_cache_bytes, block, free_bytes(), num_blocks)
        self._request, self._tensor = compiled.create_infer_request(), ov.Tensor
        self._places = {port.get_any_name(): place for place, port in enumerate(compiled.inputs)}
        for port in caches:
            self._request.set_tensor(port.get_any_name(), self._cache(port))
        if expected is not None:
            near = _NEAR if made.expected is None else _OF_REFERENCE
            why = "; this version of OpenVINO loses a part of the model; use another, or serve the checkpoint"
            check_paging(self, expected, near[hint], str(root / MODEL_FILE), why)

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        lengths = step.past_lens + (step.begins[1:] - step.begins[:-1])
        self._check(step, lengths)
        inputs = {
            "input_ids": step.token_ids,
            "position_ids": step.positions,
            "max_context_len": np.array(lengths.max()),
            "past_lens": step.past_lens,
            "subsequence_begins": step.begins,
            "block_indices": step.blocks,
            "block_indices_begins": step.block_begins,
            "sampled_tokens_indices": step.picked,
        }
        if self.adapters:
            inputs["adapter_ids"] = step.adapter_ids[:, None]
        # one by one, without copies: to give the library a dict takes five times as long
        for name, array in inputs.items():
            self._request.set_input_tensor(self._places[name], self._tensor(array, shared_memory=True))
        self._request.infer(share_outputs=True)
        logits: npt.NDArray[np.float32] = self._request.get_output_tensor(0).data.reshape(-1, self.vocab_size)
        return logits

    def close(self) -> None:
        self._request = self._kept = None

    def _check(self, step: Step, lengths: npt.NDArray[np.int32]) -> None:
        """Check values that the kernels do not check: wrong ones would make them write outside their memory."""
        if self._request is None:
            raise ProcessorError(f"{self.name}: the runner is closed")
        highest, lowest = int(step.blocks.max()), int(step.blocks.min())
        if lowest < 0 or highest >= self.num_blocks:
            raise ProcessorError(f"{self.name}: step names block {lowest if lowest < 0 else highest}: not in the pool")
        if ((step.block_begins[1:] - step.block_begins[:-1]) * self.block_size < lengths).any():
            raise ProcessorError(f"{self.name}: a block table of the step does not cover its tokens")
        if int(step.token_ids.min()) < 0 or int(step.token_ids.max()) >= self.vocab_size:
            raise ProcessorError(f"{self.name}: step holds a token id outside 0 to {self.vocab_size - 1}")
        if int(step.picked.min()) < 0 or int(step.picked.max()) >= len(step.token_ids):
            raise ProcessorError(f"{self.name}: step asks for logits of a token that it does not have")

    def _cache(self, port: Any) -> Any:
        shape = [self.num_blocks] + [port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3)]
        return self._tensor(port.get_element_type(), shape)


def check_bfloat16(core: Any = None) -> None:
    """Raise ConfigError if this processor has no instructions for bfloat16. core: an `openvino.Core`, or a new one."""
    if not _has_bfloat16(core or _library().Core()):
        why = "this processor has no instructions for it; use float32 or auto"
        raise ConfigError(f"dtype='bfloat16': {why}", field="dtype")


def _has_bfloat16(core: Any) -> bool:
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _library() -> Any:
    telemetry_off()
    # oneDNN's cache lies below OpenVINO's own; its default of 1,024 takes 20 MB and more
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    with needed_by("OpenVinoRunner"):
        import openvino
    return openvino


# -- paging ------------------------------------------------------------------------------------------------------------


def _has_window(layer: Any) -> bool:
    """Whether a paged layer has a sliding window. Without one this input is the constant 0."""
    window = layer.input_value(_WINDOW).get_node()
    return window.get_type_name() != "Constant" or bool(np.any(window.get_data()))


def unpaged(core: Any, model: Any, settings: dict[str, Any], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The logits after the last of these tokens, computed by the graph without paging."""
    given = {
        "input_ids": ids[None],
        "attention_mask": np.ones((1, len(ids)), np.int64),
        "position_ids": np.arange(len(ids))[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    names = {port.get_any_name() for port in model.inputs}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    request.infer({name: array for name, array in given.items() if name in names})
    logits: npt.NDArray[np.float32] = request.get_tensor("logits").data[0, -1].copy()
    return logits


def page(model: Any, root: Path, windows: Sequence[int | None], length: int) -> None:
    """Turn the stateful graph into the paged one, with logits only for the rows in `sampled_tokens_indices`.

    windows: those of all layers. length: tokens of the longest sequence; only shorter windows matter. Raises
    ConfigError if OpenVINO loses a layer or a window.
    """
    import openvino as ov
    from openvino import opset15 as ops
    from openvino._offline_transformations import paged_attention_transformation

    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise ConfigError(
            f"{root}: OpenVINO {ov.__version__} cannot make its attention paged: {last_line(error)}"
        ) from error
    layers = [node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension"]
    found, needed = sum(map(_has_window, layers)), [window for window in windows if window and window < length]
    if len(layers) != len(windows) or found < len(needed):  # OpenVINO reports no such loss
        why = f"OpenVINO {ov.__version__} made {len(layers)} paged layers of {len(windows)}, {found} with windows"
        limit = f", or a max_model_len of {min(needed)}" if found < len(needed) else ""
        raise ConfigError(f"{root}: {why}; use another version, or the torch runner for a checkpoint{limit}")
    rows = ops.parameter([-1], ov.Type.i64, name="sampled_tokens_indices")
    rows.output(0).set_names({"sampled_tokens_indices"})
    place = _last_product(model)
    picked = ops.gather(place.get_source_output(), rows, ops.constant(np.array(0, np.int64)))
    place.replace_source_output(picked.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _last_product(model: Any) -> Any:
    """The input at which rows are picked: of the product that makes logits, else of the result."""
    place = result = model.output("logits").get_node().input(0)
    while (node := place.get_source_output().get_node()).get_type_name() in _ROW_BY_ROW:
        place = next((one for one in node.inputs() if not _is_constant(one)), None)
        if place is None:
            return result
    return node.input(0) if node.get_type_name() == "MatMul" else result


def _is_constant(place: Any) -> bool:
    """Whether an input is a weight, perhaps converted."""
    node = place.get_source_output().get_node()
    while node.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape") and node.get_input_size():
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


# -- sizes -------------------------------------------------------------------------------------------------------------


def _dtype(dtype: str, config: ModelConfig | OpenVinoExport, core: Any) -> str:
    if dtype == "auto":
        fast = config.torch_dtype == "bfloat16" and _has_bfloat16(core)
        return "bfloat16" if fast else "float32"
    if dtype == "bfloat16":
        check_bfloat16(core)
    return dtype


def _block_bytes(port: Any) -> int:
    """Bytes of one block of one layer's keys or values."""
    shape = port.get_partial_shape()
    values = shape[1].get_length() * shape[2].get_length() * shape[3].get_length()
    return int(values * port.get_element_type().bitwidth // 8)
