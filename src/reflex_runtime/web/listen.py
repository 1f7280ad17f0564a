"""The listening sockets, for processes that import nothing else of the server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import one_line

BACKLOG: Final = 4096  # connections that wait to be accepted


def bind(host: str, port: int, uds: str = "") -> socket.socket:
    """A bound socket; ConfigError when the address cannot be bound. uds: the path of a Unix socket, instead."""
    if uds:
        return _bind_unix(uds)
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


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket that only this user may open. A socket that a dead server left is replaced, a live one is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds={one_line(path)}: cannot be bound: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        try:
            tried.connect(path)
        except OSError:
            return False
    return True


def check_tls(certfile: str, keyfile: str) -> None:
    """ConfigError when the files cannot be used to serve TLS."""
    import ssl  # here: few servers need it, and a supervisor stays small

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None, _no_password)
    except (OSError, ValueError) as error:
        told = f"--ssl-certfile={one_line(certfile)}" + (f" --ssl-keyfile={one_line(keyfile)}" if keyfile else "")
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{told}: cannot be used: {one_line(why)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """Where a socket listens, for people."""
    address = sock.getsockname()
    if isinstance(address, (str, bytes)):
        return f"unix:{os.fsdecode(address)}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http{'s' if tls else ''}://{host}:{address[1]}"
