"""Events on their way to sinks, from one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

import pytest

from reflex_runtime.core.batch import (
    BatchFinished,
    BatchScheduled,
    Done,
    Event,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import QueueFull
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.audience import TURN, Audience
from reflex_runtime.run.processor import FunctionProcessor
from reflex_runtime.run.thread_driver import ThreadDriver
from run.helpers import PATIENCE


def rejected(at: float) -> Event:
    return RequestRejected(at, Request(None), QueueFull("full"))


def driver_of(take: Callable[[], list[Event]], *sinks: Callable[[Event], None]) -> ThreadDriver:
    """A driver whose device has these events."""
    made = ThreadDriver(GroupConfig(), FunctionProcessor(list), inf, time.monotonic, "made", sinks)
    made.device.take_events = take  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("begin", [ThreadDriver.deliver, lambda driver: driver.between(lambda: None)])
def test_what_a_sink_causes_is_told_after_what_it_was_told(begin: Callable[[ThreadDriver], None]) -> None:
    waiting = [rejected(1.0), rejected(2.0)]
    told: list[float] = []

    def take() -> list[Event]:
        taken = waiting[:]
        waiting.clear()
        return taken

    def causes(event: Event) -> None:
        if event.at == 1.0:
            waiting.append(rejected(3.0))
            assert driver.answers_here
            driver.deliver()
            assert driver.between(lambda: told == [])

    driver = driver_of(take, causes, lambda event: told.append(event.at))
    begin(driver)
    assert told == [1.0, 2.0, 3.0]
    assert not driver.answers_here


def test_a_second_thread_leaves_its_events_to_the_first_and_does_not_wait() -> None:
    waiting = [rejected(1.0)]
    entered, go_on = threading.Event(), threading.Event()
    told: list[float] = []

    def take() -> list[Event]:
        taken = waiting[:]
        waiting.clear()
        return taken

    def slow(event: Event) -> None:
        entered.set()
        assert go_on.wait(PATIENCE)
        told.append(event.at)

    driver = driver_of(take, slow)
    first = threading.Thread(target=driver.deliver)
    first.start()
    assert entered.wait(PATIENCE)
    waiting.append(rejected(2.0))
    driver.deliver()
    assert told == []
    go_on.set()
    first.join(PATIENCE)
    assert told == [1.0, 2.0]


def test_after_a_sink_that_ends_its_thread_the_next_delivery_tells_the_rest() -> None:
    waiting = [rejected(1.0), rejected(2.0)]
    told: list[float] = []

    def take() -> list[Event]:
        taken = waiting[:]
        waiting.clear()
        return taken

    def ends(event: Event) -> None:
        if event.at == 1.0:
            raise SystemExit
        told.append(event.at)

    driver = driver_of(take, ends)
    with pytest.raises(SystemExit):
        driver.deliver()
    driver.deliver()
    assert told == [2.0]


def test_what_comes_while_another_thread_acts_after_a_delivery_is_told_by_it() -> None:
    waiting: list[Event] = []
    told: list[float] = []

    def take() -> list[Event]:
        taken = waiting[:]
        waiting.clear()
        return taken

    def act() -> None:
        waiting.append(rejected(1.0))
        other = threading.Thread(target=driver.deliver)
        other.start()
        other.join(PATIENCE)  # it found the lock taken, and left its event behind
        assert told == []

    driver = driver_of(take, lambda event: told.append(event.at))
    driver.between(act)
    assert told == [1.0]


def test_a_turn_that_takes_long_ends_before_its_count_and_the_next_goes_on() -> None:
    now, told = 0.0, []

    def slow(event: Event) -> None:
        nonlocal now
        now += 0.4 * TURN
        told.append(event.at)

    audience = Audience([slow], clock=lambda: now)
    assert audience.tell([rejected(float(i)) for i in range(8)])
    assert told == [0.0, 1.0, 2.0]
    assert audience.tell([rejected(8.0)])
    assert not audience.tell([])
    assert told == [float(i) for i in range(9)]


def test_whatever_an_event_takes_each_turn_tells_one_and_a_close_tells_all() -> None:
    now, told = 0.0, []

    def slow(event: Event) -> None:
        nonlocal now
        now += 10 * TURN
        told.append(event.at)

    audience = Audience([slow], clock=lambda: now)
    assert audience.tell([rejected(float(i)) for i in range(4)])
    assert told == [0.0]
    assert not audience.tell([], all=True)
    assert told == [0.0, 1.0, 2.0, 3.0]


def test_events_that_no_sink_takes_are_not_made_and_a_sink_that_comes_later_gets_them() -> None:
    audience = Audience([lambda event: None])
    assert not audience.unheard  # a sink without `events` takes all
    audience = Audience()
    scheduler = Scheduler()
    scheduler.unheard = audience.unheard

    def ask(now: float) -> list[type]:
        scheduler.submit(Request(), now)
        batch = scheduler.next_batch(now)
        assert batch is not None
        scheduler.complete(batch, [Done()], 0.1, now + 0.1)
        return [type(event) for event in scheduler.take_events()]

    def finished(event: Event) -> None:
        pass

    finished.events = {BatchFinished}  # type: ignore[attr-defined]
    assert ask(0.0) == [RequestSettled]  # this one answers the request
    audience.add(finished)
    assert ask(1.0) == [BatchFinished, RequestSettled]
    audience.remove(finished)
    assert ask(2.0) == [RequestSettled]
    audience.add(lambda event: None)
    assert ask(3.0) == [RequestQueued, BatchScheduled, BatchFinished, RequestSettled]
