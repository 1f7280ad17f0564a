"""What a client says is used or refused: fields that say where a robot is in its chunk, and how long it waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reflex_runtime.demo import POLICY
from serving.requests import recorded

from .lerobot_robot import Robot, features
from .test_lerobot import serving, tensors

__all__ = ["tensors"]  # used by all tests here
MOTORS = ("x", "y", "z", "gripper_open")
SETUP = {"features": features(("image",), MOTORS), "policy_type": "smolvla"}


def step(robot: Robot, timestep: int) -> None:
    """An observation of the bundled policy, and its chunk."""
    picture = np.zeros((64, 64, 3), np.uint8)
    robot.see([0.0, 0.0], timestep, task="open the door", image=picture, **dict.fromkeys(MOTORS, 0.1))
    assert robot.act()[0].timestep == timestep


def test_w54_lerobots_timesteps_say_how_much_of_the_last_chunk_was_executed(tmp_path: Path) -> None:
    """Whatever time it took: a simulator may be fast, and a robot may be held up."""
    with serving(POLICY, "--rtc", "--record", str(tmp_path)) as (server, robot):
        one = robot(**SETUP)
        for timestep in (0, 9, 9, 12, 40, 3, 5):
            step(one, timestep)
        server.stop()
    asked = recorded(tmp_path)
    assert [request.executed for request in asked] == [None, 9, 0, 3, 28, None, 2]
    assert len({request.episode_id for request in asked[:5]} | {request.episode_id for request in asked[5:]}) == 2
