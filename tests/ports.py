"""Ports of this machine that nobody else is given."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved() -> Iterator[int]:
    """A port where nothing listens, until the test starts a server there, once or several times: no other process gets
    it in the block. The server must set SO_REUSEADDR, as all do that listen on a given port."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
