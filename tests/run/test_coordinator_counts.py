"""Every submission counted by hand, against metrics and health: operations drawn at random, faults and all."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from reflex_runtime import BatchConfig, BatchCoordinator, BatchEntry
from reflex_runtime.core.batch import Done, Event, Failed, RequestAbandoned, RequestSettled
from reflex_runtime.core.errors import (
    Closed,
    Displaced,
    Drained,
    Dropped,
    Expired,
    InFlightCapReached,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    ReflexError,
    ResultCountMismatch,
    WaitTimeout,
)
from reflex_runtime.feeds.runtime.health import (
    BatchError,
    BatchInFlightExceeded,
    BatchSubmissionRejected,
    BatchTimeout,
    Health,
    StageError,
)
from run.coordinated import Coordinator, nobody_left
from run.helpers import PATIENCE

THREADS = 8
OPERATIONS = 40_000  # thousands of batches on a free machine
CONFIG = BatchConfig(
    max_batch_size=8,
    max_latency=0.001,
    queue_capacity=48,
    response_timeout=0.004,
    max_in_flight_per_feed=10,
    watchdog=0.03,
)


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    yield from nobody_left()


RARE = (0.181, 0.183, 0.01, 0.03, 0.05) * 3  # moods of every tenth batch at first: a busy machine forms few batches


class Moody:
    """Does what a drawn number says. Answers with whose frame it is and which, so that a wrong one shows."""

    id = "moody"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._rare = iter(RARE)
        self._calls = 0
        self.pause = threading.Event()  # never set: waited for

    def on_start(self) -> None: ...

    def on_stop(self) -> None: ...

    def process(self, entries: Sequence[BatchEntry]) -> Any:
        answers: list[Any] = [(e.feed_id, e.frame) for e in entries]
        self._calls += 1
        drawn = self._random.random()
        mood = next(self._rare, drawn) if self._calls % 10 == 0 else drawn
        if mood < 0.02:
            raise ValueError("a bad batch")
        if mood < 0.04:
            return None
        if mood < 0.06:
            return answers[1:]
        if mood < 0.10:
            answers[self._random.randrange(len(answers))] = None
        elif mood < 0.14:
            answers[self._random.randrange(len(answers))] = KeyError("a bad frame")
        elif mood < 0.18:
            self.pause.wait(0.001)
        elif mood < 0.182:
            self.pause.wait(0.012)  # callers of `submit_and_wait` give up
        elif mood < 0.184:
            self.pause.wait(0.06)  # beyond the watchdog
        elif any(e.frame % 211 == 0 for e in entries):
            raise ValueError("a bad frame")
        return answers


class Witness:
    """A sink that counts ends on its own account."""

    def __init__(self) -> None:
        self.ends: Counter[tuple[str, str]] = Counter()
        self.tickets: set[int] = set()
        self.twice = 0
        self.left: Counter[str] = Counter()
        self.displaced: Counter[str] = Counter()
        self.bad_batches: set[int] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestAbandoned):
            self.left[event.ticket.request.client] += 1  # type: ignore[index]
        elif isinstance(event, RequestSettled):
            ticket = event.ticket
            self.twice += ticket.seq in self.tickets
            self.tickets.add(ticket.seq)
            self.ends[str(ticket.request.client), end_of(ticket.outcome)] += 1
            if isinstance(ticket.outcome, Failed) and isinstance(ticket.outcome.error, Displaced):
                self.displaced[str(ticket.request.client)] += 1
            if end_of(ticket.outcome) == "failed" and ticket.admission is not None:
                self.bad_batches.add(ticket.admission.id)


def end_of(outcome: Any) -> str:
    if isinstance(outcome, Done):
        return "processed"
    return "dropped" if isinstance(outcome.error, Dropped) else "failed"


class Feed:
    """Submits and cancels at random, and keeps its own books."""

    def __init__(self, handle: BatchCoordinator, name: str, operations: int, seed: int) -> None:
        self.handle, self.name, self.operations = handle, name, operations
        self.random = random.Random(seed)
        self.refused: Counter[type] = Counter()
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[type] = Counter()
        self.wrong: list[Any] = []
        self.futures: list[tuple[int, Future[Any]]] = []
        self.answers: Counter[int] = Counter()  # callbacks of each future
        self.submitted = 0
        self.nearly = threading.Event()  # nine tenths are done
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for n in range(self.operations):
                self.operate(n)
                if n == self.operations * 9 // 10:
                    self.nearly.set()
        except BaseException as error:
            self.error = error

    def operate(self, n: int) -> None:
        drawn = self.random.random()
        limit = self.random.choice((0.0, 0.0005, 0.005)) if self.random.random() < 0.05 else None
        self.submitted += 1
        try:
            if drawn < 0.04:
                self.count(n, self.handle.submit_and_wait(self.name, n, time_limit=limit))
                return
            future = self.handle.submit(self.name, n, time_limit=limit)
        except (QueueFull, InFlightCapReached, Closed) as error:
            self.refused[type(error)] += 1
            if drawn < 0.5 and self.futures:
                self.futures[-1][1].exception(PATIENCE) if not self.futures[-1][1].cancelled() else None
            return
        except WaitTimeout:
            self.ends["left"] += 1
            return
        except ReflexError as error:
            self.count(n, error)
            return
        future.add_done_callback(lambda _: self.answers.update((n,)))
        self.futures.append((n, future))
        if drawn < 0.08:
            future.cancel()
        elif drawn < 0.1:
            self.random.choice(self.futures[-20:])[1].cancel()

    def count(self, n: int, end: Any) -> None:
        """One submission ended; n is what was asked."""
        if isinstance(end, ReflexError):
            self.kinds[type(end)] += 1
            self.ends["dropped" if isinstance(end, Dropped) else "failed"] += 1
            if not isinstance(end, (ProcessorError, Expired, Drained, Displaced)):
                self.wrong.append((n, end))
        else:
            self.ends["processed"] += 1
            if end != (self.name, n):
                self.wrong.append((n, end))

    def settle(self) -> None:
        """After the stop: every future has ended, once."""
        for n, future in self.futures:
            assert future.done(), f"frame {n} of {self.name} was left waiting"
            assert self.answers[n] == 1
            try:
                self.count(n, future.exception() or future.result())
            except CancelledError:
                self.ends["cancelled"] += 1


@pytest.mark.parametrize("seed", [4])
def test_f13_every_submission_ends_once_and_is_counted_once(seed: int) -> None:
    heard: deque[Any] = deque()
    health = Health("moody", heard.append, every=0.05)
    witness = Witness()
    coordinator = Coordinator(Moody(seed), CONFIG, sinks=[health, witness])
    handle = coordinator.start()
    feeds = [Feed(handle, f"cam{n}", OPERATIONS // THREADS, seed * 100 + n) for n in range(THREADS)]
    threads = [threading.Thread(target=feed.run, daemon=True) for feed in feeds]
    for thread in threads:
        thread.start()
    assert feeds[0].nearly.wait(60.0)
    coordinator.signal()  # in the middle of everything
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for feed in feeds:
        assert feed.error is None
    for _ in range(3):
        with pytest.raises(Closed):
            handle.submit("late", None)
    assert coordinator.stop()
    health.flush(time.monotonic())
    for feed in feeds:
        feed.settle()

    figures = coordinator.metrics()
    assert figures.submitted == OPERATIONS + 3
    assert figures.pending == 0
    assert figures.closed == 3 + sum(feed.refused[Closed] for feed in feeds)
    assert coordinator.lost is None
    assert witness.twice == 0
    assert len(witness.tickets) == figures.processed + figures.failed + figures.dropped
    assert not [e for e in heard if isinstance(e, StageError)]
    assert {e.source for e in heard} <= {"moody", *(feed.name for feed in feeds)}
    assert sum(e.count for e in heard if isinstance(e, BatchError)) == len(witness.bad_batches)
    for feed in feeds:
        name, mine = feed.name, figures.feeds[feed.name]
        assert feed.wrong == []
        assert mine.submitted == feed.submitted == OPERATIONS // THREADS
        assert mine.pending == 0
        assert mine.rejected == feed.refused[QueueFull]
        assert told(heard, BatchSubmissionRejected, name) == mine.rejected + witness.displaced[name]
        assert mine.in_flight_exceeded == feed.refused[InFlightCapReached] == told(heard, BatchInFlightExceeded, name)
        assert mine.closed == feed.refused[Closed]
        assert mine.timed_out == feed.ends["left"] == witness.left[name] == told(heard, BatchTimeout, name)
        for end in ("processed", "failed", "dropped"):
            counted = getattr(mine, end)
            assert counted == witness.ends[name, end]
            # What became of frames whose callers left or cancelled is the coordinator's to know.
            assert feed.ends[end] <= counted <= feed.ends[end] + feed.ends["left"] + feed.ends["cancelled"]
        assert mine.processed + mine.failed + mine.dropped == sum(feed.ends.values())
    # The drawing reached every corner.
    kinds = sum((feed.kinds for feed in feeds), Counter())
    assert {ProcessorError, ProcessorHung, ResultCountMismatch, Expired} <= set(kinds)
    ends = sum((feed.ends for feed in feeds), Counter())
    assert all(ends[end] > 0 for end in ("processed", "failed", "dropped", "left", "cancelled")), ends
    assert figures.rejected > 0
    assert figures.in_flight_exceeded > 0


def told(heard: deque[Any], kind: type[Any], source: str) -> int:
    return sum(e.count for e in heard if type(e) is kind and e.source == source)
