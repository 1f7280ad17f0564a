"""`--replicas 2` against one process: answers a second, and what the front costs a caller.

The servers are pinned to no core; the load generator shares the second core with them. A replica takes one core.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.load import STATE, quantile
from bench.report import Row, row, say
from bench.servers import Raw, Server, reflex, running

CALLERS = (32, 64, 128)
CONNECTIONS = 150  # new ones of a round


def replicas(tiny: Path, heavy: Path, scale: float) -> list[Row]:
    """Throughput on the heavy policy; the latency of one caller on the tiny one, where the front would be seen."""
    return _throughput(heavy, max(3, round(5 * scale))) + _latency(tiny, max(3, round(7 * scale)))


def _throughput(heavy: Path, rounds: int) -> list[Row]:
    rows: list[Row] = []
    both = [Raw(heavy, 0), Raw(heavy, 1)]
    with ThreadPoolExecutor(2) as pool:
        ceiling = []
        for _ in range(rounds):
            alone = both[0].mean(32, 0.5)
            together = list(pool.map(lambda raw: raw.mean(32, 0.5), both))
            ceiling.append(sum(alone / mean for mean in together))
    for raw in both:
        raw.stop()
    rows.append(row("replicas", "ONNX Runtime in two processes over one, batches of 32", ceiling, "x"))
    with running(*_both(heavy)) as servers:
        for callers in CALLERS:
            gains, sizes = [], []
            for i in range(rounds):
                say(f"  replicas, {callers} callers: round {i + 1} of {rounds}")
                order = servers if i % 2 else servers[::-1]
                found = {s.name: s.load(callers=callers, episodes=callers, seconds=2.0, warm=0.6) for s in order}
                one, two = found["one process"], found["two replicas"]
                gains.append(two.rate / one.rate)
                sizes.append(two.mean_batch)
            case = f"replicas, {callers} callers"
            rows.append(row(case, "answers a second, two replicas over one process", gains, "x", least=1.8))
            rows.append(row(case, "mean batch of two replicas", sizes, ""))
    return rows


def _latency(tiny: Path, rounds: int) -> list[Row]:
    kept: dict[str, list[float]] = {}
    new: dict[str, list[float]] = {}
    with running(*_both(tiny)) as servers:
        for i in range(rounds):
            say(f"  replicas, one caller: round {i + 1} of {rounds}")
            for server in servers if i % 2 else servers[::-1]:
                kept.setdefault(server.name, []).append(server.load(callers=1, seconds=0.6).quantile(0.5) * 1e6)
                new.setdefault(server.name, []).append(_new_connections(server) * 1e6)
    rows = []
    for what, found in (("kept connection", kept), ("connection for each request", new)):
        case = f"replicas, one caller, {what}"
        rows += [row(case, f"p50, {name}", found[name], "us") for name in found]
        added = [two - one for one, two in zip(found["one process"], found["two replicas"], strict=True)]
        rows.append(row(case, "what the front adds", added, "us"))
    return rows


def _both(export: Path) -> tuple[Server, Server]:
    return (
        reflex(export, name="one process", pinned=False),
        reflex(export, "--replicas", "2", name="two replicas", pinned=False),
    )


def _new_connections(server: Server) -> float:
    """Median seconds from `connect` to the whole answer."""
    body = json.dumps(STATE).encode()
    head = f"POST /act HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    times = []
    for _ in range(CONNECTIONS):
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(head.encode() + body)
            data = b""
            while more := sock.recv(65536):
                data += more
        times.append(time.perf_counter() - began)
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{server.name}: {data[:200]!r}")
    return quantile(times, 0.5)
