"""Parameters of which `make test` runs some: the others repeat what those show, and are in `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """For `parametrize` or the `params` of a fixture. kept: those that `make test` runs."""
    return [pytest.param(value, marks=() if value in kept else pytest.mark.long) for value in values]
