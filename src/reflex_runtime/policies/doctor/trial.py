"""A policy run by hand, without a scheduler: alone, together, or joining one another at step boundaries.

For looking at what batching does to the answers; made-up observations, no episode, so nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Done
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.policies.policy.base import Policy
from reflex_runtime.policies.policy.observation import ActionChunk
from reflex_runtime.policies.policy.spec import PolicySpec
from reflex_runtime.processors.by_hand import run_through


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


def run_together(policy: Policy, requests: Sequence[Request], starts: Sequence[int] = ()) -> list[ActionChunk]:
    """Their answers, from batches of all that are under way; the first error of any of them is raised.

    starts: the round in which each enters, as in `run_through`.
    """
    tickets = [Ticket(request, i, 0.0) for i, request in enumerate(requests)]
    run_through(policy, tickets, policy.stages, starts, group=policy.slot, shape=policy.shape)
    return [ticket.outcome.value for ticket in tickets if isinstance(ticket.outcome, Done)]
