"""Processors that a test opens and shuts like a gate. Real threads, real loops; whoever waits, waits for an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from reflex_runtime.core.batch import Batch, Event
from reflex_runtime.core.request import Ticket
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import BaseProcessor

T = TypeVar("T")

PATIENCE = 60.0  # seconds until a test that waits is broken


class Gate(BaseProcessor):
    """Answers each payload with itself once the gate is open. An exception as payload is returned as that item's fault.

    calls: payloads of every batch so far. entered: set whenever a batch has come in.
    """

    def __init__(self, is_open: bool = False) -> None:
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.entered = threading.Event()
        self.calls: list[list[Any]] = []
        self.dropped: list[Ticket] = []
        self.started = self.stopped = 0

    def start(self) -> None:
        self.started += 1

    def run(self, batch: Batch) -> Sequence[Any]:
        self.calls.append([ticket.request.payload for ticket in batch.grants])
        self.entered.set()
        assert self.gate.wait(PATIENCE), "the test never opened the gate"
        return [ticket.request.payload for ticket in batch.grants]

    def drop(self, tickets: Sequence[Ticket]) -> None:
        self.dropped += tickets

    def stop(self) -> None:
        self.stopped += 1

    async def busy(self) -> None:
        """Returns once a batch is inside."""
        assert await asyncio.to_thread(self.entered.wait, PATIENCE)
        self.entered.clear()


class Log:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.seen.append(event)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.seen if isinstance(event, kind)]


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that does not wait for ever."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE):
            return await main

    return asyncio.run(limited())


async def asleep(batcher: Batcher) -> None:
    """Until the device waits for work: a thread that is not there yet takes what it finds, and splits what comes."""
    async with asyncio.timeout(PATIENCE):
        while not batcher.device._bell.waiting:  # noqa: ASYNC110 - another thread says so, and no event
            await asyncio.sleep(0)


def cannot_learn(batch: Batch, elapsed: float) -> None:
    """The `observe` of a broken cost model."""
    raise ZeroDivisionError
