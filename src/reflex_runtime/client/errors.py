"""Every way a call can fail, one class per error code, so that a program can catch those it can handle.

The codes are those of `docs/errors.md`; a test compares the two. A class's code is its name: `QueueFull` is queue_full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

BY_CODE: dict[str, type[ServerError]] = {}
"""The class of every code, filled as the classes below are made."""


class ClientError(Exception):
    """Base of everything a call raises. retry_safe: asking again cannot make the policy run the request twice."""

    code: str = "client_error"
    retry_safe: bool = False

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"\B[A-Z]", r"_\g<0>", cls.__name__).lower()

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


class TimedOut(Unreachable):
    """No answer in time; the request may still run."""


class BadAnswer(ClientError):
    """The answer is not one of a policy server, or not safe to execute."""


class ServerError(ClientError):
    """An answer that is not 2xx. Codes without a class of their own raise this one.

    stale: do not repeat this request; ask with a newer observation.
    """

    stale: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        BY_CODE[cls.code] = cls


class InvalidRequest(ServerError):
    """A field is missing or wrong; `body["field"]` names it."""


class InvalidJson(ServerError):
    """The body is not JSON."""


class Unauthorized(ServerError):
    """The key is missing or wrong: `Client(api_key=…)`."""


class Forbidden(ServerError):
    """A server without a key accepts only its own names: start it with `--allow-host NAME` or `--api-key`."""


class NotFound(ServerError):
    """No such path: another server, or an older one."""


class MethodNotAllowed(ServerError):
    """The path exists, the method does not."""


class RequestTimeout(ServerError):
    """The request did not reach the server in time."""


class TooLarge(ServerError):
    """Send JPEG, or smaller pictures."""


class UnsupportedEncoding(ServerError):
    """The body is compressed, and not with gzip."""


class UnsupportedMediaType(ServerError):
    """The body's Content-Type is not one that the function's items come in."""


class InvalidConfig(ServerError):
    """A setting is wrong; the message names it."""


class QueueFull(ServerError):
    """The policy's queue is at capacity."""


class ClientAtCapacity(ServerError):
    """This robot has too many unanswered requests."""


class TooManyRequests(ServerError):
    """The server answers too many requests at the moment."""


class Overloaded(ServerError):
    """The server has too many connections, or bytes of requests in memory."""


class SloViolated(ServerError):
    """The latency objective is violated, and most requests are refused until it is met."""


class DeadlineUnreachable(ServerError):
    """Refused before it ran, because the answer could not come in time."""

    stale = True


class DeadlineExceeded(ServerError):
    """The deadline passed while it waited."""

    stale = True


class Superseded(ServerError):
    """A newer request of the same robot replaced it."""

    stale = True


class Cancelled(ServerError):
    """The caller left while it waited."""

    stale = True


class NotReady(ServerError):
    """The policy is being loaded, or loading failed."""


class ShuttingDown(ServerError):
    """The server is stopping."""


class Degraded(ServerError):
    """The policy crashes; the server admits one request at a time to see whether it works again."""


class ProcessorFailed(ServerError):
    """The policy ran and failed."""


class ProcessorHung(ServerError):
    """The policy ran and did not return in time."""


class Internal(ServerError):
    """A fault of the server itself."""
