"""A Hugging Face model directory: its description, and tensors that stay in their files until they are read.

`ModelConfig` is `config.json` of four architectures that differ in a few switches; any other value that would change
the answers is refused. `AnyModelConfig` is what is known of other architectures, which PyTorch and transformers
compute.

`Checkpoint.open` checks the whole directory before memory is taken. Every error is a ConfigError that names the file,
the key or tensor, the value found and the expected one. `run.model_files` reads the safetensors format, as numpy has no
bfloat16 and errors name the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.run import model_files
from reflex_runtime.run.model_files import JsonObject, read_object

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
ROUNDED: Final = "rounded weights are not read; serve what they were made of, with --quantization int4 or int8"
ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_Number = Annotated[float, Meta(gt=0.0, le=1e12, description="a finite number above 0")]
_Theta = Annotated[float, Meta(gt=1.0, le=1e12, description="a finite number above 1")]
_Positions = Annotated[int, Meta(ge=1, le=1 << 27, description=f"an integer from 1 to {1 << 27}")]
_Heads = Annotated[int, Meta(ge=1, le=4096, description="an integer from 1 to 4096")]
_Flag = Annotated[bool, Meta(description="true or false")]
_Dtype = Annotated[Literal["float32", "float16", "bfloat16"], Meta(description="one of float32, float16, bfloat16")]
_RopeType = Annotated[
    Literal["default", "linear", "dynamic", "llama3", "yarn"],
    Meta(description="one of default, linear, dynamic, llama3, yarn"),
]
_WholeHead = Annotated[float, Meta(ge=1, le=1, description="1: rotary positions on part of a head are not supported")]


class RopeScaling(msgspec.Struct, kw_only=True, frozen=True):
    """`rope_parameters`, or `rope_scaling` of older files: how positions are stretched beyond the trained context.

    rope_type: "linear", "llama3" or "yarn" in a `ModelConfig`. original_max_position_embeddings: trained positions.
    low_freq_factor, high_freq_factor: llama3's bounds. beta_fast, beta_slow: yarn's bounds, in rotations.
    """

    factor: _Number
    rope_type: _RopeType = "default"
    original_max_position_embeddings: _Positions = 0
    low_freq_factor: _Number = 1.0
    high_freq_factor: _Number = 4.0
    beta_fast: _Number = 32.0
    beta_slow: _Number = 1.0
    truncate: _Flag = True
    attention_factor: _Number | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def attention(self) -> float:
        """The factor of cosine and sine."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def sharpness(scale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return sharpness(self.mscale) / sharpness(self.mscale_all_dim)
        return sharpness(1.0)


class _ConfigFile(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of config.json that change a model's answers."""

    architectures: tuple[str]  # one of ARCHITECTURES
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24, description=f"an integer from 1 to {1 << 24}")]
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 17, description=f"an integer from 1 to {1 << 17}")]
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 20, description=f"an integer from 1 to {1 << 20}")]
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1000, description="an integer from 1 to 1000")]
    num_attention_heads: _Heads
    max_position_embeddings: _Positions
    num_key_value_heads: _Heads = 0  # 0: the file has none
    head_dim: _Heads = 0
    rms_norm_eps: _Number = 1e-6
    rope_theta: _Theta = 10000.0
    partial_rotary_factor: _WholeHead = 1.0
    tie_word_embeddings: _Flag = False
    attention_bias: _Flag = False
    mlp_bias: _Flag = False
    hidden_act: Annotated[Literal["silu", "swish"], Meta(description="'silu'")] = "silu"
    use_sliding_window: _Flag = False
    sliding_window: _Positions = 4096
    max_window_layers: Annotated[int, Meta(ge=0, description="an integer >= 0")] = 28
    layer_types: Annotated[
        list[Literal["full_attention", "sliding_attention"]] | None,
        Meta(description="a list of full_attention and sliding_attention, one for each layer"),
    ] = None
    quantization_config: Annotated[None, Meta(description=f"nothing: {ROUNDED}")] = None
    dtype: _Dtype | None = None
    torch_dtype: _Dtype | None = None  # of the stored weights


class ModelConfig(_ConfigFile, kw_only=True, frozen=True):
    """A decoder of the Llama, Mistral, Qwen2 or Qwen3 family: its config.json, with all defaults of its architecture.

    attention_bias: q, k and v have biases; output_bias: o has one as well. qk_norm: queries and keys are normalised
    per head. windows: for each layer, how many of the last tokens, itself included, a token sees; None: all of them.
    """

    output_bias: bool
    qk_norm: bool
    rope_scaling: RopeScaling | None
    windows: tuple[int | None, ...]

    @property
    def attention_factor(self) -> float:
        """The factor of cosine and sine; 1 except for yarn."""
        return self.rope_scaling.attention if self.rope_scaling is not None else 1.0

    def inverse_frequencies(self) -> npt.NDArray[np.float32]:
        """[head_dim / 2]: radians per position of each pair of a head's dimensions, scaling applied."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = np.float32(1.0) / np.float32(self.rope_theta) ** exponents
        if (rope := self.rope_scaling) is None:
            return plain
        if rope.rope_type == "linear":
            return (plain / np.float32(rope.factor)).astype(np.float32)
        if rope.rope_type == "llama3":
            # keep: the share of the unscaled frequency; 1 for waves that turn `high` times in the trained context
            turns = rope.original_max_position_embeddings * plain.astype(np.float64) / (2 * math.pi)
            low, high = rope.low_freq_factor, rope.high_freq_factor
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        else:
            keep = 1.0 - self._yarn_ramp(rope)
        return (plain * keep + plain / rope.factor * (1.0 - keep)).astype(np.float32)

    def _yarn_ramp(self, rope: RopeScaling) -> npt.NDArray[np.float64]:
        """[head_dim / 2]: 0 for a pair that turns beta_fast times or more in the trained context, 1 from beta_slow."""

        def dimension(rotations: float) -> float:
            length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.head_dim * math.log(length) / (2 * math.log(self.rope_theta))

        first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        return np.clip((np.arange(self.head_dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Bytes for the keys and values of so many tokens. width: bytes of a number."""
        return 2 * self.num_hidden_layers * tokens * self.num_key_value_heads * self.head_dim * width

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the architecture needs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, hidden)
        linear = [
            ("self_attn.q_proj", queries, hidden, self.attention_bias),
            ("self_attn.k_proj", keys, hidden, self.attention_bias),
            ("self_attn.v_proj", keys, hidden, self.attention_bias),
            ("self_attn.o_proj", hidden, queries, self.output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ]
        norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
        norms += [("self_attn.q_norm", self.head_dim), ("self_attn.k_norm", self.head_dim)] if self.qk_norm else []
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for name, rows, columns, bias in linear:
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms}
        return shapes


# -- reading -----------------------------------------------------------------------------------------------------------


class _Rope(msgspec.Struct, kw_only=True):
    """`rope_parameters`, or `rope_scaling` of older files, which has `type` and no `rope_theta`."""

    rope_type: _RopeType | None = None
    type: _RopeType | None = None
    rope_theta: _Theta | None = None
    partial_rotary_factor: _WholeHead = 1.0


def read_config(file: Path) -> ModelConfig:
    """The description in a config.json; `torch_dtype` is None if the file has none."""
    keys = JsonObject(file, read_object(file))
    given = keys.read(_ConfigFile)
    (architecture,) = given.architectures
    llama, qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))
    heads, hidden = given.num_attention_heads, given.hidden_size
    kv_heads = given.num_key_value_heads or heads
    if heads % kv_heads or not (given.num_key_value_heads or llama):
        keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = given.head_dim or (128 if qwen3 else hidden // heads)
    if not given.head_dim and not qwen3 and hidden % heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size={hidden} where head_dim is not given")
    if head_dim % 2:
        keys.wrong("head_dim", f"an even number, for rotary positions; it is {head_dim}")
    has_bias = (llama or qwen3) and given.attention_bias
    theta, scaling = _rope(keys, given)
    found = msgspec.structs.asdict(given) | {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "attention_bias": qwen2 or has_bias,
        "mlp_bias": llama and given.mlp_bias,
        "torch_dtype": given.dtype or given.torch_dtype,
    }
    windows = _windows(keys, given, architecture)
    return ModelConfig(output_bias=has_bias, qk_norm=qwen3, rope_scaling=scaling, windows=windows, **found)


def _windows(keys: JsonObject, given: _ConfigFile, architecture: str) -> tuple[int | None, ...]:
    """The window of each layer: Mistral has one in all layers, unless it is null; Qwen by the types of layers."""
    layers, window, kinds = given.num_hidden_layers, given.sliding_window, given.layer_types
    if architecture == "MistralForCausalLM":
        is_null = "sliding_window" in keys.values and not keys.has("sliding_window")
        return ((None if is_null else window),) * layers
    if architecture == "LlamaForCausalLM" or not given.use_sliding_window:
        return (None,) * layers
    if kinds is None:
        return tuple(None if layer < given.max_window_layers else window for layer in range(layers))
    if len(kinds) != layers:
        keys.wrong("layer_types", f"a list of {layers}, one for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(keys: JsonObject, given: _ConfigFile) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    name = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    table = JsonObject(keys.file, keys.values.get(name) or {}, name)
    rope = table.read(_Rope)
    theta, kind = rope.rope_theta or given.rope_theta, rope.rope_type or rope.type or "default"
    if kind in ("default", "dynamic"):  # dynamic differs only beyond max_position_embeddings, which is our limit
        return theta, None
    scaling = table.read(RopeScaling)
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        table.wrong("high_freq_factor", f"a number above low_freq_factor={scaling.low_freq_factor:g}")
    original = scaling.original_max_position_embeddings or given.max_position_embeddings
    return theta, msgspec.structs.replace(scaling, rope_type=kind, original_max_position_embeddings=original)


_Id = Annotated[int, Meta(ge=0)]
_Ids = Annotated[_Id | list[_Id], Meta(description="a token id, a list of token ids, or null")]


def token_ids(keys: JsonObject, key: str) -> frozenset[int]:
    """A token id, a list of them or null, as a set."""
    found = keys.convert(key, _Ids) if keys.has(key) else []
    return frozenset(found if isinstance(found, list) else [found])


# -- the directory -----------------------------------------------------------------------------------------------------


WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_DTYPES: Final = {  # the bundled model has 8 bits
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16",
}  # fmt: skip
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # by architecture
_BY_LENGTH: Final = ("dynamic", "longrope")  # all rotations change when a sequence exceeds the original positions


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlace:
    """A tensor in its file. data: its bytes, mapped."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def check_dtype(self, name: str) -> None:
        """Raise ConfigError for a type that no weight may have. name: of the tensor."""
        if self.dtype not in _DTYPES:
            wanted = ", ".join(_DTYPES)
            raise ConfigError(f"{self.file}: tensor {name}: dtype {self.dtype}: must be one of {wanted}")

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """The exact values as float32; a copy unless the file holds float32. Raises as `check_dtype`."""
        self.check_dtype(name)
        if self.dtype == "F8_E4M3":
            return _float8()[self.data].reshape(self.shape)
        if self.dtype == "BF16":  # the upper half of a float32
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        kind = np.float16 if self.dtype == "F16" else np.float32
        return self.data.view(kind).astype(np.float32, copy=False).reshape(self.shape)


@cache
def _float8() -> npt.NDArray[np.float32]:
    """The number of each of the 256 bytes: a sign, four bits of exponent and three of mantissa, without infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -value, value).astype(np.float32)


class Checkpoint:
    """An opened directory: `path`, `config`, and tensors by name. Made by `open`, which checks all of it."""

    def __init__(self, path: Path, config: ModelConfig, places: dict[str, TensorPlace]) -> None:
        self.path, self.config, self._places = path, config, places

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Read config.json and the tables of the weight files; no weight is read. Raises ConfigError for any fault."""
        root = Path(directory)
        config = read_config(root / CONFIG_FILE)
        places: dict[str, TensorPlace] = {}
        for file in weight_files(root):
            places |= read_table(file)
        index, needed = root / INDEX_FILE, config.tensors()
        modules = {name.rpartition(".")[0] for name in needed}
        for name in sorted(places.keys() - needed.keys()):  # a bias, or a scale of rounded weights
            if name.rpartition(".")[0] in modules:
                why = f"is not of {config.architectures[0]} as {CONFIG_FILE} describes it, and would change the answers"
                raise ConfigError(f"{places[name].file}: tensor {name}: {why}")
        for name, shape in needed.items():
            place = places.get(name)
            if place is None:
                origin = index if index.is_file() else root / WEIGHTS_FILE
                raise ConfigError(f"{origin}: tensor {name}: not found, expected shape {list(shape)}")
            place.check_dtype(name)
            if place.shape != shape:
                found = f"found shape {list(place.shape)}, expected {list(shape)}"
                raise ConfigError(f"{place.file}: tensor {name}: {found}, from the sizes in {CONFIG_FILE}")
        if not config.torch_dtype:
            config = msgspec.structs.replace(config, torch_dtype=_DTYPES[places[EMBEDDING].dtype])
        return cls(root, config, places)

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted({place.file for place in self._places.values()})

    @property
    def head(self) -> str:
        """Name of the tensor [vocab_size, hidden_size] that makes logits: the embedding's if both are tied."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """(dtype "F32", "F16" or "BF16"; its bytes, read-only; shape). The bytes are the file's; 8 bits become BF16,
        a copy that is kept, as graphs share its memory."""
        place = self._places[name]
        if place.dtype == "F8_E4M3":
            wide = (place.array(name).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
            place = self._places[name] = replace(place, dtype="BF16", data=wide)
        return place.dtype, place.data, place.shape

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """See `TensorPlace.array`."""
        return self._places[name].array(name)


def is_known(directory: Path | str) -> bool:
    """Whether the checkpoint has one of our own architectures; the others need PyTorch and transformers."""
    file = Path(directory) / CONFIG_FILE
    return not file.is_file() or read_object(file).get("architectures") in [[name] for name in ARCHITECTURES]


# -- weight files ------------------------------------------------------------------------------------------------------


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a checkpoint of any architecture. Raises ConfigError if there are none."""
    index = root / INDEX_FILE
    if not index.is_file():
        if not (root / WEIGHTS_FILE).is_file():
            how = "expected safetensors weights; model.save_pretrained(DIR) of transformers writes them"
            raise ConfigError(f"{root}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}, {how}")
        return [root / WEIGHTS_FILE]
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{index}: weight_map: expected an object {{tensor: file}}")
    names = set()
    for tensor, name in table.items():
        pure = PurePosixPath(name) if isinstance(name, str) and name else PurePosixPath("/")
        if pure.is_absolute() or ".." in pure.parts:
            raise ConfigError(f"{index}: weight_map.{tensor}={name!r}: must be a file name within the directory")
        if name not in names and not (root / pure).is_file():
            raise ConfigError(f"{root / pure}: not found, but {INDEX_FILE} places tensor {tensor} there; copy it, too")
        names.add(name)
    return [root / name for name in sorted(names)]


def read_table(file: Path) -> dict[str, TensorPlace]:
    """Every tensor of one safetensors file, checked, and its bytes mapped."""
    data = np.memmap(file, np.uint8, "r") if (tensors := model_files.read_table(file)) else np.empty(0, np.uint8)
    return {
        name: TensorPlace(file, tensor.dtype, tensor.shape, data[tensor.start : tensor.stop])
        for name, tensor in tensors.items()
    }


def number(root: Path, config: dict[str, Any], *names: str) -> int:
    """The first whole number under one of these keys of config.json."""
    for name in names:
        if type(found := config.get(name)) is int and found > 0:
            return found
    raise ConfigError(f"{root / CONFIG_FILE}: has no number under {' or '.join(names)}")


def longest(root: Path, config: dict[str, Any]) -> int:
    """Most tokens of a sequence, before its rotations would change: a batch shares them."""
    most = number(root, config, *_POSITIONS)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) in _BY_LENGTH:
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        return min(most, original or most)
    return most


@dataclass(frozen=True, slots=True)
class AnyModelConfig:
    """The part of `ModelConfig` that is known of any architecture before the model is loaded.

    token_size: numbers of one token in the cache.
    """

    vocab_size: int
    max_position_embeddings: int
    torch_dtype: str
    token_size: int

    @classmethod
    def of(cls, root: Path, config: Any) -> AnyModelConfig:
        """From the description that transformers read."""
        for name in ("vocab_size", "num_hidden_layers", "num_attention_heads"):
            if type(value := getattr(config, name, None)) is not int or value < 1:
                raise ConfigError(f"{root / CONFIG_FILE}: {name}={value!r}: must be a whole number from 1 on")
        heads = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        size = (getattr(config, "head_dim", None) or config.hidden_size // heads) * 2 * kv * config.num_hidden_layers
        dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
        return cls(config.vocab_size, longest(root, config.to_dict()), dtype, size)

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Bytes for the keys and values of so many tokens. width: bytes of a number."""
        return self.token_size * tokens * width


_RECURRENT: Final = {
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2",
}  # fmt: skip


def require(root: Path) -> None:
    """Raise ConfigError if the libraries for other architectures are not installed, or the model keeps a state that
    they cannot serve."""
    if (kind := read_object(root / CONFIG_FILE).get("model_type")) in _RECURRENT:
        why = "keeps other state than keys and values, which is not served"
        raise ConfigError(f"{root / CONFIG_FILE}: model_type={kind!r}: {why}")
    needed = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if needed:
        named = read_object(root / CONFIG_FILE).get("architectures")
        why = f"architectures={named}: needs {' and '.join(needed)}: in a clone, pip install '.[convert]'"
        other = "or serve what `optimum-cli export openvino --task text-generation-with-past` makes of it elsewhere"
        raise ConfigError(f"{root / CONFIG_FILE}: {why}; {other}")
