"""Policies in PyTorch that misuse a GPU, for test_on_gpu.py: `python:gpu_policies:make` in this directory.

The state says how: [GiB a row needs, whether a kernel reads where nothing is].
"""

from __future__ import annotations

from typing import Any

import torch

from reflex_runtime.robots import DeviceOptions, PolicySpec
from reflex_runtime.robots.sources.torch_models import Tensors, TorchWhole

SPEC = PolicySpec(
    model_id="misuse", staged=False, chunk_size=4, action_dim=2, images={}, takes_state=True, state_dim=2,
)  # fmt: skip


class Misuse(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensors, noise: Any) -> Any:
        state = inputs["state"]
        gib = max(0, int(state[:, 0].sum().item()))
        held = torch.empty(gib << 30, dtype=torch.uint8, device=state.device) if gib else None
        if bool((state[:, 1] > 1.5).any()):
            state = state[torch.full((len(state),), 1 << 40, device=state.device)]
        del held
        return (state * self.scale)[:, None, :].expand(-1, 4, -1)


def make(device: DeviceOptions) -> TorchWhole:
    return TorchWhole(SPEC, Misuse(), device)
