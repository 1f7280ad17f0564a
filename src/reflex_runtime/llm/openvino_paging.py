"""Turns an ordinary stateful decoder into one with paged attention, and finds out what that would lose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.openvino_export import last_line

PROBE: Final = 24  # tokens that a graph is compared on, within one block
_WINDOW: Final = 10  # the place of the sliding window among the inputs of a paged layer
_ROW_BY_ROW: Final = {"Add", "Convert", "Divide", "Multiply", "Subtract", "Tanh"}  # what may follow the last product


def probe(vocab_size: int) -> npt.NDArray[np.int64]:
    """The tokens that a graph is compared on."""
    return np.arange(PROBE, dtype=np.int64) * 7 % vocab_size


def _has_window(layer: Any) -> bool:
    """Whether a paged layer has a sliding window: its input is the constant 0 where there is none."""
    window = layer.input_value(_WINDOW).get_node()
    return window.get_type_name() != "Constant" or bool(np.any(window.get_data()))


def unpaged(core: Any, model: Any, settings: dict[str, Any], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The logits after the last of these tokens, from the graph as it was exported."""
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

    windows: of each layer. length: tokens of the longest sequence; no window matters that is not shorter.
    """
    import openvino as ov
    from openvino import opset15 as ops
    from openvino._offline_transformations import paged_attention_transformation

    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise ConfigError(
            f"{root}: OpenVINO {ov.__version__} makes no paged attention of it: {last_line(error)}"
        ) from error
    layers = [node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension"]
    found, needed = sum(map(_has_window, layers)), [window for window in windows if window and window < length]
    if len(layers) != len(windows) or found < len(needed):  # a loss here would raise no error
        told = f"OpenVINO {ov.__version__} made {len(layers)} paged layers of {len(windows)}, {found} with windows"
        limit = f", or a max_model_len of {min(needed)}" if found < len(needed) else ""
        raise ConfigError(f"{root}: {told}; use another version, or the torch runner for a checkpoint{limit}")
    rows = ops.parameter([-1], ov.Type.i64, name="sampled_tokens_indices")
    rows.output(0).set_names({"sampled_tokens_indices"})
    place = _last_product(model)
    picked = ops.gather(place.get_source_output(), rows, ops.constant(np.array(0, np.int64)))
    place.replace_source_output(picked.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _last_product(model: Any) -> Any:
    """The input of the product that makes logits, or of the result where that is not found: rows are picked there."""
    place = result = model.output("logits").get_node().input(0)
    while (node := place.get_source_output().get_node()).get_type_name() in _ROW_BY_ROW:
        place = next((one for one in node.inputs() if not _is_constant(one)), None)
        if place is None:
            return result
    return node.input(0) if node.get_type_name() == "MatMul" else result


def _is_constant(place: Any) -> bool:
    """Whether a value is a weight, converted or not."""
    node = place.get_source_output().get_node()
    while node.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape") and node.get_input_size():
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")
