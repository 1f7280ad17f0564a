"""Errors of servers, in addition to those of `core.errors`, and the form in which all are sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ReflexError, Rejected

log = logging.getLogger("reflex.server")


class ClientError(ReflexError):
    """The request is wrong; to repeat it does not help. headers: of the answer."""

    code, http_status, outcome = "invalid_request", 400, "client_error"
    headers: Sequence[tuple[bytes, bytes]] = ()


class InvalidRequest(Rejected):
    """A field of a request is wrong; `details["field"]` names it. To repeat it does not help."""

    code, http_status, retry_safe, outcome = "invalid_request", 422, False, "client_error"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field=field)

    def __reduce__(self) -> Any:
        return (InvalidRequest, (self.message, self.details["field"]))


class CallerLeft(ClientError):
    """The caller disconnected, or closed its sending side, before its request was queued."""

    code, http_status, retry_safe, outcome = "cancelled", 499, True, "cancelled"


class InvalidJson(ClientError):
    """The body is not JSON."""

    code, http_status = "invalid_json", 400


class BodyTooLarge(ClientError):
    """The body exceeds --max-body-bytes."""

    code, http_status = "too_large", 413


class UnsupportedEncoding(ClientError):
    """The body is compressed."""

    code, http_status = "unsupported_encoding", 415
    headers = ((b"accept-encoding", b"identity"),)


class UnsupportedMediaType(ClientError):
    """The path does not read bodies of this Content-Type."""

    code, http_status = "unsupported_media_type", 415


class TooSlow(ClientError):
    """The request did not come in time."""

    code, http_status, retry_safe = "request_timeout", 408, True
    headers = ((b"connection", b"close"),)


class Unauthorized(ClientError):
    """The key is missing or wrong."""

    code, http_status = "unauthorized", 401
    headers = ((b"www-authenticate", b"Bearer"),)


class Forbidden(ClientError):
    """The server has no key, and the request has a foreign host name or is from a page of another site."""

    code, http_status = "forbidden", 403


class NotFound(ClientError):
    """No such path."""

    code, http_status = "not_found", 404


class Conflict(ClientError):
    """The request does not fit the server's state."""

    code, http_status = "invalid_request", 409


class MethodNotAllowed(ClientError):
    """The path exists, the method does not."""

    code, http_status = "method_not_allowed", 405

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message, allow=allow)
        self.headers = ((b"allow", allow.encode()),)


class Unavailable(ReflexError):
    """The server accepts no request now."""

    code, http_status, retry_safe, outcome = "not_ready", 503, True, "rejected"


class NotReady(Unavailable):
    """The model is not loaded yet, or loading failed."""


class TooManyRequests(Unavailable):
    """--max-concurrent is reached."""

    code, http_status = "too_many_requests", 429


class Overloaded(Unavailable):
    """The server has as many connections, or bytes of request bodies, as it may."""

    code = "overloaded"


class Degraded(Unavailable):
    """Too many crashed batches in a row."""

    code = "degraded"


class SloViolated(Unavailable):
    """The latency objective is violated and --slo-mode is 503."""

    code = "slo_violated"


class Reported(Exception):
    """An error that has been counted. error: for the caller. request_id: of the failed request."""

    def __init__(self, error: ReflexError, request_id: str) -> None:
        super().__init__(error.message)
        self.error, self.request_id = error, request_id


def known(error: Exception, request_id: str) -> ReflexError:
    """The error for callers: an unexpected exception is logged, and becomes a 500 without its text."""
    if isinstance(error, ReflexError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return ReflexError("internal error; the server's log has the details")


def describe_error(error: ReflexError, request_id: str) -> dict[str, Any]:
    """The body of a non-2xx answer."""
    body: dict[str, Any] = {"error": error.code, "message": error.message, "request_id": request_id}
    return body | {"retry_safe": error.retry_safe} | dict(error.details)


# -- the form ----------------------------------------------------------------------------------------------------------

Headers = list[tuple[bytes, bytes]]

JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"


@dataclass(slots=True)
class HttpResponse:
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)


ErrorForm = Callable[[ReflexError, str, bool], HttpResponse]
"""Makes the answer of the error, the request's id, and whether the caller accepts msgpack."""


def _plain(error: ReflexError, request_id: str, packed: bool) -> HttpResponse:
    """`error`, `message`, `request_id`, `retry_safe` and the error's details, in JSON or msgpack."""
    body = describe_error(error, request_id)
    if packed:
        return HttpResponse(error.http_status, msgspec.msgpack.encode(body), MSGPACK)
    return HttpResponse(error.http_status, msgspec.json.encode(body))


PLAIN: Final = _plain
