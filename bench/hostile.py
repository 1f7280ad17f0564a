"""`/health` beside callers that mean no good: the largest bodies there may be, thousands that hang up at once, and
thousands whose deadlines pass at once.

Loopback only, bounded in count and time. The server has one core, the callers another where there are two.
`python -m bench.hostile bodies`, `… hangups` and `… expire` are the callers: a job as JSON on standard input, counts on
standard output.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from bench import servers
from bench.load import STATE, quantile
from bench.machine import cores, pin
from bench.report import Row, row, say

CLIENTS, SECONDS = 8, 3.0  # that send bodies, each kind for so long
CALLERS = 10_000  # that hang up
WITHIN = 6.0  # seconds for them to come in
LARGEST = 16 * 2**20
PROBE_EVERY = 0.01
KINDS = (
    "a million keys", "numbers", "instruction", "a picture that is none", "escapes", "msgpack numbers", "half bodies",
)  # fmt: skip


def hostile(export: Path, scale: float) -> list[Row]:
    """`/health` and the server's peak of memory while eight clients send the largest bodies, and while many leave."""
    rows = []
    server = servers.reflex(export)
    try:
        rows += _health("nobody else", _beside(server.port, "nothing", {"seconds": SECONDS})[0], 20.0)
    finally:
        server.stop()
    for kind in KINDS:
        server = servers.reflex(export, name=kind)
        try:
            times, told = _beside(server.port, "bodies", {"kind": kind, "seconds": SECONDS * max(scale, 0.3)})
            rows += _health(f"8 clients send {kind}", times, 20.0)
            rows.append(row(f"8 clients send {kind}", "peak of memory", [_peak(server)], "MB", most=800.0))
            say(f"  {kind}: {told}")
        finally:
            server.stop()
    count = int(CALLERS * scale)
    server = servers.reflex(
        export, "--max-queue", "100000", "--inject-latency-ms", "2000", "--batch-timeout-ms", "0",
        *_more_connections(count),
    )  # fmt: skip
    try:
        times, told = _beside(server.port, "hangups", {"callers": count, "within": WITHIN})
        case = f"{told.get('came', 0):,} callers hang up"
        rows += _health(case, times, 20.0)
        say(f"  hang up: {told}")
    finally:
        server.stop()
    return rows + expiring(export, scale)


def expiring(export: Path, scale: float) -> list[Row]:
    """`/health` while the deadlines of thousands pass in one moment, of requests that wait behind a batch of 4 s."""
    count = min(int(CALLERS * scale), 5_000)
    parts: dict[str, list[Probed]] = {"connect": [], "are answered": [], "leave": []}
    for i in range(3 if scale >= 1.0 else 1):
        server = servers.reflex(
            export, "--max-queue", "100000", "--inject-latency-ms", "4000", "--batch-timeout-ms", "0",
            *_more_connections(count),
        )  # fmt: skip
        try:
            times, told = _beside(server.port, "expire", {"callers": count, "within": WITHIN})
        finally:
            server.stop()
        passed, answered = told.pop("passed"), told.pop("answered")
        say(f"  deadlines pass, round {i + 1}: {told}, answered within {answered - passed:.2f} s")
        for probe in times:
            part = "leave" if probe.at > answered else "connect" if probe.at + probe.took < passed else "are answered"
            parts[part].append(probe)
    case = f"{count:,} deadlines pass at once: they"
    bars = {"connect": 20.0, "are answered": 5.0, "leave": 20.0}  # that so many come and go at once are other cases
    return [row for part, probes in parts.items() for row in _health(f"{case} {part}", probes, bars[part])]


def _more_connections(count: int) -> list[str]:
    return ["--max-connections", str(2 * count + 100)] if "max_connections" in _settings() else []


def _settings() -> set[str]:
    from dataclasses import fields

    from reflex_runtime.settings import ServeConfig

    return {f.name for f in fields(ServeConfig)}


def _health(case: str, times: list[Probed], p99: float) -> list[Row]:
    told = [probe.took * 1e3 for probe in times]
    return [
        row(case, "/health p50", [statistics.median(told)], "ms"),
        row(case, "/health p99", [quantile(told, 0.99)], "ms", most=p99),
        row(case, "/health longest", [max(told)], "ms", most=50.0),
    ]


def _peak(server: servers.Server) -> float:
    """The most resident memory its process ever had, in MB."""
    status = Path(f"/proc/{server.pids()[0]}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class Probed(NamedTuple):
    """A question to /health: when it was asked, and the seconds until it was answered."""

    at: float
    took: float


def _beside(port: int, what: str, job: dict[str, Any]) -> tuple[list[Probed], dict[str, Any]]:
    """Seconds that each `/health` took while the callers were at it, and what they say became of them."""
    done = threading.Event()
    times: list[Probed] = []
    probe = threading.Thread(target=_probe, args=(port, done, times))
    callers = subprocess.Popen(
        [sys.executable, "-m", "bench.hostile", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=lambda: pin(cores()[1]),
    )  # fmt: skip
    probe.start()
    try:
        out, _ = callers.communicate(json.dumps({"port": port} | job).encode(), timeout=120.0)
    finally:
        callers.kill()
        done.set()
        probe.join()
    return times, json.loads(out)


def _probe(port: int, done: threading.Event, times: list[Probed]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not done.is_set():
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(Probed(began, time.monotonic() - began))
        done.wait(max(0.0, PROBE_EVERY - times[-1].took))
    connection.close()


# -- the callers -------------------------------------------------------------------------------------------------------


def body_of(kind: str, size: int = LARGEST) -> tuple[bytes, str]:
    """A body of that kind near the largest size, and its type."""
    if kind == "a million keys":
        return b"{" + b",".join(b'"k%06d":1' % i for i in range(size // 16)) + b"}", "application/json"
    if kind == "numbers":
        return b'{"state":[' + b"1," * (size // 2 - 20) + b"1]}", "application/json"
    if kind == "instruction":
        return b'{"instruction":"' + b"a" * (size - 100) + b'"}', "application/json"
    if kind == "a picture that is none":
        return b'{"image":"' + base64.b64encode(bytes(size // 4 * 3 - 100)) + b'"}', "application/json"
    if kind == "escapes":
        return b'{"image":"' + b"\\u0041" * (size // 6 - 50) + b'","seed":NaN}', "application/json"
    if kind == "msgpack numbers":
        return msgpack.packb({"state": [1] * (size - 100)}), "application/msgpack"
    return b'{"image":"' + b"A" * (size - 100) + b'"}', "application/json"


def _bodies(port: int, kind: str, seconds: float) -> dict[str, Any]:
    body, content_type = body_of(kind)
    head = (
        f"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    half = kind == "half bodies"
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()

    def one() -> None:
        held = []
        while time.monotonic() < until:
            sock = socket.create_connection(("127.0.0.1", port), timeout=60)
            try:
                sock.sendall(head)
                sock.sendall(memoryview(body)[: -10 if half else len(body)])
                if half and len(held) < 8:
                    held.append(sock)
                    counts["half"] += 1
                    continue
                counts[sock.recv(4096)[9:12].decode() if not half else "half, given up"] += 1
            except OSError as error:
                counts[type(error).__name__] += 1
            sock.close()
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=one) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(counts)


def _nothing(port: int, seconds: float) -> dict[str, Any]:
    """What the machine itself keeps `/health` waiting."""
    time.sleep(seconds)
    return {"port": port}


def _hangups(port: int, callers: int, within: float) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = min(callers, hard - 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, callers + 100)), hard))
    data = json.dumps(STATE).encode()
    request = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    began = time.monotonic()
    open_: list[socket.socket] = []
    while len(open_) < callers and time.monotonic() < began + within:
        sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        sock.sendall(request)
        open_.append(sock)
    came = time.monotonic() - began
    time.sleep(0.5)  # they are all queued
    for sock in open_:
        sock.close()
    time.sleep(3.0)  # the probe goes on while they are taken back
    return {"came": len(open_), "in": round(came, 2)}


def _expire(port: int, callers: int, within: float) -> dict[str, Any]:
    """Callers whose deadlines all pass in the same moment, while the device is busy."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = min(callers, hard - 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    end = time.monotonic() + within
    counts: Counter[str] = Counter()
    socks: list[socket.socket] = []
    while len(socks) < callers and time.monotonic() < end - 1.0:
        sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        data = json.dumps(STATE | ({"deadline_ms": (end - time.monotonic()) * 1e3} if socks else {})).encode()
        sock.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        socks.append(sock)
    last: dict[str, float] = {}
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                status = key.fileobj.recv(4096)[9:12].decode()  # type: ignore[union-attr]
                counts[status] += 1
                last[status] = time.monotonic()
    answered = last.get("504", end)  # the others wait for the end of a batch
    for sock in socks:
        sock.close()
    time.sleep(0.5)  # the probe goes on while the server takes note
    return {"came": len(socks), "passed": end, "answered": answered, **counts}


def _main() -> None:
    job = json.load(sys.stdin)
    what = {"bodies": _bodies, "hangups": _hangups, "expire": _expire, "nothing": _nothing}[sys.argv[1]]
    json.dump(what(**job), sys.stdout)


if __name__ == "__main__":
    os.nice(5)
    _main()
