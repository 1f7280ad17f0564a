"""Made-up episodes, to compare an export with what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.policy.robot import Size
from reflex_runtime.robots.policy.units import Floats

EPISODES: Final = 6
_INSTRUCTIONS: Final = ("pick up the cube", "wipe", "open the drawer\n", "put the red block into the bowl")


@dataclass(frozen=True, slots=True)
class MadeUpMoment:
    """What a robot sees at one time: uint8 [height, width, 3] by camera, and its state or None."""

    images: Mapping[str, NDArray[np.uint8]]
    state: Floats | None


@dataclass(frozen=True, slots=True)
class MadeUpEpisode:
    """As many moments as the policy looks at, oldest first, the instruction, and the seed of the last one's noise."""

    moments: Sequence[MadeUpMoment]
    seed: int
    instruction: str


def made_up(images: Mapping[str, Size], states: Floats | None, steps: int) -> list[MadeUpEpisode]:
    """Episodes with pictures of several kinds, and states within the range. The same ones every time."""
    episodes = []
    for number in range(EPISODES):
        rng = np.random.Generator(np.random.PCG64(number))
        moments = [
            MadeUpMoment(
                {name: _picture(rng, size, number + i) for i, (name, size) in enumerate(images.items())},
                _state(rng, states),
            )
            for _ in range(steps)
        ]
        episodes.append(MadeUpEpisode(moments, number, _INSTRUCTIONS[number % len(_INSTRUCTIONS)]))
    return episodes


def _picture(rng: np.random.Generator, size: Size, kind: int) -> NDArray[np.uint8]:
    height, width = size
    if kind % 4 == 0:
        return rng.integers(0, 256, (height, width, 3), np.uint8)
    if kind % 4 == 1:  # blocks of colour
        coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
        return coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    if kind % 4 == 2:  # from dark to light
        ramp = np.linspace(0, 255, height)[:, None, None] * np.linspace(0.2, 1.0, width)[None, :, None]
        return (ramp * rng.uniform(0.3, 1.0, 3)).astype(np.uint8)
    return np.full((height, width, 3), rng.choice((0, 255)), np.uint8)


def _state(rng: np.random.Generator, states: Floats | None) -> Floats | None:
    if states is None:
        return None
    drawn: Floats = rng.uniform(states[0], states[1]).astype(np.float32)
    return drawn
