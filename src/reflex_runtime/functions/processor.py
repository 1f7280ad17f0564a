"""Runs batches of a user's function: a call with its items, or a step of its generators.

A call that raises, or does not return one result for each item, is repeated in parts until the bad items run alone.
A step cannot be repeated. If a generator fails at its first part, its items begin again one by one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from reflex_runtime.core.batch import Batch, Done, More
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Ticket
from reflex_runtime.run.onnx_session import CPU, BatchAxisError, OnnxSession
from reflex_runtime.run.processor import THREAD_WALL, BaseProcessor, checked_results, name_of, payloads_of, wrapped

log = logging.getLogger("reflex.server")

MOST_BEHIND: Final = 1024  # unread parts of an item whose generator continues for other items


class FunctionCalls(BaseProcessor):
    """Calls a function of a list on the device thread, and runs coroutines in a loop of that thread.

    setup: called once before, with the device if it takes an argument.
    """

    def __init__(self, function: Callable[..., Any], setup: Callable[..., Any] | None = None, device: str = "cpu"):
        self.function = function
        self._setup, self._device = setup, device
        self._local = threading.local()  # a thread that hangs is replaced by another

    def load(self) -> None:
        """Called once, on the device thread."""
        if self._setup is not None:
            takes = bool(inspect.signature(self._setup).parameters)
            self.finished(self._setup(self._device) if takes else self._setup())

    def finished(self, result: Any) -> Any:
        """The result of a call, awaited if it is awaitable."""
        if not inspect.isawaitable(result):
            return result
        runner = getattr(self._local, "runner", None)
        if runner is None:
            runner = self._local.runner = asyncio.Runner()
        return runner.run(_awaited(result))

    def checked(self, results: Any, count: int) -> Sequence[Any]:
        """The results, one for each item. Raises ProcessorError for others: the call is then repeated in parts."""
        return checked_results(self.function, results, ProcessorError, count)

    def stop(self) -> None:
        runner = getattr(self._local, "runner", None)
        if runner is not None:
            runner.close()
            del self._local.runner


async def _awaited(result: Any) -> Any:
    return await result


class ItemCalls(FunctionCalls):
    """A call of the function for each batch."""

    def run(self, batch: Batch) -> Sequence[Any]:
        items = payloads_of(batch)
        loop = asyncio._get_running_loop()
        if loop is None:
            return self._call(items)
        asyncio._set_running_loop(None)  # a brief batch runs on the server's loop, which the function must not use
        try:
            return self._call(items)
        finally:
            asyncio._set_running_loop(loop)

    def _call(self, items: list[Any]) -> Sequence[Any]:
        count = len(items)  # before the call: the function may change the list
        with THREAD_WALL:
            return self.checked(self.finished(self.function(items)), count)


class OnnxItems(BaseProcessor):
    """An ONNX graph. Without a batch axis its items run one by one.

    axis: why there is no batch axis, else "". skipped: how many first axes of a port an item does not have.
    """

    def __init__(self, path: Path, provider: str, threads: int) -> None:
        self.any_thread, self.axis, self.skipped = provider == CPU, "", 1
        try:
            self.session = OnnxSession(path, provider=provider, threads=threads)
            self._check_rows()
        except BatchAxisError as error:
            self.session = OnnxSession(path, provider=provider, threads=threads, whole=True)
            self.axis, self.skipped = error.message, 0

    def _check_rows(self) -> None:
        """Raise BatchAxisError if results are not one row for each item, such as the final boxes of a detector: the
        graph's symbolic sizes do not show that. Other errors are raised later by `load`."""
        try:
            self.load()
        except BatchAxisError:
            raise
        except Exception as error:
            log.debug("%s: the first call failed: %s", self.session.path, error)

    def load(self) -> None:
        """Make the first call, which takes longest, if all sizes of an item are known."""
        shapes = {name: port.dims[self.skipped :] for name, port in self.session.inputs.items()}
        if not any(None in shape for shape in shapes.values()):
            self._outputs([{name: np.zeros(shape, np.float32) for name, shape in shapes.items()}], {})

    def run(self, batch: Batch) -> Sequence[Any]:
        return self._outputs(payloads_of(batch), batch.notes)

    def _outputs(self, items: Sequence[Any], notes: dict[str, Any]) -> Sequence[Any]:
        if self.axis:
            return [self.session.call(item) for item in items]
        rows = {name: np.stack([item[name] for item in items]) for name in self.session.inputs}
        found = self.session.run(rows, notes)
        return [{name: array[row] for name, array in found.items()} for row in range(len(items))]


class _Cohort:
    """Items of one generator, which began together. parts: the unread parts of each item that has not left.
    behind: items whose parts were dropped, because too many were unread."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.tickets = tuple(tickets)
        self.parts: dict[Ticket, deque[Any]] = {ticket: deque() for ticket in tickets}
        self.behind: set[Ticket] = set()
        self.iterator: Any = iter(())
        self.ended = False
        self.error: Exception | None = None


class Streams(FunctionCalls):
    """Steps of generators: items join and leave between two steps. A part is the value of a `More`; None is no part.

    A generator function is called with items that come together, and yields lists with a part for each of them. If a
    function returns an iterator for each item, each step takes a part from each iterator.
    """

    repeatable = False
    each = False  # whether the function returns an iterator for each item

    def __init__(self, function: Callable[..., Any], setup: Callable[..., Any] | None = None, device: str = "cpu"):
        super().__init__(function, setup, device)
        self._cohorts: dict[Ticket, _Cohort] = {}

    def run(self, batch: Batch) -> Sequence[Any]:
        self.drop(batch.left)
        if new := [ticket for ticket in batch.grants if ticket not in self._cohorts]:
            self._begin(new)
        return [self._step(ticket) for ticket in batch.grants]

    def _begin(self, tickets: Sequence[Ticket]) -> None:
        """Call the function with new items, and take their first parts. If that fails, each item begins alone."""
        cohorts = [_Cohort(tickets)]
        try:
            with THREAD_WALL:
                made = self.function([ticket.request.payload for ticket in tickets])
                if self.each:
                    made = self.checked(self.finished(made), len(tickets))
                    cohorts = [_Cohort([ticket]) for ticket in tickets]
                for cohort, iterator in zip(cohorts, made if self.each else [made], strict=True):
                    cohort.iterator = iterator
                    self._advance(cohort)
        except Exception as error:
            if len(tickets) > 1:
                for ticket in tickets:
                    self._begin([ticket])
                return
            cohorts[0].error = error
        self._cohorts |= {ticket: cohort for cohort in cohorts for ticket in cohort.tickets}

    def _advance(self, cohort: _Cohort) -> None:
        """Take the next part of each of its items."""
        count = len(cohort.tickets)
        try:
            iterator = cohort.iterator
            found = self.finished(anext(iterator)) if isinstance(iterator, AsyncIterator) else next(iterator)
        except (StopIteration, StopAsyncIteration):
            cohort.ended = True
            return
        parts = [found] if self.each else self.checked(found, count)
        for ticket, part in zip(cohort.tickets, parts, strict=True):
            if ticket in cohort.parts and ticket not in cohort.behind:
                cohort.parts[ticket].append(part)
                if len(cohort.parts[ticket]) > MOST_BEHIND:
                    cohort.behind.add(ticket)
                    cohort.parts[ticket].clear()

    def _step(self, ticket: Ticket) -> Any:
        """The next part of one item, its end, or its error."""
        cohort = self._cohorts[ticket]
        if ticket in cohort.behind:
            self.drop([ticket])
            return ProcessorError(f"its reader is more than {MOST_BEHIND} parts behind readers of the same generator")
        if not (cohort.parts[ticket] or cohort.ended or cohort.error):
            try:
                with THREAD_WALL:
                    self._advance(cohort)
            except Exception as error:
                cohort.error = error
        if cohort.parts[ticket]:
            return More(cohort.parts[ticket].popleft())
        self.drop([ticket])
        if cohort.error is None:
            return Done()
        return cohort.error if isinstance(cohort.error, ProcessorError) else wrapped(cohort.error)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            cohort = self._cohorts.pop(ticket, None)
            if cohort is not None:
                del cohort.parts[ticket]
                if not cohort.parts:
                    self._end(cohort.iterator)

    def _end(self, iterator: Any) -> None:
        """Close an iterator all of whose items have left. Errors are only logged."""
        close = getattr(iterator, "aclose", None) or getattr(iterator, "close", None)
        if close is None:
            return
        try:
            with THREAD_WALL:
                self.finished(close())
        except Exception as error:
            log.warning("%s: a generator could not be closed: %s", name_of(self.function), error)
