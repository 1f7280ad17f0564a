"""A proxy that adds a prefix to every path, as an operator's ingress does."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import TracebackType
from typing import Self


class PrefixProxy(ThreadingTCPServer):
    """Passes http://127.0.0.1:PORT/PREFIX/path on as /path to another port; anything else is 404. One request for each
    connection. Use it in a with statement."""

    daemon_threads, block_on_close = True, False

    def __init__(self, prefix: str, to: int) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.prefix, self.to = f"{prefix}/".encode(), to
        self.port = self.socket.getsockname()[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Relay(StreamRequestHandler):
    server: PrefixProxy

    def handle(self) -> None:
        head = b"".join(iter(self.rfile.readline, b"\r\n"))
        if not head:
            return
        method, path, rest = head.split(b" ", 2)
        if not path.startswith(self.server.prefix):
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", self.server.to)) as further, suppress(OSError):
            own = path[len(self.server.prefix) - 1 :]
            further.sendall(b" ".join((method, own, rest.replace(b"keep-alive", b"close"))) + b"\r\n")
            threading.Thread(target=self._send, args=(further,), daemon=True).start()
            while data := further.recv(65536):
                self.wfile.write(data)

    def _send(self, further: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := self.rfile.read1(65536):
                further.sendall(data)
            further.shutdown(socket.SHUT_RDWR)  # the browser has left
