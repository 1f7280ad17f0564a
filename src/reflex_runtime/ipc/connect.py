"""How a runtime process connects to whoever started it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from ipaddress import ip_address
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.peer import Handler, Peer

_FORMS = "must be unix:PATH, tcp:HOST:PORT with a loopback host, or stdio"  # what is said is neither hidden nor signed


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def connected(address: str, handler: Handler) -> Peer:
    """A peer on `unix:PATH`, `tcp:HOST:PORT` of this machine, or `stdio`. Raises ConfigError for others, and OSError.

    stdio: descriptors 0 and 1, a socket or two pipes. What this process prints goes to its stderr from here on, and it
    reads an empty stdin, so that nothing but the protocol is where the protocol is.
    """
    loop = asyncio.get_running_loop()
    kind, _, where = address.partition(":")
    if kind == "unix" and where:
        return (await loop.create_unix_connection(lambda: Peer(handler), where))[1]
    host, _, port = where.rpartition(":")
    if kind == "tcp" and _is_loopback(host) and port.isdecimal() and 0 < int(port) < 65536:
        return (await loop.create_connection(lambda: Peer(handler), host, int(port)))[1]
    if address == "stdio":
        return await _on_descriptors(handler, *_taken_stdio())
    raise ConfigError(f"connect={address[:200]!r}: {_FORMS}")


def _taken_stdio() -> tuple[int, int]:
    """Copies of descriptors 0 and 1, which others may use from now on without harm."""
    reads, writes = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return reads, writes


async def _on_descriptors(handler: Handler, reads: int, writes: int) -> Peer:
    loop = asyncio.get_running_loop()
    if stat.S_ISSOCK(os.fstat(reads).st_mode):
        os.close(writes)
        sock = socket.socket(fileno=reads)
        sock.setblocking(False)
        return (await loop.create_connection(lambda: Peer(handler), sock=sock))[1]
    peer = Peer(handler)
    transport, _ = await loop.connect_write_pipe(lambda: _Writing(peer), os.fdopen(writes, "wb", 0))
    peer.write_to(transport)
    await loop.connect_read_pipe(lambda: peer, os.fdopen(reads, "rb", 0))
    return peer


class _Writing(asyncio.BaseProtocol):
    """The pipe that a peer writes to tells it how that goes."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def pause_writing(self) -> None:
        self._peer.pause_writing()

    def resume_writing(self) -> None:
        self._peer.resume_writing()

    def connection_lost(self, exc: Any) -> None:
        self._peer.connection_lost(exc)
