"""Step 1: demonstrations from Meta-World's scripted experts, with noise on what they do but not on what is learned.

A policy that has seen only perfect runs has never seen how to return to one. So each episode is disturbed by noise of a
strength drawn for it, while the label stays what the expert wanted. The few runs that the disturbed expert does not
finish are left out.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray
from words import tokenize

from demo.tasks import INSTRUCTIONS, MAX_STEPS, RobotView
from demo.world import World

NOISE_LEVELS = (0.0, 0.3, 0.6)
NOISE_SHAPE = np.array([1.0, 1.0, 1.0, 0.2])  # the gripper less: it is on or off
STEPS_AFTER_SUCCESS = 10  # so that "stay there" is learned too


class Recorder:
    """Collects episodes; one row is what the policy would have seen at that step and what the expert wanted then."""

    def __init__(self) -> None:
        self.rows: list[tuple[RobotView, NDArray[np.float32], int, int]] = []
        self.episodes = 0

    def add(self, task: int, steps: list[tuple[RobotView, NDArray[np.float32]]]) -> None:
        self.rows += [(seen, action, task, self.episodes) for seen, action in steps]
        self.episodes += 1

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            image=np.stack([seen.image for seen, _, _, _ in self.rows]),
            state=np.stack([seen.state for seen, _, _, _ in self.rows]),
            action=np.stack([action for _, action, _, _ in self.rows]),
            task=np.array([task for _, _, task, _ in self.rows], np.uint8),
            episode=np.array([episode for _, _, _, episode in self.rows], np.int32),
            tokens=np.array([tokenize(text) for text in INSTRUCTIONS.values()], np.int64),
        )


def demonstrate(
    world: World, episode: int, rng: np.random.Generator
) -> list[tuple[RobotView, NDArray[np.float32]]] | None:
    """Situation `episode` of `world` as (seen, wanted) steps; None if the disturbed expert did not solve it."""
    world.reset(episode)
    make_expert: Callable[[], Any] = ENV_POLICY_MAP[world.task]
    expert = make_expert()
    strength = float(rng.choice(NOISE_LEVELS))
    rows: list[tuple[RobotView, NDArray[np.float32]]] = []
    solved_for = 0
    while len(rows) < MAX_STEPS:
        action = np.clip(expert.get_action(world.privileged), -1.0, 1.0).astype(np.float32)
        rows.append((world.observe(), action))
        solved = world.step(action + strength * rng.standard_normal(4) * NOISE_SHAPE)
        solved_for += bool(solved or solved_for)
        if solved_for > STEPS_AFTER_SUCCESS:
            return rows
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write (.npz)")
    parser.add_argument("--episodes", type=int, default=40, help="per task")
    parser.add_argument("--seed", type=int, default=0, help="of the situations and of the noise")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high")  # the experts clip on purpose

    recorder, began = Recorder(), time.perf_counter()
    for index, task in enumerate(INSTRUCTIONS):
        world = World(task, args.seed)
        rng = np.random.default_rng([args.seed, index])
        solved = 0
        for k in range(args.episodes):
            rows = demonstrate(world, k, rng)
            if rows is not None:
                recorder.add(index, rows)
                solved += 1
        took = time.perf_counter() - began
        print(f"{task}: kept {solved}/{args.episodes}, {len(recorder.rows)} steps so far, {took:.0f} s", flush=True)
    recorder.save(args.out)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
