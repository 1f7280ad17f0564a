"""HTTP/1.1 on a connection. httptools parses; this module has the order of requests and answers, and their limits.

- The application gets one request at a time; pipelined requests behind it wait for their turn.
- Invalid HTTP is answered in the application's own form, after the answers that are still due.
- The head of a request is limited in bytes. `Connections` limits the time for head and body, and the number of
  connections.
- What comes on all connections in one turn of the loop is read together, each step for all of them (`App.read`).
- A request's age counts from when it reached this machine; a busy process reads it later.
- A caller that sends a whole request and then closes its sending side still gets an answer. If the request waits in a
  queue, this counts as a disconnect, and the answer says so: the two look the same on the wire.
- A request for a websocket hands the connection over to `WebSocket`, if the path has one. Any other upgrade is declined
  by answering in HTTP/1.1, body included.
"""

from __future__ import annotations

import asyncio
import http
import os
import secrets
import time
from collections import deque
from email.utils import formatdate
from functools import lru_cache, partial
from typing import Final, cast
from urllib.parse import unquote

import httptools

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.app import App
from reflex_runtime.web.arrival import arrived, file_of
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.connections import ANSWERED, BODY, HEAD, IDLE, SLOW
from reflex_runtime.web.errors import BodyTooLarge, CallerLeft, ClientError, Overloaded
from reflex_runtime.web.exchange import CLOSE, Exchange, retry_headers
from reflex_runtime.web.form import Headers
from reflex_runtime.web.websocket import WebSocket, handshake, query_of

MAX_HEAD: Final = 64 * 1024  # bytes
MAX_PIPELINE: Final = 16  # requests waiting behind another on their connection; with more of them it is not read
MAX_AHEAD: Final = 64 * 1024  # bytes of a body whose turn has not come; with more the connection is not read
LARGE_BODY: Final = 64 * 1024  # bytes; connections with a larger body are read in turns
AT_ONCE: Final = 16 * 1024  # bytes that are read when they come: less waits for the end of the loop's turn
_FRAMING: Final = (b"content-length", b"transfer-encoding")
_PHRASES: Final = {status.value: status.phrase for status in http.HTTPStatus} | {499: "Client Closed Request"}
_STATUS: Final = {code: f"HTTP/1.1 {code} {phrase}\r\n".encode() for code, phrase in _PHRASES.items()}


class HttpConnection(asyncio.Protocol):
    """One connection. phase: see `Connections`. heard: when its last byte came, by the loop's clock."""

    transport: asyncio.Transport

    def __init__(self, app: App) -> None:
        self.app = app
        self.phase = ANSWERED
        self.heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._parser = _parser_for(self)
        self._turns: deque[Exchange] = deque()  # unanswered, with their head; the first is being answered
        self._coming: Exchange | None = None  # the last whose head has come
        self._resumed: asyncio.Future[None] | None = None  # set while the caller does not read
        self._late = b""  # the answer of the first, if it came while the caller did not read
        self._in_head = self._skip_head = self._refusing = self._ended = self._lost = False
        self._rests = self._paused = False
        self._head = 0
        self._unread = b""  # what has come and is not parsed; `_seen`: when it came
        self._arrived = self._seen = 0.0
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()

    # -- the transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) and len(peer) > 1 else None
        self._file = file_of(transport)
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
        self._arrived = 0.0
        error = self._parse(data)
        if self._lost:  # it is a websocket now
            return False
        if error is not None:
            self._refuse(error)
        elif self._in_head:  # what came with its beginning is not counted: it may end another
            self._head = 0 if self._head < 0 else self._head + len(data)
            if self._head > MAX_HEAD:
                self._refuse(ClientError(f"the head of the request has over {MAX_HEAD} bytes"))
        return True

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
        del self._parser  # breaks the reference cycle of the two

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
        unsent = self._lost or self.transport.get_write_buffer_size() or self._in_head or self._unread
        if unsent or asked[:1] != [exchange] or not all(e.whole or e.upgrades for e in asked):
            return None
        parts = [_as_sent(exchange, body), *(_as_sent(e, b"".join(e.body)) for e in asked[1:])]
        file = os.dup(self._file)
        self.app.leave(exchange)
        self.app.connections.leave(self)
        self._lost, self._coming = True, None
        self._turns.clear()
        del self._parser  # breaks the reference cycle of the two
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
            phase = HEAD if self._in_head else IDLE
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
            self._take(exchange, part)
        if exchange.wanted and not exchange.whole and exchange.headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take(self, exchange: Exchange, part: bytes) -> None:
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
        data = self._head_of(exchange, status, headers, b"" if exchange.method == "HEAD" else body)
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
            self.transport.write(self._head_of(exchange, status, headers))

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

    @staticmethod
    def _head_of(exchange: Exchange, status: int, headers: Headers, body: bytes = b"") -> bytes:
        """The head of an answer, and its body behind it."""
        if CLOSE in headers:
            exchange.keep_alive = False
        elif not exchange.keep_alive:
            headers.append(CLOSE)
        lines = [b"%b: %b\r\n" % header for header in headers]
        return b"".join([_STATUS[status], _date(), *lines, b"\r\n", body])

    # -- the parser ----------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> ClientError | None:
        """Feed the parser; returns an error in the data, or None."""
        while data:
            try:
                self._parser.feed_data(data)
                return None
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._upgrade(data):
                    return None
                if not self._decline_upgrade():
                    return ClientError("the request is not framed as its headers say")
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ClientError):  # one of our own callbacks raised it
                    return error.__context__
                in_body = self._coming is not None and not self._coming.whole and not self._in_head
                return ClientError(
                    "the body broke off: it is not framed as its headers say" if in_body else "this is not HTTP/1.1"
                )
        return None

    def on_message_begin(self) -> None:
        """httptools: a request begins."""
        if not self._skip_head:
            self._in_head, self._head = True, -1
            self._url, self._headers = b"", []
            if not self._arrived:
                self._arrived = min(self._seen, arrived(self._file))

    def on_url(self, url: bytes) -> None:
        """httptools: a part of its target."""
        if not self._skip_head:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header."""
        if not self._skip_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """httptools: its head has come."""
        if self._skip_head:
            return
        self._in_head = False
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ClientError(f"HTTP/{version} is not spoken here, HTTP/1.1 is")
        headers = dict(self._headers)
        if b"host" not in headers or len(headers) < len(self._headers):
            hosts = sum(name == b"host" for name, _ in self._headers)
            if hosts > 1 or (not hosts and version == "1.1"):
                raise ClientError(f"the request has {hosts} Host headers, HTTP/1.1 wants one")
        self._coming = Exchange(
            self.app,
            self,
            self._parser.get_method().decode("ascii"),
            _path_of(self._url),
            headers,
            self._client,
            self._arrived,
            version == "1.1" and self._parser.should_keep_alive(),
            version == "1.1",
        )
        self._coming.target = self._url
        self._turns.append(self._coming)

    def on_body(self, data: bytes) -> None:
        """httptools: a part of its body."""
        exchange = self._coming
        assert exchange is not None
        if exchange.opened:
            self._take(exchange, data)
        else:
            exchange.body.append(data)
            exchange.size += len(data)

    def on_message_complete(self) -> None:
        """httptools: all of it has come."""
        if self._coming is not None and not self._parser.should_upgrade():  # else its body is still to come
            self._coming.whole = True

    # -- offers to upgrade ---------------------------------------------------------------------------------------------

    def _upgrade(self, rest: bytes) -> bool:
        """Hand the connection over to a websocket if the request and its path allow it. rest: the bytes after the
        request."""
        exchange = self._coming
        assert exchange is not None
        if self._turns[0] is not exchange or exchange.headers.get(b"upgrade", b"").lower() != b"websocket":
            return False
        exchange.upgrades = True
        self._open(exchange)
        route = exchange.route
        if not exchange.wanted or route is None or route.socket is None:
            return False
        head = b"".join(b"%s: %s\r\n" % header for header in self._headers)
        start = b"%s %s HTTP/%s\r\n" % (exchange.method.encode(), self._url, self._parser.get_http_version().encode())
        try:
            protocol = handshake(start + head + b"\r\n", route.most)
            websocket = WebSocket(self.app, self.transport, protocol, exchange.number, query_of(self._url))
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
        del self._parser  # breaks the reference cycle of the two
        websocket.begin(session, rest)
        return True

    def _decline_upgrade(self) -> bool:
        """Ignore the upgrade: a new parser gets the framing and then reads the body. False if that is not possible."""
        framing = [(name, value) for name, value in self._headers if name in _FRAMING]
        self._parser = _parser_for(self)
        self._skip_head = True
        head = b"".join(b"%s: %s\r\n" % pair for pair in framing)
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + (head or b"content-length: 0\r\n") + b"\r\n")
        except httptools.HttpParserError:
            return False
        finally:
            self._skip_head = False
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
            lines = [b"%s: %s\r\n" % header for header in headers]
            self.transport.write(b"".join([_STATUS[told.status], _date(), *lines, b"\r\n", told.body]))
        self.transport.close()


def _parser_for(connection: HttpConnection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what is pipelined behind the last is not read
    return parser


def _as_sent(exchange: Exchange, body: bytes) -> bytes:
    """The bytes of a request, as another process can read them."""
    version = b"1.1" if exchange.streams else b"1.0"
    lines = [b"%s %s HTTP/%s\r\n" % (exchange.method.encode(), exchange.target, version)]
    for name, value in exchange.headers.items():
        if name not in _FRAMING and name != b"expect":
            lines.append(b"%s: %s\r\n" % (name, value))
    if body or exchange.method == "POST":
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body])


@lru_cache(maxsize=64)
def _path_of(target: bytes) -> str:
    """The path of a request's target, decoded."""
    return unquote(httptools.parse_url(target).path.decode("ascii"))


@lru_cache(maxsize=1)
def _date_at(second: int) -> bytes:
    return b"date: %s\r\n" % formatdate(second, usegmt=True).encode()


def _date() -> bytes:
    """The header that says when an answer was made."""
    return _date_at(int(time.time()))
