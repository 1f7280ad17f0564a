"""The decoder itself, to be read: what a model of the Llama, Mistral, Qwen2 or Qwen3 family computes, in plain torch.

It sees a flat row of tokens that may belong to many sequences and does not know which. Sequences differ only in what a
token may attend to, and the caller decides that: `attend` gets queries, keys and values. This module is where torch is
imported, so that one place says what to install; import it only when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reflex_runtime.core.errors import needed_by
from reflex_runtime.llm.runners.adapters import AdapterStack
from reflex_runtime.llm.runners.checkpoint import EMBEDDING, Checkpoint

with needed_by("the torch runner"):
    import torch
    from torch import Tensor
    from torch.nn import functional

__all__ = ["Attend", "Decoder", "Tensor", "functional", "torch"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [t, heads, head_dim], keys and values [t, kv_heads, head_dim]) → [t, heads, head_dim]."""


class Addition(NamedTuple):
    """What adapters add to the outputs from `begin` on: a [R, in], b [outputs, R]; see `adapters`."""

    begin: int
    a: Tensor
    b: Tensor


class Linear(NamedTuple):
    """x [.., in] → [.., out]; weight is [out, in]."""

    weight: Tensor
    bias: Tensor | None
    additions: tuple[Addition, ...] = ()

    def __call__(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """chosen: [t, R], which rows of the adapters' matrices each token has; None: nobody has an adapter."""
        y = functional.linear(x, self.weight, self.bias)
        for begin, a, b in self.additions if chosen is not None else ():
            y[..., begin : begin + len(b)] += functional.linear(functional.linear(x, a) * chosen, b)
        return y


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. What reads the same input is one matrix: `qkv`, and `gate_up` of the MLP."""

    norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A checkpoint's weights on a device, in one dtype, and the forward pass over them."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, dtype: torch.dtype, adapters: AdapterStack | None = None
    ) -> None:
        self.config = checkpoint.config
        self._load = _Loader(checkpoint, device, dtype, adapters)
        self._table = None if adapters is None else torch.tensor(adapters.table, device=device, dtype=dtype)
        self._embedding = self._load.tensor(EMBEDDING)
        tied = self.config.tie_word_embeddings
        self._head = self._embedding if tied else self._load.tensor(checkpoint.head)
        self._norm = self._load.tensor("model.norm.weight")
        self._layers = [self._layer(f"model.layers.{i}") for i in range(self.config.num_layers)]
        self._frequencies = torch.tensor(self.config.inverse_frequencies(), device=device)

    def _layer(self, name: str) -> Layer:
        load, attention = self._load, f"{name}.self_attn"
        normed = self.config.qk_norm
        return Layer(
            norm=load.tensor(f"{name}.input_layernorm.weight"),
            qkv=load.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=load.tensor(f"{attention}.q_norm.weight") if normed else None,
            k_norm=load.tensor(f"{attention}.k_norm.weight") if normed else None,
            out=load.linear(f"{attention}.o_proj"),
            mlp_norm=load.tensor(f"{name}.post_attention_layernorm.weight"),
            gate_up=load.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
            down=load.linear(f"{name}.mlp.down_proj"),
        )

    def run(
        self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None, adapters: Tensor | None = None
    ) -> Tensor:
        """float32 logits [n, vocab_size] of the tokens at `rows`; None: of all. ids and positions are [t]; `attend` is
        called once per layer. adapters: [t], the number of each token's adapter; None: nobody has one."""
        chosen = None if adapters is None or self._table is None else self._table[adapters]
        eps = self.config.rms_norm_eps
        cos, sin = self._rotations(positions)
        x = self._embedding[ids]
        for i, layer in enumerate(self._layers):
            turned, v = self._heads(layer, rms_norm(x, layer.norm, eps), cos, sin, chosen)
            q, k = turned.split([self.config.num_heads, self.config.num_kv_heads], dim=1)
            mixed = attend(i, q, k, v)
            x = x + layer.out(mixed.flatten(1), chosen)
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps), chosen).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up, chosen)
        return functional.linear(rms_norm(x if rows is None else x[rows], self._norm, eps), self._head).float()

    def _heads(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """(rotated queries, and behind them rotated keys; values), each [t, heads, head_dim]."""
        config = self.config
        heads = layer.qkv(x, chosen).view(len(x), -1, config.head_dim)
        both, v = heads.split([config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.split([config.num_heads, config.num_kv_heads], dim=1)
            eps = config.rms_norm_eps
            both = torch.cat([rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)], dim=1)
        return rotate(both, cos, sin), v

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For `rotate`: cosine of each position's angles, and sine, negative first, float32 [t, 1, head_dim]."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos() * self.config.attention_factor, angles.sin() * self.config.attention_factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square along the last axis, in float32 whatever x is, times weight."""
    return weight * functional.rms_norm(x, (x.shape[-1],), None, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head's dimensions i and i + head_dim / 2 turned as a pair; x is [t, heads, head_dim]. In few kernels: on a
    GPU their number is what a step of few tokens takes."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


class _Loader:
    """Tensors of a checkpoint, copied out of its files onto the device."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype, adapters: AdapterStack | None) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._adapted = {} if adapters is None else adapters.layers
        self._known = checkpoint.config.tensors()

    def tensor(self, name: str) -> Tensor:
        kind, data, shape = self._checkpoint.raw(name)
        stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        copied = torch.from_numpy(np.array(data))  # the file is read-only, which torch would warn of
        return copied.view(stored).view(shape).to(self._device, self._dtype)

    def linear(self, *names: str) -> Linear:
        """Projections of one input as one matrix. They have biases all or none, except that o has none beside qkv."""
        biased = f"{names[0]}.bias" in self._known
        bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if biased else None
        weights = [self.tensor(f"{name}.weight") for name in names]
        return Linear(torch.cat(weights), bias, tuple(self._additions(names, weights)))

    def _additions(self, names: Sequence[str], weights: Sequence[Tensor]) -> Iterator[Addition]:
        begin = 0
        for name, weight in zip(names, weights, strict=True):
            if name in self._adapted:
                a, b = (torch.tensor(x, device=self._device, dtype=self._dtype) for x in self._adapted[name])
                yield Addition(begin, a, b)
            begin += len(weight)
