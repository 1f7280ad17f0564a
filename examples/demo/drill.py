"""The drill of `--ab`: half-way b is broken on purpose; it is drained, repaired, probed, and serves again.

The drill does over HTTP what an operator would do. Every line that it prints comes from the robots' events or from the
server's answers. Nothing here waits: the drill looks at the server on the robots' events.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal

from demo.robot import Event
from demo.run import new_run, planned
from reflex_runtime.client import Client, ClientError
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.versions.router import bucket

FAULT: Final = "b:raise:1"
LOOK: Final = 0.2  # seconds between two regular looks at the server
AGAIN: Final = 8
"""How often a robot asks anew after a failure: more than the five crashes in a row that drain b, should it be alone."""

Phase = Literal["before", "broken", "mended", "over"]
Tell = Callable[[str], None]


class Drill:
    """Follows the robots' events and carries out the drill.

    total: number of episodes. tell: called with the text of each step.
    """

    def __init__(self, total: int, tell: Tell) -> None:
        self.phase: Phase = "before"
        self.failed: Counter[str] = Counter()  # robot → calls of it that b failed
        self.most = 0  # failures of one robot in a row
        self._total, self._tell = total, tell
        self._client: Client | None = None
        self._ended = 0
        self._row: Counter[str] = Counter()
        self._on_b = "a robot"  # the last one that b answered
        self._changes = 0  # changes of the server that were printed
        self._looked = self._began = time.monotonic()

    def begin(self, url: str) -> None:
        self._client = Client(url, os.environ.get("REFLEX_API_KEY"), timeout=5.0)

    def __call__(self, event: Event) -> None:
        """One event of a robot."""
        kind = event["event"]
        if kind == "episode_end":
            self._ended += 1
            if self.phase == "before" and 2 * self._ended >= self._total:
                self._break()
        elif kind == "act" and self.phase in ("broken", "mended"):
            failed, by_b = event.get("code") == "processor_failed", event.get("slot") == "b"
            if failed:
                self._count(event["robot_id"])
            if by_b:
                self._on_b = event["robot_id"]
            now = time.monotonic()
            if failed or by_b or event.get("moved") or now - self._looked >= LOOK:
                self._looked = now
                self._look()
            if event.get("moved"):
                self._tell(f"{event['robot_id']} goes on with a")
            if not failed:
                self._row[event["robot_id"]] = 0

    @property
    def missing(self) -> str | None:
        """The steps of the drill that did not happen, in words."""
        return {
            "before": "the fault was never injected",
            "broken": "b was not drained before the robots were done",
            "mended": "b had not come back when the robots were done: no episode of it began after the cool-down",
            "over": None,
        }[self.phase]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # -- the moments ---------------------------------------------------------------------------------------------------

    def _break(self) -> None:
        if self._post("/admin/faults", {"faults": [FAULT]}):
            self.phase = "broken"
            self._began = time.monotonic()
            self._tell(f"{self._ended} of {self._total} episodes are over: from now on every call of b fails")

    def _count(self, robot: str) -> None:
        if not self.failed:
            self._tell(f"b fails {robot}, which looks again and asks anew, {AGAIN} times at most")
        self.failed[robot] += 1
        self._row[robot] += 1
        self.most = max(self.most, self._row[robot])

    def _look(self) -> None:
        assert self._client is not None
        try:
            changes = self._client.get("/diagnostics/rollout")["changes"]
        except ClientError as error:
            self._tell(f"the server does not say how it is: {error}")
            return
        new, self._changes = changes[self._changes :], len(changes)
        for change in new:
            self._changed(change)

    def _changed(self, change: Mapping[str, Any]) -> None:
        slot = change["numbers"].get("slot")
        if change["kind"] == "drain" and slot == "b" and self.phase == "broken":
            self._drained(change["numbers"]["breaker"]["slots"]["b"])
        elif change["kind"] == "return" and slot == "b" and self.phase == "mended":
            self.phase = "over"
            self._tell(f"b answers a new episode of {self._on_b}, the probe, and is back: it gets its share again")

    def _drained(self, breaker: Mapping[str, Any]) -> None:
        after = time.monotonic() - self._began
        robots = ", ".join(sorted(self.failed))
        self._tell(f"b is drained, {after:.1f} s later: {breaker['why']}; the episodes it runs ({robots}) move to a")
        if self._post("/admin/faults", {"faults": []}):
            self.phase, self._on_b = "mended", "a robot"
            rest = breaker["cooldown_s"]
            self._tell(f"b is mended, and left alone for {rest:g} s; meanwhile a plays its new episodes")

    def _post(self, path: str, fields: Mapping[str, Any]) -> bool:
        assert self._client is not None
        try:
            self._client.post(path, fields)
        except ClientError as error:
            self._tell(f"the drill cannot go on: {error}")
            return False
        return True


class Solved:
    """Episodes solved, by task and version: `a`, `b`, or `moved` from one to the other while it was played."""

    def __init__(self) -> None:
        self.played: Counter[tuple[str, str]] = Counter()
        self.solved: Counter[tuple[str, str]] = Counter()
        self._seen: dict[str, set[str]] = {}

    def __call__(self, event: Event) -> None:
        """One event of a robot."""
        if event["event"] == "act" and event["status"] == 200:
            told = {"moved"} if event.get("moved") else {event.get("slot") or "nobody"}
            self._seen.setdefault(event["robot_id"], set()).update(told)
        elif event["event"] == "episode_end":
            seen = self._seen.pop(event["robot_id"], {"nobody"})
            by = seen.pop() if len(seen) == 1 else "moved"
            self.played[event["task"], by] += 1
            self.solved[event["task"], by] += event["success"]

    def cell(self, tasks: Iterable[str], by: str) -> str:
        """`solved/played` of some tasks by one version; empty if none was played."""
        keys = [(task, by) for task in tasks]
        played = sum(self.played[key] for key in keys)
        return f"{sum(self.solved[key] for key in keys)}/{played}" if played else ""


def even_run(robots: int, episodes: int, split: int) -> tuple[str, int]:
    """A run's name that spreads b's episodes evenly, and their number.

    The server assigns an episode by the hash of its name. By chance b gets between 10 and 28 of 96 episodes, and
    perhaps none for half a minute. So some hundred names are tried before the run. The best one gives b most nearly its
    share; among equals, the one with the shortest stretches without b, for all robots and for each.
    """
    total = robots * episodes
    share = round(total * (100 - split) / 100)
    if share < 2:
        raise ConfigError(f"{robots} robots x {episodes} episodes: too few for two of b at {100 - split} %")

    def unevenness(run: str) -> tuple[int, float]:
        on_b = [bucket(name) >= split for name in planned(run, robots, episodes)]
        own = max(_longest(on_b[robot::robots]) for robot in range(robots))
        return abs(sum(on_b) - share), own + _longest(on_b) / robots

    run = min((new_run() for _ in range(max(10, 50_000 // total))), key=unevenness)
    return run, sum(bucket(name) >= split for name in planned(run, robots, episodes))


def _longest(on_b: Sequence[bool]) -> int:
    """Length of the longest stretch without b."""
    return max(len(list(stretch)) if not b else 0 for b, stretch in groupby(on_b))
