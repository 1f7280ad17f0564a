"""Every test that takes `make` runs with the sync and with the async client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .callers import Caller, Make, Time


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes callers of one kind, and closes them."""
    made: list[Caller] = []

    def build(url: str, time: Time | None = None, **options: Any) -> Caller:
        made.append(Caller(request.param, url, time or Time(), **options))
        return made[-1]

    yield build
    for caller in made:
        caller.end()
