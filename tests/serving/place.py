"""A port of a test's own."""

from __future__ import annotations

import socket


class Place(socket.socket):
    """A port at which nobody listens while it is open, but for a server of the test, which has SO_REUSEADDR."""

    def __init__(self) -> None:
        super().__init__()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", 0))
        self.port = int(self.getsockname()[1])
