"""LeRobot's policies with their processors, and those that make a chunk in one call.

`select_action` is never called, and `predict_action_chunk` only for types whose call keeps nothing: other queues are in
the policy object, which all robots share. Policies that see several observations are called below these queues.
"""

from __future__ import annotations

import copy
import io
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import WholeModel
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.export_files import PAIRS, WEIGHTS, PolicyCheckpoint
from reflex_runtime.robots.sources.torch_models import is_half, to_host, torch_device
from reflex_runtime.run.model_files import shorten

Batch = dict[str, Any]


class Prepared(NamedTuple):
    """A request after the preprocessor: LeRobot's batch of one, and the state to which relative actions are added."""

    batch: Batch
    anchor: Any


class LoadedPolicy:
    """A policy of LeRobot on its device, with its processors.

    Processors keep data between their steps, and the postprocessor reads a state that the preprocessor kept. So each
    thread has its own pair, copied from one that never runs. All pairs share a tokenizer: to copy π0's takes half a
    second and 360 MB.
    """

    def __init__(self, spec: PolicyCheckpoint, device: DeviceOptions) -> None:
        self.spec, self.device = spec, torch_device(device)
        torch.set_num_threads(device.threads)
        with loading(spec):
            config, kind, self.pre, self.post = _processors_of(spec.path, device, self.device)
            served = (*spec.cameras.values(), *(feature for feature, _ in spec.states))
            check_statistics(spec.path / f"{self.pre.name}.json", self.pre, spec.config, served)
            post = spec.path / f"{self.post.name}.json"
            check_statistics(post, self.post, spec.config, ("action",), "unnormalizer")
            self.policy = _opened(spec.path, device, self.device, config, kind)
        check_loaded(spec.source, spec.path / WEIGHTS, self.policy)
        self.config = self.policy.config
        self._own, self._lock, self._tokenized = threading.local(), threading.Lock(), False
        self._relative = self.slopes() if _relative_step(self.pre) is not None and spec.states else None

    def prepare(self, observation: Observation) -> Prepared:
        """The observation as LeRobot's own preprocessor makes it; on any thread."""
        batch: Batch = {}
        for camera, name in self.spec.cameras.items():
            if camera not in self.spec.optional_images or observation.present[camera]:
                image = observation.images[camera].astype(np.float32)  # uint8 [… h, w, 3]; LeRobot's is [… 3, h, w]
                batch[name] = torch.from_numpy(image).movedim(-1, -3) / 255
        if observation.state is not None:
            names, sizes = zip(*self.spec.states, strict=True)
            parts = np.split(observation.state, np.cumsum(sizes)[:-1], axis=-1)
            batch |= dict(zip(names, map(torch.from_numpy, parts), strict=True))
        batch["task"] = observation.instruction
        if self.spec.observation_steps > 1:  # the batch axis is added to single observations only
            batch = {name: [value] if name == "task" else value[None] for name, value in batch.items()}
        pre, _ = self._pair()
        step = _relative_step(pre)
        # A tokenizer changes only at its first call, which sets how it pads.
        with nullcontext() if self._tokenized else self._lock, torch.inference_mode():
            made = pre(batch)
            self._tokenized = True
            return Prepared(made, None if step is None else step.get_cached_state())

    def on_device(self, batch: Batch) -> Batch:
        """The tensors of a batch on the policy's device."""
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def finish(self, rows: Sequence[Observation], actions: Any) -> Floats:
        """Actions [n, chunk, dim] of the policy in the robot's units, by LeRobot's own postprocessor."""
        anchors = [row.ready.anchor for row in rows]
        return self._finished(actions, None if anchors[0] is None else torch.cat(anchors))

    def shift(self, moved: Floats) -> Floats | None:
        """See `PolicyModel.shift`. Computed with the postprocessor's own factors."""
        if self._relative is None or not self._relative[1].any():  # no state is added
            return None
        slope, added = self._relative
        by = np.zeros_like(slope)
        dims = min(len(by), self.spec.states[0][1])
        by[:dims] = added[:dims] * moved[:dims]
        return -np.divide(by, slope, out=np.zeros_like(by), where=slope != 0.0)

    def slopes(self) -> tuple[Floats, Floats]:
        """The postprocessor, which is affine, as factors: of each action, and of the state's number at the same place;
        float32 [action_dim] each."""
        zero = torch.zeros(1, 1, self.spec.action_dim)
        state = torch.zeros(1, self.spec.states[0][1]) if self.spec.states else torch.zeros(1, 1)
        at_zero = self._finished(zero, state)
        slope, added = self._finished(zero + 1.0, state) - at_zero, self._finished(zero, state + 1.0) - at_zero
        return slope[0, 0], added[0, 0]

    def _finished(self, actions: Any, state: Any) -> Floats:
        pre, post = self._pair()
        step = _relative_step(pre)
        if step is not None and state is not None:
            step._last_state = state
        with torch.inference_mode():
            return to_host(post(actions))

    def _pair(self) -> tuple[Any, Any]:
        """(preprocessor, postprocessor) of this thread."""
        if not hasattr(self._own, "pair"):
            kept = [value for step in self.pre.steps for value in vars(step).values() if hasattr(value, "pad_token_id")]
            with self._lock:  # both in one deepcopy: the steps of one refer to those of the other
                self._own.pair = copy.deepcopy((self.pre, self.post), {id(tokenizer): tokenizer for tokenizer in kept})
        pair: tuple[Any, Any] = self._own.pair
        return pair


def stacked_batch(batches: Sequence[Batch]) -> Batch:
    """Batches of one as one batch, without texts. Shorter rows of tokens are padded on the right."""
    found: Batch = {}
    for name, first in batches[0].items():
        if isinstance(first, torch.Tensor) and name.startswith("observation."):
            tensors = [batch[name] for batch in batches]
            found[name] = torch.cat(padded(tensors, 1) if first.ndim == 2 else tensors)
    return found


def padded(tensors: Sequence[Any], dim: int, least: int = 0) -> list[Any]:
    """Tensors with zeros (False) at the end of one axis, as long as the longest and at least `least`."""
    longest = max(least, *(tensor.shape[dim] for tensor in tensors))
    found = []
    for tensor in tensors:
        shape = list(tensor.shape)
        shape[dim] = longest - shape[dim]
        found.append(torch.cat([tensor, tensor.new_zeros(shape)], dim=dim) if shape[dim] else tensor)
    return found


@contextmanager
def loading(spec: PolicyCheckpoint) -> Iterator[None]:
    """Silence what LeRobot prints. Errors of LeRobot, transformers and safetensors become ConfigErrors."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            hint = _hub_hint(spec) if "huggingface.co" in str(error) else ""
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            raise ConfigError(f"{spec.source}: LeRobot cannot load it: {hint}{text}") from error


def _processors_of(path: Path, device: DeviceOptions, name: str) -> tuple[Any, Any, Any, Any]:
    """(configuration, class of the policy, preprocessor, postprocessor)."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(str(path))
    config.device = name
    if device.dtype != "stored" and hasattr(config, "dtype"):
        config.dtype = device.dtype
    kind, host = get_policy_class(config.type), {"device_processor": {"device": "cpu"}}
    pre, post = make_pre_post_processors(
        config, pretrained_path=str(path), preprocessor_overrides=host, postprocessor_overrides=host
    )
    return config, kind, pre, post


def _opened(path: Path, device: DeviceOptions, name: str, config: Any, kind: Any) -> Any:
    """The policy with its weights. Pretrained weights, which those would replace at once, are not loaded."""
    if hasattr(config, "pretrained_backbone_weights"):
        config.pretrained_backbone_weights = None  # torchvision would download them
    if config.type == "smolvla" and config.load_vlm_weights:
        config.load_vlm_weights = False  # 2 GB
        policy = kind(config)
        policy.model.vlm_with_expert.vlm.to(torch.bfloat16)  # the type of the weights that were left out
        policy = kind._load_as_safetensor(policy, str(path / WEIGHTS), config.device, False)
    else:
        policy = kind.from_pretrained(str(path), config=config)
    policy.to(name)
    if device.dtype != "stored" and not hasattr(config, "dtype"):
        policy.to(getattr(torch, device.dtype))
    return policy.eval().requires_grad_(False)


def check_statistics(
    file: Path, pipeline: Any, config: Mapping[str, Any], wanted: Iterable[str], kind_of_step: str = "_normalizer"
) -> None:
    """ConfigError if a processor lacks the statistics of a feature that it normalises.

    LeRobot does not change a feature without statistics, and a robot would get z-scores for degrees. Called before the
    weights are loaded. kind_of_step: part of the names of the steps to check: a postprocessor must denormalise.
    """
    steps = [
        step for step in pipeline.steps if hasattr(step, "norm_map") and kind_of_step in f"_{step._registry_name}"
    ]
    for name in wanted:
        kind = {**config["input_features"], **config["output_features"]}[name]["type"]
        named = (config.get("normalization_mapping") or {}).get(kind, "IDENTITY")
        found = named == "IDENTITY"  # else a step must normalise it, or leave it out by its own keys
        for step in steps:
            modes, keys = {of.value: mode.value for of, mode in step.norm_map.items()}, step.normalize_observation_keys
            left_out = keys is not None and name != "action" and name not in keys
            mode = modes.get(kind, "IDENTITY")
            found = found or left_out or mode != "IDENTITY"
            if not left_out and mode != "IDENTITY":
                _check_feature(f"{file}: {step._registry_name}", step, name, mode)
        if not found:
            raise ConfigError(f"{file}: no step normalises {name}, which is {named} in config.json")


def _check_feature(where: str, step: Any, name: str, mode: str) -> None:
    feature, stats = step.features.get(name), step._tensor_stats
    if feature is None:
        raise ConfigError(f"{where}: {name}, which is {mode}, is not in the features of this step")
    expected = feature.shape[0] if feature.type.value == "VISUAL" else prod(feature.shape)
    for key in PAIRS[mode]:
        if key not in stats.get(name, {}):
            others = sorted(other for other in stats if other.endswith(f".{name}") and key in stats[other])
            there = f" (there are those of {', '.join(map(shorten, others[:3]))})" if others else ""
            raise ConfigError(
                f"{where} has no {key} of {name}, which is {mode}{there}: LeRobot would not change it. Train the "
                "policy on your robot's data, or save its processors with the statistics of that data "
                "(make_pre_post_processors(config, dataset_stats=…))"
            )
        if (size := stats[name][key].numel()) != expected:
            raise ConfigError(f"{where}: the {key} of {name} has {size} numbers, expected {expected}")


def _hub_hint(spec: PolicyCheckpoint) -> str:
    """How to download what the checkpoint needs besides its directory."""
    file = spec.path / "policy_preprocessor.json"
    steps = json.loads(file.read_bytes())["steps"] if file.is_file() else []  # openpi has none
    named = [spec.config.get("vlm_model_name"), *(step.get("config", {}).get("tokenizer_name") for step in steps)]
    commands = [f"hf download {name} --exclude '*.safetensors'" for name in dict.fromkeys(filter(None, named))]
    return f"where there is a network, run {' and '.join(commands)}, and copy the cache here; " if commands else ""


def _relative_step(pipeline: Any) -> Any:
    """The step that keeps the state for relative actions, or None."""
    return next((step for step in pipeline.steps if hasattr(step, "get_cached_state")), None)


def check_loaded(source: str, file: Path, policy: Any) -> None:
    """ConfigError unless the policy has all weights of the file, and they are finite.

    For weights that are missing, have another shape or cannot be read LeRobot logs a line and uses random ones.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        _check_shapes(source, policy, {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()})  # noqa: SIM118
        for name, tensor in policy.state_dict().items():
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(
                    f"{source}: the weights {name} hold NaN or infinite values: the training diverged, or the file is "
                    "damaged; use an earlier checkpoint"
                )
            for theirs in {name, name.removeprefix("model.")} & set(stored.keys()):
                first = stored.get_slice(theirs)[:1] if tensor.ndim else stored.get_tensor(theirs)
                mine = tensor[:1] if tensor.ndim else tensor
                if not torch.allclose(mine.float().cpu(), first.float(), rtol=0.01, atol=1e-6):  # rounded by --dtype
                    raise ConfigError(
                        f"{source}: LeRobot could not read the weights {name}: load the checkpoint with LeRobot alone, "
                        "which prints the reason"
                    )


def _check_shapes(source: str, policy: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """ConfigError unless all weights of a policy are stored in its shapes. shapes: of the stored weights, by name."""
    own = policy.state_dict()
    if hasattr(policy, "_fix_pytorch_state_dict_keys"):  # π0 and π0.5 of openpi have other names
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        fixed = policy._fix_pytorch_state_dict_keys(empty, policy.config)
        shapes = {n if n.startswith("model.") else f"model.{n}": tuple(tensor.shape) for n, tensor in fixed.items()}
    there = {own[name].data_ptr() for name in own if name in shapes}
    again = "it was saved by another version of LeRobot, or config.json was changed"
    for name, tensor in own.items():
        if name not in shapes and tensor.data_ptr() not in there:  # tied weights are stored once
            raise ConfigError(f"{source}: the file has no weights {name}: {again}")
        if name in shapes and shapes[name] != tuple(tensor.shape):
            found = f"{list(shapes[name])}, config.json wants {list(tensor.shape)}"
            raise ConfigError(f"{source}: the weights {name} have the shape {found}: {again}")


# -- types with one call for a chunk -----------------------------------------------------------------------------------


class LeRobotWhole(WholeModel):
    """A LeRobot policy of one of the types in `WHOLE`."""

    def __init__(self, spec: PolicyCheckpoint, device: DeviceOptions) -> None:
        super().__init__(spec)
        self.loaded = LoadedPolicy(spec, device)
        self.provider, self.half = device.provider, is_half(self.loaded.policy)
        self.batched = not spec.seeded

    def prepare(self, observation: Observation) -> Prepared:
        return self.loaded.prepare(observation)

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        with torch.inference_mode():
            given = None if noise is None else torch.from_numpy(noise).to(self.loaded.device)
            return to_host(self._called(rows, given))

    def finish(self, rows: Sequence[Observation], x: Floats) -> Floats:
        return self.loaded.finish(rows, torch.from_numpy(x))

    def _called(self, rows: Sequence[Observation], noise: Any) -> Any:
        """Actions [n, chunk, dim]. The method is looked up at each call: a bound method kept here would be a reference
        cycle, and an unloaded policy would stay in memory."""
        kind, predict = self.spec.model_type, self.loaded.policy.predict_action_chunk
        if not self.batched:
            return self._by_row(self._vqbet if kind == "vqbet" else predict, rows)
        batch = self.loaded.on_device(stacked_batch([row.ready.batch for row in rows]))
        return self._diffusion(batch, rows, noise) if kind == "diffusion" else predict(batch)

    def _diffusion(self, batch: Batch, rows: Sequence[Observation], noise: Any) -> Any:
        condition = diffusion_condition(self.loaded, batch)
        # A scheduler that adds noise at every step draws it from a generator for each row: no row depends on others.
        drawn = [torch.Generator(device=condition.device).manual_seed(row.seed % (1 << 63)) for row in rows]
        x = self.loaded.policy.diffusion.conditional_sample(
            len(rows), global_cond=condition, generator=drawn, noise=noise
        )
        return diffusion_actions(self.loaded, x)

    def _vqbet(self, batch: Batch) -> Any:
        stack_images(self.loaded, batch)
        return self.loaded.policy.vqbet(batch, rollout=True)[:, : self.loaded.config.action_chunk_size]

    def _by_row(self, call: Callable[[Batch], Any], rows: Sequence[Observation]) -> Any:
        """One call for each row: the policy draws from torch's global generator, which is seeded for each row."""
        if len(rows) > 1:
            self.notes["fanout"] = "sequential"
        answers = []
        with torch.random.fork_rng():
            for row in rows:
                torch.manual_seed(row.seed % (1 << 63))
                answers.append(call(self.loaded.on_device(row.ready.batch)))
        return torch.cat(answers)


def stack_images(loaded: LoadedPolicy, batch: Batch) -> None:
    """Add the stack of all cameras, which some of LeRobot's models read."""
    if names := loaded.config.image_features:
        batch["observation.images"] = torch.stack([batch[name] for name in names], dim=-4)


def diffusion_condition(loaded: LoadedPolicy, batch: Batch) -> Any:
    """What a diffusion model denoises by: its encoded observations."""
    stack_images(loaded, batch)
    return loaded.policy.diffusion._prepare_global_conditioning(batch)


def diffusion_actions(loaded: LoadedPolicy, x: Any) -> Any:
    """The actions to execute, out of the denoised ones, which begin at the oldest observation."""
    first = loaded.config.n_obs_steps - 1
    return x[:, first : first + loaded.config.n_action_steps]
