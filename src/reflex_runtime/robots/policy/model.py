"""The two kinds of models that a policy runs. They compute; everything else exists once, in the policies.

A *whole* model makes a chunk of actions in one call. A *staged* model reads the scene once (`prefix`), then moves x
from noise to actions in small steps (`step`), so that requests may join and leave between the steps. Neither knows
requests, tickets, caches or episodes. A subclass may be ONNX graphs, PyTorch modules or anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.prefix_cache import Prefix
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import Floats, shift_of, transformed
from reflex_runtime.run.onnx_session import CPU


class PolicyModel:
    """What both kinds have in common. `prepare` runs on worker threads, everything else on the device thread.

    spec: what it expects and gives. provider: the device it runs on. batched: a call with n rows is one call, not n.
    captured_sizes: batch sizes it pads to (CUDA graphs). half: it computes in 16 bits.
    warming: the policy warms up; what is made once for a shape is made now, as nobody waits.
    any_thread: its calls may be made on any thread, one at a time.
    notes: of the batch that runs now, for the trace; the policy sets it before each call and a model may add to it. A
        model with captured sizes adds `captured`: whether the call ran at one.
    """

    provider: str = CPU
    batched: bool = True
    half: bool = False
    any_thread: bool = False
    warming: bool = False
    captured_sizes: Sequence[int] = ()

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.notes: dict[str, Any] = {}

    def prepare(self, observation: Observation) -> Any:
        """What the model wants to know of a request besides the observation, kept as `observation.ready`.

        Slow work of one request belongs here: it runs on worker threads, several at a time, beside the device.
        InvalidRequest names the field of a request that the model cannot read.
        """
        return None

    def finish(self, rows: Sequence[Observation], x: Floats) -> Floats:
        """Actions in the robot's units, [n, chunk_size, action_dim], of what the model computed, [n, chunk_size, any].

        By default x without the columns beyond action_dim, denormalised, then through the action transforms. Values may
        be infinite or NaN: the guard looks for them.
        """
        spec = self.spec
        actions = x[..., : spec.action_dim] if x.shape[-1] > spec.action_dim else x
        actions = actions.astype(np.float32, copy=False)
        with np.errstate(all="ignore"):
            if spec.action_norm is not None:
                actions = spec.action_norm.denormalise(actions)
            if not spec.action_transforms:
                return actions
            states = [row.robot_state for row in rows if row.robot_state is not None]
            return transformed(actions, spec.action_transforms, np.stack(states)[:, None] if states else None)

    def shift(self, moved: Floats) -> Floats | None:
        """What to add to actions in the model's units, so that they stay where they are although the state that they
        are changes of moved by `moved` (robot's units): float32 [action_dim]; None where they are no changes of it."""
        spec = self.spec
        return shift_of(spec.action_norm, spec.action_transforms, moved, spec.action_dim)

    def start(self) -> None:
        """Called on a new device thread before its first call."""

    def describe(self) -> dict[str, Any]:
        """What /config says of how it runs besides the attributes, JSON-safe."""
        return {}


class StagedModel(PolicyModel):
    """A prefix and denoise steps. A call that raises must have changed nothing: it may be repeated.

    pads_prefix: whether `prefix` pads to the captured sizes too; `step` does.
    """

    pads_prefix: bool = True

    def prefix(self, rows: Sequence[Observation]) -> Sequence[Prefix]:
        """The prefixes of n requests, each on its own: one must not keep the memory of its neighbours."""
        raise NotImplementedError

    def pack(self, prefixes: Sequence[Any], rows: Sequence[Observation]) -> Any:
        """What `step` needs of n requests together. Called only when other requests step than before."""
        raise NotImplementedError

    def step(self, packed: Any, x: Floats, k: NDArray[np.int64], n: int) -> Floats:
        """x after one more of n steps. Rows are at steps of their own: row i has made k[i] of them.

        x: [rows, chunk_size, x_dim], noise at k = 0, the actions (in the model's units) at k = n. Not written to.
        """
        raise NotImplementedError


class WholeModel(PolicyModel):
    """One call for a whole chunk."""

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        """[n, chunk_size, any] in the model's units. noise: [n, chunk_size, x_dim], None unless `spec.takes_noise`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicySource(PolicySpec):
    """What a policy says of itself before its model is loaded, and how to load it."""

    def check(self) -> None:
        """ConfigError for what can be found wrong with the files before the model is loaded."""

    def open(self, device: DeviceOptions) -> StagedModel | WholeModel:
        """Load the model onto the device; a StagedModel if `staged`. Slow. ConfigError if it cannot be loaded."""
        raise NotImplementedError

    def forget(self) -> None:
        """Free what was loaded to read it: this process will not open it."""


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of one shape as a batch; np.stack takes four times as long for small ones."""
    if not rows[0].ndim:
        return np.array(rows)
    return np.concatenate(rows).reshape(len(rows), *rows[0].shape)
