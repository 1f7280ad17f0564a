"""One HTTP request or websocket over ASGI, for the coroutine that answers it; and the memory of all bodies.

A handler is one coroutine: it reads the body, awaits the computation, and returns a response or sends it in parts. When
the caller leaves, the coroutine is cancelled where it waits.

The bytes of a body count until its request is answered, so that half bodies and queued pictures cannot fill the memory.
Large bodies are decoded on one thread: a decoder holds the interpreter's lock, and two would block the loop longer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, quote

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.errors import (
    JSON,
    BodyTooLarge,
    CallerLeft,
    ErrorForm,
    Headers,
    Overloaded,
    UnsupportedEncoding,
)
from reflex_runtime.web.errors import HttpResponse as HttpResponse
from reflex_runtime.web.fields import invalid, invalid_input

log = logging.getLogger("reflex.server")

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CANCELS: Final = "reflex.cancels"  # extension: the server cancels the coroutine of a caller that left
RESPOND: Final = "reflex.respond"  # extension: sends a whole answer, `HttpConnection._respond`
CLOSE: Final = (b"connection", b"close")
DENIAL: Final = "websocket.http.response"
GOING_AWAY, UNSUPPORTED, POLICY, INTERNAL, TRY_LATER = 1001, 1003, 1008, 1011, 1013

OPERATOR_BODY: Final = 64 * 1024  # bytes, for routes that change state
LARGE: Final = 1024 * 1024  # bytes; larger bodies are decoded on a thread: msgspec reads a megabyte in 1 ms
STALLED: Final = 1.0  # seconds without a byte after which a request may be ended to free the memory of its body

Handler = Callable[["HttpRequest"], Awaitable["HttpResponse | None"]]
Session = Callable[["WebSocket"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of one path.

    path: as metrics show it. run: returns the answer, or None after it has sent one. method: GET (HEAD too) or POST.
    open: needs no key. operators: needs the operators' key, if the server has one. changes: changes state, so that
    without a key only programs on this machine may call it. most: bytes of a body. socket: serves each websocket on the
    path; a websocket always needs the key. form: of errors, if it differs from the application's. own_pages: without a
    key, pages of other sites may not even GET it. refused: called with the error of a request refused before `run`.
    headers: names of the headers X-Reflex-… that only it reads.
    """

    path: str
    run: Handler
    method: str = "GET"
    open: bool = False
    operators: bool = False
    changes: bool = False
    most: int = OPERATOR_BODY
    socket: Session | None = None
    form: ErrorForm | None = None
    own_pages: bool = False
    refused: Callable[[HttpRequest, ReflexError], None] | None = None
    headers: Collection[bytes] = ()


def named_in(routes: Iterable[Route]) -> Callable[[str], Route | None]:
    """A function that finds the route of a path, among those with names in braces. Only {version} matches no slash."""
    named = [route for route in routes if "{" in route.path]
    named.sort(key=lambda route: (route.path.endswith("}"), -len(route.path)))  # "/x/{id}/infer" before "/x/{id}"
    texts = [route.path.replace("{version}", "[^/]+") for route in named]
    patterns = [re.compile(re.sub(r"{\w+}", ".+", text), re.DOTALL) for text in texts]
    found = list(zip(patterns, named, strict=True))
    return lambda path: next((route for pattern, route in found if pattern.fullmatch(path)), None)


class Application(Protocol):
    """The part of `App` that a request uses."""

    bodies: Bodies
    closing: bool

    def refuse(self, request: HttpRequest, failure: Exception, extra: Headers | None = None) -> HttpResponse: ...
    def enter(self) -> str: ...
    def leave(self) -> None: ...
    def answers(self, request: HttpRequest, status: int) -> None: ...
    def may_change(self, request: HttpRequest) -> bool: ...
    def check_open(self) -> None: ...


class HttpRequest:
    """One HTTP request.

    headers: names in lower case; of a name sent twice, the last. client: (address, port).
    number: the server's own id of the request; request_id: sent back as X-Request-Id. Times are of `time.monotonic`:
    started: its head was complete; received: its body was complete, 0.0 until then; heard: its last byte arrived.
    preparing: received and not queued yet. route: None until it is known. begun: the head of the answer was sent;
    ended: all of it. held: bytes of its body that `Bodies` counts. cross: headers that allow a page of another site.
    """

    __slots__ = (
        "_error_tail", "_receive", "_send", "_watch", "app", "begun", "client", "cross", "ended", "headers",
        "heard", "held", "method", "number", "path", "preparing", "query_string", "received", "request_id",
        "route", "scope", "started", "task",
    )  # fmt: skip
    left_ms: float | None = None  # milliseconds that the caller waits; HTTP has no header for it

    def __init__(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        self.app, self.scope, self._receive, self._send = app, scope, receive, send
        self.method: str = scope.get("method", "GET")
        self.path: str = scope["path"]
        self.query_string: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.client: tuple[str, int] | None = scope.get("client")
        self.started = self.heard = time.monotonic()
        self.received = 0.0
        self.number = self.request_id = ""
        self.route: Route | None = None
        self.cross: Headers = []
        self.held = 0
        self.begun = self.ended = self.preparing = False
        self.task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._error_tail: Callable[[ReflexError], bytes] | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """The whole body. Raises the 413 beyond the bound of the route, the 503 beyond the bytes of all bodies."""
        assert self.route is not None
        most = self.route.most
        check_body(self.headers, most)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerLeft("the caller left before it had sent its request")
            part = message.get("body", b"")
            if part:
                size += len(part)
                if size > most:
                    raise BodyTooLarge(f"the body has over {most} bytes", max_body_bytes=most)
                self.app.bodies.take(self, len(part))
                parts.append(part)
                self.heard = time.monotonic()
            if not message.get("more_body"):
                break
        self.received = time.monotonic()
        self.watch()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch(self) -> None:
        """Cancel the coroutine from now on when the caller leaves, unless the server does so (extension CANCELS)."""
        if self._watch is None and CANCELS not in (self.scope.get("extensions") or ()):
            self._watch = asyncio.get_running_loop().create_task(self._leaving())

    async def _leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.task is not None and not self.ended:
            self.task.cancel(CallerLeft("the caller left"))

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query string. Raises the 422 if it cannot be read, or has a name twice."""
        if not self.query_string:
            return {}
        with suppress(ValueError):
            pairs = parse_qsl(self.query_string.decode("ascii"), keep_blank_values=True, max_num_fields=64)
            names = [name for name, _ in pairs]
            if twice := [name for name in names if names.count(name) > 1]:
                raise invalid_input(twice[0], "is in the query twice")
            if pairs:
                return dict(pairs)
        raise invalid("query", "query: must be NAME=VALUE, joined by &, in ASCII and at most 64 of them")

    def refuse_query(self) -> None:
        """Raise the 422 if the request has a query; for paths that read none."""
        if self.query_string:
            raise invalid("query", "query: no field is read from it; put fields into the body")

    @property
    def sent_msgpack(self) -> bool:
        """Whether the body is msgpack; any other type is read as JSON."""
        kind = self.headers.get(b"content-type")
        return kind is not None and kind != JSON and b"msgpack" in kind.lower()

    @property
    def wants_msgpack(self) -> bool:
        """Whether to answer in msgpack: Accept names it, or, if that is absent or */*, the body is msgpack."""
        accepted = self.headers.get(b"accept", b"*/*").lower()
        return self.sent_msgpack if accepted in (b"*/*", b"") else b"msgpack" in accepted

    # -- answering -----------------------------------------------------------------------------------------------------

    async def answer(self, response: HttpResponse) -> None:
        """Send a whole answer. `App` calls it with what a handler returns."""
        kind, size = (b"content-type", response.content_type), (b"content-length", b"%d" % len(response.body))
        headers = self._head(response.status, [kind, size, *response.headers])
        self.ended = True
        respond = (self.scope.get("extensions") or {}).get(RESPOND)
        if respond is None or self.method == "HEAD" or not respond(response.status, headers, response.body):
            await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": response.body})

    async def begin(
        self, status: int, headers: Headers, error_tail: Callable[[ReflexError], bytes] | None = None
    ) -> None:
        """Send the head of an answer in parts. error_tail: makes the last part if the handler fails."""
        self._error_tail = error_tail
        self.watch()
        self.app.bodies.release(self)
        headers = self._head(status, headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a part. Waits while the caller does not read."""
        if self.method != "HEAD":
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else data})

    async def fail(self, error: ReflexError) -> None:
        """Send the last part of an answer that fails after its head."""
        if not self.ended:
            await self.end(b"" if self._error_tail is None else self._error_tail(error))

    def abort(self) -> None:
        """Send no more: the server closes the connection when the coroutine returns."""
        self.ended = True

    def left(self) -> None:
        """The coroutine has ended."""
        if self._watch is not None:
            self._watch.cancel()

    def _head(self, status: int, headers: Headers) -> Headers:
        """All headers of the answer, which is sent now."""
        self.begun = True
        headers = [*headers, (b"x-request-id", header_text(self.request_id)), *self.cross]
        if self.app.closing or (b"expect" in self.headers and not self.received):
            # A caller that waits for "100 Continue" may or may not send its body after an early answer.
            headers.append(CLOSE)
        self.app.answers(self, status)
        return headers


class SocketMessage:
    """One message of a websocket. id: made by the server, unique. received: when it was taken (`time.monotonic`)."""

    __slots__ = ("data", "held", "id", "received", "started")

    def __init__(self, data: str | bytes, id: str) -> None:
        self.data, self.id, self.held = data, id, 0
        self.started = self.received = time.monotonic()


class WebSocket(HttpRequest):
    """One websocket: `async for message in socket`; each message is answered before the next one is taken, and counts
    as a request until then. When the peer leaves, the coroutine is cancelled."""

    __slots__ = ("_inbox", "_message", "accepted", "open")

    def __init__(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(app, scope, receive, send)
        self.open = self.accepted = False
        self._message: SocketMessage | None = None
        self._inbox: asyncio.Queue[Message] | None = None

    @property
    def id(self) -> str:
        return self.number

    @property
    def may_change(self) -> bool:
        """Whether the peer may change state."""
        return self.app.may_change(self)

    async def accept(self) -> None:
        """Open the websocket. From now on its messages count as requests, and the websocket itself does not."""
        self.open = self.accepted = True
        self.app.leave()
        await self._send({"type": "websocket.accept", "headers": []})
        if CANCELS not in (self.scope.get("extensions") or ()):
            self._inbox = asyncio.Queue(maxsize=1)
            self._watch = asyncio.get_running_loop().create_task(self._reading(self._inbox))

    async def _reading(self, inbox: asyncio.Queue[Message]) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            await inbox.put(message)
        self.open = False
        if self.task is not None:
            self.task.cancel(CallerLeft("the caller left"))

    def __aiter__(self) -> WebSocket:
        return self

    async def __anext__(self) -> SocketMessage:
        if self._message is not None and self.app.closing:
            await self.close(GOING_AWAY, "the server is shutting down")
        self.done()
        if not self.open:
            raise StopAsyncIteration
        message = await (self._receive() if self._inbox is None else self._inbox.get())
        if message["type"] != "websocket.receive":
            self.open = False
            raise StopAsyncIteration
        text, data = message.get("text"), message.get("bytes")
        self._message = SocketMessage(text if text is not None else data or b"", self.app.enter())
        self.app.bodies.take(self._message, len(self._message.data))
        return self._message

    async def send(self, data: str | bytes) -> None:
        """Send one frame, text or binary. Waits while the peer does not read."""
        if self.open:
            kind = "text" if isinstance(data, str) else "bytes"
            try:
                await self._send({"type": "websocket.send", kind: data})
            except OSError:  # the ASGI server has noticed that the peer left
                self.open = False
                raise CallerLeft("the caller left") from None

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self.open:
            self.open = False
            with suppress(OSError):
                await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def deny(self, response: HttpResponse) -> None:
        """Answer the handshake with an error; a server without the extension DENIAL closes the socket instead."""
        if DENIAL not in (self.scope.get("extensions") or ()):
            await self._send({"type": "websocket.close", "code": POLICY})
            return
        headers = [(b"content-type", response.content_type), (b"x-request-id", header_text(self.request_id))]
        headers += [(b"content-length", b"%d" % len(response.body)), *response.headers]
        self.app.answers(self, response.status)
        await self._send({"type": f"{DENIAL}.start", "status": response.status, "headers": headers})
        await self._send({"type": f"{DENIAL}.body", "body": response.body})

    def done(self) -> None:
        """Release the last message: it was answered."""
        message, self._message = self._message, None
        if message is not None:
            message.data = b""
            self.app.bodies.release(message)
            self.app.leave()

    async def connecting(self) -> None:
        """Take the first message, `websocket.connect`."""
        await self._receive()


def retry_headers(error: ReflexError) -> Headers:
    """The Retry-After header, if the error has one."""
    return [] if error.retry_after is None else [(b"retry-after", b"%d" % max(1, ceil(error.retry_after)))]


def check_body(headers: dict[bytes, bytes], most: int) -> None:
    """Raise for headers of a compressed body, or of one over `most` bytes."""
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        name = encoding[:100].decode("ascii", "backslashreplace")
        raise UnsupportedEncoding(f"Content-Encoding: {name}: compressed bodies are not read")
    declared = headers.get(b"content-length", b"0").lstrip(b"0")
    if declared.isdigit() and len(declared) < 20 and int(declared) > most:  # parsers refuse longer ones
        raise BodyTooLarge(f"the body has {int(declared)} bytes, at most {most} are read", max_body_bytes=most)


def own_id(sent: bytes) -> str | None:
    """A caller's X-Request-Id if it is printable ASCII of up to 256 characters, else None."""
    if not (0 < len(sent) <= 256 and sent.isascii()):
        return None
    text = sent.decode()
    return text if text.isprintable() and text == text.strip() else None


def header_text(text: str) -> bytes:
    """Text as a header value: plain ASCII as it is, other text percent-encoded."""
    if text.isascii() and text.isprintable() and text == text.strip():
        return text.encode()
    return quote(text, safe="").encode()


# -- bodies ------------------------------------------------------------------------------------------------------------


class Seldom:
    """Limits repeated log lines: `first` is True unless it was called within the last minute."""

    QUIET = 60.0

    def __init__(self) -> None:
        self._last = -inf

    def first(self) -> bool:
        now = time.monotonic()
        before, self._last = self._last, now
        return now - before > self.QUIET


class Reading:
    """A semaphore for messages of unknown size: at most `most` are read at a time. While others wait, each one that is
    read has STALLED seconds left."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._running: set[asyncio.Timeout] = set()
        self._waiting = 0

    @asynccontextmanager
    async def one(self, until: float) -> AsyncIterator[None]:
        """A block in which one message is read. TimeoutError at `until`, by the loop's clock."""
        async with asyncio.timeout_at(until) as limit:
            self._waiting += 1
            if self._free.locked():
                self._hurry(self._running)
            try:
                await self._free.acquire()
            finally:
                self._waiting -= 1
            self._running.add(limit)
            if self._waiting:
                self._hurry([limit])
            try:
                yield
            finally:
                self._running.discard(limit)
                self._free.release()

    def _hurry(self, limits: Iterable[asyncio.Timeout]) -> None:
        soon = asyncio.get_running_loop().time() + STALLED
        for limit in limits:
            if not limit.expired():
                limit.reschedule(min(limit.when() or inf, soon))


class Holder(Protocol):
    """A request. held: bytes of its body that are counted."""

    held: int


class Bodies:
    """Counts the bytes of all bodies in one server. held: bytes now. most: bytes at most, but a single request may have
    more. cut_stalled: called with the time when there are too many; ends a request whose body stalls."""

    def __init__(self, most: int, cut_stalled: Callable[[float], None]) -> None:
        self.most, self.held = most, 0
        self._cut_stalled = cut_stalled
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reflex-decode")
        self._full = Seldom()

    def take(self, owner: Holder, size: int) -> None:
        """Count more bytes. Raises Overloaded when there are too many."""
        if self.held + size > self.most and self.held > owner.held:
            self._cut_stalled(time.monotonic())
        if self.held + size > self.most and self.held > owner.held:
            if self._full.first():
                log.warning("%d bytes of request bodies are held: more are refused (--max-bodies-mb)", self.held)
            raise Overloaded(
                f"{self.held} bytes of request bodies are held, at most {self.most} may be", retry_after=1.0
            )
        self.held += size
        owner.held += size

    def release(self, owner: Holder) -> None:
        """Stop counting the body."""
        self.held -= owner.held
        owner.held = 0

    def beside(self, decode: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of `decode`, computed on the decoding thread."""
        return asyncio.get_running_loop().run_in_executor(self._decoder, _bare, decode, *arguments)

    def close(self) -> None:
        """Drop the bodies that wait to be decoded."""
        self._decoder.shutdown(wait=False, cancel_futures=True)


def _bare(decode: Callable[..., T], *arguments: Any) -> T:
    """Call `decode`. Its exception must not keep the body in memory: a future, its error and the frames of that are a
    reference cycle until the next collection."""
    try:
        return decode(*arguments)
    except ReflexError as error:
        del decode, arguments
        error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904
