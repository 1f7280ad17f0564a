"""Every way a call can fail, one class per error code, so that a program can catch those it can handle.

The codes are those of `docs/errors.md`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

BY_CODE: dict[str, type[ServerError]] = {}
"""The class of every code, filled as the classes below are made."""


class ClientError(Exception):
    """Base of everything a call raises. retry_safe: asking again cannot make the policy run the request twice."""

    code: str = "client_error"
    retry_safe: bool = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        retry_safe: bool | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.status, self.request_id, self.retry_after = status, request_id, retry_after
        self.retry_safe = type(self).retry_safe if retry_safe is None else retry_safe
        self.body: Mapping[str, Any] = body or {}

    def __str__(self) -> str:
        told = f"{self.code} ({self.status})" if self.status else self.code
        return f"{told}: {self.message}" + (f" [request {self.request_id}]" if self.request_id else "")


class Unreachable(ClientError):
    """No answer. retry_safe says whether the request may have arrived."""

    code = "unreachable"


class TimedOut(Unreachable):
    """No answer in time; the request may still run."""

    code = "timed_out"


class BadAnswer(ClientError):
    """The answer is not one of a policy server, or not safe to execute."""

    code = "bad_answer"


class ServerError(ClientError):
    """An answer that is not 2xx. Codes without a class of their own raise this one.

    stale: do not repeat this request; ask with a newer observation.
    """

    code = "server_error"
    stale: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        BY_CODE[cls.code] = cls


class InvalidRequest(ServerError):
    """A field is missing or wrong; `body["field"]` names it."""

    code = "invalid_request"


class InvalidJson(ServerError):
    """The body is not JSON."""

    code = "invalid_json"


class Unauthorized(ServerError):
    """The key is missing or wrong: `Client(api_key=…)`."""

    code = "unauthorized"


class Forbidden(ServerError):
    """A server without a key accepts only its own names: start it with `--allow-host NAME` or `--api-key`."""

    code = "forbidden"


class NotFound(ServerError):
    """No such path: another server, or an older one."""

    code = "not_found"


class MethodNotAllowed(ServerError):
    """The path exists, the method does not."""

    code = "method_not_allowed"


class RequestTimeout(ServerError):
    """The request did not reach the server in time."""

    code = "request_timeout"


class TooLarge(ServerError):
    """Send JPEG, or smaller pictures."""

    code = "too_large"


class InvalidConfig(ServerError):
    """A setting is wrong; the message names it."""

    code = "invalid_config"


class QueueFull(ServerError):
    """The policy's queue is at capacity."""

    code = "queue_full"


class ClientAtCapacity(ServerError):
    """This robot has too many unanswered requests."""

    code = "client_at_capacity"


class TooManyRequests(ServerError):
    """The server answers too many requests at the moment."""

    code = "too_many_requests"


class Overloaded(ServerError):
    """The server has too many connections, or bytes of requests in memory."""

    code = "overloaded"


class SloViolated(ServerError):
    """The latency objective is violated, and most requests are refused until it is met."""

    code = "slo_violated"


class DeadlineUnreachable(ServerError):
    """Refused before it ran, because the answer could not come in time."""

    code, stale = "deadline_unreachable", True


class DeadlineExceeded(ServerError):
    """The deadline passed while it waited."""

    code, stale = "deadline_exceeded", True


class Superseded(ServerError):
    """A newer request of the same robot replaced it."""

    code, stale = "superseded", True


class Cancelled(ServerError):
    """The caller left while it waited."""

    code, stale = "cancelled", True


class NotReady(ServerError):
    """The policy is being loaded, or loading failed."""

    code = "not_ready"


class ShuttingDown(ServerError):
    """The server is stopping."""

    code = "shutting_down"


class Degraded(ServerError):
    """The policy crashes; the server admits one request at a time to see whether it works again."""

    code = "degraded"


class ProcessorFailed(ServerError):
    """The policy ran and failed."""

    code = "processor_failed"


class ProcessorHung(ServerError):
    """The policy ran and did not return in time."""

    code = "processor_hung"


class Internal(ServerError):
    """A fault of the server itself."""

    code = "internal"
