"""`reflex ray` in a process of its own, and callers of it. These tests run with `make test-ray`."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Self

import PIL.Image
import psutil

from reflex_runtime.demo.exports import export_dir

PATIENCE = 120.0  # seconds until a test gives up


def observation() -> dict[str, Any]:
    picture = io.BytesIO()
    PIL.Image.new("RGB", (96, 96)).save(picture, "PNG")
    image = base64.b64encode(picture.getvalue()).decode()
    return {"instruction": "open the door", "state": [0.1] * 4, "image": image}


class Answered:
    def __init__(self, status: int, headers: dict[str, str], body: bytes, seconds: float) -> None:
        self.status, self.headers, self.body, self.seconds = status, headers, body, seconds

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return self.headers["x-reflex-replica"]


class RayServer:
    """`reflex ray EXPORT OPTIONS`. Use it in a with statement; on the way out none of its processes is left."""

    def __init__(self, *options: str) -> None:
        words = ["ray", str(export_dir()), *options]
        run = f"import sys; from reflex_runtime.cli import main; sys.exit(main({words!r}))"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("REFLEX_", "RAY_"))}
        env |= {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", run]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
        self.log: list[str] = []
        self.told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.told:
                self.log.append(line.decode(errors="replace").rstrip())
                self.told.notify_all()

    def __enter__(self) -> Self:
        try:
            self.port = int(re.search(r"ready on http://\S+?:(\d+)", self.wait_log("ready on http"))[1])  # type: ignore[index]
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_log(self, text: str) -> str:
        def found() -> str:
            return next((line for line in self.log if text in line), "")

        with self.told:
            assert self.told.wait_for(found, PATIENCE), "\n".join(self.log)
            return found()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def pids(self, title: str) -> set[int]:
        """Processes of Ray whose title begins so."""
        found = set()
        for process in self.family():
            try:
                if process.cmdline() and process.cmdline()[0].startswith(title):
                    found.add(process.pid)
            except psutil.Error:
                continue
        return found

    def end(self) -> int:
        """Ctrl-C. Returns the exit status, once all processes are gone."""
        family = self.family()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(PATIENCE)
        _, left = psutil.wait_procs(family, timeout=PATIENCE)
        assert not left, left
        return status

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            family = self.family()
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(PATIENCE)
            finally:
                for process in (*family, self.process):
                    try:
                        process.kill()
                    except psutil.NoSuchProcess:
                        continue
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        connection: http.client.HTTPConnection | None = None,
        **headers: str,
    ) -> Answered:
        """One request; on a connection of its own unless one is given."""
        asking = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        given = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        began = time.monotonic()
        asking.request(method, path, data, given)
        answer = asking.getresponse()
        found = Answered(
            answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read(), time.monotonic() - began
        )
        if connection is None:
            asking.close()
        return found

    def act(self, connection: http.client.HTTPConnection | None = None, **fields: Any) -> Answered:
        return self.ask("POST", "/act", observation() | fields, connection)

    def replicas(self) -> set[str]:
        """The replicas that answer."""
        return {self.act(robot_id=f"look {n}").replica for n in range(24)}
