"""`@batched`: write a function over a list, call it with one item.

    @batched(max_batch_size=32)
    def embed(texts: list[str]) -> list[Vector]: ...

    vector = embed("one text")              # blocks this thread
    vector = await embed.aio("one text")    # does not block the loop

    @batched
    async def ask(questions: list[str]) -> list[str]: ...

    answer = await ask("one question")

Concurrent callers share the function's calls; one call runs at a time. Each object of a class has its own batches of a
method, which run in parallel to those of other objects.

A `def` runs on one thread of its own and needs no lock (`ThreadDriver`). That thread answers the callers; a loop gets
the answers of a batch in one call. An `async def` is awaited on the loop of its callers, one call at a time, without a
thread; callers of different loops do not share calls.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from math import inf
from numbers import Real
from random import random
from typing import Any, Final, Generic, Self, TypeVar, get_overloads, overload

from reflex_runtime.core.batch import Batch, Outcome
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    ConfigError,
    Drained,
    ProcessorHung,
    QueueFull,
    ReflexError,
    WaitTimeout,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import DEFAULT, Priority, Request, Ticket
from reflex_runtime.run.audience import Cancels, Sink, resolve
from reflex_runtime.run.batcher import Dispatcher
from reflex_runtime.run.process import tell_of_forks
from reflex_runtime.run.processor import (
    ASYNC_WALL,
    FunctionProcessor,
    check_function,
    checked_results,
    failure_of,
    is_async,
    is_method,
    kind_of,
    name_of,
    outcomes_of,
    payloads_of,
)
from reflex_runtime.run.thread_driver import ThreadDriver
from reflex_runtime.settings.declare import did_you_mean, option, validate

GONE: Final = 1.0  # seconds without an item after which a client is forgotten

_numbers = itertools.count(1)  # of clients, in all loops and threads


class Handle:
    """Replaces a batched function, and the `object.method` of a batched method.

    A call may raise `QueueFull` or `Closed` (refused), `Expired`, `Shed`, `Drained` (not computed), or `ProcessorError`
    (it ran and failed; only then a retry computes the item a second time).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._owner: object = None

    def held_by(self, owner: object) -> Self:
        """The same handle, which also keeps its owner alive, as a bound method does."""
        handle = object.__new__(type(self))
        handle.__dict__.update(self.__dict__, _owner=owner)
        return handle

    def __reduce__(self) -> Any:
        """Pickled by its name, as a function is, so that a pool of processes may map it."""
        return name_of(self) if self._owner is None else (getattr, (self._owner, self._name))

    def owner_deleted(self) -> None:
        """The owner was deleted, and with it all callers. The garbage collector calls it: it takes no lock."""

    def _request(
        self, item: Any, client: str, timeout: float | None, priority: Priority, time_limit: float | None
    ) -> Request:
        if timeout is not None and not (isinstance(timeout, Real) and timeout >= 0.0):
            raise ConfigError(f"{self._name}: timeout={timeout!r}: must be >= 0 seconds, or None to wait for ever")
        return Request(item, group=self._name, client=client, priority=priority, time_limit=time_limit)

    async def _result(
        self, calls: _Calls | _Inbox, item: Any, timeout: float | None, priority: Priority, time_limit: float | None
    ) -> Any:
        """The result for one item of a coroutine."""
        client = calls.clients.take()
        try:
            ticket, future = calls.submit(self._request(item, client, timeout, priority, time_limit))
            try:
                return await (future if timeout is None else self._within(timeout, future))  # a limit takes 2 us
            except (asyncio.CancelledError, WaitTimeout):
                calls.cancel(ticket)
                raise
        except (QueueFull, Closed, Drained) as error:
            raise self._refusal(error) from None
        finally:
            calls.clients.give_back(client)

    def _refusal(self, error: ReflexError) -> ReflexError:
        """The same error in the words of a function; those of the scheduler are a server's."""
        words = {
            QueueFull: "as many items as its capacity wait already; call it later, or raise `capacity`",
            Closed: "it was closed, or hung twice, and takes no more items",
            Drained: "it was closed before this item ran",
        }.get(type(error))  # not of a kind of Closed, whose message has the reason
        if words is None:
            return error
        return type(error)(f"{self._name}: {words}", retry_after=error.retry_after, **error.details)

    async def _within(self, timeout: float, future: asyncio.Future[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout) as limit:
                return await future
        except TimeoutError:  # the function's own, or this one
            if not limit.expired():
                raise
            raise WaitTimeout(f"{self._name}: no answer within {timeout:g} s") from None


class LoopClients:
    """The clients of one loop's items: one for each item in flight, which a later item gets.

    So the scheduler learns how long after an answer the next item comes, also in programs that make a task for each
    item (`asyncio.gather`, the handlers of a web server). A free client is drawn by lot: in any fixed order the first
    to come back would always be the same client, and times would seem more regular than they are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free: list[tuple[str, float]] = []  # the client, and when its last item ended

    def take(self) -> str:
        """The client of a new item."""
        free, oldest = self._free, self._clock() - GONE
        while free:
            drawn = int(random() * len(free))
            free[drawn], free[-1] = free[-1], free[drawn]
            client, left = free.pop()
            if left >= oldest:
                return client
        return f"task {next(_numbers)}"

    def give_back(self, client: str) -> None:
        """Its item ended."""
        self._free.append((client, self._clock()))


class _Thread(threading.local):
    """client: of this thread. The system reuses a thread's ident."""

    def __init__(self) -> None:
        self.client = f"thread {next(_numbers)}"


_thread = _Thread()


Item = TypeVar("Item")
Result = TypeVar("Result")
Made = TypeVar("Made")


def _of_this_loop(by_loop: dict[asyncio.AbstractEventLoop, Made], make: Callable[[], Made]) -> Made:
    """The object of the running loop, made at first use. Objects of closed loops are dropped."""
    loop = asyncio.get_running_loop()
    found = by_loop.get(loop)
    if found is None:
        for other in list(by_loop):
            if other.is_closed():
                by_loop.pop(other, None)
        found = by_loop.setdefault(loop, make())
    return found


# -- an `async def` ----------------------------------------------------------------------------------------------------


_CALLS_ITSELF: Final = "@batched: the function calls itself with a single item, and would wait for itself"
_inside: ContextVar[Batch | None] = ContextVar("_inside", default=None)  # the batch that this task runs, or ran


class BatchedCoroutine(Handle, Generic[Item, Result]):
    """A coroutine function over a list that is awaited with single items. `Handle` lists its errors.

    Batches, sinks and `close` are those of the running loop.
    """

    def __init__(self, function: Callable[[list[Item]], Awaitable[Sequence[Result]]], rules: _Batched) -> None:
        super().__init__(function)
        self._make = partial(_Calls, function, rules, self._name)
        self._calls: dict[asyncio.AbstractEventLoop, _Calls] = {}

    async def __call__(
        self,
        item: Item,
        /,
        *,
        timeout: float | None = None,
        priority: Priority = DEFAULT,
        time_limit: float | None = None,
    ) -> Result:
        """The result for one item. Cancelling the task cancels the item.

        timeout: most seconds to wait, then WaitTimeout. time_limit: seconds from now after which the result has no use,
        then Expired.
        """
        calls = _of_this_loop(self._calls, self._make)
        if (running := _inside.get()) is not None and running is calls.running:
            raise ConfigError(_CALLS_ITSELF)
        return await self._result(calls, item, timeout, priority, time_limit)  # type: ignore[no-any-return]

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with every later event of this loop, in order. It must be quick."""
        _of_this_loop(self._calls, self._make).dispatcher.add_sink(sink)

    async def close(self, drain: bool = True, timeout: float = 5.0) -> None:
        """Accept no more items in this loop, and finish or drop queued ones within `timeout` seconds.

        Every caller is answered: without a result by then with Drained, or CutShort if the function still runs.
        """
        await _of_this_loop(self._calls, self._make).dispatcher.close(drain, timeout)


class _Calls:
    """The calls of one function in one loop. running: the batch in the call that is out."""

    def __init__(self, function: Callable[[list[Any]], Awaitable[Any]], rules: _Batched, name: str) -> None:
        self._function, self._rules = function, rules
        self.running: Batch | None = None
        self.dispatcher = Dispatcher([rules.group(name)], self._run, max_batches=1)
        self.dispatcher.start()
        self.clients = LoopClients()
        self.cancel = self.dispatcher.cancel

    def submit(self, request: Request) -> tuple[Ticket, asyncio.Future[Any]]:
        ticket = self.dispatcher.submit(request)
        return ticket, ticket.waiter

    async def _run(self, batch: Batch) -> Sequence[Outcome]:
        self.running = batch
        _inside.set(batch)
        try:
            async with asyncio.timeout(self._rules.watchdog or None) as limit:
                with ASYNC_WALL:
                    results = await self._function(payloads_of(batch))
            return outcomes_of(checked_results(self._function, results, count=len(batch.grants)), batch)
        except Exception as error:
            hung = ProcessorHung(f"{batch.group}: the function did not come back within {self._rules.watchdog:g} s")
            return failure_of(hung if limit.expired() else error, batch, self._rules.repeatable)
        finally:
            self.running = None


# -- a `def` -----------------------------------------------------------------------------------------------------------


class BatchedFunction(Handle, Generic[Item, Result]):
    """A function over a list that is called with single items. `Handle` lists its errors."""

    def __init__(self, function: Callable[[list[Item]], Sequence[Result]], rules: _Batched) -> None:
        super().__init__(function)
        self._driver = _Driver(function, rules, self._name)

    def __call__(
        self,
        item: Item,
        /,
        *,
        timeout: float | None = None,
        priority: Priority = DEFAULT,
        time_limit: float | None = None,
    ) -> Result:
        """The result for one item. Blocks the thread: RuntimeError in one that runs an event loop; await `aio` there.

        timeout: most seconds to wait, then WaitTimeout. time_limit: seconds from now after which the result has no use,
        then Expired.
        """
        driver = self._driver
        if driver.device.current:
            raise ConfigError(_CALLS_ITSELF)
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{self._name}(item) would block the running event loop: await {self._name}.aio(item)")
        request = self._request(item, _thread.client, timeout, priority, time_limit)
        try:
            return driver.ask(request, inf if timeout is None else timeout, self._name)  # type: ignore[no-any-return]
        except (QueueFull, Closed, Drained) as error:
            raise self._refusal(error) from None

    async def aio(
        self,
        item: Item,
        /,
        *,
        timeout: float | None = None,
        priority: Priority = DEFAULT,
        time_limit: float | None = None,
    ) -> Result:
        """The same without blocking the loop. Cancelling the task or a `timeout` cancels the item."""
        inbox = _of_this_loop(self._driver.inboxes, partial(_Inbox, self._driver))
        return await self._result(inbox, item, timeout, priority, time_limit)  # type: ignore[no-any-return]

    def add_sink(self, sink: Sink) -> None:
        """Call the sink with every later event, in order, on any thread. It must be quick, and call no handle."""
        self._driver.add_sink(sink)

    def close(self, drain: bool = True, timeout: float = 5.0) -> bool:
        """Accept no more items, finish or drop queued ones, stop the thread. Returns whether it ended in `timeout`.

        Every caller is answered: without a result by then with Drained, or CutShort if the function still runs.
        """
        self._driver.device.close(drain)
        return self._driver.stop_threads(timeout)

    def owner_deleted(self) -> None:
        self._driver.release()


class _Driver(ThreadDriver):
    """The driver of one batched function. Its threads start with the first item."""

    def __init__(self, function: Callable[[list[Any]], Any], rules: _Batched, name: str, sinks: Iterable[Sink] = ()):
        self._made_of = function, rules, name
        processor = FunctionProcessor(function, rules.repeatable)
        super().__init__(rules.group(name), processor, rules.watchdog or inf, time.monotonic, name, sinks)
        self.inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}
        tell_of_forks(self)

    def forked(self) -> None:
        """Start anew in a forked process; the sinks stay. Waiting callers are threads of the parent."""
        self.__init__(*self._made_of, self._audience.sinks)  # type: ignore[misc]

    def _start_threads(self) -> None:
        thread = self.device.thread
        if thread is None or thread.ident is None:  # else the timekeeper could not start the last time
            self.device.start()
        super()._start_threads()

    def deliver(self) -> None:
        """Wake each loop that has answers, too, once for all of them."""
        super().deliver()
        for inbox in tuple(self.inboxes.values()):
            inbox.call()


class _Inbox:
    """The items of one loop's coroutines. The device is woken once for the items of a turn, the loop once for the
    answers of a batch."""

    def __init__(self, driver: _Driver) -> None:
        self._loop, self._driver = asyncio.get_running_loop(), driver
        self.clients = LoopClients(driver.clock)
        self._cancels = Cancels(driver.device.input)
        self._wake_due = self._called = False
        self._come: deque[Ticket] = deque()

    def submit(self, request: Request) -> tuple[Ticket, asyncio.Future[Any]]:
        future: asyncio.Future[Any] = self._loop.create_future()
        ticket = self._driver.admit(request, partial(self._put, future), wake=False)
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_soon(self._wake)
        return ticket, future

    def cancel(self, ticket: Ticket) -> None:
        self._cancels.add(ticket, self._loop)

    def _wake(self) -> None:
        self._wake_due = False
        self._driver.device.wake()

    def _put(self, future: asyncio.Future[Any], ticket: Ticket) -> None:
        """Keep an answer for the loop until `call`; on any thread."""
        ticket.waiter = future
        self._come.append(ticket)

    def call(self) -> None:
        """Let the loop take its answers, if there are any; on any thread."""
        if self._come and not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop is closed: its coroutines are gone
                self._come.clear()

    def _empty(self) -> None:
        self._called = False  # first, so that later answers call again
        while self._come:
            resolve(self._come.popleft())


# -- the decorator -----------------------------------------------------------------------------------------------------


Owner = TypeVar("Owner")
Bound = TypeVar("Bound", bound=Handle)


class BatchedMethod(Generic[Bound]):
    """A batched method in its class. `object.method` is the object's own batched function.

    That is made at first use and closed when the object is deleted. It does not keep the object alive; a call does.
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
                f"@batched {name_of(self._function)}: {kind_of(owner)} cannot be referred to weakly; add "
                "'__weakref__' to its __slots__"
            ) from None
        with self._binding:
            if (found := self._bound.get(id(owner))) is None:
                found = self._bound[id(owner)] = self._make(_of_owner(self._function, owner_of))
                weakref.finalize(owner, self._gone, id(owner)).atexit = False
        return found

    def _gone(self, key: int) -> None:
        self._bound.pop(key).owner_deleted()


def _of_owner(method: Callable[..., Any], owner_of: Callable[[], object | None]) -> Callable[[list[Any]], Any]:
    """The method of one object as a function of the list. It does not keep the object alive."""

    def call(items: list[Any]) -> Any:  # of an `async def` it returns the coroutine
        owner = owner_of()
        if owner is None:  # callers hold the object, so there are none
            raise Cancelled("its object is gone")
        return method(owner, items)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # no __wrapped__: that has another signature
        setattr(call, name, getattr(method, name))
    return call


@dataclass(frozen=True, slots=True)
class _Batched:
    """Makes a function over a list callable with one item at a time: `@batched`, or `@batched(max_batch_size=8)`.

    max_batch_size: most items in a call. max_latency: longest hold in seconds while no call runs, for callers that were
    just answered and are expected to call again; a lone caller is never held. Items that come while a call runs form
    the next batch. capacity: most waiting items. repeatable: False for a function that must not see an item twice; then
    one bad item fails its whole call. watchdog: seconds that a call may take; then its callers get `ProcessorHung`. A
    thread that hangs is replaced once, a coroutine is cancelled. 0 switches it off.

    A `def` becomes a `BatchedFunction`, an `async def` a `BatchedCoroutine`; with `self` before the list, one for every
    object. TypeError for anything but a function of one list: a generator, a class method, two parameters.
    """

    max_batch_size: int = option(32, within=(1, 1_000_000))
    max_latency: float = option(0.005, within=(0, 60, "seconds"))
    capacity: int = option(1000, within=(1, 1_000_000))
    repeatable: bool = True
    watchdog: float = option(60.0, within=(0, 86_400, "seconds"))

    def __post_init__(self) -> None:
        validate(self, "@batched")

    def group(self, name: str) -> GroupConfig:
        """The same for the scheduler. name: of the function."""
        flush = FlushPolicy(max_batch_size=self.max_batch_size, returns=self.max_latency, shed=True)
        return GroupConfig(name=name, flush=flush, capacity=self.capacity)

    @overload
    def __call__(self, function: Callable[[list[Item]], Awaitable[Sequence[Result]]], /
    ) -> BatchedCoroutine[Item, Result]: ...
    @overload
    def __call__(self, function: Callable[[list[Item]], Sequence[Result]], /) -> BatchedFunction[Item, Result]: ...
    @overload
    def __call__(self, function: Callable[[Owner, list[Item]], Awaitable[Sequence[Result]]], /
    ) -> BatchedMethod[BatchedCoroutine[Item, Result]]: ...
    @overload
    def __call__(self, function: Callable[[Owner, list[Item]], Sequence[Result]], /
    ) -> BatchedMethod[BatchedFunction[Item, Result]]: ...
    @overload
    def __call__(
        self,
        *,
        max_batch_size: int = 32,
        max_latency: float = 0.005,
        capacity: int = 1000,
        repeatable: bool = True,
        watchdog: float = 60.0,
    ) -> _Batched: ...
    def __call__(self, *functions: Any, **options: Any) -> Any:
        if len(functions) > 1 or any(isinstance(given, int | float) for given in functions):
            raise TypeError("@batched: takes a function; options are keywords, such as max_batch_size=8")
        known = self.__slots__
        for name in options:
            if name not in known:
                raise TypeError(f"@batched: {name}: no such option{did_you_mean(name, known)}")
        made = replace(self, **options) if options else self
        return made._of(*functions) if functions else made

    def _of(self, function: Any) -> Any:
        """What replaces the function."""
        if isinstance(function, staticmethod):
            function = function.__func__
        make = partial(BatchedCoroutine if is_async(function) else BatchedFunction, rules=self)
        if not is_method(function):
            check_function(function)
            return make(function)
        check_function(function, "self")
        return BatchedMethod(function, make)


_Batched.__call__.__signature__ = signature(get_overloads(_Batched.__call__)[-1])  # type: ignore[attr-defined]
batched: Final = _Batched()
