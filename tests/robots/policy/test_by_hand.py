"""Tickets run without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Done, More
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.robots.policy.base import run_through
from reflex_runtime.run.processor import BaseProcessor

STAGES = ("prefix", "denoise")


class Steps(BaseProcessor):
    """A prefix, then as many denoise steps as the payload says; the payload "bad" raises in its denoise step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.dropped: list[Any] = []

    def run(self, batch: Batch) -> Sequence[Any]:
        payloads = [ticket.request.payload for ticket in batch.grants]
        self.calls.append((batch.stage, payloads))
        if batch.stage == "prefix":
            return [More(wants=float(payload if payload != "bad" else 1), stage="denoise") for payload in payloads]
        if "bad" in payloads:
            raise ValueError("no")
        left = [ticket.wants - 1.0 for ticket in batch.grants]
        return [More(wants=n) if n else Done(payload) for n, payload in zip(left, payloads, strict=True)]

    def drop(self, tickets: Sequence[Ticket]) -> None:
        self.dropped += [ticket.request.payload for ticket in tickets]


def tickets(*payloads: Any) -> list[Ticket]:
    return [Ticket(Request(payload, stage="prefix"), i, 0.0) for i, payload in enumerate(payloads)]


def test_tickets_run_in_step_and_those_that_end_early_leave() -> None:
    processor, ours, times = Steps(), tickets(1, 3), iter(range(100))
    ran = run_through(processor, ours, STAGES, group="prod", shape="s", clock=lambda: float(next(times)))
    assert processor.calls == [("prefix", [1, 3]), ("denoise", [1, 3]), ("denoise", [3]), ("denoise", [3])]
    assert [ticket.outcome.value for ticket in ours] == [1, 3]
    assert [(r.batch.group, r.batch.partition, r.batch.stage, len(r.batch), r.seconds) for r in ran] == [
        ("prod", "s", "prefix", 2, 1.0),
        ("prod", "s", "denoise", 2, 1.0),
        ("prod", "s", "denoise", 1, 1.0),
        ("prod", "s", "denoise", 1, 1.0),
    ]
    assert processor.dropped == []


def test_a_ticket_that_enters_later_joins_at_the_step_of_the_others() -> None:
    processor = Steps()
    run_through(processor, tickets(2, 1), STAGES, starts=(0, 1))
    assert processor.calls == [("prefix", [2]), ("denoise", [2]), ("prefix", [1]), ("denoise", [2, 1])]


def test_an_error_is_raised_and_what_has_not_ended_is_dropped() -> None:
    processor = Steps()
    with pytest.raises(ProcessorError, match="ValueError: no"):
        run_through(processor, tickets(2, "bad", 1), STAGES, starts=(0, 1, 5))
    assert processor.dropped == [2, "bad", 1]
