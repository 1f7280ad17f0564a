"""The device by itself, without a loop: what its notices promise to whoever takes the events."""

from __future__ import annotations

import threading

import pytest

from reflex_runtime.core.errors import ConfigError, Drained
from reflex_runtime.core.events import RequestSettled
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
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
