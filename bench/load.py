"""The load generator: prebuilt request bytes on plain sockets and one selector, because it shares the machine.

It speaks HTTP/1.1, or as a robot of openpi the websocket protocol: one masked frame out, one frame back.

Runs as a process of its own, `python -m bench.load`: a job as JSON on standard input, the result on standard output.
A closed loop sends again as soon as it is answered; an open loop sends at the times of a Poisson process and counts
latency from the time it should have sent. The first `warm` seconds are not counted.
"""

from __future__ import annotations

import base64
import json
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from bench.machine import cores, pin
from reflex_runtime.core.statistics import percentile

BINARY = b"\x82"  # the first byte of a frame with an answer; that of one with an error is \x81
STATE = {"state": [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]}


@dataclass
class Job:
    """What to ask. callers: connections in a closed loop; with `rate` (requests a second) an open loop over as many
    connections as it needs. pids: whose CPU time to count. probe: path asked every 10 ms beside the load. episodes: as
    many are named in turn, one a connection; 0 names none. wire: "json", or how `packed` is sent, which is base64: as
    the body of "msgpack" requests, or as frames of "openpi"."""

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

    __slots__ = ("buffer", "busy", "frames", "need", "request", "rest", "sent", "sock")

    def __init__(self, port: int, request: bytes, frames: str = "") -> None:
        """frames: the path on which to open a websocket; else this is HTTP."""
        self.request, self.frames = request, bool(frames)
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if frames:
            _open_websocket(self.sock, frames)
        self.sock.setblocking(False)
        self.buffer = bytearray()
        self.rest = memoryview(b"")
        self.need = 0
        self.sent = 0.0
        self.busy = False

    def send(self, request: bytes, at: float) -> None:
        self.sent, self.busy, self.rest, self.need = at, True, memoryview(request), 0
        self.buffer.clear()
        self.send_rest()

    def send_rest(self) -> None:
        """As much as the socket takes."""
        try:
            self.rest = self.rest[self.sock.send(self.rest) :]
        except BlockingIOError:
            return

    def answer(self) -> bytes | None:
        """The whole answer once it is there."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError("the server closed a connection")
        self.buffer += data
        if not self.need:
            self.need = _frame_size(self.buffer) if self.frames else _answer_size(self.buffer)
        return bytes(self.buffer) if 0 < self.need <= len(self.buffer) else None


def _open_websocket(sock: socket.socket, path: str) -> None:
    """Upgrade, and read the first frame: what the server says of itself."""
    sock.sendall(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cmVmbGV4LWJlbmNoLTEyMw==\r\n\r\n".encode()
    )
    sock.settimeout(30.0)
    data = b""
    while True:
        head, _, frame = data.partition(b"\r\n\r\n")
        if 0 < _frame_size(frame) <= len(frame):
            return
        data += (more := sock.recv(65536))
        if not more or (frame and b" 101 " not in head[:16]):
            raise ConnectionError(f"no websocket: {data[:300]!r}")


def _frame_size(data: bytes | bytearray) -> int:
    """Bytes of the frame that begins here, 0 while that is not known. Servers do not mask."""
    if len(data) < 10:
        return 0
    short = data[1]
    if short < 126:
        return 2 + short
    return int(4 + struct.unpack_from(">H", data, 2)[0] if short == 126 else 10 + struct.unpack_from(">Q", data, 2)[0])


def masked(payload: bytes) -> bytes:
    """A binary frame of a client. The mask is zeros: servers unmask it like any other."""
    head = struct.pack(">BBQ", 0x82, 0xFF, len(payload))
    if len(payload) <= 0xFFFF:
        head = struct.pack(">BBH", 0x82, 0xFE, len(payload))
    return head + bytes(4) + payload


def _answer_size(data: bytes | bytearray) -> int:
    """Bytes of the HTTP answer that begins here, 0 while its head is not whole."""
    end = data.find(b"\r\n\r\n")
    return 0 if end < 0 else end + 4 + _length(bytes(data[:end]))


def _length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at < 0:
        raise RuntimeError(f"no content-length in {head!r}")
    return int(lower[at + 15 :].split(b"\r\n", 1)[0])


def _request(method: str, path: str, body: bytes = b"", form: str = "json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/{form}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.requests = _requests(job)
        self.connected = 0
        self.selector = selectors.DefaultSelector()
        self.latencies: list[float] = []
        self.sizes: Counter[int] = Counter()
        self.failed = 0
        self.probes: list[float] = []
        self.counting = False

    def connect(self, probe: bool = False) -> _Caller:
        frames = self.job.path if self.job.wire == "openpi" and not probe else ""
        caller = _Caller(self.job.port, self.requests[self.connected % len(self.requests)], frames)
        self.connected += 1
        self.selector.register(caller.sock, selectors.EVENT_READ, (caller, probe))
        return caller

    def send(self, caller: _Caller, request: bytes, at: float) -> None:
        """Send it; what the socket does not take now follows when it does."""
        caller.send(request, at)
        if caller.rest:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self.selector.modify(caller.sock, both, self.selector.get_key(caller.sock).data)

    def take(self, timeout: float, again: Callable[[_Caller, float], None]) -> None:
        """Read what is there; `again` decides what an answered caller does next."""
        for key, ready in self.selector.select(timeout):
            caller, probe = key.data
            if ready & selectors.EVENT_WRITE:
                caller.send_rest()
                if not caller.rest:
                    self.selector.modify(caller.sock, selectors.EVENT_READ, key.data)
            data = caller.answer() if ready & selectors.EVENT_READ else None
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
        if not data.startswith((b"HTTP/1.1 200", BINARY)):
            self.failed += 1
            return
        self.latencies.append(latency)
        at = data.rfind(b'"size":')
        if at >= 0:
            self.sizes[int(data[at + 7 : at + 11].split(b",")[0].split(b"}")[0])] += 1
        elif (at := data.rfind(b"\xa4size")) >= 0:
            self.sizes[data[at + 5]] += 1  # msgpack, up to 127

    def closed(self) -> tuple[float, float, float]:
        callers = [self.connect() for _ in range(self.job.callers)]
        probe = self.connect(probe=True) if self.job.probe else None
        look = _request("GET", self.job.probe)

        def again(caller: _Caller, now: float) -> None:
            self.send(caller, caller.request, now)

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
                self.send(probe, look, now)
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
            self.send(caller, caller.request, due)
            due += rng.expovariate(self.job.rate)
        spent, looped = _cpu(self.job.pids) - cpu, _loop(self.job.pids) - loop
        while len(idle) < len(self.selector.get_map()) and time.perf_counter() < end + 10.0:
            self.take(0.050, again)
        return self.job.seconds, spent, looped


def _requests(job: Job) -> list[bytes]:
    if job.packed:
        packed = base64.b64decode(job.packed)
        return [masked(packed) if job.wire == "openpi" else _request("POST", job.path, packed, job.wire)]
    bodies = [job.body | {"episode_id": f"episode-{i}"} for i in range(job.episodes)] or [job.body]
    return [_request("POST", job.path, json.dumps(body).encode()) for body in bodies]


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
