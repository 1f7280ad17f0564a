"""HTTP/1.1 on a connection: the order of requests and answers, and their limits.

- The application gets one request at a time; pipelined requests behind it wait for their turn.
- Invalid HTTP is answered in the application's own form, after the answers that are still due.
- `Connections` limits the time for head and body, and the number of connections.
- What comes on all connections in one turn of the loop is read together, each step for all of them (`App.read`).
- A caller that sends a whole request and then closes its sending side still gets an answer. If the request waits in a
  queue, this counts as a disconnect, and the answer says so: the two look the same on the wire.
- A request for a websocket hands the connection over to `WebSocket`, if the path has one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from functools import partial
from typing import Final, cast

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.app import App
from reflex_runtime.web.arrival import file_of
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.connections import ANSWERED, BODY, HEAD, IDLE, SLOW
from reflex_runtime.web.errors import BodyTooLarge, CallerLeft, Overloaded
from reflex_runtime.web.exchange import CLOSE, Exchange, retry_headers
from reflex_runtime.web.form import Headers
from reflex_runtime.web.http_bytes import answer, as_sent
from reflex_runtime.web.request_parser import RequestParser
from reflex_runtime.web.websocket import WebSocket, handshake, query_of

MAX_PIPELINE: Final = 16  # requests waiting behind another on their connection; with more of them it is not read
MAX_AHEAD: Final = 64 * 1024  # bytes of a body whose turn has not come; with more the connection is not read
LARGE_BODY: Final = 64 * 1024  # bytes; connections with a larger body are read in turns
AT_ONCE: Final = 16 * 1024  # bytes that are read when they come: less waits for the end of the loop's turn


class HttpConnection(asyncio.Protocol):
    """One connection. phase: see `Connections`. heard: when its last byte came, by the loop's clock."""

    transport: asyncio.Transport

    def __init__(self, app: App) -> None:
        self.app = app
        self.phase = ANSWERED
        self.heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Exchange] = deque()  # unanswered, with their head; the first is being answered
        self._coming: Exchange | None = None  # the last whose head has come
        self._resumed: asyncio.Future[None] | None = None  # set while the caller does not read
        self._late = b""  # the answer of the first, if it came while the caller did not read
        self._refusing = self._ended = self._lost = False
        self._rests = self._paused = False
        self._unread = b""  # what has come and is not parsed; `_seen`: when it came
        self._seen = 0.0

    # -- the transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) and len(peer) > 1 else None
        self._file = file_of(transport)
        self._requests = RequestParser(self, self._file, client)
        try:
            self.app.connections.enter(self, self._loop)
        except Overloaded as error:
            self._refuse(error)

    def data_received(self, data: bytes) -> None:
        """What is small is read at the end of the loop's turn, with what came on all connections (`App.read`)."""
        if not self._unread:
            self._seen = time.monotonic()
            if len(data) <= AT_ONCE:
                self.app.line_up(self, self._loop)
        self._unread += data
        if len(self._unread) > AT_ONCE and self.parse():
            self.go_on()

    def parse(self) -> bool:
        """Parse what has come. Returns whether `go_on` is to follow."""
        data, self._unread = self._unread, b""
        if not data or self._refusing:
            return False
        error = self._requests.feed(data, self._seen)
        if self._lost:  # it is a websocket now
            return False
        if error is not None:
            self._refuse(error)
        return True

    def came(self, exchange: Exchange) -> None:
        """See `Receiver`."""
        self._coming = exchange
        self._turns.append(exchange)

    def go_on(self) -> None:
        """Open and hand over what was parsed."""
        if self._lost:
            return
        self._advance()
        coming = self._coming
        if coming is not None and coming.size > LARGE_BODY and coming.wanted and not coming.whole:
            self._rests = True  # otherwise one turn of the loop reads megabytes of it
            self.app.bodies.line_up(self.read_again, self._loop)
        self._read_on()
        self._take_time()

    def read_again(self) -> None:
        """It is its turn to be read."""
        self._rests = False
        self._read_on()

    def eof_received(self) -> bool:
        self.app.read()
        if not self._turns or not self._turns[-1].whole:
            return False
        self._turns[-1].keep_alive = False
        self._ended = True
        if self._turns[0].opened:
            self._turns[0].leave()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._unread = True, b""
        self.app.connections.leave(self)
        self._resume()
        turns, self._turns = self._turns, deque()
        if turns and turns[0].opened:
            turns[0].leave()
            if turns[0].wanted:
                self.app.fail(turns[0], CallerLeft("the caller left before it had sent its request"))
        self._coming = None
        self._requests.close()

    def pause_writing(self) -> None:
        if self._resumed is None:
            self._resumed = self._loop.create_future()
        self._take_time()

    def resume_writing(self) -> None:
        self._resume()
        if self._late:
            late, self._late = self._late, b""
            self.transport.write(late)
            self._next(self._turns[0])
        self._take_time()

    def cut(self, error: ReflexError) -> None:
        """End the connection: it has taken too long, or others need its place."""
        self._unread = b""
        if self.phase in (HEAD, BODY) and not self._refusing:
            self._refuse(error)
            self._advance()
        elif self.phase is SLOW:
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close after the answer in progress."""
        if self._turns:
            self._turns[-1].keep_alive = False
        else:
            self.transport.close()

    def give_up(self) -> asyncio.Task[None] | None:
        """Close without sending waiting data. Returns the requests that still run for it."""
        task = self._turns[0].task if self._turns else None
        if task is None:
            self.transport.abort()
        else:
            task.cancel()
        return task

    def give_away(self, exchange: Exchange, body: bytes) -> tuple[int, bytes] | None:
        """End this side of the connection, with the request whose turn it is unanswered. body: all of that.

        Returns a descriptor of the connection, which stays open, and the bytes of the request and of those behind it.
        None, and nothing has happened, if one of those is not complete, or an answer is still being sent.
        """
        asked = list(self._turns)
        unsent = self._lost or self.transport.get_write_buffer_size() or self._requests.in_head or self._unread
        if unsent or asked[:1] != [exchange] or not all(e.whole or e.upgrades for e in asked):
            return None
        parts = [as_sent(exchange, body), *(as_sent(e, b"".join(e.body)) for e in asked[1:])]
        file = os.dup(self._file)
        self.app.leave(exchange)
        self.app.connections.leave(self)
        self._lost, self._coming = True, None
        self._turns.clear()
        self._requests.close()
        self.transport.set_protocol(asyncio.Protocol())
        self.transport.abort()
        return file, b"".join(parts)

    def _resume(self) -> None:
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def _take_time(self, anew: bool = False) -> None:
        """Set the phase of the connection, for its time limit. anew: the same phase begins again."""
        if self._resumed is not None:
            phase = SLOW
        elif self._turns:
            phase = ANSWERED if self._turns[0].whole else BODY
        elif self.transport.is_closing():
            phase = SLOW  # until its last answer is taken
        elif self._coming is not None and not self._coming.whole:  # answered before its end: the rest is dropped
            phase = BODY
        else:
            phase = HEAD if self._requests.in_head else IDLE
        if phase is BODY:
            self.heard = self._loop.time()
        if anew or phase is not self.phase:
            self.app.connections.move(self, phase)

    # -- requests, one at a time ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Open the request whose turn it is, and hand it over when it is complete."""
        if not self._turns:
            return
        exchange = self._turns[0]
        if not exchange.opened:
            self._open(exchange)
        if exchange.wanted and exchange.broken is not None:
            self.app.fail(exchange, exchange.broken)
        elif exchange.wanted and exchange.whole:
            self._hand_over(exchange)

    def _open(self, exchange: Exchange) -> None:
        exchange.opened = True
        exchange.wanted = self.app.open(exchange)
        ahead, exchange.body, exchange.size = exchange.body, [], 0
        for part in ahead:
            self.take(exchange, part)
        if exchange.wanted and not exchange.whole and exchange.headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def take(self, exchange: Exchange, part: bytes) -> None:
        """A part of the body of the request whose turn it is."""
        if not exchange.wanted:
            return
        assert exchange.route is not None
        exchange.size += len(part)
        try:
            if exchange.size > exchange.route.most:
                most = exchange.route.most
                raise BodyTooLarge(f"the body has over {most} bytes", max_body_bytes=most)
            self.app.bodies.take(exchange, len(part))
        except ReflexError as error:
            exchange.wanted, exchange.body = False, []
            self.app.fail(exchange, error)
        else:
            exchange.body.append(part)

    def _hand_over(self, exchange: Exchange) -> None:
        parts, exchange.body, exchange.wanted = exchange.body, [], False
        if len(parts) == 1:
            self._run(exchange, parts[0])
        elif exchange.size > LARGE:
            joining = self.app.bodies.beside(b"".join, parts)
            joining.add_done_callback(partial(self._joined, exchange))
        else:
            self._run(exchange, b"".join(parts))

    def _joined(self, exchange: Exchange, joining: asyncio.Future[bytes]) -> None:
        if not exchange.done and not joining.cancelled():
            self._run(exchange, joining.result())

    def _run(self, exchange: Exchange, body: bytes) -> None:
        self.app.run(exchange, body)
        if self._ended:
            exchange.leave()

    def _next(self, exchange: Exchange) -> None:
        """The first request has its whole answer: go on with the next."""
        self._turns.popleft()
        if not exchange.keep_alive:
            self.transport.close()
        elif self._turns:  # on the next turn of the loop, or a long pipeline would nest and hold the loop
            self._loop.call_soon(self._advance_next)
            return
        self._take_time(anew=True)

    def _advance_next(self) -> None:
        if not self._lost:
            self._advance()
            self._read_on()
            self._take_time()

    def _read_on(self) -> None:
        """Client is not reading: reply later and stop reading its requests. Otherwise read, to notice a disconnect."""
        coming = self._coming
        ahead = coming is not None and coming.size > MAX_AHEAD and not coming.opened
        pause = self._rests or ahead or len(self._turns) > MAX_PIPELINE
        if pause is self._paused or self._lost or self.transport.is_closing():
            return
        self._paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether the caller takes what is written."""
        return self._resumed is None and not self._lost

    def reply(self, exchange: Exchange, status: int, headers: Headers, body: bytes) -> None:
        if not self._turns or self._turns[0] is not exchange:
            return
        _say_close(exchange, headers)
        data = answer(status, headers, b"" if exchange.method == "HEAD" else body)
        if self._resumed is None:
            self.transport.write(data)
            self._next(exchange)
        else:
            self._late = data  # until it reads, nothing more is read from it either

    def begin(self, exchange: Exchange, status: int, headers: Headers) -> None:
        if self._turns and self._turns[0] is exchange:
            if exchange.streams:
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                exchange.keep_alive = False
            _say_close(exchange, headers)
            self.transport.write(answer(status, headers))

    def write(self, exchange: Exchange, data: bytes) -> None:
        if data and self._turns and self._turns[0] is exchange and exchange.method != "HEAD":
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if exchange.streams else data)

    def end(self, exchange: Exchange) -> None:
        if self._turns and self._turns[0] is exchange:
            if exchange.streams and exchange.method != "HEAD":
                self.transport.write(b"0\r\n\r\n")
            self._next(exchange)

    async def drained(self) -> None:
        if self._resumed is not None:
            await asyncio.shield(self._resumed)

    def abort(self) -> None:
        self.transport.abort()

    # -- offers to upgrade ---------------------------------------------------------------------------------------------

    def upgrade(self, rest: bytes) -> bool:
        """Hand the connection over to a websocket if the request and its path allow it. See `Receiver`."""
        exchange = self._coming
        assert exchange is not None
        if self._turns[0] is not exchange or exchange.headers.get(b"upgrade", b"").lower() != b"websocket":
            return False
        exchange.upgrades = True
        self._open(exchange)
        route = exchange.route
        if not exchange.wanted or route is None or route.socket is None:
            return False
        try:
            protocol = handshake(self._requests.head, route.most)
            websocket = WebSocket(self.app, self.transport, protocol, exchange.number, query_of(exchange.target))
            websocket.headers, websocket.may_change = exchange.headers, self.app.may_change(exchange)
            session = route.socket(websocket)
        except Exception as error:
            exchange.wanted = False
            self.app.fail(exchange, error)
            return False
        self.app.leave(exchange)
        self.app.connections.leave(self)
        self._lost, self._coming = True, None
        self._turns.clear()
        self._requests.close()
        websocket.begin(session, rest)
        return True

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _refuse(self, error: ReflexError) -> None:
        """Answer with an error and close. Earlier requests are answered first."""
        self._refusing = True
        last = self._turns[-1] if self._turns else None
        if last is not None:
            last.keep_alive = False
            if not last.whole:
                last.whole, last.broken = True, error
            return
        if self._coming is None or self._coming.whole:  # else it has its answer
            request_id = secrets.token_hex(8)
            told = self.app.form.refuse(error, request_id, False)
            headers = [
                (b"content-type", told.content_type),
                *told.headers,
                *retry_headers(error),
                (b"x-request-id", request_id.encode()),
                (b"content-length", b"%d" % len(told.body)),
                CLOSE,
            ]
            self.transport.write(answer(told.status, headers, told.body))
        self.transport.close()


def _say_close(exchange: Exchange, headers: Headers) -> None:
    """An answer says it if the connection ends with it."""
    if CLOSE in headers:
        exchange.keep_alive = False
    elif not exchange.keep_alive:
        headers.append(CLOSE)
