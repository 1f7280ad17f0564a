"""`--middleware reflex_runtime.vllm.Middleware`: headers, and `user`, become arguments that the scheduler reads.

What the scheduler refused becomes an error of vLLM's form with our status and code; vLLM answers an abort with 200.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError, Dropped, Expired, QueueFull, ReflexError, Shed

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HEADERS: Final = {
    "client": b"x-reflex-client",
    "deadline_ms": b"x-reflex-deadline-ms",
    "max_gap_ms": b"x-reflex-max-gap-ms",
}
REFUSALS: Final[dict[str, ReflexError]] = {
    error.code: error
    for error in (
        QueueFull("too many seconds of work wait, and this client has more than its share of them"),
        Shed("its deadline can no longer be met"),
        Expired("its deadline passed before its first token"),
        ConfigError("vllm_xargs: client must be a text, deadline_ms a number >= 0, max_gap_ms one > 0"),
    )
}


DROPPED: Final = Dropped("the scheduler ended it before its first token: its deadline, or a full queue")


class Middleware:
    """For POST requests under /v1/ with JSON. What the body says itself stays before what headers say."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        ours = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/")
        if not ours or not headers.get(b"content-type", b"").startswith(b"application/json"):
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        body = rewritten(body, headers)
        others = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        first = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(first, None) or await receive()

        scope = {**scope, "headers": [*others, (b"content-length", b"%d" % len(body))]}
        await self._app(scope, replay, _Answer(send))


class _Answer:
    """Sends an answer on; one that the scheduler refused becomes an error, for which a whole one is held back.

    vLLM writes no event of a stream that ends without a token, so there the code is not known.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._whole = self._ended = False  # held back; an event of a stream said how it ended
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._start, self._whole = message, message["status"] == 200 and kind.startswith(b"application/json")
            if not self._whole:
                await self._send(message)
            return
        body = message.get("body", b"")
        if not self._whole:
            self._ended = self._ended or b'"finish_reason":"' in body or b'"error"' in body
            if body.startswith(b"data: [DONE]") and not self._ended:
                body = b"data: " + _told(DROPPED) + b"\n\n" + body
            await self._send({**message, "body": body})
            return
        self._body += body
        if message.get("more_body", False):
            return
        error = refusal_in(self._body)
        if error is not None:
            self._body = _told(error)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._body))]
            if error.http_status == 503:
                headers.append((b"retry-after", b"1"))
            self._start = {**self._start, "status": error.http_status, "headers": headers}
        await self._send(self._start)
        await self._send({**message, "body": self._body})


def rewritten(body: bytes, headers: dict[bytes, bytes]) -> bytes:
    """The body with what the headers say; as it is where it is no JSON object, for vLLM to refuse."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return body
    own = asked.get("vllm_xargs") or {} if isinstance(asked, dict) else None
    if not isinstance(own, dict):
        return body
    told = {name: headers[header].decode("latin-1") for name, header in HEADERS.items() if header in headers}
    if isinstance(user := asked.get("user"), str) and user:
        told.setdefault("client", user)
    if told:
        asked["vllm_xargs"] = told | own
    if b"x-reflex-priority" in headers:
        asked.setdefault("priority", headers[b"x-reflex-priority"].decode("latin-1"))
    return json.dumps(asked).encode()


def refusal_in(body: bytes) -> ReflexError | None:
    """Why the scheduler ended the request of this answer."""
    if b'"abort"' not in body:
        return None
    try:
        choices = json.loads(body)["choices"]
        return next((REFUSALS.get(c["stop_reason"]) for c in choices if c["finish_reason"] == "abort"), None)
    except (ValueError, LookupError, TypeError):
        return None


def _told(error: ReflexError) -> bytes:
    told = {"message": error.message, "type": error.code, "param": None, "code": error.http_status}
    return json.dumps({"error": told}).encode()
