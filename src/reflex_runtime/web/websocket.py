"""Websockets on the server's port: frames in, messages to a session one at a time, frames out.

`websockets` parses and frames without I/O. The order of messages, their bounds and their ends are here, as
`HttpConnection` has them for requests.

- A session is handed the next message when it has answered the last. Pings are answered meanwhile.
- A message is bounded in bytes (close code 1009), and its bytes count among the request bodies that are held.
- One turn of the loop parses a few frames of a connection, so that thousands of empty ones do not hold the loop.
- A peer that breaks the protocol is told with close code 1002 or 1007. If the peer vanishes, `SocketSession.left` is
  called.
- At shutdown the message that is being answered gets its answer, then the close code is 1001.
- Frames are not compressed: pictures do not get smaller, and it takes 10 ms each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast
from urllib.parse import parse_qsl

import httptools
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.web.arrival import arrived, file_of
from reflex_runtime.web.bodies import Bodies
from reflex_runtime.web.connections import ANSWERED, BODY, CLOSING, IDLE, SLOW, Connections
from reflex_runtime.web.errors import ClientError, Overloaded, known
from reflex_runtime.web.incoming import SocketProtocol

MAX_AHEAD: Final = 16  # messages waiting behind the one being answered; with more of them nothing is read
LARGE_MESSAGE: Final = 64 * 1024  # bytes; connections with a larger message are read in turns
PIECE: Final = 4 * 1024  # bytes parsed at once: 700 frames at most, which take 5 ms
MAX_FRAMES: Final = 64  # frames in one turn of the loop, after which it parses no further piece
NORMAL, GOING_AWAY, UNSUPPORTED, INVALID, POLICY, INTERNAL, TRY_LATER = 1000, 1001, 1003, 1007, 1008, 1011, 1013

_log = logging.getLogger("reflex.websocket")
_log.setLevel(logging.ERROR)  # the library logs every connection


class SocketMessage:
    """One message. id: made by the server, unique. started: when it reached this machine; received: when all of it had
    been read (`time.monotonic`). held: bytes of it that `Bodies` counts."""

    __slots__ = ("data", "held", "id", "received", "started")

    def __init__(self, data: str | bytes, held: int, started: float) -> None:
        self.data, self.held, self.started = data, held, started
        self.received = time.monotonic()
        self.id = ""


class SocketSession(Protocol):
    """A product's side of one websocket. All methods are called on the event loop."""

    def opened(self) -> None:
        """The handshake is done."""

    def asked(self, message: SocketMessage) -> None:
        """A message has arrived. Call `WebSocket.answer` or `fail` for it, now or later; an exception fails it."""

    def failed(self, message: SocketMessage, error: ReflexError) -> str | bytes:
        """The message failed. Returns the frame with the error."""

    def left(self) -> None:
        """The connection is closed or is being closed. Later answers are dropped."""


MakeSession = Callable[["WebSocket"], SocketSession]


class SocketApplication(Protocol):
    """The application, as a websocket uses it; see `App`."""

    bodies: Bodies
    connections: Connections
    scratch: memoryview
    closing: bool

    def asks(self) -> str: ...
    def answered(self) -> None: ...


class WebSocket(asyncio.BufferedProtocol):
    """One websocket. id: made by the server, unique. query: of the URL. headers: of the handshake, names in lower case.
    may_change: whether the peer may change state. phase, heard: see `Connections`."""

    def __init__(
        self,
        app: SocketApplication,
        transport: asyncio.Transport,
        protocol: SocketProtocol,
        id: str,
        query: Mapping[str, str],
    ) -> None:
        self.app, self.transport, self.id, self.query = app, transport, id, query
        self.headers: Mapping[bytes, bytes] = {}
        self.phase = ANSWERED
        self.heard = 0.0
        self.held = 0  # bytes of the message that is coming
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._file = file_of(transport)
        self._session: SocketSession | None = None
        self._asked: SocketMessage | None = None
        self._waiting: deque[SocketMessage] = deque()
        self._unparsed = b""
        self._parts = bytearray()  # of a message that comes in several frames
        self._text = False
        self._arrived = self._arrived_last = 0.0  # the first bytes of the message that is coming; the last ones
        self._paused = self._rests = self._ends = self._left = self._owes = self.may_change = False

    def begin(self, session: SocketSession, data: bytes) -> None:
        """Take over the connection. data: what came behind the handshake."""
        self._session = session
        self.transport.set_protocol(self)
        self.app.connections.enter(self, self._loop)
        self._flush()
        session.opened()
        if data:
            self._received(len(data), data)

    # -- for the session -----------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the connection is open for sending."""
        return self._protocol.state is State.OPEN

    def send(self, data: str | bytes) -> None:
        """Send one frame, text or binary."""
        if self.open:
            if isinstance(data, str):
                self._protocol.send_text(data.encode())
            else:
                self._protocol.send_binary(data)
            self._flush()

    def owe(self, owes: bool) -> None:
        """Set whether the peer waits for a frame it did not ask for, such as the first. It does not count as idle
        then."""
        self._owes = owes
        self._take_time()

    def answer(self, *frames: str | bytes) -> None:
        """Answer the last message with these frames, or none."""
        message, self._asked = self._asked, None
        assert message is not None
        for frame in frames:
            self.send(frame)
        self.app.bodies.release(message)
        self.app.answered()
        if self.app.closing or self._ends:
            self.close(GOING_AWAY, "the server is shutting down")
        elif self._waiting:  # on the next turn of the loop, or many small messages would nest
            self._loop.call_soon(self._next)
        self._take_time()

    def fail(self, error: Exception) -> None:
        """Answer with an error. Unexpected exceptions are logged and answered without their text."""
        message = self._asked
        assert message is not None
        assert self._session is not None
        self.answer(self._session.failed(message, known(error, message.id)))

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        if self.open:
            self._protocol.send_close(code, reason)
            self._flush()
            self._take_time()

    # -- the transport -------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._protocol.reader.room
        return self.app.scratch if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._protocol.reader
        if reader.room is None:
            self._received(nbytes, self.app.scratch[:nbytes])
        else:
            self._received(nbytes, b"" if reader.place(nbytes) else None)

    def _received(self, size: int, data: bytes | memoryview | None) -> None:
        """So many bytes have come. data: for the protocol; None where it needs more before it does anything."""
        self.heard = self._loop.time()
        if self._protocol.eof_sent:  # what comes now is not read
            return
        self._arrived_last = arrived(self._file)
        if not self.held:
            self._arrived = self._arrived_last
        try:
            self.app.bodies.take(self, size)
        except Overloaded as error:
            self._protocol.fail(TRY_LATER, error.code)  # it forgets what it holds
        if self._unparsed:  # its turn comes
            self._unparsed += data or b""
        elif data is not None or not self.open:
            self._parse(data or b"")
        self._after()

    def _parse(self, data: bytes | memoryview) -> None:
        """Take the frames that are whole, until it is enough for one turn of the loop."""
        at = frames = 0
        while True:
            at += self._feed(data[at:])
            for event in self._protocol.events_received():
                frames += 1
                self._take(cast(Frame, event))
            if at >= len(data) or frames >= MAX_FRAMES or len(self._waiting) > MAX_AHEAD:
                break
        self._unparsed = bytes(data[at:])
        if not self.open:
            self._parts.clear()
        self.app.bodies.keep(self, len(self._parts) + self._protocol.reader.held + len(self._unparsed))
        self._flush()
        self._next()

    def _feed(self, data: bytes | memoryview) -> int:
        """Give the protocol some of it. Returns how many bytes."""
        reader = self._protocol.reader
        if reader.room is None:
            piece = data[:PIECE]
            self._protocol.receive_data(cast(bytes, piece))
            return len(piece)
        count = min(len(reader.room), len(data))
        reader.room[:count] = data[:count]
        if reader.place(count):
            self._protocol.receive_data(b"")
        return count

    def _after(self) -> None:
        if self.held > LARGE_MESSAGE:
            self._take_turns()
        self._read_on()
        self._take_time()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.receive_eof()
        self.app.connections.leave(self)
        self.app.bodies.release(self)
        self._leave()

    def pause_writing(self) -> None:
        self._paused = True
        self._read_on()
        self._take_time()

    def resume_writing(self) -> None:
        self._paused = False
        self._next()
        self._read_on()
        self._take_time()

    # -- for `Connections` ---------------------------------------------------------------------------------------------

    def cut(self, error: ReflexError) -> None:
        """End the connection: it has taken too long, or others need its place."""
        if self._paused or not self.open:
            self.transport.abort()
        else:
            self.close(POLICY if self.phase is BODY else GOING_AWAY, error.code)
            self.transport.close()

    def shutdown(self) -> None:
        """Close after the answer in progress."""
        self._ends = True
        if self._asked is None:
            self.close(GOING_AWAY, "the server is shutting down")

    def give_up(self) -> None:
        """Close without sending what waits."""
        self.transport.abort()

    def _take_time(self) -> None:
        """Set the phase of the connection, for its time limit."""
        if not self.open:
            self._leave()
        if self._paused:
            phase = SLOW
        elif not self.open:
            phase = CLOSING
        elif self._asked is None and self.held:
            phase = BODY
        else:
            phase = IDLE if self._asked is None and not self._owes else ANSWERED
        if phase is not self.phase or phase is IDLE:  # any frame, also a ping, ends idleness
            self.app.connections.move(self, phase)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) or not self.open:
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        if not frame.fin or self._parts:
            self._parts += frame.data
            if not frame.fin:
                return
        whole = bytes(self._parts or frame.data)
        self._parts.clear()
        try:
            data = whole.decode() if self._text else whole
        except UnicodeDecodeError:
            self._protocol.fail(INVALID, "the text is not UTF-8")
            return
        self._waiting.append(SocketMessage(data, len(whole), self._arrived))
        self.held -= len(whole)
        self._arrived = self._arrived_last

    def _next(self) -> None:
        """Hand over the message whose turn it is."""
        if self._asked is not None or not self._waiting or self._paused or not self.open:
            return
        assert self._session is not None
        message = self._asked = self._waiting.popleft()
        message.id = self.app.asks()
        try:
            if self.app.closing:
                raise Closed("the server is shutting down", retry_after=1.0)
            self._session.asked(message)
        except Exception as error:
            self.fail(error)
        self._read_on()

    def _leave(self) -> None:
        """Nothing can be sent any more: drop the waiting messages, and tell the session."""
        for message in self._waiting:
            self.app.bodies.release(message)
        self._waiting.clear()
        if self._session is not None and not self._left:
            self._left = True
            self._session.left()

    def _take_turns(self) -> None:
        """Stop reading until a later turn of the loop; otherwise this turn would read megabytes."""
        if not self._rests:
            self._rests = True
            self.app.bodies.line_up(self._read_again, self._loop)

    def _read_again(self) -> None:
        self._rests = False
        if self._unparsed and not self._stops and not self.transport.is_closing():
            self._parse(self._unparsed)
            self._after()
        else:
            self._read_on()

    @property
    def _stops(self) -> bool:
        """Whether the peer does not read, or sends many messages without waiting for answers."""
        return self._paused or len(self._waiting) > MAX_AHEAD

    def _read_on(self) -> None:
        """Read, to notice when the peer leaves, unless enough messages wait already."""
        if self.transport.is_closing():
            return
        if self._unparsed and not self._stops:
            self._take_turns()
        if self._rests or self._stops:
            self.transport.pause_reading()
        elif not self.transport.is_reading():
            self.transport.resume_reading()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self.transport.write(data)
            elif self.transport.can_write_eof():
                self.transport.write_eof()


def handshake(head: bytes, most: int) -> SocketProtocol:
    """The protocol of a connection whose request for a websocket is answered. head: of the request, as it came. most:
    bytes that a message may have."""
    protocol = SocketProtocol(max_size=most, logger=_log)
    protocol.receive_data(head)
    events = protocol.events_received()
    response = protocol.accept(events[0]) if events else None  # type: ignore[arg-type]
    if response is None or response.status_code != 101:
        raise ClientError(f"no websocket can be opened: {protocol.handshake_exc}")
    protocol.send_response(response)
    return protocol


def query_of(target: bytes) -> dict[str, str]:
    """The fields of the query of a request's target."""
    query = httptools.parse_url(target).query or b""
    return dict(parse_qsl(query.decode("ascii", "replace"), keep_blank_values=True))
