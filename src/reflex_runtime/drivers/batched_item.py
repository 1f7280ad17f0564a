"""The common parts of `@batched` functions, on a thread or on a loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable
from random import random
from typing import Any, Final, Self

GONE: Final = 1.0  # seconds from the end of a task until its client is forgotten

_numbers = itertools.count(1)  # of clients, in all loops


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


class TaskClients:
    """The clients of one loop's items: one for each task, from its first item until the task ends.

    Many programs make a task for each item (`asyncio.gather`, the handlers of a web server), and such a task never asks
    twice. So a new task gets the client of one that has ended, and the scheduler learns how long after an answer the
    next item comes. Which one is drawn by lot: in any order, the first to come back would always be the same client,
    and all times would seem more regular than they are. `GONE` seconds after its task a client is forgotten, because
    the program has fewer items at a time now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[int, str] = {}  # by id of the task
        self._free: list[tuple[str, float]] = []  # the client, and when its task ended

    def current(self) -> str:
        """The client of the running task; "" where no task runs."""
        task = asyncio.current_task()
        return self._of.get(id(task)) or self._enter(task)

    def _enter(self, task: asyncio.Task[Any] | None) -> str:
        """The client of a new task."""
        if task is None:
            return ""
        task.add_done_callback(self._leave)
        client = self._of[id(task)] = self._draw() or f"task {next(_numbers)}"
        return client

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._free.append((self._of.pop(id(task)), self._clock()))

    def _draw(self) -> str:
        """One of the clients without a task; "" if there is none."""
        free, oldest = self._free, self._clock() - GONE
        while free:
            drawn = int(random() * len(free))
            free[drawn], free[-1] = free[-1], free[drawn]
            client, left = free.pop()
            if left >= oldest:
                return client
        return ""


def forget_closed(by_loop: dict[asyncio.AbstractEventLoop, Any]) -> None:
    """Drop what belongs to closed loops: a program may run one after another."""
    for loop in list(by_loop):
        if loop.is_closed():
            by_loop.pop(loop, None)
