"""Where a checkpoint lies, and how its features are called in requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Features:
    """path: the checkpoint's directory. cameras: LeRobot's feature name of each image. states: the features that make
    the state, in order, with their sizes."""

    path: Path
    cameras: Mapping[str, str]
    states: tuple[tuple[str, int], ...]
