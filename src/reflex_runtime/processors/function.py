"""A plain function as a processor: a list of payloads in, a list of results out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ResultCountMismatch
from reflex_runtime.processors.base import BaseProcessor

P = TypeVar("P")
V = TypeVar("V")


class FunctionProcessor(BaseProcessor, Generic[P, V]):
    """Calls `function([payload, …])`; it returns one result per payload, in order.

    repeatable: pass False for a function that must not see a payload twice. any_thread: pass True for one that may be
    called on the event loop once it has proven to take a fraction of a millisecond. Raises TypeError for a function
    that cannot be called so: a coroutine function, a generator function, or one that does not take a single list.
    """

    def __init__(
        self, function: Callable[[list[P]], Sequence[V]], repeatable: bool = True, any_thread: bool = False
    ) -> None:
        name = name_of(function)
        if is_async(function):
            raise TypeError(
                f"{name} is an async function, and a FunctionProcessor runs on a thread: write it with `def`, or put "
                "@batched on it"
            )
        if is_method(function):
            raise TypeError(f"{name} is a method, and there is no object yet to call it on; pass it as `object.method`")
        check_function(function)
        self._function = function
        self.repeatable, self.any_thread = repeatable, any_thread

    def run(self, batch: Batch) -> Sequence[V]:
        return checked_results(self._function, self._function(payloads_of(batch)))


def payloads_of(batch: Batch) -> list[Any]:
    """What a function is called with."""
    return [ticket.request.payload for ticket in batch.grants]


def checked_results(function: Any, results: Any) -> Sequence[Any]:
    """The function's results. Raises ResultCountMismatch for a dict, a text, None, an iterator."""
    ordered = hasattr(results, "__len__") and hasattr(results, "__getitem__")
    if not ordered or isinstance(results, (Mapping, str, bytes)):
        if inspect.iscoroutine(results):
            results.close()
        raise ResultCountMismatch(
            f"{name_of(function)} returned a {type(results).__name__}; it must return a list with one result for each "
            "item, in order"
        )
    return results  # type: ignore[no-any-return]


def is_async(function: Any) -> bool:
    """Whether calling it makes a coroutine."""
    return any(inspect.iscoroutinefunction(called) for called in _called(function))


def is_method(function: Any) -> bool:
    """Whether it is a function written in a class that takes the object first, as `self`."""
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self"


def check_function(function: Any, *before: Any) -> None:
    """Raise TypeError unless it can be called with a list of payloads and return a list of results.

    before: arguments before the list, such as the object of a method.
    """
    name = name_of(function)
    if isinstance(function, classmethod):
        raise TypeError(f"{name} is a class method; write a static method, or a function outside of the class")
    if not callable(function):
        raise TypeError(f"{name}: must be a function that takes a list and returns a list")
    if any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in _called(function)):
        raise TypeError(f"{name} is a generator function; it must return a list instead of yielding the results")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    if next(iter(signature.parameters), "") == "cls":
        raise TypeError(f"{name} is a class method; write a static method, or a function outside of the class")
    try:
        signature.bind(*before, [])
    except TypeError:
        besides = f" besides {', '.join(list(signature.parameters)[: len(before)])}" if before else ""
        raise TypeError(f"{name}{signature}: must take one argument{besides}, the list of items") from None


def name_of(function: Any) -> str:
    """What a message calls it."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _called(function: Any) -> tuple[Any, Any]:
    """The callable and its function: they differ for an object of a class with `__call__`."""
    return function, function if inspect.isroutine(function) else type(function).__call__
