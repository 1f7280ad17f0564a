"""The six tabletop tasks of the demo, by their names in Meta-World: the instructions, and what a robot sees.

No heavy import: the parent of the robot processes and the command line read this without loading a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

INSTRUCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "button-press-topdown-v3": "press the button from above",
        "button-press-v3": "press the button on the wall",
        "drawer-close-v3": "close the drawer",
        "drawer-open-v3": "pull the drawer open",
        "window-open-v3": "slide the window open",
        "door-open-v3": "open the door",
    }
)
"""Task name → instruction. The bundled policies know these words and no others."""

MAX_STEPS = 180
"""Control steps after which an episode counts as failed (2.25 s of simulated time at 80 Hz)."""

CONTROL_HZ = 80.0
"""Control steps per second of simulated time: 5 physics steps of 2.5 ms each."""


@dataclass(frozen=True, slots=True)
class RobotView:
    """What the robot sends to its policy.

    image: uint8 [64, 64, 3]; state: float32 [4], the hand's x, y, z in metres and how far the gripper is open (0 to 1);
    episode_id names the situation: task, seed and episode. executed: how many actions of the last chunk were executed,
    None at the first look of an episode.
    """

    image: NDArray[np.uint8]
    state: NDArray[np.float32]
    instruction: str
    episode_id: str
    executed: int | None = None


def situation(task: str, seed: int, episode: int) -> str:
    """The name of a situation: where the furniture stands follows from it."""
    return f"{task}/{seed}/{episode}"


def episode_id(robot_id: str, run: str, situation: str) -> str:
    """The name of an episode on the server: one situation, met by one robot in one run, so never used twice."""
    return f"{robot_id}:{run}:{situation}"
