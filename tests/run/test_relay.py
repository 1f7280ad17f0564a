"""Threads that were answered are woken one after another, and none waits for one that does not run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run import thread_driver
from reflex_runtime.run.batched import BatchedFunction, batched
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator, BatchEntry
from reflex_runtime.run.thread_driver import STALLED, Relay, Sleeper
from run.helpers import PATIENCE


class Played:
    """A relay with three sleepers on a clock that the test sets. over: how often it woke the device."""

    def __init__(self) -> None:
        self.now, self.over = 64.0, 0
        self.relay = Relay(lambda: self.now, self._noted)
        self.sleepers = [Sleeper() for _ in range(3)]

    def _noted(self) -> None:
        self.over += 1

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.relay.answered(self.sleepers[number])
        self.relay.go()
        if self.relay.woken:
            self.relay.came()

    def run(self, number: int) -> None:
        self.relay.runs(self.sleepers[number])

    @property
    def awake(self) -> list[bool]:
        return [not sleeper.asleep.locked() for sleeper in self.sleepers]


def test_each_thread_wakes_the_next_one_in_the_order_of_their_answers() -> None:
    played = Played()
    played.answer(1, 0)
    played.answer(2)
    assert played.awake == [False, True, False]
    played.run(1)
    assert played.awake == [True, True, False]
    played.run(0)
    assert (played.awake, played.relay.woken is not None, played.over) == ([True, True, True], True, 0)
    played.run(2)
    assert (played.relay.woken is not None, played.over) == (False, 1)


def test_a_thread_that_waits_no_more_is_passed_over_before_and_after_its_answer() -> None:
    played = Played()
    played.run(0)
    assert played.over == 0
    played.answer(0, 1, 2)
    assert played.awake == [False, True, False]
    played.run(2)
    played.run(1)
    assert (played.awake, played.relay.woken is not None, played.over) == ([False, True, False], False, 1)


def test_one_that_does_not_run_holds_up_no_others_for_long() -> None:
    played = Played()
    played.answer(0, 1)
    played.now += STALLED
    played.relay.go()
    assert played.awake == [True, False, False]
    played.now += STALLED / 8.0
    played.answer(2)
    assert (played.awake, played.over) == ([True, True, True], 1)
    for number in range(3):
        played.run(number)
    assert (played.relay.woken is not None, played.over) == (False, 1)


def test_without_an_interpreter_lock_all_are_woken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_driver, "_one_at_a_time", False)
    played = Played()
    played.answer(0, 1, 2)
    assert (played.awake, played.relay.woken is not None) == ([True, True, True], False)


# -- in a batched function ---------------------------------------------------------------------------------------------


def doubling(stalls: bool = False) -> tuple[BatchedFunction[int, int], Sleeper]:
    """A function whose thread sleeps, and a sleeper that stands for a caller that was answered and does not run yet.
    stalls: after a while nobody waits for that."""
    asleep = threading.Event()

    @batched
    def double(items: list[int]) -> list[int]:
        asleep.clear()
        return [2 * item for item in items]

    driver = double._driver
    if not stalls:
        driver.relay._clock = lambda: 64.0
    wait = driver.device._wait

    def noted() -> None:
        asleep.set()
        wait()

    driver.device._wait = noted  # type: ignore[method-assign]
    assert double(0) == 0
    assert asleep.wait(PATIENCE)
    answered = Sleeper()
    with driver.device._lock:  # free while it sleeps
        driver.relay.answered(answered)
        driver.relay.go()
    return double, answered


def test_an_item_wakes_the_device_when_all_threads_that_were_answered_run_again() -> None:
    double, answered = doubling()
    driver, came = double._driver, threading.Event()
    submit = driver.device.submit

    def noted(request: Request, waiter: object = None, wake: bool = True, ready: bool = True) -> Ticket:
        ticket = submit(request, waiter, wake, ready)
        came.set()
        return ticket

    driver.device.submit = noted  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(double, 1)
        assert came.wait(PATIENCE)
        assert driver.device._bell.waiting
        driver.relay.runs(answered)
        assert asked.result(PATIENCE) == 2
    assert double.close()


def test_an_item_that_comes_just_as_the_last_thread_runs_wakes_the_device_itself() -> None:
    double, answered = doubling()
    driver = double._driver
    submit = driver.device.submit

    def last_one_runs(request: Request, waiter: object = None, wake: bool = True) -> Ticket:
        assert not wake
        driver.relay.runs(answered)  # it knows of no item
        return submit(request, waiter, wake)

    driver.device.submit = last_one_runs  # type: ignore
    assert double(1, timeout=PATIENCE) == 2
    assert double.close()


def test_a_thread_that_was_answered_and_never_runs_holds_up_no_items() -> None:
    double, _ = doubling(stalls=True)
    assert double(1, timeout=PATIENCE) == 2
    assert double.close()


# -- in a coordinator --------------------------------------------------------------------------------------------------


class Echo:
    id = "echo"

    def on_start(self) -> None:
        pass

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        return [entry.frame for entry in entries]

    def on_stop(self) -> None:
        pass


def test_a_frame_wakes_the_thread_when_all_that_were_answered_run_again() -> None:
    coordinator = BatchCoordinator(Echo(), BatchConfig(max_latency=0.0))
    answered, came, wakes = Sleeper(), threading.Event(), []
    with coordinator as handle:
        submit = coordinator.device.submit

        def noted(request: Request, waiter: object = None, wake: bool = True, ready: bool = True) -> Ticket:
            wakes.append(wake)
            came.set()
            return submit(request, waiter, wake, ready)

        coordinator.device.submit = noted  # type: ignore[method-assign]
        coordinator.relay.answered(answered)
        coordinator.relay.go()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(handle.submit_and_wait, "cam", "frame")
            assert came.wait(PATIENCE)
            coordinator.relay.runs(answered)
            assert asked.result(PATIENCE) == "frame"
        assert handle.submit_and_wait("cam", "next") == "next"
    assert wakes == [False, True]
