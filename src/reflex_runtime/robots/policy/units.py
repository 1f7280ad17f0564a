"""Between the robot's units and the model's: normalisation, and transforms of states and actions.

A state goes through the policy's state transforms and is then normalised. Actions are denormalised and then go through
its action transforms. All of it is element by element, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """normalised = (value − offset) / scale + origin, element by element; float32 [dim], scale > 0.

    Every affine normalisation is one. Around a mean: mean, std and 0. A range mapped to [-1, 1]: its low end, half of
    its width and -1. (With its middle as the offset, float32 would round a narrow range far from 0 away.)
    """

    offset: Floats
    scale: Floats
    origin: float = 0.0

    @classmethod
    def of_range(cls, low: NDArray[np.float64], high: NDArray[np.float64], epsilon: float = 0.0) -> Norm:
        """Maps [low, high + epsilon] to [-1, 1]."""
        return cls(frozen(low), frozen((high - low + epsilon) / 2.0), -1.0)

    def normalise(self, value: Floats) -> Floats:
        """Into the model's units; the last axis is dim."""
        normalised = (value - self.offset) / self.scale
        if self.origin:
            normalised += np.float32(self.origin)
        return normalised.astype(np.float32, copy=False)

    def denormalise(self, value: Floats) -> Floats:
        """Into the robot's units; the last axis is dim."""
        if self.origin:
            value = value - np.float32(self.origin)
        return (value * self.scale + self.offset).astype(np.float32, copy=False)

    @property
    def middle(self) -> Floats:
        """The value that is 0 in the model's units: float32 [dim]."""
        return self.denormalise(np.zeros_like(self.offset))


class Transform(Protocol):
    """A change of states or of actions: float32 [..., dim]. state: for actions, broadcasts to [..., state_dim]."""

    def __call__(self, values: Floats, state: Floats | None) -> Floats: ...


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """value · scale + offset; float32 [dim]. Flips, inversions and changes of range."""

    scale: Floats
    offset: Floats

    def __call__(self, values: Floats, state: Floats | None) -> Floats:
        return values * self.scale + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class AddState:
    """Turns changes into targets: adds the state where the mask is not 0. mask: float32 [≤ dim]."""

    mask: Floats

    def __call__(self, values: Floats, state: Floats | None) -> Floats:
        assert state is not None
        dims = len(self.mask)
        added = values.copy()
        added[..., :dims] += np.where(self.mask != 0.0, state[..., :dims], np.float32(0.0))
        return added


@dataclass(frozen=True, slots=True)
class Binarised:
    """Some places become one of two values: `above` where the value exceeds the threshold, else `below`."""

    dims: tuple[int, ...]
    threshold: float
    below: float
    above: float

    def __call__(self, values: Floats, state: Floats | None) -> Floats:
        chosen = values.copy()
        for dim in self.dims:
            high = values[..., dim] > np.float32(self.threshold)
            chosen[..., dim] = np.where(high, np.float32(self.above), np.float32(self.below))
            # Values that are not finite are kept, for the action guard to find.
            chosen[..., dim] = np.where(np.isfinite(values[..., dim]), chosen[..., dim], values[..., dim])
        return chosen


@dataclass(frozen=True, slots=True)
class AlohaGripper:
    """The opening of an ALOHA gripper, [0, 1] along its slide, as the angle in [0, 1] that pi0 was trained on.

    The geometry is that of the robot: the slide runs from 18.44 to 58 mm, a horn of 22 mm moves an arm of 36 mm, and
    the model's range of angles is 0.5476 to 1.6296 rad.
    """

    dims: tuple[int, ...]

    def __call__(self, values: Floats, state: Floats | None) -> Floats:
        turned = values.copy()
        places = list(self.dims)
        slide = values[..., places].astype(np.float64) * (0.058 - 0.01844) + 0.01844
        sine = (0.022**2 + slide**2 - 0.036**2) / (2 * 0.022 * slide)
        turned[..., places] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - 0.5476) / (1.6296 - 0.5476)
        return turned


def transformed(values: Floats, by: Sequence[Transform], state: Floats | None = None) -> Floats:
    """The values after all transforms, in their order."""
    for transform in by:
        values = transform(values, state)
    return values.astype(np.float32, copy=False)


def shift_of(norm: Norm | None, transforms: Sequence[Transform], moved: Floats, dim: int) -> Floats | None:
    """The change of actions in the model's units, float32 [dim], that keeps the robot's targets when the added state
    changes by `moved`, in the robot's units; 0 where a transform scales by 0. None if no state is added."""
    slope = np.ones(dim, np.float32) if norm is None else norm.scale
    shift = np.zeros(dim, np.float32)
    adds = False
    for transform in transforms:
        if isinstance(transform, Scaled):
            slope = slope * transform.scale
        elif isinstance(transform, AddState):
            adds, dims = True, len(transform.mask)
            part = np.where(transform.mask != 0.0, moved[:dims], np.float32(0.0))
            shift[:dims] -= np.divide(part, slope[:dims], out=np.zeros_like(part), where=slope[:dims] != 0.0)
    return shift if adds else None


def frozen(values: object) -> Floats:
    """A read-only float32 array."""
    array = np.array(values, np.float32)
    array.setflags(write=False)
    return array
