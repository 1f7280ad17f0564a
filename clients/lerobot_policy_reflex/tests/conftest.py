"""With LeRobot where it is installed, else with stand-ins for the few classes of it that the package uses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parents[2] / "tests")]  # the package; `serving.harness`


@dataclasses.dataclass
class PreTrainedConfig:
    input_features: dict[str, Any] = dataclasses.field(default_factory=dict)
    output_features: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: str | None = None
    push_to_hub: bool = True

    @staticmethod
    def register_subclass(name: str) -> Callable[[type], type]:
        return lambda kind: kind

    def __post_init__(self) -> None:
        pass

    @property
    def action_feature(self) -> Any:
        return self.output_features.get("action")


class PreTrainedPolicy(torch.nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config


@dataclasses.dataclass
class PolicyProcessorPipeline:
    steps: list[Any]
    name: str
    to_transition: Callable[[Any], Any] = lambda value: value
    to_output: Callable[[Any], Any] = lambda value: value

    def __call__(self, value: Any) -> Any:
        return self.to_output(self.to_transition(value))


class LeRobotDataset:
    """Keeps what it is given, and refuses what LeRobot's would: other columns, kinds or shapes than it was made for."""

    stands_in = True

    def __init__(self, fps: int, features: dict[str, Any], robot_type: str) -> None:
        self.fps, self.features, self.robot_type = fps, features, robot_type
        self.episodes: list[list[dict[str, Any]]] = []
        self.finalized = False
        self._rows: list[dict[str, Any]] = []

    @classmethod
    def create(
        cls, repo_id: str, fps: int, features: dict[str, Any], root: Path, robot_type: str, use_videos: bool
    ) -> LeRobotDataset:
        (root / "meta").mkdir(parents=True)
        return cls(fps, features, robot_type)

    def add_frame(self, frame: dict[str, Any]) -> None:
        assert frame.keys() == self.features.keys() | {"task"}
        for name, about in self.features.items():
            if about["dtype"] != "string":
                kind = "uint8" if about["dtype"] == "video" else about["dtype"]
                assert (frame[name].dtype, frame[name].shape) == (np.dtype(kind), about["shape"]), name
        self._rows.append(frame)

    def save_episode(self) -> None:
        assert self._rows
        self.episodes.append(self._rows)
        self._rows = []

    def finalize(self) -> None:
        self.finalized = True

    @property
    def num_episodes(self) -> int:
        return len(self.episodes)

    @property
    def num_frames(self) -> int:
        return sum(map(len, self.episodes))


def _stand_in() -> None:
    def same(value: Any) -> Any:
        return value

    parts: dict[str, dict[str, Any]] = {
        "": {},
        ".datasets": {},
        ".datasets.lerobot_dataset": {"LeRobotDataset": LeRobotDataset},
        ".configs": {},
        ".configs.policies": {"PreTrainedConfig": PreTrainedConfig},
        ".policies": {},
        ".policies.pretrained": {"PreTrainedPolicy": PreTrainedPolicy},
        ".processor": {"PolicyProcessorPipeline": PolicyProcessorPipeline},
        ".processor.converters": {"policy_action_to_transition": same, "transition_to_policy_action": same},
    }
    for name, members in parts.items():
        module = ModuleType(f"lerobot{name}")
        module.__dict__.update(members, __path__=[])
        sys.modules[module.__name__] = module


if find_spec("lerobot.configs") is None:
    _stand_in()
