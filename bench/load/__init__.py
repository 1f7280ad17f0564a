"""Load on a policy server: `python -m bench.load URL`, and `ask` for the benchmarks beside it.

A closed loop sends again as soon as it is answered; an open loop sends at the times of a Poisson process and counts
latency from the time it should have sent. The first `warm` seconds are not counted.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.load.generator import OK, BenchSide, LoadJob, LoadLine, LoadRound
from bench.load.wires.connection import masked, request
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.statistics import percentile

STATE = {"state": [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]}


@dataclass
class Job:
    """What to ask. callers: connections in a closed loop; with `rate` (requests a second) an open loop over as many
    connections as it needs. pids: whose CPU time to count. probe: path asked every 10 ms beside the load. episodes: as
    many are named in turn; 0 names none. wire: "json", or how `packed` is sent, which is base64: as the body of
    "msgpack" requests, or as frames of "openpi"."""

    port: int
    path: str = "/act"
    callers: int = 32
    seconds: float = 1.0
    warm: float = 0.3
    rate: float = 0.0
    seed: int = 0
    probe: str = ""
    episodes: int = 0
    wire: str = "json"
    packed: str = ""
    pids: list[int] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=lambda: dict(STATE))

    def load(self) -> LoadJob:
        """The same for the generator."""
        return LoadJob(
            sides=[BenchSide(f"http://127.0.0.1:{self.port}", self.wire * (self.wire == "openpi"), self._made())],
            loop="poisson" if self.rate else "closed",
            robots=min(2000, max(self.callers, round(self.rate))),
            rounds=1,
            seconds=self.seconds,
            warmup=self.warm,
            rate=self.rate,
            seed=self.seed,
            beside=self.probe,
            pids=self.pids,
            pinned=True,
        )

    def _made(self) -> list[bytes]:
        if self.packed:
            packed = base64.b64decode(self.packed)
            return [masked(packed) if self.wire == "openpi" else self._request(packed)]
        bodies = [self.body | {"episode_id": f"episode-{i}"} for i in range(self.episodes)] or [self.body]
        return [self._request(json.dumps(body).encode()) for body in bodies]

    def _request(self, body: bytes) -> bytes:
        headers = {"Host": "localhost", "Content-Type": f"application/{self.wire}"}
        return request("POST", self.path, headers, body)


@dataclass
class Answered:
    """What came back. Seconds. sizes: answers by the batch size they name. cpu: seconds of `pids` during the load.
    loop: those of the first one's main thread, which is where an event loop runs."""

    requests: int
    seconds: float
    latencies: list[float]
    sizes: dict[int, int]
    failed: int
    cpu: float
    probes: list[float]
    loop: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def mean_batch(self) -> float:
        """Requests per batch: an answer of a batch of n stands for 1/n batches."""
        batches = sum(count / size for size, count in self.sizes.items())
        return sum(self.sizes.values()) / batches if batches else 0.0

    def quantile(self, q: float) -> float:
        return quantile(self.latencies, q)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of some values, see `percentile`; NaN without any."""
    return percentile(sorted(values), q) if values else float("nan")


def ask(job: Job) -> Answered:
    """Run a job in a process of its own, on the cores that are not the server's."""
    command = [sys.executable, "-m", "bench.load.process"]
    limit = 60 + 3 * (job.seconds + job.warm)
    done = subprocess.run(
        command, input=msgspec.json.encode(job.load()), stdout=subprocess.PIPE, check=False, timeout=limit
    )
    line = msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else b"{}", type=LoadLine)
    if line.rounds is None:
        raise ReflexError(line.error or f"the load generator ended with status {done.returncode}")
    return _answered(line.rounds[0], bool(job.rate))


def _answered(found: LoadRound, is_open: bool) -> Answered:
    good = [s for s in found.samples if s.kind == OK]
    if not is_open:  # those that ended in the measured part
        good = good[: found.answered]
    sizes: dict[int, int] = {}
    for sample in good:
        if sample.batch:
            sizes[sample.batch] = sizes.get(sample.batch, 0) + 1
    failed = sum(s.kind != OK for s in found.samples)
    latencies = [s.done - (s.due if is_open else s.sent) for s in good]
    cpu, loop = found.spent
    return Answered(len(good), found.seconds, latencies, sizes, failed, cpu, found.beside, loop)
