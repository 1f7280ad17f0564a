"""A policy whose action is its observation: state, brightness of the picture, length of the instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots import DeviceOptions, Observation, PolicySpec, WholeModel
from reflex_runtime.robots.policy.spec import Embodiment, WireMap

MOTORS = ("shoulder", "elbow", "wrist")
CHUNK = 3
SPEC = PolicySpec(
    model_id="echo",
    model_type="act",
    staged=False,
    chunk_size=CHUNK,
    action_dim=len(MOTORS) + 2,
    images={"front": (6, 8)},
    takes_state=True,
    state_dim=len(MOTORS),
    takes_text=True,
    takes_noise=False,
    embodiment=Embodiment(state_names=MOTORS),  # for robots of LeRobot, after a restart
    wires={"vla-eval": WireMap(execute=1)},
)


class Echo(WholeModel):
    """Slow enough that callers share batches."""

    def chunk(self, rows: Sequence[Observation], noise: Any) -> NDArray[np.float32]:
        work = np.ones((700, 700), np.float32)
        work @= work
        said = [[*row.row("state"), row.images["front"].mean(), len(row.instruction)] for row in rows]
        return np.repeat(np.float32(said)[:, None], CHUNK, axis=1)


class Swapped(Echo):
    """Rows of a batch get each other's answers: what the checks are for."""

    def chunk(self, rows: Sequence[Observation], noise: Any) -> NDArray[np.float32]:
        return np.roll(super().chunk(rows, noise), 1, axis=0)


class Late(Echo):
    """Every batch gets the answers of the one before, as far as they go."""

    before: NDArray[np.float32] | None = None

    def chunk(self, rows: Sequence[Observation], noise: Any) -> NDArray[np.float32]:
        answer = super().chunk(rows, noise)
        before, self.before = self.before, answer.copy()
        if before is not None:
            answer[: len(before)] = before[: len(answer)]
        return answer


def make(device: DeviceOptions) -> Echo:
    return Echo(SPEC)


def swapped(device: DeviceOptions) -> Echo:
    return Swapped(SPEC)


def late(device: DeviceOptions) -> Echo:
    return Late(SPEC)
