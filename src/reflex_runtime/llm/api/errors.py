"""What is wrong with a request, by the name of its field, and errors as clients of the OpenAI API know them.

The other APIs take their statuses and words from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from reflex_runtime.core.errors import InFlightCapReached, QueueFull, ReflexError, TooLarge
from reflex_runtime.llm.server.lifecycle import ModelNotFound
from reflex_runtime.web.errors import JSON, ClientError, ErrorForm, HttpResponse, Unauthorized
from reflex_runtime.web.fields import encode, printable


class BadRequest(ClientError):
    """A field is wrong. param: its name, None for the request as a whole. told: the error code in the answer."""

    def __init__(self, message: str, param: str | None = None, told: str | None = None) -> None:
        super().__init__(printable(message))
        self.param, self.told = param, told

    def __reduce__(self) -> Any:
        return (BadRequest, (self.message, self.param, self.told))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A BadRequest from within names fields, and what is below them, as its caller wrote them. names: theirs, by the
    name that is raised."""
    try:
        yield
    except BadRequest as error:
        for raised, name in names.items():
            whole = error.param is not None and (error.param + ".").startswith((raised + ".", raised + "["))
            if error.param is not None and whole and error.message.startswith(raised):
                param, message = (name + text[len(raised) :] for text in (error.param, error.message))
                raise BadRequest(message, param, error.told) from None
        raise


def too_deep() -> BadRequest:
    """For a body that the decoder took, and that others cannot walk through."""
    return BadRequest("its values nest too deeply")


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
    return encode({"error": {"message": found.message, "type": found.type, "param": found.param, "code": found.code}})


def error_form(body: Callable[[ReflexError, str], bytes]) -> ErrorForm:
    """Errors with the bodies of an API, which are made of an error and the request's id; the headers say whether a
    retry is safe."""

    def refuse(error: ReflexError, request_id: str, packed: bool) -> HttpResponse:
        retry = (b"x-should-retry", b"true" if error.retry_safe else b"false")
        return HttpResponse(told(error).status, body(error, request_id), JSON, [retry])

    return refuse
