"""A server that does as it is told, byte for byte."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgpack
import numpy as np

ACTIONS = [[0.5, -0.25], [0.125, 1.0], [0.0, 0.0]]
ANSWER = {
    "actions": ACTIONS, "num_actions": 3, "action_dim": 2, "latency_ms": 1.5, "request_id": "mine", "cache": "off",
    "timing": {"queue_ms": 0.5, "total_ms": 1.5}, "batch": {"id": 7, "size": 2, "reason": "idle"}, "guard": None,
}  # fmt: skip
UNNAMED = {name: value for name, value in ANSWER.items() if name != "request_id"}
NAMED = {"request_id": "mine"}  # the request that ANSWER answers
PICTURE = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
PATIENCE = 60.0  # seconds until a test gives up


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def fields(self) -> Any:
        return msgpack.unpackb(self.body) if "msgpack" in self.headers["content-type"] else json.loads(self.body)


@dataclass
class Stub:
    """Answers one request after another from a list: bytes are sent, "close" closes instead of answering, and "hang"
    does nothing; b"" after an answer closes the connection without a word."""

    script: list[Any]
    port: int = 0
    path: Path | None = None  # of a Unix socket
    tls: ssl.SSLContext | None = None
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    before_body: Callable[[], None] = lambda: None  # called when the head of a request is read

    def __enter__(self) -> Self:
        if self.path is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self.port = self._listener.getsockname()[1]
        else:
            self._listener = socket.create_server(str(self.path), family=socket.AF_UNIX)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.idle, self.asked = threading.Event(), threading.Event()
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, message: bytes) -> None:
        """Send on the newest connection what nobody asked for."""
        self._open[-1].sendall(message)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            self._start(self._serve, sock, self.connections)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        if self.tls is not None:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True)
            except OSError:  # the client does not trust it
                return
            self._open.append(sock)
        with suppress(OSError), sock, sock.makefile("rb") as stream:
            while line := stream.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (text := stream.readline().decode().strip()) != "":
                    name, _, value = text.partition(": ")
                    headers[name.lower()] = value
                self.before_body()
                body = stream.read(int(headers.get("content-length", "0")))
                self.seen.append(Seen(method, path, headers, body, number))
                self.asked.set()
                step = self.script.pop(0)
                if step == "hang":
                    continue
                if step == "close":
                    break
                sock.sendall(step)
                if self.script[:1] == [b""]:
                    self.script.pop(0)
                    break
        self.idle.set()


def reply(
    body: Any = ANSWER, status: int = 200, headers: Mapping[str, str] | None = None, packed: bool = False
) -> bytes:
    """An HTTP answer as bytes."""
    data = body if isinstance(body, bytes) else msgpack.packb(body) if packed else json.dumps(body).encode()
    kind = "application/msgpack" if packed else "application/json"
    lines = {"content-type": kind, "content-length": str(len(data))} | dict(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Status\r\n{head}\r\n".encode() + data


def refusal(code: str = "queue_full", status: int = 503, retry_safe: bool = True, after: str | None = "1") -> bytes:
    body = {"error": code, "message": "no", "request_id": "theirs", "retry_safe": retry_safe}
    return reply(body, status, {"retry-after": after} if after else None)
