"""The exports that tests of the load generator share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.exports import write_tiny
from serving.fixtures import tiny
from serving.harness import Server

__all__ = ["tiny"]


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two cameras and a state, whose openpi clients are those of LIBERO."""
    return write_tiny(tmp_path_factory.mktemp("seeing") / "e", cameras=("image", "image_wrist"), wires="openpi/libero")


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[Server]:
    with Server(seeing) as server:
        yield server
