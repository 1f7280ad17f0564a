"""Exports that the tests of servers share: a `conftest.py` imports what its folder needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .exports import write_tiny
from .pair import Pair, write_pair


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of state alone, with a dynamic batch axis."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Versions of one policy, told apart by their answers."""
    return write_pair(tmp_path_factory.mktemp("pair"))
