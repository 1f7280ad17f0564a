"""A policy whose model answers something else than it declares: no robot gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots import MonolithicPolicy, Observation, Policy, PolicySpec, StagedModel, WholeModel
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.episodes import PrefixTensors

SPEC = PolicySpec(
    model_id="m", source="m.py", staged=False, num_denoising_steps=1, chunk_size=4, action_dim=3, x_dim=8, images={},
    takes_state=True, state_dim=3,
)  # fmt: skip


class Answers(WholeModel):
    def __init__(self, change: Callable[[NDArray[np.float32]], Any]) -> None:
        super().__init__(SPEC)
        self._change = change

    def chunk(self, rows: Sequence[Observation], noise: Any) -> Any:
        return self._change(np.zeros((len(rows), 4, 8), np.float32))


def policy(change: Callable[[NDArray[np.float32]], Any]) -> MonolithicPolicy:
    return MonolithicPolicy(Answers(change))


class Steps(StagedModel):
    def __init__(self, change: Callable[[NDArray[np.float32]], Any]) -> None:
        super().__init__(replace(SPEC, staged=True, num_denoising_steps=2))
        self._change = change

    def prefix(self, rows: Sequence[Observation]) -> Sequence[PrefixTensors]:
        return [PrefixTensors({})] * len(rows)

    def pack(self, prefixes: Sequence[Any], rows: Sequence[Observation]) -> Any:
        return None

    def step(self, packed: Any, x: NDArray[np.float32], k: Any, n: int) -> Any:
        return self._change(x)


def answers(policy: Policy) -> Any:
    tickets = [Ticket(policy.request(policy.prepare(state=[0.0] * 3, request_id=str(i))), i, 0.0) for i in range(2)]
    return policy.answers([ticket.request for ticket in tickets])


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x[..., :3], lambda x: x[..., :3].astype(np.float16)])
def test_e1_actions_of_the_declared_shape_are_answered(change: Any) -> None:
    assert [chunk.actions.shape for chunk in answers(policy(change))] == [(4, 3)] * 2


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: x[:, :2], "float32[2, 2, 3], not [2, 4, 3] (rows, chunk_size, action_dim)"),
        (lambda x: x[..., :2], "float32[2, 4, 2], "),
        (lambda x: np.zeros((2, 4, 12), np.float32), "float32[2, 4, 12], "),
        (lambda x: x[:, :0], "float32[2, 0, 3], "),
        (lambda x: x[:1], "float32[1, 4, 3], "),
        (lambda x: np.concatenate([x, x]), "float32[4, 4, 3], "),
        (lambda x: x[0], "float32[4, 8], "),
        (lambda x: x.astype(np.complex64), "complex64[2, 4, 8], "),
        (lambda x: x.tolist(), "list, "),
        (lambda x: None, "NoneType, "),
        (lambda x: x.astype(bool), "bool[2, 4, 8], "),
    ],
)
def test_e1_actions_of_another_shape_or_kind_are_an_error_that_names_both(change: Any, found: str) -> None:
    with pytest.raises(ProcessorError) as caught:
        answers(policy(change))
    assert str(caught.value).startswith(f"m.py: the model answered {found}")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: np.concatenate([x, x]), "float32[4, 4, 8]"),
        (lambda x: x[:1], "float32[1, 4, 8]"),
        (lambda x: x[:, :1], "float32[2, 1, 8]"),
        (lambda x: x[..., :1], "float32[2, 4, 1]"),
        (lambda x: None, "NoneType"),
    ],
)
def test_e1_a_step_of_another_shape_is_an_error_that_names_both(change: Any, found: str) -> None:
    with pytest.raises(ProcessorError) as caught:
        answers(DecomposedPolicy(Steps(change)))
    assert str(caught.value) == f"m.py: a step of the model answered {found}, not the [2, 4, 8] of its x"
