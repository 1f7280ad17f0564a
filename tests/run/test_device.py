"""The device by itself, without a loop: what its notices promise to whoever takes the events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

import pytest

from reflex_runtime.core.batch import Done, Failed, RequestSettled, SchedulerPaused
from reflex_runtime.core.errors import ConfigError, Drained
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.device import Device
from run.helpers import PATIENCE, Gate


def device(gate: Gate, hold: float = 0.0) -> tuple[Device, threading.Event]:
    """A started device, and the event that its notices set."""
    told = threading.Event()
    scheduler = Scheduler([GroupConfig(flush=FlushPolicy.by_size(4, hold))])
    made = Device(scheduler, {"default": gate}, told.set)
    made.start()
    return made, told


def test_b17_what_expires_on_a_free_device_is_told() -> None:
    made, told = device(Gate(), hold=60.0)
    ticket = made.submit(Request(time_limit=0.005))
    assert told.wait(PATIENCE)
    assert [e.ticket for e in made.take_events() if isinstance(e, RequestSettled)] == [ticket]
    assert made.stop()


def test_nobody_is_told_of_what_nobody_waits_for() -> None:
    gate = Gate()
    made, told = device(gate)
    made.submit(Request(1))
    assert gate.entered.wait(PATIENCE)
    assert not told.is_set()  # queued and scheduled, but nobody has an answer yet
    gate.gate.set()
    assert told.wait(PATIENCE)
    assert made.stop()


def test_b20_a_stop_settles_what_was_held_and_refuses_a_second_start() -> None:
    made, _ = device(Gate(), hold=60.0)
    ticket = made.submit(Request(1))
    with pytest.raises(ConfigError, match="already started"):
        made.start()
    assert made.stop()
    assert isinstance(ticket.outcome.error, Drained)
    assert made.stop()


def test_b16_a_cancel_on_a_free_device_is_told_at_once() -> None:
    made, told = device(Gate(), hold=60.0)
    ticket = made.submit(Request(1))
    made.cancel(ticket)
    assert told.is_set()
    assert made.stop()


class LateDevice:
    """A device on a clock that the test moves, with a group whose answers nobody awaits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.served, self.spare = Gate(is_open=True), Gate()
        groups = [GroupConfig("served"), GroupConfig("spare", weight=0.0)]
        processors = {"served": self.served, "spare": self.spare}
        self.device = Device(
            Scheduler(groups), processors, lambda: None, clock=lambda: self.now, expendable={"spare"}
        )
        self.device.start()

    def ask(self, group: str) -> Ticket:
        ticket = self.device.submit(Request(group, group=group))
        if group == "spare":
            assert self.spare.entered.wait(PATIENCE)
            self.spare.entered.clear()
        return ticket

    def pauses(self) -> list[tuple[float, float]]:
        return [(e.at, e.until) for e in self.device.take_events() if isinstance(e, SchedulerPaused)]

    def next_pause(self) -> tuple[float, float]:
        seen: list[tuple[float, float]] = []

        def comes() -> bool:
            seen.extend(self.pauses())
            return bool(seen)

        self.reach(comes)
        assert len(seen) == 1
        return seen[0]

    def reach(self, what: Callable[[], bool]) -> None:
        """Until the device's threads have done what they have to."""
        until = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < until
            threading.Event().wait(0.001)


def test_v10_an_expendable_group_that_was_late_gets_its_turn_again_by_itself() -> None:
    late = LateDevice()
    device, first = late.device, late.ask("spare")
    late.now += 0.9
    device.watchdog = 60.0
    assert device.look() == 101.0
    late.now += 0.3
    device.watchdog = 60.0
    device.look()
    assert device.hung == 1
    assert isinstance(first.outcome, Failed)
    assert late.pauses() == [(101.2, inf)]
    late.now += 0.8
    waiting = device.submit(Request("spare", group="spare"))
    late.spare.gate.set()  # two seconds after it began
    assert late.next_pause() == (102.0, 102.0 + 60 * 2.0)
    served = late.ask("served")
    late.reach(lambda: served.outcome is not None)
    assert waiting.outcome is None
    late.now = 222.1
    device.input(lambda scheduler, now: None)
    late.reach(lambda: waiting.outcome is not None)
    assert isinstance(waiting.outcome, Done)
    assert device.stop()


def test_v10_an_expendable_batch_may_be_as_late_as_others_are_on_this_machine() -> None:
    late = LateDevice()
    late.served.gate.clear()
    served = late.ask("served")
    assert late.served.entered.wait(PATIENCE)
    late.now += 3.0  # the machine had no time for it
    late.served.gate.set()
    late.reach(lambda: served.outcome is not None)
    late.ask("spare")
    late.now += 5.0
    late.device.watchdog = 60.0
    assert late.device.limit == pytest.approx(6.0, rel=0.05)
    late.device.watchdog = 60.0
    late.device.look()
    assert late.device.hung == 0
    late.spare.gate.set()
    assert late.device.stop()


def test_v10_without_a_watchdog_an_expendable_batch_may_take_as_long_as_it_likes() -> None:
    late = LateDevice()
    late.ask("spare")
    late.now += 3600.0
    late.device.watchdog = inf
    assert late.device.look() == inf
    assert late.device.hung == 0
    late.spare.gate.set()
    assert late.device.stop()


def test_v10_a_thread_that_was_lost_twice_over_or_reset_meanwhile_brings_no_rest() -> None:
    late = LateDevice()
    late.ask("spare")
    late.now += 2.0
    late.device.watchdog = 60.0
    late.device.look()
    late.device.resume("spare")  # an operator
    late.ask("spare")
    late.now += 2.0
    late.device.watchdog = 60.0
    late.device.look()
    assert len(late.pauses()) == 3
    late.spare.gate.set()  # both come back
    assert late.next_pause() == (104.0, 104.0 + 60 * 2.0)
    assert late.device.stop()
