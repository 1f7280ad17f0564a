"""One end of a connection: calls, answers and notifications in both directions, on one event loop.

All messages of one turn of the loop are sent in one frame: the tokens of all streams in a step are one write and one
read. Callers set time limits themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Raw

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc import frames
from reflex_runtime.ipc.frames import ABSENT, VERSION, RpcMessage

log = logging.getLogger("reflex.ipc")


class Handler(Protocol):
    """Receives the messages of a peer, on the loop. Its exceptions are logged; one of `called` answers the call."""

    def called(self, peer: Peer, request: RpcMessage) -> None:
        """A call: answer with `peer.respond` or `peer.refuse`, now or later."""

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        """A notification."""

    def lost(self, peer: Peer, error: Exception | None) -> None:
        """The connection has ended; called once. error: None if it was closed here, or elsewhere between two frames."""


class ConnectionLost(ReflexError):
    """The connection ended before the call was answered. written: the other end may have read it."""

    code, http_status = "worker_lost", 503

    def __init__(self, message: str, written: bool = True) -> None:
        super().__init__(message)
        self.written = written

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.written)


class Peer(asyncio.Protocol):
    """See the module. most: bytes of a frame's body.

    calls, notes: number of calls and notifications, by method. frames: number of frames that were written. ended: done
    when the connection has ended. congested: the other end does not read; send nothing until `on_relief` is called.
    """

    def __init__(self, handler: Handler, most: int = frames.MAX_FRAME) -> None:
        self.most = most
        self.calls: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.frames = 0
        self.congested = False
        self.on_relief: Callable[[], None] | None = None
        self._handler = handler
        self._decoder = frames.FrameDecoder(most)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._out: list[RpcMessage] = []
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Raw]] = {}
        self._over = False  # closed, or lost
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # -- sending -------------------------------------------------------------------------------------------------------

    def call(self, method: str, params: Any) -> asyncio.Future[Raw]:
        """A future of the raw answer; it raises the other end's error, or ConnectionLost. Cancelling it drops the
        answer; the other end still executes the call."""
        waiting: asyncio.Future[Raw] = self._loop.create_future()
        if self._over:
            waiting.set_exception(ConnectionLost("the connection is over", written=False))
            return waiting
        self._number += 1
        number = self._number
        self._waiting[number] = waiting
        self.calls[method] += 1
        waiting.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._say(RpcMessage(VERSION, method, params, number))
        return waiting

    def notify(self, method: str, params: Any) -> None:
        """Send a notification; it is dropped if the connection has ended."""
        self.notes[method] += 1
        self._say(RpcMessage(VERSION, method, params))

    def respond(self, request: RpcMessage, result: Any) -> None:
        """Answer a call."""
        self._say(RpcMessage(VERSION, id=request.id, result=result))

    def refuse(self, request: RpcMessage, error: ReflexError | frames.RpcError) -> None:
        """Answer a call with an error."""
        sent = error if isinstance(error, frames.RpcError) else frames.error_of(error)
        self._say(RpcMessage(VERSION, id=request.id, error=sent))

    def flush(self) -> None:
        """Write the messages of this turn now."""
        if not self._out or self._transport is None or self._over:
            return
        out, self._out = self._out, []
        self._write(out)

    @property
    def buffered(self) -> int:
        """Bytes that are written and not sent yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, error: Exception | None = None) -> None:
        """Send the messages so far and end the connection. Unanswered calls fail."""
        self.flush()
        self._end(error)

    def abort(self, error: Exception | None = None) -> None:
        """End the connection at once, even if `close` still writes."""
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        if self._over:  # `close` was called before it was connected
            transport.abort()
            return
        self._transport = transport
        self.flush()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        if self.on_relief is not None:
            self.on_relief()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._decoder.feed(data)
        try:
            for messages in self._decoder:
                for message in messages:
                    if self._over:
                        return
                    self._receive(message)
        except frames.ProtocolError as error:
            log.warning("the other end broke the protocol: %s", error.message[:1000])
            self._say(RpcMessage(VERSION, id=None, error=frames.error_of(error)))
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._decoder.pending and not self._over:
            after = f"{self._decoder.pending} bytes after its beginning"
            exc = frames.ProtocolError(f"the connection ended inside a frame, {after}")
        self._end(exc)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _say(self, message: RpcMessage) -> None:
        if self._over:
            return
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(message)

    def _write(self, messages: list[RpcMessage]) -> None:
        assert self._transport is not None
        try:
            data = frames.encode(messages, self.most)
        except frames.ProtocolError as error:
            if len(messages) == 1:
                self._unsent(messages[0], error)
                return
            for message in messages:  # one by one: only the caller of a message that cannot be written gets the error
                self._write([message])
            return
        self._transport.write(data)
        self.frames += 1

    def _unsent(self, message: RpcMessage, error: frames.ProtocolError) -> None:
        log.error("a message was not sent: %s", error.message)
        if message.method is not ABSENT:
            if waiting := self._call(message):
                waiting.set_exception(error)
            return
        sent = frames.RpcError(frames.INTERNAL_ERROR, f"the answer was not sent: {error}")
        if message.error and message.error.data is not None:
            sent = frames.RpcError(message.error.code, "an error that cannot be written")
        elif message.error:
            return
        self._write([RpcMessage(VERSION, id=message.id, error=sent)])

    def _call(self, message: RpcMessage) -> asyncio.Future[Raw] | None:
        """The call of this id that waits for its answer."""
        waiting = self._waiting.get(message.id) if isinstance(message.id, int) else None
        return None if waiting is None or waiting.done() else waiting

    def _receive(self, message: RpcMessage) -> None:
        called = message.method is not ABSENT and message.id is not ABSENT
        try:
            if called:
                self._handler.called(self, message)
            elif message.method is not ABSENT:
                self._handler.notified(self, message)
            else:
                self._answered(message)
        except Exception as error:
            if not isinstance(error, ReflexError):
                log.exception("a message could not be handled")
                error = ReflexError("internal error; the log has the details")
            if called:
                self.refuse(message, error)
            else:
                log.warning("a message could not be handled: %s", error.message[:1000])

    def _answered(self, message: RpcMessage) -> None:
        waiting = self._call(message)
        if message.error and message.id is None:
            log.warning("the other end could not read a message: %s", message.error.message[:1000])
        elif message.error and waiting:
            waiting.set_exception(frames.raised(message.error))
        elif waiting:
            waiting.set_result(message.result)

    def _end(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        if self._transport is not None:
            self._transport.close()
        unwritten = {message.id for message in self._out if message.method is not ABSENT}
        self._out.clear()
        why = "the connection was lost" if error is None else f"the connection was lost: {error}"
        for number, waiting in list(self._waiting.items()):
            if not waiting.done():
                waiting.set_exception(ConnectionLost(why, written=number not in unwritten))
        if not self.ended.done():
            self.ended.set_result(None)
        self._handler.lost(self, error)
