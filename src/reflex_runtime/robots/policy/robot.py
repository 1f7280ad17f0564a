"""The robot a policy was made for, how its pictures are fitted, and what the observations of its wires mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Resize = Literal["stretch", "pad", "pad-lerobot", "pad-smolvla"]
Size = tuple[int, int]  # height, width in pixels


@dataclass(frozen=True, slots=True, eq=False)
class Embodiment:
    """The robot a policy was made for.

    action_space: "absolute" (targets), "relative" (changes), or None when the file does not say.
    action_ranges: float32 [action_dim, 2], lowest and highest value the robot takes, or None.
    cameras: (height, width) by name. control_rate_hz: actions executed per second.
    """

    name: str = "unknown"
    action_space: Literal["absolute", "relative"] | None = None
    action_ranges: NDArray[np.float32] | None = None
    action_names: tuple[str, ...] | None = None
    action_units: tuple[str, ...] | None = None
    state_names: tuple[str, ...] | None = None
    gripper_index: int | None = None
    cameras: Mapping[str, Size] | None = None
    control_rate_hz: float | None = None


@dataclass(frozen=True, slots=True)
class WireMap:
    """What the observations of one wire mean.

    images: the observation's name of each camera of the policy. state: the names whose values make the state, in this
    order. prompt: the name of the instruction. What is not named is found by its own name. metadata: what the wire
    announces beside what it knows by itself. dialect: of openpi. execute: of vla-eval, how many actions of a chunk are
    handed out before the policy is asked again; 0 is all of them. Of wires with groups: how many
    numbers each of `state` has, and the groups of an action, in this order.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dialect: Literal["openpi", "roboarena"] = "openpi"
    execute: int = 0
    state_sizes: tuple[int, ...] = ()
    actions: tuple[tuple[str, int], ...] = ()
