"""Mixed traffic on the three products at once, for minutes: how far does memory grow?

Good and broken requests, streams that are left, several choices and forms, outcomes, splits, pages, a camera that goes
and comes back. The policies' second version raises now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgpack
import psutil

from bench.models import SIDE, picture, write_export
from bench.report import Row, row, say
from bench.servers import Server
from bench.soak.callers import PATIENCE, PROMPTS, resident, serve
from bench.soak.faults import FPS, camera
from reflex_runtime.core.request import Request
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import FunctionProcessor

EVERY = 2.0  # seconds between looks at memory
WARM = 0.2  # of the time, after which memory must not grow: two minutes of ten
MOST = 16.0  # MB
REQUESTS, CALLERS, STEPS = 1_000_000, 64, 10  # in process

# (method, path, body, whether the caller leaves without the answer)
Asked = tuple[str, str, bytes | None, bool]


class Policies:
    """Two versions with a camera, a recorder and a trace."""

    name, callers, pause = "policies", 4, 0.05

    def __init__(self, root: Path) -> None:
        export = str(write_export(root / "policy", heavy=False, cameras=("image",)))
        self.pictures = [picture("JPEG", (SIDE, SIDE)) for _ in range(20)]
        self.server = serve(
            "--policy-a", export, "--policy-b", export, "--no-rtc", "--split", "80", "--record", str(root / "recorded"),
            "--record-max-mb", "5", "--trace", str(root / "policies.jsonl"), "--inject-fault", "b:raise:0.05",
        )  # fmt: skip

    def asked(self, rng: random.Random) -> Asked:
        episode = f"episode-{rng.randrange(200)}"
        body: dict[str, Any] = {
            "state": [0.1] * 8, "image": rng.choice(self.pictures), "episode_id": episode,
            "robot_id": rng.choice(("one", "two", f"robot-{rng.random()}")),
            "deadline_ms": rng.choice((5, 500, 5000)), "priority": rng.choice(("urgent", "default", "background")),
        }  # fmt: skip
        outcome = json.dumps({"success": rng.random() < 0.7}).encode()
        page = rng.choice(("/health", "/metrics", "/config", "/status", "/dashboard", f"/nothing-{rng.random()}"))
        choices: list[tuple[float, Asked]] = [
            (60, ("POST", "/act", json.dumps(body).encode(), False)),
            (12, ("POST", "/act", json.dumps(body).encode(), True)),
            (12, ("POST", "/act", msgpack.packb({"state": [0.1] * 7}), False)),
            (5, ("POST", "/act", b"{broken", False)),
            (5, ("POST", f"/episodes/{episode}/outcome", outcome, False)),
            (5, ("GET", page, None, False)),
            (1, ("POST", "/admin/split", b'{"split": %d}' % rng.randrange(101), False)),
        ]
        return _one(rng, choices)


class Model:
    """The bundled language model, with a trace. Its cache has the 256 blocks that get memory first: what a larger one
    takes block by block, up to --kv-cache-gb, looks like growth, 16 MB with 457 blocks."""

    name, callers, pause = "language model", 3, 0.1

    def __init__(self, root: Path) -> None:
        self.server = serve("scribe", "--kv-cache-gb", "0.0168", "--trace", str(root / "steps.jsonl"))

    def asked(self, rng: random.Random) -> Asked:
        path = "/v1/completions"
        texts = [{"role": "user", "content": f"hi {rng.random()}"}]
        schema = {"type": "object", "properties": {f"k{rng.randrange(1000)}": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        page = rng.choice(("/health", "/metrics", "/v1/models", "/status", "/config"))

        def body(**fields: Any) -> bytes:
            return json.dumps({"model": "scribe", "prompt": rng.choice(PROMPTS), "max_tokens": 8} | fields).encode()

        choices: list[tuple[float, Asked]] = [
            (40, ("POST", path, body(temperature=0, max_tokens=rng.choice((4, 8, 16))), False)),
            (10, ("POST", path, body(prompt="x " * rng.randrange(1, 200), n=rng.randrange(1, 9)), False)),
            (10, ("POST", path, body(response_format=form), False)),
            (10, ("POST", "/v1/chat/completions", _chat(texts), False)),
            (15, ("POST", path, body(stream=True, max_tokens=100), True)),
            (5, ("POST", path, b"{broken", False)),
            (10, ("GET", page, None, False)),
        ]
        return _one(rng, choices)


class Feeds:
    """Two drawn cameras and one over HTTP, the bundled detector, tracks and results."""

    name, callers, pause = "feeds", 2, 0.2

    def __init__(self, root: Path, port: int) -> None:
        self.server = serve(
            f"a=shapes:seed=1,fps={FPS // 4}", f"b=shapes:seed=2,fps={FPS // 4}", f"camera=http://127.0.0.1:{port}/",
            "--fps", "5", "--read-timeout-s", "1", "--onnx", "shapes", "--track", "--results", f"{root}/feeds.jsonl",
            verb="feeds",
        )  # fmt: skip

    def asked(self, rng: random.Random) -> Asked:
        page = rng.choice(("/health", "/metrics", "/dashboard", "/feeds", "/feeds/a.jpg", f"/nothing-{rng.random()}"))
        stream = rng.choice(("/feeds/a.mjpeg", "/feeds.mjpeg", "/feeds/camera.mjpeg"))
        return _one(rng, [(70, ("GET", page, None, False)), (30, ("GET", stream, None, True))])


def _chat(texts: list[dict[str, str]]) -> bytes:
    return json.dumps(
        {"model": "scribe", "messages": texts, "max_tokens": 8, "logprobs": True, "top_logprobs": 5}
    ).encode()


def _one(rng: random.Random, choices: list[tuple[float, Asked]]) -> Asked:
    return rng.choices([asked for _, asked in choices], [weight for weight, _ in choices])[0]


def traffic(minutes: float) -> list[Row]:
    """Memory of each product every two seconds, and its growth after the first fifth of the time."""
    with tempfile.TemporaryDirectory() as folder, camera() as cam, contextlib.ExitStack() as ends:
        root = Path(folder)
        makers: tuple[Callable[[], Any], ...] = (
            lambda: Policies(root), lambda: Model(root), lambda: Feeds(root, cam.server_port)
        )  # fmt: skip
        products = []
        for make in makers:
            products.append(product := make())
            ends.callback(product.server.stop)
        over, found = threading.Event(), {product.name: Counter[str]() for product in products}
        threads = [
            threading.Thread(target=_ask, args=(product, number, over, found[product.name]))
            for product in products
            for number in range(product.callers)
        ]
        for thread in threads:
            thread.start()
        memory: dict[str, list[float]] = {product.name: [] for product in products}
        try:
            _watch([(product.name, product.server) for product in products], minutes, memory, found, cam)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    rows = []
    for name, seen in memory.items():
        warm, part = round(WARM * len(seen)), max(1, len(seen) // 20)
        case = f"{minutes:g} minutes of mixed traffic, {found[name].total():,} requests"
        growth = [value - median(seen[max(0, warm - part) : warm + part]) for value in seen[-part:]]
        most = MOST if minutes >= 10 else None  # before that it is warming up
        rows.append(row(case, f"{name}: memory at the end", seen[-part:], "MB"))
        rows.append(row(case, f"{name}: growth after the first fifth", growth, "MB", most=most))
    return rows


def _watch(
    servers: list[tuple[str, Server]], minutes: float, memory: dict[str, list[float]], found: dict[str, Counter[str]],
    cam: Any,
) -> None:  # fmt: skip
    began, told = time.monotonic(), 0.0
    while (now := time.monotonic() - began) < 60 * minutes:
        cam.fault = "goes" if now % 20 > 17 else ""
        for name, server in servers:
            memory[name].append(resident(server))
        if now >= told:
            told += 30.0
            seen = ", ".join(f"{name} {values[-1]:.0f} MB {dict(found[name])}" for name, values in memory.items())
            say(f"  traffic, {now:.0f} s: {seen}")
        time.sleep(EVERY)


def _ask(product: Any, number: int, over: threading.Event, found: Counter[str]) -> None:
    rng = random.Random(number)
    while not over.wait(product.pause):
        method, path, body, leaves = product.asked(rng)
        try:
            if leaves:
                told = _leave(product.server.port, method, path, body or b"", rng)
            else:
                told = _whole(product.server.port, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            told = type(error).__name__
        found[told] += 1


def _whole(port: int, method: str, path: str, body: bytes | None) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    packed = body is not None and body[:1] not in b"{"
    try:
        connection.request(method, path, body, {"Content-Type": f"application/{'msgpack' if packed else 'json'}"})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def _leave(port: int, method: str, path: str, body: bytes, rng: random.Random) -> str:
    """Ask, read a few parts of the answer at most, and hang up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as leaves, contextlib.suppress(TimeoutError):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        leaves.sendall(head.encode() + body)
        leaves.settimeout(0.2)
        for _ in range(rng.randrange(4)):
            leaves.recv(4096)
    return "left"


# -- in process --------------------------------------------------------------------------------------------------------


def memory(scale: float) -> list[Row]:
    """Resident memory after each tenth of a million requests to a `Batcher`, against that after the first."""
    requests = int(REQUESTS * scale)
    seen = asyncio.run(_memory(requests))
    growth = [(now - seen[0]) / 2**20 for now in seen[1:]]
    case = f"{requests:,} requests in process"
    rows = [row(case, "resident memory after the first tenth", [seen[0] / 2**20], "MB")]
    rows.append(row(case, "growth since, at each further tenth", growth, "MB", most=4.0))
    rows.append(row(case, "growth from the first tenth to the last", [growth[-1]], "MB", most=4.0))
    return rows


async def _memory(requests: int) -> list[int]:
    process = psutil.Process()
    seen: list[int] = []
    async with Batcher({"default": FunctionProcessor(lambda numbers: numbers)}) as batcher:

        async def caller(name: str, count: int) -> None:
            for i in range(count):
                # Names change, as robots and episodes do; every tenth brings a deadline.
                limit = 10.0 if i % 10 == 0 else None
                await batcher.run(Request(i, client=f"{name}-{i // 100}", time_limit=limit))

        for step in range(STEPS):
            await asyncio.gather(*(caller(f"{step}-{c}", requests // STEPS // CALLERS) for c in range(CALLERS)))
            gc.collect()
            seen.append(process.memory_info().rss)
            say(f"  memory: {step + 1} of {STEPS}, {seen[-1] / 2**20:.1f} MB")
    return seen
