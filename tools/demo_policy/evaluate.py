"""Step 4: how often does an export solve the tasks, in situations it has never seen?

The loop is the one of the demo robots. Each task gets `--episodes` situations of `--seed`; training uses other seeds.
`--policy random` measures the floor: uniform random actions, same situations, same step limit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from demo.robot import EXECUTE, run_robot
from demo.tasks import INSTRUCTIONS, RobotView
from demo.world import World
from reflex_runtime.robots.versions.comparison import wilson


def session(path: Path) -> ort.InferenceSession:
    """One thread, as the figures of this project are stated for."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxPolicy:
    """An export as a callable, batch of one. Deterministic for a seed."""

    def __init__(self, export: Path, seed: int) -> None:
        self.config: dict[str, Any] = json.loads((export / "reflex_config.json").read_text())
        self.prefix, self.step = session(export / "vlm_prefix.onnx"), session(export / "expert_denoise.onnx")
        self.rng = np.random.default_rng(seed)
        self.instruction: str | None = None  # told instead of the task's own words, to see if words matter
        self.look_every = 1  # chunks for which one picture serves, to see what a blind prefix cache would cost
        self.last: RobotView | None = None
        self.age = 0

    def __call__(self, seen: RobotView) -> NDArray[np.float32]:
        self.age += 1
        if self.last is None or self.last.episode_id != seen.episode_id or self.age >= self.look_every:
            self.last, self.age = seen, 0
        shape = (1, self.config["chunk_size"], self.config["action_dim"])
        words = tokens(self.config, self.instruction or seen.instruction)
        state = ((seen.state - self.norm("state", "mean")) / self.norm("state", "std"))[None]
        (past_kv,) = self.prefix.run(None, {"image": self.last.image[None], "tokens": words})
        x: NDArray[np.float32] = self.rng.standard_normal(shape).astype(np.float32)
        for k in range(steps := self.config["num_denoising_steps"]):
            time = np.full(1, k / steps, np.float32)
            (x,) = self.step.run(None, {"x": x, "time": time, "state": state, "past_kv": past_kv})
        return x[0] * self.norm("action", "std") + self.norm("action", "mean")

    def norm(self, what: str, which: str) -> NDArray[np.float32]:
        return np.array(self.config[f"{what}_norm"][which], np.float32)


def tokens(config: dict[str, Any], text: str) -> NDArray[np.int64]:
    ids = [config["tokenizer"].get(word, 0) for word in text.lower().split()][: config["max_tokens"]]
    return np.array([ids + [0] * (config["max_tokens"] - len(ids))], np.int64)


class RandomActions:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, seen: RobotView) -> NDArray[np.float32]:
        return self.rng.uniform(-1.0, 1.0, (16, 4)).astype(np.float32)


def line(name: str, successes: int, n: int) -> str:
    low, high = wilson(successes, n)
    return f"| {name} | {successes}/{n} | {100 * successes / n:.0f} % | {100 * low:.0f}–{100 * high:.0f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="random", help="export directory, or 'random'")
    parser.add_argument("--episodes", type=int, default=50, help="per task")
    parser.add_argument("--seed", type=int, default=1000, help="of the situations")
    parser.add_argument("--execute", type=int, default=EXECUTE, help="actions taken of each chunk")
    parser.add_argument("--wrong-words", action="store_true", help="tell each robot the instruction of another task")
    parser.add_argument("--look-every", type=int, default=1, help="chunks that share one picture; 99: one per episode")
    args = parser.parse_args()
    policy: Any = RandomActions(args.seed) if args.policy == "random" else OnnxPolicy(Path(args.policy), args.seed)
    policy.look_every = args.look_every
    texts = list(INSTRUCTIONS.values())
    total, began = 0, time.perf_counter()
    print("| task | solved | rate | 95 % interval |\n| --- | --- | --- | --- |")
    for index, task in enumerate(INSTRUCTIONS):
        if args.wrong_words:
            policy.instruction = texts[(index + 3) % len(texts)]
        episodes = run_robot(policy, World(task, args.seed), args.episodes, execute=args.execute)
        solved = sum(e.success for e in episodes)
        total += solved
        print(line(task, solved, args.episodes), flush=True)
    print(line("all", total, args.episodes * len(INSTRUCTIONS)))
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
