"""uvicorn's protocols with the limits that they lack: time for a head and a body, sizes, and the number of connections.

When a caller leaves, the coroutine that answers it is cancelled, so that nothing is computed for it. Input that uvicorn
would refuse is answered in the application's form. One read may bring ten thousand small requests or frames: they are
parsed in slices, between which the loop serves other connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import count
from math import inf
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.access import UNIX
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import CallerLeft, ClientError, Headers, Overloaded, TooSlow
from reflex_runtime.web.request import CANCELS, CLOSE, GOING_AWAY, RESPOND, TRY_LATER, Seldom

log = logging.getLogger("reflex.server")

HEAD_BYTES: Final = 64 * 1024  # of a request's head, within a slice
SLOW_S: Final = 180.0  # for a client to read its answer
RESERVE: Final = 64  # file descriptors for other uses: models, recordings
LEAST: Final = 16  # connections, however few descriptors the process may have
BEHIND: Final = 16  # requests that may wait behind the one being answered; with more the connection is not read
AHEAD: Final = 1  # messages of a websocket that may wait likewise
SLICE: Final = 16 * 1024  # bytes of requests that are parsed at once
FRAMES: Final = 2048  # bytes of frames that are parsed at once: up to 300 frames, 2 ms
TURN_S: Final = 0.0005  # seconds of parsing in one turn of the loop, plus one slice
HEAD_S: Final = 10.0  # seconds at most for the head of a request
LINGER_S: Final = 1.0  # for a refused peer to finish sending: before that it may lose the answer or the close code
IDLE, HEAD, BODY, SLOW, ANSWERED, REFUSED = "idle", "head", "body", "slow", "answered", "refused"

_NUMBERS: Final = count(1)
_LATE: Final = Seldom()
_FULL: Final = Seldom()


class _Timer:
    """Calls `late` when a time has passed. Starting it again only moves the time: the loop's timer is set anew when it
    fires too early, so that most requests set none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self._loop, self._late = loop, late
        self._handle: asyncio.TimerHandle | None = None
        self._due = inf

    def start(self, seconds: float) -> None:
        """From now on; inf is never."""
        self._due = self._loop.time() + seconds
        if self._due < inf and (self._handle is None or self._due < self._handle.when()):
            self.cancel()
            self._handle = self._loop.call_at(self._due, self._look)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _look(self) -> None:
        self._handle = None
        if self._loop.time() >= self._due - 0.005:
            self._late()
        elif self._due < inf:
            self._handle = self._loop.call_at(self._due, self._look)


class _Connection:
    """The common part of both protocols: parsing in slices, and a unique number in place of the client's port, because
    ports are reused. unparsed: bytes that were read and are not parsed yet."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None
    reflex: App  # uvicorn's `app`
    unparsed = b""

    def _number(self) -> None:
        self.client = (self.client[0] if self.client else UNIX, next(_NUMBERS))

    def _parse(self) -> None:
        """Parse slice by slice for `TURN_S`; the rest in another turn of the loop, or when the application is free."""
        data, self.unparsed, at = self.unparsed, b"", 0
        until = time.monotonic() + TURN_S
        while at < len(data) and not self._full:
            if at and time.monotonic() >= until:
                self.loop.call_soon(self._parse)
                break
            at = self._feed(data, at)
        self.unparsed = data[at:]
        if not self.transport.is_closing():
            self._pace()

    @property
    def _full(self) -> bool:
        """Whether parsing waits for the application."""
        raise NotImplementedError

    def _feed(self, data: bytes, at: int) -> int:
        """Parse a slice that begins at `at`. Returns its end."""
        raise NotImplementedError

    def _pace(self) -> None:
        """Read on, unless bytes wait to be parsed or requests to be answered."""
        raise NotImplementedError


class _ReadFlow(FlowControl):
    """Reads on while a request is answered, to notice when the caller leaves, until too much waits behind it."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if self._connection.unparsed or self._connection._full:
            self.pause_reading()
        else:
            super().resume_reading()


class HttpConnection(_Connection, HttpToolsProtocol):
    """One HTTP connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reflex = cast(App, self.app)
        self._task: asyncio.Task[None] | None = None
        self._running: RequestResponseCycle | None = None  # the one that is answered; `cycle` is the newest
        limits, self._phase = self.reflex.limits, ANSWERED
        self._seconds = {IDLE: limits.idle, HEAD: limits.head, BODY: limits.body, SLOW: SLOW_S}
        self._seconds |= {ANSWERED: inf, REFUSED: LINGER_S}
        self._timer = _Timer(self.loop, self._late)
        self._head_bytes = 0
        self._in_head = self._declined = self._broken = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _ReadFlow = _ReadFlow(self)
        self._number()
        self.reflex.shares.opened(self.client)
        self._enter(IDLE)
        if refusal := self._refusal():
            self._enter(REFUSED)
            over = max(len(self.connections) - self.reflex.limits.most, self.reflex.shares.over(self.client))
            if over > RESERVE // 2:  # they hold file descriptors, too
                self._end(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.reflex.shares.closed(self.client)
        self._timer.cancel()
        self.pipeline.clear()
        self.unparsed = b""
        self.reflex.left(len(self.connections))
        self._cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The caller closed its sending side, perhaps because it leaves: only an answer that is ready is still sent."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        self.loop.call_soon(self._hang_up)
        return True

    def _hang_up(self) -> None:
        if not self.cycle.response_complete:
            self.cycle.disconnected = True
            self._cancel()
            self.transport.close()

    def _refusal(self) -> Overloaded | None:
        """The error while there are too many connections."""
        most, shares = self.reflex.limits.most, self.reflex.shares
        if shares.over(self.client) > 0:
            return shares.refused(self.client)
        if len(self.connections) <= most:
            return None
        if _FULL.first():
            log.warning("%d connections are open (--max-connections): new ones are refused", most)
        return Overloaded(f"{most} connections are open, the most that may be", retry_after=1.0)

    def data_received(self, data: bytes) -> None:
        if self._phase == REFUSED:
            self._late()
        self.unparsed += data
        self._parse()

    @property
    def _full(self) -> bool:
        waits = self.pipeline
        return bool(waits) and (len(waits) > BEHIND or sum(len(cycle.body) for cycle, _ in waits) > HIGH_WATER_LIMIT)

    def _feed(self, data: bytes, at: int) -> int:
        if self._broken or self.transport.is_closing():
            return len(data)
        part = data[at : at + SLICE]
        self._head_bytes += len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            at += upgrade.args[0]
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                if at < len(data):
                    self.transport.get_protocol().data_received(data[at:])  # type: ignore[attr-defined]
                return len(data)
            self._decline()
            return at
        except httptools.HttpParserError as error:
            self._end_broken(error)
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self._end(ClientError(f"the head of the request has over {HEAD_BYTES} bytes"))
        return at + len(part)

    def _decline(self) -> None:
        """Serve a request whose offer to upgrade is declined: a new parser gets its head without the offer."""
        self.parser, method = httptools.HttpRequestParser(self), self.parser.get_method()
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(part for part in value.split(b",") if part.strip().lower() != b"upgrade")
            if name != b"upgrade" and value:
                lines.append(b"%b: %b" % (name, value))
        try:
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        except httptools.HttpParserError as error:
            self._end_broken(error)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, SLICE

    def on_headers_complete(self) -> None:
        self._in_head = False
        version, hosts = self.parser.get_http_version(), [name for name, _ in self.headers].count(b"host")
        if self._head_bytes > HEAD_BYTES:
            raise ClientError(f"the head of the request has over {HEAD_BYTES} bytes")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            raise ClientError("HTTP/1.0 has no Transfer-Encoding")
        if version not in ("1.0", "1.1"):
            raise ClientError(f"HTTP/{version} is not supported, HTTP/1.1 is")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise ClientError(f"the request has {hosts} Host headers, it must have one")
        if self.parser.get_method() == b"CONNECT":
            raise ClientError("CONNECT is not served: this is no proxy")
        if self.url[:1] != b"/" and httptools.parse_url(self.url).path is None:  # http://host, without a slash
            raise ClientError("the target of the request has no path")
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._declined = True  # `_decline` parses it again without the offer
            return
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        parser = self.parser
        return parser.get_method() == b"GET" and parser.get_http_version() == "1.1" and super()._should_upgrade()

    def on_message_complete(self) -> None:
        if self._declined:
            self._declined = False
        else:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope["extensions"] = {CANCELS: {}, RESPOND: partial(self._respond, cycle)}  # type: ignore[dict-item]
        self._running = cycle
        task = self._task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _respond(self, cycle: RequestResponseCycle, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole answer at once, in half the time of uvicorn's two messages. False if those must be sent."""
        if not cycle.keep_alive or CLOSE in headers:
            cycle.keep_alive, headers = False, [*[header for header in headers if header != CLOSE], CLOSE]
        headers = cycle.default_headers + headers
        head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers])
        whole = head.count(b"\r") == head.count(b"\n") == len(headers) + 1
        if cycle.disconnected or self.flow.write_paused or not whole:
            return False
        cycle.response_started = cycle.response_complete = True
        self.transport.write(b"".join((head, b"\r\n", body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self.unparsed:
            self.loop.call_soon(self._parse)
        self.flow.resume_reading()
        self._take_time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._enter(SLOW)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_time()

    def handle_websocket_upgrade(self) -> None:
        self._broken = True  # for HTTP: the websocket reads the rest
        self._timer.cancel()
        super().handle_websocket_upgrade()

    def _late(self) -> None:
        """The phase of the connection takes too long, or a refused connection has sent something."""
        phase, seconds = self._phase, self._seconds[self._phase]
        if phase == REFUSED:
            if refusal := self._refusal():
                self._end(refusal)
            else:
                self._enter(IDLE)
            return
        if phase != IDLE and _LATE.first():
            line = "a connection was too slow (%s, %g s) and is closed (repeats are not logged)"
            log.warning(line, phase, seconds)
        error = TooSlow(f"the {phase} of the request did not come within {seconds:g} s")
        if phase == SLOW:
            self.transport.abort()
        elif phase == IDLE or (phase == BODY and self.cycle.response_complete):
            self.transport.close()
        elif phase == BODY and not self.cycle.response_started:
            self._cancel(error)  # its coroutine answers
            self.cycle.keep_alive = False
        else:
            self._end(error)

    def _cancel(self, error: ReflexError | None = None) -> None:
        """Cancel the running request with this error; by default its caller left."""
        running = self._running
        if running is not None and not running.response_complete and self._task is not None:
            self._task.cancel(error or CallerLeft("the caller left"))

    def _end_broken(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        self._end(cause if isinstance(cause, ClientError) else ClientError(f"this is not HTTP/1.1: {cause or error}"))

    def _end(self, error: ReflexError) -> None:
        """The input is no request: send the error, or first the answers to earlier requests, and close."""
        if self.transport.is_closing() or self._broken:
            return
        self._broken = True
        running = self._running
        if running is None or running.response_complete:
            self.transport.write(self.reflex.refuse_bytes(error))
            self.transport.close()
            return
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # the broken one
        (self.pipeline[0][0] if self.pipeline else running).keep_alive = False
        if running.more_body:
            broke_off = ClientError(f"the body broke off: {error.message}")
            self.loop.call_soon(self._cancel, broke_off)  # its coroutine may not have begun

    def _pace(self) -> None:
        cycle = self.cycle
        if self._broken:
            return
        if self.unparsed or cycle is None or cycle.response_complete or len(cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # else its coroutine takes the body first
        self._take_time()

    def _take_time(self) -> None:
        cycle = self.cycle
        if self._broken or self.transport.is_closing() or self.flow.write_paused:
            return
        if self.unparsed:
            phase = ANSWERED  # the rest waits for its turn
        elif self._in_head:
            phase = HEAD
        elif cycle is None or (cycle.response_complete and not cycle.more_body):
            phase = IDLE
        else:
            phase = BODY if cycle.more_body else ANSWERED
        if phase != self._phase or phase == IDLE:
            self._enter(phase)

    def _enter(self, phase: str) -> None:
        """Begin a phase; its time runs from now on."""
        self._phase = phase
        self._timer.start(self._seconds[phase])


class SocketConnection(_Connection, WebSocketsSansIOProtocol):
    """One websocket. It is read while a message is answered, to notice that the peer leaves. held: bytes of messages
    that the application has not taken, which `Bodies` counts."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reflex = cast(App, self.app)
        self._task: asyncio.Task[Any] | None = None
        self._idles = False  # the application waits for a message
        self.held = 0
        self._timer = _Timer(self.loop, self._late)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._number()
        self._timer.start(self.reflex.limits.idle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.reflex.shares.closed(self.client)  # opened by its HTTP connection
        self._timer.cancel()
        self.conn.reader.discard()  # the parser is in a reference cycle, with these bytes
        self.frames.clear()
        self.unparsed = b""
        while self.queue.qsize() > 1:
            self.queue.get_nowait()
        self.reflex.bodies.release(self)
        self.reflex.left(len(self.connections))
        if self._task is not None and not self._task.done():
            self._task.cancel(CallerLeft("the caller left"))

    def data_received(self, data: bytes) -> None:
        self._timer.start(self.reflex.limits.idle)
        try:
            self.reflex.bodies.take(self, 0 if self.close_sent else len(data))
        except Overloaded as error:
            self._leave(error.message[:100], TRY_LATER)
            return
        self.unparsed += data
        self._parse()

    @property
    def _full(self) -> bool:
        return self.queue.qsize() > AHEAD and not self.close_sent

    def _feed(self, data: bytes, at: int) -> int:
        if self.transport.is_closing() or self.conn.parser_exc is not None:
            return len(data)
        super().data_received(data[at : at + FRAMES])
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            self._refuse(self.conn.handshake_exc)
        return at + FRAMES

    def _pace(self) -> None:
        waits = bool(self.unparsed) or self._full
        if self.read_paused != waits:
            self.read_paused = waits
            (self.transport.pause_reading if waits else self.transport.resume_reading)()
        if self.held and not (any(self.frames) or self.conn.reader.buffer or self.queue.qsize() or self.unparsed):
            self.reflex.bodies.release(self)  # all messages are whole and taken

    def handle_connect(self, event: Any) -> None:
        if self.conn.accept(event).status_code != 101:
            self._refuse(self.conn.handshake_exc)
        else:
            super().handle_connect(event)

    def _refuse(self, why: Exception | None) -> None:
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.transport.write(self.reflex.refuse_bytes(ClientError(f"no websocket can be opened: {why}")))
        self.transport.close()

    def handle_cont(self, event: Any) -> None:
        """Join the parts of a message now: kept apart, parts of one byte would take a hundred times their size."""
        whole: Any = self.frames[0] if isinstance(self.frames[0], bytearray) else bytearray(self.frames[0])
        whole += event.data
        self.frames[0] = bytes(whole) if event.fin else whole
        if event.fin:
            self.send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """The peer broke the protocol, or its message is too large. Closed at once, it might not get the close code."""
        if not self.close_sent:
            self.close_sent = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def shutdown(self) -> None:
        self._leave("the server is shutting down")

    def _leave(self, why: str, code: int = GOING_AWAY) -> None:
        if self.handshake_complete and not self.close_sent:
            self.stop_keepalive()
            self.close_sent = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
            self.conn.send_close(code, why)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        else:
            super().shutdown()

    async def receive(self) -> Any:
        self._idles = True
        self._timer.start(self.reflex.limits.idle)
        try:
            message = await self.queue.get()
        finally:
            self._idles = False
        self._parse()
        return message

    async def run_asgi(self) -> None:
        self.scope["extensions"] = {**(self.scope.get("extensions") or {}), CANCELS: {}}
        self._task = asyncio.current_task()
        await super().run_asgi()

    def _late(self) -> None:
        """Nothing came for `limits.idle` seconds. A peer that waits for an answer or the first frame is not idle."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._idles:
            self._leave("idle")
        else:
            self._timer.start(self.reflex.limits.idle)


@cache
def most_connections(asked: int) -> int:
    """As many connections as asked, or fewer if the process may not open as many files. Raises their soft limit."""
    try:
        import resource

        allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = asked + len(os.listdir("/dev/fd")) + RESERVE
        if allowed != resource.RLIM_INFINITY and allowed < needed:
            raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            with suppress(OSError, ValueError):  # the system may allow fewer than the hard limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
                allowed = raised
    except (ImportError, OSError):
        return asked
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return asked
    most = max(LEAST, asked - (needed - allowed))
    log.warning("--max-connections=%d: the process may have %d open files, so it is %d", asked, allowed, most)
    return most
