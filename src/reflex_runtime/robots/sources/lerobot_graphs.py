"""LeRobot policies as ONNX graphs: from uint8 pictures and the robot's state to actions in the robot's units.

LeRobot's own normalisation is traced with the policy, so that the graph has its formula.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import not_installed
from reflex_runtime.robots.policy.base import MonolithicPolicy, Policy
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.spec import FLOAT_LEVELS, DeviceOptions
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.export_files import PAIRS
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint
from reflex_runtime.robots.sources.lerobot_policy import (
    LeRobotWhole,
    LoadedPolicy,
    diffusion_actions,
    diffusion_condition,
)
from reflex_runtime.robots.sources.lerobot_vla import LeRobotStaged, PackedCache, with_room
from reflex_runtime.robots.sources.torch_models import to_host

if find_spec("onnxscript") is None:  # which torch.onnx needs
    raise not_installed("onnxscript", "reflex export")

KNOWN: Final = {
    "RenameObservationsProcessorStep", "AddBatchDimensionProcessorStep", "DeviceProcessorStep",
    "NormalizerProcessorStep", "UnnormalizerProcessorStep",
}  # fmt: skip
EXAMPLES: Final = 2  # rows of the traced call: torch would take an axis of length 1 for a constant


def write_graph(
    spec: LeRobotCheckpoint, compute: Any, policy: Any, given: Mapping[str, Any], outputs: Sequence[str], file: Path,
    opset: int,
) -> None:  # fmt: skip
    """Trace `compute`, a function of tensors by name, [n, …] each, and write the graph. policy: has the weights."""

    class Traced(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy  # its weights become the graph's

        def forward(self, *tensors: Any) -> Any:
            return compute(dict(zip(given, tensors, strict=True)))

    batch = torch.export.Dim("batch", min=1, max=4096)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            for name in ("onnxscript", "torch.onnx"):  # for good: this process only exports
                logging.getLogger(name).setLevel(logging.ERROR)
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
            f"reflex serve lerobot:{spec.path}"
        ) from error


class TracedCheckpoint:
    """An `Original` on the CPU. known: processor steps that the graphs can contain; ConfigError for any other."""

    def __init__(self, spec: LeRobotCheckpoint, policy: Policy, loaded: LoadedPolicy, known: AbstractSet[str]) -> None:
        self.policy, self._spec, self._loaded = policy, spec, loaded
        for step in (*loaded.pre.steps, *loaded.post.steps):
            if type(step).__name__ not in known:
                raise ConfigError(
                    f"{spec.source}: its processors have a {type(step).__name__}, which cannot be put into the graph; "
                    f"serve it as it is: reflex serve lerobot:{spec.path}"
                )
        self._normaliser, self._denormaliser = step_of(loaded.pre, "Normalizer"), step_of(loaded.post, "Unnormalizer")
        self.unit = np.abs(loaded.slopes()[0])
        ranges = [_range(self._normaliser, name, size) for name, size in spec.states]
        self.states: Floats = np.concatenate([np.zeros((2, 0), np.float32), *ranges], axis=1)

    def _normalised(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a graph as LeRobot's features, normalised."""
        batch: dict[str, Any] = {}
        for camera, name in self._spec.cameras.items():
            batch[name] = given[camera].movedim(-1, -3).to(torch.float32) / 255
        start = 0
        for name, size in self._spec.states:
            batch[name] = given["state"][..., start : start + size]
            start += size
        return batch if self._normaliser is None else self._normaliser._normalize_observation(batch, inverse=False)


class TracedPolicy(TracedCheckpoint):
    """ACT and Diffusion, in one graph."""

    def __init__(self, spec: LeRobotCheckpoint) -> None:
        model = LeRobotWhole(spec, DeviceOptions())
        super().__init__(spec, MonolithicPolicy(model), model.loaded, KNOWN)
        self._times: list[int] = []  # of diffusion, as integers: tensors have no values while they are traced
        if spec.model_type == "diffusion":
            diffusion = model.loaded.policy.diffusion
            diffusion.noise_scheduler.set_timesteps(diffusion.num_inference_steps)
            self._times = diffusion.noise_scheduler.timesteps.tolist()

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

    def _denormalised(self, actions: Any) -> Any:
        return actions if self._denormaliser is None else self._denormaliser._normalize_action(actions, inverse=True)

    def _act(self, given: Mapping[str, Any]) -> Any:
        return self._denormalised(self._loaded.policy.predict_action_chunk(self._normalised(given)))

    def _diffusion(self, given: Mapping[str, Any]) -> Any:
        """LeRobot's `generate_actions`, with the loop over steps unrolled."""
        model, batch = self._loaded.policy.diffusion, self._normalised(given)
        if self._spec.observation_steps == 1:
            batch = {name: tensor[:, None] for name, tensor in batch.items()}
        condition = diffusion_condition(self._loaded, batch)
        scheduler, x = model.noise_scheduler, given["noise"]
        for time in self._times:
            times = torch.full(x.shape[:1], time, dtype=torch.long)
            x = scheduler.step(model.unet(x, times, global_cond=condition), time, x).prev_sample
        return self._denormalised(diffusion_actions(self._loaded, x))


def step_of(pipeline: Any, name: str) -> Any:
    """The step of a pipeline whose class name begins with `name`, or None."""
    return next((step for step in pipeline.steps if type(step).__name__.startswith(name)), None)


def _range(normaliser: Any, name: str, size: int) -> Floats:
    """The range of a state in the training data: mean ± 2 std, or min and max; [-1, 1] without statistics."""
    stats = {} if normaliser is None else normaliser._tensor_stats.get(name, {})
    found = {key: to_host(value).reshape(-1) for key, value in stats.items() if key in ("mean", "std", "min", "max")}
    if {"mean", "std"} <= found.keys():
        return np.stack([found["mean"] - 2 * found["std"], found["mean"] + 2 * found["std"]])
    if {"min", "max"} <= found.keys():
        return np.stack([found["min"], found["max"]])
    return np.stack([np.full(size, -1.0, np.float32), np.full(size, 1.0, np.float32)])


# -- SmolVLA -----------------------------------------------------------------------------------------------------------
#
# Two graphs, on LeRobot's functions: the scene, and one denoise step for rows at different steps. The state is
# normalised in the graph. Actions are not, as they are the input of the next step: the export has `action_norm`.


_TEXT: Final = {"NewLineTaskProcessorStep", "SmolVLANewLineProcessor", "TokenizerProcessorStep"}


class TracedSmolVla(TracedCheckpoint):
    """SmolVLA in float32: ONNX Runtime has no bfloat16 on most devices."""

    def __init__(self, spec: LeRobotCheckpoint) -> None:
        self._model = LeRobotStaged(spec, DeviceOptions(dtype="float32"))
        super().__init__(spec, DecomposedPolicy(self._model, cache_bytes=0), self._model.loaded, KNOWN | _TEXT)
        if self._loaded.config.adapt_to_pi_aloha:
            raise ConfigError(f"{spec.source}: adapt_to_pi_aloha is not exported; serve it as it is")
        if self._loaded.config.resize_imgs_with_padding is None:
            raise ConfigError(f"{spec.source}: without resize_imgs_with_padding it is not exported; serve it as it is")
        self._norm = _action_norm(spec, self._denormaliser)

    def write(self, directory: Path, opset: int) -> dict[str, Any]:
        spec, policy, config = self._spec, self._loaded.policy, self._loaded.config
        n, tokens, size = EXAMPLES, config.tokenizer_max_length, tuple(config.resize_imgs_with_padding[::-1])
        given = {name: torch.zeros((n, *size, 3)) for name in spec.images}
        optional = spec.optional_images and not config.add_image_special_tokens  # a missing image's would remain
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

    def _prefix(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        policy, batch = self._loaded.policy, self._normalised(given)
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
        # The last bit of the time matters: it is computed from the number of the step, as LeRobot does.
        made = torch.round(given["time"] * n).to(torch.float64)
        time = (1.0 + made * (-1.0 / n)).to(torch.float32)
        velocity = self._loaded.policy.model.denoise_step(
            prefix_pad_masks=pad, past_key_values=cache, x_t=given["x"], timestep=time
        )
        return given["x"] + (-1.0 / n) * velocity


def _action_norm(spec: LeRobotCheckpoint, denormaliser: Any) -> dict[str, Any] | None:
    """The key `action_norm`; None where actions are not normalised."""
    from lerobot.configs.types import FeatureType

    mode = None if denormaliser is None else denormaliser.norm_map.get(FeatureType.ACTION)
    stats = {} if denormaliser is None else denormaliser._tensor_stats.get("action", {})
    if mode is None or mode.name == "IDENTITY" or not stats:
        return None
    low, high = PAIRS[mode.name]
    found: dict[str, Any] = {name: to_host(stats[name]).astype(float).tolist() for name in (low, high)}
    if mode.name == "MEAN_STD":
        if min(found["std"]) <= 0.0:
            raise ConfigError(f"{spec.source}: a joint whose std is 0 is not exported; serve it as it is")
    elif min(b - a for a, b in zip(found[low], found[high], strict=True)) == 0.0:
        found["epsilon"] = denormaliser.eps
    return found


TRACED: Final[Mapping[str, Callable[[LeRobotCheckpoint], TracedPolicy | TracedSmolVla]]] = {
    "act": TracedPolicy, "diffusion": TracedPolicy, "smolvla": TracedSmolVla,
}  # fmt: skip
"""By type."""
