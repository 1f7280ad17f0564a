"""One simulated robot: look, ask for a chunk of actions, execute part of it, look again.

`run_robot` takes any callable as the policy, so the same loop drives the robots of the demo and the evaluation of
a policy without a server. As a process (`python -m demo.robot --url …`) it speaks HTTP like a real one
and prints one JSON line per event on standard output, for a parent to aggregate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from demo.tasks import INSTRUCTIONS, MAX_STEPS, RobotView, episode_id
from reflex_runtime.client import (
    Chunk,
    Client,
    ClientError,
    Episode,
    ProcessorFailed,
    StaleRequest,
    Unreachable,
)

if TYPE_CHECKING:
    from demo.world import World  # at run time only the process that owns a world loads the simulator

Act = Callable[[RobotView], NDArray[np.float32]]
"""A policy: what is seen → a chunk of actions [n ≥ 1, 4], the first to be executed first."""

Event = Mapping[str, Any]
OnEvent = Callable[[Event], None]

EXECUTE: Final = 8
"""Actions executed of each chunk before looking again: half a chunk, so that an error is seen soon."""

LOOK_AGAIN: Final = 0.1
"""Seconds for which the arm stands still before it asks anew, after the policy failed."""


class Ending(Protocol):
    """Takes how an episode ended."""

    success: bool | None


Opened = Callable[[str], AbstractContextManager[Ending]]
"""Opens an episode by the name of its situation, for as long as it is played."""


class NoAnswer(Exception):
    """The server gave no actions: an error, an answer that is none, or refusals beyond the patience."""


class Gone(NoAnswer):
    """No server answered, which says nothing about the policy."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How one episode ended. `error` is None unless the policy failed to answer; then `success` is False."""

    episode_id: str
    task: str
    success: bool
    steps: int
    calls: int
    error: str | None = None


def run_robot(
    act: Act,
    world: World,
    episodes: int,
    *,
    first_episode: int = 0,
    execute: int = EXECUTE,
    max_steps: int = MAX_STEPS,
    control_hz: float = 0.0,
    opened: Opened = lambda situation: nullcontext(SimpleNamespace(success=None)),
    on_event: OnEvent = lambda event: None,
) -> list[EpisodeResult]:
    """Run `episodes` situations of `world` in closed loop and say how each ended.

    opened: is entered for each episode and told its success; that stays None when the server was gone. execute: actions
    taken from each chunk before looking again. control_hz: pace of the control steps on the wall clock; 0 runs as fast
    as the simulator can, 0.1 ms per step. The arm stands still while it waits for an answer.
    """
    results = []
    for number in range(first_episode, first_episode + episodes):
        world.reset(number)
        on_event({"event": "episode_start", "episode_id": world.episode_id, "task": world.task})
        with opened(world.episode_id) as ending:
            result, known = _run_episode(act, world, execute, max_steps, control_hz)
            ending.success = result.success if known else None
        on_event({"event": "episode_end", **asdict(result)})
        results.append(result)
    return results


def _run_episode(act: Act, world: World, execute: int, max_steps: int, control_hz: float) -> tuple[EpisodeResult, bool]:
    """The result, and whether it is one: not when the server was gone."""
    steps = calls = 0
    executed: int | None = None
    error: NoAnswer | None = None
    success = False
    while steps < max_steps and not success:
        try:
            chunk = act(replace(world.observe(), executed=executed))
        except NoAnswer as failure:
            error = failure
            break
        calls += 1
        before = steps
        due = time.monotonic()
        for action in chunk[: min(execute, max_steps - steps)]:
            success = world.step(action)
            steps += 1
            if control_hz:
                due += 1.0 / control_hz
                time.sleep(max(0.0, due - time.monotonic()))
            if success:
                break
        executed = steps - before
    told = None if error is None else str(error)
    return EpisodeResult(world.episode_id, world.task, success, steps, calls, told), not isinstance(error, Gone)


@dataclass(slots=True)
class HttpPolicy:
    """A policy behind a server, asked through `reflex_runtime.client`. For one thread.

    run: part of every episode's name, so that an episode played again is another one to the server.
    png: send pictures as PNG, not as raw bytes.
    patience: seconds for which one question is asked again after a refusal that invites it; then NoAnswer.
    again: how often the robot looks again and asks anew after the policy failed, or its answer came too late. That is
        another question and the robot's own decision: the client does not repeat what the policy may have run.
    """

    url: str
    robot_id: str
    run: str = ""
    png: bool = False
    patience: float = 30.0
    again: int = 0
    deadline_ms: float | None = None
    api_key: str | None = None
    on_event: OnEvent = lambda event: None
    _client: Client = field(init=False, repr=False)
    _episode: Episode[Client] | None = field(default=None, repr=False)
    _asked: int = 0
    _sent: float = 0.0
    _refusals: int = 0

    def __post_init__(self) -> None:
        self._client = Client(
            self.url,
            self.api_key,
            timeout=self.patience,
            retries=1000,  # its patience ends them
            encoding="png" if self.png else "raw",
            sleep=self._pause,
        )

    @contextmanager
    def episode(self, situation: str) -> Iterator[Ending]:
        """Requests made inside belong to one episode. Its `success` is reported to the server at the end.

        An episode whose server was lost has no known end and is not reported.
        """
        with self._client.episode(episode_id(self.robot_id, self.run, situation), self.robot_id) as self._episode:
            yield self._episode

    def __call__(self, seen: RobotView) -> NDArray[np.float32]:
        began = time.monotonic()
        self._refusals = 0
        for left in range(self.again, -1, -1):
            try:
                chunk = self._ask(seen)
            except (ProcessorFailed, StaleRequest) as failure:
                self._tell(status=failure.status, code=failure.code)
                if not left:
                    raise NoAnswer(str(failure)) from failure
                time.sleep(LOOK_AGAIN)
            except ClientError as failure:
                self._tell(status=failure.status, code=failure.code)
                raise (Gone if isinstance(failure, Unreachable) else NoAnswer)(str(failure)) from failure
            else:
                self._tell(
                    status=200,
                    refusals=self._refusals,
                    waited_ms=1e3 * (self._sent - began),
                    batch_size=chunk.batch.get("size"),
                    slot=chunk.slot,
                    moved=chunk.policy_changed,
                )
                return chunk.actions
        raise AssertionError("unreachable")

    def _ask(self, seen: RobotView) -> Chunk:
        self._asked += 1
        self._sent = time.monotonic()
        assert self._episode is not None, "asked outside an episode"
        return self._episode.act(
            image=seen.image,
            state=seen.state,
            instruction=seen.instruction,
            request_id=f"{self.robot_id}-{os.getpid()}-{self._asked}",
            deadline_ms=self.deadline_ms,
            executed=seen.executed,
        )

    def _pause(self, seconds: float) -> None:
        """The client was refused and waits."""
        self._refusals += 1
        self._tell("refused", pause_s=seconds)
        time.sleep(seconds)
        self._sent = time.monotonic()

    def _tell(self, event: str = "act", **told: Any) -> None:
        """latency_ms: of the last attempt."""
        latency_ms = 1e3 * (time.monotonic() - self._sent)
        self.on_event({"event": event, "robot_id": self.robot_id, "latency_ms": latency_ms, **told})

    def close(self) -> None:
        self._client.close()


def _print_event(event: Event) -> None:
    print(json.dumps(event), flush=True)


def _end_with_parent() -> None:
    """Exit as soon as standard input closes: the parent holds its other end, so even a killed parent leaves nothing."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def main(argv: list[str] | None = None, kind: type[HttpPolicy] = HttpPolicy) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m demo.robot", description="One simulated robot.")
    parser.add_argument("--url", required=True, help="server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--robot-id", default="r0")
    parser.add_argument("--run", default="0", help="part of the episodes' names, for runs against one server")
    parser.add_argument("--task", choices=list(INSTRUCTIONS), default="drawer-close-v3")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--first-episode", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7, help="of the situations; the bundled policies learned on others")
    parser.add_argument("--execute", type=int, default=EXECUTE, help="actions taken of each chunk")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    parser.add_argument("--control-hz", type=float, default=0.0, help="pace on the wall clock; 0: as fast as it can")
    parser.add_argument("--png", action="store_true", help="send pictures as PNG")
    parser.add_argument("--patience-s", type=float, default=30.0, help="for how long a refused question is asked again")
    parser.add_argument("--again", type=int, default=0, help="how often to ask anew after the policy failed")
    parser.add_argument("--deadline-ms", type=float)
    parser.add_argument("--end-with-stdin", action="store_true", help="exit when standard input closes")
    args = parser.parse_args(argv)
    if args.end_with_stdin:
        _end_with_parent()

    from demo.world import World

    world = World(args.task, args.seed)
    policy = kind(
        args.url,
        args.robot_id,
        args.run,
        png=args.png,
        patience=args.patience_s,
        again=args.again,
        deadline_ms=args.deadline_ms,
        api_key=os.environ.get("REFLEX_API_KEY"),
        on_event=_print_event,
    )
    _print_event(
        {"event": "ready", "robot_id": args.robot_id, "task": args.task, "startup_s": time.monotonic() - began}
    )
    episodes = run_robot(
        policy,
        world,
        args.episodes,
        first_episode=args.first_episode,
        execute=args.execute,
        max_steps=args.max_steps,
        control_hz=args.control_hz,
        opened=policy.episode,
        on_event=lambda event: _print_event({**event, "robot_id": args.robot_id}),
    )
    policy.close()
    solved = sum(e.success for e in episodes)
    _print_event({"event": "done", "robot_id": args.robot_id, "episodes": len(episodes), "successes": solved})
    return 0 if all(e.error is None for e in episodes) else 1


if __name__ == "__main__":
    sys.exit(main())
