"""An `App` below another server that speaks ASGI, such as a replica of Ray Serve: the same routes and the same answers.

The other server has the connections, their limits and HTTP itself; this module hands over requests, whole messages of
websockets, and answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

from websockets.client import ClientProtocol
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.app import App
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import BodyTooLarge, CallerLeft
from reflex_runtime.web.exchange import Exchange
from reflex_runtime.web.form import Headers
from reflex_runtime.web.websocket import WebSocket, handshake, query_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

WRITTEN_AHEAD: Final = 1 << 20  # bytes of an answer that wait to be sent; with more its caller counts as not reading
_HOP: Final = (b"connection", b"keep-alive", b"transfer-encoding")
_DENIES: Final = "websocket.http.response"


async def answer(app: App, scope: Scope, receive: Receive, send: Send, moved: bool = False) -> None:
    """Answer one request, or serve one websocket. Returns when it is over; cancel it when its caller has left.

    moved: its episode was answered by another server before.
    """
    outbox = _Outbox(send)
    exchange = _exchange(app, scope, outbox)
    exchange.moved = moved
    if scope["type"] == "websocket":
        await _serve_socket(app, exchange, scope, receive, outbox)
    else:
        await _serve_request(app, exchange, receive, outbox)


def _exchange(app: App, scope: Scope, outbox: _Outbox) -> Exchange:
    client = scope.get("client")
    peer = (str(client[0]), int(client[1])) if client else None
    carrier = _AsgiCarrier(outbox)
    headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
    exchange = Exchange(app, carrier, scope.get("method", "GET"), scope["path"], headers, peer, time.monotonic())
    exchange.target = _target(scope)
    exchange.opened, exchange.expects = True, False  # the other server has said that it goes on
    return exchange


# -- a request ---------------------------------------------------------------------------------------------------------


async def _serve_request(app: App, exchange: Exchange, receive: Receive, outbox: _Outbox) -> None:
    exchange.wanted = app.open(exchange)
    sending = asyncio.ensure_future(outbox.run())
    try:
        if exchange.wanted and not await _read(app, exchange, receive):
            return
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if sending.done():
            sending.result()
    finally:
        outbox.end()
        exchange.leave()
        sending.cancel()
        if exchange.wanted:
            exchange.wanted = False
            app.fail(exchange, CallerLeft("the caller left before it had sent its request"))


async def _read(app: App, exchange: Exchange, receive: Receive) -> bool:
    """Read the body, within the limits of its route, and hand the request over. False if the caller has left."""
    assert exchange.route is not None
    parts: list[bytes] = []
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = bytes(message.get("body", b""))
            exchange.size += len(part)
            if exchange.size > exchange.route.most:
                most = exchange.route.most
                raise BodyTooLarge(f"the body has over {most} bytes", max_body_bytes=most)
            app.bodies.take(exchange, len(part))
            parts.append(part)
            if not message.get("more_body", False):
                break
    except ReflexError as error:
        exchange.wanted = False
        app.fail(exchange, error)
        return True
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    if exchange.size > LARGE and len(parts) > 1:
        whole = await app.bodies.beside(b"".join, parts)
    exchange.whole, exchange.wanted = True, False
    if not exchange.done:
        app.run(exchange, whole)
    return True


async def _left(receive: Receive) -> None:
    """Return when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Outbox:
    """Messages to the other server, in order; they are made without waiting, and sent by `run`.

    held: bytes that wait.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: asyncio.Queue[tuple[MutableMapping[str, Any], bool]] = asyncio.Queue()
        self._taken = asyncio.Event()
        self._over = False
        self.held = 0

    def put(self, message: MutableMapping[str, Any], last: bool = False) -> None:
        if self._over:
            return
        self.held += _size(message)
        self._waiting.put_nowait((message, last))

    async def run(self) -> None:
        """Send until the last message."""
        last = False
        try:
            while not last:
                message, last = await self._waiting.get()
                await self._send(message)
                self.held -= _size(message)
                self._taken.set()
        finally:
            self.end()

    def end(self) -> None:
        """Nothing is sent from now on: drop what comes, and let nobody wait."""
        self._over = True
        self._taken.set()

    async def drained(self) -> None:
        while self.held > WRITTEN_AHEAD and not self._over:
            self._taken.clear()
            await self._taken.wait()


def _size(message: MutableMapping[str, Any]) -> int:
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")


class _AsgiCarrier:
    """The caller's side of a request: answers become messages."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox
        self.kind = "http.response"  # begins the type of messages

    @property
    def writable(self) -> bool:
        return self._outbox.held <= WRITTEN_AHEAD

    def reply(self, exchange: Exchange, status: int, headers: Headers, body: bytes) -> None:
        self.begin(exchange, status, headers)
        self._put_body(exchange, body, last=True)

    def begin(self, exchange: Exchange, status: int, headers: Headers) -> None:
        kept = [(name, value) for name, value in headers if name not in _HOP]
        self._outbox.put({"type": f"{self.kind}.start", "status": status, "headers": kept})

    def write(self, exchange: Exchange, data: bytes) -> None:
        if data:
            self._put_body(exchange, data, last=False)

    def end(self, exchange: Exchange) -> None:
        self._put_body(exchange, b"", last=True)

    async def drained(self) -> None:
        await self._outbox.drained()

    def abort(self) -> None:
        self._outbox.put({"type": f"{self.kind}.body", "body": b"", "more_body": False}, last=True)

    def _put_body(self, exchange: Exchange, body: bytes, last: bool) -> None:
        sent = b"" if exchange.method == "HEAD" else body
        self._outbox.put({"type": f"{self.kind}.body", "body": sent, "more_body": not last}, last=last)


# -- a websocket -------------------------------------------------------------------------------------------------------


async def _serve_socket(app: App, exchange: Exchange, scope: Scope, receive: Receive, outbox: _Outbox) -> None:
    await receive()  # the peer asks to connect
    exchange.upgrades, denies = True, _DENIES in (scope.get("extensions") or {})
    carrier = exchange.carrier
    assert isinstance(carrier, _AsgiCarrier)
    carrier.kind = _DENIES
    wanted = app.open(exchange)
    route = exchange.route
    if wanted and (route is None or route.socket is None):
        wanted = False
        app.fail(exchange, ReflexError(f"{exchange.path} has no websocket"))
    if not wanted or route is None or route.socket is None:
        await _deny(outbox, denies)
        return
    pipe = _SocketPipe(outbox, _target(scope))
    try:
        protocol = handshake(pipe.head, route.most)
        websocket = WebSocket(app, pipe, protocol, exchange.number, query_of(_target(scope)))
        websocket.may_change = app.may_change(exchange)
        session = route.socket(websocket)
    except Exception as error:
        app.fail(exchange, error)
        await _deny(outbox, denies)
        return
    app.leave(exchange)
    outbox.put({"type": "websocket.accept"})
    sending = asyncio.ensure_future(outbox.run())
    try:
        websocket.begin(session, b"")
        await _relay(pipe, receive, sending, outbox)
        if sending.done() and not sending.cancelled():
            sending.result()
    finally:
        outbox.end()
        sending.cancel()
        pipe.close()


async def _deny(outbox: _Outbox, denies: bool) -> None:
    """Send what the application answered in place of a websocket; a server that cannot pass it on closes with 403."""
    if denies:
        await outbox.run()
    else:
        closing = _Outbox(outbox._send)
        closing.put({"type": "websocket.close"}, last=True)
        await closing.run()


async def _relay(pipe: _SocketPipe, receive: Receive, sending: asyncio.Future[None], outbox: _Outbox) -> None:
    """Hand on what the peer sends until either side has closed. A peer that does not read is not read from either."""
    while not sending.done():
        await pipe.reads.wait()
        await outbox.drained()
        reading: asyncio.Future[Any] = asyncio.ensure_future(receive())
        await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            return
        message = reading.result()
        if message["type"] == "websocket.disconnect":
            return
        if message["type"] == "websocket.receive":
            text, data = message.get("text"), message.get("bytes")
            pipe.take(text if text is not None else data or b"")


def _target(scope: Scope) -> bytes:
    query = scope.get("query_string", b"")
    return quote(scope["path"]).encode() + (b"?" + query if query else b"")


class _SocketPipe(asyncio.Transport):
    """Between a `WebSocket`, which reads and writes frames, and the other server, which has messages. head: of the
    request that opens the websocket. reads: set while messages are taken."""

    def __init__(self, outbox: _Outbox, target: bytes) -> None:
        super().__init__()
        self._outbox = outbox
        self._peer = ClientProtocol(parse_uri("ws://reflex" + target.decode()), max_size=None)
        self._peer.send_request(self._peer.connect())
        self.head = b"".join(self._peer.data_to_send())
        self._protocol: Any = None
        self._closed = False
        self.reads = asyncio.Event()
        self.reads.set()

    def take(self, message: str | bytes) -> None:
        """A message of the peer."""
        if self._peer.state is not State.OPEN or self._closed:
            return
        if isinstance(message, str):
            self._peer.send_text(message.encode())
        else:
            self._peer.send_binary(message)
        self._forward()

    def write(self, data: Any) -> None:
        self._peer.receive_data(bytes(data))
        for event in self._peer.events_received():
            if isinstance(event, Frame):
                self._told(event)
        if self._peer.state is not State.OPEN and not self._closed:
            asyncio.get_running_loop().call_soon(self.close)

    def _told(self, frame: Frame) -> None:
        if frame.opcode is Opcode.TEXT:
            self._outbox.put({"type": "websocket.send", "text": bytes(frame.data).decode()})
        elif frame.opcode is Opcode.BINARY:
            self._outbox.put({"type": "websocket.send", "bytes": bytes(frame.data)})
        elif frame.opcode is Opcode.CLOSE:
            closed = Close.parse(bytes(frame.data))
            self._outbox.put({"type": "websocket.close", "code": closed.code, "reason": closed.reason}, last=True)

    def _forward(self) -> None:
        """Give the frames of the peer to the protocol, as a socket would."""
        for data in self._peer.data_to_send():
            view = memoryview(data)
            while view and not self._closed:
                room = self._protocol.get_buffer(len(view))
                size = min(len(room), len(view))
                room[:size] = view[:size]
                self._protocol.buffer_updated(size)
                view = view[size:]

    # -- asyncio.Transport ---------------------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._closed

    def is_reading(self) -> bool:
        return self.reads.is_set()

    def pause_reading(self) -> None:
        self.reads.clear()

    def resume_reading(self) -> None:
        self.reads.set()

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.reads.set()
            if self._protocol is not None:
                self._protocol.connection_lost(None)

    def abort(self) -> None:
        self._outbox.put({"type": "websocket.close", "code": 1001, "reason": ""}, last=True)
        self.close()
