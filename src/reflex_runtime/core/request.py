"""A caller's request (`Request`, read-only) and the scheduler's record of it (`Ticket`).

Life of a ticket; `TRANSITIONS` is the table of all allowed changes of state:

    PREPARING ──prepared──▶ WAITING
    PREPARING ──refused, cancelled, expired, superseded, drained──▶ SETTLED
    WAITING ──granted──▶ RUNNING ──Done, Failed──▶ SETTLED
       ▲                   │  ▲
       │               More│  │granted
       │                   ▼  │
       └──preempted──── RESIDENT ──cancelled, expired, drained──▶ SETTLED
    WAITING ──cancelled, expired, shed, superseded, displaced, drained──▶ SETTLED
    RUNNING ──taken back before its batch was started (`forming`)──▶ WAITING
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from numbers import Real
from typing import Any, Final, NamedTuple, TypeVar, dataclass_transform

from reflex_runtime.core.errors import ConfigError

T = TypeVar("T")


class Priority(IntEnum):
    """Tiers in the order they are served."""

    URGENT = 0
    DEFAULT = 1
    BACKGROUND = 2


PRIORITIES: Final = {priority.name.lower(): priority for priority in Priority}  # by the names that callers use


class TicketState(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    RESIDENT = "resident"
    SETTLED = "settled"

    __hash__ = object.__hash__  # Enum's own is a Python function, and every step of a ticket looks itself up


# The hot path names these: in CPython 3.11 looking a member up on its enum takes 75 ns, several times a request.
PREPARING, WAITING, RUNNING, RESIDENT, SETTLED = TicketState
URGENT, DEFAULT, BACKGROUND = Priority


TRANSITIONS: dict[TicketState, frozenset[TicketState]] = {
    PREPARING: frozenset({WAITING, SETTLED}),
    WAITING: frozenset({RUNNING, SETTLED}),
    RUNNING: frozenset({WAITING, RESIDENT, SETTLED}),
    RESIDENT: frozenset({RUNNING, WAITING, SETTLED}),
    SETTLED: frozenset(),
}


@dataclass_transform(eq_default=False, frozen_default=True)
def _read_only(cls: type[T]) -> type[T]:
    """A frozen dataclass for the type checker, an ordinary one at run time: made in 0.3 us, not in 1.7."""
    return dataclass(slots=True, eq=False)(cls)


@_read_only
class Request:
    """One piece of work for one caller. Read-only.

    payload: opaque to the scheduler.
    id: for people and traces; need not be unique.
    group: its slot or workload.
    partition: requests of different partitions never share a batch.
    client: who has the fair share and the in-flight cap: a robot, a feed, a key.
    time_limit: seconds from arrival after which an answer is useless, or None.
    shape: the executable it runs on (input shapes); costs are learned per shape.
    cost_class: separates requests of one shape with different costs (cache hit or miss, steps).
    stage: its first stage ("" for one-shot work; "prefix", "denoise" …).
    weight: its client's share relative to others, > 0.
    wants: its units of work: steps to run, tokens to compute; 1 for one-shot work.
    streams: True if it has answers while it is resident; its deadline is then that of the first one.
    max_gap: most seconds between two answers of its stream; None: its group's. `TimedTokens` keeps it.
    """

    payload: Any = None
    id: str = ""
    group: str = "default"
    partition: Hashable = ""
    client: Hashable = ""
    priority: Priority = DEFAULT
    time_limit: float | None = None
    shape: Hashable = ""
    cost_class: Hashable = ""
    stage: str = ""
    weight: float = 1.0
    wants: float = 1.0
    streams: bool = False
    max_gap: float | None = None

    def __post_init__(self) -> None:
        # Chained so that NaN fails too; one expression because this runs for every request.
        try:
            if not (0.0 < self.weight < inf and 0.0 < self.wants < inf and self.priority.__class__ is Priority):
                if not isinstance(self.priority, Priority):
                    names = ", ".join(f"Priority.{priority.name}" for priority in Priority)
                    raise ConfigError(f"Request.priority={self.priority!r}: must be one of {names}")
                raise ConfigError(f"Request: weight={self.weight!r}, wants={self.wants!r}: both must be finite and > 0")
            if self.time_limit is not None and not self.time_limit >= 0.0:
                raise ConfigError(f"Request.time_limit={self.time_limit!r}: must be >= 0 seconds or None")
            if self.max_gap is not None and not self.max_gap > 0.0:
                raise ConfigError(f"Request.max_gap={self.max_gap!r}: must be > 0 seconds or None")
        except TypeError as error:
            kinds = {"weight": Real, "wants": Real, "time_limit": Real | None, "max_gap": Real | None}
            wrong = next(name for name, kind in kinds.items() if not isinstance(getattr(self, name), kind))
            raise ConfigError(f"Request.{wrong}={getattr(self, wrong)!r}: must be a number") from error


class AdmittedBatch(NamedTuple):
    """A summary of the batch with which a ticket entered; the ticket keeps it when the batch is gone.

    size: number of tickets that entered with it. reason, cause: why it was formed. cost: predicted.
    """

    id: int
    size: int
    reason: str
    cause: str
    cost: float


class Ticket:
    """The scheduler's record of one request. Only `core/` writes to it, apart from `waiter`.

    seq: order of arrival in this scheduler.   arrived, deadline: absolute times (deadline inf when none).
    ready_at: when it could first run, inf until it is prepared; `prepared` sets `seq` and `arrived` anew, and
    `admitted` stays.
    tier: the tier it is served in: its priority, until it ages.
    stage, wants: a resident's next stage, and the units left.
    granted, cached, recomputed: units granted in all, found already computed, and granted again after preemption;
    computed: units whose result the processor holds now; lost: those it held when it was last preempted, -1 before.
    extra: chances that units beyond `wants` would be of use; unused: units whose result was thrown away.
    batches: number of its batches; `admission`: its first batch, None before.
    seconds: its device seconds in the `Backlog` while it waits, 0.0 otherwise.
    started: when it was first scheduled (None before); shared: its share of the batches' measured time, in seconds.
    queue: its present or last queue among its client's tickets; it belongs to `order`.
    waiter: free for the driver (a future).
    """

    __slots__ = (
        "abandoned",
        "admission",
        "admitted",
        "answered",
        "arrived",
        "batches",
        "cached",
        "cancel_requested",
        "computed",
        "deadline",
        "extra",
        "granted",
        "held",
        "lost",
        "outcome",
        "queue",
        "ready_at",
        "recomputed",
        "request",
        "seconds",
        "seq",
        "shared",
        "stage",
        "started",
        "state",
        "tier",
        "unused",
        "waiter",
        "wants",
    )

    def __init__(self, request: Request, seq: int, now: float) -> None:
        self.request = request
        self.seq = seq
        self.admitted = self.arrived = self.ready_at = now
        self.deadline = inf if request.time_limit is None else now + request.time_limit
        self.state = WAITING
        self.tier: Priority = request.priority
        self.stage = request.stage
        self.wants = request.wants
        self.granted = self.cached = self.recomputed = self.computed = self.shared = self.seconds = self.unused = 0.0
        self.extra: tuple[float, ...] = ()
        self.batches = 0
        self.admission: AdmittedBatch | None = None
        self.started: float | None = None
        self.cancel_requested = self.abandoned = self.held = self.answered = False
        self.lost = -1.0
        self.outcome: Any = None
        self.queue: Any = None
        self.waiter: Any = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def progressed(self) -> bool:
        """Whether it holds more than it lost at its last preemption; until then it is not preempted again."""
        return self.computed > self.lost

    def __repr__(self) -> str:
        return f"Ticket({self.seq}, {self.request.id!r}, {self.state.value})"
