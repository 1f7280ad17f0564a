"""What LeRobot itself makes of the package. Skipped where LeRobot is not installed."""

from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lerobot_policy_reflex import ReflexConfig, ReflexPolicy
from lerobot_policy_reflex.connection import ReflexError
from serving.exports import ACTIONS, CHUNK, WEIGHTS, write_tiny
from serving.harness import Server

try:
    version("lerobot"), version("lerobot_policy_reflex")
except PackageNotFoundError as missing:
    pytest.skip(f"{missing.name} is not installed", allow_module_level=True)

import draccus
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.configs import AlohaEnv, PushtEnv
from lerobot.policies.factory import make_policy, make_pre_post_processors
from lerobot.utils.import_utils import register_third_party_plugins


@dataclass
class Program:
    """As LeRobot's programs read `--policy.…`."""

    policy: PreTrainedConfig


def parsed(server: Server, *options: str) -> PreTrainedConfig:
    arguments = ["--policy.type=reflex", f"--policy.url=http://127.0.0.1:{server.port}", *options]
    return draccus.parse(Program, args=arguments).policy


def test_lerobot_finds_the_type_and_drives_the_policy_through_its_processors(tmp_path: Path) -> None:
    register_third_party_plugins()
    with Server(write_tiny(tmp_path, cameras=("image",), noise=False)) as server:
        config = parsed(server, "--policy.n_action_steps=2", '--policy.names={"observation.image": "image"}')
        assert isinstance(config, ReflexConfig)
        assert (config.n_action_steps, config.names) == (2, {"observation.image": "image"})
        policy: Any = make_policy(config, env_cfg=PushtEnv())
        assert isinstance(policy, ReflexPolicy)
        before, after = make_pre_post_processors(config, preprocessor_overrides={"device_processor": {"device": "cpu"}})
        states = torch.tensor([[0.1, -0.2], [0.5, 0.0]])
        seen = {"observation.image": torch.rand(2, 3, 6, 8), "observation.state": states, "task": ["push", "push"]}
        with closing(policy):
            action = after(policy.select_action(before(seen)))
        np.testing.assert_allclose(action, np.tanh(states.numpy() @ WEIGHTS), atol=1e-6)
        assert policy.config.action_feature.shape == (ACTIONS,)
        assert CHUNK > 2


def test_a_robot_with_other_motors_is_refused_by_the_factory(tmp_path: Path) -> None:
    register_third_party_plugins()
    with Server(write_tiny(tmp_path, noise=False)) as server:
        with pytest.raises(ReflexError, match="actions of tiny have 2 numbers, those here have 14"):
            make_policy(parsed(server), env_cfg=AlohaEnv())
