"""SmolVLA as two ONNX graphs, on LeRobot's functions: the scene, and one denoise step for rows at different steps.

Normalisation of the state is LeRobot's own code, in the graph. That of actions cannot be in a graph whose output is the
next input: it is written as `action_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.lerobot.checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.lerobot.graphs import (
    EXAMPLES,
    KNOWN,
    check_steps,
    features_of,
    raw_of,
    states_of,
    step_of,
    unit_of,
    write_graph,
)
from reflex_runtime.robots.lerobot.made_up import MadeUpEpisode
from reflex_runtime.robots.lerobot.staged import LeRobotStaged, PackedCache, with_room
from reflex_runtime.robots.models.torch_models import taken
from reflex_runtime.robots.policy.observation import noise_of
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.policy.units import Floats

_TEXT: Final = {"NewLineTaskProcessorStep", "SmolVLANewLineProcessor", "TokenizerProcessorStep"}
_PAIRS: Final = {
    "MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"),
}  # fmt: skip


class TracedSmolVla:
    """An `Original` in float32: ONNX Runtime has no bfloat16 on most devices."""

    def __init__(self, spec: LeRobotCheckpoint) -> None:
        self._spec = spec
        self._model = LeRobotStaged(spec, spec.features, DeviceOptions(dtype="float32"))
        self._loaded = self._model.loaded
        check_steps(spec, self._loaded, KNOWN | _TEXT)
        if self._loaded.config.adapt_to_pi_aloha:
            raise ConfigError(f"{spec.source}: adapt_to_pi_aloha is not exported; serve it as it is")
        if self._model.old:
            raise ConfigError(f"{spec.source}: SmolVLA is exported with LeRobot 0.6.1 and newer (Python 3.12)")
        self._normaliser = step_of(self._loaded.pre, "Normalizer")
        denormaliser = step_of(self._loaded.post, "Unnormalizer")
        self._norm = _action_norm(spec, denormaliser)
        self.unit, self.states = unit_of(denormaliser, spec.action_dim), states_of(self._normaliser, spec)

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        spec, policy, config = self._spec, self._loaded.policy, self._loaded.config
        n, tokens = EXAMPLES, config.tokenizer_max_length
        given = {name: torch.zeros((n, *size, 3), dtype=torch.uint8) for name, size in spec.images.items()}
        given["tokens"] = torch.zeros((n, tokens), dtype=torch.int64)
        given["token_mask"] = torch.ones((n, tokens), dtype=torch.bool)
        given["state"] = torch.zeros((n, spec.state_dim))
        with torch.no_grad():
            made = self._prefix(given)
        kept = ["kv_pad", *(f"kv_{kind}_{i}" for i in range(len(made) // 2) for kind in ("keys", "values"))]
        prefix, expert = "vlm_prefix.onnx", "expert_denoise.onnx"
        write_graph(spec, self._prefix, policy, given, kept, directory / prefix, opset)
        step = {"x": torch.zeros((n, spec.chunk_size, spec.x_dim)), "time": torch.zeros(n)}
        step |= dict(zip(kept, made, strict=True))
        write_graph(spec, self._step, policy, step, ["x_next"], directory / expert, opset)
        tokenizer = step_of(self._loaded.pre, "Tokenizer").input_tokenizer.backend_tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.save(str(directory / "tokenizer.json"))
        return {
            "export_kind": "decomposed",
            "x_dim": spec.x_dim,
            "max_tokens": tokens,
            "tokenizer": "tokenizer.json",
            "prompt": {"clean": ["end_newline"]},
            "inputs": {**{role: role for role in given}, "noise": "x", "time": "time"},
            "outputs": {"actions": "x_next"},
            "decomposed": {
                "vlm_prefix_onnx": prefix,
                "expert_denoise_onnx": expert,
                "past_kv_tensor_names": kept,
                "expert_takes_state": False,
            },
            **({} if self._norm is None else {"action_norm": self._norm}),
        }

    def answer(self, episode: MadeUpEpisode) -> Floats:
        spec, policy = self._spec, self._loaded.policy
        policy.reset()
        noise = torch.from_numpy(noise_of(episode.seed, spec.chunk_size, spec.x_dim))[None]
        with torch.no_grad():
            seen = self._loaded.pre(raw_of(spec, episode.moments[-1], episode.instruction))
            chunk: Floats = taken(self._loaded.post(policy.predict_action_chunk(seen, noise=noise)))[0]
        return chunk

    def _prefix(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        batch = features_of(self._spec, given)
        if self._normaliser is not None:
            batch = self._normaliser._normalize_observation(batch, inverse=False)
        policy = self._loaded.policy
        images, masks = policy.prepare_images(batch)
        state = policy.prepare_state(batch)
        pad, layers = self._model.scene(images, masks, given["tokens"], given["token_mask"], state)
        return (pad, *(tensor for layer in layers for tensor in layer))

    def _step(self, given: Mapping[str, Any]) -> Any:
        pad, *layers = [tensor for name, tensor in given.items() if name not in ("x", "time")]
        chunk, n = self._spec.chunk_size, self._spec.num_denoising_steps
        pairs = zip(layers[::2], layers[1::2], strict=True)
        cache = PackedCache([(with_room(k, chunk), with_room(v, chunk)) for k, v in pairs], pad.shape[1])
        # The last bit of the time counts: its step is found again, and the time computed from it as LeRobot does.
        made = torch.round(given["time"] * n).to(torch.float64)
        time = (1.0 + made * (-1.0 / n)).to(torch.float32)
        velocity = self._loaded.policy.model.denoise_step(
            prefix_pad_masks=pad, past_key_values=cache, x_t=given["x"], timestep=time
        )
        return given["x"] + (-1.0 / n) * velocity


def _action_norm(spec: LeRobotCheckpoint, denormaliser: Any) -> dict[str, Any] | None:
    """The key `action_norm`; None where actions are as the model has them."""
    from lerobot.configs.types import FeatureType

    mode = None if denormaliser is None else denormaliser.norm_map.get(FeatureType.ACTION)
    stats = {} if denormaliser is None else denormaliser._tensor_stats.get("action", {})
    if mode is None or mode.name == "IDENTITY" or not stats:
        return None
    low, high = _PAIRS[mode.name]
    found: dict[str, Any] = {name: taken(stats[name]).astype(float).tolist() for name in (low, high)}
    if mode.name == "MEAN_STD":
        if min(found["std"]) <= 0.0:
            raise ConfigError(f"{spec.source}: a joint whose std is 0 is not exported; serve it as it is")
    elif min(b - a for a, b in zip(found[low], found[high], strict=True)) == 0.0:
        found["epsilon"] = denormaliser.eps
    return found
