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

    __hash__ = object.__hash__  # Enum's own is a Python function, and every batch looks its cause up

    @property
    def reason(self) -> FlushReason:
        """The documented reason this cause counts as."""
        return _REASONS.get(self, FlushReason.TIMEOUT)

    @property
    def names(self) -> tuple[str, str]:
        """The plain texts of the reason and of the cause."""
        return _NAMES[self]


_REASONS = {
    Cause.SINGLE: FlushReason.SINGLE_REQUEST_OVER_BUDGET,
    Cause.BUDGET: FlushReason.BUDGET_REACHED,
    Cause.SIZE: FlushReason.BUDGET_REACHED,
}


_NAMES = {cause: (cause.reason.value, cause.value) for cause in Cause}  # a member's `value` is a slow property


class Done(NamedTuple):
    """The request is answered with `value`. earlier, unused: see `More`."""

    value: Any = None
    earlier: tuple[Any, ...] = ()
    unused: float = 0.0


class More(NamedTuple):
    """The request stays resident for another step.

    value: an answer so far (a token), or None.  wants: units it wants next.  stage: its next stage; None keeps it.
    earlier: answers of the same step that come before `value`.  unused: granted units whose result was thrown away.
    extra: chances that each further unit would be of use, descending (see `extra.py`); for groups with resources.
    """

    value: Any = None
    wants: float = 1.0
    stage: str | None = None
    earlier: tuple[Any, ...] = ()
    unused: float = 0.0
    extra: tuple[float, ...] = ()


class Failed(NamedTuple):
    """The request ran and failed with `error`. earlier: see `More`."""

    error: BaseException
    earlier: tuple[Any, ...] = ()


class Apart(NamedTuple):
    """The call failed as a whole with `error`, and the bad member is not known: they run again in smaller batches.

    All outcomes of a batch are Apart, or none. A batch of one is never Apart: its member is the bad one.
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
    short_of: what kept the rest of its partition's queue out: "budget" (including the time that deadlines allow),
        "places", "room", "memory", "share" or "stage"; "" if none waited, or only held ones.
    cached: units of its new tickets that were found already computed.
    extra: units granted beyond what was wanted; a part of `grants`.
    part: the part of a failed call that it repeats, or None.
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
    extra: dict[Ticket, float] = field(default_factory=dict)
    part: Part | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> FlushReason:
        return self.cause.reason

    def __len__(self) -> int:
        return len(self.grants)
