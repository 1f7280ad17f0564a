"""A plain function as a processor: a list of payloads in, a list of results out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.processors.base import BaseProcessor


class FunctionProcessor(BaseProcessor):
    """Calls `function([payload, …])`; it returns one result per payload, in order.

    repeatable: pass False for a function that must not see a payload twice.
    """

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]], repeatable: bool = True) -> None:
        self._function = function
        self.repeatable = repeatable

    def run(self, batch: Batch) -> Sequence[Any]:
        return self._function([ticket.request.payload for ticket in batch.grants])
