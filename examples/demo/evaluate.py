"""Evaluate the policy behind a server in N environments at a time: success with its interval, and episodes a minute.

`PYTHONPATH=examples python -m demo.evaluate ws://127.0.0.1:8000 --environments 32`. An environment is a thread with a
Meta-World task and a connection of its own. It speaks openpi through the stock client, so the server may be any that
does.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np

from demo.robot import EXECUTE, run_robot
from demo.tasks import INSTRUCTIONS, RobotView
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.versions.comparison import wilson

if TYPE_CHECKING:
    from demo.world import World

Situation = tuple[str, int]
"""A task, and the number of its episode."""


@dataclass(frozen=True, slots=True)
class Score:
    """What became of an episode. waited: seconds for the answers of all its calls."""

    task: str
    success: bool
    calls: int
    waited: float


@dataclass(frozen=True, slots=True)
class Result:
    """All episodes. rate: episodes a second; cores: that physics, cameras and clients used. Both are taken while every
    environment was at work."""

    scores: Sequence[Score]
    rate: float
    cores: float

    def __str__(self) -> str:
        lines = ["| task | solved | 95 % interval |", "| --- | --- | --- |"]
        for name, tasks in [*((task, {task}) for task in INSTRUCTIONS), ("all", set(INSTRUCTIONS))]:
            solved = [one.success for one in self.scores if one.task in tasks]
            low, high = wilson(sum(solved), len(solved))
            lines.append(f"| {name} | {sum(solved)}/{len(solved)} | {100 * low:.1f}–{100 * high:.1f} % |")
        calls = sum(one.calls for one in self.scores)
        answer = 1e3 * sum(one.waited for one in self.scores) / calls
        each = f"{calls / len(self.scores):.1f} calls each, {answer:.1f} ms until an answer"
        used = f"the environments used {self.cores:.2f} cores"
        return "\n".join([*lines, "", f"{60 * self.rate:.0f} episodes a minute, {each}; {used}"])


class OpenpiPolicy:
    """The policy behind a server, through openpi's client. For one thread."""

    def __init__(self, url: str) -> None:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy

        self._client = WebsocketClientPolicy(url)

    def __call__(self, seen: RobotView) -> Any:
        # `reset` at the first look of an episode; a server that keeps nothing of it ignores it
        return self.infer(seen.image, seen.state, seen.instruction, {"reset": seen.executed is None})["actions"]

    def infer(self, image: Any, state: Any, prompt: Any, more: dict[str, Any]) -> Any:
        said = {"observation/image": image, "observation/state": state, "prompt": prompt}
        return self._client.infer(said | more)

    def close(self) -> None:
        self._client._ws.close()  # the client itself has no way to


class OneMessage(OpenpiPolicy):
    """The observations of all environments as one with a leading axis, sent when each has come. For as many threads."""

    def __init__(self, url: str, environments: int) -> None:
        super().__init__(url)
        self._left = environments
        self._changed = threading.Condition()
        self._asked: dict[str, RobotView] = {}
        self._actions: dict[str, Any] = {}
        self._error: Exception | None = None

    def __call__(self, seen: RobotView) -> Any:
        name = seen.episode_id
        with self._changed:
            self._asked[name] = seen
            self._send()
            self._changed.wait_for(lambda: name in self._actions or self._error)
            if self._error:
                raise self._error
            return self._actions.pop(name)

    def close(self) -> None:
        """One environment leaves."""
        with self._changed:
            self._left -= 1
            self._send()
            if not self._left:
                super().close()

    def _send(self) -> None:
        if len(self._asked) < self._left or not self._asked:
            return
        rows, self._asked = list(self._asked.values()), {}
        images, states = (np.stack([getattr(row, name) for row in rows]) for name in ("image", "state"))
        names = [row.episode_id for row in rows]
        more = {"episode_id": names, "reset": [row.executed is None for row in rows]}
        try:
            answer = self.infer(images, states, [row.instruction for row in rows], more)
        except Exception as error:  # all environments of the message get it
            self._error = error
        else:
            self._actions.update(zip(names, answer["actions"], strict=True))
        self._changed.notify_all()


class Evaluation:
    """Environments in threads of this process, which take the next situation when they are done with one."""

    def __init__(self, situations: Sequence[Situation], seed: int, execute: int) -> None:
        self._seed, self._execute = seed, execute
        self._left = iter(situations)
        self._worlds: dict[str, list[World]] = {}  # that no environment uses
        self._lock = threading.Lock()
        self._scores: list[Score] = []
        self._marks: list[tuple[float, float, int]] = []  # while all are at work: seconds, those of CPU, episodes

    def run(self, url: str, environments: int, one_message: bool) -> Result:
        from demo.world import World

        spare = min(environments, 2 * environments // len(INSTRUCTIONS) + 1)  # some tasks take longer than others
        self._worlds = {task: [World(task, self._seed) for _ in range(spare)] for task in INSTRUCTIONS}
        shared = OneMessage(url, environments) if one_message else None
        policies = [shared or OpenpiPolicy(url) for _ in range(environments)]
        with ThreadPoolExecutor(environments) as pool:
            for done in [pool.submit(self._environment, policy, environments) for policy in policies]:
                done.result()
        (began, cpu, first), (ended, later, last) = self._marks[0], self._marks[-1]
        seconds = max(1e-9, ended - began)
        return Result(self._scores, (last - first) / seconds, (later - cpu) / seconds)

    def _environment(self, policy: OpenpiPolicy, environments: int) -> None:
        try:
            while (situation := self._next(environments)) is not None:
                self._play(policy, *situation)
        except BaseException:
            self._left = iter(())  # the others stop too
            raise
        finally:
            policy.close()

    def _next(self, environments: int) -> Situation | None:
        with self._lock:
            found = next(self._left, None)
            if len(self._scores) >= environments and found is not None:
                self._marks.append((time.monotonic(), time.process_time(), len(self._scores)))
            return found

    def _play(self, policy: OpenpiPolicy, task: str, number: int) -> None:
        from demo.world import World

        with self._lock:
            world = self._worlds[task].pop() if self._worlds[task] else World(task, self._seed)
        waited = 0.0

        def act(seen: RobotView) -> Any:
            nonlocal waited
            began = time.monotonic()
            actions = policy(seen)
            waited += time.monotonic() - began
            return actions

        (one,) = run_robot(act, world, 1, first_episode=number, execute=self._execute)
        with self._lock:
            self._worlds[task].append(world)
            self._scores.append(Score(task, one.success, one.calls, waited))


def evaluate(
    url: str,
    environments: int,
    episodes: int,
    *,
    processes: int = 1,
    seed: int = 1000,
    execute: int = EXECUTE,
    one_message: bool = False,
) -> Result:
    """Play `episodes` situations of each task. An error of the server is raised: it says nothing about the policy."""
    every = [(task, number) for number in range(episodes) for task in INSTRUCTIONS]
    each = environments // processes
    if not 1 <= each <= len(every) // processes // 3:
        raise ConfigError(
            f"environments={environments}: needs one for each of {processes} processes, and three episodes or more for "
            f"each environment; there are {len(every)} episodes"
        )
    parts = [(every[i::processes], seed, execute, url, each, one_message) for i in range(processes)]
    if processes == 1:
        return _run(*parts[0])
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = [done.result() for done in [pool.submit(_run, *part) for part in parts]]
    scores = [one for part in found for one in part.scores]
    return Result(scores, sum(part.rate for part in found), sum(part.cores for part in found))


def _run(situations: Sequence[Situation], seed: int, execute: int, url: str, each: int, one_message: bool) -> Result:
    return Evaluation(situations, seed, execute).run(url, each, one_message)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="server, e.g. ws://127.0.0.1:8000")
    parser.add_argument("--environments", type=int, default=32, metavar="N", help="at work at a time (default 32)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share them (default 1)")
    parser.add_argument("--episodes", type=int, default=50, metavar="N", help="of each task (default 50)")
    parser.add_argument("--seed", type=int, default=1000, help="of the situations; the policies learned on others")
    parser.add_argument("--execute", type=int, default=EXECUTE, help=f"actions taken of each chunk (default {EXECUTE})")
    parser.add_argument("--one-message", action="store_true", help="ask for all environments of a process at a time")
    parser.add_argument("--json", action="store_true", help="every episode, and the rates")
    args = vars(parser.parse_args(words))
    told = args.pop("json")
    try:
        result = evaluate(**args)
    except ConfigError as error:
        print(f"evaluate: {error.message}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"evaluate: {args['url']}: {error.strerror or error}; start a server there", file=sys.stderr)
        return 2
    print(json.dumps(asdict(result)) if told else result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
