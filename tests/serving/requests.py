"""Requests that tests send to a policy server; who waits behind whom, and whom a fault strikes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import PIL.Image

from reflex_runtime.observe.journal import BatchLine, JournalRequest, read_journal

from .exports import expected
from .harness import STATE, Answer, Burst, Server

WAITING = "reflex_policy_runtime_queue_depth"

# For `Server(before=…)`: background work stays that; else it counts as default after a second.
AGELESS = "from reflex_runtime.core.group import Group; Group.promote = lambda self, now: None"


def numbered(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"state": [0.1 * i, -0.1 * i], "seed": i, "request_id": f"r{i}"} | more for i in range(n)]


def right(answer: Answer, i: int) -> bool:
    """Whether it is what request i of `numbered` has to be answered."""
    want = expected([0.1 * i, -0.1 * i], i)
    return answer.status == 200 and bool(np.allclose(answer.json["actions"], want, atol=1e-5))


def observe(server: Server, shade: int, episode: str | None = "e", **more: Any) -> Any:
    picture = {"dtype": "|u1", "shape": [64, 64, 3], "data": bytes([shade]) * (64 * 64 * 3)}
    sent = {"image": picture, "instruction": "open the door", "state": [0.0] * 4, "episode_id": episode, "seed": 1}
    sent |= more
    headers = {"Content-Type": "application/msgpack", "Accept": "application/json"}
    answer = server.ask("POST", "/act", msgpack.packb(sent), headers)
    assert answer.status == 200, answer.body
    return answer.json


def grey() -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (6, 4), "grey").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def check_error(answer: Answer, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """What every error has (H12)."""
    assert answer.status == status, answer.body
    body: dict[str, Any] = answer.json
    assert body["error"] == code, body
    assert isinstance(body["message"], str)
    assert body["message"]
    assert body["request_id"] == answer.headers["x-request-id"]
    assert isinstance(body["retry_safe"], bool)
    assert "Traceback" not in body["message"]
    if field is not None:
        assert body["field"] == field, body
    return body


def refused_by_id(server: Any, model: str) -> set[str]:
    """Ask each described operation of a server that is not ready, with an id, whole and broken; each answer has it.
    Returns the paths that were answered 503."""
    refused = set[str]()
    for path, methods in json.loads(server.get("/openapi.json").body)["paths"].items():
        where = re.sub(r"\{\w+\}", "1", path.replace("{model}", model))
        for method in (methods.keys() - {"parameters"}) if not path.endswith("/stream") else ():
            for body in (b"{}", b'{"request_id": "mine", "state": [', None) if method == "post" else (None,):
                answer = server.ask(method.upper(), where, body, {"X-Request-Id": "mine"})
                assert answer.headers["x-request-id"] == "mine", (path, answer)
                if answer.status == 503:
                    assert b"request_id" not in answer.body or json.loads(answer.body)["request_id"] == "mine", path
                    refused.add(path)
    return refused


def loads_after(gate: Path, fails: bool = False) -> str:
    """For `Server(before=…)`: the policy is loaded once the FIFO `gate` is opened for writing and closed. fails: it is
    not loaded then."""
    return f"""
import reflex_runtime.robots.serving.runtime as runtime
_load = runtime.PolicyRuntime._load
def _late(self):
    with open({str(gate)!r}) as gate:
        gate.read()
    return 1 / 0 if {fails} else _load(self)
runtime.PolicyRuntime._load = _late
"""


def busy(server: Server, **fields: Any) -> Burst:
    """One request that has the device: until `release` on a server that is `held`, else for `--inject-latency-ms`."""
    while True:
        plug = server.burst([{"state": STATE, "robot_id": "plug", "request_id": "plug"} | fields])
        plug.send()
        server.reach(lambda m, plug=plug: plug.answered or (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
        if not plug.answered:
            return plug
        plug.__exit__()  # the machine was too busy to look in time: once more


TAUGHT = "100.0 if any(ticket.request.id.startswith('teach') for ticket in batch.grants) else 0.001"


def outlasted(server: Server) -> Answer:
    """The answer to a request with a minute, of which five batches before its own teach the server that none of its
    kind ends in that time. The server has batches of one, and `takes` TAUGHT."""
    teach = [{"state": STATE, "request_id": f"teach{i}", "priority": "urgent"} for i in range(5)]
    with busy(server):
        return server.behind([*teach, *numbered(1, deadline_ms=60_000)])[-1]


def measured(seconds: float) -> str:
    """For `Server(before=…)`: a batch has taken so long, by the clock of the device."""
    return f"""
import reflex_runtime.run.device as device
_complete = device.complete
device.complete = lambda scheduler, batch, outcomes, took, now: _complete(scheduler, batch, outcomes, {seconds}, now)
"""


def calm(server: Server) -> bool:
    """Whether nothing is in its log that is not in that of any start, or of what the tiny policy lacks."""
    lacks = ("this policy reads no text", "the export names no motors")
    lines = [line for line in server.log if not any(lack in line for lack in lacks)]
    return not any(level in line for line in lines for level in (" WARNING ", " ERROR ", "Traceback"))


def recorded(folder: Path) -> list[JournalRequest]:
    """What a server that has ended was asked. folder: its `--record`."""
    (file,) = folder.iterdir()
    return [line.request for line in read_journal(file).requests]


def queued(n: int) -> Any:
    return lambda m: m(WAITING) == n


def traced(server: Server, file: Path) -> list[BatchLine]:
    """The batches it ran; stops it."""
    assert server.stop() == 0
    return read_journal(file).batches


def marked(kind: str, rate: float, ids: list[str]) -> set[str]:
    """Whom `--inject-fault prod:KIND:RATE` strikes."""
    draw = {i: int.from_bytes(hashlib.sha256(f"0:prod:{kind}:{i}".encode()).digest()[:8], "big") for i in ids}
    return {i for i, value in draw.items() if value < rate * 2.0**64}


def strike(kind: str, among: int = 4) -> tuple[float, int]:
    """(rate, number) such that a fault of batches strikes that one batch, none before it and none of the three after.

    among: the larger, the rarer the fault is later on.
    """
    for last in range(among, among + 60):
        digests = [hashlib.sha256(f"0:prod:{kind}:{i}".encode()).hexdigest() for i in range(1, last + 1)]
        draws = [int(digest[:16], 16) / 2**64 for digest in digests]
        least, second = sorted(draws)[:2]
        number = draws.index(least) + 1
        if last - number >= 3:
            return (least + second) / 2, number
    raise AssertionError("no such batch")
