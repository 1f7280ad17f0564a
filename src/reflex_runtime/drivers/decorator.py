"""`@batched`: write a function over a list, call it with one item.

    @batched(max_batch_size=32)
    def embed(texts: list[str]) -> list[Vector]: ...

    vector = embed("one text")              # blocks this thread
    vector = await embed.aio("one text")    # does not block the loop

    @batched
    async def ask(questions: list[str]) -> list[str]: ...

    answer = await ask("one question")

Concurrent callers share the function's calls; one call runs at a time. With a method each object has its own batches:
items of different objects never share a call, and their calls run in parallel.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, Generic, Protocol, Self, TypeVar, overload

from reflex_runtime.core.errors import Cancelled, ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.drivers.batched_coroutine import BatchedCoroutine
from reflex_runtime.drivers.batched_function import BatchedFunction
from reflex_runtime.drivers.batched_item import Handle
from reflex_runtime.processors.function import check_function, is_async, is_method, name_of

Item = TypeVar("Item")
Result = TypeVar("Result")
Owner = TypeVar("Owner")
Bound = TypeVar("Bound", bound=Handle)


class BatchedMethod(Generic[Bound]):
    """A batched method in its class; `object.method` is the object's own batched function.

    That function is made at first use and closed when the object is deleted. It does not keep the object alive; a call
    does.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[[Callable[[list[Any]], Any]], Bound]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._make = function, make
        self._bound: dict[int, Bound] = {}  # by id: an object need not be hashable, and equal ones are not the same
        self._binding = threading.Lock()

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type | None = None) -> Bound: ...
    def __get__(self, owner: object | None, kind: type | None = None) -> Self | Bound:
        if owner is None:
            return self
        found = self._bound.get(id(owner))
        return (found or self._bind(owner)).held_by(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = name_of(self._function)
        raise TypeError(f"{name} is a method: call it on an object, with one item")

    def _bind(self, owner: object) -> Bound:
        try:
            owner_of = weakref.ref(owner)
        except TypeError:
            raise TypeError(
                f"@batched {name_of(self._function)}: a {type(owner).__name__} cannot be referred to weakly; add "
                "'__weakref__' to its __slots__"
            ) from None
        with self._binding:
            if (found := self._bound.get(id(owner))) is None:
                found = self._bound[id(owner)] = self._make(_of_owner(self._function, owner_of))
                found.expect_deletion()
                weakref.finalize(owner, self._gone, id(owner)).atexit = False
        return found

    def _gone(self, key: int) -> None:
        self._bound.pop(key).owner_deleted()


def _of_owner(method: Callable[..., Any], owner_of: Callable[[], object | None]) -> Callable[[list[Any]], Any]:
    """The method of one object as a function of the list that does not keep the object alive."""

    def there() -> object:
        owner = owner_of()
        if owner is None:  # callers hold the object, so there are none
            raise Cancelled("its object is gone")
        return owner

    def call(items: list[Any]) -> Any:
        return method(there(), items)

    async def call_async(items: list[Any]) -> Any:
        return await method(there(), items)

    made = call_async if is_async(method) else call
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # no __wrapped__: that has another signature
        setattr(made, name, getattr(method, name))
    return made


class Decorator(Protocol):
    """The decorator that `batched(...)` returns, for functions and methods, with `def` or `async def`."""

    @overload
    def __call__(
        self, function: Callable[[list[Item]], Awaitable[Sequence[Result]]], /
    ) -> BatchedCoroutine[Item, Result]: ...
    @overload
    def __call__(self, function: Callable[[list[Item]], Sequence[Result]], /) -> BatchedFunction[Item, Result]: ...
    @overload
    def __call__(
        self, function: Callable[[Owner, list[Item]], Awaitable[Sequence[Result]]], /
    ) -> BatchedMethod[BatchedCoroutine[Item, Result]]: ...
    @overload
    def __call__(
        self, function: Callable[[Owner, list[Item]], Sequence[Result]], /
    ) -> BatchedMethod[BatchedFunction[Item, Result]]: ...


@overload
def batched(
    function: Callable[[list[Item]], Awaitable[Sequence[Result]]], /
) -> BatchedCoroutine[Item, Result]: ...
@overload
def batched(function: Callable[[list[Item]], Sequence[Result]], /) -> BatchedFunction[Item, Result]: ...
@overload
def batched(
    function: Callable[[Owner, list[Item]], Awaitable[Sequence[Result]]], /
) -> BatchedMethod[BatchedCoroutine[Item, Result]]: ...
@overload
def batched(
    function: Callable[[Owner, list[Item]], Sequence[Result]], /
) -> BatchedMethod[BatchedFunction[Item, Result]]: ...
@overload
def batched(
    max_batch_size: int = 32,
    max_latency: float = 0.005,
    capacity: int = 1000,
    repeatable: bool = True,
    watchdog: float = 60.0,
) -> Decorator: ...
def batched(
    max_batch_size: Any = 32,
    max_latency: float = 0.005,
    capacity: int = 1000,
    repeatable: bool = True,
    watchdog: float = 60.0,
) -> Any:
    """Make a function over a list callable with one item at a time: `@batched`, or `@batched(max_batch_size=8)`.

    max_batch_size: most items in a call. max_latency: longest hold in seconds while no call runs; it waits only for
    callers that were just answered and are expected to call again, so a lone caller is never held. Items that come
    while a call runs form the next batch. capacity: most waiting items. repeatable: False if it must not see an item
    twice (then one bad item fails its whole call). watchdog: seconds that a call may take; then its callers get
    `ProcessorHung`. A thread that hangs is replaced once, a coroutine is cancelled. 0 switches it off.

    A `def` becomes a `BatchedFunction`, an `async def` a `BatchedCoroutine`; with `self` before the list, one of these
    for every object. Raises TypeError for anything but a function of one list: a generator, a class method, two
    parameters.
    """
    if callable(max_batch_size) or isinstance(max_batch_size, classmethod):
        return batched()(max_batch_size)
    if not 0.0 <= watchdog < inf:
        raise ConfigError(f"@batched: watchdog={watchdog!r}: must be finite and >= 0 seconds")
    config = GroupConfig(
        name="batched",
        flush=FlushPolicy(max_batch_size=max_batch_size, returns=max_latency, shed=True),
        capacity=capacity,
    )

    def decorate(function: Any) -> Any:
        if isinstance(function, staticmethod):
            function = function.__func__
        kind = BatchedCoroutine if is_async(function) else BatchedFunction

        def make(of_list: Callable[[list[Any]], Any]) -> Any:
            return kind(of_list, config, repeatable, watchdog)

        if not is_method(function):
            check_function(function)
            return make(function)
        check_function(function, "self")
        return BatchedMethod(function, make)

    return decorate
