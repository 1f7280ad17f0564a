"""Tests on Ray Serve itself. They run with `make test-ray`, and are skipped where Ray is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from on_ray.server import RayServer


@pytest.fixture(scope="module")
def pair() -> Iterator[RayServer]:
    """Two replicas."""
    with RayServer("--port", "0", "--replicas", "2", "--replica-cpus", "0.5") as server:
        yield server
