"""SmolVLA, π0 and π0.5 of LeRobot in two stages, on LeRobot's own functions; and openpi's, on LeRobot's port.

The prefix is one forward pass over pictures and text; its keys and values stay on the device. A step is one Euler step
of rows at different flow times, which run from 1 (noise) to 0 (actions).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reflex_runtime.robots.policy.episodes import PrefixTensors
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.robots.sources.export_files import WEIGHTS, PolicyCheckpoint
from reflex_runtime.robots.sources.lerobot_policy import LoadedPolicy, check_loaded, loading, padded
from reflex_runtime.robots.sources.torch_models import GraphedStaged, Tensors, is_half, to_host, torch_device


class ReadyVla(NamedTuple):
    """A request as the model reads it, tensors [1, …]: after the part of `predict_action_chunk` before the model.

    anchor: see `Prepared`.
    """

    images: Sequence[Any]
    masks: Sequence[Any]
    tokens: Any
    token_mask: Any
    state: Any
    anchor: Any


class StagedVla(GraphedStaged):
    """LeRobot's model of a VLA, called for rows whose `ready` is a `ReadyVla`.

    A prefix has "pad", bool [1, P], False for padding, and "keys i" and "values i" [1, heads, P, size] of layer i.
    """

    def __init__(self, spec: PolicySpec, policy: Any, name: str, device: DeviceOptions) -> None:
        """name: the device of the policy."""
        super().__init__(spec)
        self._device, self._policy, self._model = name, policy, policy.model
        self.provider, self.half = device.provider, is_half(policy)
        self._masks = sys.modules[type(self._model).__module__].make_att_2d_masks
        self._smolvla = spec.model_type == "smolvla"
        if device.captured_sizes:
            self.capture(device.captured_sizes)

    def prefix(self, rows: Sequence[Observation]) -> Sequence[PrefixTensors]:
        kinds: dict[Any, list[int]] = {}  # requests with as many pictures of the same sizes can share a call
        for i, row in enumerate(rows):
            kinds.setdefault(tuple(image.shape for image in row.ready.images), []).append(i)
        made: dict[int, PrefixTensors] = {}
        with torch.inference_mode():
            for members in kinds.values():
                made |= dict(zip(members, self._prefixes([rows[i].ready for i in members]), strict=True))
        return [made[i] for i in range(len(rows))]

    def _prefixes(self, rows: Sequence[ReadyVla]) -> list[PrefixTensors]:
        """The prefixes of rows of one kind, in one forward pass."""
        put = self._put
        images = [put(torch.cat(same)) for same in zip(*(row.images for row in rows), strict=True)]
        masks = [put(torch.cat(same)) for same in zip(*(row.masks for row in rows), strict=True)]
        tokens = put(torch.cat(padded([row.tokens for row in rows], 1)))
        token_mask = put(torch.cat(padded([row.token_mask for row in rows], 1)))
        state = None if rows[0].state is None else put(torch.cat([row.state for row in rows]))
        pad, layers = self.scene(images, masks, tokens, token_mask, state)
        made = {"pad": pad}
        for i, (keys, values) in enumerate(layers):
            made |= {f"keys {i}": keys, f"values {i}": values}
        if self._captured is not None:  # graphs have the length of the longest text
            longest = pad.shape[1] + max(0, self._policy.config.tokenizer_max_length - tokens.shape[1])
            made = {name: padded([tensor], _axis(name), longest)[0] for name, tensor in made.items()}
        # Copied out of the batch: a view would keep the keys and values of all its rows in memory.
        return [PrefixTensors({name: t[i : i + 1].clone() for name, t in made.items()}) for i in range(len(rows))]

    def scene(self, images: Any, masks: Any, tokens: Any, token_mask: Any, state: Any) -> tuple[Any, Sequence[Any]]:
        """(which tokens are no padding [n, P], keys and values of each layer) of a batch of prefixes."""
        model = self._model
        if self._smolvla:
            embedded, pad, attention = model.embed_prefix(images, masks, tokens, token_mask, state=state)
            both, mask = model.vlm_with_expert, self._masks(pad, attention)
        else:
            embedded, pad, attention = model.embed_prefix(images, masks, tokens, token_mask)
            both, mask = model.paligemma_with_expert, _four_dimensional(self._masks(pad, attention))
            both.paligemma.model.language_model.config._attn_implementation = "eager"
        _, cache = both.forward(
            attention_mask=mask,
            position_ids=torch.cumsum(pad, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return pad, [(layer.keys, layer.values) for layer in cache.layers]

    def pack(self, prefixes: Sequence[PrefixTensors], rows: Sequence[Observation]) -> SimpleNamespace:
        """Padded on the right to the longest: masked tokens add nothing, and positions do not count them."""
        room = self.spec.chunk_size + (self.spec.model_type == "pi0")
        with torch.inference_mode():
            tensors = {}
            for name in prefixes[0].tensors:
                tensor = torch.cat(padded([prefix.tensors[name] for prefix in prefixes], _axis(name)))
                tensors[name] = tensor if name == "pad" else with_room(tensor, room)
            # π0 reads the state in its step: that of the request itself, as its prefix may be an earlier request's.
            if self.spec.model_type == "pi0":
                tensors["state"] = self._put(torch.cat([row.ready.state for row in rows]))
        return self._packed(tensors)

    def _packed(self, tensors: dict[str, Any]) -> SimpleNamespace:
        """A batch in the form that LeRobot's functions take, of views of these tensors."""
        pad, count = tensors["pad"], sum(name.startswith("keys ") for name in tensors)
        pairs = [(tensors[f"keys {i}"], tensors[f"values {i}"]) for i in range(count)]
        cache = PackedCache(pairs, pad.shape[1])
        return SimpleNamespace(pad=pad, cache=cache, state=tensors.get("state"), masks=None, tensors=tensors)

    def step(self, packed: SimpleNamespace, x: Floats, k: NDArray[np.int64], n: int) -> Floats:
        with torch.inference_mode():
            time = torch.tensor([self._time(i, n) for i in k.tolist()], dtype=torch.float32)
            moving = {"x": self._put(torch.from_numpy(x)), "time": self._put(time)}
            if self._captured is None:  # with the views of `pack`, whose masks are made once
                return to_host(self._moved(packed, moving, n))
            return self.run_step(packed.tensors, moving, n)

    def compute_step(self, packed: Tensors, moving: Tensors, n: int) -> Any:
        return self._moved(self._packed(dict(packed)), moving, n)

    def _moved(self, packed: SimpleNamespace, moving: Tensors, n: int) -> Any:
        x = moving["x"]
        return x + (-1.0 / n) * self._velocity(packed, x, moving["time"])

    def _time(self, k: int, n: int) -> float:
        """The flow time after k of n steps, as LeRobot computes it."""
        return 1.0 + k * (-1.0 / n)

    def _velocity(self, packed: SimpleNamespace, x: Any, time: Any) -> Any:
        model = self._model
        if self._smolvla:
            return model.denoise_step(prefix_pad_masks=packed.pad, past_key_values=packed.cache, x_t=x, timestep=time)
        # LeRobot's `denoise_step` without its copy of the whole cache.
        state = () if packed.state is None else (packed.state,)
        suffix, pad, attention, condition = model.embed_suffix(*state, x, time)
        if packed.masks is None:  # they depend on the requests, not on x and time
            to_prefix = packed.pad[:, None, :].expand(-1, pad.shape[1], -1)
            mask = _four_dimensional(torch.cat([to_prefix, self._masks(pad, attention)], dim=2))
            packed.masks = mask, packed.pad.sum(dim=-1)[:, None] + torch.cumsum(pad, dim=1) - 1
        mask, positions = packed.masks
        model.paligemma_with_expert.gemma_expert.model.config._attn_implementation = "eager"
        (_, out), _ = model.paligemma_with_expert.forward(
            attention_mask=mask,
            position_ids=positions,
            past_key_values=packed.cache,
            inputs_embeds=[None, suffix],
            use_cache=False,
            adarms_cond=[None, condition],
        )
        return model.action_out_proj(out[:, -self.spec.chunk_size :].to(torch.float32))

    def _put(self, tensor: Any) -> Any:
        return tensor.to(self._device)


class LeRobotStaged(StagedVla):
    """A VLA of LeRobot. Its answers differ from those of `predict_action_chunk` only by the order of sums."""

    def __init__(self, spec: PolicyCheckpoint, device: DeviceOptions) -> None:
        self.loaded = LoadedPolicy(spec, device)
        super().__init__(spec, self.loaded.policy, self.loaded.device, device)

    def prepare(self, observation: Observation) -> ReadyVla:
        batch, anchor = self.loaded.prepare(observation)
        with torch.inference_mode():
            if self._smolvla:
                state = batch["observation.state"].clone()  # LeRobot flips joints in place
                batch = self._policy._prepare_batch({**batch, "observation.state": state})
                images, masks = self._policy.prepare_images(batch)
            else:
                images, masks = self._policy._preprocess_images(batch)
            state = None if self.spec.model_type == "pi05" else self._policy.prepare_state(batch)
        tokens, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
        return ReadyVla(images, masks, tokens, mask.bool(), state, anchor)

    def finish(self, rows: Sequence[Observation], x: Floats) -> Floats:
        actions = torch.from_numpy(np.ascontiguousarray(x[:, :, : self.spec.action_dim]))
        if self._smolvla and self.loaded.config.adapt_to_pi_aloha:
            actions = self._policy._pi_aloha_encode_actions(actions)
        return self.loaded.finish(rows, actions)

    def shift(self, moved: Floats) -> Floats | None:
        return self.loaded.shift(moved)


class PackedCache:
    """The prefixes of a batch in place of LeRobot's `DynamicCache`: a step writes its own keys and values into the room
    after them, so that nothing is copied while the requests stay the same.

    buffers: (keys, values) of each layer [n, heads, P + room, size]. length: P.
    """

    def __init__(self, buffers: Sequence[tuple[Any, Any]], length: int) -> None:
        self._length, self._buffers = length, buffers
        self.layers = [SimpleNamespace(keys=k[:, :, :length], values=v[:, :, :length]) for k, v in buffers]

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the prefixes."""
        return int(self._length)

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Keys and values of the prefixes, then of the step."""
        own_keys, own_values = self._buffers[layer_idx]
        end = self._length + keys.shape[2]
        own_keys[:, :, self._length : end] = keys
        own_values[:, :, self._length : end] = values
        return own_keys[:, :, :end], own_values[:, :, :end]

    def crop(self, length: int) -> None:
        """Does nothing: LeRobot would cut the step's tokens off, here the next step overwrites them."""


def _axis(name: str) -> int:
    """The axis of a prefix's tensor that counts tokens."""
    return 1 if name == "pad" else 2


def with_room(tensor: Any, room: int) -> Any:
    """Keys or values [n, heads, P, size] as [n, heads, P + room, size]."""
    return torch.cat([tensor, tensor.new_empty((*tensor.shape[:2], room, tensor.shape[3]))], dim=2)


def _four_dimensional(masks: Any) -> Any:
    from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

    return prepare_attention_masks_4d(masks)


# -- openpi ------------------------------------------------------------------------------------------------------------


class OpenpiStaged(StagedVla):
    """π0 and π0.5 of openpi: LeRobot's port of the model with openpi's weights and observations.

    Norms, tokens, padding and transforms are those of the spec.
    """

    def __init__(self, spec: PolicyCheckpoint, device: DeviceOptions) -> None:
        name = torch_device(device)
        torch.set_num_threads(device.threads)
        with loading(spec):
            policy = _opened(spec, name, "float32" if device.dtype == "float32" else "bfloat16")
        check_loaded(spec.source, spec.path / WEIGHTS, policy)
        super().__init__(spec, policy, name, device)

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
    """The flow times of n steps, summed in float32 as in openpi. Their last bit matters: they are multiplied by
    2π/0.004 for a sine."""
    times = [np.float32(1.0)]
    for _ in range(n - 1):
        times.append(times[-1] + np.float32(-1.0 / n))
    return tuple(map(float, times))


def _opened(spec: PolicyCheckpoint, name: str, dtype: str) -> Any:
    """LeRobot's policy of the same family with the weights. name: of the device."""
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
        paligemma_variant=spec.variants[0],
        action_expert_variant=spec.variants[1],
        image_resolution=size,
        num_inference_steps=spec.num_denoising_steps,
        dtype=dtype,
        device=name,
        push_to_hub=False,
    )
    policy = get_policy_class(spec.model_type).from_pretrained(str(spec.path), config=config)
    return policy.to(name).eval().requires_grad_(False)
