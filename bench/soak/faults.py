"""Kinds of faults, each given to a server of its own while callers ask it: does it survive, and was anything wrong?

A fault is survived when right answers came under it, everything else was a refusal with the caller's own id or a closed
connection, a right answer comes after it, and SIGTERM ends the server with status 0.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.report import say
from bench.servers import Server
from bench.soak.callers import ROOT, Callers, Completions, act, back, serve
from bench.soak.misbehaving import ANSWERS, ENDS, FAULT, FRAMES
from reflex_runtime.feeds.sources.shapes import Shapes

ENDED = 20.0  # seconds for a server to end
PAUSE = 8.0  # seconds that a process is stopped
FPS = 20
POLICY, FRAMES_OF = "python:bench.soak.misbehaving:policy", "bench.soak.misbehaving:Frames"
# Runs the rest of its arguments with a full pipe for standard output and error, which nobody reads.
UNREAD = """
import fcntl, os, sys
end, pipe = os.pipe(); os.set_inheritable(end, True)
os.set_blocking(pipe, False)
try:
    while True: os.write(pipe, b"x" * 4096)
except BlockingIOError: os.set_blocking(pipe, True)
os.dup2(pipe, 1); os.dup2(pipe, 2)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@dataclass
class Survival:
    """What became of a fault. asked: requests, or results of feeds. wrong: those that were not right, refused or
    closed. why: "" if it was survived."""

    fault: str
    asked: int
    wrong: list[str] = field(default_factory=list)
    why: str = ""


@dataclass(frozen=True)
class Fault:
    """product: "policy", "model" or "feeds". begin: what is done to the server; otherwise its model misbehaves so."""

    name: str
    product: str
    arguments: tuple[str, ...] = ()
    begin: Callable[[Server], None] | None = None


def _child(server: Server, *path: int, command: str = "") -> psutil.Process:
    """A process below the server's first one: its child, or the child of that, the largest first."""
    process = psutil.Process(server.pids()[0])
    for number in path:
        children = [child for child in process.children() if command in " ".join(child.cmdline())]
        process = sorted(children, key=lambda child: -child.memory_info().rss)[number]
    return process


def _killed(*path: int, by: int = signal.SIGKILL) -> Callable[[Server], None]:
    return lambda server: _child(server, *path).send_signal(by)


def _stopped(*path: int) -> Callable[[Server], None]:
    def stop(server: Server) -> None:
        process = _child(server, *path)
        process.suspend()
        threading.Timer(PAUSE, _resume, (process,)).start()

    return stop


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def _signals(server: Server) -> None:
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH) * 3:
        psutil.Process(server.pids()[0]).send_signal(number)


def _hang_ups(server: Server) -> None:
    """Callers that leave: at once, in the middle of what they ask, with a reset."""
    body = json.dumps({"state": [1, 2, 3, 4], "model": "scribe", "prompt": "Once", "stream": True, "max_tokens": 200})
    for i in range(400):
        path = "/v1/completions" if i % 2 else "/act"
        asked = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as leaves:
            leaves.sendall(asked[: len(asked) if i % 3 else i % len(asked)])
            if i % 5 == 0:
                leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


SUPERVISED = ("--watchdog-s", "2")
FAULTS = (
    *(Fault(name, "policy", SUPERVISED) for name in (*ANSWERS, *ENDS)),
    Fault("the server is killed", "policy", SUPERVISED, _killed(0)),
    Fault("the server stands still", "policy", SUPERVISED, _stopped(0)),
    Fault("its supervisor stands still", "policy", SUPERVISED, _stopped()),
    Fault("a replica is killed", "policy", ("--replicas", "2", *SUPERVISED), _killed(0)),
    Fault("a replica stands still", "policy", ("--replicas", "2", *SUPERVISED), _stopped(0)),
    Fault("signals of process managers", "policy", SUPERVISED, _signals),
    Fault("callers leave", "policy", (), _hang_ups),
    Fault("nobody reads the log", "policy", ("--inject-fault", "prod:raise:0.2"), lambda server: None),
    Fault("the trace's disk is full", "policy", ("--trace", "/dev/full"), lambda server: None),
    Fault("callers of a stream leave", "model", (), _hang_ups),
    Fault("the model's server is killed", "model", (), _killed(0)),
    Fault("a runtime process is killed", "model", ("--workers", "2"), _killed(0, 0)),
    Fault("a runtime process stands still", "model", ("--workers", "2", *SUPERVISED), _stopped(0, 0)),
    *(Fault(f"feeds: {name}", "feeds") for name in FRAMES),
    *(Fault(f"a camera {kind}", "feeds") for kind in ("goes", "freezes", "sends rubbish")),
)


def survive(fault: Fault, seconds: float, root: Path) -> Survival:
    """Start a server, give it the fault while it is asked, and look whether it comes back."""
    began = time.monotonic()
    run = _feeds if fault.product == "feeds" else _requests
    file = root / "fault"
    file.write_text("")
    try:
        found = run(fault, seconds, file)
    except (RuntimeError, OSError, psutil.Error) as error:
        found = Survival(fault.name, 0, why=repr(error))
    say(f"  {fault.name}: {found.asked} asked, {time.monotonic() - began:.1f} s")
    for told in (*found.wrong[:3], *([f"not survived: {found.why}"] if found.why else [])):
        say(f"    {told}")
    return found


def _requests(fault: Fault, seconds: float, file: Path) -> Survival:
    source = "scribe" if fault.product == "model" else POLICY
    if fault.name == "nobody reads the log":
        command = ["-c", UNREAD, "-m", "reflex_runtime", "serve", source, *fault.arguments, "--port", "PORT"]
        env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", FAULT: str(file)}
        server = Server("reflex", command, env=env, pinned=False, ready="/health")
    else:
        server = serve(source, *fault.arguments, **{FAULT: str(file)})
    with contextlib.ExitStack() as ends:
        ends.callback(server.stop)
        question = Completions(server) if fault.product == "model" else act
        callers = Callers(server.port, question)
        try:
            time.sleep(min(1.0, seconds / 4))
            if fault.begin is None:
                file.write_text(fault.name)
            else:
                fault.begin(server)
            time.sleep(seconds)
            file.write_text("")
        finally:
            callers.stop()
        found = Survival(fault.name, callers.found.total() + len(callers.wrong), callers.wrong)
        if not callers.found["right"]:
            found.why = "nobody was answered"
        elif not back(server.port, question):
            found.why = f"no right answer afterwards: {server.tail()[-400:]}"
        ends.pop_all()
        if (status := server.stop(ENDED)) != 0 and not found.why:
            found.why = f"SIGTERM ended it with status {status}"
    return found


# -- feeds -------------------------------------------------------------------------------------------------------------


def _feeds(fault: Fault, seconds: float, file: Path) -> Survival:
    """Two feeds of drawn pictures, whose results must be right and in order, and a camera."""
    results = Path(tempfile.mkstemp(suffix=".jsonl", dir=file.parent)[1])
    with camera() as cam:
        server = serve(
            *(f"{name}=shapes:seed={seed},fps={FPS}" for name, seed in (("a", 1), ("b", 2))),
            f"camera=http://127.0.0.1:{cam.server_port}/", "--read-timeout-s", "1", "--processor", FRAMES_OF,
            "--results", str(results), verb="feeds", **{FAULT: str(file)},
        )  # fmt: skip
        with contextlib.ExitStack() as ends:
            ends.callback(server.stop)
            _more(results, 0)
            kind = fault.name.rpartition("camera ")[2]
            cam.fault = kind if kind != fault.name else ""
            file.write_text("" if cam.fault else fault.name.removeprefix("feeds: "))
            time.sleep(seconds)
            file.write_text("")
            cam.fault = ""
            found = Survival(fault.name, 0)
            if not _more(results, results.stat().st_size):
                found.why = f"no results of all feeds afterwards: {server.tail()[-400:]}"
            ends.pop_all()
            if (status := server.stop(ENDED)) not in (0, 143) and not found.why:
                found.why = f"SIGTERM ended it with status {status}"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    found.asked = len(lines)
    found.wrong = _wrong(lines)
    return found


def _more(results: Path, beyond: int) -> bool:
    """Wait for a result of each feed behind this place in the file."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        tail = results.read_bytes()[beyond:]
        if all(b'"feed":"%s"' % name in tail for name in (b"a", b"b", b"camera")):
            return True
        time.sleep(0.1)
    return False


def _wrong(lines: list[dict[str, Any]]) -> list[str]:
    drawn = {"a": Shapes(1), "b": Shapes(2)}
    last: dict[str, int] = {}
    wrong = []
    for line in lines:
        feed, number = line["feed"], line["sequence"]
        if number <= last.get(feed, -1):
            wrong.append(f"{feed}: result {number} after {last[feed]}")
        last[feed] = number
        if feed in drawn:
            expected = float(drawn[feed].picture(round(line["pts"] * FPS)).mean())
            if not isinstance(line["value"], float) or abs(line["value"] - expected) > 1e-3:
                wrong.append(f"{feed}: {line['value']!r} for a picture of {expected:.3f}")
    return wrong


class Camera(http.server.ThreadingHTTPServer):
    """Sends pictures as MJPEG, until a fault says otherwise."""

    fault = ""
    daemon_threads = True


class _Pictures(http.server.BaseHTTPRequestHandler):
    server: Camera

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        scene, i = Shapes(3), 0
        with contextlib.suppress(OSError):
            while self.server.fault != "goes":
                if self.server.fault != "freezes":
                    self.wfile.write(_part(scene, i, self.server.fault == "sends rubbish"))
                i += 1
                time.sleep(1 / FPS)

    def log_message(self, *_: Any) -> None:
        return


def _part(scene: Shapes, i: int, rubbish: bool) -> bytes:
    import PIL.Image

    data = io.BytesIO()
    PIL.Image.fromarray(scene.picture(i)).save(data, "JPEG")
    picture = os.urandom(data.tell()) if rubbish else data.getvalue()
    return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(picture), picture)


@contextlib.contextmanager
def camera() -> Iterator[Camera]:
    """A camera at an address of its own."""
    cam = Camera(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=cam.serve_forever, daemon=True).start()
    try:
        yield cam
    finally:
        cam.shutdown()
        cam.server_close()


if __name__ == "__main__":  # some of them, by hand
    with tempfile.TemporaryDirectory() as folder:
        for one in FAULTS:
            if any(word in one.name for word in sys.argv[2:]) or not sys.argv[2:]:
                survive(one, float(sys.argv[1]), Path(folder))
