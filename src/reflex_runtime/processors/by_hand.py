"""Tickets run on a processor without a scheduler: for warming up, trials and replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import NamedTuple

from reflex_runtime.core.batch import Apart, Batch, Cause, Done, Failed, More
from reflex_runtime.core.request import Ticket
from reflex_runtime.processors.base import Processor, run_batch


class TimedBatch(NamedTuple):
    """A batch and the seconds of its call."""

    batch: Batch
    seconds: float


def run_through(
    processor: Processor,
    tickets: Sequence[Ticket],
    stages: Sequence[str] = ("",),
    starts: Sequence[int] = (),
    *,
    group: str = "default",
    shape: Hashable = "",
    clock: Callable[[], float] = time.perf_counter,
) -> list[TimedBatch]:
    """Run tickets to their end, in batches of all that are at the same stage. `ticket.outcome` is its `Done`.

    stages: those of the processor, in order. starts: the round in which each ticket enters, 0 by default; a round is
    one batch per stage, so a ticket that enters in round k is k steps behind one of round 0.

    The first error is raised as callers get it, after the tickets that have not ended are dropped.
    """
    left = dict(zip(tickets, starts or [0] * len(tickets), strict=True))
    ran: list[TimedBatch] = []
    try:
        for at in count():
            for stage in stages:
                members = [ticket for ticket, start in left.items() if start <= at and ticket.stage == stage]
                if members:
                    ran.append(_run(processor, group, shape, stage, members, clock))
                    left = {ticket: start for ticket, start in left.items() if ticket.outcome is None}
            if not left:
                break
    except BaseException:
        processor.drop(list(left))
        raise
    return ran


def _run(
    processor: Processor, group: str, shape: Hashable, stage: str, members: Sequence[Ticket], clock: Callable[[], float]
) -> TimedBatch:
    batch = Batch(0, group, shape, stage, Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(members, 1.0))
    began = clock()
    outcomes = run_batch(processor, batch)
    ran = TimedBatch(batch, clock() - began)
    for ticket, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, Failed | Apart):
            raise outcome.error
        if isinstance(outcome, More):
            advance(ticket, outcome)
        else:
            assert isinstance(outcome, Done)
            ticket.outcome = outcome
    return ran


def advance(ticket: Ticket, more: More) -> None:
    """Move a ticket to its next stage."""
    ticket.wants = more.wants
    ticket.stage = ticket.stage if more.stage is None else more.stage
