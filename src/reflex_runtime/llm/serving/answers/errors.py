"""Errors as clients of the OpenAI API know them; the other APIs take their statuses and words from here."""

from __future__ import annotations

from typing import NamedTuple

from reflex_runtime.core.errors import InFlightCapReached, QueueFull, ReflexError, TooLarge
from reflex_runtime.llm.serving.requests.refusals import BadRequest, ModelNotFound
from reflex_runtime.web.errors import Unauthorized, api_error
from reflex_runtime.web.json import encode


class Told(NamedTuple):
    """An error as it goes on the wire."""

    status: int
    type: str
    code: str
    message: str
    param: str | None


def told(error: ReflexError) -> Told:
    """An error in the API's words: its classes of status and type, and its codes where it has its own."""
    status, code, message = error.http_status, error.code, error.message
    param = error.param if isinstance(error, BadRequest) else None
    if isinstance(error, BadRequest):
        code = error.told or code
    elif isinstance(error, (QueueFull, InFlightCapReached)):
        status = 429  # the API's clients wait and retry
    elif isinstance(error, TooLarge):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, ModelNotFound):
        code, param = "model_not_found", "model"
    elif isinstance(error, Unauthorized):
        code = "invalid_api_key"
    if isinstance(error, QueueFull):
        message = _queue_full(error)
    kind = (
        "server_error"
        if status >= 500
        else {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    )
    return Told(status, kind, code, message, param)


def _queue_full(error: QueueFull) -> str:
    details = error.details
    if "max_queued_units" in details:
        waiting, most = details.get("queued_units", 0), details["max_queued_units"]
        return f"{waiting:.0f} tokens wait already, at most {most:.0f} may"
    return f"the queue is full: {details.get('max_queue')} requests wait already"


def error_body(error: ReflexError) -> bytes:
    """The body of an answer that is no success."""
    found = told(error)
    return encode(api_error(found.message, found.type, found.code, found.param))
