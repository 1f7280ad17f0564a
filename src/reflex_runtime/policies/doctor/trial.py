"""Made-up observations, for looking at what batching does to the answers. They have no episode: nothing is cached."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.request import Request
from reflex_runtime.policies.policy.base import Policy
from reflex_runtime.policies.policy.spec import PolicySpec


def sample(policy: Policy, number: int, instruction: str | None) -> Request:
    """A made-up request, the same for the same number in every process: noise as pictures, a state near its mean."""
    spec, rng = policy.spec, np.random.Generator(np.random.PCG64(number))
    observation = policy.prepare(
        images={name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in spec.images.items()},
        instruction=instruction,
        state=sample_state(spec, rng),
        request_id=f"sample-{number}",
    )
    return policy.request(observation, client=number)


def sample_state(spec: PolicySpec, rng: np.random.Generator) -> NDArray[np.float32] | None:
    """A state within one standard deviation of its mean, in the robot's units; None where the policy takes none."""
    if not spec.takes_state:
        return None
    drawn = rng.uniform(-1.0, 1.0, spec.state_dim).astype(np.float32)
    return drawn if spec.state_norm is None else spec.state_norm.denormalise(drawn)
