"""Fixtures of the demo's tests; the server is a real one, small enough to read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import msgpack
import pytest
from demo_support import BundledPolicy, Stub

from reflex_runtime.demo import POLICY


@pytest.fixture(scope="session")
def v2() -> BundledPolicy:
    return BundledPolicy(POLICY)


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Answers with a chunk of zeros until the test sets `stub.answer`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            served.connections += 1

        def do_POST(self) -> None:
            kind = self.headers["Content-Type"]
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(raw) if kind == "application/json" else msgpack.unpackb(raw)
            if self.path == "/act":
                served.requests.append(request)
                status, headers, body = served.answer(request)
            else:
                served.outcomes.append((unquote(self.path), request))
                status, headers, body = served.outcome
            if not isinstance(body, bytes):
                body = json.dumps(body).encode() if kind == "application/json" else msgpack.packb(body)
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = served.hang_up

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            served.hung_up.release()

    server = Server(("127.0.0.1", 0), Handler)
    served = Stub(f"http://127.0.0.1:{server.server_port}", lambda request: (200, {}, {"actions": [[0.0] * 4] * 16}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
