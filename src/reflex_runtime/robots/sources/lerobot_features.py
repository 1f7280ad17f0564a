"""What a checkpoint's files call a feature, where the checkpoint lies, and how its features are called in requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

WEIGHTS: Final = "model.safetensors"

SEEDED: Final = ("vqbet", "xvla", "vla_jepa", "eo1", "evo1", "fastwam", "molmoact2")
"""Types that draw from torch's own generator: served row by row, so that each row has its own seed."""

WHOLE: Final = ("act", "diffusion", "pi0_fast", *SEEDED)
"""Types with one call for a chunk that keep nothing of it in the policy object."""


class Feature(msgspec.Struct, kw_only=True):
    """An input or output of the policy."""

    type: Annotated[str, Meta(description="VISUAL, STATE, ENV or ACTION")]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=1_000_000)], ...], Meta(description="a list of sizes")]


@dataclass(frozen=True, slots=True)
class Features:
    """path: the checkpoint's directory. cameras: LeRobot's feature name of each image. states: the features that make
    the state, in order, with their sizes."""

    path: Path
    cameras: Mapping[str, str]
    states: tuple[tuple[str, int], ...]
