"""The load generator: prebuilt request bytes on plain sockets and one selector, because it shares the machine.

Runs as a process of its own, `python -m bench.load`: a job as JSON on standard input, the result on standard output.
A closed loop sends again as soon as it is answered; an open loop sends at the times of a Poisson process and counts
latency from the time it should have sent. The first `warm` seconds are not counted.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from bench.machine import cores, pin
from reflex_runtime.core.percentile import percentile

STATE = {"state": [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]}


@dataclass
class Job:
    """What to ask. callers: connections in a closed loop; with `rate` (requests a second) an open loop over as many
    connections as it needs. pids: whose CPU time to count. probe: path asked every 10 ms beside the load. episodes: as
    many are named in turn, one a connection; 0 names none."""

    port: int
    path: str = "/act"
    callers: int = 32
    seconds: float = 1.0
    warm: float = 0.3
    rate: float = 0.0
    seed: int = 0
    probe: str = ""
    episodes: int = 0
    pids: list[int] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=lambda: dict(STATE))


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
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=json.dumps(asdict(job)).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60 + 3 * (job.seconds + job.warm),
    )
    found = json.loads(done.stdout)
    return Answered(**{**found, "sizes": {int(k): v for k, v in found["sizes"].items()}})


class _Caller:
    """One keep-alive connection."""

    __slots__ = ("buffer", "busy", "need", "request", "sent", "sock")

    def __init__(self, port: int, request: bytes) -> None:
        self.request = request
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.buffer = b""
        self.need = 0
        self.sent = 0.0
        self.busy = False

    def send(self, request: bytes, at: float) -> None:
        self.sent, self.busy, self.buffer, self.need = at, True, b"", 0
        if self.sock.send(request) != len(request):
            raise RuntimeError("a small request did not fit the socket's buffer")

    def answer(self) -> bytes | None:
        """The whole answer once it is there."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError("the server closed a connection")
        self.buffer = data = self.buffer + data if self.buffer else data
        if not self.need:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return None
            self.need = end + 4 + _length(data[:end])
        return data if len(data) >= self.need else None


def _length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at < 0:
        raise RuntimeError(f"no content-length in {head!r}")
    return int(lower[at + 15 :].split(b"\r\n", 1)[0])


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        bodies = [job.body | {"episode_id": f"episode-{i}"} for i in range(job.episodes)] or [job.body]
        self.requests = [_request("POST", job.path, json.dumps(body).encode()) for body in bodies]
        self.connected = 0
        self.selector = selectors.DefaultSelector()
        self.latencies: list[float] = []
        self.sizes: Counter[int] = Counter()
        self.failed = 0
        self.probes: list[float] = []
        self.counting = False

    def connect(self, probe: bool = False) -> _Caller:
        caller = _Caller(self.job.port, self.requests[self.connected % len(self.requests)])
        self.connected += 1
        self.selector.register(caller.sock, selectors.EVENT_READ, (caller, probe))
        return caller

    def take(self, timeout: float, again: Callable[[_Caller, float], None]) -> None:
        """Read what is there; `again` decides what an answered caller does next."""
        for key, _ in self.selector.select(timeout):
            caller, probe = key.data
            data = caller.answer()
            if data is None:
                continue
            caller.busy = False
            now = time.perf_counter()
            if self.counting:
                self.count(data, now - caller.sent, probe)
            if not probe:
                again(caller, now)

    def count(self, data: bytes, latency: float, probe: bool) -> None:
        if probe:
            self.probes.append(latency)
            return
        if not data.startswith(b"HTTP/1.1 200"):
            self.failed += 1
            return
        self.latencies.append(latency)
        at = data.rfind(b'"size":')
        if at >= 0:
            self.sizes[int(data[at + 7 : at + 11].split(b",")[0].split(b"}")[0])] += 1

    def closed(self) -> tuple[float, float, float]:
        callers = [self.connect() for _ in range(self.job.callers)]
        probe = self.connect(probe=True) if self.job.probe else None
        look = _request("GET", self.job.probe)

        def again(caller: _Caller, now: float) -> None:
            caller.send(caller.request, now)

        for caller in callers:
            again(caller, time.perf_counter())
        began = start = time.perf_counter()
        cpu, loop, next_probe = 0.0, 0.0, start
        while True:
            now = time.perf_counter()
            if not self.counting and now - start >= self.job.warm:
                self.counting, began, cpu, loop = True, now, _cpu(self.job.pids), _loop(self.job.pids)
            if self.counting and now - began >= self.job.seconds:
                return now - began, _cpu(self.job.pids) - cpu, _loop(self.job.pids) - loop
            if probe is not None and now >= next_probe and not probe.busy:
                probe.send(look, now)
                next_probe = now + 0.010
            self.take(0.010 if probe is not None else 0.050, again)

    def open(self) -> tuple[float, float, float]:
        rng = random.Random(self.job.seed)
        idle: deque[_Caller] = deque(self.connect() for _ in range(self.job.callers))

        def again(caller: _Caller, now: float) -> None:
            idle.append(caller)

        start = time.perf_counter()
        end, due, begins = start + self.job.warm + self.job.seconds, start, start + self.job.warm
        cpu = loop = 0.0
        while due < end:
            now = time.perf_counter()
            if not self.counting and now >= begins:
                self.counting, cpu, loop = True, _cpu(self.job.pids), _loop(self.job.pids)
            if now < due:
                self.take(due - now if due - now > 0.0015 else 0.0, again)  # the selector's clock is coarse
                continue
            caller = idle.popleft() if idle else self.connect()
            caller.send(caller.request, due)
            due += rng.expovariate(self.job.rate)
        spent, looped = _cpu(self.job.pids) - cpu, _loop(self.job.pids) - loop
        while len(idle) < len(self.selector.get_map()) and time.perf_counter() < end + 10.0:
            self.take(0.050, again)
        return self.job.seconds, spent, looped


def _cpu(pids: Sequence[int]) -> float:
    """CPU seconds of these processes so far, their threads included."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def _loop(pids: Sequence[int]) -> float:
    """CPU seconds so far of the first process's main thread; nan where the system does not count so finely."""
    try:
        with open(f"/proc/{pids[0]}/task/{pids[0]}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):
        return float("nan")


def main() -> None:
    """Read the job, run it, write the result."""
    job = Job(**json.load(sys.stdin))
    pin(cores()[1])
    run = _Run(job)
    seconds, cpu, loop = run.open() if job.rate else run.closed()
    requests = len(run.latencies)
    answered = Answered(requests, seconds, run.latencies, dict(run.sizes), run.failed, cpu, run.probes, loop)
    json.dump(asdict(answered), sys.stdout)


if __name__ == "__main__":
    main()
