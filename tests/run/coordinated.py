"""What the tests of the coordinator share: processors with a gate, feeds on threads of their own, and who is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from reflex_runtime.core.flush import Controller, FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchEntry
from run.helpers import PATIENCE

Answer = Callable[[Sequence[BatchEntry]], Any]


def echo(entries: Sequence[BatchEntry]) -> list[Any]:
    """Each frame's answer says whose it is and which."""
    return [(entry.feed_id, entry.frame) for entry in entries]


class Detector:
    """A processor that answers once its gate is open; it waits for longer than those that wait for its answer.

    answer: what it makes of the entries. frames: of every call so far. entered: released once a call.
    log: (method, thread) of every call of any kind.
    """

    def __init__(self, is_open: bool = True, answer: Answer = echo, name: str = "detector") -> None:
        self.id = name
        self.answer = answer
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.entered = threading.Semaphore(0)
        self.calls: list[list[BatchEntry]] = []
        self.log: list[tuple[str, int]] = []

    def on_start(self) -> None:
        self.log.append(("on_start", threading.get_ident()))

    def process(self, entries: Sequence[BatchEntry]) -> Any:
        self.log.append(("process", threading.get_ident()))
        self.calls.append(list(entries))
        self.entered.release()
        assert self.gate.wait(2 * PATIENCE), "the test never opened the gate"
        return self.answer(entries)

    def on_stop(self) -> None:
        self.log.append(("on_stop", threading.get_ident()))

    @property
    def frames(self) -> list[list[Any]]:
        return [[entry.frame for entry in call] for call in self.calls]

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.log]

    @property
    def threads(self) -> set[int]:
        return {thread for _, thread in self.log}

    def busy(self) -> None:
        """Returns once a batch has come in."""
        assert self.entered.acquire(timeout=PATIENCE)


class Coordinator(BatchCoordinator):
    """One that a test can wait for: `asked(n)` returns once n more submissions were admitted or refused."""

    def __init__(self, processor: Any, config: BatchConfig | None = None, **more: Any) -> None:
        super().__init__(processor, config, **more)
        self._asked = threading.Semaphore(0)

    def admit(self, request: Request, settled: Callable[[Ticket], None]) -> Ticket:
        try:
            return super().admit(request, settled)
        finally:
            self._asked.release()

    def asked(self, n: int) -> None:
        for _ in range(n):
            assert self._asked.acquire(timeout=PATIENCE)


class Patient(BatchConfig):
    """Holds whatever is not full for max_latency, due or not: for what happens while frames are held."""

    def group(self, name: str, sizes: Controller | None = None) -> GroupConfig:
        return replace(super().group(name, sizes), flush=FlushPolicy.by_size(self.max_batch_size, self.max_latency))


class Stepped:
    """A clock that a test sets. The coordinator's threads look at it when they are rung."""

    def __init__(self) -> None:
        self.now = 64.0

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: float, coordinator: BatchCoordinator) -> None:
        self.now += seconds
        coordinator._bell.put("alarm")
        coordinator.device.input(lambda scheduler, now: None)


class Caller(threading.Thread):
    """A feed's thread, blocked in `submit_and_wait`. seconds: for which it was."""

    def __init__(self, handle: BatchCoordinator, feed: str, frame: Any = None, **options: Any) -> None:
        super().__init__(name=f"feed-{feed}", daemon=True)
        self._call: Callable[[], Any] = lambda: handle.submit_and_wait(feed, frame, **options)
        self._end: Any = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._end = self._call()
        except BaseException as error:
            self._end = error
        self.seconds = time.monotonic() - began

    def end(self) -> Any:
        """The result, or the error that was raised."""
        self.join(PATIENCE)
        assert not self.is_alive(), "a caller was left waiting"
        return self._end


def end_of(future: Future[Any]) -> Any:
    """Its result or its error, within patience."""
    return future.exception(PATIENCE) or future.result()


def busy_with(coordinator: BatchCoordinator, detector: Any, feed: str = "busy") -> Future[Any]:
    """Returns once the detector is inside a batch with one frame of that feed."""
    future = coordinator.submit(feed, "busy")
    detector.busy()
    return future


def nobody_left() -> Iterator[None]:
    """For a fixture: every thread that a coordinator started during the test has ended after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("reflex-"):
            thread.join(PATIENCE / 4)
            assert not thread.is_alive(), f"{thread.name} was left behind"
