"""A real MQTT broker (Debian's mosquitto) and a subscriber, on loopback; an HTTP server that takes lines of results."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from paho.mqtt import client as mqtt

from feeds.commands import PATIENCE
from serving.place import Place

needs_mosquitto = pytest.mark.skipif(shutil.which("mosquitto") is None, reason="Debian's mosquitto is not installed")


class Broker:
    """mosquitto, while it is entered; it may be stopped and started again at its port.

    user: (name, password) that clients need; None lets everybody in. tls: whether it has a certificate, which is `ca`.
    """

    def __init__(self, folder: Path, user: tuple[str, str] | None = None, tls: bool = False) -> None:
        self._place, self.ca = Place(), folder / "cert.pem"
        self.port = self._place.port
        lines = [f"listener {self.port} 127.0.0.1", "user root", "log_dest stderr", "max_queued_messages 0"]
        lines.append(f"allow_anonymous {'true' if user is None else 'false'}")
        if user is not None:
            subprocess.run(["mosquitto_passwd", "-b", "-c", str(folder / "users"), *user], check=True)
            lines.append(f"password_file {folder / 'users'}")
        if tls:
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                 "-keyout", str(folder / "key.pem"), "-out", str(self.ca), "-days", "2", "-subj", "/CN=localhost",
                 "-addext", "subjectAltName=DNS:localhost"],
                check=True, capture_output=True,
            )  # fmt: skip
            lines += [f"certfile {self.ca}", f"keyfile {folder / 'key.pem'}"]
        self._conf = folder / "mosquitto.conf"
        self._conf.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = ["mosquitto", "-c", str(self._conf)]
        self._process = process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "running" in line:
                self._reader = threading.Thread(target=process.stderr.read, daemon=True)  # so that it is never blocked
                self._reader.start()
                return
        raise AssertionError("".join(said))

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def hang(self) -> None:
        """Its connections stay, and nothing is read from them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._place.close()


class Subscriber:
    """Everything below a topic, in order. `get` waits for a message: (topic, text, qos)."""

    def __init__(self, port: int, topic: str, user: tuple[str, str] | None = None, ca: Path | None = None) -> None:
        self._messages: queue.Queue[tuple[str, str, int]] = queue.Queue()
        ready = threading.Event()
        self._client = client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        if user is not None:
            client.username_pw_set(*user)
        if ca is not None:
            client.tls_set_context(ssl.create_default_context(cafile=str(ca)))
        client.on_message = lambda _, __, m: self._messages.put((m.topic, m.payload.decode(), m.qos))
        client.on_connect = lambda c, *_: c.subscribe(f"{topic}/#", 2)
        client.on_subscribe = lambda *_: ready.set()
        client.connect("localhost" if ca is not None else "127.0.0.1", port)
        client.loop_start()
        assert ready.wait(PATIENCE)

    def get(self) -> tuple[str, str, int]:
        return self._messages.get(timeout=PATIENCE)

    def until(self, topic: str, text: str) -> list[tuple[str, str, int]]:
        """All messages up to and with this one."""
        found = [self.get()]
        while found[-1][:2] != (topic, text):
            found.append(self.get())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class Receiver:
    """An HTTP server on loopback. answer(number of the request) → (status, headers); it may wait. closes: whether it
    closes each connection after an answer without saying so. body: of each answer, as it is sent.

    bodies: the results of each request. headers: of each request. clients: addresses of connections.
    """

    def __init__(
        self,
        answer: Callable[[int], tuple[int, Mapping[str, str]]] = lambda n: (200, {}),
        closes: bool = False,
        body: bytes = b"",
    ) -> None:
        self.clients: set[Any] = set()
        self.bodies: list[list[Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self._news = threading.Condition()
        own = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
                with own._news:
                    number = len(own.bodies)
                    own.clients.add(self.client_address)
                    own.bodies.append([json.loads(line) for line in lines])
                    own.headers.append(dict(self.headers))
                    own.paths.append(self.path)
                    own._news.notify_all()
                status, headers = answer(number)
                self.send_response(status)
                for name, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):  # a long body is not read to its end
                    self.wfile.write(body)
                self.close_connection = self.close_connection or closes

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/in"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def wait(self, requests: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.bodies) >= requests, PATIENCE), self.bodies

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
