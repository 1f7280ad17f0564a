"""A function behind a queue and a task by hand: `python -m bench.apps.function_by_hand NAME PORT [WINDOW_MS]`."""

from __future__ import annotations

import sys
from typing import Any

from bench.apps.byhand import ByHand
from bench.apps.function import FUNCTIONS
from bench.apps.uv import run


class Function:
    """In the place of a model: an item is a row as it comes, and a result is an answer."""

    def __init__(self, name: str) -> None:
        self.run = FUNCTIONS[name]

    def row(self, item: Any) -> Any:
        return item

    def feeds(self, items: list[Any]) -> list[Any]:
        return items

    def answer(self, result: Any, size: int) -> Any:
        return result


if __name__ == "__main__":
    run(ByHand(Function(sys.argv[1]), *(float(ms) / 1e3 for ms in sys.argv[3:])), int(sys.argv[2]))
