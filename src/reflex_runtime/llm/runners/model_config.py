"""What `config.json` of a Hugging Face model directory says, checked and made into a frozen description.

Four architectures that differ in a handful of switches; everything else a file may say is refused rather than ignored
where it would change the answers. Every error is a ConfigError naming the file, the key, its value and what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from reflex_runtime.run.model_files import JsonObject, read_object

CONFIG_FILE: Final = "config.json"
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


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


class _Rope(msgspec.Struct, kw_only=True):
    """`rope_parameters`, or `rope_scaling` of older files, which has `type` and no `rope_theta`."""

    rope_type: _RopeType | None = None
    type: _RopeType | None = None
    rope_theta: _Theta | None = None
    partial_rotary_factor: _WholeHead = 1.0


class _Scaling(msgspec.Struct, kw_only=True):
    """What else it says where positions are stretched."""

    factor: _Number
    original_max_position_embeddings: _Positions | None = None
    low_freq_factor: _Number = 1.0
    high_freq_factor: _Number = 4.0
    beta_fast: _Number = 32.0
    beta_slow: _Number = 1.0
    truncate: _Flag = True
    attention_factor: _Number | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class _ConfigFile(msgspec.Struct, kw_only=True):
    """The keys of config.json that change what a model answers."""

    architectures: Annotated[
        tuple[Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]],
        Meta(
            description=f"a list of one of {', '.join(ARCHITECTURES)}; any other decoder is served from "
            "`optimum-cli export openvino`"
        ),
    ]
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24, description=f"an integer from 1 to {1 << 24}")]
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 17, description=f"an integer from 1 to {1 << 17}")]
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 20, description=f"an integer from 1 to {1 << 20}")]
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1000, description="an integer from 1 to 1000")]
    num_attention_heads: _Heads
    max_position_embeddings: _Positions
    num_key_value_heads: _Heads | None = None
    head_dim: _Heads | None = None
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
    quantization_config: Annotated[
        None,
        Meta(
            description="nothing: rounded weights are not read; serve the model that they were made of, with "
            "--quantization int4 or int8"
        ),
    ] = None
    dtype: _Dtype | None = None
    torch_dtype: _Dtype | None = None


def read_config(file: Path) -> ModelConfig:
    """The description in a config.json; `torch_dtype` is empty where the file does not say."""
    keys = JsonObject(file, read_object(file))
    said = keys.read(_ConfigFile)
    (architecture,) = said.architectures
    llama, qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))
    heads, hidden = said.num_attention_heads, said.hidden_size
    kv_heads = said.num_key_value_heads or heads
    if heads % kv_heads or (said.num_key_value_heads is None and not llama):
        keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = said.head_dim or (128 if qwen3 else hidden // heads)
    if said.head_dim is None and not qwen3 and hidden % heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size={hidden} where head_dim is not given")
    if head_dim % 2:
        keys.wrong("head_dim", f"an even number, for rotary positions; it is {head_dim}")
    has_bias = (llama or qwen3) and said.attention_bias
    theta, scaling = _rope(keys, said)
    return ModelConfig(
        architecture=architecture,
        vocab_size=said.vocab_size,
        hidden_size=hidden,
        intermediate_size=said.intermediate_size,
        num_layers=said.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=said.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=said.max_position_embeddings,
        tie_word_embeddings=said.tie_word_embeddings,
        attention_bias=qwen2 or has_bias,
        output_bias=has_bias,
        mlp_bias=llama and said.mlp_bias,
        qk_norm=qwen3,
        windows=_windows(keys, said, architecture),
        torch_dtype=said.dtype or said.torch_dtype or "",
        eos_token_ids=token_ids(keys, "eos_token_id"),
    )


def _windows(keys: JsonObject, said: _ConfigFile, architecture: str) -> tuple[int | None, ...]:
    """Per layer, as the architecture reads its keys: Mistral slides everywhere, Qwen where the layer type says so."""
    layers, window, kinds = said.num_hidden_layers, said.sliding_window, said.layer_types
    if architecture == "MistralForCausalLM":
        everything = "sliding_window" in keys.values and not keys.has("sliding_window")
        return ((None if everything else window),) * layers
    if architecture == "LlamaForCausalLM" or not said.use_sliding_window:
        return (None,) * layers
    if kinds is None:
        return tuple(None if layer < said.max_window_layers else window for layer in range(layers))
    if len(kinds) != layers:
        keys.wrong("layer_types", f"a list of {layers}, one for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(keys: JsonObject, said: _ConfigFile) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    name = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    table = JsonObject(keys.file, keys.values.get(name) or {}, name)
    rope = table.read(_Rope)
    theta, kind = rope.rope_theta or said.rope_theta, rope.rope_type or rope.type or "default"
    if kind in ("default", "dynamic"):  # dynamic only begins to differ beyond max_position_embeddings, our limit
        return theta, None
    scaling = table.read(_Scaling)
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        table.wrong("high_freq_factor", f"a number above low_freq_factor={scaling.low_freq_factor:g}")
    return theta, RopeScaling(
        kind=kind,
        factor=scaling.factor,
        original=scaling.original_max_position_embeddings or said.max_position_embeddings,
        low=scaling.low_freq_factor,
        high=scaling.high_freq_factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        attention=_attention_factor(scaling) if kind == "yarn" else 1.0,
        truncate=scaling.truncate,
    )


def _attention_factor(scaling: _Scaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def sharpness(scale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * scale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return sharpness(scaling.mscale) / sharpness(scaling.mscale_all_dim)
    return sharpness(1.0)


_Id = Annotated[int, Meta(ge=0)]
_Ids = Annotated[_Id | list[_Id], Meta(description="a token id, a list of token ids, or null")]


def token_ids(keys: JsonObject, key: str) -> frozenset[int]:
    """A token id, a list of them or null, as a set."""
    found = keys.convert(key, _Ids) if keys.has(key) else []
    return frozenset(found if isinstance(found, list) else [found])
