"""Made-up observations, for looking at what batching does to the answers. They have no episode: nothing is cached."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.request import Request
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.policy.units import transformed


def sample(
    policy: Policy, number: int, instruction: str | None, without: AbstractSet[str] = frozenset()
) -> Request:
    """A made-up request, the same for the same number in every process: noise as pictures, a state near its mean.

    without: cameras that are left out.
    """
    spec, rng = policy.spec, np.random.Generator(np.random.PCG64(number))
    images = {name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in spec.images.items()}
    observation = policy.prepare(
        images={name: image for name, image in images.items() if name not in without},
        instruction=instruction,
        state=sample_state(spec, rng),
        request_id=f"sample-{number}",
    )
    return policy.request(observation, client=number)


def typical_action(spec: PolicySpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(the middle of the training's actions, how far from it they usually are), each [action_dim], in robot's units.

    The middle is at the middle of its states, where actions are added to the state.
    """
    norm, dim = spec.action_norm, spec.action_dim
    offset = np.zeros(dim, np.float32) if norm is None else norm.middle
    scale = np.ones(dim, np.float32) if norm is None else norm.scale
    state = np.zeros(spec.state_dim, np.float32) if spec.state_norm is None else spec.state_norm.middle
    middle = transformed(offset, spec.action_transforms, state)
    return middle, np.abs(transformed(offset + scale, spec.action_transforms, state) - middle)


def sample_state(spec: PolicySpec, rng: np.random.Generator) -> NDArray[np.float32] | None:
    """A state within one standard deviation of its mean, in the robot's units; None where the policy takes none."""
    if not spec.takes_state:
        return None
    drawn = rng.uniform(-1.0, 1.0, spec.state_dim).astype(np.float32)
    return drawn if spec.state_norm is None else spec.state_norm.denormalise(drawn)
