"""LoRA adapters of a checkpoint: read and checked, and stacked so that one step computes several of them.

An adapter adds `scale · B · A · x` to the output of a linear layer for x. The matrices of all adapters are joined: A
[R, inputs] and B [outputs, R], where R is the sum of their ranks. The adapter of a token selects a row of a table
[1 + adapters, R] of zeros and ones: `B · (row * (A · x))` is what this adapter alone adds; row 0 adds nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.checkpoint import ModelConfig, read_table
from reflex_runtime.llm.runners.runner import free_bytes
from reflex_runtime.run.model_files import JsonObject, check_files, read_object, shorten

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
MOST_ADAPTERS: Final = 32  # of a model
MOST_RANK: Final = 256  # of an adapter
# Trained numbers are below 100. Every adapter is computed for every token of a step and multiplied by zero for tokens
# of others: an overflow of float32 would be NaN in their answers, too.
MOST_NUMBER: Final = 1e6
MOST_PATTERN: Final = 256  # characters of a pattern for names of layers
MOST_REPEATS: Final = 3  # repeats in such a pattern
MERGE: Final = "merge it: PeftModel.from_pretrained(base, DIR).merge_and_unload().save_pretrained(NEW_DIR)"

_LAYERS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TENSOR: Final = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_REFUSED: Final = (  # settings that change more than B · A
    "use_dora", "modules_to_save", "lora_bias", "fan_in_fan_out", "layer_replication", "trainable_token_indices",
    "target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")  # initialisations that change the base model

Matrix = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """One adapter. rank: the largest of its layers' ranks. layers: by name ("model.layers.0.self_attn.q_proj") A
    [r, inputs] and B [outputs, r]; B includes the scale."""

    name: str
    rank: int
    layers: Mapping[str, tuple[Matrix, Matrix]]

    @classmethod
    def read(cls, name: str, directory: Path, model: ModelConfig) -> LoraAdapter:
        """Read a directory of peft's `save_pretrained`. Raises ConfigError if it is wrong or does not fit the model."""
        check_files(directory)
        keys, settings = _settings(directory / ADAPTER_CONFIG)
        file, shapes = directory / ADAPTER_WEIGHTS, model.tensors()
        if not file.is_file():
            raise ConfigError(f"{file}: not found; save the adapter with safe_serialization, which is peft's default")
        sides: dict[str, dict[str, Matrix]] = {}
        for tensor, place in read_table(file).items():
            found = _TENSOR.fullmatch(tensor)
            layer = found["layer"] if found else ""
            if found is None or layer.rpartition(".")[2] not in _LAYERS or f"{layer}.weight" not in shapes:
                known = f"adapters may change {', '.join(_LAYERS)} of the model's {model.num_hidden_layers} layers"
                raise ConfigError(f"{file}: tensor {tensor}: is not served: {known}; {MERGE}")
            sides.setdefault(layer, {})[found["side"]] = place.array(tensor)
        if not sides:
            raise ConfigError(f"{file}: holds no tensors")
        layers = {}
        for layer, pair in sides.items():
            a, b = _fitting(file, layer, pair, shapes[f"{layer}.weight"])
            rank = _of_layer(keys, "rank_pattern", settings.rank_pattern, layer, settings.r)
            if rank not in (None, len(a)):
                keys.wrong("r", f"{len(a)}, the rank of {layer} in {ADAPTER_WEIGHTS}", rank)
            alpha = _of_layer(keys, "alpha_pattern", settings.alpha_pattern, layer, settings.lora_alpha)
            scale = alpha / (math.sqrt(len(a)) if settings.use_rslora else len(a))
            layers[layer] = a, _scaled(file, layer, a, b, scale)
        return cls(name, max(len(a) for a, _ in layers.values()), layers)


class AdapterStack:
    """Several adapters as one. names: in the order of their numbers, which begin at 1. table: [1 + adapters, R].
    layers: by name A [R, inputs] and B [outputs, R], zero where an adapter does not change the layer."""

    def __init__(self, adapters: Sequence[LoraAdapter], copies: int = 1) -> None:
        """copies: processes that will load them."""
        if len(adapters) > MOST_ADAPTERS:
            why = f"{len(adapters)} adapters; a model may have at most {MOST_ADAPTERS}"
            raise ConfigError(f"lora: {why}", field="lora")
        self.names = tuple(adapter.name for adapter in adapters)
        begins = np.cumsum([0, *(adapter.rank for adapter in adapters)])
        _check_memory(adapters, int(begins[-1]), copies)
        self.table = np.zeros((1 + len(adapters), begins[-1]), np.float32)
        self.layers: dict[str, tuple[Matrix, Matrix]] = {}
        for number, adapter in enumerate(adapters):
            begin = begins[number]
            self.table[number + 1, begin : begins[number + 1]] = 1
            for layer, (a, b) in adapter.layers.items():
                if layer not in self.layers:
                    empty = (begins[-1], a.shape[1]), (len(b), begins[-1])
                    self.layers[layer] = np.zeros(empty[0], np.float32), np.zeros(empty[1], np.float32)
                whole_a, whole_b = self.layers[layer]
                whole_a[begin : begin + len(a)] = a
                whole_b[:, begin : begin + len(a)] = b

    @classmethod
    def read(cls, directories: Mapping[str, Path], model: ModelConfig, copies: int = 1) -> AdapterStack:
        """The adapters of these directories, by name. Raises ConfigError."""
        return cls([LoraAdapter.read(name, directory, model) for name, directory in directories.items()], copies)


def _check_memory(adapters: Sequence[LoraAdapter], ranks: int, copies: int) -> None:
    """Raise ConfigError if the adapters do not fit into the free memory. ranks: the sum of their ranks."""
    widths = {layer: a.shape[1] + len(b) for adapter in adapters for layer, (a, b) in adapter.layers.items()}
    needed, free = 4 * copies * ranks * sum(widths.values()), free_bytes()
    if needed > free:
        why = f"take {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free; load fewer, or of lower ranks"
        raise ConfigError(f"lora: {len(adapters)} adapters {why}", field="lora")


def not_adaptable() -> ConfigError:
    """The error for a model whose architecture is none of `checkpoint.ARCHITECTURES`."""
    why = "only checkpoints of the Llama, Mistral, Qwen2 and Qwen3 families can have adapters, and this model is none"
    return ConfigError(f"lora: {why}; {MERGE}", field="lora")


_Scale = Annotated[  # in float32 inf · 0 is not a number
    float, Meta(gt=0.0, le=MOST_NUMBER, description=f"a number above 0, at most {MOST_NUMBER:g}")
]


_RANKS: Final = f"a whole number from 1 to {MOST_RANK}"
_Rank = Annotated[int, Meta(ge=1, le=MOST_RANK, description=_RANKS)]


class _AdapterFile(msgspec.Struct, kw_only=True):
    """The keys of adapter_config.json for the kind of adapter and the scale of its layers.

    r, rank_pattern: if present, they must agree with the tensors.
    """

    peft_type: Annotated[Literal["LORA"], Meta(description='"LORA"')]
    bias: Annotated[Literal["none"], Meta(description=f'"none": biases are not served; {MERGE}')] = "none"
    r: _Rank | None = None
    rank_pattern: Annotated[dict[str, _Rank], Meta(description=f"an object {{layer: {_RANKS}}}")] = {}
    lora_alpha: _Scale
    alpha_pattern: Annotated[
        dict[str, _Scale], Meta(description=f"an object {{layer: a number above 0, at most {MOST_NUMBER:g}}}")
    ] = {}
    use_rslora: Annotated[bool, Meta(description="true or false")] = False


def _settings(file: Path) -> tuple[JsonObject, _AdapterFile]:
    """adapter_config.json. Raises ConfigError for an adapter that changes the model by more than B · A."""
    keys = JsonObject(file, read_object(file))
    settings = keys.read(_AdapterFile)
    for key in _REFUSED:
        if keys.values.get(key):
            keys.wrong(key, f"nothing: it is not served; {MERGE}")
    start = keys.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        keys.wrong("init_lora_weights", f"another: it changes the model, too; {MERGE}")
    return keys, settings


def _of_layer(keys: JsonObject, name: str, patterns: Mapping[str, T], layer: str, otherwise: T) -> T:
    """The value of the first of the patterns that matches the layer."""
    compiled = [(_pattern(keys, name, key), value) for key, value in patterns.items()]
    return next((value for pattern, value in compiled if pattern.match(layer)), otherwise)


def _pattern(keys: JsonObject, name: str, key: str) -> re.Pattern[str]:
    """A key of alpha_pattern or rank_pattern as an expression that matches names of layers at their end, as in peft.

    Repeats of groups are refused: on a name that does not match they may take for ever.
    """
    if len(key) > MOST_PATTERN or re.search(r"\)\s*[*+{]", key) or len(re.findall(r"[*+{]", key)) > MOST_REPEATS:
        keys.wrong(name, f"patterns of at most {MOST_PATTERN} characters and {MOST_REPEATS} repeats, none of a group")
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        keys.wrong(name, f"patterns of layers; {shorten(key)} is none: {error}")


def _fitting(file: Path, layer: str, pair: Mapping[str, Matrix], shape: tuple[int, ...]) -> tuple[Matrix, Matrix]:
    """A and B of a layer whose weight has this shape. Raises ConfigError if they do not fit it."""
    if len(pair) < 2:
        raise ConfigError(f"{file}: {layer}: has only lora_{next(iter(pair))}, expected lora_A and lora_B")
    a, b = pair["A"], pair["B"]
    rank = a.shape[0] if a.ndim == 2 else 0
    if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        found = f"lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit"
        raise ConfigError(f"{file}: {layer}: {found} the model's weight {list(shape)}; is it an adapter of this model?")
    if not 1 <= rank <= MOST_RANK:
        raise ConfigError(f"{file}: {layer}: rank {rank}: must be in [1, {MOST_RANK}]")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError(f"{file}: {layer}: holds numbers that are not finite")
    return a, b


def _scaled(file: Path, layer: str, a: Matrix, b: Matrix, scale: float) -> Matrix:
    """B times the scale. Raises ConfigError if it, or A, has numbers so large that a step could overflow."""
    for side, largest in (("lora_A", np.abs(a).max()), (f"lora_B times the scale {scale:g}", np.abs(b).max() * scale)):
        if largest > MOST_NUMBER:
            why = f"{side} holds {largest:.3g}: must be in [-{MOST_NUMBER:g}, {MOST_NUMBER:g}]"
            raise ConfigError(f"{file}: {layer}: {why}; check lora_alpha, and whether the training diverged")
    scaled: Matrix = b * np.float32(scale)
    return scaled
