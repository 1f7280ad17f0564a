"""The scheduler of a journal: its groups as they were set, or with other settings, its cost models and its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from reflex_runtime.core.adapt import Planner
from reflex_runtime.core.batch import Batch, Cause, Done, More, Outcome
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.telemetry.journal import GroupInfo, RequestLine, Warm
from reflex_runtime.telemetry.journal_reader import Journal


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings that differ from the recorded ones; None keeps the recorded value. Seconds."""

    max_batch_cost: float | None = None
    batch_timeout: float | None = None
    max_batch_size: int | None = None

    def of(self, flush: FlushPolicy) -> FlushPolicy:
        """A recorded flush policy with these changes."""
        if self.max_batch_cost is not None:
            flush = replace(flush, max_batch_cost=self.max_batch_cost, times_fixed=0.0)
        if self.max_batch_size is not None:
            flush = replace(flush, max_batch_size=self.max_batch_size)
        if self.batch_timeout is not None:  # the hold of every request, or that for expected returns, whichever it has
            hold = (0.0, self.batch_timeout, self.batch_timeout)
            if any(flush.hold_max):
                flush = replace(flush, hold_min=hold, hold_max=hold)
            else:
                flush = replace(flush, returns=self.batch_timeout)
        return flush


def scheduler_of(recording: Journal, changes: Changes | None = None) -> Scheduler:
    """A scheduler with the recorded settings of every slot, its cost models taught what they knew at the first request.

    ConfigError when the recording does not say how its slots were scheduled.
    """
    settings = recording.groups
    missing = [slot for slot in recording.slots if slot not in settings]
    if missing or not settings:
        raise ConfigError(
            f"{recording.path}: the header's `groups` do not say how {', '.join(missing) or 'its slots'} were "
            "scheduled, and a schedule cannot be replayed without"
        )
    scheduler = Scheduler([_group(name, told, changes or Changes()) for name, told in settings.items()])
    for name, warm in recording.warm.items():
        if name in settings:
            teach(scheduler.cost_model(name), name, warm)
    return scheduler


def flush_of(name: str, told: GroupInfo) -> FlushPolicy:
    """When the batches of a recorded group left. ConfigError where the journal does not say so."""
    flush: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.flush.items()}
    flush = {key: inf if value is None else value for key, value in flush.items()}
    try:
        return FlushPolicy(**flush)
    except TypeError as error:
        raise ConfigError(f"slot {name}: the journal's settings of its batches cannot be read: {error}") from None


def _group(name: str, told: GroupInfo, changes: Changes) -> GroupConfig:
    cost = told.cost
    if cost is None:
        raise ConfigError(
            f"slot {name}: its batches were not bounded by learned times, so its schedule cannot be replayed; that of "
            "reflex serve EXPORT can"
        )
    return GroupConfig(
        name=name,
        flush=changes.of(flush_of(name, told)),
        capacity=told.capacity,
        max_queued_seconds=told.max_queued_seconds or inf,
        max_in_flight_per_client=told.max_in_flight_per_client,
        weight=told.weight,
        tenant=told.tenant or "",
        latest_only=told.latest_only,
        promote_after=told.promote_after,
        cost=lambda: TimeCost(
            cost["stages"], cost["affine"], cost["sizes"], padded_stages=cost.get("padded_stages")
        ),
        controller=Planner() if told.planned else None,
    )


def teach(model: TimeCost, slot: str, warm: Warm) -> None:
    """Teach the cost model what a warm-up measured."""

    def ticket(i: int) -> Ticket:
        return Ticket(Request(group=slot, shape=warm.shape, cost_class=warm.cost_class, wants=warm.wants), i, 0.0)

    for stage, size, seconds in warm.batches:
        grants = {ticket(i): 1.0 for i in range(size)}
        model.observe(Batch(0, slot, "", stage, Cause.IDLE, 0.0, 0.0, 0.0, grants), seconds)
    for i, share in enumerate(warm.shares):
        done = ticket(i)
        done.shared = share
        model.settled(done)


def request_of(line: RequestLine) -> Request:
    """The request that the scheduler got."""
    asked = line.schedule
    assert asked is not None
    if asked.priority not in set(Priority):
        raise ConfigError(f"request {line.request.request_id[:100]!r}: priority={asked.priority}: there is no such one")
    return Request(
        id=line.request.request_id,
        group=line.slot,
        partition=asked.partition,
        client=asked.client,
        priority=Priority(asked.priority),
        time_limit=asked.time_limit,
        shape=asked.shape,
        cost_class=asked.cost_class,
        stage=asked.stage,
        weight=asked.weight,
        wants=asked.wants,
    )


class RecordedSteps:
    """Answers as a processor with these stages: the next stage, or the rest of the last."""

    def __init__(self, recording: Journal) -> None:
        self._stages = {name: told.cost["stages"] for name, told in recording.groups.items() if told.cost is not None}

    def __call__(self, ticket: Ticket, units: float) -> Outcome:
        stages = self._stages[ticket.request.group]
        left = ticket.wants - units
        if left <= 1e-9:
            return Done()
        at = stages.index(ticket.stage)
        return More(wants=left, stage=stages[min(at + 1, len(stages) - 1)])
