"""Many readers of streamed answers, in a process of their own that only counts: `python -m bench.streams`.

A job as JSON on standard input, the result on standard output. Every stream is asked for at once and wants the same
number of tokens, so that all of them run from the first step to the last. An event is one token: counted as the bytes
that begin it, never parsed. Times are those at which bytes were read from the socket.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

EVENT, END, FAILED = b'data: {"id', b"data: [DONE]", b'data: {"error'
_TAIL = 12  # bytes kept of what came: none of these is longer
PATIENCE = 60.0  # seconds without a byte
WORDS = "the robot keeps a steady pace while others talk and every step is short enough to be forgotten "


@dataclass
class Job:
    """What to ask of the server at `port`. tokens: of each stream. prompt: tokens of each prompt. pids: whose CPU time
    is counted, each by itself. large: characters of prompts that are too long for the model, sent one after the other
    beside the streams; 0: none. kill: a process that is killed once every stream has a tenth of its tokens; then it is
    tried until a request is answered again."""

    port: int
    model: str
    streams: int = 32
    tokens: int = 512
    prompt: int = 16
    seed: int = 0
    large: int = 0
    kill: int = 0
    pids: list[int] = field(default_factory=list)


@dataclass
class Streamed:
    """What came back; seconds. tokens: of streams that came to their end. events: of all. firsts: time to the first
    token of each. gaps: between two tokens of a stream, all of them. cpu: of `pids`. large: statuses of the large
    requests. told: from the kill until each stream ended; answered: until a new request was."""

    tokens: int
    events: int
    seconds: float
    firsts: list[float]
    gaps: list[float]
    cpu: list[float]
    large: list[int]
    told: list[float]
    answered: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def ask(job: Job) -> Streamed:
    """Run a job in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.streams"],
        input=json.dumps(asdict(job)).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=5 * PATIENCE,
    )
    return Streamed(**json.loads(done.stdout))


def _post(port: int, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class _Reader:
    """One stream. times: of its tokens."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        prompt = [rng.randrange(300, 2000) for _ in range(job.prompt)]
        body = {"model": job.model, "prompt": prompt, "max_tokens": job.tokens, "temperature": 0}
        self.request = _post(job.port, body | {"stream": True, "ignore_eos": True})
        self.sock = socket.create_connection(("127.0.0.1", job.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.times: list[float] = []
        self.asked = self.ended = 0.0
        self.whole = False
        self._tail = b""

    def ask(self) -> None:
        self.sock.setblocking(True)
        self.asked = time.perf_counter()
        self.sock.sendall(self.request)
        self.sock.setblocking(False)

    def take(self) -> None:
        """Count what came."""
        try:
            data = self.sock.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        now = time.perf_counter()
        if not self.times and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a stream was refused: {data[:600].decode(errors='replace')}")
        joined = self._tail + data
        new = joined.count(EVENT) - self._tail.count(EVENT)
        self.times += [now] * new
        self._tail = joined[-_TAIL:]
        if END in joined:
            self.ended, self.whole = now, True
        elif not data or FAILED in joined:
            self.ended = now


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        rng = random.Random(job.seed)
        self.readers = [_Reader(job, rng) for _ in range(job.streams)]
        self.selector = selectors.DefaultSelector()
        for reader in self.readers:
            self.selector.register(reader.sock, selectors.EVENT_READ, reader)

    def read(self, enough: Callable[[], bool]) -> None:
        """Until `enough`, or nothing is left to come."""
        while self.selector.get_map() and not enough():
            ready = self.selector.select(PATIENCE)
            if not ready:
                raise RuntimeError(f"nothing came for {PATIENCE:g} s")
            for key, _ in ready:
                reader: _Reader = key.data
                reader.take()
                if reader.ended:
                    self.selector.unregister(reader.sock)

    def streams(self) -> Streamed:
        """All of them, to their end."""
        cpu = [_cpu(pid) for pid in self.job.pids]
        began = time.perf_counter()
        for reader in self.readers:
            reader.ask()
        killed = 0.0
        if self.job.kill:
            first = max(1, self.job.tokens // 10)
            self.read(lambda: min(len(reader.times) for reader in self.readers) >= first)
            killed = time.perf_counter()
            os.kill(self.job.kill, signal.SIGKILL)
        self.read(lambda: False)
        seconds = max(reader.ended for reader in self.readers) - began
        spent = [_cpu(pid) - before for pid, before in zip(self.job.pids, cpu, strict=True)]
        told = [reader.ended - killed for reader in self.readers if not reader.whole] if killed else []
        if not killed and not all(reader.whole for reader in self.readers):
            raise RuntimeError("a stream broke off")
        return Streamed(
            tokens=self.job.tokens * sum(reader.whole for reader in self.readers),
            events=sum(len(reader.times) for reader in self.readers),
            seconds=seconds,
            firsts=[reader.times[0] - reader.asked for reader in self.readers if reader.times],
            gaps=[b - a for reader in self.readers for a, b in itertools.pairwise(reader.times)],
            cpu=spent, large=[], told=told, answered=_answered(self.job) - killed if killed else 0.0,
        )  # fmt: skip


def _answered(job: Job) -> float:
    """When a request was answered again."""
    body = json.dumps({"model": job.model, "prompt": [500], "max_tokens": 1})
    end = time.perf_counter() + PATIENCE
    while time.perf_counter() < end:
        if _status(job.port, body) == 200:
            return time.perf_counter()
        time.sleep(0.01)
    raise RuntimeError(f"no answer within {PATIENCE:g} s of a kill")


def _status(port: int, body: str) -> int:
    """What a request is answered with; 0 when it is not."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


class _Large:
    """Somebody who sends prompts that are too long, one after the other, until told to stop."""

    def __init__(self, job: Job) -> None:
        prompt = (WORDS * (job.large // len(WORDS) + 1))[: job.large]
        self._port, self._body = job.port, json.dumps({"model": job.model, "prompt": prompt, "max_tokens": 1})
        self.statuses: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def start(self) -> None:
        self._thread.start()
        time.sleep(0.1)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def _send(self) -> None:
        while not self._stop.is_set():
            self.statuses.append(_status(self._port, self._body))


def _cpu(pid: int) -> float:
    """CPU seconds of one process so far, its threads included, its children not."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    """Read the job, run it, write the result."""
    job = Job(**json.load(sys.stdin))
    run = _Run(job)
    large = _Large(job) if job.large else None
    if large is not None:
        large.start()
    found = run.streams()
    if large is not None:
        large.stop()
        found.large = large.statuses
    json.dump(asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
