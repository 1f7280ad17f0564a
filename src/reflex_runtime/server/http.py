"""HTTP/1.1 on a connection: uvicorn's httptools protocol, and what it leaves to others.

- What is not HTTP gets an answer in the words of every other error, and never cuts off an answer still to come.
- The head of a request is bounded.
- A caller that has sent a whole request and closes its sending side still gets an answer. For one that waits in the
  queue this is hanging up, and the answer says so: the two cannot be told apart on the wire.
- An offer to upgrade (h2c, websocket) is declined by answering in HTTP/1.1, body included.
- A request that came whole is handed over as it is and its answer written at once: a task, its events and the two
  messages of ASGI cost as much as the rest of a small request. All others go the way of ASGI.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from reflex_runtime.server.bodies import BROKEN
from reflex_runtime.server.errors import ClientError, describe_error
from reflex_runtime.server.exchange import CLOSE, LEFT, Headers
from reflex_runtime.server.wire.act import encode_json

MAX_HEAD = 64 * 1024
MAX_PIPELINE = 16  # requests waiting behind another on their connection; with more of them it is not read from
_ASGI = {"version": "3.0", "spec_version": "2.3"}
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
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = self._skip_head = self._refusing = self._parsing = self._ended = False
        self._head = 0
        self._idle_since = 0.0
        self._asking: RequestResponseCycle | None = None  # the request the app has; later ones wait in the pipeline
        self._come: RequestResponseCycle | None = None  # its head has come; whether all of it has shows after parsing

    def data_received(self, data: bytes) -> None:
        if self._refusing:
            return
        self._parsing = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse("this is not HTTP/1.1")
        self._parsing = False
        if self._in_head and not self._refusing:  # what came with its beginning is not counted: it may end another
            self._head = 0 if self._head < 0 else self._head + len(data)
            if self._head > MAX_HEAD:
                self._refuse(f"the head of the request has over {MAX_HEAD} bytes")
        self._start()

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
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
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
        app: Any = self.app
        if cycle is None or cycle.disconnected:
            return
        if cycle.more_body or "extensions" in cycle.scope:  # to come, or broken off
            super()._start_asgi_task(cycle, app)
            return
        self._read_on()
        app.whole(cycle.scope, bytes(cycle.body), self._reply)
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
        """Go on with the next in the pipeline; without one the time to keep an idle connection begins."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._read_on()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_again(self.timeout_keep_alive)

    def _read_on(self) -> None:
        """A caller that leaves is noticed by reading; one that asks on and on without reading is not read from."""
        if len(self.pipeline) < MAX_PIPELINE:
            self.flow.resume_reading()

    def _look_again(self, delay: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(delay, self._close_if_idle)

    def _close_if_idle(self) -> None:
        """One timer at a time, set anew when it goes off: to cancel and set one for every request costs more."""
        self.timeout_keep_alive_task = None
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next answer sets it again
            left = self._idle_since + self.timeout_keep_alive - self.loop.time()
            if left > 0.0:
                self._look_again(left)
            else:
                self.transport.close()

    # -- parser callbacks ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._skip_head:
            self._in_head, self._head = True, -1
            self.url, self.headers, self.expect_100_continue = b"", [], False

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
            super().on_message_complete()

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on as if it had not been offered: a fresh parser is told the framing and then reads the body."""
        framing = [(name, value) for name, value in self.headers if name in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._skip_head = True
        head = b"".join(b"%s: %s\r\n" % pair for pair in framing)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + (head or b"content-length: 0\r\n") + b"\r\n")
        self._skip_head = False
        if rest:
            self.data_received(rest)

    def _refuse(self, message: str) -> None:
        """Answer 400 and close. What was asked before is answered first; a body that broke off the app refuses."""
        self._refusing = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            request_id = secrets.token_hex(8)
            body = encode_json(describe_error(ClientError(message), request_id))
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-request-id: %s\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (request_id.encode(), len(body), body)
            )
            self.transport.close()
            return
        cycle.keep_alive = False
        if cycle.more_body:
            broken = ClientError("the body broke off: it is not framed as its headers say")
            cycle.scope["extensions"] = {BROKEN: {"error": broken}}
            cycle.more_body = False
            cycle.message_event.set()


@lru_cache(maxsize=64)
def _parsed(target: bytes) -> tuple[str, bytes, bytes]:
    """Path, the same as it was sent, and query."""
    url = httptools.parse_url(target)
    return unquote(url.path.decode("ascii")), url.path, url.query or b""


def _nothing() -> None:
    """Stands where a callback was."""
