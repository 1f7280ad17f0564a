"""Large libraries that a test module imports when a test of it first uses them.

`make test` collects every module in each of its processes: without this both would import the clients of all APIs, for
tests that one of them runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Late:
    """The module of this name. It is imported when the first of its public attributes is looked up: pytest looks up
    private ones of whatever a test module holds, to find fixtures."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
