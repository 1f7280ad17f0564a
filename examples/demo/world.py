"""One simulated robot arm and its table: a Meta-World task behind four methods.

Runs from pip packages alone. MuJoCo computes the physics, `SchematicCamera` draws the picture, so neither a display nor
a system OpenGL library is needed or loaded.
"""

from __future__ import annotations

import os
import pickle

import numpy as np
from numpy.typing import NDArray

from demo.tasks import INSTRUCTIONS, RobotView, situation
from reflex_runtime.core.errors import ConfigError

os.environ.setdefault("MUJOCO_GL", "disable")  # set before mujoco is imported, which otherwise looks for OpenGL

try:
    import mujoco
    from metaworld.env_dict import ENV_CLS_MAP
    from metaworld.types import Task
except ImportError as error:
    raise ImportError("the simulated robots need Meta-World: in a clone, pip install '.[demo]'") from error

from demo.camera import SchematicCamera


class World:
    """One task, which can be reset any number of times. Not thread-safe.

    (task, seed, episode) always gives the same situation: the same positions of the objects. Physics is deterministic:
    the same actions from the same situation have the same result.
    """

    def __init__(self, task: str, seed: int = 0) -> None:
        if task not in INSTRUCTIONS:
            raise ConfigError(f"task: {task!r} is none of {', '.join(INSTRUCTIONS)}")
        self.task = task
        self.seed = seed
        self.episode_id = ""
        self._env = ENV_CLS_MAP[task]()
        self._camera = SchematicCamera(self._env.model)
        self._vector = np.zeros(39)

    def reset(self, episode: int) -> None:
        """Reset the arm, and place the objects by (seed, episode)."""
        space = self._env._random_reset_space
        assert space is not None
        where = np.random.default_rng([self.seed, episode]).uniform(space.low, space.high)
        what = {"env_cls": type(self._env), "rand_vec": where, "partially_observable": False}
        self._env.set_task(Task(self.task, pickle.dumps(what)))
        self._env.reset()
        self.episode_id = situation(self.task, self.seed, episode)
        # The reset moved objects in the model; derived positions, and values read from them, are out of date.
        mujoco.mj_forward(self._env.model, self._env.data)
        self._vector = self._env._get_obs()

    def observe(self) -> RobotView:
        """Draw the picture and read the state; takes no simulated time."""
        image = self._camera.picture(self._env.data)
        state = self._vector[:4].astype(np.float32)
        return RobotView(image, state, INSTRUCTIONS[self.task], self.episode_id)

    def step(self, action: NDArray[np.float32] | NDArray[np.float64]) -> bool:
        """Move the hand by action[:3] (each in [-1, 1], 1 is a centimetre) and close the gripper by action[3].

        Returns whether the task is solved at this instant. Values out of range are clipped.
        """
        self._vector, _, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        return bool(info["success"])

    @property
    def privileged(self) -> NDArray[np.float64]:
        """Meta-World's own 39 numbers with the exact object positions: for scripted experts, never for a policy."""
        return self._vector
