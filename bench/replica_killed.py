"""Kill -9 of one of two replicas while 64 robots ask at a fixed rate: what the other replica's robots see of it.

Runs with a kill and runs without one alternate on the same server. Latency is counted from the time at which a robot
should have asked, so that no wait is left out. The robots run in this process and share two cores with the replicas,
and so does the start of the new replica.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load import STATE, quantile
from bench.report import Row, row, say
from bench.servers import Server, reflex, running

ROBOTS = 64
RATES = {"tiny": 5.0, "heavy": 1.0}  # requests a second of each robot: what one replica can answer alone
BEFORE, DURING, AFTER = 2.0, 1.0, 2.0  # seconds
WINDOWS = {"before": (-BEFORE, 0.0), "during": (0.0, DURING), "after": (DURING, DURING + AFTER)}


@dataclass
class _Robot:
    """One robot. asked: due time and latency of each answer; replica: where it was answered last."""

    port: int
    name: str
    rate: float
    asked: list[tuple[float, float]] = field(default_factory=list)
    replica: str = ""
    lost: int = 0
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, due: float, until: float) -> None:
        while due < until:
            await asyncio.sleep(due - time.perf_counter())
            await self._answered()
            self.asked.append((due, time.perf_counter() - due))
            due += 1.0 / self.rate
        if self.streams is not None:
            self.streams[1].close()

    async def _answered(self) -> None:
        while True:
            try:
                if await self._ask():
                    return
            except (ConnectionError, asyncio.IncompleteReadError):
                self.lost, self.streams = self.lost + 1, None

    async def _ask(self) -> bool:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(STATE | {"robot_id": self.name}).encode()
        head = f"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = self.streams
        writer.write(head.encode() + body)
        told = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in told[1:])}
        await reader.readexactly(int(headers["content-length"]))
        if told[0].split()[1] != "200":
            return False
        self.replica = headers["x-reflex-replica"]
        return True


def replica_killed(exports: Mapping[str, Path], scale: float) -> list[Row]:
    """With each policy in turn. exports: by the names of `RATES`."""
    return [row for name, export in exports.items() for row in _killed(name, export, scale)]


def _killed(policy: str, export: Path, scale: float) -> list[Row]:
    """p99 of the robots of the other replica before, during and after, with and without a kill."""
    rate = RATES[policy]
    found: dict[tuple[bool, str], list[float]] = {}
    again, lost = [], []
    with running(reflex(export, "--replicas", "2", name="two replicas", pinned=False)) as (server,):
        asyncio.run(_round(server, rate, False))  # costs are learned
        for i in range(max(3, round(5 * scale))):
            for kill in (False, True) if i % 2 else (True, False):
                say(f"  a killed replica, {policy}: round {i + 1}, {'kill' if kill else 'control'}")
                pid, began, robots = asyncio.run(_round(server, rate, kill))
                others = [robot for robot in robots if robot.replica == "replica-1" and not robot.lost]
                for window, (low, high) in WINDOWS.items():
                    within = _between(others, began + low, began + high)
                    found.setdefault((kill, window), []).append(quantile(within, 0.99) * 1e3)
                if kill:
                    hit = [robot for robot in robots if robot.lost]
                    again.append(max(_between(hit, began - 1.0, began + DURING + AFTER)) * 1e3)
                    lost.append(float(len(hit)))
                    _wait_for_another(server, pid)
    rows = []
    for kill in (False, True):
        case = f"{policy}, {rate:g}/s each, " + ("a kill" if kill else "none")
        rows += [row(case, f"p99 of the other replica's robots, {w}", found[kill, w], "ms") for w in WINDOWS]
    for window in WINDOWS:
        ratios = [one / two for one, two in zip(found[True, window], found[False, window], strict=True)]
        rows.append(row(case, f"p99 {window}, with a kill over without", ratios, "x"))
    rows.append(row(case, "robots whose connection was lost", lost, ""))
    rows.append(row(case, "longest wait of the lost replica's robots", again, "ms", most=1000.0))
    return rows


async def _round(server: Server, rate: float, kill: bool) -> tuple[int, float, list[_Robot]]:
    """The pid of the replica that may be killed, the time of the kill, and the robots."""
    pid = _told(server)["pid"]
    began = time.perf_counter() + 0.5 + BEFORE
    robots = [_Robot(server.port, f"robot-{i}", rate) for i in range(ROBOTS)]
    starts = [began - BEFORE - 0.3 + i / ROBOTS / rate for i in range(ROBOTS)]
    tasks = [robot.run(due, began + DURING + AFTER) for robot, due in zip(robots, starts, strict=True)]

    async def killer() -> None:
        await asyncio.sleep(began - time.perf_counter())
        if kill:
            os.kill(pid, signal.SIGKILL)

    await asyncio.gather(killer(), *tasks)
    return pid, began, robots


def _between(robots: Iterable[_Robot], low: float, high: float) -> list[float]:
    return [latency for robot in robots for due, latency in robot.asked if low <= due < high]


def _told(server: Server) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(server.get("/health"))["replicas"][0]
    return told


def _wait_for_another(server: Server, pid: int) -> None:
    while (told := _told(server))["state"] != "ready" or told["pid"] == pid:
        time.sleep(0.05)
