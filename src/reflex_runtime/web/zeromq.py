"""A listener for ZeroMQ: one answer to each message, on the event loop.

libzmq reads and writes in a thread of its own; `zmq.asyncio` waits for it on the loop.

- REQ, DEALER: an answer repeats the frames in front of the message.
- A message over `most` bytes gets an error; a frame over twice that closes its connection. libzmq bounds no number of
  frames in an incomplete message: listen on loopback only.
- The bytes of messages count among the request bodies until they are answered.
- At shutdown the messages that were taken are answered, and later ones are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import zmq
import zmq.asyncio

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import BodyTooLarge, ClientError, Overloaded

MAX_WAITING: Final = 4096  # messages that are being answered, at most
PER_CLIENT: Final = 4  # messages of one connection that libzmq reads ahead
UNREAD_MS: Final = 1000  # at the end, for clients to read their last answers


class ZmqMessage:
    """One message. peer: the routing ids on its way, also of brokers; a restart keeps them. id: made by the server,
    unique. started, received: when it was read (`time.monotonic`). held: its bytes that `Bodies` counts."""

    __slots__ = ("data", "envelope", "held", "id", "peer", "received", "started")

    def __init__(self, id: str, envelope: list[bytes], data: bytes) -> None:
        self.id, self.envelope, self.data = id, envelope, data
        self.peer = tuple(envelope)
        self.started = self.received = time.monotonic()
        self.held = 0


class ZmqListener:
    """A bound ROUTER socket. setting: the option that gave the address. most: bytes of a message. answer: makes the
    answer to a message, errors included; failed: makes the answer to a message that is refused."""

    def __init__(
        self,
        app: App,
        setting: str,
        address: str,
        most: int,
        answer: Callable[[ZmqMessage], Awaitable[bytes]],
        failed: Callable[[ZmqMessage, Exception], bytes],
    ) -> None:
        self._app, self._most, self._answer_to, self._failed = app, most, answer, failed
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._reading: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        for option, value in (
            (zmq.MAXMSGSIZE, 2 * most),
            (zmq.RCVHWM, PER_CLIENT),
            (zmq.SNDHWM, PER_CLIENT),
            (zmq.LINGER, UNREAD_MS),
            (zmq.IPV6, "[" in address),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 60),
        ):
            self._socket.setsockopt(option, int(value))
        try:
            self._socket.bind(address.replace("//localhost:", "//127.0.0.1:"))
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"{setting}={address}: cannot be bound: {zmq.strerror(error.errno or 0)}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def begin(self) -> None:
        """Read messages from now on, also those that came earlier."""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        """Refuse the messages that wait, give the others `UNREAD_MS` to be answered, and close the socket."""
        if self._reading is None:
            self.begin()
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # noqa: ASYNC110 (`_read` takes one each turn)
            await asyncio.sleep(0)
        if self._answering:
            await asyncio.wait(self._answering, timeout=UNREAD_MS / 1e3)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            head = frames.index(b"") + 1 if b"" in frames[:-1] else 0
            body = frames[head:]
            message = ZmqMessage(self._app.enter(), [peer, *frames[:head]], body[0] if body else b"")
            task = asyncio.get_running_loop().create_task(self._answer(message, len(body)))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            await asyncio.sleep(0)  # so that the task begins: reading a waiting message takes no turn of the loop

    async def _answer(self, message: ZmqMessage, frames: int) -> None:
        try:
            try:
                self._check(message, frames)
            except Exception as error:
                data = self._failed(message, error)
            else:
                data = await self._answer_to(message)
            if not self._socket.closed:  # a ROUTER never waits, and drops what nobody reads
                self._socket.send_multipart([*message.envelope, data], zmq.NOBLOCK)
        finally:
            self._app.bodies.release(message)
            self._app.leave()

    def _check(self, message: ZmqMessage, frames: int) -> None:
        self._app.check_open()
        if frames != 1:
            raise ClientError(f"the message has {frames} frames, it must have one")
        if len(message.data) > self._most:
            raise BodyTooLarge(f"the message has {len(message.data)} bytes, at most {self._most} may come")
        if len(self._answering) > MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} messages are being answered", retry_after=1.0)
        self._app.bodies.take(message, len(message.data))
