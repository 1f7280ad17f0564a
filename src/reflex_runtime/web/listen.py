"""The listening socket, for processes that import nothing else of the server."""

from __future__ import annotations

import errno
import socket
from typing import Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import one_line

BACKLOG: Final = 4096  # connections that wait to be accepted


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; ConfigError when the address cannot be bound."""
    sock = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        told = f"--host={one_line(host)} --port={port}: cannot be bound: {why}"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            told += "; use --port N, or --port 0 for a free one"
        raise ConfigError(told) from error
    sock.set_inheritable(True)
    return sock
