"""What `config.json` of a Hugging Face model directory says, read key by key into a frozen description.

Four architectures that differ in a handful of switches; everything else a file may say is refused rather than ignored
where it would change the answers. Every error is a ConfigError naming the file, the key, its value and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError

CONFIG_FILE: Final = "config.json"
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES: Final = ("float32", "float16", "bfloat16")

_REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are stretched beyond the trained context. kind: "linear", "llama3" or "yarn".

    original: positions trained. low, high: llama3's frequency bounds. beta_fast, beta_slow: yarn's bounds in rotations.
    attention: what yarn multiplies cosine and sine with.
    """

    kind: str
    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama, Mistral, Qwen2 or Qwen3 family, in numbers.

    attention_bias: q, k and v have biases; output_bias: o has one as well. qk_norm: queries and keys are normalised
    per head. windows: per layer, how many of the last tokens (itself included) a token sees; None: all of them.
    torch_dtype: "float32", "float16" or "bfloat16", what the weights are stored in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    torch_dtype: str
    eos_token_ids: frozenset[int]

    @property
    def sliding_window(self) -> int | None:
        """The smallest window of any layer, or None when every layer sees everything."""
        return min((window for window in self.windows if window is not None), default=None)

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied with; 1 but for yarn."""
        return self.rope_scaling.attention if self.rope_scaling is not None else 1.0

    def inverse_frequencies(self) -> npt.NDArray[np.float32]:
        """[head_dim / 2]: radians per position of each pair of a head's dimensions, scaling applied."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = np.float32(1.0) / np.float32(self.rope_theta) ** exponents
        rope = self.rope_scaling
        if rope is None:
            return plain
        if rope.kind == "linear":
            return (plain / np.float32(rope.factor)).astype(np.float32)
        if rope.kind == "llama3":
            # keep: how much of the unscaled frequency stays, 1 for waves that turn `high` times in the trained context
            turns = rope.original * plain.astype(np.float64) / (2 * math.pi)
            keep = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        else:
            keep = 1.0 - self._yarn_ramp(rope)
        return (plain * keep + plain / rope.factor * (1.0 - keep)).astype(np.float32)

    def _yarn_ramp(self, rope: RopeScaling) -> npt.NDArray[np.float64]:
        """[head_dim / 2]: 0 where a pair turns beta_fast times or more in the trained context, 1 at beta_slow."""

        def dimension(rotations: float) -> float:
            return self.head_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(self.rope_theta))

        first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        span = last - first if last != first else 0.001
        return np.clip((np.arange(self.head_dim // 2) - first) / span, 0.0, 1.0)

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Memory for the keys and values of so many tokens. width: bytes of a number."""
        return 2 * self.num_layers * tokens * self.num_kv_heads * self.head_dim * width

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor the architecture needs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
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
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, rows, columns, bias in linear:
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms}
        return shapes


# -- reading -----------------------------------------------------------------------------------------------------------


def read_json(file: Path, data: bytes | None = None) -> dict[str, Any]:
    """The object in a JSON file (or in `data`, which came from it); ConfigError naming the file."""
    try:
        value = json.loads(file.read_bytes() if data is None else data)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {shorten(value)}")
    return value


class _Keys:
    """A JSON object read key by key; every error names the file and the key. null counts as absent."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.values, self._prefix = file, values, prefix

    def wrong(self, key: str, allowed: str) -> NoReturn:
        found = shorten(self.values[key]) if self.values.get(key) is not None else "missing"
        raise ConfigError(f"{self.file}: {self._prefix}{key}={found}: must be {allowed}")

    def integer(self, key: str, most: int, default: Any = _REQUIRED) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            self.wrong(key, f"an integer from 1 to {most}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, least: float = 0.0) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not least < value <= 1e12:  # NaN is wrong too
            self.wrong(key, f"a finite number above {least:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            self.wrong(key, "true or false")
        return bool(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def read_config(file: Path) -> ModelConfig:
    """The description in a config.json; `torch_dtype` is empty where the file does not say."""
    keys = _Keys(file, read_json(file))
    architecture = _architecture(keys)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    heads, hidden = keys.integer("num_attention_heads", 4096), keys.integer("hidden_size", 1 << 17)
    kv_heads = keys.integer("num_key_value_heads", heads, heads if architecture == "LlamaForCausalLM" else _REQUIRED)
    if heads % kv_heads:
        keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = keys.integer("head_dim", 4096, 128 if qwen3 else hidden // heads)
    if keys.values.get("head_dim") is None and not qwen3 and hidden % heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size={hidden} where head_dim is not given")
    if head_dim % 2:
        keys.wrong("head_dim", f"even, for rotary positions; it is {head_dim}")
    layers, positions = keys.integer("num_hidden_layers", 1000), keys.integer("max_position_embeddings", 1 << 27)
    has_bias = not qwen2 and architecture != "MistralForCausalLM" and keys.flag("attention_bias")
    theta, scaling = _rope(keys, positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size", 1 << 24),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", 1 << 20),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=qwen2 or has_bias,
        output_bias=has_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias"),
        qk_norm=qwen3,
        windows=_windows(keys, architecture, layers),
        torch_dtype=_dtype(keys),
        eos_token_ids=token_ids(file, "eos_token_id", keys.values.get("eos_token_id")),
    )


def _architecture(keys: _Keys) -> str:
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        export = "any other decoder is served from `optimum-cli export openvino`"
        keys.wrong("architectures", f"a list of one of {_list(ARCHITECTURES)}; {export}")
    if keys.values.get("quantization_config") is not None:
        other = "serve the model that they were made of, with --quantization int4 or int8"
        keys.wrong("quantization_config", f"absent: rounded weights are not read; {other}")
    if keys.values.get("hidden_act", "silu") not in ("silu", "swish"):
        keys.wrong("hidden_act", "'silu'")
    return str(names[0])


def _dtype(keys: _Keys) -> str:
    key = "dtype" if keys.values.get("dtype") is not None else "torch_dtype"
    value = keys.values.get(key)
    if value is not None and value not in DTYPES:
        keys.wrong(key, f"one of {_list(DTYPES)}")
    return value or ""


def _windows(keys: _Keys, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Per layer, as the architecture reads its keys: Mistral slides everywhere, Qwen where the layer type says so."""
    if architecture == "LlamaForCausalLM":
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        given = "sliding_window" in keys.values and keys.values["sliding_window"] is None
        return ((None if given else keys.integer("sliding_window", 1 << 27, 4096)),) * layers
    if not keys.flag("use_sliding_window"):
        return (None,) * layers
    window, kinds = keys.integer("sliding_window", 1 << 27, 4096), keys.values.get("layer_types")
    if kinds is None:
        full = keys.values.get("max_window_layers", 28)
        if type(full) is not int or full < 0:
            keys.wrong("max_window_layers", "an integer >= 0")
        return tuple(None if layer < full else window for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        keys.wrong("layer_types", f"a list of {layers}, one for each layer, of {_list(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(keys: _Keys, positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    name = "rope_parameters" if keys.values.get("rope_parameters") is not None else "rope_scaling"
    values = keys.values.get(name) or {}
    if not isinstance(values, dict):
        keys.wrong(name, "an object")
    rope = _Keys(keys.file, values, f"{name}.")
    theta = (rope if values.get("rope_theta") is not None else keys).number("rope_theta", 10000.0, least=1.0)
    for table in (rope, keys):
        if table.values.get("partial_rotary_factor", 1.0) not in (1, None):
            table.wrong("partial_rotary_factor", "1: rotary positions on part of a head are not supported")
    key = "rope_type" if values.get("rope_type") is not None else "type"
    kind = values.get(key, "default")
    if kind not in ROPE_TYPES:
        rope.wrong(key, f"one of {_list(ROPE_TYPES)}")
    if kind in ("default", "dynamic"):  # dynamic only begins to differ beyond max_position_embeddings, our limit
        return theta, None
    factor, low = rope.number("factor"), rope.number("low_freq_factor", 1.0)
    original = rope.integer("original_max_position_embeddings", 1 << 27, positions)
    if kind == "llama3" and rope.number("high_freq_factor", 4.0) <= low:
        rope.wrong("high_freq_factor", f"above low_freq_factor={low:g}")
    return theta, RopeScaling(
        kind=kind,
        factor=factor,
        original=original,
        low=low,
        high=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention=_attention_factor(rope, factor) if kind == "yarn" else 1.0,
        truncate=rope.flag("truncate", True),
    )


def _attention_factor(rope: _Keys, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def sharpness(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return sharpness(rope.number("mscale")) / sharpness(rope.number("mscale_all_dim"))
    return sharpness(1.0)


def token_ids(file: Path, key: str, value: Any) -> frozenset[int]:
    """A token id, a list of them or null, as a set."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise ConfigError(f"{file}: {key}={shorten(value)}: must be a token id, a list of token ids, or null")
    return frozenset(ids)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def shorten(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
