"""A VLA in PyTorch with random weights and the proportions of real ones: a prefix costs about ten steps.

`python:bench.apps.torch_vla:make` serves it; as a program it is the same model called in a loop, one observation after
the other: `python -m bench.apps.torch_vla` reads "n seconds" and prints the seconds of each call with n rows.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reflex_runtime.robots import DeviceOptions, Policy, PolicySpec, load_policy
from reflex_runtime.robots.sources.torch_models import Tensors, TorchStaged, TorchWhole, torch_device

WIDTH, LAYERS, SIDE, STATE, ACTIONS, CHUNK, STEPS = 256, 4, 224, 8, 7, 16, 10
SPEC = PolicySpec(
    model_id="bench-vla", staged=True, num_denoising_steps=STEPS, chunk_size=CHUNK, action_dim=ACTIONS,
    images={"image": (SIDE, SIDE), "image_wrist": (SIDE, SIDE)}, takes_state=True, state_dim=STATE,
)  # fmt: skip


class Vla(nn.Module):  # type: ignore[misc]
    """Two pictures of 196 tokens each through a transformer; steps look at what it made, `looks` times."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, looks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.scene = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.state, self.time, self.x = (nn.Linear(size, width) for size in (STATE, 1, ACTIONS))
        self.look = nn.ModuleList(nn.MultiheadAttention(width, 8, batch_first=True) for _ in range(looks))
        self.out = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, ACTIONS))

    def prefix(self, inputs: Tensors) -> dict[str, Tensor]:
        """The scene, [n, tokens, width]."""
        kind = self.x.weight.dtype
        pictures = [inputs[name].permute(0, 3, 1, 2).to(kind) / 255 for name in ("image", "image_wrist")]
        seen = [self.patches(picture).flatten(2).transpose(1, 2) for picture in pictures]
        return {"scene": self.scene(torch.cat(seen, dim=1))}

    def step(self, prefix: Tensors, x: Tensor, k: Tensor, n: int) -> Tensor:
        """x after one more of n steps."""
        time = self.time((k / n).to(x.dtype).unsqueeze(1))
        hidden = self.x(x) + (self.state(prefix["state"]) + time).unsqueeze(1)
        for look in self.look:
            hidden = hidden + look(hidden, prefix["scene"], prefix["scene"], need_weights=False)[0]
        return x + self.out(hidden) / n

    def forward(self, inputs: Tensors, noise: Tensor) -> Tensor:
        """The whole chunk in one call."""
        prefix, x = self.prefix(inputs) | {"state": inputs["state"]}, noise
        for k in range(STEPS):
            x = self.step(prefix, x, torch.full((len(x),), k, device=x.device), STEPS)
        return x


def make(device: DeviceOptions) -> TorchStaged:
    """Joined at denoise steps."""
    torch.manual_seed(0)
    return TorchStaged(SPEC, Vla(), device)


def make_large(device: DeviceOptions) -> TorchStaged:
    """The size of a small real one, for a GPU: 270 million parameters, and 16 layers that look in each step."""
    torch.manual_seed(0)
    with torch.device(torch_device(device)):
        return TorchStaged(SPEC, Vla(1024, 16, 16), device)


def make_whole(device: DeviceOptions) -> TorchWhole:
    """The same model as one call for a chunk."""
    from dataclasses import replace

    torch.manual_seed(0)
    return TorchWhole(replace(SPEC, staged=False), Vla(), device)


def observations(n: int) -> list[dict[str, Any]]:
    """Pictures, states and seeds that differ."""
    rng = np.random.default_rng(14)
    names = ("image", "image_wrist")
    return [
        {
            "images": {name: rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for name in names},
            "state": rng.uniform(-1, 1, STATE),
            "request_id": str(i),
        }
        for i in range(n)
    ]


def main() -> None:
    """Answer jobs from standard input."""
    torch.set_num_threads(1)
    policy: Policy = load_policy("python:bench.apps.torch_vla:make_whole")
    for line in sys.stdin:
        n, seconds = line.split()
        sent, times, end = observations(int(n)), [], time.perf_counter() + float(seconds)
        while time.perf_counter() < end or not times:
            began = time.perf_counter()
            policy.answers([policy.request(policy.prepare(**fields)) for fields in sent])
            times.append(time.perf_counter() - began)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
