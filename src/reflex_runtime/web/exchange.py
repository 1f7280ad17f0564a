"""One HTTP request and its answer: whole, or in parts. The connection is a `Carrier`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.bodies import Bodies
from reflex_runtime.web.errors import BodyTooLarge, MethodNotAllowed, Unauthorized
from reflex_runtime.web.form import JSON, ErrorForm, Headers
from reflex_runtime.web.websocket import MakeSession

OPERATOR_BODY: Final = 64 * 1024  # bytes, for routes that change state
BODIES: Final = ("POST", "PATCH")  # methods whose body is read
CLOSE: Final = (b"connection", b"close")  # always the last header


class Carrier(Protocol):
    """The connection of a request. Data after the caller has left is dropped."""

    @property
    def writable(self) -> bool:
        """Whether the caller takes what is written."""

    def reply(self, exchange: Exchange, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""

    def begin(self, exchange: Exchange, status: int, headers: Headers) -> None:
        """Send the head of an answer whose body comes in parts."""

    def write(self, exchange: Exchange, data: bytes) -> None:
        """Send a part of the body."""

    def end(self, exchange: Exchange) -> None:
        """The body is complete."""

    async def drained(self) -> None:
        """Return once the caller takes more, or has left."""

    def abort(self) -> None:
        """Close without sending what waits."""


@dataclass(frozen=True, slots=True)
class Route:
    """What answers the requests for one path. Everything is called on the event loop.

    path: as metrics tell it. method: GET (HEAD too), POST, PATCH or DELETE. run: called with the exchange and its whole
    body, empty for GET and DELETE; answers now or later. others: routes of the same path for other methods. open: needs
    no key. changes: changes state, so that without a key only programs on this machine may ask it. most: bytes that a
    body may have. enter: called when the head is there; raises what stands against the request, or answers it. fail:
    called with an error in place of `Exchange.fail`. form: of its errors, where it is not the application's. socket:
    makes the session of each websocket on the path, where `most` bounds a message; see `web/websocket.py`. own_pages:
    without a key, pages of other sites may not even GET it. checked: this process checks who may ask; otherwise another
    does, which answers.
    """

    path: str
    run: Callable[[Exchange, bytes], None]
    method: str = "GET"
    open: bool = False
    changes: bool = False
    most: int = OPERATOR_BODY
    enter: Callable[[Exchange], None] | None = None
    fail: Callable[[Exchange, ReflexError], None] | None = None
    socket: MakeSession | None = None
    form: ErrorForm | None = None
    own_pages: bool = False
    checked: bool = True
    others: tuple[Route, ...] = ()

    def of(self, method: str) -> Route:
        """The route for a method; this one if there is none."""
        asked = "GET" if method == "HEAD" else method
        return next((route for route in self.others if route.method == asked), self)

    @property
    def methods(self) -> str:
        return ", ".join(route.method for route in (self, *self.others))


class Application(Protocol):
    """The application, as an exchange uses it; see `App`."""

    form: ErrorForm
    bodies: Bodies
    closing: bool
    marks: Headers

    def fail(self, exchange: Exchange, error: Exception) -> None: ...
    def spawn(self, exchange: Exchange, answering: Coroutine[Any, Any, None]) -> None: ...
    def entered(self, exchange: Exchange) -> None: ...
    def answers(self, exchange: Exchange, status: int) -> None: ...
    def leave(self, exchange: Exchange) -> None: ...


class Exchange:
    """One request and its answer.

    method, path: as asked, the path decoded; target: the path as it came. headers: names in lower case. client:
    (address, port), None if unknown.
    started: when it reached this machine; received: when all of it had been read, 0.0 before (`time.monotonic`).
    number: our own id of the request. request_id: goes out as X-Request-Id. route: what answers it; None before that is
    known. ask: what the product keeps with it. left: the caller has gone; on_left is called when that happens. begun:
    the head of a streamed answer was sent. done: it is answered. held: bytes of its body that `Bodies` counts. moved:
    another server answered what it continues. cross: headers for the page of another site that asked.

    The rest is for the connection. opened: its turn has come. wanted: its body must be read or handed over. whole: it
    is complete. broken: why it never will be. upgrades: it asks for a websocket, and may have it now.
    """

    __slots__ = (
        "_on_error",
        "app",
        "ask",
        "begun",
        "body",
        "broken",
        "carrier",
        "client",
        "cross",
        "done",
        "expects",
        "headers",
        "held",
        "keep_alive",
        "left",
        "method",
        "moved",
        "number",
        "on_left",
        "opened",
        "path",
        "received",
        "request_id",
        "route",
        "size",
        "started",
        "streams",
        "target",
        "task",
        "upgrades",
        "wanted",
        "whole",
    )

    def __init__(
        self,
        app: Application,
        carrier: Carrier,
        method: str,
        path: str,
        headers: Mapping[bytes, bytes],
        client: tuple[str, int] | None = None,
        started: float = 0.0,
        keep_alive: bool = True,
        streams: bool = True,
    ) -> None:
        """streams: whether the caller can read a body in chunks; otherwise a streamed one ends with its connection."""
        self.app, self.carrier = app, carrier
        self.method, self.path, self.headers, self.client = method, path, headers, client
        self.target = b""
        self.started = started or time.monotonic()
        self.received = 0.0
        self.number = self.request_id = ""
        self.route: Route | None = None
        self.on_left: Callable[[], None] | None = None
        self.ask: Any = None
        self._on_error: Callable[[ReflexError], bytes] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.cross: Headers = []
        self.held = self.size = 0
        self.body: list[bytes] = []
        self.expects = b"expect" in headers
        self.keep_alive, self.streams = keep_alive, streams
        self.broken: ReflexError | None = None
        self.moved = self.left = self.begun = self.done = self.opened = self.wanted = self.whole = self.upgrades = False

    # -- answering -----------------------------------------------------------------------------------------------------

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, extra: Headers | None = None) -> None:
        headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", header_text(self.request_id)),
        ]
        headers += self.app.marks
        headers += self.cross
        if extra:
            headers += extra
        if self._closes:
            headers.append(CLOSE)
        self.app.answers(self, status)
        self.carrier.reply(self, status, headers, body)
        self.app.leave(self)

    def begin(self, status: int, headers: Headers, on_error: Callable[[ReflexError], bytes]) -> None:
        """Send the head of an answer that comes in parts. on_error: makes the last part of an answer that fails."""
        self.begun, self._on_error = True, on_error
        headers = [*headers, (b"x-request-id", header_text(self.request_id)), *self.app.marks, *self.cross]
        if self._closes:
            headers.append(CLOSE)
        self.app.bodies.release(self)
        self.app.answers(self, status)
        self.carrier.begin(self, status, headers)

    def write(self, data: bytes) -> None:
        """Send a part of the body, even if the caller does not read: see `writable` and `drained`."""
        self.carrier.write(self, data)

    def end(self) -> None:
        self.carrier.end(self)
        self.app.leave(self)

    @property
    def writable(self) -> bool:
        """Whether the caller takes what is written."""
        return not self.left and self.carrier.writable

    async def drained(self) -> None:
        """Return once the caller takes more, or has left."""
        await self.carrier.drained()

    def fail(self, error: ReflexError, extra: Headers | None = None) -> None:
        """Answer with an error, in the application's form; as the last part of a streamed answer that has begun."""
        if self._on_error is not None:
            self.write(self._on_error(error))
            self.end()
            return
        form = (self.route.form if self.route is not None else None) or self.app.form
        told = form.refuse(error, self.request_id, self.wants_msgpack)
        headers: Headers = [*(extra or ()), *told.headers, *retry_headers(error)]
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", str(error.details["allow"]).encode()))
        self.answer(told.status, told.body, told.content_type, headers)

    def leave(self) -> None:
        if self.left or self.done:
            return
        self.left = True
        if self.on_left is not None:
            self.on_left()

    # -- what was asked ------------------------------------------------------------------------------------------------

    @property
    def sent_msgpack(self) -> bool:
        """Whether the body is msgpack; anything else is read as JSON."""
        kind = self.headers.get(b"content-type")
        return kind is not None and kind != JSON and b"msgpack" in kind.lower()

    @property
    def wants_msgpack(self) -> bool:
        """Whether the answer is to be msgpack: as accepted, else as it was asked."""
        accepted = self.headers.get(b"accept", b"*/*").lower()
        return self.sent_msgpack if accepted in (b"*/*", b"") else b"msgpack" in accepted

    @property
    def _closes(self) -> bool:
        """Whether the connection closes after the answer. A caller that waits for "100 Continue" may or may not send
        its body after an early answer, so it needs a new connection."""
        return self.app.closing or (self.expects and not self.received)


def retry_headers(error: ReflexError) -> Headers:
    """The Retry-After header, if the error has one."""
    return [] if error.retry_after is None else [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))]


def too_large(headers: Mapping[bytes, bytes], most: int) -> None:
    """Raise when the body is announced with more than `most` bytes."""
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > most:
        raise BodyTooLarge(f"the body has {int(declared)} bytes, at most {most} are read", max_body_bytes=most)


def header_text(text: str) -> bytes:
    """Text as a header value: plain ASCII as it is, anything else percent-encoded."""
    if text.isascii() and text.isprintable() and text == text.strip():
        return text.encode()
    return quote(text, safe="").encode()
