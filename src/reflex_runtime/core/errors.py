"""Every error with which a request can end. Its class alone decides whether a retry is safe.

    ReflexError
    ├── Rejected            never entered the queue: a retry is safe
    │   ├── QueueFull · InFlightCapReached · TooLate · TooLarge · Closed
    ├── Dropped             entered, left without a result: a retry is safe
    │   ├── Cancelled · Expired · Shed · Superseded · Displaced · Drained
    ├── ProcessorError      ran and failed: a retry may run it a second time
    │   ├── ResultCountMismatch · NonFiniteResult · ProcessorHung · GpuLost · CutShort
    ├── WaitTimeout         the caller stopped waiting; the request may still run
    └── ConfigError         a setting is wrong: names field, value and range

Each class has its wire form (`code`, `http_status`, `retry_safe`, JSON-safe `details`), so no server keeps a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

JSON = str | int | float | bool | None


class ReflexError(Exception):
    """Base of all errors of the runtime.

    details: JSON-safe values for the answer. retry_after: a hint in seconds, or None.
    place: where in the user's code it was raised, for logs alone; "" if unknown.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retry_safe: ClassVar[bool] = False
    outcome: ClassVar[str] = "failed"
    place: str = ""

    def __init__(self, message: str = "", *, retry_after: float | None = None, **details: JSON) -> None:
        super().__init__(message or self.code)
        self.message = message or self.code
        self.retry_after = retry_after
        self.details: Mapping[str, JSON] = details

    def logged(self) -> str:
        """Its text in a log."""
        return f"{self} ({self.place})" if self.place else str(self)

    def __reduce__(self) -> Any:  # keyword details survive pickling between processes
        return (_rebuild, (type(self), self.message, self.retry_after, dict(self.details)))


def _rebuild(kind: type[ReflexError], message: str, retry_after: float | None, details: dict[str, JSON]) -> ReflexError:
    return kind(message, retry_after=retry_after, **details)


class Rejected(ReflexError):
    """The request never entered the queue."""

    code, http_status, retry_safe, outcome = "rejected", 503, True, "rejected"


class QueueFull(Rejected):
    """The group's queue is at capacity."""

    code, http_status = "queue_full", 503


class InFlightCapReached(Rejected):
    """The client has as many unsettled requests as it may have."""

    code, http_status = "client_at_capacity", 429


class TooLate(Rejected):
    """Its deadline cannot be met, by the estimate."""

    code, http_status = "deadline_unreachable", 503


class TooLarge(Rejected):
    """The request could never run here: its resources exceed what exists."""

    code, http_status, retry_safe = "too_large", 413, False


class Closed(Rejected):
    """The scheduler takes no new requests."""

    code, http_status = "shutting_down", 503


class Dropped(ReflexError):
    """The request entered and left without a result and without a fault."""

    code, http_status, retry_safe, outcome = "dropped", 503, True, "drained"


class Cancelled(Dropped):
    """The caller cancelled it or disconnected."""

    code, http_status, outcome = "cancelled", 499, "cancelled"


class Expired(Dropped):
    """Its deadline passed before it was answered."""

    code, http_status, outcome = "deadline_exceeded", 504, "expired"


class Shed(Dropped):
    """Its deadline could no longer be met, so it was refused before it ran."""

    code, http_status, outcome = "deadline_unreachable", 503, "shed"


class Superseded(Dropped):
    """A newer request of the same client replaced it."""

    code, http_status, outcome = "superseded", 409, "superseded"


class Displaced(Dropped):
    """The queue was full, and an urgent request, or one of a client with fewer waiting, took its place."""

    code, http_status, outcome = "queue_full", 503, "shed"


class Drained(Dropped):
    """The scheduler closed before it ran."""

    code, http_status, outcome = "shutting_down", 503, "drained"


class ProcessorError(ReflexError):
    """The request ran and failed."""

    code, http_status, retry_safe, outcome = "processor_failed", 500, False, "failed"


class ResultCountMismatch(ProcessorError):
    """The processor returned a wrong number of results."""


class NonFiniteResult(ProcessorError):
    """The result holds NaN or infinity, which must never reach a motor."""


class ProcessorHung(ProcessorError):
    """The processor did not return within the watchdog limit."""

    code = "processor_hung"


class GpuLost(ProcessorError):
    """The GPU does not answer this process; it may answer another one."""


class CutShort(ProcessorError):
    """The request was still running when the time for the shutdown was over."""

    code, http_status, outcome = "shutting_down", 503, "drained"


class WaitTimeout(ReflexError):
    """The caller stopped waiting. Its request is still answered, or leaves when the next batch is formed."""

    code, http_status, retry_safe, outcome = "wait_timeout", 504, False, "expired"


class ConfigError(ReflexError, ValueError):
    """A setting is wrong. The message names the field, the value and the range."""

    code, http_status = "invalid_config", 400
