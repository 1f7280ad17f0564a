"""Tiny checkpoints with random weights, made and saved by LeRobot's own calls, and LeRobot's own answers of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from tiny_pi import shrink

import lerobot

OLD = lerobot.__version__.startswith("0.4")
TASKS = ("pick up the cube", "open the drawer", "wipe", "put the red block into the bowl")
TOP, WRIST = "observation.images.top", "observation.images.wrist"
_STATE, _ENV, _VISUAL, _ACTION = FeatureType.STATE, FeatureType.ENV, FeatureType.VISUAL, FeatureType.ACTION
_MEAN, _MINMAX = NormalizationMode.MEAN_STD, NormalizationMode.MIN_MAX
_DIM = 6


def _inputs(cameras: tuple[str, ...] = (), size: tuple[int, int] = (64, 64), env: int = 0) -> dict[str, PolicyFeature]:
    found = {camera: PolicyFeature(type=_VISUAL, shape=(3, *size)) for camera in cameras}
    found["observation.state"] = PolicyFeature(type=_STATE, shape=(_DIM,))
    if env:
        found["observation.environment_state"] = PolicyFeature(type=_ENV, shape=(env,))
    return found


_RESNET = {"vision_backbone": "resnet18", "pretrained_backbone_weights": None}
_ACT = {
    "chunk_size": 8, "n_action_steps": 5, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "n_encoder_layers": 1,
    "n_decoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 8, **_RESNET,
}  # fmt: skip
_DIFFUSION = {
    "n_obs_steps": 2, "horizon": 8, "n_action_steps": 6, "down_dims": (8, 16), "n_groups": 4,
    "diffusion_step_embed_dim": 16, "num_train_timesteps": 20, "spatial_softmax_num_keypoints": 4,
    "drop_n_last_frames": 1,
}  # fmt: skip
_CROPPED = {"use_group_norm": True, "crop_shape": (56, 56), **_RESNET}
_VQBET = {
    "n_obs_steps": 3, "n_action_pred_token": 3, "action_chunk_size": 4, "vqvae_n_embed": 8, "vqvae_embedding_dim": 16,
    "vqvae_enc_hidden_dim": 16, "gpt_block_size": 32, "gpt_input_dim": 32, "gpt_output_dim": 32, "gpt_n_layer": 1,
    "gpt_n_head": 2, "gpt_hidden_dim": 32, "spatial_softmax_num_keypoints": 4, **_CROPPED,
}  # fmt: skip
_VLA = {"chunk_size": 8, "n_action_steps": 8, "input_features": _inputs((TOP, WRIST), (48, 64))}
_PI = {
    "max_state_dim": 32, "max_action_dim": 32, "image_resolution": (28, 28), "num_inference_steps": 10,
    "tokenizer_max_length": 96, **_VLA,
}  # fmt: skip
_RELATIVE = {
    "use_relative_actions": True, "relative_exclude_joints": ["gripper"],
    "action_feature_names": ["j0", "j1", "j2", "j3", "j4", "gripper"],
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "act": ("act", {**_ACT, "input_features": _inputs((TOP, WRIST))}),
    "act-state": ("act", {
        **_ACT, "input_features": _inputs(env=5),
        "normalization_mapping": {"VISUAL": _MEAN, "STATE": _MINMAX, "ENV": _MEAN, "ACTION": _MINMAX},
    }),
    "diffusion": ("diffusion", {
        **_DIFFUSION, **_CROPPED, "noise_scheduler_type": "DDIM", "num_inference_steps": 5,
        "use_separate_rgb_encoder_per_camera": False, "input_features": _inputs((TOP, WRIST)),
    }),
    "diffusion-ddpm": ("diffusion", {**_DIFFUSION, "noise_scheduler_type": "DDPM", "input_features": _inputs(env=5)}),
    "vqbet": ("vqbet", {**_VQBET, "input_features": _inputs((TOP,))}),
}  # fmt: skip
if not OLD:
    smolvla = {
        "resize_imgs_with_padding": (32, 32), "num_vlm_layers": 4, "tokenizer_max_length": 48,
        "pad_language_to": "longest", **_VLA,
    }  # fmt: skip
    FAMILIES |= {
        "smolvla": ("smolvla", smolvla),
        "pi0": ("pi0", _PI),
        "pi05": ("pi05", {**_PI, "empty_cameras": 1}),
        "pi05-relative": ("pi05", {**_PI, **_RELATIVE}),
    }
STAGED = tuple(name for name in FAMILIES if name.startswith(("smolvla", "pi")))


def make(name: str, path: Path) -> Path:
    """Make a checkpoint and save it as a user's training does."""
    if not OLD:
        shrink()
    kind, told = FAMILIES[name]
    torch.manual_seed(1)
    action = {"action": PolicyFeature(type=_ACTION, shape=(_DIM,))}
    config = make_policy_config(kind, output_features=action, device="cpu", push_to_hub=False, **copy.deepcopy(told))
    policy = get_policy_class(kind)(copy.deepcopy(config))
    _randomise(policy)
    policy.eval()
    if kind == "vqbet":
        policy.vqbet.action_head.vqvae_model.discretized.fill_(True)
    config = policy.config  # making it may have added features
    pre, post = make_pre_post_processors(config, dataset_stats=_stats({**config.input_features, **action}))
    for part in (policy, pre, post):
        part.save_pretrained(path)
    return path


def load(path: Path) -> tuple[Any, Any, Any]:
    """(policy, preprocessor, postprocessor), by LeRobot's own calls."""
    from lerobot.configs.policies import PreTrainedConfig

    config = PreTrainedConfig.from_pretrained(str(path))
    policy = get_policy_class(config.type).from_pretrained(str(path), config=config)
    policy.eval()
    return policy, *make_pre_post_processors(config, pretrained_path=str(path))


def _randomise(policy: Any) -> None:
    """Random weights everywhere: zeros and ones (norms, biases) would hide mistakes, and a VLA's small ones would make
    pictures and text count for nothing."""
    drawn, vla = torch.Generator().manual_seed(3), hasattr(policy.config, "max_action_dim")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            noise = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
            if parameter.ndim <= 1:
                parameter.add_(noise * 0.1)
            elif vla or float(parameter.abs().max()) == 0.0:
                parameter.copy_(noise * (0.5 if "norm" in name else 1.0) / parameter[0].numel() ** 0.5)


def _stats(features: dict[str, PolicyFeature]) -> dict[str, dict[str, Any]]:
    """Statistics of a data set that no value equals."""
    drawn, found = torch.Generator().manual_seed(7), {}
    for name, feature in features.items():
        visual = feature.type is _VISUAL
        shape = (feature.shape[0], 1, 1) if visual else feature.shape
        low = torch.rand(shape, generator=drawn) * (0.2 if visual else 1.0) - (0.0 if visual else 1.5)
        width = torch.rand(shape, generator=drawn) * (0.5 if visual else 2.0) + 0.5
        places = {"min": 0.0, "q01": 0.02, "q10": 0.1, "mean": 0.45, "q50": 0.5, "q90": 0.9, "q99": 0.98, "max": 1.0}
        found[name] = {place: low + width * share for place, share in places.items()}
        found[name] |= {"std": width * 0.3, "count": torch.tensor([100])}
    return found
