"""A batch is a map from ticket to granted units; its outcomes are Done, More, Failed or Apart."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from reflex_runtime.core.isolation import Part
from reflex_runtime.core.request import Ticket


class FlushReason(StrEnum):
    """Why a batch left: the three documented reasons."""

    BUDGET_REACHED = "budget_reached"
    TIMEOUT = "timeout"
    SINGLE_REQUEST_OVER_BUDGET = "single_request_over_budget"


class Cause(StrEnum):
    """Why a batch left, finer. `reason` is a function of it."""

    BUDGET = "budget_reached"
    SIZE = "size_reached"
    SINGLE = "single_request_over_budget"
    TIMEOUT = "timeout"
    IDLE = "idle"
    URGENT = "urgent"
    STEP = "step"
    APART = "apart"
    DRAIN = "drain"

    @property
    def reason(self) -> FlushReason:
        """The documented reason this cause counts as."""
        return _REASONS.get(self, FlushReason.TIMEOUT)


_REASONS = {
    Cause.SINGLE: FlushReason.SINGLE_REQUEST_OVER_BUDGET,
    Cause.BUDGET: FlushReason.BUDGET_REACHED,
    Cause.SIZE: FlushReason.BUDGET_REACHED,
}


class Done(NamedTuple):
    """The request is answered with `value`."""

    value: Any = None


class More(NamedTuple):
    """The request stays resident for another step.

    value: an answer so far (a token), or None.  wants: units it wants next.  stage: its next stage; None keeps it.
    """

    value: Any = None
    wants: float = 1.0
    stage: str | None = None


class Failed(NamedTuple):
    """The request ran and failed with `error`."""

    error: BaseException


class Apart(NamedTuple):
    """The call failed as a whole with `error`, and it is not known which member caused it: they run again, apart.

    All outcomes of a batch are Apart, or none. Not for a batch of one: its member is to blame.
    """

    error: BaseException


Outcome = Done | More | Failed | Apart


@dataclass(slots=True, eq=False)
class Batch:
    """Tickets that run together and the units granted to each.

    expected: predicted seconds of this one call, 0.0 when unknown.
    cost: predicted cost in the unit of the group's cost model (seconds of device time until
        its last member ends, tokens, requests).
    admitted: the tickets in it that run for the first time (the admission group; empty for a pure step).
    left: residents gone since the group's last batch (preempted, cancelled, expired): the processor drops their state
    first.
    short_of: what kept the rest of its partition's queue waiting when it left: "budget" (time that deadlines allow
        included), "places", "room", "memory", "share" or "stage"; "" when none waited, or only held ones.
    cached: of the tickets that enter with it, the units that were found already done, where there were any.
    part: what it repeats of a call that failed; None for all others.
    notes: free for drivers and processors, written into the trace.
    """

    id: int
    group: str
    partition: Hashable
    stage: str
    cause: Cause
    scheduled_at: float
    cost: float
    expected: float
    grants: dict[Ticket, float]
    admitted: tuple[Ticket, ...] = ()
    left: tuple[Ticket, ...] = ()
    short_of: str = ""
    cached: dict[Ticket, float] = field(default_factory=dict)
    part: Part | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> FlushReason:
        return self.cause.reason

    def __len__(self) -> int:
        return len(self.grants)
