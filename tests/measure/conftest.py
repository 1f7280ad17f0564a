"""The exports that tests of the load generator share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.load.generator import LoadJob, LoadRound, play

from serving.exports import write_tiny
from serving.fixtures import tiny
from serving.harness import Server

__all__ = ["tiny"]


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two cameras and a state, whose openpi clients are those of LIBERO."""
    return write_tiny(tmp_path_factory.mktemp("seeing") / "e", cameras=("image", "image_wrist"), wires="openpi/libero")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load generator is in this process: half a second of CPU time less for each run."""

    def played(job: LoadJob) -> list[LoadRound]:
        return asyncio.run(play(job, lambda told: None))

    monkeypatch.setattr("bench.load.__main__.played", played)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they need: a test run in several processes is given 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[Server]:
    """On all wires."""
    anywhere = "127.0.0.1:0"
    with Server(seeing, "--gr00t", f"tcp://{anywhere}", "--oip-grpc", anywhere, "--lerobot", anywhere) as server:
        yield server
