"""A decoder that was exported to OpenVINO's own files, as `optimum-cli export openvino` writes them, and its paging.

Its graph is run as it is, whatever the architecture: what it takes and keeps between steps is in the graph, and the few
numbers that are not are in `config.json`. `page` turns it into one with paged attention. A graph that cannot be served
is a ConfigError that names the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.checkpoint import INDEX_FILE, WEIGHTS_FILE, longest, number
from reflex_runtime.llm.runners.model_config import CONFIG_FILE, read_json
from reflex_runtime.run.process import telemetry_off

MODEL_FILE: Final = "openvino_model.xml"
TRACED_FILE: Final = "traced.json"  # of our own conversions: the window of each layer
TRACED_VERSION: Final = 1  # changes with the form of these graphs
PROBE_FILE: Final = "probe.npy"  # of our own conversions: what the reference makes of the tokens of `probe`
_INPUTS: Final = {"input_ids", "attention_mask", "position_ids", "beam_idx"}
PROBE: Final = 24  # tokens that a graph is compared on, within one block
_WINDOW: Final = 10  # the place of the sliding window among the inputs of a paged layer
_ROW_BY_ROW: Final = {"Add", "Convert", "Divide", "Multiply", "Subtract", "Tanh"}  # what may follow the last product


@dataclass(frozen=True, slots=True)
class OpenVinoExport:
    """What `ModelConfig` says of a checkpoint, as far as the runner needs it.

    token_size: numbers that one token keeps in the states. windows: a sliding window or None for each layer; the order
    is not known.
    """

    vocab_size: int
    max_position_embeddings: int
    torch_dtype: str
    token_size: int
    windows: tuple[int | None, ...]

    @classmethod
    def open(cls, directory: Path | str) -> OpenVinoExport:
        """Read and check the description and the graph. Weights stay in their file."""
        root = Path(directory)
        file = root / MODEL_FILE
        config = read_json(root / CONFIG_FILE)
        config = config.get("text_config") or config
        graph = read_graph(root)
        inputs = {port.get_any_name() for port in graph.inputs}
        outputs = {name for port in graph.outputs for name in port.get_names()}
        states = [node for node in graph.get_ops() if node.get_type_name() == "ReadValue"]
        if not {"input_ids"} <= inputs <= _INPUTS or "logits" not in outputs:
            found = f"{', '.join(sorted(inputs))} to {', '.join(sorted(outputs))}"
            raise ConfigError(f"{file}: goes from {found}: must be a decoder from input_ids to logits")
        if not states:
            why = "has no state for keys and values; export it with --task text-generation-with-past"
            raise ConfigError(f"{file}: {why}")
        shapes = [list(node.get_output_partial_shape(0)) for node in states]
        fixed = [[size.get_length() for size in shape if size.is_static] for shape in shapes]
        if len(states) % 2 or any(len(shape) - len(sizes) != 2 for shape, sizes in zip(shapes, fixed, strict=True)):
            raise ConfigError(f"{file}: keeps other state than keys and values of tokens; such a model is not served")
        width = graph.output("logits").get_partial_shape()[2]
        return cls(
            number(root, config, "vocab_size") if width.is_dynamic else width.get_length(),
            longest(root, config),
            str(config.get("torch_dtype") or config.get("dtype")),
            sum(prod(sizes) for sizes in fixed),
            _windows_of(root, config, len(states) // 2),
        )

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Memory for the keys and values of so many tokens. width: bytes of a number."""
        return self.token_size * tokens * width


def is_export(directory: Path | str) -> bool:
    """Whether the directory holds an export and no checkpoint, which would be served instead."""
    root = Path(directory)
    weights = (root / WEIGHTS_FILE, root / INDEX_FILE)
    return (root / MODEL_FILE).is_file() and not any(file.is_file() for file in weights)


def read_graph(root: Path) -> Any:
    """The `openvino.Model`; ConfigError for files that are none."""
    telemetry_off()
    try:
        import openvino
    except ImportError as error:
        raise ConfigError(f"{root / MODEL_FILE}: needs openvino: in a clone, pip install '.[llm]'") from error
    try:
        return openvino.Core().read_model(root / MODEL_FILE)
    except RuntimeError as error:
        raise ConfigError(f"{root / MODEL_FILE}: cannot be read: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """The line of OpenVINO's messages that says what is wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _windows_of(root: Path, config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    traced = root / TRACED_FILE
    return tuple(read_json(traced)["windows"]) if traced.is_file() else _windows(config, layers)


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Where the description does not tell which layers have a window, one of them must."""
    window = config.get("sliding_window")
    if type(window) is not int or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types") or ["sliding_attention"]
    windowed = min(kinds.count("sliding_attention"), layers)
    return (window,) * windowed + (None,) * (layers - windowed)


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
