"""Callers that ask, read their stream to its end and ask again, in a process of their own: `python -m bench.callers`.

A job as JSON on standard input, the result on standard output. Each caller has a connection of its own; one thread
serves them all, so that those whose streams end together ask again one by one, some tens of microseconds apart.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from bench.streams import EVENT, PATIENCE

LAST = b"\r\n0\r\n\r\n"


@dataclass
class Job:
    """What to ask of the server at `port`. tokens: of each answer, drawn from this range. seconds: measured, after
    `practice` seconds that are not."""

    port: int
    model: str
    callers: int
    tokens: tuple[int, int]
    seconds: float
    practice: float = 1.0
    seed: int = 0


@dataclass
class Asked:
    """What came back. answers: that began and ended while it was measured; firsts: seconds to their first tokens."""

    answers: int
    firsts: list[float]


def ask(job: Job) -> Asked:
    """Run a job in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.callers"],
        input=json.dumps(asdict(job)).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=job.practice + job.seconds + 3 * PATIENCE,
    )
    return Asked(**json.loads(done.stdout))


class _Caller:
    def __init__(self, job: Job, number: int) -> None:
        self._job, self._rng = job, random.Random(job.seed * 1000 + number)
        self.sock = socket.create_connection(("127.0.0.1", job.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.asked = 0.0
        self.first: float | None = None
        self._tail = b""

    def ask(self) -> None:
        rng, job = self._rng, self._job
        prompt = [rng.randrange(32, 250) for _ in range(8)]
        body = {"model": job.model, "prompt": prompt, "max_tokens": rng.randint(*job.tokens), "temperature": 0}
        data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{job.port}\r\nContent-Type: application/json\r\n"
        self.asked, self.first, self._tail = time.perf_counter(), None, b""
        self.sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def take(self) -> bool:
        """Read what came; whether that was the end."""
        data = self.sock.recv(1 << 16)
        if not data or (self.first is None and data.startswith(b"HTTP/1.1 ") and b" 200 " not in data[:16]):
            raise RuntimeError(f"a caller was refused: {data[:600].decode(errors='replace')}")
        seen = self._tail + data
        if self.first is None and EVENT in seen:
            self.first = time.perf_counter() - self.asked
        self._tail = seen[-12:]
        return seen.endswith(LAST)


def _run(job: Job) -> Asked:
    found = Asked(0, [])
    with selectors.DefaultSelector() as selector:
        for number in range(job.callers):
            caller = _Caller(job, number)
            selector.register(caller.sock, selectors.EVENT_READ, caller)
            caller.ask()
        begin = time.perf_counter() + job.practice
        while time.perf_counter() < begin + job.seconds:
            for key, _ in selector.select(PATIENCE):
                caller = key.data
                if not caller.take():
                    continue
                if caller.asked >= begin and caller.first is not None:
                    found.answers += 1
                    found.firsts.append(caller.first)
                caller.ask()
        for key in selector.get_map().values():
            key.data.sock.close()
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(asdict(_run(Job(**asked | {"tokens": tuple(asked["tokens"])})))))
