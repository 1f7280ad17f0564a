"""A PyTorch policy with pictures behind `POST /act`, against the same model called in a loop on the server's core.

The loop has no server, no pictures to receive and no one else to answer. Staged and whole are the two ways to serve it.
"""

from __future__ import annotations

import base64
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgpack

from bench.load import Answered
from bench.machine import cores, pin
from bench.report import Row, row, say
from bench.servers import Raw, Server, reflex, running

APP = "bench.apps.torch_vla"
BUDGET = ("--max-batch-cost-ms", "2000")  # eight robots fit into a batch
SECONDS = 4.0
CALLS = {"staged": 11, "whole": 1}  # of the model for an answer: the prefix and ten steps, or all in one


class Loop(Raw):
    """The model alone, called in a loop."""

    def __init__(self) -> None:
        where = cores()[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", APP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: pin(where),
        )


def torch_policies(scale: float) -> list[Row]:
    """1 and 8 robots that each wait for their answer."""
    rounds = max(3, round(5 * scale))
    servers = [
        reflex(Path(f"python:{APP}:{make}"), *BUDGET, name=name, ready="/health")
        for make, name in (("make", "staged"), ("make_whole", "whole"))
    ]
    loop, rows = Loop(), []
    try:
        with running(*servers):
            for robots in (1, 8):
                rows += _robots(servers, loop, robots, rounds)
    finally:
        loop.stop()
    return rows


def _robots(servers: list[Server], loop: Loop, robots: int, rounds: int) -> list[Row]:
    case = f"PyTorch VLA with pictures, {robots} robot{'s' if robots > 1 else ''}"
    job = _act()
    alone: list[float] = []
    together: list[float] = []
    found: dict[str, list[Answered]] = defaultdict(list)
    for i in range(rounds):
        say(f"  {case}: round {i + 1} of {rounds}")
        alone.append(loop.mean(1, SECONDS / 2))
        together.append(loop.mean(robots, SECONDS / 2) / robots)
        for server in servers[:: 1 if i % 2 else -1]:
            answered = server.load(callers=robots, seconds=SECONDS, warm=1.0, **job)
            if answered.failed or not answered.requests:
                raise RuntimeError(f"{server.name}: {answered.failed} of {answered.requests} requests failed")
            found[server.name].append(answered)
    rows = [row(case, "a call with one row in a loop", [1e3 * each for each in alone], "ms")]
    if robots > 1:
        rows.append(row(case, f"a row of a call with {robots} rows in a loop", [1e3 * each for each in together], "ms"))
    for name, answers in found.items():
        rows.append(row(case, f"mean answer, {name}", [1e3 * _mean(a) for a in answers], "ms"))
        rows.append(row(case, f"p99, {name}", [1e3 * a.quantile(0.99) for a in answers], "ms"))
        if robots == 1:
            beyond = [1e3 * (_mean(a) - call) for a, call in zip(answers, alone, strict=True)]
            rows.append(row(case, f"answer beyond the call in a loop, {name}", beyond, "ms"))
            calls = CALLS[name]
            each = [one / calls for one in beyond]
            rows.append(row(case, f"the same for each of {calls} calls of the model, {name}", each, "ms", most=1.0))
        else:
            gain = [a.rate * call for a, call in zip(answers, alone, strict=True)]
            rows.append(row(case, f"answers a second over a loop of single calls, {name}", gain, "x"))
            share = [a.rate * each for a, each in zip(answers, together, strict=True)]
            rows.append(row(case, f"answers a second over a loop of calls with {robots} rows, {name}", share, "x"))
    return rows


def _mean(answered: Answered) -> float:
    return sum(answered.latencies) / len(answered.latencies)


def _act() -> dict[str, Any]:
    from bench.apps.torch_vla import observations

    (fields,) = observations(1)
    body = {
        name: {"dtype": "|u1", "shape": list(picture.shape), "data": picture.tobytes()}
        for name, picture in fields["images"].items()
    }
    packed: bytes = msgpack.packb(body | {"state": fields["state"].tolist()})
    return {"path": "/act", "wire": "msgpack", "packed": base64.b64encode(packed).decode()}
