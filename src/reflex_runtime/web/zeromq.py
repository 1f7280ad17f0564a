"""ZeroMQ clients on a listener of their own: messages in, one answer to each, on the event loop.

This speaks ZMTP 3 as a ROUTER does, without libzmq: that accepts connections without end, and reads the messages of
each before anything can count them. Here connections are a part of those of HTTP, as with gRPC, and bytes count among
the request bodies from when they come until their message is answered. Nothing is encrypted: addresses are loopback.

- REQ, DEALER: an answer goes back with the frames that came before the message.
- A message over `most` bytes, or one that there is no room for, is dropped as it comes and answered with the reason;
  one over twice `most` closes its connection.
- A client that leaves cancels what it asked. One that is silent keeps its connection, because it would not repeat a
  message that crosses the end of it; but the one silent for longest is closed when a new one needs its place.
- At shutdown messages that were taken are answered, and later ones are refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from reflex_runtime.core.errors import Closed, ConfigError, ReflexError
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.app import App
from reflex_runtime.web.bodies import Seldom
from reflex_runtime.web.connections import UNREAD, most_connections
from reflex_runtime.web.errors import BodyTooLarge, CallerLeft, ClientError, Overloaded, known

log = logging.getLogger("reflex.server")

MAX_WAITING: Final = 4096  # messages that are being answered
PER_CLIENT: Final = 64  # of one connection; then it is not read
MAX_FRAMES: Final = 64  # of a message
MAX_COMMAND: Final = 1024  # bytes
UNREAD_S: Final = 1.0  # that clients have at the end to take their answers
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")  # version 3.0, without encryption
ASKING: Final = (b"REQ", b"DEALER", b"ROUTER")  # sockets that may ask a ROUTER
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
_READY: Final = b"\x05READY"
_FULL: Final = Seldom()


class ZmqMessage:
    """One message. peer: the identity of its connection and the routing ids on its way, of brokers; the same again
    after a restart, if its client chose it. id: made by the server, unique. started, received: when it was taken
    (`time.monotonic`). held: bytes of it that `Bodies` counts."""

    __slots__ = ("data", "envelope", "held", "id", "peer", "received", "started")

    def __init__(self, id: str, identity: bytes, envelope: list[bytes], data: bytes) -> None:
        self.id, self.envelope, self.data = id, envelope, data
        self.peer = (identity, *envelope)
        self.started = self.received = time.monotonic()
        self.held = 0


def frame(flags: int, data: bytes) -> bytes:
    """A frame as it goes over the wire."""
    if len(data) < 256:
        return struct.pack("BB", flags, len(data)) + data
    return struct.pack(">BQ", flags | LONG, len(data)) + data


def ready(kind: bytes) -> bytes:
    """The command that follows the greeting."""
    return frame(COMMAND, _READY + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind)


class ZmqConnection:
    """One client. held: bytes of a message that is not whole yet. tasks: messages that are being answered. heard: when
    something came last."""

    def __init__(self, listener: ZmqListener, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listener, self._reader, self._writer = listener, reader, writer
        self._bodies, self.transport = listener.app.bodies, writer.transport
        self._peer = b""
        self._refused: ReflexError | None = None  # why the message that comes is dropped
        self._free = asyncio.Semaphore(PER_CLIENT)
        self.tasks: set[asyncio.Task[None]] = set()
        self.held, self.heard = 0, time.monotonic()

    async def run(self) -> None:
        """Take messages until it ends. What is no ZMTP is not answered: its sender would not understand it."""
        listener = self._listener
        with suppress(ClientError, EOFError, OSError, TimeoutError):
            async with asyncio.timeout(listener.settings.head_timeout_s):
                await self._greet()
            await listener.begun.wait()
            while True:
                await self._message()
        self._bodies.release(self)
        for task in self.tasks:
            task.cancel(CallerLeft("the caller left"))
        self._writer.close()

    async def _greet(self) -> None:
        self._writer.write(GREETING)
        if (await self._reader.readexactly(1))[0] != GREETING[0]:
            raise ClientError("no greeting")
        said = await self._reader.readexactly(len(GREETING) - 1)
        if said[9] < 3 or said[11:31].rstrip(b"\0") != b"NULL":
            raise ClientError("another version, or encrypted")
        self._writer.write(ready(b"ROUTER"))
        flags, size = await self._head(0)
        command = await self._reader.readexactly(size)
        told = properties(command[len(_READY) :])
        if not flags & COMMAND or command[: len(_READY)] != _READY or told.get(b"socket-type") not in ASKING:
            raise ClientError("no socket that may ask")
        self._peer = told.get(b"identity") or secrets.token_bytes(8)

    async def _head(self, before: int) -> tuple[int, int]:
        """Flags and size of a frame. before: bytes of its message so far."""
        flags = (await self._reader.readexactly(1))[0]
        size = int.from_bytes(await self._reader.readexactly(8 if flags & LONG else 1))
        most = MAX_COMMAND if flags & COMMAND else 2 * self._listener.most - before
        if flags > (MORE | LONG | COMMAND) or size > most:
            raise ClientError("no frame, or far too large")
        return flags, size

    async def _message(self) -> None:
        """Take one message, and answer it beside the next."""
        flags, size = await self._head(0)
        frames, total, most = list[bytes](), 0, self._listener.most
        self._refused = None
        async with asyncio.timeout(self._listener.settings.body_timeout_s):
            while True:
                self.heard = time.monotonic()
                if flags & COMMAND:
                    command = await self._reader.readexactly(size)
                    if command[:5] == b"\x04PING":
                        self._writer.write(frame(COMMAND, b"\x04PONG" + command[7:]))
                    if not frames:
                        return
                else:
                    total += size
                    if total > most:
                        self._refused = BodyTooLarge(f"the message has {total} bytes, at most {most} may come")
                    frames.append(await self._part(size))
                    if not flags & MORE:
                        break
                    if len(frames) == MAX_FRAMES:
                        raise ClientError("too many frames")
                flags, size = await self._head(total)
        await self._free.acquire()
        task = asyncio.create_task(self._answer(frames, self._refused))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def drained(self) -> None:
        """Close it when its client has read everything."""
        self._writer.close()
        await self._writer.wait_closed()

    async def _part(self, size: int) -> bytes:
        """The content of a frame; it is dropped if the message is refused."""
        found = bytearray()
        while size:
            came = await self._reader.read(size)
            if not came:
                raise EOFError
            size -= len(came)
            try:
                if self._refused is None:
                    self._bodies.take(self, len(came))
                    found += came
            except Overloaded as error:
                self._refused = error
            if self._refused is not None:
                self._bodies.release(self)
                found.clear()
        return bytes(found)

    async def _answer(self, frames: list[bytes], refused: ReflexError | None) -> None:
        listener, app = self._listener, self._listener.app
        head = frames.index(b"") + 1 if b"" in frames[:-1] else 0
        message = ZmqMessage(app.asks(), self._peer, frames[:head], frames[head])
        message.held, self.held = self.held, 0
        listener.waiting += 1
        try:
            try:
                listener.check(len(frames) - head)
                if refused is not None:
                    raise refused
            except Exception as error:
                data = listener.failed(message, known(error, message.id))
            else:
                data = await listener.answer(message)
            self._writer.writelines([*(frame(MORE, part) for part in message.envelope), frame(0, data)])
        finally:
            listener.waiting -= 1
            app.bodies.release(message)
            app.answered()
        try:
            async with asyncio.timeout(UNREAD):
                await self._writer.drain()
        except (OSError, TimeoutError):
            self.transport.abort()
        self._free.release()


def properties(data: bytes) -> dict[bytes, bytes]:
    """What READY says, by names in lower case."""
    found, at = {}, 0
    while at < len(data):
        name = data[at + 1 : at + 1 + data[at]]
        at += 1 + len(name)
        size = int.from_bytes(data[at : at + 4])
        found[name.lower()] = data[at + 4 : at + 4 + size]
        at += 4 + size
    return found


class ZmqListener:
    """A bound socket and its connections. setting: that names the address. answer: makes the answer to a message,
    errors too; failed: what says that one is answered with an error. begun: messages are taken."""

    def __init__(
        self,
        app: App,
        setting: str,
        address: str,
        settings: ServeConfig,
        answer: Callable[[ZmqMessage], Awaitable[bytes]],
        failed: Callable[[ZmqMessage, ReflexError], bytes],
    ) -> None:
        self.app, self.most, self.answer, self.failed = app, settings.max_body_bytes, answer, failed
        self._most_connections = app.give_apart(most_connections(settings.max_connections))
        self.settings, self.waiting, self.begun = settings, 0, asyncio.Event()
        self.connections: set[ZmqConnection] = set()
        host, _, port = address.removeprefix("tcp://").replace("localhost", "127.0.0.1").rpartition(":")
        family = socket.AF_INET6 if "[" in host else socket.AF_INET
        try:
            sock = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            raise ConfigError(f"{setting}={address}: cannot be bound: {os.strerror(error.errno or 0)}") from None
        self.address = f"tcp://{host}:{sock.getsockname()[1]}"
        self._starting = asyncio.get_running_loop().create_task(asyncio.start_server(self._run, sock=sock))

    def begin(self) -> None:
        """Take messages from now on, including those that were sent before."""
        self.begun.set()

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. When there are too many, the one that was silent for longest makes room, or it goes."""
        new = ZmqConnection(self, reader, writer)
        if len(self.connections) >= self._most_connections:
            if _FULL.first():
                most = self._most_connections
                log.warning("%d connections of ZeroMQ are open (--max-connections): idle ones are closed", most)
            silent = [one for one in self.connections if not (one.tasks or one.held)]
            oldest = min(silent, key=lambda one: one.heard, default=new)
            if time.monotonic() - oldest.heard < self.settings.idle_timeout_s:
                writer.transport.abort()
                return
            oldest.transport.abort()
            self.connections.discard(oldest)
        self.connections.add(new)
        await new.run()
        self.connections.discard(new)

    def check(self, frames: int) -> None:
        """Raise what stands against a message."""
        if self.app.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        if frames != 1:
            raise ClientError(f"a message has one frame, and this one {frames}")
        if self.waiting > MAX_WAITING:
            raise Overloaded(f"{self.waiting} messages are being answered", retry_after=1.0)

    async def close(self) -> None:
        """Close, after giving clients a moment to read their answers."""
        (await self._starting).close()
        with suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_S):
                await asyncio.gather(*(one.drained() for one in self.connections))
        for one in self.connections:
            one.transport.abort()
