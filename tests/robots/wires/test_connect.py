"""The page "Connect your robot": each of its programs asks the bundled export, where its client is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from reflex_runtime.demo import POLICY
from serving.harness import PATIENCE, Server

PAGE = Path(__file__).parents[3] / "docs" / "connect.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
GIVEN = re.findall(r"`(image|state)` is\s`(np\..+?)`", TEXT)
CHUNK, ACTIONS = 16, 4
SHAPES = {
    "openpi_client": ("actions", (CHUNK, ACTIONS)),
    "json_numpy": ("action", (ACTIONS,)),
    "tritonclient.http": ("actions", (1, CHUNK, ACTIONS)),
    "tritonclient.grpc": ("actions", (1, CHUNK, ACTIONS)),
}
BEFORE = "\n".join(["import numpy as np", *(f"{name} = {value}" for name, value in GIVEN), ""])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(POLICY, "--oip-grpc", "127.0.0.1:0") as server:
        yield server


@pytest.mark.parametrize("client", SHAPES)
def test_a_program_of_the_page_gets_its_actions(server: Server, client: str) -> None:
    (program,) = (text for text in PROGRAMS if client in text)
    assert program.count("\n") < 10
    grpc = server.wait_log("clients of OIP over gRPC: ").rpartition(":")[2]
    for port, here in (("8000", str(server.port)), ("8001", grpc)):
        program = program.replace(port, here)
    name, shape = SHAPES[client]
    run = [sys.executable, "-c", f"{BEFORE}{program}\nprint(np.shape({name}))"]
    told = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert told.stdout == f"{shape}\n", told.stderr


def test_what_is_not_run_is_not_installed() -> None:
    others = [text for text in PROGRAMS if not any(client in text for client in SHAPES)]
    modules = [re.findall(r"^from (\w+)", text, re.MULTILINE)[0] for text in others]
    assert modules == ["gr00t"]
    assert find_spec("gr00t") is None
