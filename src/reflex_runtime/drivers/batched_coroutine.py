"""`@batched` on an `async def`: a coroutine function over a list that is awaited with one item.

The function is awaited on the loop of its callers, one call at a time; callers of different loops do not share calls.
There is no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar

from reflex_runtime.core.batch import Batch, Outcome
from reflex_runtime.core.errors import ConfigError, ProcessorHung
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import DEFAULT, Priority, Request
from reflex_runtime.drivers.audience import Sink
from reflex_runtime.drivers.batched_item import Handle, TaskClients, forget_closed
from reflex_runtime.drivers.dispatcher import Dispatcher
from reflex_runtime.processors.base import failure_of, outcomes_of
from reflex_runtime.processors.function import checked_results, payloads_of

Item = TypeVar("Item")
Result = TypeVar("Result")

_inside: ContextVar[Batch | None] = ContextVar("_inside", default=None)  # the batch that this task runs, or ran


class BatchedCoroutine(Handle, Generic[Item, Result]):
    """A coroutine function over a list that is awaited with single items; `batched` makes it.

    `Handle` lists the errors of its calls. Callers, sinks and `close` are those of the running loop.
    """

    def __init__(
        self,
        function: Callable[[list[Item]], Awaitable[Sequence[Result]]],
        config: GroupConfig,
        repeatable: bool,
        watchdog: float,
    ) -> None:
        super().__init__(function)
        self._group = config.name
        self._make = partial(_Calls, function, config, repeatable, watchdog)
        self._calls: dict[asyncio.AbstractEventLoop, _Calls] = {}

    async def __call__(
        self, item: Item, /, *, priority: Priority = DEFAULT, time_limit: float | None = None
    ) -> Result:
        """The result for one item; cancelling the task that awaits it cancels the item.

        time_limit: seconds from now after which the result has no use, then Expired.
        """
        calls = self._of_this_loop()
        if (running := _inside.get()) is not None and running is calls.running:
            raise ConfigError("@batched: the function calls itself with a single item, and would wait for itself")
        client = calls.clients.current()
        request = Request(item, group=self._group, client=client, priority=priority, time_limit=time_limit)
        ticket = calls.dispatcher.submit(request)
        try:
            result: Result = await ticket.waiter
        except asyncio.CancelledError:
            calls.dispatcher.cancel(ticket)
            raise
        return result

    def add_sink(self, sink: Sink) -> None:
        """Call it with every event of this loop from now on, in order; it must be quick."""
        self._of_this_loop().dispatcher.add_sink(sink)

    async def close(self, drain: bool = True, timeout: float = 5.0) -> None:
        """Accept no more items in this loop, and finish or drop those queued within `timeout` seconds.

        Every caller is answered: without a result by then it gets Drained, or CutShort if the function still runs.
        """
        await self._of_this_loop().dispatcher.close(drain, timeout)

    def _of_this_loop(self) -> _Calls:
        loop = asyncio.get_running_loop()
        found = self._calls.get(loop)
        if found is None:
            forget_closed(self._calls)
            found = self._calls[loop] = self._make()
        return found


class _Calls:
    """The calls of one function in one loop. running: the batch that it is awaited for, if there is one."""

    def __init__(
        self,
        function: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        config: GroupConfig,
        repeatable: bool,
        watchdog: float,
    ) -> None:
        self._function, self._repeatable, self._watchdog = function, repeatable, watchdog
        self.running: Batch | None = None
        self.dispatcher = Dispatcher([config], self._run, max_batches=1)
        self.dispatcher.start()
        self.clients = TaskClients()

    async def _run(self, batch: Batch) -> Sequence[Outcome]:
        self.running = batch
        _inside.set(batch)
        try:
            async with asyncio.timeout(self._watchdog or None) as limit:
                results = await self._function(payloads_of(batch))
            return outcomes_of(checked_results(self._function, results), batch)
        except Exception as error:
            hung = ProcessorHung(f"the function did not come back within {self._watchdog:g} s")
            return failure_of(hung if limit.expired() else error, batch, self._repeatable)
        finally:
            self.running = None
