"""`--middleware reflex_runtime.vllm.Middleware`: headers, and `user`, become arguments that the scheduler reads.

A request that the scheduler refused is answered with an error in vLLM's form, with our status and code; vLLM itself
would answer an abort with 200.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflex_runtime.core.errors import ConfigError, Dropped, Expired, QueueFull, ReflexError, Shed
from reflex_runtime.settings.declare import did_you_mean

HEADERS: Final = {name: f"x-reflex-{name.replace('_', '-')}" for name in ("client", "deadline_ms", "max_gap_ms")}
_READ: Final = (*HEADERS.values(), "x-reflex-priority", "x-reflex-episode")  # balancers read the last
REFUSALS: Final[dict[str, ReflexError]] = {
    error.code: error
    for error in (
        QueueFull("too many seconds of work wait, and this client has more than its share of them"),
        Shed("its deadline can no longer be met"),
        Expired("its deadline passed before its first token"),
        ConfigError(f"{', '.join(HEADERS.values())} (or vllm_xargs): must be a text, a number >= 0, and one > 0"),
    )
}
DROPPED: Final = Dropped("the scheduler ended it before its first token: its deadline passed, or the queue is full")


class Middleware:
    """Rewrites POST requests with JSON under /v1/. If a field is in the body and in a header, the body's counts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/")
        headers = Headers(scope=scope) if ours else Headers()
        if not headers.get("content-type", "").startswith("application/json"):
            await self._app(scope, receive, send)
            return
        if stray := [name for name in headers if name.startswith("x-reflex-") and name not in _READ]:
            near = did_you_mean(stray[0][9:], [name[9:] for name in _READ], "x-reflex-")
            error = ConfigError(f"{stray[0]}: no such header{near}")
            await Response(_json(error), error.http_status, media_type="application/json")(scope, receive, send)
            return
        try:
            body = rewritten(await Request(scope, receive).body(), headers)
        except ClientDisconnect:
            return
        first = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(first, None) or await receive()

        others = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*others, (b"content-length", b"%d" % len(body))]}
        await self._app(scope, replay, _Answer(send))


class _Answer:
    """Sends an answer on, or in its place the error of a refused request: an answer in JSON is held back until its end.

    The events of a stream that ends without a token do not tell why; `DROPPED` is added.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._whole = self._ended = False  # the answer is held back; an event of the stream told how it ended
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._start, self._whole = message, message["status"] == 200 and kind.startswith("application/json")
            if not self._whole:
                await self._send(message)
            return
        body = message.get("body", b"")
        if not self._whole:
            self._ended = self._ended or b'"finish_reason":"' in body or b'"error"' in body
            if body.startswith(b"data: [DONE]") and not self._ended:
                body = b"data: " + _json(DROPPED) + b"\n\n" + body
            await self._send({**message, "body": body})
            return
        self._body += body
        if message.get("more_body", False):
            return
        error = refusal_in(self._body)
        if error is not None:
            self._body = _json(error)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._body))]
            if error.http_status == 503:
                headers.append((b"retry-after", b"1"))
            self._start = {**self._start, "status": error.http_status, "headers": headers}
        await self._send(self._start)
        await self._send({**message, "body": self._body})


def rewritten(body: bytes, headers: Mapping[str, str]) -> bytes:
    """The body with the arguments of the headers; unchanged if it is no JSON object: vLLM refuses that."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    own = fields.get("vllm_xargs") or {} if isinstance(fields, dict) else None
    if not isinstance(own, dict):
        return body
    given = {name: headers[header] for name, header in HEADERS.items() if header in headers}
    if isinstance(user := fields.get("user"), str) and user:
        given.setdefault("client", user)
    if given:
        fields["vllm_xargs"] = given | own
    if "x-reflex-priority" in headers:
        fields.setdefault("priority", headers["x-reflex-priority"])
    return json.dumps(fields).encode()


def refusal_in(body: bytes) -> ReflexError | None:
    """Why the scheduler ended the request with this answer; None if it did not."""
    if b'"abort"' not in body:
        return None
    try:
        choices = json.loads(body)["choices"]
        return next((REFUSALS.get(c["stop_reason"]) for c in choices if c["finish_reason"] == "abort"), None)
    except (ValueError, LookupError, TypeError):
        return None


def _json(error: ReflexError) -> bytes:
    fields: dict[str, Any] = {"message": error.message, "type": error.code, "param": None, "code": error.http_status}
    return json.dumps({"error": fields}).encode()
