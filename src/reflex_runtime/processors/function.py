"""A plain function as a processor: a list of payloads in, a list of results out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ResultCountMismatch
from reflex_runtime.processors.base import BaseProcessor


class FunctionProcessor(BaseProcessor):
    """Calls `function([payload, …])`; it returns one result per payload, in order.

    repeatable: pass False for a function that must not see a payload twice. Raises TypeError for a function that cannot
    be called so: a coroutine function, a generator function, or one that does not take a single list.
    """

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]], repeatable: bool = True) -> None:
        _check(function)
        self._function = function
        self.repeatable = repeatable

    def run(self, batch: Batch) -> Sequence[Any]:
        results = self._function([ticket.request.payload for ticket in batch.grants])
        ordered = hasattr(results, "__len__") and hasattr(results, "__getitem__")
        if not ordered or isinstance(results, (Mapping, str, bytes)):
            if inspect.iscoroutine(results):
                results.close()
            raise ResultCountMismatch(
                f"{_name(self._function)} returned a {type(results).__name__}; it must return a list with one result "
                "for each item, in order"
            )
        return results


def _check(function: Any) -> None:
    """Raise TypeError for what cannot be called with a list of payloads and answer with a list of results."""
    name = _name(function)
    if not callable(function):
        raise TypeError(f"{name}: must be a function that takes a list and returns a list")
    called = type(function).__call__ if not inspect.isroutine(function) else function
    if any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in (function, called)):
        raise TypeError(f"{name} is an async function; it runs on a thread of its own, so write it with `def`")
    if inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(called):
        raise TypeError(f"{name} is a generator function; it must return a list instead of yielding the results")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions do not tell
    if next(iter(signature.parameters), "") in ("self", "cls"):
        raise TypeError(
            f"{name} is a method, and there is no object yet to call it on; wrap the bound method instead, such as "
            f"`self.run = batched()(self._run)` in __init__"
        )
    try:
        signature.bind([])
    except TypeError:
        raise TypeError(f"{name}{signature}: must take one argument, the list of items") from None


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
