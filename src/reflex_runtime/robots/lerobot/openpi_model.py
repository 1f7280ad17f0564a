"""π0 and π0.5 of openpi in two stages: LeRobot's port of the model with openpi's weights, and openpi's observations."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.lerobot.features import WEIGHTS
from reflex_runtime.robots.lerobot.loading import LoadedModule, check_loaded, told
from reflex_runtime.robots.lerobot.staged import ReadyVla, StagedVla
from reflex_runtime.robots.models.torch_models import torch_device
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec


class OpenpiStaged(StagedVla):
    """Norms, tokens, padding and transforms are those of the spec; prefix and steps are those of `StagedVla`.

    path: the checkpoint's directory. variants: as in `OpenpiCheckpoint`.
    """

    def __init__(self, spec: PolicySpec, path: Path, variants: tuple[str, str], device: DeviceOptions) -> None:
        name = torch_device(device)
        torch.set_num_threads(device.threads)
        try:
            policy = _opened(spec, path, variants, name, "float32" if device.dtype == "float32" else "bfloat16")
        except ConfigError:
            raise
        except Exception as error:  # LeRobot, transformers and safetensors raise a dozen classes
            raise ConfigError(f"{spec.source}: LeRobot cannot load it: {told(error)}") from error
        check_loaded(spec.source, path / WEIGHTS, policy)
        super().__init__(spec, LoadedModule(name, policy), device)

    def prepare(self, observation: Observation) -> ReadyVla:
        images, masks = [], []
        for name, image in observation.images.items():
            pixels = torch.from_numpy(image.astype(np.float32))
            images.append((pixels.permute(2, 0, 1) / 255.0 * 2.0 - 1.0)[None])
            masks.append(torch.tensor([bool(observation.present[name])]))
        assert observation.tokens is not None
        assert observation.token_mask is not None
        tokens = torch.from_numpy(observation.tokens)[None]
        state = None
        if self.spec.model_type == "pi0":
            assert observation.state is not None
            state = torch.zeros(1, self.spec.x_dim)
            state[0, : self.spec.state_dim] = torch.from_numpy(observation.state)
        return ReadyVla(images, masks, tokens, torch.from_numpy(observation.token_mask)[None], state, None)

    def _time(self, k: int, n: int) -> float:
        return _times(n)[k]


@cache
def _times(n: int) -> tuple[float, ...]:
    """openpi adds up float32. The last bit of a time counts: it is multiplied by 2π/0.004 and goes to a sine."""
    times = [np.float32(1.0)]
    for _ in range(n - 1):
        times.append(times[-1] + np.float32(-1.0 / n))
    return tuple(map(float, times))


def _opened(spec: PolicySpec, path: Path, variants: tuple[str, str], name: str, dtype: str) -> Any:
    """LeRobot's policy of the same family with the weights."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # LeRobot prints what it does
        warnings.simplefilter("ignore")
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.factory import get_policy_class, make_policy_config

        (size,) = set(spec.images.values())
        inputs = {f"observation.images.{image}": PolicyFeature(FeatureType.VISUAL, (3, *size)) for image in spec.images}
        inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (spec.state_dim,))
        config = make_policy_config(
            spec.model_type,
            input_features=inputs,
            output_features={"action": PolicyFeature(FeatureType.ACTION, (spec.action_dim,))},
            chunk_size=spec.chunk_size,
            n_action_steps=spec.chunk_size,
            max_state_dim=spec.x_dim,
            max_action_dim=spec.x_dim,
            paligemma_variant=variants[0],
            action_expert_variant=variants[1],
            image_resolution=size,
            num_inference_steps=spec.num_denoising_steps,
            dtype=dtype,
            device=name,
            push_to_hub=False,
        )
        policy = get_policy_class(spec.model_type).from_pretrained(str(path), config=config)
        policy.to(name)
        policy.eval().requires_grad_(False)
    return policy
