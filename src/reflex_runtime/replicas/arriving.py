"""A new connection at the front, until it is known whose it is; then it is handed over, or answered here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.placing import Begun, begun
from reflex_runtime.web.app import App
from reflex_runtime.web.arrival import file_of
from reflex_runtime.web.connection import HttpConnection
from reflex_runtime.web.connections import ANSWERED, BODY, HEAD
from reflex_runtime.web.errors import Overloaded

Give = Callable[[Begun, Any, int, bytes], bool]


class ArrivingConnection(asyncio.Protocol):
    """Reads until the request says whose it is, and gives the connection away with what was read.

    give: called with that, the caller's address, a descriptor that it closes, and the bytes. False, and the descriptor
    is open still, if there is nobody to give it to: then the front answers. first: bytes that were read already.
    phase, heard: see `Connection`.
    """

    transport: asyncio.Transport

    def __init__(self, app: App, give: Give, first: bytes = b"", begun: Begun | None = None) -> None:
        self.app, self._give, self._data, self._known = app, give, first, begun
        self.phase = ANSWERED
        self.heard = 0.0
        self._next_look = 0  # bytes: a caller that sends one at a time must not have all of them read each time
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        try:
            self.app.connections.enter(self, self._loop)
        except Overloaded:
            self._answer_here()  # which refuses it
            return
        if self._data:
            self._look()

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        self._data += data
        if len(self._data) >= self._next_look:
            self._look()

    def eof_received(self) -> bool:
        self._answer_here().eof_received()  # it sent less than a request, and gets what HTTP says of that
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.app.connections.leave(self)

    def cut(self, error: ReflexError) -> None:
        """It has taken too long, or others need its place."""
        if self._data:
            self._answer_here().cut(error)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close: nothing of it is being answered."""
        self.transport.close()

    def give_up(self) -> None:
        """Close at once."""
        self.transport.abort()

    def _look(self) -> None:
        known = self._known or begun(self._data)
        if known is None or not known.enough:
            phase = HEAD if known is None else BODY
            if phase is not self.phase:
                self.app.connections.move(self, phase)
            if known is not None:
                self._next_look = min(2 * len(self._data), known.until)
            return
        if not known.asks or self.app.closing:
            self._answer_here()
            return
        peer = self.transport.get_extra_info("peername")
        file = os.dup(file_of(self.transport))
        if self._give(known, peer, file, self._data):
            self.app.connections.leave(self)
            self.transport.set_protocol(asyncio.Protocol())
            self.transport.abort()
        else:
            os.close(file)
            self._answer_here()

    def _answer_here(self) -> HttpConnection:
        """The connection is the front's own from now on."""
        self.app.connections.leave(self)
        http, data, self._data = HttpConnection(self.app), self._data, b""
        self.transport.set_protocol(http)
        http.connection_made(self.transport)
        if data:
            http.data_received(data)
            self.app.read()
        return http
