"""Connections that move between processes of one server: the socket itself is sent, with the bytes read from it.

The receiver goes on where the sender stopped. What the caller sends meanwhile waits in the kernel, which carries the
connection as before: no process is between the caller and the one that answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from reflex_runtime.web.connection import HttpConnection
from reflex_runtime.web.exchange import Exchange, Route

log = logging.getLogger("reflex.server")

INLINE: Final = 32 * 1024  # bytes that are sent in the message itself; more go in a file in memory
MOST_UNSENT: Final = 4096  # connections that wait for a process that does not read
_AT_ONCE: Final = 16  # connections that one turn of the loop takes
_ROOM: Final = 8 * 1024  # bytes of a note


class HandedOver(msgspec.Struct, array_like=True):
    """What is said of a connection that moves.

    identity: whose its next request is, and episode: which one, "" if that is not known. placed: the front has chosen
    the process for it, which therefore keeps it. slots: where the episode runs, by policy, if another process had it
    before. moved: that process has left, and the caller must be told. data: bytes that were read from it; None if they
    are in the file that comes with it.
    """

    identity: str = ""
    episode: str = ""
    placed: bool = False
    slots: dict[str, str] = {}
    moved: bool = False
    data: bytes | None = b""


_ENCODE, _DECODE = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(HandedOver).decode


class HandoverChannel:
    """One end of a pair of sockets between two processes, on the loop; connections go both ways.

    taken: called with the socket of each connection that comes, and what is said of it, with its bytes in `data`.
    on_end: called when the other end is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        taken: Callable[[socket.socket, HandedOver], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._sock, self._taken, self._on_end = sock, taken, on_end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._read)

    @property
    def takes(self) -> bool:
        """Whether a connection can be sent."""
        return self._open and len(self._unsent) < MOST_UNSENT

    def send(self, file: int, said: HandedOver) -> None:
        """Send a connection by its descriptor, which is closed here. One that cannot be sent is closed."""
        data, files = said.data or b"", [file]
        try:
            if len(data) > INLINE:
                files.append(_in_memory(data))
                said.data = None
            message = _ENCODE(said)
            if not self.takes:
                raise OSError("the other process takes no connections")
        except OSError as error:
            log.warning("a connection is closed: %s", error)
            _close(files)
            return
        self._unsent.append((message, files))
        if len(self._unsent) == 1:
            self._write()

    def close(self) -> None:
        """Take what the other end has sent so far, and no more; connections that were not sent are closed."""
        self._on_end = lambda: None
        for _ in range(MOST_UNSENT):
            if not self._open or not self._read_one():
                break
        self._shut()

    def _shut(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            for _, files in self._unsent:
                _close(files)
            self._unsent.clear()

    def _ends(self) -> None:
        if self._open:
            self._shut()
            self._on_end()

    def _write(self) -> None:
        while self._unsent:
            message, files = self._unsent[0]
            try:
                socket.send_fds(self._sock, [message], files)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except ConnectionError:
                self._ends()
                return
            except OSError as error:  # of this connection alone: the kernel has no room, or it is too long
                log.warning("a connection is closed: %s", error)
            self._unsent.popleft()
            _close(files)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._open or not self._read_one():
                return

    def _read_one(self) -> bool:
        """Take a connection. False if none has come."""
        try:
            message, files, _, _ = socket.recv_fds(self._sock, INLINE + _ROOM, 2)
        except BlockingIOError:
            return False
        except OSError:
            message, files = b"", []
        if not message:
            self._ends()
            return False
        self._take(message, files)
        return True

    def _take(self, message: bytes, files: list[int]) -> None:
        try:
            for file in files:
                os.set_inheritable(file, False)
            said = _DECODE(message)
            if said.data is None:
                said.data = _whole(files.pop())
            sock = socket.socket(fileno=files.pop())
        except (OSError, IndexError, msgspec.DecodeError):
            log.exception("a connection that was handed over could not be taken")
            _close(files)
            return
        sock.setblocking(False)
        self._taken(sock, said)


class HandedConnection(HttpConnection):
    """A connection that another process has read from. placed: whose request it was given for, until that is asked."""

    def __init__(self, app: Any, said: HandedOver) -> None:
        super().__init__(app)
        self._first = said.data or b""
        self.placed = said.identity if said.placed else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        first, self._first = self._first, b""
        if first:
            self.data_received(first)


def hand_on(exchange: Exchange, body: bytes, to: HandoverChannel, identity: str = "", episode: str = "") -> bool:
    """Send a connection on with its whole request, which somebody else answers. False, and nothing has happened, if
    other requests came behind it, an earlier answer is still being sent, or nobody would take it."""
    carrier = exchange.carrier
    given = carrier.give_away(exchange, body) if to.takes and isinstance(carrier, HttpConnection) else None
    if given is None:
        return False
    file, data = given
    to.send(file, HandedOver(identity, episode, data=data))
    return True


def handing_on(method: str, most: int, hand: Callable[[Exchange, bytes], None]) -> Route:
    """A route for requests that another process answers, which also checks who may ask. most: bytes of a body."""
    return Route("elsewhere", hand, method, open=True, most=most, checked=False)


def _in_memory(data: bytes) -> int:
    file = os.memfd_create("request")
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return file


def _whole(file: int) -> bytes:
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read()


def _close(files: list[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
