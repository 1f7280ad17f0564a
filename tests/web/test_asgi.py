"""An application below another server: what comes as messages of ASGI is answered as what comes on a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web import asgi
from reflex_runtime.web.app import App
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.websocket import SocketMessage, WebSocket

PATIENCE = 60.0


class Echo:
    """A session that answers each message with itself; `bye` closes, `wait` is answered by the test."""

    def __init__(self, socket: WebSocket, seen: list[Any]) -> None:
        self.socket, self.seen = socket, seen

    def opened(self) -> None:
        self.socket.send("hello")

    def asked(self, message: SocketMessage) -> None:
        self.seen.append(message.data)
        if message.data == "bye":
            self.socket.answer()
            self.socket.close(1000, "as you say")
        elif message.data != "wait":
            self.socket.answer(message.data)

    def failed(self, message: SocketMessage, error: ReflexError) -> str:
        return error.code

    def left(self) -> None:
        self.seen.append("left")


class Host:
    """An application, and a peer that speaks ASGI to it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.arrived = asyncio.Event()
        routes = [
            Route("/echo", lambda exchange, body: exchange.answer(200, body), "POST", most=300_000),
            Route("/held", self.hold, "POST"),
            Route("/parts", self.parts),
            Route("/flood", lambda exchange, body: self.app.spawn(exchange, self.flood(exchange))),
            Route("/socket", self.hold, socket=lambda socket: Echo(socket, self.seen), most=300_000),
        ]
        self.app = App(ServeConfig(), {route.path: route for route in routes}, PLAIN)
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()

    def hold(self, exchange: Exchange, body: bytes) -> None:
        exchange.on_left = lambda: self.seen.append("left")
        self.arrived.set()

    def parts(self, exchange: Exchange, body: bytes) -> None:
        exchange.begin(200, [(b"content-type", b"text/plain")], lambda error: error.code.encode())
        for part in (b"one ", b"two"):
            exchange.write(part)
        exchange.end()

    async def flood(self, exchange: Exchange) -> None:
        exchange.begin(200, [], lambda error: b"")
        exchange.write(b"x" * (2 * asgi.WRITTEN_AHEAD))
        self.arrived.set()
        await exchange.drained()
        self.seen.append("over")
        exchange.end()
        self.arrived.set()

    def open(self, path: str, method: str = "GET", kind: str = "http", **more: Any) -> asyncio.Task[None]:
        headers = [(b"Host", b"localhost"), *more.pop("headers", [])]
        scope = {"type": kind, "method": method, "path": path, "headers": headers, "client": ("127.0.0.1", 9), **more}
        return asyncio.ensure_future(asgi.answer(self.app, scope, self.inbox.get, self.outbox.put))

    def give(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.inbox.put_nowait(message)

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        start = await self.outbox.get()
        body, more = b"", True
        while more:
            part = await self.outbox.get()
            body, more = body + part["body"], part["more_body"]
        return start["status"], dict(start["headers"]), body


def played(play: Callable[[Host], Coroutine[Any, Any, None]]) -> Host:
    async def run() -> Host:
        async with asyncio.timeout(PATIENCE):
            host = Host()
            await play(host)
            return host

    return asyncio.run(run())


def test_x7_a_request_in_parts_gets_the_answer_of_the_application() -> None:
    async def play(host: Host) -> None:
        asking = host.open("/echo", "POST")
        sent = [bytes([n]) * 90_000 for n in range(3)]
        host.give(*({"type": "http.request", "body": part, "more_body": n < 2} for n, part in enumerate(sent)))
        status, headers, body = await host.answer()
        await asking
        assert (status, body) == (200, b"".join(sent))
        assert headers[b"x-request-id"]
        assert host.app.active == host.app.bodies.held == 0

    played(play)


def test_x7_errors_have_the_form_of_the_application() -> None:
    async def play(host: Host) -> None:
        for path, method, status, code in (
            ("/nowhere", "GET", 404, b"not_found"),
            ("/echo", "GET", 405, b"method_not_allowed"),
        ):
            host.give({"type": "http.request", "body": b""})
            asking = host.open(path, method)
            found, _, body = await host.answer()
            assert (found, code in body) == (status, True)
            await asking
            host.inbox = asyncio.Queue()
        asking = host.open("/echo", "POST")
        host.give(*({"type": "http.request", "body": b"x" * 200_000, "more_body": True} for _ in range(2)))
        assert (await host.answer())[0] == 413
        await asking
        assert host.app.active == host.app.bodies.held == 0

    played(play)


def test_x7_an_answer_in_parts_and_a_head_without_a_body() -> None:
    async def play(host: Host) -> None:
        for method, body in (("GET", b"one two"), ("HEAD", b"")):
            asking = host.open("/parts", method)
            status, headers, found = await host.answer()
            assert (status, found) == (200, body)
            assert b"transfer-encoding" not in headers
            await asking

    played(play)


def test_x7_a_caller_that_leaves_is_noticed_while_it_sends_and_while_it_waits() -> None:
    async def play(host: Host) -> None:
        asking = host.open("/echo", "POST")
        host.give({"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"})
        await asking
        assert host.app.active == host.app.bodies.held == 0
        asking = host.open("/held", "POST")
        host.give({"type": "http.request", "body": b"whole"})
        await host.arrived.wait()
        host.give({"type": "http.disconnect"})
        await asking
        assert host.seen == ["left"]

    played(play)


def test_x7_a_websocket_is_served_message_by_message_and_closed_with_its_code() -> None:
    async def play(host: Host) -> None:
        serving = host.open("/socket", kind="websocket")
        large = b"x" * 250_000
        host.give({"type": "websocket.connect"})
        assert (await host.outbox.get())["type"] == "websocket.accept"
        assert (await host.outbox.get())["text"] == "hello"
        host.give({"type": "websocket.receive", "bytes": large}, {"type": "websocket.receive", "text": "ä"})
        assert (await host.outbox.get())["bytes"] == large
        assert (await host.outbox.get())["text"] == "ä"
        host.give({"type": "websocket.receive", "text": "bye"})
        closed = await host.outbox.get()
        assert (closed["type"], closed["code"], closed["reason"]) == ("websocket.close", 1000, "as you say")
        await serving
        assert host.seen == [large, "ä", "bye", "left"]
        assert len(host.app.connections) == host.app.active == host.app.bodies.held == 0

    played(play)


def test_x7_a_websocket_whose_peer_leaves_is_over_and_one_at_a_wrong_path_is_refused() -> None:
    async def play(host: Host) -> None:
        serving = host.open("/socket", kind="websocket")
        host.give({"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1001})
        await serving
        assert host.seen == ["left"]
        host.give({"type": "websocket.connect"})
        await host.open("/nowhere", kind="websocket", extensions={"websocket.http.response": {}})
        found = [host.outbox.get_nowait() for _ in range(host.outbox.qsize())]
        denied = next(message for message in found if message["type"] == "websocket.http.response.start")
        assert denied["status"] == 404
        assert host.app.active == 0

    played(play)


def test_x7_what_waits_for_a_caller_to_read_ends_when_it_leaves() -> None:
    async def play(host: Host) -> None:
        host.outbox = asyncio.Queue(1)  # takes the head, and nothing of the body
        asking = host.open("/flood")
        await host.arrived.wait()
        host.arrived.clear()
        host.give({"type": "http.disconnect"})
        await asking
        await host.arrived.wait()
        assert host.seen == ["over"]
        assert (host.app.active, host.outbox.qsize()) == (0, 1)

    played(play)


def test_x7_a_websocket_whose_peer_does_not_read_is_not_read_from() -> None:
    async def play(host: Host) -> None:
        host.outbox = asyncio.Queue(1)
        serving = host.open("/socket", kind="websocket")
        large = b"x" * 250_000
        host.give({"type": "websocket.connect"}, *[{"type": "websocket.receive", "bytes": large}] * 20)
        for _ in range(1000):  # turns of the loop, in which all would be read
            await asyncio.sleep(0)
        assert len(host.seen) < 10
        assert host.inbox.qsize() > 10
        found = [await host.outbox.get() for _ in range(22)]
        assert [message.get("bytes") for message in found[2:]] == [large] * 20
        host.give({"type": "websocket.disconnect", "code": 1001})
        await serving

    played(play)
