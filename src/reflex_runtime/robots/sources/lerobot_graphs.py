"""LeRobot policies as ONNX graphs: from uint8 pictures and the robot's state to actions in the robot's units.

Normalisation is LeRobot's own code, traced with the policy, so that its formula is in the graph whatever it is.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from reflex_runtime.core.errors import ConfigError, not_installed
from reflex_runtime.robots.policy.observation import Observation, ObservationFields, noise_of
from reflex_runtime.robots.policy.spec import FLOAT_LEVELS, DeviceOptions
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.sources.lerobot_policy import LoadedPolicy
from reflex_runtime.robots.sources.lerobot_processors import PAIRS
from reflex_runtime.robots.sources.lerobot_vla import LeRobotStaged, PackedCache, with_room
from reflex_runtime.robots.sources.torch_models import taken

if find_spec("onnxscript") is None:  # which torch.onnx needs
    raise not_installed("onnxscript", "reflex export")

KNOWN: Final = {
    "RenameObservationsProcessorStep", "AddBatchDimensionProcessorStep", "DeviceProcessorStep",
    "NormalizerProcessorStep", "UnnormalizerProcessorStep",
}  # fmt: skip
_IMAGES: Final = "observation.images"
EXAMPLES: Final = 2  # rows of the traced call: one would be taken for a constant


def check_steps(spec: LeRobotCheckpoint, loaded: LoadedPolicy, known: AbstractSet[str]) -> None:
    """ConfigError for a step of the processors that is not known."""
    for pipeline in (loaded.pre, loaded.post):
        for step in pipeline.steps:
            if type(step).__name__ not in known:
                raise ConfigError(
                    f"{spec.source}: its processors have a {type(step).__name__}, which cannot be put into the graph; "
                    f"serve it as it is: reflex serve lerobot:{spec.features.path}"
                )


def write_graph(
    spec: LeRobotCheckpoint, compute: Any, policy: Any, given: Mapping[str, Any], outputs: Sequence[str], file: Path,
    opset: int,
) -> None:  # fmt: skip
    """Trace a function of tensors by name, [n, …] each, and write the graph. policy: whose weights it uses."""

    class Traced(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy  # its weights become the graph's

        def forward(self, *tensors: Any) -> Any:
            return compute(dict(zip(given, tensors, strict=True)))

    batch = torch.export.Dim("batch", min=1, max=4096)
    quiet = logging.getLogger("onnxscript"), logging.getLogger("torch.onnx")
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                Traced().eval(),
                tuple(given.values()),
                dynamo=True,
                input_names=list(given),
                output_names=list(outputs),
                dynamic_shapes=[tuple({0: batch} for _ in given)],
                opset_version=opset,
                verbose=False,
            )
            program.save(str(file))  # weights beyond 2 GB go to a file beside it
    except Exception as error:  # torch.export and onnxscript raise many classes
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())
        raise ConfigError(
            f"{spec.source}: torch.onnx cannot export it: {type(cause).__name__}: {text[:300]}. Serve it as it is: "
            f"reflex serve lerobot:{spec.features.path}"
        ) from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


class TracedPolicy:
    """An `Original` of the types act and diffusion, on the CPU."""

    def __init__(self, spec: LeRobotCheckpoint) -> None:
        self._spec = spec
        self._loaded = loaded = LoadedPolicy(spec, spec.features, DeviceOptions())
        check_steps(spec, loaded, KNOWN)
        self._normaliser, self._denormaliser = step_of(loaded.pre, "Normalizer"), step_of(loaded.post, "Unnormalizer")
        self._times: list[int] = []  # of diffusion; numbers, because a tensor's values are not known while it is traced
        if spec.model_type == "diffusion":
            model = loaded.policy.diffusion
            model.noise_scheduler.set_timesteps(model.num_inference_steps)
            self._times = model.noise_scheduler.timesteps.tolist()
        self.unit, self.states = unit_of(self._denormaliser, spec.action_dim), states_of(self._normaliser, spec)

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        spec = self._spec
        n, steps = EXAMPLES, (spec.observation_steps,) if spec.observation_steps > 1 else ()
        given = {name: torch.zeros((n, *steps, *size, 3), dtype=torch.uint8) for name, size in spec.images.items()}
        given["state"] = torch.zeros((n, *steps, spec.state_dim))
        if spec.takes_noise:
            given["noise"] = torch.zeros((n, spec.horizon, spec.x_dim))
        compute = self._diffusion if spec.model_type == "diffusion" else self._act
        write_graph(spec, compute, self._loaded.policy, given, ["actions"], directory / "model.onnx", opset)
        inputs = {role: role for role in given}
        return {"export_kind": "monolithic", "inputs": inputs, "outputs": {"actions": "actions"}}

    def answer(self, episode: Sequence[Observation]) -> Floats:
        policy, config = self._loaded.policy, self._loaded.config
        more: dict[str, Any] = {}
        with torch.inference_mode():
            if self._spec.model_type == "act":
                seen = self._loaded.pre(raw_of(self._spec, episode[-1]))
            else:  # as `select_action` fills the queues
                policy.reset()
                for moment in episode:
                    seen = self._loaded.pre(raw_of(self._spec, moment))
                    seen.pop("action", None)
                    if config.image_features:
                        seen[_IMAGES] = torch.stack([seen[name] for name in config.image_features], dim=-4)
                    for name, kept in policy._queues.items():
                        if name in seen:
                            kept.append(seen[name])
                more["noise"] = torch.from_numpy(noise_of(episode[-1].seed, self._spec.horizon, self._spec.x_dim))[None]
            chunk: Floats = taken(self._loaded.post(policy.predict_action_chunk(seen, **more)))[0]
        return chunk

    def _normalised(self, given: Mapping[str, Any]) -> dict[str, Any]:
        batch = features_of(self._spec, given)
        return batch if self._normaliser is None else self._normaliser._normalize_observation(batch, inverse=False)

    def _denormalised(self, actions: Any) -> Any:
        return actions if self._denormaliser is None else self._denormaliser._normalize_action(actions, inverse=True)

    def _act(self, given: Mapping[str, Any]) -> Any:
        return self._denormalised(self._loaded.policy.predict_action_chunk(self._normalised(given)))

    def _diffusion(self, given: Mapping[str, Any]) -> Any:
        """LeRobot's `generate_actions`, with the loop over steps unrolled."""
        model, config = self._loaded.policy.diffusion, self._loaded.config
        batch = self._normalised(given)
        if config.n_obs_steps == 1:
            batch = {name: tensor[:, None] for name, tensor in batch.items()}
        if config.image_features:
            batch[_IMAGES] = torch.stack([batch[name] for name in config.image_features], dim=-4)
        condition = model._prepare_global_conditioning(batch)
        scheduler, x = model.noise_scheduler, given["noise"]
        for time in self._times:
            times = torch.full(x.shape[:1], time, dtype=torch.long)
            x = scheduler.step(model.unet(x, times, global_cond=condition), time, x).prev_sample
        first = config.n_obs_steps - 1
        return self._denormalised(x[:, first : first + config.n_action_steps])


def raw_of(spec: LeRobotCheckpoint, moment: Observation) -> dict[str, Any]:
    """What LeRobot's own loops give a preprocessor."""
    raw: dict[str, Any] = {"task": moment.instruction}
    fields = ObservationFields(spec)
    pictures, _ = fields.pictures(fields.found(moment.images))  # of any size where the policy fits them itself
    for camera, name in spec.features.cameras.items():
        if camera in spec.optional_images and camera not in moment.images:
            continue
        raw[name] = torch.from_numpy(pictures[camera].transpose(2, 0, 1).astype(np.float32) / 255)
    start = 0
    for name, size in spec.features.states:
        assert moment.state is not None
        raw[name] = torch.from_numpy(moment.state[start : start + size].copy())
        start += size
    return raw


def features_of(spec: LeRobotCheckpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """LeRobot's features of the tensors that a graph gets."""
    batch: dict[str, Any] = {}
    for camera, name in spec.features.cameras.items():
        batch[name] = given[camera].movedim(-1, -3).to(torch.float32) / 255
    start = 0
    for name, size in spec.features.states:
        batch[name] = given["state"][..., start : start + size]
        start += size
    return batch


def states_of(normaliser: Any, spec: LeRobotCheckpoint) -> Floats:
    """Lowest and highest states that the policy was trained on, [2, state_dim]."""
    low, high = zip(*(_range(normaliser, name, size) for name, size in spec.features.states), strict=True)
    return np.stack([np.concatenate(low), np.concatenate(high)])


def step_of(pipeline: Any, name: str) -> Any:
    """The step of a pipeline that (de)normalises, None without one."""
    return next((step for step in pipeline.steps if type(step).__name__.startswith(name)), None)


def unit_of(denormaliser: Any, dim: int) -> Floats:
    """By how much each joint's action changes where the normalised one changes by 1, as LeRobot computes it."""
    if denormaliser is None:
        return np.ones(dim, np.float32)
    zero = torch.zeros(1, dim, dtype=torch.float64)
    # In float64, which LeRobot's steps take on: its statistics are then those of float32, and the difference is exact.
    span = denormaliser._normalize_action(zero + 1, inverse=True) - denormaliser._normalize_action(zero, inverse=True)
    denormaliser.to(dtype=torch.float32)
    unit: Floats = np.abs(taken(span)[0])
    return unit


def _range(normaliser: Any, name: str, size: int) -> tuple[Floats, Floats]:
    """Lowest and highest value of a state that the policy was trained on; [-1, 1] where that is not known."""
    stats = {} if normaliser is None else normaliser._tensor_stats.get(name, {})
    if "mean" in stats and "std" in stats:
        mean, std = taken(stats["mean"]).reshape(-1), taken(stats["std"]).reshape(-1)
        return mean - 2 * std, mean + 2 * std
    if "min" in stats and "max" in stats:
        return taken(stats["min"]).reshape(-1), taken(stats["max"]).reshape(-1)
    return np.full(size, -1.0, np.float32), np.full(size, 1.0, np.float32)


# -- SmolVLA -----------------------------------------------------------------------------------------------------------
#
# Two graphs, on LeRobot's functions: the scene, and one denoise step for rows at different steps. Normalisation of the
# state is in the graph. That of actions cannot be in a graph whose output is the next input: it is `action_norm`.


_TEXT: Final = {"NewLineTaskProcessorStep", "SmolVLANewLineProcessor", "TokenizerProcessorStep"}


class TracedSmolVla:
    """An `Original` in float32: ONNX Runtime has no bfloat16 on most devices."""

    def __init__(self, spec: LeRobotCheckpoint) -> None:
        self._spec = spec
        self._model = LeRobotStaged(spec, spec.features, DeviceOptions(dtype="float32"))
        self._loaded = self._model.loaded
        check_steps(spec, self._loaded, KNOWN | _TEXT)
        if self._loaded.config.adapt_to_pi_aloha:
            raise ConfigError(f"{spec.source}: adapt_to_pi_aloha is not exported; serve it as it is")
        if self._loaded.config.resize_imgs_with_padding is None:
            raise ConfigError(f"{spec.source}: without resize_imgs_with_padding it is not exported; serve it as it is")
        if self._model.old:
            raise ConfigError(f"{spec.source}: SmolVLA is exported with LeRobot 0.6.1 and newer (Python 3.12)")
        self._normaliser = step_of(self._loaded.pre, "Normalizer")
        denormaliser = step_of(self._loaded.post, "Unnormalizer")
        self._norm = _action_norm(spec, denormaliser)
        self.unit, self.states = unit_of(denormaliser, spec.action_dim), states_of(self._normaliser, spec)

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        spec, policy, config = self._spec, self._loaded.policy, self._loaded.config
        n, tokens, size = EXAMPLES, config.tokenizer_max_length, tuple(config.resize_imgs_with_padding[::-1])
        given = {name: torch.zeros((n, *size, 3)) for name in spec.images}
        optional = spec.optional_images and not config.add_image_special_tokens  # those would stay
        if optional:
            given["image_masks"] = torch.ones((n, len(spec.images)), dtype=torch.bool)
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
            "images": {name: list(size) for name in spec.images},
            "resize": FLOAT_LEVELS,
            **({"optional_images": list(spec.images)} if optional else {}),
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

    def answer(self, episode: Sequence[Observation]) -> Floats:
        spec, policy = self._spec, self._loaded.policy
        policy.reset()
        noise = torch.from_numpy(noise_of(episode[-1].seed, spec.chunk_size, spec.x_dim))[None]
        with torch.no_grad():
            seen = self._loaded.pre(raw_of(spec, episode[-1]))
            chunk: Floats = taken(self._loaded.post(policy.predict_action_chunk(seen, noise=noise)))[0]
        return chunk

    def _prefix(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        batch = features_of(self._spec, given)
        if self._normaliser is not None:
            batch = self._normaliser._normalize_observation(batch, inverse=False)
        policy = self._loaded.policy
        images, masks = policy.prepare_images(batch)
        if "image_masks" in given:
            masks = given["image_masks"].unbind(1)
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
    low, high = PAIRS[mode.name]
    found: dict[str, Any] = {name: taken(stats[name]).astype(float).tolist() for name in (low, high)}
    if mode.name == "MEAN_STD":
        if min(found["std"]) <= 0.0:
            raise ConfigError(f"{spec.source}: a joint whose std is 0 is not exported; serve it as it is")
    elif min(b - a for a, b in zip(found[low], found[high], strict=True)) == 0.0:
        found["epsilon"] = denormaliser.eps
    return found
