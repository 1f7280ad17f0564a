"""When the bytes of a connection reached this machine; a busy process reads them later."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from typing import Final

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_LAST_DATA: Final = 52  # where tcp_info has tcpi_last_data_recv, in milliseconds
_KERNEL_TICK: Final = 0.011  # seconds; the kernel counts in ticks of up to 10 ms


def file_of(transport: asyncio.BaseTransport) -> int:
    """The file descriptor of a transport, -1 if it has none."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def arrived(file: int) -> float:
    """When the last bytes arrived on this socket, by `time.monotonic`."""
    return time.monotonic() - _waited(file)


def _waited(file: int) -> float:
    """Seconds since the last byte reached this machine, if the kernel knows and they are not negligible."""
    if file < 0 or _TCP_INFO is None:
        return 0.0
    try:
        sock = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, file)  # `socket.socket` takes twice the time
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
