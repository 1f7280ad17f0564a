"""A kept connection that takes whole requests as bytes: HTTP/1.1, or websocket frames that are masked with zeros.

The generator shares its machine with the server, so a request costs a write, a read and a future.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ssl
import struct
from typing import cast

from bench.load.wires.target import Target
from reflex_runtime.client.errors import BadAnswer, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply

PONG = b"\x8a\x80\x00\x00\x00\x00"


class Connection(asyncio.Protocol):
    """One request at a time. After an error the next one opens another connection."""

    def __init__(self, target: Target, frames: bool = False) -> None:
        """frames: of a websocket, once it is open."""
        self._target, self._frames = target, frames
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._whole = 0
        self._waiter: asyncio.Future[bytes] | None = None
        self._until = 0.0  # when the answer is late
        self._watch: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes) -> bytes:
        """The whole answer to a request; to none, what comes next. Raises Unreachable, TimedOut and BadAnswer."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bytes] = loop.create_future()
        self._waiter = waiter
        self._until = loop.time() + self._target.timeout
        if self._watch is None:
            self._watch = loop.call_later(self._target.timeout, self._look)
        try:
            if self._transport is None:
                await self._connect()
            assert self._transport is not None, "connected"
            self._whole = 0
            if request:
                self._buffer.clear()
                self._transport.write(request)
            elif self._buffer:  # it came with the answer before
                self.data_received(b"")
            return await waiter
        finally:
            if not waiter.done() or waiter.exception() is not None:
                self.close()

    def send(self, frame: bytes) -> None:
        """Without waiting for an answer."""
        assert self._transport is not None, "connected"
        self._transport.write(frame)

    def upgraded(self) -> None:
        """From now on frames come; what stands behind the answer is the first."""
        self._frames = True

    def close(self) -> None:
        """At once, without waiting for the other side."""
        transport, self._transport, self._waiter = self._transport, None, None
        self._buffer.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if transport is not None:
            transport.abort()

    async def _connect(self) -> None:
        address, loop = self._target.address, asyncio.get_running_loop()
        secure = ssl.create_default_context() if address.secure else None
        try:
            await loop.create_connection(lambda: self, address.host, address.port, ssl=secure)
        except OSError as error:
            raise Unreachable(f"cannot connect to {address.url}: {error}", retry_safe=True) from None

    def _look(self) -> None:
        """Whether the answer is late. One timer for many requests: each of its own costs more than sending one."""
        loop, self._watch = asyncio.get_running_loop(), None
        if self._waiter is None or self._waiter.done():
            return
        if (left := self._until - loop.time()) > 0.0:
            self._watch = loop.call_later(left, self._look)
            return
        self._fail(TimedOut(f"no answer from {self._target.address.url} within {self._target.timeout:.3g} s"))

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(Unreachable(f"{self._target.address.url} closed the connection before it had answered: {error}"))

    def data_received(self, data: bytes) -> None:
        buffer, waiter = self._buffer, self._waiter
        buffer += data
        try:
            self._whole = self._whole or (frame_size(buffer) if self._frames else answer_size(buffer))
        except ValueError as error:
            self._fail(BadAnswer(f"not HTTP/1.1: {error}"))
            return
        if 0 < self._whole <= len(buffer) and waiter is not None and not waiter.done():
            whole, self._whole = bytes(buffer[: self._whole]), 0
            del buffer[: len(whole)]
            if self._frames and whole[0] == 0x89 and self._transport is not None:  # a ping
                self._transport.write(PONG)
                self.data_received(b"")
            else:
                waiter.set_result(whole)


def request(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """The bytes of an HTTP request."""
    told = headers if method == "GET" else {**headers, "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def answer_size(data: bytes | bytearray) -> int:
    """Bytes of the HTTP answer that begins here, 0 while its head is not whole. ValueError if it says no length."""
    if not b"HTTP/1.".startswith(data[:7]) and not data.startswith(b"HTTP/1."):
        raise ValueError(f"{bytes(data[:80])!r}")
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    head = bytes(data[:end]).lower()
    at = head.find(b"content-length:")
    if at < 0 and not head.startswith(b"http/1.1 101"):
        raise ValueError(f"an answer without Content-Length: {head[:80]!r}")
    return end + 4 + (int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)


def reply_of(answer: bytes) -> Reply:
    """An HTTP answer, taken apart."""
    head, _, body = answer.partition(b"\r\n\r\n")
    line, _, rest = head.partition(b"\r\n")
    headers = http.client.parse_headers(io.BytesIO(rest + b"\r\n\r\n"))
    return Reply(int(line[9:12]), {name.lower(): value for name, value in headers.items()}, body)


def frame_size(data: bytes | bytearray) -> int:
    """Bytes of the websocket frame that begins here, 0 while that is not known. Servers do not mask."""
    if len(data) < 2:
        return 0
    short = data[1]
    if short < 126:
        return 2 + short
    if len(data) < 10:
        return 0
    return int(4 + struct.unpack_from(">H", data, 2)[0] if short == 126 else 10 + struct.unpack_from(">Q", data, 2)[0])


def masked(payload: bytes, opcode: int = 2) -> bytes:
    """A frame of a client. The mask is zeros: servers unmask it like any other."""
    size = len(payload)
    if size < 126:
        head = struct.pack(">BB", 0x80 | opcode, 0x80 | size)
    elif size <= 0xFFFF:
        head = struct.pack(">BBH", 0x80 | opcode, 0xFE, size)
    else:
        head = struct.pack(">BBQ", 0x80 | opcode, 0xFF, size)
    return head + bytes(4) + payload


def payload_of(frame: bytes) -> bytes:
    """What a server's frame holds."""
    short = frame[1] & 0x7F
    return frame[2 if short < 126 else 4 if short == 126 else 10 :]
