"""HTTP/1.1 on a connection: uvicorn's httptools protocol, and what it leaves to others.

- What is not HTTP gets an answer in the words of every other error, and never cuts off an answer still to come.
- The head of a request is bounded.
- A caller that has sent a whole request and closes its sending side still gets an answer. For one that waits in the
  queue this is hanging up, and the answer says so: the two cannot be told apart on the wire.
- An offer to upgrade (h2c, websocket) is declined by answering in HTTP/1.1, body included.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from reflex_runtime.server.errors import ClientError, describe_error
from reflex_runtime.server.wire.act import encode_json

MAX_HEAD = 64 * 1024
BROKEN = "reflex.broken"  # extension in the scope of a request whose body broke off
LEFT = "reflex.left"  # in the scope: what to call when the caller leaves before its answer, or None
_FRAMING = (b"content-length", b"transfer-encoding")


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = self._skip_head = self._refusing = False
        self._head = 0
        self._asking: RequestResponseCycle | None = None  # the request the app has; later ones wait in the pipeline

    def data_received(self, data: bytes) -> None:
        if self._refusing:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(f"the head of the request has over {MAX_HEAD} bytes")
                return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse("this is not HTTP/1.1")

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        for waiting, _ in self.pipeline:
            waiting.message_event.set()
        cycle.message_event.set()  # whoever waits for more of the request learns that nothing more will come
        self._left()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._left()

    def _left(self) -> None:
        cycle = self._asking
        if cycle is not None and not cycle.response_complete:
            left: Any = cycle.scope.get(LEFT)
            if left is not None:
                left()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._asking = cycle
        super()._start_asgi_task(cycle, app)

    # -- parser callbacks ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._skip_head:
            self._in_head, self._head = True, 0
            super().on_message_begin()
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope[LEFT] = None

    def on_url(self, url: bytes) -> None:
        if not self._skip_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skip_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._skip_head:
            self._in_head = False
            super().on_headers_complete()

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
            cycle.scope["extensions"] = {BROKEN: {}}
            cycle.more_body = False
            cycle.message_event.set()
