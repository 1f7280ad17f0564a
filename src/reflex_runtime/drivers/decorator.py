"""`@batched`: write a function over a list, call it with one item, from threads or from coroutines.

    @batched(max_batch_size=32)
    def embed(texts: list[str]) -> list[Vector]: ...

    vector = embed("one text")              # blocks this thread
    vector = await embed.aio("one text")    # does not block the loop

The function runs on one thread of its own and needs no lock. Concurrent callers share its calls. It is a plain function
with one parameter, the list; for a method, wrap the bound one in __init__: `self.embed = batched()(self._embed)`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar, overload

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ConfigError, WaitTimeout
from reflex_runtime.core.events import RequestSettled
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.device import Device
from reflex_runtime.processors.function import FunctionProcessor

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatchedFunction(Generic[Item, Result]):
    """A function over a list that is called with single items. See the module docstring."""

    def __init__(
        self, function: Callable[[list[Item]], Sequence[Result]], config: GroupConfig, repeatable: bool
    ) -> None:
        processor = FunctionProcessor(function, repeatable)
        functools.update_wrapper(self, function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._scheduler = Scheduler([config])
        self._device = Device(self._scheduler, {config.name: processor}, self._deliver, name=self._name)
        self._group = config.name
        self._delivery = threading.RLock()  # a future's callback may cancel another item
        self._starting = threading.Lock()
        self._started = False

    def __call__(self, item: Item, /, *, timeout: float | None = None) -> Result:
        """The result for one item; raises what befell it. timeout: seconds, then WaitTimeout.

        RuntimeError in a thread that runs an event loop, which would stand still: there, await `aio`.
        """
        if self._device.current:
            raise ConfigError("@batched: the function calls itself with a single item, and would wait for itself")
        if _loop_runs():
            raise RuntimeError(f"{self._name}(item) would block the running event loop: await {self._name}.aio(item)")
        if timeout is not None and not timeout >= 0.0:
            raise ConfigError(f"timeout={timeout!r}: must be >= 0 seconds, or None to wait for ever")
        ticket, future = self._submit(item)
        try:
            return future.result(timeout)
        except FutureTimeout:
            self._device.input(lambda scheduler, now: scheduler.abandon(ticket, now))
            if future.done():
                return future.result()  # it came at the last moment
            raise WaitTimeout(f"no answer within {timeout:g} s") from None
        except BaseException:  # an interrupt: nobody waits for the answer any more
            if not future.done():
                self._device.cancel(ticket)
            raise

    async def aio(self, item: Item, /) -> Result:
        """The result for one item, without blocking the loop; cancelling the task takes the item back."""
        ticket, future = self._submit(item)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._device.cancel(ticket)
            raise

    def close(self, drain: bool = True, timeout: float = 5.0) -> bool:
        """Take nothing more, finish or drop what is queued, stop the thread. Returns whether it ended within `timeout`.

        Nobody is left waiting: what has no answer by then gets Drained, or CutShort if the function still runs on it.
        """
        self._device.input(lambda scheduler, now: scheduler.close(now, drain))
        return self._device.stop(timeout)

    def _submit(self, item: Item) -> tuple[Ticket, Future[Result]]:
        if not self._started:
            with self._starting:
                if not self._started:
                    self._device.start()
                    self._started = True
        future: Future[Result] = Future()
        return self._device.submit(Request(item, group=self._group, client=threading.get_ident()), future), future

    def _deliver(self) -> None:
        with self._delivery:  # one place takes events, so they stay in order
            for event in self._device.take_events():
                if isinstance(event, RequestSettled):
                    future, outcome = event.ticket.waiter, event.ticket.outcome
                    if not future.set_running_or_notify_cancel():
                        continue
                    if isinstance(outcome, Done):
                        future.set_result(outcome.value)
                    else:
                        future.set_exception(outcome.error)


def _loop_runs() -> bool:
    """Whether this thread is inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@overload
def batched(function: Callable[[list[Item]], Sequence[Result]], /) -> BatchedFunction[Item, Result]: ...


@overload
def batched(
    max_batch_size: int = 32, max_latency: float = 0.005, capacity: int = 1000, repeatable: bool = True
) -> Callable[[Callable[[list[Item]], Sequence[Result]]], BatchedFunction[Item, Result]]: ...


def batched(
    max_batch_size: Any = 32, max_latency: float = 0.005, capacity: int = 1000, repeatable: bool = True
) -> Any:
    """Make a function over a list callable with one item at a time: `@batched`, or `@batched(max_batch_size=8)`.

    max_batch_size: most items in a call. max_latency: longest hold in seconds on a free thread, and only while threads
    that were answered a moment ago are expected back; batches form by themselves while a call runs, and a lone caller
    is never held. capacity: most waiting items. repeatable: False if the function must not see an item twice (then one
    bad item fails its whole call). Raises TypeError for what is no plain function of one list; see `FunctionProcessor`.
    """
    if callable(max_batch_size) or isinstance(max_batch_size, classmethod):
        return batched()(max_batch_size)
    config = GroupConfig(
        name="batched",
        flush=FlushPolicy(max_batch_size=max_batch_size, returns=max_latency),
        capacity=capacity,
    )
    return lambda function: BatchedFunction(function, config, repeatable)
