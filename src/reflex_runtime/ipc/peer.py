"""One end of a connection: calls, answers and notifications in both directions, on one event loop.

All messages of one turn of the loop leave in one frame: the tokens of all streams in a step are one write and one read.
Time limits are the callers'.
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

log = logging.getLogger("reflex.ipc")


class Handler(Protocol):
    """Receives the messages of a peer, on the loop. Its exceptions are logged; that of a call is its answer."""

    def called(self, peer: Peer, request: frames.RpcRequest) -> None:
        """A call: answer with `peer.respond` or `peer.refuse`, now or later."""

    def notified(self, peer: Peer, note: frames.Notification) -> None:
        """A notification."""

    def lost(self, peer: Peer, error: Exception | None) -> None:
        """The connection has ended; called once. None: closed here, or by the other end between two frames."""


class ConnectionLost(ReflexError):
    """The connection ended before the call was answered. written: the other end may have read it."""

    code, http_status = "worker_lost", 503

    def __init__(self, message: str, written: bool = True) -> None:
        super().__init__(message)
        self.written = written

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.written)


class Peer(asyncio.Protocol):
    """See the module. most: bytes of a frame.

    calls, notes: messages sent, by method. frames: written. ended: done when the connection has ended. congested: the
    other end does not read; hold messages back until `on_relief` is called.
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
        self._out: list[frames.Message] = []
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Raw]] = {}
        self._over = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # -- sending -------------------------------------------------------------------------------------------------------

    def call(self, method: str, params: Any) -> asyncio.Future[Raw]:
        """A future of the raw answer; it raises the other end's error, or ConnectionLost. Cancelling it drops the
        answer; the other end goes on."""
        waiting: asyncio.Future[Raw] = self._loop.create_future()
        if self._over:
            waiting.set_exception(ConnectionLost("the connection is over", written=False))
            return waiting
        self._number += 1
        number = self._number
        self._waiting[number] = waiting
        self.calls[method] += 1
        waiting.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._say(frames.RpcRequest(number, method, params))
        return waiting

    def notify(self, method: str, params: Any) -> None:
        """Send a notification; nothing once the connection has ended."""
        self.notes[method] += 1
        self._say(frames.Notification(method, params))

    def respond(self, request: frames.RpcRequest, result: Any) -> None:
        """Answer a call."""
        self._say(frames.Response(request.id, result))

    def refuse(self, request: frames.RpcRequest, error: ReflexError | frames.RpcError) -> None:
        """Answer a call with an error."""
        told = error if isinstance(error, frames.RpcError) else frames.error_of(error)
        self._say(frames.ErrorResponse(request.id, told))

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
        """End the connection after the messages so far. Unanswered calls fail."""
        self.flush()
        self._end(error)

    def abort(self, error: Exception | None = None) -> None:
        """End it at once, also if it is closed and still writes."""
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    # -- the loop's ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        if self._over:  # closed before it was connected
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
            log.warning("the other end does not keep to the protocol: %s", error.message[:1000])
            self._say(frames.ErrorResponse(None, frames.RpcError(error.rpc_code, error.message)))
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._decoder.pending and not self._over:
            after = f"{self._decoder.pending} bytes after its begin"
            exc = frames.ProtocolError(f"the connection ended inside a frame, {after}")
        self._end(exc)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _say(self, message: frames.Message) -> None:
        if self._over:
            return
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(message)

    def _write(self, messages: list[frames.Message]) -> None:
        assert self._transport is not None
        try:
            data = frames.encode(messages, self.most)
        except frames.ProtocolError as error:
            if len(messages) == 1:
                self._unsent(messages[0], error)
                return
            for message in messages:  # only the caller of a message that cannot be written gets the error
                self._write([message])
            return
        self._transport.write(data)
        self.frames += 1

    def _unsent(self, message: frames.Message, error: frames.ProtocolError) -> None:
        log.error("a message was not sent: %s", error.message)
        if isinstance(message, frames.RpcRequest):
            waiting = self._waiting.get(message.id) if isinstance(message.id, int) else None
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        elif isinstance(message, frames.Response):
            told = frames.RpcError(frames.INTERNAL_ERROR, f"the answer was not sent: {error}")
            self._write([frames.ErrorResponse(message.id, told)])
        elif isinstance(message, frames.ErrorResponse) and message.error.data is not None:
            told = frames.RpcError(message.error.code, "an error that cannot be written")
            self._write([frames.ErrorResponse(message.id, told)])

    def _receive(self, message: frames.Message) -> None:
        try:
            if isinstance(message, frames.Notification):
                self._handler.notified(self, message)
            elif isinstance(message, frames.RpcRequest):
                self._handler.called(self, message)
            else:
                self._answered(message)
        except ReflexError as error:
            if isinstance(message, frames.RpcRequest):
                self.refuse(message, error)
            else:
                log.warning("a message could not be handled: %s", error.message[:1000])
        except Exception:
            log.exception("a message could not be handled")
            if isinstance(message, frames.RpcRequest):
                self.refuse(message, ReflexError("internal error; the log has the details"))

    def _answered(self, message: frames.Response | frames.ErrorResponse) -> None:
        waiting = self._waiting.get(message.id) if isinstance(message.id, int) else None
        if isinstance(message, frames.ErrorResponse):
            if waiting is None:
                log.warning("the other end could not read a message: %s", message.error.message[:1000])
            elif not waiting.done():
                waiting.set_exception(frames.raised(message.error))
        elif waiting is not None and not waiting.done():
            waiting.set_result(message.result)

    def _end(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        if self._transport is not None:
            self._transport.close()
        unsaid = {message.id for message in self._out if isinstance(message, frames.RpcRequest)}
        self._out.clear()
        told = "the connection was lost" if error is None else f"the connection was lost: {error}"
        for number, waiting in list(self._waiting.items()):
            if not waiting.done():
                waiting.set_exception(ConnectionLost(told, written=number not in unsaid))
        if not self.ended.done():
            self.ended.set_result(None)
        self._handler.lost(self, error)
