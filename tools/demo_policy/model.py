"""The network: a prefix (picture and words → keys and values) and an expert (noise → actions, by flow matching).

Same division of labour as the large vision-language-action policies: what is seen is read once per chunk, and a small
action transformer then looks at it in every denoising step. Every row carries its own flow time, so rows that are at
different steps can share one call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WIDTH = 96
HEADS = 4
LAYERS = 2  # in the prefix encoder and in the expert
IMAGE_TOKENS = 16
MAX_TOKENS = 8
CHUNK = 16
ACTION_DIM = 4
STATE_DIM = 4
STEPS = 5


PREFIX_TOKENS = IMAGE_TOKENS + MAX_TOKENS
HEAD_WIDTH = WIDTH // HEADS

# Lengths are constants and the batch axis is -1 in every reshape: the exported graph then computes no shapes at run
# time, which at batch one would cost more than some of its matrix products.


def _heads(x: Tensor, tokens: int) -> Tensor:
    """[batch, tokens, WIDTH] → [batch, HEADS, tokens, HEAD_WIDTH]."""
    return x.reshape(-1, tokens, HEADS, HEAD_WIDTH).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """Queries of `tokens` positions look at all keys: → [batch, tokens, WIDTH]."""
    weights = torch.softmax((q * HEAD_WIDTH**-0.5) @ k.transpose(-1, -2), dim=-1)
    return (weights @ v).transpose(1, 2).reshape(-1, tokens, WIDTH)


class Block(nn.Module):
    """Self-attention and a feed-forward layer, normalised before, added after."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.norm_attention, self.norm_forward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.forward_layer = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).split(WIDTH, dim=-1)
        q, k, v = (_heads(part, self.tokens) for part in (q, k, v))
        x = x + self.out(_attend(q, k, v, self.tokens))
        added: Tensor = self.forward_layer(self.norm_forward(x))
        return x + added


class Prefix(nn.Module):
    """uint8 [batch, 64, 64, 3] and int64 [batch, 8] → keys and values [batch, LAYERS, 2, HEADS, 24, 24]."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(3, 16, 5, 2, 2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(64, WIDTH, 3, 2, 1),
        )
        self.read = nn.Embedding(words + 1, WIDTH)  # 0 is padding, and any word it does not know
        self.place = nn.Parameter(torch.randn(1, PREFIX_TOKENS, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block(PREFIX_TOKENS) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.keys_values = nn.Linear(WIDTH, LAYERS * 2 * WIDTH)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        pixels = image.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        seen = self.see(pixels).reshape(-1, WIDTH, IMAGE_TOKENS).transpose(1, 2)
        x = torch.cat([seen, self.read(tokens)], 1) + self.place
        for block in self.blocks:
            x = block(x)
        kv: Tensor = self.keys_values(self.norm(x)).reshape(-1, PREFIX_TOKENS, LAYERS, 2, HEADS, HEAD_WIDTH)
        return kv.permute(0, 2, 3, 4, 1, 5)


class Expert(nn.Module):
    """The velocity of the flow at (x, time), given state and prefix. x: [batch, CHUNK, ACTION_DIM], time: [batch]."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.from_action = nn.Linear(ACTION_DIM, WIDTH)
        self.from_state = nn.Sequential(nn.Linear(STATE_DIM, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.from_time = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.place = nn.Parameter(torch.randn(1, CHUNK + 1, WIDTH) * 0.02)
        self.norm_query = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.query = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.blocks = nn.ModuleList([Block(CHUNK + 1) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.to_velocity = nn.Linear(WIDTH, ACTION_DIM)
        self.register_buffer("frequencies", torch.exp(torch.linspace(0.0, math.log(100.0), 16))[None])

    def forward(self, x: Tensor, time: Tensor, state: Tensor, past_kv: Tensor) -> Tensor:
        angle = time[:, None] * self.frequencies
        when = self.from_time(torch.cat([torch.sin(angle), torch.cos(angle)], 1))
        h = torch.cat([self.from_state(state)[:, None], self.from_action(x)], 1) + self.place + when[:, None]
        for i in range(LAYERS):
            q = _heads(self.query[i](self.norm_query[i](h)), CHUNK + 1)
            h = self.blocks[i](h + self.out[i](_attend(q, past_kv[:, i, 0], past_kv[:, i, 1], CHUNK + 1)))
        velocity: Tensor = self.to_velocity(self.norm(h[:, 1:]))
        return velocity


class DenoiseStep(nn.Module):
    """One Euler step of the flow, which the runtime calls once per step."""

    def __init__(self, expert: Expert) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x: Tensor, time: Tensor, state: Tensor, past_kv: Tensor) -> Tensor:
        velocity: Tensor = self.expert(x, time, state, past_kv)
        return x + velocity / STEPS
