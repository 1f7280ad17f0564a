"""Requests that make the model raise, and a server that crashes: what both cost the others.

A fifth of the requests is marked by `--inject-fault prod:raise:0.2`, drawn anew for each, whoever sends it. A crash is
a SIGSEGV to the server proper; its supervisor stays.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from bench.report import Row, row, say
from bench.servers import Server, reflex, running

CALLERS = 32


def faults(export: Path, scale: float) -> list[Row]:
    """A server with bad requests beside one without, in turns; then crashes."""
    return _poison(export, scale) + _crashes(export, scale)


def _poison(export: Path, scale: float) -> list[Row]:
    case = "a fifth of the requests makes the model raise"
    served, failed, ready = [], [], []
    with running(reflex(export), reflex(export, "--inject-fault", "prod:raise:0.2")) as (clean, bad):
        for i in range(max(3, round(5 * scale))):
            say(f"  {case}: round {i + 1}")
            usual = clean.load(callers=CALLERS, seconds=2.0)
            found = bad.load(callers=CALLERS, seconds=2.0)
            served.append((found.requests + found.failed) / found.seconds / usual.rate)
            failed.append(100.0 * found.failed / (found.requests + found.failed))
            ready.append(float(json.loads(bad.get("/health"))["state"] == "ready"))
    return [
        row(case, "answered over none bad", served, "x", least=0.5),
        row(case, "failed", failed, "%", most=21.0),
        row(case, "state ready", ready, "", least=1.0),
    ]


def _crashes(export: Path, scale: float) -> list[Row]:
    case = "a crash in native code"
    told, back = [], []
    command = ["-m", "reflex_runtime", "serve", str(export), "--port", "PORT"]
    with running(Server("reflex", command, pinned=False)) as (server,):
        for i in range(max(3, round(5 * scale))):
            say(f"  {case}: {i + 1}")
            (child,) = psutil.Process(server._process.pid).children()
            began = time.perf_counter()
            child.send_signal(signal.SIGSEGV)
            first = _health(server)
            told.append((time.perf_counter() - began) * 1e3)
            while first["state"] != "ready":
                time.sleep(0.005)
                first = _health(server)
            back.append(time.perf_counter() - began)
    return [row(case, "callers are told after", told, "ms", most=100.0), row(case, "ready again after", back, "s")]


def _health(server: Server) -> Any:
    """The next health that is not of the server that was killed."""
    while True:
        try:
            found = json.loads(server.get("/health"))
        except (OSError, ValueError):
            continue
        if found.get("restarts") or found["state"] != "ready":
            return found
