"""A decoder that was exported to OpenVINO's own files, as `optimum-cli export openvino` writes them.

Its graph is run as it is, whatever the architecture: what it takes and keeps between steps is in the graph, and the few
numbers that are not are in `config.json`. A graph that cannot be served is a ConfigError that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.checkpoint import INDEX_FILE, WEIGHTS_FILE
from reflex_runtime.llm.model_config import CONFIG_FILE, read_json
from reflex_runtime.processors.quiet import telemetry_off

MODEL_FILE: Final = "openvino_model.xml"
TRACED_FILE: Final = "traced.json"  # of our own conversions: the window of each layer
TRACED_VERSION: Final = 1  # changes with the form of these graphs
PROBE_FILE: Final = "probe.npy"  # of our own conversions: what the reference makes of the tokens of `probe`
_INPUTS: Final = {"input_ids", "attention_mask", "position_ids", "beam_idx"}
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # by architecture
_BY_LENGTH: Final = ("dynamic", "longrope")  # rotations of every token change when one sequence grows beyond `original`


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
            _number(root, config, ("vocab_size",)) if width.is_dynamic else width.get_length(),
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


def _number(root: Path, config: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        found = config.get(name)
        if type(found) is int and found > 0:
            return found
    raise ConfigError(f"{root / CONFIG_FILE}: has no number under {' or '.join(names)}")


def longest(root: Path, config: dict[str, Any]) -> int:
    """Tokens of the longest sequence whose answer does not depend on the rest of the batch."""
    most = _number(root, config, _POSITIONS)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) in _BY_LENGTH:
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return min(most, original or most)
    return most


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
