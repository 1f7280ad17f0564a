"""What the model remembers: requests, groups, batches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf, log
from typing import TYPE_CHECKING

from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Priority, Request

if TYPE_CHECKING:
    from .cost import Units

NEARLY = 1e-9


@dataclass(eq=False)
class Seen:
    """A request and what became of it."""

    seq: int
    request: Request
    arrived: float
    admitted: float
    deadline: float
    tier: Priority
    stage: str
    wants: float
    promote_at: float
    state: str = "waiting"
    granted: float = 0.0
    computed: float = 0.0
    recomputed: float = 0.0
    shared: float = 0.0
    share: float = 0.0  # seconds it counts for while it waits
    has_place: bool = False  # it is or was resident and has not left since
    lost: float = -1.0
    turn: int = 0  # how many steps of all had ended when its last one did
    held: bool = False
    abandoned: bool = False
    cancelled: bool = False
    probe: bool = False  # let in against the estimate
    settled_at: float | None = None
    ended: int = -1  # how many had ended before it did
    ended_before: int = 0  # how many had ended before it came
    result: str = ""

    @property
    def client(self) -> Hashable:
        return self.request.client

    def __repr__(self) -> str:
        return f"#{self.seq}"


def kind(ticket: Seen) -> Hashable:
    """What has an estimate of its own."""
    return ticket.request.shape, ticket.request.cost_class


@dataclass
class World:
    """One group as the oracle sees it."""

    name: str
    flush: FlushPolicy
    meter: Units
    capacity: int = 1000
    cap: int = 0
    weight: float = 1.0
    latest_only: bool = False
    share_room: bool = False
    promote_after: float = 1.0
    pool: float | None = None  # units of memory
    there: float = 0.0  # of what a ticket wants, already done at entry
    max_queued_units: float = inf
    max_queued_seconds: float = inf
    displace_background: bool = False
    tenant: str = ""
    device_time: float = 0.0
    tenant_time: float = 0.0  # the same of all its groups
    per_item: float = 0.0
    counters: dict[Hashable, float] = field(default_factory=dict)
    rest: float = 0.0
    device_times: dict[Hashable, float] = field(default_factory=dict)  # of partitions, virtual
    device_rest: float = 0.0
    room: int | None = None
    was_held: dict[Hashable, bool] = field(default_factory=dict)
    free_from: dict[Hashable, float] = field(default_factory=dict)  # of what is held: since when the device was free
    holds: dict[Hashable, float] = field(default_factory=dict)  # promised, until the next input
    left: list[Seen] = field(default_factory=list)
    hold_for: dict[Hashable, int] = field(default_factory=dict)  # how many are to come before it is looked at again
    came: dict[Hashable, bool] = field(default_factory=dict)  # whether some of them have
    made_ready: list[tuple[float, float]] = field(default_factory=list)  # (admitted, ready)
    sizes: list[int] = field(default_factory=list)  # of its batches
    prices: dict[Hashable, float] = field(default_factory=dict)
    places_of: dict[Hashable, Hashable] = field(default_factory=dict)  # the partition of each client's last request
    last: dict[Hashable, float] = field(default_factory=dict)  # when it was answered; -inf if it has asked since
    answers: list[tuple[Hashable, float, bool]] = field(default_factory=list)  # client, when, answered (else it waits)
    probes: list[Seen] = field(default_factory=list)  # those let in although the estimate says they cannot make it
    renewed: list[tuple[Hashable, float, float]] = field(default_factory=list)  # shape or kind, when, seconds it took
    suspects: dict[Hashable, list[Trial]] = field(default_factory=dict)
    served: int = 0
    offenders: dict[Hashable, int] = field(default_factory=dict)  # clients, and how many were answered when they failed
    shared: list[bool] = field(default_factory=list)  # of clients that were no offenders: which request failed alone

    def most(self) -> float:
        """How many may share a call: as many as succeed as likely as not, at the share of guilty ones lately."""
        share = 0.0
        for guilty in self.shared:
            share = share + (1.0 - share) / 32 if guilty else share - share / 32
            share = 0.0 if share < 2.0**-10 else share
        return max(1.0, log(2.0) / share // 1.0) if share else inf


@dataclass(eq=False)
class Origin:
    """A batch whose call failed, and all that is known of who made it fail."""

    pending: int = 0
    served: bool = False


@dataclass(eq=False)
class Trial:
    """Members of a call that failed, to run together again."""

    grants: list[tuple[Seen, float]]
    origin: Origin
    other: Trial | None = None
    fails: bool = False


@dataclass
class Expected:
    """A batch the oracle expects."""

    id: int
    group: str
    partition: Hashable
    stage: str
    cause: str
    cost: float
    expected: float
    grants: list[tuple[Seen, float]]
    admitted: list[Seen]
    left: list[Seen]
    short_of: str = ""
    cached: dict[Seen, float] = field(default_factory=dict)
    trial: Trial | None = None
    crashed: bool = False


@dataclass
class Stepped:
    """A step of a group with memory, as far as it is decided."""

    base: list[tuple[Seen, float]] = field(default_factory=list)
    entered: list[tuple[Seen, float]] = field(default_factory=list)
    thrown_out: list[Seen] = field(default_factory=list)
    cached: dict[Seen, float] = field(default_factory=dict)
    stage: str | None = None
    part: float = inf  # most members of a client
    turns: list[Seen] = field(default_factory=list)  # residents whose turn it is
    memory_short: bool = False
    passed_over: bool = False
    short_of: str = ""

    def runs(self, ticket: Seen) -> bool:
        return any(ticket is t for t, _ in self.base)
