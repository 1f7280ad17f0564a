"""A replica or Ray's proxy is killed under load, and replicas are drained while episodes run."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from on_ray.server import PATIENCE, RayServer

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray installs it into its own environment")

ROBOTS = 8
KNOWN = {"not_ready", "shutting_down"}


class Robots:
    """Robots that ask without pause, each on its own connection: in an episode that does not end, or in none."""

    def __init__(self, server: RayServer, name: str, field: str = "episode_id") -> None:
        self.server, self.name, self.field = server, name, field
        self.stop = threading.Event()
        self.answers: list[list[Any]] = [[] for _ in range(ROBOTS)]  # (time, replica) or (time, None) for none
        self.moved = [0] * ROBOTS  # answers that said policy_changed
        self.errors: list[str] = []
        self.told = threading.Condition()
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(ROBOTS)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        while not self.stop.is_set():
            try:
                answer = self.server.act(connection, **{self.field: f"{self.name}-{number}"})
                replica = answer.replica if answer.status == 200 else None
                if replica is None and answer.json.get("error") not in KNOWN:
                    self.errors.append(f"{answer.status} {answer.body[:200]!r}")
            except (OSError, http.client.HTTPException):  # the proxy is gone: connect again
                connection.close()
                replica, answer = None, None
                self.stop.wait(0.02)
            with self.told:
                self.answers[number].append((time.monotonic(), replica))
                if replica is not None and answer is not None and answer.json.get("policy_changed"):
                    self.moved[number] += 1
                self.told.notify_all()
        connection.close()

    def reach(self, condition: Callable[[], bool]) -> None:
        with self.told:
            assert self.told.wait_for(condition, PATIENCE), self.errors

    def answered(self, since: float, times: int = 3) -> None:
        """Wait until every robot has so many answers since then."""
        self.reach(lambda: all(sum(at > since and r is not None for at, r in own) >= times for own in self.answers))

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors

    def gap(self, since: float) -> float:
        """The longest time from then to the first answer of a robot."""
        return max(next(at for at, r in own if at > since and r is not None) - since for own in self.answers)


def test_x7_a_killed_replica_loses_its_own_robots_for_a_moment_and_no_others(pair: RayServer) -> None:
    robots = Robots(pair, "replica")
    robots.answered(0.0)
    homes = [own[-1][1] for own in robots.answers]
    replicas = sorted(pair.pids("ray::ServeReplica"))
    assert len(replicas) == 2
    killed = time.monotonic()
    os.kill(replicas[0], signal.SIGKILL)
    robots.answered(killed)
    gap = robots.gap(killed)
    while len(pair.replicas()) < 2:  # there is another one
        assert time.monotonic() - killed < PATIENCE
    robots.end()
    kept = [n for n, own in enumerate(robots.answers) if all(r == homes[n] for at, r in own if at > killed)]
    survivor = next(own[-1][1] for own in robots.answers)
    assert {own[-1][1] for own in robots.answers} == {survivor}, "an episode stays, also when there is another replica"
    assert kept == [n for n, home in enumerate(homes) if home == survivor], "others lost no answer and did not move"
    for n, own in enumerate(robots.answers):  # each change of replica was told, with the first answer after it
        places = [r for _, r in own if r]
        assert robots.moved[n] == sum(a != b for a, b in pairwise(places)), (n, robots.moved[n])
    print(f"\na killed replica: all answered again after {gap:.2f} s; {len(kept)} of {ROBOTS} robots not concerned")
    assert len(pair.replicas()) == 2


def test_x7_a_killed_proxy_comes_back_and_replicas_keep_what_they_have(pair: RayServer) -> None:
    robots = Robots(pair, "proxy")
    robots.answered(0.0)
    homes = [own[-1][1] for own in robots.answers]
    (proxy,) = pair.pids("ray::ProxyActor")
    killed = time.monotonic()
    os.kill(proxy, signal.SIGKILL)
    robots.answered(killed)
    gap = robots.gap(killed)
    robots.end()
    assert [own[-1][1] for own in robots.answers] == homes
    print(f"\na killed proxy: all robots answered again after {gap:.2f} s")


def test_x7_replicas_come_with_the_backlog_and_leave_without_an_error() -> None:
    options = ["--replicas", "1", "--max-replicas", "2", "--replica-cpus", "0.5", "--scale-out-delay-s", "0.5"]
    options += ["--scale-in-delay-s", "1", "--target-backlog-s", "0.05", "--inject-latency-ms", "40"]
    options += ["--max-batch-size", "1"]
    with RayServer("--port", "0", *options) as server:
        robots = Robots(server, "load", "robot_id")
        robots.reach(lambda: len({r for own in robots.answers for _, r in own if r}) == 2)
        robots.end()
        places: dict[str, list[str]] = {f"ep-{n}": [] for n in range(6)}  # their load alone needs one replica
        moved = dict.fromkeys(places, 0)
        began, last = time.monotonic(), 2
        while last > 1 and time.monotonic() - began < PATIENCE:
            for episode, own in places.items():
                answer = server.act(episode_id=episode)
                assert answer.status == 200, answer.body
                own.append(answer.replica)
                moved[episode] += answer.json.get("policy_changed", False)
            last = len({own[-1] for own in places.values()})
        assert last == 1
        for episode, own in places.items():  # it ended where it began, or was told
            assert moved[episode] == sum(a != b for a, b in pairwise(own))
        assert sum(moved.values()) > 0
