"""Start a fleet of simulated robots against a server, each in its own process, and add up what they report.

Processes, because a robot is one: its physics must not share an interpreter lock with another robot, and its requests
arrive when its physics needs them. The demo passes its own server, a test a stub.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from demo.robot import EXECUTE, EpisodeResult, Event, OnEvent
from demo.tasks import INSTRUCTIONS, MAX_STEPS, episode_id, situation
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import percentile

ServerFactory = Callable[[], AbstractContextManager[str]]
"""Starts a server, gives its URL, and stops it on the way out."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_HERE = str(Path(__file__).parents[1])  # where the robots' processes find this package
_STDERR_KEPT = 2000  # characters of a failed robot's standard error that go into its report


@dataclass(frozen=True, slots=True)
class RobotReport:
    """One robot process from start to end. exit_code 0: every episode was played to its end, solved or not. late: it
    had episodes left at the time limit, and was stopped."""

    robot_id: str
    task: str
    episodes: tuple[EpisodeResult, ...]
    startup_s: float | None
    exit_code: int
    stderr: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles, so that each is a value that occurred."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None without data."""
        if not values:
            return None
        ranked = sorted(values)
        p50, p90, p99 = (percentile(ranked, share) for share in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, ranked[-1])


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the fleet did.

    calls: chunks answered; refused: times a robot was told to come later, and did; failed: calls without an answer;
    latency_ms: of answered attempts, as the robots measured them; mean_batch_size: as the server reported per answer,
    so weighted by requests; None where nothing was reported.
    """

    robots: tuple[RobotReport, ...]
    calls: int
    refused: int
    failed: int
    latency_ms: Percentiles | None
    mean_batch_size: float | None
    wall_s: float

    @property
    def episodes(self) -> tuple[EpisodeResult, ...]:
        return tuple(e for robot in self.robots for e in robot.episodes)

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        """Task → (solved, played), in the order of the tasks."""
        counts = {}
        for task in INSTRUCTIONS:
            played = [e.success for e in self.episodes if e.task == task]
            if played:
                counts[task] = (sum(played), len(played))
        return counts

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences about robots that failed; empty when all is well. Those that were late did not."""
        told = []
        for robot in self.robots:
            if robot.late:
                continue
            errors = [e.error for e in robot.episodes if e.error]
            if robot.exit_code or errors:
                last_words = robot.stderr.strip().splitlines()[-1:]
                why = (errors or last_words or ["no message"])[0]
                told.append(f"{robot.robot_id} ({robot.task}) ended with code {robot.exit_code}: {why}")
        return tuple(told)

    @property
    def late(self) -> int:
        """Robots that had episodes left at the time limit."""
        return sum(robot.late for robot in self.robots)


@dataclass(slots=True, eq=False)
class _Robot:
    """A running child and what it has said so far."""

    robot_id: str
    task: str
    process: subprocess.Popen[str]
    errors: IO[str]
    episodes: list[EpisodeResult] = field(default_factory=list)
    startup_s: float | None = None
    late: bool = False

    def report(self) -> RobotReport:
        code = self.process.wait()
        self.errors.seek(0)
        stderr = self.errors.read()[-_STDERR_KEPT:] if code else ""
        return RobotReport(self.robot_id, self.task, tuple(self.episodes), self.startup_s, code, stderr, self.late)


def need_simulator() -> None:
    """ConfigError where the extra `demo` is not installed."""
    missing = [package for package in ("metaworld", "cv2") if find_spec(package) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed: in a clone, pip install '.[demo]'")


def run_demo(
    server: str | ServerFactory,
    robots: int = 6,
    episodes: int = 2,
    *,
    tasks: Sequence[str] = tuple(INSTRUCTIONS),
    seed: int = 7,
    execute: int = EXECUTE,
    max_steps: int = MAX_STEPS,
    control_hz: float = 0.0,
    wire: str = "msgpack",
    run: str | None = None,
    again: int = 0,
    time_limit: float = 120.0,
    on_progress: OnEvent = lambda event: None,
) -> DemoResult:
    """Run `robots` processes of `episodes` episodes each against `server`, a URL or a factory of one.

    Robots take the tasks in turn; those with the same task play different situations of `seed`. run: part of the
    episodes' names (see `planned`), else drawn. again: how often a robot asks anew after the policy failed.

    on_progress gets every event of every robot as it arrives, on the calling thread (`robot.py` prints them: ready,
    episode_start, act, refused, episode_end, done). After `time_limit` seconds the robots still running are stopped,
    and their reports say that they were late. On any way out, an exception included, no child is left.
    """
    for name, value in (("robots", robots), ("episodes", episodes)):
        if value < 1:
            raise ConfigError(f"{name}: {value} is less than 1")
    if not tasks or not set(tasks) <= set(INSTRUCTIONS):
        raise ConfigError(f"tasks: {', '.join(tasks) or 'nothing'}; expected some of {', '.join(INSTRUCTIONS)}")
    need_simulator()
    with ExitStack() as stack:
        url = stack.enter_context(nullcontext(server) if isinstance(server, str) else server())
        began = time.monotonic()
        options = {
            "--url": url,
            "--episodes": episodes,
            "--seed": seed,
            "--execute": execute,
            "--max-steps": max_steps,
            "--control-hz": control_hz,
            "--run": run or new_run(),
            "--again": again,
        }
        program = "openpi_robot" if wire == "openpi" else "robot"
        fleet = []
        for i in range(robots):
            task, first = _part(i, episodes, tasks)
            mine = {"--robot-id": f"r{i}", "--task": task, "--first-episode": first}
            fleet.append(stack.enter_context(_spawn(program, options | mine)))
        calls = _follow(fleet, began + time_limit, on_progress)
        asked = [call for call in calls if call["event"] == "act"]
        answered = [call for call in asked if call["status"] == 200]
        sizes = [call["batch_size"] for call in answered if call.get("batch_size")]
        return DemoResult(
            robots=tuple(robot.report() for robot in fleet),
            calls=len(answered),
            refused=len(calls) - len(asked),
            failed=len(asked) - len(answered),
            latency_ms=Percentiles.of([call["latency_ms"] for call in answered]),
            mean_batch_size=sum(sizes) / len(sizes) if sizes else None,
            wall_s=time.monotonic() - began,
        )


def new_run() -> str:
    """A name no other run has."""
    return uuid.uuid4().hex[:8]


def planned(
    run: str, robots: int, episodes: int, tasks: Sequence[str] = tuple(INSTRUCTIONS), seed: int = 7
) -> list[str]:
    """The names under which a server will see the episodes of a run, about in the order in which they begin."""
    names = []
    for number in range(episodes):
        for i in range(robots):
            task, first = _part(i, episodes, tasks)
            names.append(episode_id(f"r{i}", run, situation(task, seed, first + number)))
    return names


def _part(robot: int, episodes: int, tasks: Sequence[str]) -> tuple[str, int]:
    """A robot's task, and its first situation."""
    turn, which = divmod(robot, len(tasks))
    return tasks[which], turn * episodes


@contextmanager
def _spawn(program: str, options: Mapping[str, Any]) -> Iterator[_Robot]:
    """A robot process that cannot outlive this one: it ends when its standard input closes."""
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", f"demo.{program}", "--end-with-stdin", *words]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join([_HERE, os.environ.get("PYTHONPATH", "")])},
        )
        try:
            yield _Robot(str(options["--robot-id"]), str(options["--task"]), process, errors)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _follow(fleet: Sequence[_Robot], deadline: float, on_progress: OnEvent) -> list[Event]:
    """Pass on all events until every robot has closed its output or the deadline kills it. Returns the calls: answered,
    failed and refused.
    """
    events: queue.SimpleQueue[tuple[_Robot, Event | None]] = queue.SimpleQueue()

    def read(robot: _Robot) -> None:
        assert robot.process.stdout is not None
        for line in robot.process.stdout:
            try:
                events.put((robot, json.loads(line)))
            except ValueError:  # a library that prints; shown, not lost
                events.put((robot, {"event": "output", "robot_id": robot.robot_id, "text": line.rstrip()}))
        events.put((robot, None))

    readers = [threading.Thread(target=read, args=(robot,), daemon=True) for robot in fleet]
    for reader in readers:
        reader.start()
    talking = list(fleet)
    calls = []
    try:
        while talking and time.monotonic() < deadline:
            try:
                robot, event = events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if event is None:
                talking.remove(robot)
                continue
            if event["event"] == "ready":
                robot.startup_s = event["startup_s"]
            elif event["event"] == "episode_end":
                fields = EpisodeResult.__dataclass_fields__
                robot.episodes.append(EpisodeResult(**{name: event[name] for name in fields}))
            elif event["event"] in ("act", "refused"):
                calls.append(event)
            on_progress(event)
    finally:
        for robot in talking:
            robot.late = True
            robot.process.kill()
        for reader in readers:
            reader.join()
    return calls
