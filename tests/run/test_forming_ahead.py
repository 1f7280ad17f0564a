"""The device with batches formed ahead: what starts before what is answered; a hang, a cancel and a stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from core.helpers import trained
from reflex_runtime.core.batch import Batch, BatchFinished, BatchScheduled
from reflex_runtime.core.errors import Cancelled, CutShort, Drained, ProcessorHung, ReflexError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.device import Device
from reflex_runtime.run.processor import BaseProcessor
from run.helpers import PATIENCE, cannot_learn


class Steps(BaseProcessor):
    """Runs one batch for each release. entered: released by each batch that has come in."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[list[Any]] = []
        self.threads: list[str] = []

    def run(self, batch: Batch) -> Sequence[Any]:
        self.calls.append([ticket.request.payload for ticket in batch.grants])
        self.threads.append(threading.current_thread().name)
        self.entered.release()
        assert self.released.acquire(timeout=PATIENCE)
        return self.calls[-1]

    def inside(self) -> None:
        """Returns once another batch has come in."""
        assert self.entered.acquire(timeout=PATIENCE)


class Made:
    """A device with a scheduler of batches of two, predicted to take 2 ms. formed: released by each formed ahead."""

    def __init__(self, size: int = 2, **options: Any) -> None:
        flush = FlushPolicy.window(1.0, 0.0, size)
        self.scheduler = Scheduler([GroupConfig(flush=flush, cost=lambda: trained(0.001, 0.0005))])
        self.steps, self.told, self.formed = Steps(), threading.Semaphore(0), threading.Semaphore(0)
        self.then = 0.0  # seconds that a batch formed ahead is predicted to take, if not 2 ms
        form = self.scheduler.form_ahead

        def form_ahead(now: float) -> Batch | None:
            batch = form(now)
            if batch is not None:
                batch.expected = self.then or batch.expected
                self.formed.release()
            return batch

        self.scheduler.form_ahead = form_ahead  # type: ignore[method-assign]
        looks = count(64.0, 0.0001)  # each look at the clock takes so long, whatever the machine does meanwhile
        self.device = Device(
            self.scheduler, {"default": self.steps}, self.told.release, lambda: next(looks), ahead=True, **options
        )

    def ask(self, n: int) -> list[Ticket]:
        tickets = [self.device.submit(Request(i, client=i), wake=False) for i in range(n)]
        self.device.wake()
        return tickets

    def wait_formed(self) -> None:
        assert self.formed.acquire(timeout=PATIENCE)


@contextmanager
def running(n: int, then: float = 0.0, **options: Any) -> Iterator[tuple[Made, list[Ticket]]]:
    """So many requests were asked, the first batch of two is inside, and the second is formed."""
    made = Made(**options)
    made.then = then
    tickets = made.ask(n)
    made.device.start()
    made.steps.inside()
    made.wait_formed()
    try:
        yield made, tickets
    finally:
        for _ in range(n):
            made.steps.released.release()
        if not made.device._stopping:  # else it would wait for a batch that was given up
            made.device.stop()


def forming(made: Made) -> threading.Thread | None:
    return made.device._ahead._thread  # type: ignore[union-attr]


def test_the_next_batch_starts_before_the_last_one_is_completed() -> None:
    with running(6, then=PATIENCE) as (made, tickets):  # the third batch is not formed, which would complete the first
        made.steps.released.release()
        made.steps.inside()
        assert made.steps.calls == [[0, 1], [2, 3]]
        assert [t.outcome for t in tickets[:2]] == [None, None]  # nobody has taken the events
        assert made.told.acquire(timeout=PATIENCE)
        events = made.device.take_events()
        assert [t.outcome.value for t in tickets[:2]] == [0, 1]
        order = [(type(e), e.batch.id) for e in events if isinstance(e, BatchScheduled | BatchFinished)]
        assert order == [(BatchScheduled, 1), (BatchFinished, 1), (BatchScheduled, 2)]
        assert made.device.running_since is not None


def test_every_batch_of_a_long_queue_runs_on_the_device_thread_and_in_order() -> None:
    with running(10) as (made, tickets):
        for _ in range(4):
            made.steps.released.release()
            made.steps.inside()
            if len(made.steps.calls) < 5:
                made.wait_formed()
        made.steps.released.release()
        while any(t.outcome is None for t in tickets):
            assert made.told.acquire(timeout=PATIENCE)
            made.device.take_events()
        assert made.steps.calls == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert len(set(made.steps.threads)) == 1


def test_b16_a_cancelled_member_of_a_formed_batch_is_told_at_once_and_does_not_run() -> None:
    with running(6) as (made, tickets):
        made.device.cancel(tickets[2])
        assert isinstance(tickets[2].outcome.error, Cancelled)
        made.steps.released.release()
        made.steps.inside()
        assert made.steps.calls == [[0, 1], [3, 4]]


def test_b19_a_hang_fails_its_own_batch_and_the_formed_one_runs() -> None:
    with running(4) as (made, tickets):
        made.device.watchdog = 0.0
        made.device.look()
        assert isinstance(tickets[0].outcome.error, ProcessorHung)
        made.steps.inside()
        assert made.steps.calls == [[0, 1], [2, 3]]
        assert made.steps.threads[0] != made.steps.threads[1]
        made.steps.released.release()
        made.steps.released.release()  # the hung one comes back too, and is dropped
        while tickets[3].outcome is None:
            assert made.told.acquire(timeout=PATIENCE)
            made.device.take_events()
        assert [t.outcome.value for t in tickets[2:]] == [2, 3]
        assert made.device.hung == 1


def test_when_the_device_is_lost_the_formed_batch_is_answered() -> None:
    with running(6) as (made, tickets):
        made.device.watchdog = 0.0
        made.device.look()
        made.steps.inside()
        made.device.watchdog = 0.0
        made.device.look()
        assert made.device.lost is not None
        assert all(isinstance(t.outcome.error, ReflexError) for t in tickets)
        assert isinstance(tickets[5].outcome.error, Drained)


def test_b20_a_stop_answers_the_formed_batch_and_ends_the_thread() -> None:
    with running(4) as (made, tickets):
        thread = forming(made)
        assert thread is not None
        assert not made.device.stop(0.0)
        assert isinstance(tickets[0].outcome.error, CutShort)
        assert isinstance(tickets[2].outcome.error, Drained)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_batch_that_was_started_and_not_completed_is_answered_by_a_stop() -> None:
    with running(4) as (made, tickets):
        made.steps.released.release()
        made.steps.inside()
        assert not made.device.stop(0.0)
        assert [t.outcome.value for t in tickets[:2]] == [0, 1]
        assert all(isinstance(t.outcome.error, CutShort) for t in tickets[2:])


def test_a_batch_on_which_the_cost_model_fails_is_answered_and_the_next_ones_run() -> None:
    with running(6) as (made, tickets):
        model = made.scheduler.cost_model("default")
        model.observe, learn = cannot_learn, model.observe
        made.steps.released.release()
        made.steps.inside()
        events = made.device.take_events()  # completes the batch on this thread
        model.observe = learn
        assert all("ZeroDivisionError" in str(t.outcome.error) for t in tickets[:2])
        for _ in range(2):
            made.steps.released.release()
        while any(t.outcome is None for t in tickets[2:]):
            assert made.told.acquire(timeout=PATIENCE)
            events += made.device.take_events()
        assert [e.batch.id for e in events if isinstance(e, BatchScheduled)] == [1, 2, 3]
        assert [t.outcome.value for t in tickets[2:]] == [2, 3, 4, 5]
        assert made.device.lost is None


@pytest.mark.parametrize("seconds", [0.001, 90.0])
def test_no_thread_is_made_where_it_does_not_pay(seconds: float) -> None:
    """Batches that are not full, and batches so long that forming one takes no share of them."""
    made = Made(size=64 if seconds < 1.0 else 2)
    if seconds > 1.0:
        made.scheduler._groups["default"].cost = trained(seconds, 0.0005)
    tickets = made.ask(4)
    made.device.start()
    while any(t.outcome is None for t in tickets):
        made.steps.inside()
        made.steps.released.release()
        assert made.told.acquire(timeout=PATIENCE)
        made.device.take_events()
    assert forming(made) is None
    assert made.device.stop()


def test_where_no_thread_can_be_made_batches_are_formed_when_the_device_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.endswith("-ahead"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    made = Made()
    tickets = made.ask(6)
    made.device.start()
    finish(made, tickets, 3)
    assert made.steps.calls == [[0, 1], [2, 3], [4, 5]]
    assert "no batch is formed ahead" in caplog.text
    assert made.device.lost is None
    made.device.stop()


def test_an_error_while_forming_ahead_costs_that_alone(caplog: pytest.LogCaptureFixture) -> None:
    made = Made()
    form, failed = made.scheduler.form_ahead, threading.Semaphore(0)

    def fails_once(now: float) -> Batch | None:
        made.scheduler.form_ahead = form  # type: ignore[method-assign]
        failed.release()
        raise ZeroDivisionError("a cost model's")

    made.scheduler.form_ahead = fails_once  # type: ignore[method-assign]
    tickets = made.ask(10)
    made.device.start()
    made.steps.inside()
    assert failed.acquire(timeout=PATIENCE)
    made.steps.released.release()
    made.steps.inside()
    made.wait_formed()  # the thread goes on
    for _ in range(5):
        made.steps.released.release()
    while any(ticket.outcome is None for ticket in tickets):
        assert made.told.acquire(timeout=PATIENCE)
        made.device.take_events()
    assert "a batch could not be formed ahead" in caplog.text
    made.device.stop()


def finish(made: Made, tickets: list[Ticket], batches: int) -> None:
    """Let so many batches run, until all is answered."""
    for _ in range(batches):
        made.steps.released.release()
    while any(ticket.outcome is None for ticket in tickets):
        assert made.told.acquire(timeout=PATIENCE)
        made.device.take_events()
