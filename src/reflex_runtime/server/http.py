"""HTTP/1.1 on a connection: uvicorn's httptools protocol, and what it leaves to others.

- What is not HTTP gets an answer in the application's own words, and never cuts off an answer still to come.
- The head of a request is bounded in bytes; how long it and the body may take, and how many connections there are, is
  for `Connections`.
- The application learns when a request reached this machine, which is earlier than when it was read where the process
  had no time for it (ARRIVED).
- A caller that has sent a whole request and closes its sending side still gets an answer. For one that waits in the
  queue this is hanging up, and the answer says so: the two cannot be told apart on the wire.
- An offer to upgrade (h2c, websocket) is declined by answering in HTTP/1.1, body included.
- A request that came whole is handed over as it is and its answer written at once: a task, its events and the two
  messages of ASGI cost as much as the rest of a small request. All others go the way of ASGI.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import time
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.server.bodies import BROKEN
from reflex_runtime.server.connections import Phase
from reflex_runtime.server.errors import ClientError, Overloaded
from reflex_runtime.server.exchange import ARRIVED, CLOSE, LEFT, Headers

MAX_HEAD = 64 * 1024
MAX_PIPELINE = 16  # requests waiting behind another on their connection; with more of them it is not read from
_ASGI = {"version": "3.0", "spec_version": "2.3"}
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_LAST_DATA = 52  # where tcp_info has tcpi_last_data_recv, in milliseconds
_KERNEL_TICK = 0.011  # seconds; the kernel counts in ticks of up to 10 ms
_FRAMING = (b"content-length", b"transfer-encoding")


class Cycle(RequestResponseCycle):
    """A request and its answer in the messages of ASGI."""

    access_log = False

    def __init__(self, connection: HttpProtocol, scope: Any, keep_alive: bool) -> None:
        self.scope, self.keep_alive = scope, keep_alive
        self.transport, self.flow, self.logger = connection.transport, connection.flow, connection.logger
        self.default_headers = connection.server_state.default_headers
        self.message_event = asyncio.Event()
        self.on_response = connection.on_response_complete
        self.waiting_for_100_continue = connection.expect_100_continue
        self.body = bytearray()
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False
        self.chunked_encoding, self.expected_content_length = None, 0


class HttpProtocol(HttpToolsProtocol):
    """One connection. heard: when its last byte came, by the loop's clock."""

    app: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = self._skip_head = self._refusing = self._parsing = self._ended = False
        self._head = 0
        self._arrived = self.heard = 0.0
        self._file = _file_of(transport)
        self._asking: RequestResponseCycle | None = None  # the request the app has; later ones wait in the pipeline
        self._come: RequestResponseCycle | None = None  # its head has come; whether all of it has shows after parsing

        self.phase = Phase.ANSWERED
        try:
            self.app.connections.enter(self, self.loop)
        except Overloaded as error:
            self._refuse(error)

    def data_received(self, data: bytes) -> None:
        if self._refusing:
            return
        self._arrived = 0.0
        self._parsing = True
        error = self._parse(data)
        self._parsing = False
        if error is not None:
            self._refuse(error)
        elif self._in_head:  # what came with its beginning is not counted: it may end another
            self._head = 0 if self._head < 0 else self._head + len(data)
            if self._head > MAX_HEAD:
                self._refuse(ClientError(f"the head of the request has over {MAX_HEAD} bytes"))
        self._start()
        self._take_time()

    def _parse(self, data: bytes) -> ClientError | None:
        """Feed the parser; what is wrong with the data, if something is."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return None
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                if not self._decline_upgrade():
                    return ClientError("the request is not framed as its headers say")
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ClientError):  # one of our own callbacks raised it
                    return error.__context__
                in_body = self.cycle is not None and self.cycle.more_body and not self._in_head
                return ClientError(
                    "the body broke off: it is not framed as its headers say" if in_body else "this is not HTTP/1.1"
                )
        return None

    def _take_time(self) -> None:
        """Say what the connection takes its time over from now on."""
        asking = self._asking
        if self.flow.write_paused:
            phase = Phase.SLOW
        elif asking is not None and not asking.response_complete:
            phase = Phase.BODY if asking.more_body else Phase.ANSWERED
        elif self.transport.is_closing():
            phase = Phase.SLOW  # until its last answer is taken
        elif asking is not None and asking.more_body:  # answered before its end: the rest is thrown away
            phase = Phase.BODY
        else:
            phase = Phase.HEAD if self._in_head else Phase.IDLE
        if phase is Phase.BODY:
            self.heard = self.loop.time()
        if phase is not self.phase:
            self.app.connections.move(self, phase)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_time()

    def cut(self, error: ReflexError) -> None:
        """It has taken too long, or others need its place."""
        if self.phase in (Phase.HEAD, Phase.BODY) and not self._refusing:
            self._refuse(error)
        elif self.phase is Phase.SLOW:
            self.transport.abort()
        else:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._ended = True
        self._left()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app.connections.leave(self)
        for waiting, _ in self.pipeline:
            waiting.disconnected = True
        self._left()
        if self._asking is not None:
            self._asking.disconnected = True

    def _left(self) -> None:
        cycle = self._asking
        if cycle is not None and not cycle.response_complete:
            left: Any = cycle.scope.get(LEFT)
            if left is not None:
                left()

    # -- the application -----------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._asking = self._come = cycle
        if not self._parsing:  # it waited in the pipeline; on the next turn, or a long pipeline would nest
            self.loop.call_soon(self._start)

    def _start(self) -> None:
        """Hand the request over whose turn it is, as soon as what has been received is parsed."""
        cycle, self._come = self._come, None
        if cycle is None or cycle.disconnected:
            return
        if cycle.more_body or "extensions" in cycle.scope:  # to come, or broken off
            super()._start_asgi_task(cycle, self.app)
            return
        self._read_on()
        self.app.whole(cycle.scope, bytes(cycle.body), self._reply)
        if self._ended:
            self._left()

    def _reply(self, status: int, headers: Headers, body: bytes) -> None:
        cycle = self._asking
        if cycle is None or cycle.disconnected:
            return
        if self.flow.write_paused:  # it does not read what it asks for: nothing more is asked of us until it does
            task = self.loop.create_task(self._reply_later(cycle, status, headers, body))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
            return
        if headers[-1] == CLOSE:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers.append(CLOSE)
        lines = [b"%s: %s\r\n" % header for header in self.server_state.default_headers + headers]
        shown = b"" if cycle.scope["method"] == "HEAD" else body
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", shown]))
        cycle.response_started = cycle.response_complete = True
        cycle.on_response = _nothing  # breaks the circle
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    @staticmethod
    async def _reply_later(cycle: RequestResponseCycle, status: int, headers: Headers, body: bytes) -> None:
        await cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        await cycle.send({"type": "http.response.body", "body": body, "more_body": False})

    def on_response_complete(self) -> None:
        """Go on with the next in the pipeline; without one the connection is idle from now on."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self._read_on()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
                return
            self.app.connections.move(self, Phase.IDLE)
        self._take_time()

    def _read_on(self) -> None:
        """A caller that leaves is noticed by reading; one that asks on and on without reading is not read from."""
        if len(self.pipeline) < MAX_PIPELINE:
            self.flow.resume_reading()

    # -- parser callbacks ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._skip_head:
            self._in_head, self._head = True, -1
            self.url, self.headers, self.expect_100_continue = b"", [], False
            if not self._arrived:
                self._arrived = time.monotonic() - _waited(self._file)

    def on_url(self, url: bytes) -> None:
        if not self._skip_head:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skip_head:
            name = name.lower()
            self.headers.append((name, value))
            if name == b"expect":
                self.expect_100_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if self._skip_head:
            return
        self._in_head = False
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ClientError(f"HTTP/{version} is not spoken here, HTTP/1.1 is")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise ClientError(f"the request has {hosts} Host headers, HTTP/1.1 wants one")
        path, raw_path, query = _parsed(self.url)
        scope: Any = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "method": self.parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            LEFT: None,
            ARRIVED: self._arrived,
        }
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        before = self.cycle
        self.scope, self.cycle = scope, Cycle(self, scope, keep_alive)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # then the parser stops here, and the body is still to come
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _decline_upgrade(self) -> bool:
        """Go on as if it had not been offered: a fresh parser is told the framing and then reads the body. False when
        that makes no sense."""
        framing = [(name, value) for name, value in self.headers if name in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._skip_head = True
        head = b"".join(b"%s: %s\r\n" % pair for pair in framing)
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + (head or b"content-length: 0\r\n") + b"\r\n")
        except httptools.HttpParserError:
            return False
        finally:
            self._skip_head = False
        return True

    def _refuse(self, error: ReflexError) -> None:
        """Answer with an error and close. What was asked before is answered first; a body that broke off the app
        refuses."""
        self._refusing = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False
            if cycle.more_body:
                cycle.scope["extensions"] = {BROKEN: {"error": error}}
                cycle.more_body = False
                cycle.message_event.set()
            return
        if cycle is None or not cycle.more_body:  # else it has its answer
            request_id = secrets.token_hex(8)
            headers, body = self.app.refusal(error, request_id)
            headers += [(b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body)), CLOSE]
            lines = [b"%s: %s\r\n" % header for header in self.server_state.default_headers + headers]
            self.transport.write(b"".join([STATUS_LINE[error.http_status], *lines, b"\r\n", body]))
        self.transport.close()


@lru_cache(maxsize=64)
def _parsed(target: bytes) -> tuple[str, bytes, bytes]:
    """Path, the same as it was sent, and query."""
    url = httptools.parse_url(target)
    return unquote(url.path.decode("ascii")), url.path, url.query or b""


def _file_of(transport: asyncio.BaseTransport) -> int:
    """The descriptor of its socket; -1 without one."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def _waited(file: int) -> float:
    """Seconds since the last byte reached this machine, where the kernel says so and it is worth mentioning."""
    if file < 0 or _TCP_INFO is None:
        return 0.0
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=file)
    except OSError:
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LAST_DATA + 4)
    except OSError:
        return 0.0
    finally:
        sock.detach()
    if len(info) < _LAST_DATA + 4:
        return 0.0
    waited = int.from_bytes(info[_LAST_DATA:], sys.byteorder) / 1e3
    return waited if waited >= _KERNEL_TICK else 0.0


def _nothing() -> None:
    """Stands where a callback was."""
