"""openpi robots with the pictures of LIBERO: against a plain server of openpi's, and against `POST /act`.

The same observation on every wire: two pictures of 224 by 224, a state and an instruction, some 300 kB.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from bench.load import Answered
from bench.models import SIDE, STATE, write_export
from bench.report import Row, row, say
from bench.servers import Server, plain_openpi, reflex, running
from reflex_runtime.robots.wires.openpi import encode

CAMERAS = ("image", "image_wrist")
WIRES = {"images": {"image": "observation/image", "image_wrist": "observation/wrist_image"}}
FEW = 4  # pixels of a side, where the pictures are to cost nothing
BUDGET = ("--max-batch-cost-ms", "400")  # 32 robots fit into a batch


def wires(root: Path, scale: float) -> list[Row]:
    """Robots against a plain server, connections against callers of /act, and what a frame costs the event loop."""
    block = {"wires": {"openpi": {**WIRES, "state": ["observation/state"]}}}
    heavy = write_export(root / "heavy-seeing", heavy=True, cameras=CAMERAS, **block)
    tiny = write_export(root / "tiny-seeing", heavy=False, cameras=CAMERAS, **block)
    rounds = max(3, round(5 * scale))
    rows = []
    with running(reflex(heavy, *BUDGET, ready="/healthz"), plain_openpi(heavy)) as servers:
        for robots in (1, 8, 32):
            rows += _robots(servers, robots, rounds)
    small = write_export(root / "small-seeing", heavy=False, cameras=CAMERAS, side=FEW, **block)
    with running(reflex(tiny, ready="/healthz"), reflex(small, ready="/healthz")) as (server, other):
        rows += _against_act(server, rounds)
        rows += _frame(server, other, rounds)
    return rows


def _robots(servers: list[Server], robots: int, rounds: int) -> list[Row]:
    case = f"{robots} openpi robot{'s' if robots > 1 else ''}, policy of about 10 ms"
    found = _turns(case, {server.name: (server, _openpi(SIDE)) for server in servers}, rounds, robots)
    rows = []
    for name, answered in found.items():
        rows.append(row(case, f"answers a second, {name}", [a.rate for a in answered], "/s"))
        rows.append(row(case, f"p99, {name}", [a.quantile(0.99) * 1e3 for a in answered], "ms"))
    (mine, plain) = found.values()
    gain = [a.rate / b.rate for a, b in zip(mine, plain, strict=True)]
    return [*rows, row(case, "answers a second of reflex over those of the plain server", gain, "x")]


def _against_act(server: Server, rounds: int) -> list[Row]:
    case = "16 connections, policy that costs nothing"
    jobs = {"openpi": (server, _openpi(SIDE)), "/act msgpack": (server, _act(SIDE))}
    found = _turns(case, jobs, rounds, 16)
    rows = [row(case, f"answers a second, {name}", [a.rate for a in found[name]], "/s") for name in found]
    (mine, act) = found.values()
    share = [a.rate / b.rate for a, b in zip(mine, act, strict=True)]
    return [*rows, row(case, "openpi over /act msgpack, answers a second", share, "x", least=0.95)]


def _frame(server: Server, small: Server, rounds: int) -> list[Row]:
    """CPU of the event loop per request, less that of the same policy for pictures of a few bytes."""
    case = "a frame of 300 kB"
    few = f"pictures of {FEW} by {FEW}"
    jobs = {"openpi": (server, _openpi(SIDE)), f"openpi, {few}": (small, _openpi(FEW))}
    jobs |= {"/act msgpack": (server, _act(SIDE)), f"/act msgpack, {few}": (small, _act(FEW))}
    found = _turns(case, jobs, rounds, 1)
    loop = {name: [a.loop / a.requests * 1e3 for a in answered] for name, answered in found.items()}
    rows = [row(case, f"CPU of the event loop per request, {name}", loop[name], "ms") for name in loop]
    for wire, most in (("openpi", 0.15), ("/act msgpack", None)):
        beyond = [a - b for a, b in zip(loop[wire], loop[f"{wire}, {few}"], strict=True)]
        rows.append(row(case, f"CPU of the event loop beyond the request, {wire}", beyond, "ms", most=most))
    return rows


def _turns(
    case: str, jobs: dict[str, tuple[Server, dict[str, Any]]], rounds: int, callers: int, seconds: float = 1.2
) -> dict[str, list[Answered]]:
    """Every job in every round; the order turns."""
    found: dict[str, list[Answered]] = defaultdict(list, {name: [] for name in jobs})
    names = list(jobs)
    for i in range(rounds):
        say(f"  {case}: round {i + 1} of {rounds}")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            server, job = jobs[name]
            answered = server.load(callers=callers, seconds=seconds, **job)
            if answered.failed or not answered.requests:
                raise RuntimeError(f"{name}: {answered.failed} of {answered.requests} requests failed")
            found[name].append(answered)
    return found


def _observation(side: int) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(14)
    pictures = {name: rng.integers(0, 256, (side, side, 3), np.uint8) for name in CAMERAS}
    return pictures, np.linspace(-1.0, 1.0, STATE)


def _openpi(side: int) -> dict[str, Any]:
    pictures, state = _observation(side)
    sent = {WIRES["images"][name]: picture for name, picture in pictures.items()}
    frame = encode(sent | {"observation/state": state, "prompt": "pick up the black bowl"})
    return {"path": "/", "wire": "openpi", "packed": base64.b64encode(frame).decode()}


def _act(side: int) -> dict[str, Any]:
    pictures, state = _observation(side)
    sent = {
        name: {"dtype": "|u1", "shape": list(picture.shape), "data": picture.tobytes()}
        for name, picture in pictures.items()
    }
    body = msgpack.packb(sent | {"state": state.tolist(), "instruction": "pick up the black bowl"})
    return {"path": "/act", "wire": "msgpack", "packed": base64.b64encode(body).decode()}
