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

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.lerobot.checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.lerobot.loading import LoadedPolicy
from reflex_runtime.robots.lerobot.made_up import MadeUpEpisode, MadeUpMoment
from reflex_runtime.robots.models.torch_models import taken
from reflex_runtime.robots.policy.observation import noise_of
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.policy.units import Floats

if find_spec("onnxscript") is None:  # which torch.onnx needs
    raise ConfigError("reflex export needs onnx and onnxscript: in a clone, pip install '.[lerobot,export]'")

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

    def answer(self, episode: MadeUpEpisode) -> Floats:
        policy, config = self._loaded.policy, self._loaded.config
        more: dict[str, Any] = {}
        with torch.inference_mode():
            if self._spec.model_type == "act":
                seen = self._loaded.pre(raw_of(self._spec, episode.moments[-1], episode.instruction))
            else:  # as `select_action` fills the queues
                policy.reset()
                for moment in episode.moments:
                    seen = self._loaded.pre(raw_of(self._spec, moment, episode.instruction))
                    seen.pop("action", None)
                    if config.image_features:
                        seen[_IMAGES] = torch.stack([seen[name] for name in config.image_features], dim=-4)
                    for name, kept in policy._queues.items():
                        if name in seen:
                            kept.append(seen[name])
                more["noise"] = torch.from_numpy(noise_of(episode.seed, self._spec.horizon, self._spec.x_dim))[None]
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


def raw_of(spec: LeRobotCheckpoint, moment: MadeUpMoment, instruction: str) -> dict[str, Any]:
    """What LeRobot's own loops give a preprocessor."""
    raw: dict[str, Any] = {"task": instruction}
    for camera, name in spec.features.cameras.items():
        raw[name] = torch.from_numpy(moment.images[camera].transpose(2, 0, 1).astype(np.float32) / 255)
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
