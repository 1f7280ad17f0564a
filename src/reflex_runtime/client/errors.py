"""The errors of a call, by what a program can do about them: no answer, an unusable answer, an error of the server.

The codes are those of `docs/errors.md`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


class ClientError(Exception):
    """Base of all errors of a call. retry_safe: the policy cannot run the request twice if it is sent again."""

    code = "client_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        retry_safe: bool = False,
        request_id: str | None = None,
        retry_after: float | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.status, self.request_id, self.retry_after = status, request_id, retry_after
        self.retry_safe = retry_safe
        self.body: Mapping[str, Any] = body or {}

    def __str__(self) -> str:
        code = f"{self.code} ({self.status})" if self.status else self.code
        return f"{code}: {self.message}" + (f" [request {self.request_id}]" if self.request_id else "")


class Unreachable(ClientError):
    """No answer. retry_safe: the request cannot have arrived."""

    code = "unreachable"


class TimedOut(Unreachable):
    """No answer in time; the request may still run."""

    code = "timed_out"


class BadAnswer(ClientError):
    """The answer is not that of a policy server, or its actions are not safe to execute."""

    code = "bad_answer"


class ServerError(ClientError):
    """An answer that is not 2xx; `code` names it."""


class BadRequest(ServerError):
    """The request or its key is wrong; `body["field"]` may name the field. A further attempt does not help."""


class NotFound(BadRequest):
    """The server has no such path: it is of another kind or version."""

    code = "not_found"


class StaleRequest(ServerError):
    """The request came too late, or a newer one of the same robot replaced it: send a newer observation."""


class ServerBusy(ServerError):
    """The request did not run: the server is full, not ready, or stopping. retry_after: seconds until the next try."""


class ProcessorFailed(ServerError):
    """The policy or function ran, and failed or hung."""


_KINDS: Final = {
    "not_found": NotFound,
    **dict.fromkeys(("superseded", "deadline_unreachable", "deadline_exceeded", "cancelled"), StaleRequest),
    **dict.fromkeys(("queue_full", "client_at_capacity", "too_many_requests", "overloaded"), ServerBusy),
    **dict.fromkeys(("slo_violated", "not_ready", "shutting_down", "degraded"), ServerBusy),
    "request_timeout": ServerBusy,
    **dict.fromkeys(("processor_failed", "processor_hung"), ProcessorFailed),
}


_TEMPORARY: Final = {"http_408", "http_425", "http_429"}


def class_of(code: str, status: int) -> type[ServerError]:
    """The class of an error of the server. For a proxy's 408, 425 and 429 the request itself is not wrong."""
    wrong = 400 <= status < 500 and code not in _TEMPORARY
    return _KINDS.get(code, BadRequest if wrong else ServerError)
