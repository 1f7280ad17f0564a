"""How many files of the package one request enters, and by how many calls: one POST /act, one streamed answer, one
second of a feed.

    python -m bench.entered [--src DIR] [--list] [--calls]

A server runs warm with a profile hook in all of its threads. The hook counts between two marks only, and of a request
not what runs without one.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Self

WARM = 20  # requests before the counted one
TIMERS = 1.0  # seconds in which every timer of an idle server fires: they are no part of a request

Calls = dict[str, int]


class Hook:
    """In the server: counts the calls of every file while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.on and event == "call":
            code = frame.f_code
            self.calls[f"{code.co_filename}:{code.co_qualname}"] += 1

    def obey(self) -> None:
        """A line in switches the hook; the second one writes what was entered."""
        for _ in sys.stdin:
            if not self.on:
                self.calls.clear()
            self.on = not self.on
            if not self.on:
                own = {name: calls for name, calls in self.calls.items() if "reflex_runtime" in name}
                print("entered " + json.dumps(own), flush=True)


def serve(arguments: list[str]) -> None:
    """The command of the package under the hook."""
    hook = Hook()
    threading.Thread(target=hook.obey, daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)
    sys.argv = ["reflex", *arguments]
    runpy.run_module("reflex_runtime", run_name="__main__")


class Hooked:
    """A server under the hook."""

    def __init__(self, source: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "bench.entered", "--serve", *arguments]
        path = {"PYTHONPATH": f"{source}:{Path(__file__).parents[1]}"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=os.environ | path, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        self._switch()
        time.sleep(0.2)  # nothing tells that the hook is on

    def stop(self) -> Calls:
        """What was called since `start`, by `file:function`."""
        self._switch()
        for line in self._process.stdout or ():
            if line.startswith("entered "):
                found = json.loads(line[8:])
                return {name.rpartition("reflex_runtime/")[2]: calls for name, calls in found.items()}
        raise RuntimeError("the server ended")

    def _switch(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


def post(port: int, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def _ready(port: int, path: str = "/health", most: float = 120.0) -> None:
    until = time.monotonic() + most
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{path} on port {port} did not answer within {most:g} s")


def act(source: Path, root: Path) -> Calls:
    from bench.load import STATE  # here: the server that is counted may be of another checkout
    from bench.models import SIDE, picture, write_export

    export = write_export(root / "seeing", heavy=False, cameras=("image",))
    body = STATE | {"image": picture("PNG", (SIDE, SIDE))}
    return _asked(source, "/act", body, str(export))


def token(source: Path, root: Path) -> Calls:
    body = {"model": "scribe", "prompt": "the robot", "max_tokens": 8, "stream": True}
    return _asked(source, "/v1/completions", body, "scribe")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _asked(source: Path, path: str, body: dict[str, Any], *arguments: str) -> Calls:
    port = _free_port()
    with Hooked(source, "serve", *arguments, "--no-supervise", "--port", str(port)) as server:
        _ready(port)
        for _ in range(WARM):
            post(port, path, body)
        server.start()
        time.sleep(TIMERS)
        idle = server.stop()
        server.start()
        post(port, path, body)
        return {name: calls for name, calls in server.stop().items() if name not in idle}


def frame(source: Path, root: Path) -> Calls:
    """A feed of few frames a second: what runs during one second of it."""
    video, results = root / "video.mp4", root / "results.jsonl"
    results.unlink(missing_ok=True)
    _film(video)
    feed = f"door={video}"
    with Hooked(
        source, "feeds", feed, "--onnx", "shapes", "--realtime", "--loop", "--fps", "5", "--results", str(results)
    ) as server:
        _lines(results, WARM)
        seconds = []
        for number in range(1, 4):
            server.start()
            _lines(results, WARM + 5 * number)
            seconds.append(server.stop())
        return min(seconds, key=len)  # every five seconds the log has a line, which is no part of a frame


def _film(file: Path) -> None:
    import av
    import numpy as np

    with av.open(str(file), "w") as made:
        stream = made.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for _ in range(100):
            picture = av.VideoFrame.from_ndarray(np.zeros((240, 320, 3), np.uint8), format="rgb24")
            made.mux(stream.encode(picture))
        made.mux(stream.encode())


def _lines(file: Path, least: int, most: float = 60.0) -> None:
    until = time.monotonic() + most
    while time.monotonic() < until:
        if file.exists() and file.read_bytes().count(b"\n") >= least:
            return
        time.sleep(0.05)
    raise RuntimeError(f"{file} did not come to {least} lines within {most:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.entered", description=__doc__)
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[1] / "src", help="of which checkout")
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--calls", action="store_true", help="name the functions")
    args = parser.parse_args()
    kinds = {"one POST /act": act, "one streamed answer": token, "one frame": frame}
    for kind, count in kinds.items():
        with tempfile.TemporaryDirectory(prefix="reflex-entered-") as root:
            calls = count(args.src.resolve(), Path(root))
        files: Counter[str] = Counter()
        for name, times in calls.items():
            files[name.partition(":")[0]] += times
        print(f"{kind}: {len(files)} files, {sum(files.values())} calls", flush=True)
        if args.list:
            print("\n".join(f"    {files[name]:5} {name}" for name in sorted(files)), flush=True)
        if args.calls:
            print("\n".join(f"    {calls[name]:5} {name}" for name in sorted(calls)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main()
