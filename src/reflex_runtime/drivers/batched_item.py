"""The common parts of `@batched` functions, on a thread or on a loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Self


class Handle:
    """The object that replaces a batched function, and the `object.method` of a batched method.

    A call may raise `QueueFull` or `Closed` (refused), `Expired`, `Shed`, `Drained` (not computed), or `ProcessorError`
    (it ran and failed; only then a retry computes the item a second time).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._owner: object = None

    def held_by(self, owner: object) -> Self:
        """The same function through a handle that keeps its owner alive, as a bound method does its object."""
        handle = object.__new__(type(self))
        handle.__dict__.update(self.__dict__, _owner=owner)
        return handle

    def expect_deletion(self) -> None:
        """Get ready for `owner_deleted`."""

    def owner_deleted(self) -> None:
        """The owner was deleted, so there are no callers. Called by the garbage collector: takes no lock."""


def forget_closed(by_loop: dict[asyncio.AbstractEventLoop, Any]) -> None:
    """Drop what belongs to closed loops: a program may run one after another."""
    for loop in list(by_loop):
        if loop.is_closed():
            by_loop.pop(loop, None)
