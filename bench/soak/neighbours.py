"""A caller beside a greedy one (many choices, extreme pictures, the largest bodies), and alone, in turns."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.load import quantile
from bench.models import SIDE, picture, write_export
from bench.report import Row, row, say
from bench.servers import Server
from bench.soak.callers import post, serve
from bench.soak.hostile import ANY, LARGEST, STATE, png, request, sends

ROUNDS = 3
MOST = 3.0


def neighbours(root: Path, seconds: float) -> list[Row]:
    """seconds: of each half of a round."""
    export = str(write_export(root / "neighbours", heavy=True, cameras=("image",)))
    robot = {"state": STATE, "image": picture("JPEG", (SIDE, SIDE))}
    rows = []
    with ExitStack() as ends:
        server = serve(export)
        ends.callback(server.stop)
        large = b'{"instruction":"%s"}' % (b"open " * (LARGEST // 5 - 100))
        greedy = {
            "extreme pictures": [_looks(image) for image in _extreme()],
            "the largest bodies": [request("/act", large)],
        }
        for name, data in greedy.items():
            rows += _beside(name, server, "/act", robot, data, seconds)
    with ExitStack() as ends:
        server = serve("scribe")
        ends.callback(server.stop)
        asked = {"model": "scribe", "max_tokens": 4, "temperature": 0, "prompt": "Once there was"}
        many = asked | {"max_tokens": 64, "n": 128, "temperature": 1, "ignore_eos": True, "user": "greedy"}
        data = [request("/v1/completions", json.dumps(many).encode())]
        rows += _beside("n: 128", server, "/v1/completions", asked | {"user": "small"}, data, seconds)
    return rows


def _extreme() -> Iterator[str]:
    yield png(16_384, 1024, 1)
    yield png(4096, 4096, 16)
    yield picture("JPEG", (4096, 4096), progressive=True)


def _looks(image: str) -> bytes:
    return request("/act", json.dumps({"state": STATE, "image": image, "robot_id": "greedy"}).encode())


def _beside(
    name: str, server: Server, path: str, body: dict[str, Any], greedy: list[bytes], seconds: float
) -> list[Row]:
    quiet, ratios = [], []
    _p99(server, path, body, 1.0)  # once unseen
    for i in range(ROUNDS):
        alone = _p99(server, path, body, seconds)
        over = threading.Event()
        thread = threading.Thread(target=_greedy, args=(server.port, greedy, over))
        thread.start()
        time.sleep(0.1)
        beside = _p99(server, path, body, seconds)
        over.set()
        thread.join()
        say(f"  beside {name}, round {i + 1}: p99 {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside")
        quiet.append(alone * 1e3)
        ratios.append(beside / alone)
    case = f"a caller beside one with {name}"
    return [row(case, "p99 alone", quiet, "ms"), row(case, "p99 over that alone", ratios, "x", most=MOST)]


def _p99(server: Server, path: str, body: dict[str, Any], seconds: float) -> float:
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        post(server.port, path, body)
        times.append(time.perf_counter() - began)
    return quantile(times, 0.99)


def _greedy(port: int, data: list[bytes], over: threading.Event) -> None:
    """One caller that asks again as soon as it is answered."""
    while not over.is_set():
        for asked in data:
            sends(port, asked, ANY)
