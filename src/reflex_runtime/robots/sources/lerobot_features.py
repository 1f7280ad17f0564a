"""Where a checkpoint lies, and how its features are called in requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WEIGHTS: Final = "model.safetensors"

SEEDED: Final = ("vqbet", "xvla", "vla_jepa", "eo1", "evo1", "fastwam", "molmoact2")
"""Types that draw from torch's own generator: served row by row, so that each row has its own seed."""

WHOLE: Final = ("act", "diffusion", "pi0_fast", *SEEDED)
"""Types with one call for a chunk that keep nothing of it in the policy object."""


@dataclass(frozen=True, slots=True)
class Features:
    """path: the checkpoint's directory. cameras: LeRobot's feature name of each image. states: the features that make
    the state, in order, with their sizes."""

    path: Path
    cameras: Mapping[str, str]
    states: tuple[tuple[str, int], ...]
