"""TCP connections that a test can cut: the next one reaches the server from another port, as after a lost network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay:
    """Listens on `address` and connects each client to `target`, which may change."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """End all connections that there are now. New ones are made."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60.0)
        self.cut()
        for thread in self._threads[1:]:
            thread.join(60.0)
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                try:
                    server = socket.create_connection((host, int(port)))
                except OSError:
                    client.close()
                    continue
                self._sockets += (client, server)
                for ends in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=_copy, args=ends))
                    self._threads[-1].start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(target: str) -> Iterator[Relay]:
    """A relay to `target`."""
    made = Relay(target)
    try:
        yield made
    finally:
        made.close()
