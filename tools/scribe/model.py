"""The scribe while it learns: a dense Llama decoder in plain torch, its weights named as in a Hugging Face checkpoint.

The runner's model keeps a cache and takes ragged batches; training wants neither, so this one is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. 3.3 million parameters, the embedding used at both ends."""

    vocab: int = 2048
    hidden: int = 256
    inner: int = 640
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    positions: int = 2048
    theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            linear(x).view(rows, length, -1, self.shape.head).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


class Scribe(nn.Module):
    """Token ids [rows, length] → logits [rows, length, vocab]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.model = shape, Body(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what writes to the residual stream starts smaller, the more layers write
                ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if ends else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = angles(torch.arange(ids.shape[1]), self.shape)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def angles(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's rotation, [length, head]."""
    turns = positions[:, None] / shape.theta ** (torch.arange(0, shape.head, 2) / shape.head)
    turns = torch.cat([turns, turns], dim=-1)
    return turns.cos(), turns.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + head / 2) rotated."""
    one, two = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-two, one], dim=-1) * sin).to(x.dtype)
