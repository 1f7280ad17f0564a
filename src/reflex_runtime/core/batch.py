"""A batch, its outcomes, the isolation of bad requests, and the events that report all of it.

Isolation. A call that failed as a whole is repeated in two halves, and a half that fails is split again, until each bad
request has failed alone. Every part is a batch of its own: its members are answered as soon as it succeeds, and other
groups take their turns in between. Larger parts go first, so that most members wait for two more calls. Of two halves
the smaller one goes first: it is more likely to succeed, and then the other is split without a call. One bad request
among n takes at most 2·⌈log₂ n⌉ more calls, g of them 2·g·⌈log₂ n⌉, never more than 2·(n − 1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, log
from typing import Any, NamedTuple

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import RESIDENT, Request, Ticket

OFFENDERS = 4096  # clients remembered per group
MEMORY = 32.0  # requests over which the share of bad ones is averaged
NO_SHARE = 2.0**-10  # a smaller share of bad ones counts as none


class Origin:
    """The batch whose call failed first. pending: parts that have not run. served: a member was answered."""

    __slots__ = ("pending", "served")

    def __init__(self) -> None:
        self.pending = 0
        self.served = False


class Part:
    """Members of a failed call that run together again, with their granted units. other: the other half.

    fails: whether it must fail, because the other half succeeded.
    """

    __slots__ = ("fails", "grants", "origin", "other")

    def __init__(self, grants: dict[Ticket, float], origin: Origin) -> None:
        self.grants, self.origin = grants, origin
        self.fails = False
        self.other: Part | None = None


class Suspects:
    """The parts of one partition that must run on their own, in order."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[Part] = []  # never many

    def split(self, grants: dict[Ticket, float], origin: Origin) -> None:
        """Split a part that failed into two halves."""
        tickets = list(grants)
        middle = len(tickets) // 2 or 1
        halves = [Part({t: grants[t] for t in some}, origin) for some in (tickets[:middle], tickets[middle:]) if some]
        if len(halves) == 2:
            halves[0].other, halves[1].other = halves[1], halves[0]
        origin.pending += len(halves)
        self._parts.extend(halves)

    def next(self) -> Part | None:
        """The part to run now, without members that ended meanwhile or are held; None if there is none."""
        while self._parts:
            part = self._parts[0]
            if part.grants and not all(t.state is RESIDENT and not t.held for t in part.grants):
                part.grants = {t: u for t, u in part.grants.items() if t.state is RESIDENT and not t.held}
                part.fails = False  # the bad request may be gone
            if part.grants and not (part.fails and len(part.grants) > 1):
                return part
            del self._parts[0]
            part.origin.pending -= 1
            self.split(part.grants, part.origin)
        return None

    def take(self, part: Part) -> None:
        """The part `next` returned runs now."""
        self._parts.remove(part)
        if part.other is not None:
            part.other.other = None  # the other half proves nothing about this one; no reference cycle either

    def clear(self) -> None:
        """The partition's last ticket left."""
        self._parts.clear()

    def succeeded(self, part: Part) -> None:
        """The part succeeded, so the bad requests are in the other half."""
        if part.other is not None:
            part.other.fails = True


class Offenders:
    """Clients of one group whose last request failed alone, and the share of such requests among the others.

    An offender runs alone; if bad requests come from all clients, `limit` makes batches smaller. What both bring is in
    docs/benchmarks.md#the-schedulers-rules.
    """

    def __init__(self) -> None:
        self._failed: OrderedDict[Hashable, int] = OrderedDict()  # client → answers of the group before its failure
        self._answered = 0
        self.share = 0.0  # share of bad requests among those that shared batches

    def __bool__(self) -> bool:
        return bool(self._failed)

    def __contains__(self, client: Hashable) -> bool:
        return client in self._failed

    @property
    def limit(self) -> float:
        """Most requests in a call such that it succeeds with probability one half; inf without bad requests."""
        return max(1.0, log(2.0) / self.share // 1.0) if self.share else inf

    def others_answered(self, client: Hashable) -> bool:
        """Whether the group answered a request since this offender last failed."""
        return client in self._failed and self._failed[client] < self._answered

    def failed(self, client: Hashable) -> None:
        """A request of the client failed alone."""
        if client not in self._failed:
            self.share += (1.0 - self.share) / MEMORY
        self._failed[client] = self._answered
        self._failed.move_to_end(client)
        if len(self._failed) > OFFENDERS:
            self._failed.popitem(last=False)

    def answered(self, tickets: Sequence[Ticket]) -> None:
        """Tickets were answered: their clients share batches again."""
        self._answered += len(tickets)
        if not self._failed and not self.share:
            return
        for ticket in tickets:
            if self._failed.pop(ticket.request.client, None) is None and self.share:
                self.share -= self.share / MEMORY
                if self.share < NO_SHARE:
                    self.share = 0.0


# -- the batch ---------------------------------------------------------------------------------------------------------


class FlushReason(StrEnum):
    """The three documented reasons, in metrics and journals."""

    BUDGET_REACHED = "budget_reached"
    TIMEOUT = "timeout"
    SINGLE_REQUEST_OVER_BUDGET = "single_request_over_budget"


class Cause(StrEnum):
    """Why a batch was formed, as metrics, journals and tables name it."""

    FULL = "full"
    SIZE = "size_reached"
    SINGLE = "over_budget"
    HELD = "held"
    IDLE = "idle"
    URGENT = "urgent"
    STEP = "step"
    APART = "apart"
    DRAIN = "drain"

    __hash__ = object.__hash__  # Enum's own is a Python function, and every batch looks its cause up

    @property
    def reason(self) -> FlushReason:
        """The documented reason of this cause."""
        return _REASONS.get(self, FlushReason.TIMEOUT)

    @property
    def names(self) -> tuple[str, str]:
        """The plain texts of the reason and of the cause."""
        return _NAMES[self]


_REASONS = {
    Cause.SINGLE: FlushReason.SINGLE_REQUEST_OVER_BUDGET,
    Cause.FULL: FlushReason.BUDGET_REACHED,
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
    extra: chances that each further unit would be of use, descending (see `ExtraUnits`); for groups with resources.
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
    """The call failed as a whole with `error`: its members run again in smaller batches.

    All outcomes of a batch are Apart, or none. A batch of one is never Apart: its member is the bad one.
    """

    error: BaseException


Outcome = Done | More | Failed | Apart


@dataclass(slots=True, eq=False)
class Batch:
    """Tickets that run together and the units granted to each.

    expected: predicted seconds of this call, 0.0 when unknown.
    cost: predicted, in the unit of the group's cost model (seconds until its last member ends, tokens, requests).
    admitted: the tickets that enter with it; empty for a pure step.
    left: residents gone since the group's last batch (preempted, cancelled, expired): the processor drops their state
        first.
    short_of: what kept out the rest of its partition's queue: "budget" (including the time that deadlines allow),
        "places", "room", "memory", "share" or "stage"; "" if none waited, or only held ones.
    cached: units of its new tickets that were already computed.
    extra: units granted beyond those wanted; a part of `grants`.
    part: the part of a failed call that it repeats, or None.
    notes: free for drivers and processors; they are in the trace.
    guessed: nothing like it was measured yet, so `expected` is a default.
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
    guessed: bool = False

    @property
    def predicted(self) -> float:
        """`expected` as observers show it: 0.0 also where nothing was measured."""
        return 0.0 if self.guessed else self.expected

    @property
    def reason(self) -> FlushReason:
        return self.cause.reason

    def __len__(self) -> int:
        return len(self.grants)


# -- events ------------------------------------------------------------------------------------------------------------

# Metrics, journal, trace, health and dashboard are computed from this one stream. Plain tuples with names are cheap to
# make on the hot path. Each begins with its time, in seconds of the driver's monotonic clock. A sink keeps a ticket no
# longer than it needs it: the ticket holds the payload.


class RequestQueued(NamedTuple):
    at: float
    ticket: Ticket


class RequestRejected(NamedTuple):
    """A request was refused at admission; it never had a ticket."""

    at: float
    request: Request
    error: ReflexError


class RequestPreempted(NamedTuple):
    """A resident lost its place and waits again."""

    at: float
    ticket: Ticket


class RequestProgressed(NamedTuple):
    """A resident finished a step; `value` is its answer so far, if it has one."""

    at: float
    ticket: Ticket
    value: Any


class RequestAbandoned(NamedTuple):
    """A caller stopped waiting (WaitTimeout). Its ticket is answered, or leaves when the next batch is formed."""

    at: float
    ticket: Ticket


class RequestSettled(NamedTuple):
    """A ticket reached its end: `ticket.outcome` is a Done, or a Failed with the error."""

    at: float
    ticket: Ticket


class BatchScheduled(NamedTuple):
    """A batch was formed for the device.

    idle_polls: times since the batch before at which no batch was formed although tickets were unsettled, or tickets
        were settled without one.
    """

    at: float
    batch: Batch
    queued: int
    idle_polls: tuple[float, ...] = ()


class BatchFinished(NamedTuple):
    """A batch has run.

    crashed: whether it counts as a crash of the processor: no item succeeded, neither here nor in the other parts of a
        failed call. A request that fails while others are answered is a bad request, not a crash.
    apart: whether the call failed as a whole and its members run again in smaller batches.
    """

    at: float
    batch: Batch
    elapsed: float
    crashed: bool
    apart: bool = False


class SchedulerPaused(NamedTuple):
    """A group or one of its partitions takes no turn before `until`."""

    at: float
    group: str
    partition: Hashable | None
    until: float


class DeviceLost(NamedTuple):
    """The device was given up and nothing more runs. Drivers add it to the stream."""

    at: float
    error: ReflexError


class RequestAnswered(NamedTuple):
    """A server answered a request. Servers add it to the stream.

    outcome: ok, cancelled, rejected, expired, shed, superseded, drained, failed, client_error. latency: seconds.
    detail: free for the server's sinks (body and answer, for the recorder).
    served_in: seconds from the request's last byte to the answer; None for a shadow, for which no caller waits.
    wire: the request's protocol; "" for a shadow. error: why it has no answer, if known.
    span: the server's part of its trace, or None.
    """

    at: float
    slot: str
    outcome: str
    status: int
    latency: float
    ticket: Ticket | None = None
    detail: Any = None
    served_in: float | None = None
    wire: str = ""
    error: ReflexError | None = None
    span: Any = None


Event = (
    RequestQueued
    | RequestRejected
    | RequestPreempted
    | RequestProgressed
    | RequestAbandoned
    | RequestSettled
    | BatchScheduled
    | BatchFinished
    | SchedulerPaused
    | DeviceLost
    | RequestAnswered
)
