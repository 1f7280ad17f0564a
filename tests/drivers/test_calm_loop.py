"""The event loop does not interrupt a batch for each request that comes: real threads, and the system's own answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from drivers.helpers import PATIENCE
from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.drivers.calm_loop import LONG, MANY, EventLoopThread, Uninterrupted
from reflex_runtime.processors.function import FunctionProcessor

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies of Linux")


class Machine:
    """A thread as the event loop, this one as the device's, and a clock."""

    def __init__(self, loop: ThreadPoolExecutor) -> None:
        self._loop, self.now = loop, 0.0
        self.thread = loop.submit(threading.get_native_id).result(PATIENCE)
        self.seen: list[str] = []
        self.calm = loop.submit(EventLoopThread, lambda: self.now).result(PATIENCE)
        self.processor = Uninterrupted(FunctionProcessor(self._function, any_thread=True), self.calm)

    def policy(self) -> str:
        return {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch"}[os.sched_getscheduler(self.thread)]

    def _function(self, items: list[Any]) -> list[Any]:
        self.seen.append(self.policy())
        if "fails" in items:
            raise ValueError("broken")
        return items

    def run(self, arrived: list[float], ends: float, expected: float = LONG, item: str = "") -> str:
        """The loop's policy while a batch runs, with requests that came at these times."""
        tickets = [Ticket(Request(item), i, at) for i, at in enumerate(arrived)]
        grants = dict.fromkeys(tickets, 1.0)
        batch = Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, expected, grants, admitted=tuple(tickets))
        self.now = ends
        self.processor.run(batch)
        return self.seen[-1]

    def on_loop(self, action: Callable[[], Any]) -> Any:
        return self._loop.submit(action).result(PATIENCE)


@contextmanager
def machine() -> Iterator[Machine]:
    with ThreadPoolExecutor(1) as loop:
        yield Machine(loop)


def test_requests_that_come_while_a_batch_runs_do_not_interrupt_the_next_one() -> None:
    with machine() as made:
        assert made.run([0.0] * MANY, ends=1.0) == "other"  # nothing is known yet
        assert made.policy() == "other"
        assert made.run([0.5] * MANY, ends=2.0) == "batch"
        assert made.policy() == "other"


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        pytest.param([1.5] * MANY, LONG, id="they come when the device is free"),
        pytest.param([0.5] * (MANY - 1) + [1.5], LONG, id="few come"),
        pytest.param([0.5] * MANY, LONG / 2, id="a short batch"),
    ],
)
def test_otherwise_it_may(arrived: list[float], expected: float) -> None:
    with machine() as made:
        made.run([0.0], ends=1.0)
        assert made.run(arrived, ends=2.0, expected=expected) == "other"


def test_a_batch_on_the_loop_itself_and_one_that_fails_leave_it_as_it_was() -> None:
    with machine() as made:
        made.run([0.0], ends=1.0)
        assert made.on_loop(lambda: made.run([0.5] * MANY, ends=2.0)) == "other"
        with pytest.raises(ValueError, match="broken"):
            made.run([0.5] * MANY, ends=3.0, item="fails")
        assert made.seen[-1] == "batch"
        assert made.policy() == "other"


def test_a_batch_that_never_comes_back_does_not_leave_it_so_and_the_thread_in_its_place_does_not_inherit_it() -> None:
    with machine() as made:
        made.run([0.0], ends=1.0)
        assert made.calm.begin(_batch(made))  # its thread is given up: nothing ends it

        def replacement() -> int:
            assert os.sched_getscheduler(0) == os.SCHED_BATCH  # it was started by the loop
            made.processor.start()
            return os.sched_getscheduler(0)

        with ThreadPoolExecutor(1) as device:
            assert made.on_loop(lambda: device.submit(replacement)).result(PATIENCE) == os.SCHED_OTHER
            assert device.submit(made.run, [1.5], 2.0).result(PATIENCE) == "batch"
        assert made.policy() == "other"


def test_a_policy_that_somebody_chose_is_kept() -> None:
    with ThreadPoolExecutor(1) as loop:
        loop.submit(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0)).result(PATIENCE)
        made = Machine(loop)
        made.run([0.0], ends=1.0)
        made.run([0.5] * MANY, ends=2.0)
        assert made.policy() == "batch"


def test_a_system_that_forbids_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine() as made:
        made.run([0.0], ends=1.0)
        asked = []

        def forbidden(*args: Any) -> None:
            asked.append(args)
            raise PermissionError

        monkeypatch.setattr(os, "sched_setscheduler", forbidden)
        assert not made.calm.begin(_batch(made))
        assert not made.calm.begin(_batch(made))
        assert len(asked) == 1


def _batch(made: Machine) -> Batch:
    tickets = [Ticket(Request(), i, 0.5) for i in range(MANY)]
    grants = dict.fromkeys(tickets, 1.0)
    return Batch(1, "default", "", "", Cause.IDLE, 0.0, 0.0, LONG, grants, admitted=tuple(tickets))
