"""A policy run by hand, without a scheduler: alone, together, or joining one another at step boundaries.

For looking at what batching does to the answers; made-up observations, no episode, so nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch, Cause, More
from reflex_runtime.core.errors import ProcessorError, ReflexError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.policy.base import Policy
from reflex_runtime.policies.policy.observation import ActionChunk


def sample(policy: Policy, number: int, instruction: str | None) -> Request:
    """A made-up request, the same for the same number in every process: noise as pictures, a state near its mean."""
    export, rng = policy.export, np.random.Generator(np.random.PCG64(number))
    observation = policy.prepare(
        images={name: rng.integers(0, 256, (*size, 3), np.uint8) for name, size in export.images.items()},
        instruction=instruction,
        state=sample_state(export, rng),
        request_id=f"sample-{number}",
    )
    return policy.request(observation, client=number)


def sample_state(export: Export, rng: np.random.Generator) -> NDArray[np.float32] | None:
    """A state within one standard deviation of its mean, in the robot's units; None where the policy takes none."""
    if not export.takes_state:
        return None
    drawn = rng.uniform(-1.0, 1.0, export.state_dim).astype(np.float32)
    return drawn if export.state_norm is None else export.state_norm.denormalise(drawn)


def run_together(policy: Policy, requests: Sequence[Request], starts: Sequence[int] = ()) -> list[ActionChunk]:
    """Their answers, from batches of all that are under way.

    starts: the round each enters at, default 0 for all; a round is one batch per stage, so a denoising request that
    enters at round k stands k steps behind those of round 0. The first error of any of them is raised.
    """
    tickets = [Ticket(request, i, 0.0) for i, request in enumerate(requests)]
    waiting = dict(zip(tickets, starts or [0] * len(tickets), strict=True))
    under_way: list[Ticket] = []
    answers: dict[Ticket, ActionChunk] = {}
    at = 0
    try:
        while len(answers) < len(tickets):
            under_way += [ticket for ticket, start in waiting.items() if start == at]
            for stage in policy.stages:
                members = [ticket for ticket in under_way if ticket.stage == stage]
                if members:
                    answers |= _run_batch(policy, stage, members)
            under_way = [ticket for ticket in under_way if ticket not in answers]
            at += 1
    finally:
        policy.drop(tickets)
    return [answers[ticket] for ticket in tickets]


def _run_batch(policy: Policy, stage: str, tickets: Sequence[Ticket]) -> dict[Ticket, ActionChunk]:
    """One batch; tickets that are not done move to what they do next. Returns the answers of those that are.

    Without `run_batch` around it: bisecting would hide a graph that works for one row only.
    """
    batch = Batch(0, policy.slot, policy.shape, stage, Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0))
    try:
        outcomes = policy.run(batch)
    except ReflexError:
        raise
    except Exception as error:
        raise ProcessorError(f"{type(error).__name__}: {error}") from error
    answers: dict[Ticket, ActionChunk] = {}
    for ticket, outcome in zip(tickets, outcomes, strict=True):
        if isinstance(outcome, ReflexError):
            raise outcome
        if isinstance(outcome, More):
            ticket.wants = outcome.wants
            ticket.stage = ticket.stage if outcome.stage is None else outcome.stage
        else:
            answers[ticket] = outcome.value
    return answers
