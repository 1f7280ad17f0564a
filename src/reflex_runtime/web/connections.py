"""uvicorn's protocols with the limits that they lack: time for a head and a body, sizes, and the number of connections.

A caller that leaves cancels the coroutine that answers it, so that nothing is computed for it. What uvicorn itself
refuses is answered in the application's form. One read may bring ten thousand small requests or frames: they are parsed
in slices, between which the loop serves others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Generator
from functools import cache, partial
from itertools import count
from math import inf
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.web.access import UNIX
from reflex_runtime.web.app import App, ConnectionLimits
from reflex_runtime.web.errors import CallerLeft, ClientError, Headers, Overloaded, TooSlow
from reflex_runtime.web.request import CANCELS, CLOSE, DROPPED, GOING_AWAY, RESPOND, TRY_LATER, Seldom

log = logging.getLogger("reflex.server")

HEAD_BYTES: Final = 64 * 1024  # of a request's head
UNREAD: Final = 180.0  # seconds that an answer may wait for its client to read
RESERVE: Final = 64  # file descriptors left to models, recordings and the like
LEAST: Final = 16  # connections, even with very few descriptors
BEHIND: Final = 16  # requests that wait behind the one being answered; then the connection is not read
AHEAD: Final = 1  # messages of a websocket that wait behind the one being answered; then it is not read
SLICE: Final = 16 * 1024  # bytes of requests that are parsed in one turn of the loop, if they begin or end many
MANY: Final = 256  # parts of bodies, and beginnings of requests
FRAMES: Final = 64  # of a websocket, in one turn
HEAD_S: Final = 10.0  # seconds at most for the head of a request
REFUSED_S: Final = 1.0  # that a connection too many has to send its request: an answer before it may be lost
IDLE, HEAD, BODY, SLOW, ANSWERED, REFUSED = "idle", "head", "body", "slow", "answered", "refused"

_NUMBERS: Final = count(1)
_LATE: Final = Seldom()
_FULL: Final = Seldom()


class _Timed:
    """One timer for a connection: it is set again only when it fires early, so that a request costs no timer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: ConnectionLimits, late: Callable[[TooSlow], None]
    ) -> None:
        """late: called when a phase has taken too long."""
        self._loop, self._late = loop, late
        self._limits = {IDLE: limits.idle, HEAD: limits.head, BODY: limits.body, SLOW: UNREAD, ANSWERED: inf}
        self._limits[REFUSED] = REFUSED_S
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf
        self.phase = ANSWERED

    def enter(self, phase: str) -> None:
        """Begin a phase, or the same one again; its time runs from now on."""
        self.phase = phase
        seconds = self._limits[phase]
        self._due = inf if seconds == inf else self._loop.time() + seconds
        if self._due < inf and (self._timer is None or self._due < self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._due, self._look)

    def cancel(self) -> None:
        self._due = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._due == inf:
            return
        if self._loop.time() < self._due - 0.005:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        seconds = self._limits[self.phase]
        if self.phase not in (IDLE, REFUSED) and _LATE.first():
            told = "a connection was too slow (%s, %g s) and is closed (repeats are not logged)"
            log.warning(told, self.phase, seconds)
        self._late(TooSlow(f"the {self.phase} of the request did not come within {seconds:g} s"))


class _PipelineFlow(FlowControl):
    """Reads on while little waits behind the request that is answered, to notice when the caller leaves. unparsed: what
    was read, and waits for its turn."""

    def __init__(self, transport: asyncio.Transport, behind: deque[Any]) -> None:
        super().__init__(transport)
        self._behind, self.unparsed = behind, b""

    def resume_reading(self) -> None:
        if self.unparsed or self.full:
            self.pause_reading()
        else:
            super().resume_reading()

    @property
    def full(self) -> bool:
        if not self._behind:
            return False
        return len(self._behind) > BEHIND or sum(len(cycle.body) for cycle, _ in self._behind) > HEAD_BYTES


class _OfApp:
    """What both protocols have of ours."""

    reflex: App  # uvicorn's `app`
    client: tuple[str, int] | None

    def _number(self) -> None:
        """A number in place of the port: ports are reused."""
        self.client = (self.client[0] if self.client else UNIX, next(_NUMBERS))


class HttpConnection(_OfApp, HttpToolsProtocol):
    """One HTTP connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reflex = cast(App, self.app)
        self._task: asyncio.Task[None] | None = None
        self._running: RequestResponseCycle | None = None  # the one that is answered; `cycle` is the last that came
        self._time = _Timed(self.loop, self.reflex.limits, self._slow)
        self._head_bytes = self._parts = 0
        self._in_head = self._declined = self._broken = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _PipelineFlow = _PipelineFlow(transport, self.pipeline)
        self._number()
        self.reflex.shares.opened(self.client)
        over = self._over()
        self._time.enter(IDLE if over <= 0 else REFUSED)
        if over > RESERVE // 2:  # they hold file descriptors, too
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.reflex.shares.closed(self.client)
        self._time.cancel()
        self.pipeline.clear()
        self.flow.unparsed = b""
        self.reflex.left(len(self.connections))
        self._cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The caller has closed its side, which looks like leaving: what needs no waiting is answered, and no more."""
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

    def _over(self) -> int:
        """So many connections too many."""
        return max(len(self.connections) - self.reflex.limits.most, self.reflex.shares.over(self.client))

    def _refuse(self) -> None:
        """There are too many connections, unless others have left meanwhile."""
        if self._over() <= 0:
            self._time.enter(IDLE)
            return
        if self.reflex.shares.over(self.client) > 0:
            self._end(self.reflex.shares.refused(self.client))
            return
        if _FULL.first():
            log.warning("%d connections are open (--max-connections): new ones are refused", self.reflex.limits.most)
        full = f"{self.reflex.limits.most} connections are open, as many as there may be"
        self._end(Overloaded(full, retry_after=1.0))

    def data_received(self, data: bytes) -> None:
        if self._time.phase == REFUSED:
            self._refuse()
        self.flow.unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse what was read slice by slice, as long as few requests and parts are in it; the rest in another turn."""
        flow, closing, at, self._parts = self.flow, self.transport.is_closing, 0, 0
        data, flow.unparsed = flow.unparsed, b""
        while at < len(data) and not (self._broken or closing() or self._parts > MANY or (self.pipeline and flow.full)):
            part = data if len(data) <= SLICE else data[at : at + SLICE]
            at += len(part)
            if self._in_head or self._time.phase == IDLE:
                self._head_bytes += len(part)
            while part and not (self._broken or closing()):
                part = self._feed(part, data[at:])
            if self._in_head and self._head_bytes > HEAD_BYTES:
                self._end(ClientError(f"the head of the request has over {HEAD_BYTES} bytes"))
        if at < len(data) and not (self._broken or closing()):
            flow.unparsed = data[at:]
            if not flow.full:  # else when an answer is complete
                self.loop.call_soon(self._parse)
        if self.pipeline or flow.unparsed:
            flow.resume_reading()
        self._take_time()

    def _feed(self, data: bytes, behind: bytes) -> bytes:
        """Parse what has come. Returns what is to be parsed next: a request whose offer to upgrade is declined. behind:
        what has come behind it; a websocket takes it over."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                if rest := data[upgrade.args[0] :] + behind:
                    self.transport.get_protocol().data_received(rest)  # type: ignore[attr-defined]
                return b""
            return self._without_offer() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            cause = error.__context__
            broken = cause if isinstance(cause, ClientError) else ClientError(f"this is not HTTP/1.1: {cause or error}")
            self._end(broken)
        return b""

    def _without_offer(self) -> bytes:
        """The head that has just come, without its offer to upgrade, for a new parser."""
        self.parser, method = httptools.HttpRequestParser(self), self.parser.get_method()
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(part for part in value.split(b",") if part.strip().lower() != b"upgrade")
            if name != b"upgrade" and value:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._parts += 1

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._parts += 1

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        version, hosts, size = self.parser.get_http_version(), 0, len(self.url)
        for name, value in self.headers:
            hosts += name == b"host"
            size += len(name) + len(value)
        if size > HEAD_BYTES:
            raise ClientError(f"the head of the request has over {HEAD_BYTES} bytes")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            raise ClientError("HTTP/1.0 has no Transfer-Encoding")
        if version not in ("1.0", "1.1"):
            raise ClientError(f"HTTP/{version} is not spoken here, HTTP/1.1 is")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise ClientError(f"the request has {hosts} Host headers, HTTP/1.1 wants one")
        if self.parser.get_method() == b"CONNECT":
            raise ClientError("CONNECT is not served: this is no proxy")
        if self.url[:1] != b"/" and httptools.parse_url(self.url).path is None:  # http://host, without a slash
            raise ClientError("the target of the request has no path")
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._declined = True  # it comes again without the offer
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
        """Write a whole answer at once, in half of uvicorn's time for its two messages. False where they must do."""
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
        if self.flow.unparsed:
            self.loop.call_soon(self._parse)
        self.flow.resume_reading()
        self._take_time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time.enter(SLOW)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_time()

    def handle_websocket_upgrade(self) -> None:
        self._broken = True  # for HTTP: the rest is the websocket's
        self._time.cancel()
        super().handle_websocket_upgrade()

    def _slow(self, error: TooSlow) -> None:
        """The connection took too long."""
        if self._time.phase == REFUSED:
            self._refuse()
        elif self._time.phase == IDLE:
            self.transport.close()
        elif self._time.phase == SLOW:
            self.cycle.disconnected = True
            self.transport.abort()
        elif self._time.phase == BODY and self.cycle.response_complete:
            self.transport.close()
        elif self._time.phase == BODY and not self.cycle.response_started:
            self._cancel(error)  # its coroutine answers, and closes behind it
            self.cycle.keep_alive = False
        else:
            self._end(error)

    def _cancel(self, error: ReflexError | None = None) -> None:
        """End what is being answered, with this error, or because its caller has left."""
        running = self._running
        if running is not None and not running.response_complete and self._task is not None:
            self._task.cancel(error or CallerLeft("the caller left"))

    def _end(self, error: ReflexError) -> None:
        """What comes is no request: answer that, or what came before it, and close."""
        if self.transport.is_closing() or self._broken:
            return
        self._broken = True
        running = self._running
        if running is None or running.response_complete:
            self.transport.write(self.reflex.refuse_bytes(error))
            self.transport.close()
            return
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # the broken one itself; its turn will not come
        (self.pipeline[0][0] if self.pipeline else running).keep_alive = False
        if running.more_body:
            broke_off = ClientError(f"the body broke off: {error.message}")
            self.loop.call_soon(self._cancel, broke_off)  # its coroutine may not have begun

    def _take_time(self) -> None:
        cycle = self.cycle
        if self._broken or self.flow is None or self.transport.is_closing() or self.flow.write_paused:
            return
        if self.flow.unparsed:
            phase = ANSWERED  # it waits for us
        elif self._in_head:
            phase = HEAD
        elif cycle is None or (cycle.response_complete and not cycle.more_body):
            phase = IDLE
        else:
            phase = BODY if cycle.more_body else ANSWERED
        if phase != self._time.phase or phase == IDLE:
            self._time.enter(phase)


class SocketConnection(_OfApp, WebSocketsSansIOProtocol):
    """One websocket: it is read while a message is answered, to notice that the peer leaves. held: bytes that have come
    of messages that the application has not taken, see `Bodies`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reflex = cast(App, self.app)
        self._app_task: asyncio.Task[Any] | None = None
        self._idles = False  # the application waits for a message
        self.held = self._frames = 0  # frames: that may be parsed before others have their turn
        self._next: asyncio.Handle | None = None
        reader = self.conn.reader
        self._at_eof, reader.at_eof = reader.at_eof, self._at_frame  # type: ignore[method-assign]
        self._exact, reader.read_exact = reader.read_exact, self._exactly  # type: ignore[method-assign]
        self._most, self.conn.max_message_size = self.config.ws_max_size, None  # a larger one does not end the socket
        self._dropped = 0  # bytes of the message that comes, which is larger
        self._time = _Timed(self.loop, self.reflex.limits, self._idle)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._number()
        self._time.enter(IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.reflex.shares.closed(self.client)  # the connection of HTTP that it was opened it
        self._time.cancel()
        self.conn.reader.discard()  # its parser is in a reference cycle, and what has come with it
        self.frames.clear()
        while self.queue.qsize() > 1:
            self.queue.get_nowait()
        self.reflex.bodies.release(self)
        self.reflex.left(len(self.connections))
        if self._app_task is not None and not self._app_task.done():
            self._app_task.cancel(CallerLeft("the caller left"))

    def data_received(self, data: bytes) -> None:
        self._time.enter(IDLE)
        try:
            self.reflex.bodies.take(self, len(data))
        except Overloaded as error:
            self._leave(error.message[:100], TRY_LATER)
            return
        self._parse(data)

    def _parse(self, data: bytes = b"") -> None:
        """The next frames of what has come."""
        self._frames, self._next = FRAMES, None
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            self._refuse(self.conn.handshake_exc)
        self._release()
        self._pace()

    def _at_frame(self) -> Generator[None, None, bool]:
        """In the place of the reader's `at_eof`, with which the parser begins a frame: it may have to wait."""
        while not self._frames:
            yield
        self._frames -= 1
        return (yield from self._at_eof())

    def _exactly(self, n: int) -> Generator[None, None, bytearray]:
        """In the place of the reader's `read_exact`: what is larger than a message may be is dropped as it comes."""
        if n <= self._most:
            return (yield from self._exact(n))
        buffer, self._dropped = self.conn.reader.buffer, self._dropped + n
        while n:
            gone = min(n, len(buffer))
            n -= gone
            del buffer[:gone]
            if n:
                if self.conn.reader.eof:
                    raise EOFError
                yield
        return bytearray()

    def _pace(self) -> None:
        """Read on, unless messages wait for the application, or frames for their turn."""
        full = self.queue.qsize() > AHEAD
        waits = not self._frames and bool(self.conn.reader.buffer)
        if waits and not full and self._next is None:
            self._next = self.loop.call_soon(self._parse)
        if self.read_paused != (full or waits):
            self.read_paused = not self.read_paused
            (self.transport.pause_reading if self.read_paused else self.transport.resume_reading)()

    def handle_connect(self, event: Any) -> None:
        if self.conn.accept(event).status_code != 101:
            self._refuse(self.conn.handshake_exc)
        else:
            super().handle_connect(event)

    def _refuse(self, why: Exception | None) -> None:
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.transport.write(self.reflex.refuse_bytes(ClientError(f"no websocket can be opened: {why}")))
        self.transport.close()

    def _release(self) -> None:
        """Release what has come, once all of it is whole and taken."""
        if self.held and not (any(self.frames) or self.conn.reader.buffer or self.queue.qsize()):
            self.reflex.bodies.release(self)

    def handle_cont(self, event: Any) -> None:
        """One buffer for all parts of a message: apart, those of one byte would have a hundred times their size."""
        whole: Any = self.frames[0]
        if self._dropped or len(whole) + len(event.data) > self._most:
            self._dropped += len(whole) + len(event.data)
            whole = b""
        elif not isinstance(whole, bytearray):
            whole = bytearray(whole)
        whole += b"" if self._dropped else event.data
        self.frames[0] = bytes(whole) if event.fin else whole
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        paused, self.read_paused = self.read_paused, True  # so that it is not paused for one message
        dropped, self._dropped = self._dropped, 0
        if dropped and not self.close_sent:
            self.frames = []
            empty: Any = {"type": "websocket.receive", "bytes": b"", DROPPED: dropped}
            self.queue.put_nowait(empty)
        else:
            super().send_receive_event_to_app()
        self.read_paused = paused

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
        self._time.enter(IDLE)
        try:
            message = await self.queue.get()
        finally:
            self._idles = False
        self._release()
        self._pace()
        return message

    async def run_asgi(self) -> None:
        self.scope["extensions"] = {**(self.scope.get("extensions") or {}), CANCELS: {}}
        self._app_task = asyncio.current_task()
        await super().run_asgi()

    async def send(self, message: Any) -> None:
        await super().send(message)
        self._time.enter(IDLE)

    def _idle(self, error: TooSlow) -> None:
        """Nothing has come or gone for long. A peer that waits for an answer, or for the first frame, is not idle."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._idles:
            self._leave("idle")
        else:
            self._time.enter(IDLE)


@cache
def most_connections(asked: int) -> int:
    """The setting, or fewer if the process has fewer file descriptors."""
    try:
        import resource

        allowed, taken = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return asked
    if allowed == resource.RLIM_INFINITY or asked <= allowed - taken - RESERVE:
        return asked
    most = max(LEAST, allowed - taken - RESERVE)
    log.warning("--max-connections=%d: the process may have %d open files, so it is %d", asked, allowed, most)
    return most
