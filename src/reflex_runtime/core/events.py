"""The one event stream. Metrics, recorder, trace, health and dashboard are computed from it alone.

Events are plain tuples with names: cheap to make on the hot path, immutable, and each starts with its time in seconds
on the driver's monotonic clock. Sinks must not keep a ticket longer than they need it: it holds the payload.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Request, Ticket


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
    """A caller stopped waiting (its WaitTimeout); the ticket keeps its place until it is answered or formed."""

    at: float
    ticket: Ticket


class RequestSettled(NamedTuple):
    """A ticket reached its end: `ticket.outcome` is a Done, or a Failed with the error."""

    at: float
    ticket: Ticket


class BatchScheduled(NamedTuple):
    """A batch was formed and handed to the device.

    idle_polls: times since the batch before at which the scheduler formed no batch although tickets were unsettled,
    or settled tickets without forming one.
    """

    at: float
    batch: Batch
    queued: int
    idle_polls: tuple[float, ...] = ()


class BatchFinished(NamedTuple):
    """A batch came back.

    crashed: whether it counts as a crash of the processor: none of its items succeeded, nor any of the batch that it is
        the last part of. A request that fails while others are answered is a bad request, not a crash.
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
    """The device was given up and nothing more runs (added to the stream by drivers, not by the core)."""

    at: float
    error: ReflexError


class RequestAnswered(NamedTuple):
    """A server answered a request (added to the stream by servers, not by the core).

    outcome: ok, cancelled, rejected, expired, shed, superseded, drained, failed, client_error. latency: seconds.
    detail: free for the server's sinks (what was asked and answered, for the recorder).
    served_in: seconds from the request's last byte to the answer; None where no caller waits for it (a shadow's).
    wire: the protocol that the request came on; "" for a shadow's. error: why it has no answer, where a server knows.
    span: what its server keeps of its trace; None without one.
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
