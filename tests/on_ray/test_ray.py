"""Replicas on Ray Serve, started by Ray's own command. `make test-ray` runs this where Ray is installed."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

pytest.importorskip("ray")

PATIENCE = 300.0  # seconds until a test gives up


def observation(**fields: Any) -> dict[str, Any]:
    picture = io.BytesIO()
    PIL.Image.new("RGB", (96, 96)).save(picture, "PNG")
    image = base64.b64encode(picture.getvalue()).decode()
    return {"instruction": "open the door", "state": [0.1] * 4, "image": image} | fields


class RayServer:
    """`serve run reflex_runtime.ray:app ARGUMENTS`, with Ray started for it and ended with it."""

    def __init__(self, *arguments: str) -> None:
        serve = str(Path(sys.executable).with_name("serve"))
        env = {name: value for name, value in os.environ.items() if not name.startswith(("REFLEX_", "RAY_"))}
        env |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        command = [serve, "run", "reflex_runtime.ray:app", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        self.port = 0
        self.log: list[str] = []
        self.told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.told:
                self.log.append(line.decode(errors="replace").rstrip())
                self.told.notify_all()
        with self.told:
            self.log.append("<end>")
            self.told.notify_all()

    def wait_log(self, *texts: str) -> str:
        """The first line that holds one of the texts."""

        def found() -> str:
            return next((line for line in self.log if any(text in line for text in texts) or line == "<end>"), "")

        with self.told:
            assert self.told.wait_for(found, PATIENCE), "\n".join(self.log)
        assert found() != "<end>", "\n".join(self.log)
        return found()

    def ask(self, method: str, path: str, fields: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            body = None if fields is None else json.dumps(fields).encode()
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def replica_of(self, episode: str) -> str:
        """What answers an episode: the own ids of a server begin alike, and it makes one where Ray's is too long."""
        own = {"x_session_id": episode, "x_request_id": "x" * 300}
        status, _, body = self.ask("POST", "/act", observation(episode_id=episode), **own)
        assert status == 200, body
        return str(json.loads(body)["request_id"]).partition("-")[0]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def started(*arguments: str) -> RayServer:
    """A server that is ready. Ray gives its own processes 30 seconds; on a busy machine it is started once more."""
    for _ in range(5):
        server = RayServer(*arguments)
        try:
            line = server.wait_log("is ready at", "timed out during startup")
            if found := re.search(r"ready at http://[^:]+:(\d+)", line):
                server.port = int(found[1])
                return server
        finally:
            if not server.port:
                server.end()
    raise AssertionError("\n".join(server.log))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    """Two replicas."""
    export = tmp_path_factory.mktemp("ray") / "export"
    subprocess.run([Path(sys.executable).with_name("reflex"), "demo-export", export], check=True)
    server = started(f"export={export}", "replicas=2", "cpus=0.5", "max_queue=64")
    try:
        yield server
    finally:
        server.end()


def test_x7_each_replica_answers_as_reflex_serve_does(pair: RayServer) -> None:
    status, _, body = pair.ask("POST", "/act", observation(seed=7, request_id="mine"))
    answer = json.loads(body)
    assert (status, answer["request_id"]) == (200, "mine")  # the header of this name is Ray's own
    assert len(answer["actions"]) == answer["num_actions"]
    assert pair.ask("GET", "/health")[0] == 200
    status, _, body = pair.ask("POST", "/act", observation(state=[0.1]))
    assert (status, json.loads(body)["field"]) == (422, "state")


def test_x7_settings_of_reflex_serve_are_arguments(pair: RayServer) -> None:
    status, _, body = pair.ask("GET", "/config")
    assert (status, json.loads(body)["server"]["max_queue"]) == (200, 64)


def test_x7_an_episode_stays_on_its_replica_and_episodes_are_spread(pair: RayServer) -> None:
    homes = {f"ep_{i}": pair.replica_of(f"ep_{i}") for i in range(12)}
    assert len(set(homes.values())) == 2
    for _ in range(3):
        assert {episode: pair.replica_of(episode) for episode in homes} == homes


def test_x7_what_is_wrong_with_the_arguments_is_said(tmp_path: Path) -> None:
    for arguments, told in (
        (["replicas=2"], "export is missing"),
        ([f"export={tmp_path}", "replicas=many"], "replicas=many: must be a whole number"),
    ):
        server = RayServer(*arguments)
        try:
            server.wait_log(told)
        finally:
            server.end()
    assert re.search("ConfigError", "\n".join(server.log))
