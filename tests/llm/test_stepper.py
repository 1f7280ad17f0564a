"""The driver that makes one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Done,
    Event,
    More,
    RequestQueued,
    RequestSettled,
)
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.llm.engine.llm_engine import Stepper
from reflex_runtime.run.processor import BaseProcessor
from run.helpers import cannot_learn


class Twice(BaseProcessor):
    """Answers each request in two steps; remembers who left."""

    def __init__(self) -> None:
        self.dropped: list[Ticket] = []
        self.fails = False

    def run(self, batch: Batch) -> Sequence[Any]:
        if self.fails:
            raise RuntimeError("broken")
        return [Done(t.request.payload) if t.batches == 2 else More("half") for t in batch.grants]

    def drop(self, tickets: Sequence[Ticket]) -> None:
        self.dropped += tickets


def stepper() -> tuple[Stepper, Twice, list[Event]]:
    processor, events = Twice(), []
    group = GroupConfig(flush=FlushPolicy(max_batch_size=2), cost=UnitCost)
    times = iter(range(1000))
    return (
        Stepper(Scheduler([group]), processor, [events.append], lambda: float(next(times))),
        processor,
        events,
    )


def test_a_step_forms_runs_and_completes_one_batch() -> None:
    stepping, _, events = stepper()
    tickets = [stepping.scheduler.submit(Request(i), 0.0) for i in range(3)]
    assert [len(stepping.step() or ()) for _ in range(4)] == [2, 2, 1, 1]
    assert stepping.step() is None
    assert [t.outcome.value for t in tickets] == [0, 1, 2]
    assert stepping.scheduler.idle
    kinds = [type(e) for e in events if not isinstance(e, RequestQueued)]
    assert kinds[:2] == [BatchScheduled, BatchFinished]
    assert sum(isinstance(e, RequestSettled) for e in events) == 3


def test_a_batch_is_told_before_it_runs_and_its_time_is_what_it_took() -> None:
    stepping, processor, events = stepper()
    seen: list[int] = []
    run = processor.run
    processor.run = lambda batch: (seen.append(len(events)), run(batch))[1]  # type: ignore[method-assign]
    stepping.scheduler.submit(Request(), 0.0)
    stepping.step()
    assert seen == [2]
    [finished] = [e for e in events if isinstance(e, BatchFinished)]
    assert finished.elapsed == 1.0


def test_who_left_with_no_next_batch_is_dropped() -> None:
    stepping, processor, events = stepper()
    ticket = stepping.scheduler.submit(Request(), 0.0)
    stepping.step()
    stepping.scheduler.cancel(ticket, 5.0)
    stepping.deliver()
    assert isinstance(events[-1], RequestSettled)
    assert stepping.step() is None
    assert processor.dropped == [ticket]


def test_a_processor_that_raises_fails_its_batch_and_the_stepper_goes_on() -> None:
    stepping, processor, _ = stepper()
    processor.fails = True
    ticket = stepping.scheduler.submit(Request(), 0.0)
    assert stepping.step() is not None
    assert "broken" in str(ticket.outcome.error)
    processor.fails = False
    again = stepping.scheduler.submit(Request("x"), 50.0)
    stepping.step()
    stepping.step()
    assert again.outcome == Done("x")


def test_a_cost_model_that_raises_fails_its_batch_and_the_stepper_goes_on() -> None:
    stepping, processor, _ = stepper()
    processor.run = lambda batch: [Done("right")] * len(batch)  # type: ignore[method-assign]
    model = stepping.scheduler.cost_model("default")
    learn, model.observe = model.observe, cannot_learn
    ticket = stepping.scheduler.submit(Request(), 0.0)
    assert stepping.step() is not None
    assert "could not be completed: ZeroDivisionError" in str(ticket.outcome.error)
    model.observe = learn
    again = stepping.scheduler.submit(Request(), 50.0)
    stepping.step()
    assert again.outcome == Done("right")
    assert stepping.scheduler.idle


def test_what_a_sink_raises_reaches_the_caller() -> None:
    stepping, _, _ = stepper()

    def broken(event: Event) -> None:
        raise ValueError("a sink failed")

    stepping.sinks.append(broken)
    stepping.scheduler.submit(Request(), 0.0)
    with pytest.raises(ValueError, match="a sink failed"):
        stepping.step()
