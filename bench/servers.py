"""Servers as child processes on their own core, started once per case and asked in turns."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.load import STATE, Answered, Job, ask
from bench.machine import cores, installed, pin
from bench.report import say
from reflex_runtime.core.errors import ReflexError

START_LIMIT = 60.0  # seconds until a server must answer


@contextlib.contextmanager
def reserved() -> Iterator[int]:
    """A port that the system gives to no other program meanwhile; a server can listen there."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


class Server:
    """One running server. pinned: to a core of its own. python: of the environment that has it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        path: str = "/act",
        env: dict[str, str] | None = None,
        pinned: bool = True,
        ready: dict[str, Any] | str | None = None,
        python: str = sys.executable,
    ) -> None:
        self.name, self.path = name, path
        self._ready = STATE if ready is None else ready  # answered 200 once it has started; text: a path to GET
        where = cores()[0] if pinned else None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with reserved() as self.port:
            self._process = subprocess.Popen(
                [python, *(part.replace("PORT", str(self.port)) for part in command)],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
                preexec_fn=lambda: pin(where), start_new_session=True,
            )
            self._wait()

    def load(self, **job: Any) -> Answered:
        """Ask it. If the load generator fails, the error has the end of the server's log."""
        try:
            return ask(Job(**{"port": self.port, "path": self.path, "pids": self.pids()} | job))
        except ReflexError as error:
            state = "runs" if self._process.poll() is None else f"ended with status {self._process.returncode}"
            raise RuntimeError(f"{error}; {self.name} {state}:\n{self.tail()}") from error

    def get(self, path: str) -> bytes:
        """The body of one GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def stop(self, limit: float = 5.0) -> int:
        """End it and whatever it started. Returns its exit status, -9 if it had to be killed."""
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()
        return self._process.wait()

    def hold(self) -> None:
        """Stop its processes: some servers compute while nobody asks them, on the core of the others."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """After `hold`."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        """Of its processes."""
        process = psutil.Process(self._process.pid)
        return [process.pid, *(child.pid for child in process.children(recursive=True))]

    def _wait(self) -> None:
        end = time.monotonic() + START_LIMIT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = self.tail()
                self.stop()
                raise RuntimeError(f"{self.name} did not start:\n{tail}")
            time.sleep(0.1)

    def tail(self) -> str:
        """The end of its log."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        return self._log.read().decode(errors="replace")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            if isinstance(self._ready, str):
                connection.request("GET", self._ready)
            else:
                connection.request("POST", self.path, json.dumps(self._ready), {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Raw:
    """The model alone in a process on the server's core, or on that of the load generator (core=1)."""

    def __init__(self, export: Path, core: int = 0) -> None:
        where = cores()[core]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.apps.raw", str(export)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: pin(where),
        )

    def calls(self, n: int, seconds: float = 0.5) -> list[float]:
        """Seconds of each of some calls with n rows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{n} {seconds}\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def mean(self, n: int, seconds: float = 0.5) -> float:
        """Mean seconds of a call with n rows."""
        times = self.calls(n, seconds)
        return sum(times) / len(times)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def reflex(export: Path, *flags: str, name: str = "reflex", **more: Any) -> Server:
    """`reflex serve` with its defaults, but for the supervisor: the process is the one whose times are taken."""
    command = ["-m", "reflex_runtime", "serve", str(export), "--port", "PORT", "--no-supervise", *flags]
    return Server(name, command, **more)


def hello(export: Path) -> Server:
    return Server("bare ASGI hello", ["-m", "bench.apps.hello", str(export), "PORT"])


def byhand(export: Path, window: int = 0, **more: Any) -> Server:
    """window: milliseconds that its batches wait for others."""
    name = f"batcher by hand, {window} ms" if window else "batcher by hand"
    return Server(name, ["-m", "bench.apps.byhand", str(export), "PORT", str(window)], **more)


def plain_openpi(export: Path) -> Server:
    return Server("plain server", ["-m", "bench.apps.plain_openpi", str(export), "PORT"], "/", ready="/healthz")


def mosec(export: Path, **more: Any) -> Server | None:
    """None when it is not installed."""
    if installed("mosec") is None:
        return None
    command = ["-m", "bench.apps.with_mosec", str(export), "PORT"]
    return Server("mosec", command, "/inference", {"BENCH_EXPORT": str(export)}, **more)


def litserve(export: Path, **more: Any) -> Server | None:
    """None when it is not installed."""
    if installed("litserve") is None:
        return None
    return Server("LitServe", ["-m", "bench.apps.with_litserve", str(export), "PORT"], **more)


@contextlib.contextmanager
def running(*servers: Server | None) -> Iterator[list[Server]]:
    """Those that started; ended at the end, whatever happens."""
    there = [server for server in servers if server is not None]
    try:
        yield there
    finally:
        for server in there:
            server.stop()


def rivals(export: Path, **more: Any) -> list[Server]:
    """The other batching servers that are installed and start here."""
    found: list[Server] = []
    for start in (mosec, litserve):
        try:
            server = start(export, **more)
        except RuntimeError as error:
            say(f"  left out: {error}")
            continue
        if server is not None:
            found.append(server)
    return found
