"""Policies in plain Python whose actions say what reached the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots import DeviceOptions, Observation, PolicySource, PolicySpec, StagedModel, WholeModel

Look = Any  # of an observation to the numbers of its chunk


@dataclass(frozen=True)
class _Seen:
    values: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Whole(WholeModel):
    """Every row of the chunk is what `look` makes of the observation."""

    def __init__(self, spec: PolicySpec, look: Look) -> None:
        super().__init__(spec)
        self._look = look

    def chunk(self, rows: Sequence[Observation], noise: Any) -> NDArray[np.float32]:
        made = [np.broadcast_to(np.float32(self._look(row)), (self.spec.chunk_size, self.spec.x_dim)) for row in rows]
        return np.stack(made).astype(np.float32)


class Staged(StagedModel):
    """The same in steps of equal size: x moves from noise to what `look` makes of the observation."""

    def __init__(self, spec: PolicySpec, look: Look) -> None:
        super().__init__(spec)
        self._look = look
        self.prefixes = 0
        self.widths: set[int] = set()

    def prefix(self, rows: Sequence[Observation]) -> Sequence[_Seen]:
        self.prefixes += len(rows)
        shape = (self.spec.chunk_size, self.spec.x_dim)
        return [_Seen(np.broadcast_to(np.float32(self._look(row)), shape).astype(np.float32)) for row in rows]

    def pack(self, prefixes: Sequence[Any], rows: Sequence[Observation]) -> Any:
        return np.stack([prefix.values for prefix in prefixes])

    def step(self, packed: Any, x: NDArray[np.float32], k: NDArray[np.int64], n: int) -> NDArray[np.float32]:
        self.widths.add(x.shape[-1])
        moved: NDArray[np.float32] = x + (packed - x) / (n - k[:, None, None]).astype(np.float32)
        return moved


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plain(PolicySource):
    """look: what the model makes of an observation."""

    look: Look = field(default=lambda row: 0.0)

    def open(self, device: DeviceOptions) -> Whole | Staged:
        return Staged(self, self.look) if self.staged else Whole(self, self.look)


def plain(look: Look, **changes: Any) -> Plain:
    """A policy with one camera `front` of 4 × 6, two numbers of state and two of action."""
    fields: dict[str, Any] = {
        "source": "plain",
        "model_id": "plain",
        "model_type": "plain",
        "staged": False,
        "state_dim": 2,
        "action_dim": 2,
        "x_dim": 2,
        "chunk_size": 3,
        "num_denoising_steps": 4,
        "images": {"front": (4, 6)},
        "takes_state": True,
        "takes_text": False,
        "takes_noise": False,
        "model_hash": "0" * 16,
        "config_hash": "0" * 16,
    }
    return Plain(look=look, **(fields | changes))
