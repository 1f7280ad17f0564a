"""LeRobot's own loader on what `lerobot_policy_reflex.dataset` writes. Runs where LeRobot can be imported.

This folder is no package: it would be imported in LeRobot's place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)

import torch
from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch.utils.data import DataLoader, Subset

from lerobot_policy_reflex.dataset import main
from robots.analysis.fleet import Fleet, chunk_of, picture, two_robots

try:
    from lerobot.utils.feature_utils import dataset_to_policy_features  # 0.6
except ImportError:
    from lerobot.datasets.utils import dataset_to_policy_features  # 0.4

pytestmark = pytest.mark.filterwarnings("default")  # LeRobot's and its dependencies' are not ours

NUMBERS = [0, 2, 4, 6, 1, 3, 5]  # of the requests of two_robots: those of e1, then those of e2


def opened(target: Path, **options: Any) -> LeRobotDataset:
    return LeRobotDataset("local/fleet", root=target, video_backend="pyav", **options)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def fleet(tmp_path: Path, offline: None) -> Path:
    recording = two_robots(tmp_path / "recordings")
    main([str(recording), "--root", str(tmp_path / "fleet")])
    return tmp_path / "fleet"


def test_lerobot_reads_every_frame_of_requests(fleet: Path) -> None:
    data = opened(fleet)
    assert (data.num_frames, data.num_episodes, data.fps) == (7, 2, 5)
    for index, number in enumerate(NUMBERS):
        frame = data[index]
        assert np.array_equal(frame["chunk"].numpy().reshape(4, 2), chunk_of(number))
        assert np.array_equal(frame["action"].numpy(), chunk_of(number)[0])
        assert frame["observation.state"].tolist() == [number / 8, -number / 4]
        assert frame["task"] == ("open the door" if number % 2 == 0 else "close the drawer")
        assert frame["episode_index"].item() == number % 2
        assert frame["slot"] == "prod"
        seen = frame["observation.images.top"].numpy().transpose(1, 2, 0) * 255.0
        assert np.abs(seen - picture(number)).mean() < 8.0
    about = json.loads((fleet / "meta" / "reflex.json").read_text())
    assert [episode["success"] for episode in about["episodes"]] == [True, None]


def test_an_episode_alone_and_batches_for_training(fleet: Path) -> None:
    second = opened(fleet, episodes=[1])
    assert [second[i]["chunk"][0].item() for i in range(len(second))] == [1.0, 3.0, 5.0]
    (batch,) = DataLoader(opened(fleet), batch_size=7)
    assert batch["chunk"].shape == (7, 8)
    assert batch["observation.images.top"].shape == (7, 3, 48, 64)


def test_policies_see_state_pictures_and_action_and_nothing_else(fleet: Path) -> None:
    features = dataset_to_policy_features(opened(fleet).meta.features)
    assert sorted(features) == ["action", "observation.images.top", "observation.state"]


def test_steps_give_the_executed_actions_that_follow_an_observation(tmp_path: Path, offline: None) -> None:
    recorded = Fleet(tmp_path / "recordings")
    recorded.look(0, "e", 0.0)
    recorded.look(1, "e", 0.2, executed=3)
    recorded.look(2, "e", 0.4, executed=2)
    target = tmp_path / "steps"
    main([str(recorded.close()), "--root", str(target), "--frames", "steps"])
    data = opened(target, delta_timestamps={"action": [i / 20 for i in range(4)]})
    executed = torch.tensor(np.array([*chunk_of(0)[:3], *chunk_of(1)[:2], chunk_of(2)[0]]))
    seen = [i for i, fresh in enumerate(data.hf_dataset["observed"]) if fresh]
    assert seen == [0, 3, 5]
    for number, frame in enumerate(Subset(data, seen)):
        ahead = executed[seen[number] : seen[number] + 4]
        assert torch.equal(frame["action"][: len(ahead)], ahead)
        assert frame["action_is_pad"].tolist() == [False] * len(ahead) + [True] * (4 - len(ahead))
        pixels = frame["observation.images.top"].numpy().transpose(1, 2, 0) * 255.0
        assert np.abs(pixels - picture(number)).mean() < 8.0


def test_lerobots_own_tools_take_it(fleet: Path, tmp_path: Path) -> None:
    """Such as those that leave out failed episodes, and put datasets together."""
    left = delete_episodes(opened(fleet), [0], output_dir=tmp_path / "left", repo_id="local/left")
    assert (left.meta.total_episodes, left.meta.total_frames) == (1, 3)
    both = merge_datasets([opened(fleet), opened(fleet)], "local/both", output_dir=tmp_path / "both")
    assert (both.meta.total_episodes, both.meta.total_frames) == (4, 14)
