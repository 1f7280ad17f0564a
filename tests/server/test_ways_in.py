"""The two ways into the application, and what our own connection does beside them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from reflex_runtime.config import ServeConfig
from reflex_runtime.policies import Export
from reflex_runtime.server.app import App
from reflex_runtime.server.http import HttpProtocol
from reflex_runtime.server.runtime import PolicyRuntime

from .harness import PATIENCE, STATE, Server, encode

BODY = json.dumps({"state": STATE, "request_id": "plain"}).encode()


def with_app(tiny: Path, check: Callable[[App], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `check` with an application in this process."""

    async def main() -> None:
        runtime = PolicyRuntime(ServeConfig(**options), {"prod": Export.load(tiny)})
        await runtime.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await check(App(runtime))
        finally:
            await runtime.stop(1.0)

    asyncio.run(main())


class Caller:
    """What a plain ASGI server would be to the application."""

    def __init__(self, path: str = "/act", method: str = "POST") -> None:
        self.scope: dict[str, Any] = {
            "type": "http", "path": path, "method": method, "client": ("here", 1),
            "headers": [(b"content-type", b"application/json")],
        }
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []

    def say(self, body: bytes, more: bool = False) -> None:
        self.said.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.said.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, app: App) -> int:
        await app(self.scope, self.said.get, self.send)
        return int(self.sent[0]["status"])


def test_any_asgi_server_will_do(tiny: Path) -> None:
    async def check(app: App) -> None:
        caller = Caller()
        caller.say(BODY[:10], more=True)
        caller.say(BODY[10:])
        assert await caller.ask(app) == 200
        assert dict(caller.sent[0]["headers"])[b"x-request-id"] == b"plain"
        assert len(json.loads(caller.sent[1]["body"])["actions"]) > 0
        assert await Caller("/health", "GET").ask(app) == 200
        assert await Caller("/nowhere").ask(app) == 404
        assert app.door.active == 0

    with_app(tiny, check)


def test_b16_under_any_asgi_server_a_caller_that_leaves_takes_its_request_back(tiny: Path) -> None:
    async def check(app: App) -> None:
        first, leaving = Caller(), Caller()
        first.say(BODY)
        leaving.say(BODY)
        leaving.leave()
        running = asyncio.create_task(first.ask(app))
        assert await leaving.ask(app) == 499
        assert await running == 200
        early = Caller()
        early.leave()
        assert await early.ask(app) == 499
        assert app.door.idle.is_set()
        assert b'outcome="cancelled",policy_slot="prod"} 2.0' in app.runtime.metrics.render()

    with_app(tiny, check, inject_latency_ms=300.0)


def test_a_task_that_its_server_gives_up_is_counted_and_takes_its_request_back(tiny: Path) -> None:
    async def check(app: App) -> None:
        reading, queued = Caller(), Caller()
        queued.say(BODY)
        tasks = [asyncio.create_task(caller.ask(app)) for caller in (reading, queued)]
        while not app.runtime.batcher.scheduler.unsettled("prod"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        await app.door.idle.wait()
        assert b'outcome="cancelled",policy_slot="prod"} 2.0' in app.runtime.metrics.render()

    with_app(tiny, check, inject_latency_ms=300.0)


def _answer(sock: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer, in however many pieces they come."""
    data, needed = b"", -1
    while needed < 0 or len(data) < needed:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
        head, end, _ = data.partition(b"\r\n\r\n")
        if end:
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))[15:]
            needed = len(head) + len(end) + int(length)
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in-parts"])
def test_both_ways_answer_alike(tiny: Path, whole: bool) -> None:
    request = encode({"state": STATE, "seed": 7})
    with Server(tiny) as server, server.connect() as sock:
        if whole:
            sock.sendall(request)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request[:-5])
            server.reach(lambda m: True)  # what has been sent is read meanwhile
            sock.sendall(request[-5:])
        head, body = _answer(sock)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    names = [line.split(b":")[0] for line in head.split(b"\r\n")[1:]]
    assert names == [b"date", b"content-type", b"content-length", b"x-request-id"]
    assert json.loads(body)["num_actions"] > 0


def test_who_does_not_read_its_answers_is_not_read_either(tiny: Path) -> None:
    """Otherwise its answers would fill the memory."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Server(tiny) as server, server.connect() as sock:
        sock.setblocking(False)
        sent = stuck = 0
        while stuck < 3:  # both ends have buffers
            try:
                sent += sock.send(request[sent % len(request) :] + request * 1000)
                stuck = 0
            except BlockingIOError:
                assert server.get("/health").status == 200
                stuck += 1
            assert sent < 2**26, "it takes whatever comes"
        sock.setblocking(True)
        received, asked = 0, sent // len(request)
        status, tail = b"HTTP/1.1 200 OK\r\n", b""
        while received < asked:
            part = sock.recv(1 << 20)
            assert part
            received += (tail + part).count(status)
            tail = part[1 - len(status) :]


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = asyncio.Event()

    def get_extra_info(self, name: str) -> Any:
        return None

    def write(self, data: bytes) -> None:
        self.written.put_nowait(data)

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()


def test_an_idle_connection_is_closed_after_its_time_and_not_before(tiny: Path) -> None:
    async def check(app: App) -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, proxy_headers=False)
        config.load()
        connection, wire, loop = HttpProtocol(config, ServerState(), {}), Wire(), asyncio.get_running_loop()
        connection.connection_made(wire)  # type: ignore[arg-type]
        for _ in range(2):
            connection.data_received(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answered = loop.time()
            assert (await wire.written.get()).startswith(b"HTTP/1.1 200 OK")
        await wire.closed.wait()
        assert loop.time() - answered >= 0.185
        connection.connection_lost(None)
        assert len(app.connections) == 0

    with_app(tiny, check, idle_timeout_s=0.2)
