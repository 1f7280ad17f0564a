"""Websockets on the server's port, whatever a session says: against a session that echoes, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from reflex_runtime.settings import ServeConfig
from reflex_runtime.web import connections as module
from reflex_runtime.web.app import App
from reflex_runtime.web.connections import FRAMES, SocketConnection
from reflex_runtime.web.errors import PLAIN, NotFound
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, WebSocket
from serving.harness import PATIENCE, parse_answers
from web.listening import Limits, StillLoop, listening

MOST = 100_000


class Running:
    """An application with /echo on a port: it answers each message with itself, at once or when the test says so."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        self.limits = limits
        self.go, self.came, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.seen: list[str | bytes] = []
        self.app = App(ServeConfig(**options), {"/echo": Route("/echo", self._plain, socket=self._echo)}, PLAIN)
        self.port = 0

    async def _plain(self, request: HttpRequest) -> HttpResponse:
        raise NotFound("a websocket is spoken here")

    async def _echo(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            if "late" in socket.query:
                await self.go.wait()
            await socket.send("hello " + socket.query.get("name", "you"))
            async for message in socket:
                self.seen.append(message.data)
                if message.data == "raise":
                    raise RuntimeError("a bug")
                if message.data == "hold":
                    self.came.set()
                    await self.go.wait()
                await socket.send(message.data)
        finally:
            self.gone.set()

    def connection(self) -> SocketConnection:
        """The only one there is."""
        (found,) = [item for item in gc.get_objects() if isinstance(item, SocketConnection) and not item.disconnected]
        return found

    def url(self, path: str = "/echo") -> str:
        return f"ws://127.0.0.1:{self.port}{path}"

    @asynccontextmanager
    async def connected(self, path: str = "/echo", **options: Any) -> AsyncIterator[ClientConnection]:
        async with connect(self.url(path), compression=None, max_size=None, **options) as client:
            yield client


def running(
    check: Callable[[Running], Coroutine[Any, Any, None]],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> None:
    async def main() -> None:
        run = Running(limits or Limits(max_body_bytes=MOST), **options)
        async with listening(run.app, run.limits) as run.port:
            await check(run)
            run.go.set()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def moved(seconds: float) -> None:
    """Let time pass."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StillLoop)
    loop.now += seconds


async def closed_with(client: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as info:
        await client.recv()
    assert info.value.rcvd is not None
    return info.value.rcvd.code


async def raw(client: ClientConnection, *frames: Frame | bytes) -> None:
    """Send frames as they are."""
    client.transport.write(b"".join(f if isinstance(f, bytes) else f.serialize(mask=True) for f in frames))


def test_w1_text_and_binary_go_both_ways_in_their_order_and_the_query_is_known() -> None:
    async def check(run: Running) -> None:
        async with run.connected("/echo?name=arm%201") as client:
            assert await client.recv() == "hello arm 1"
            sent: list[str | bytes] = ["grün", b"\x00\xff", "", b"", "x" * 1000]
            for message in sent:
                await client.send(message)
            assert [await client.recv() for _ in sent] == sent

    running(check)


def test_w1_a_query_that_cannot_be_read_is_refused() -> None:
    async def check(run: Running) -> None:
        async with run.connected("/echo?name=arm&" + "&".join(f"n{i}=" for i in range(64))) as client:
            assert await closed_with(client) == 1008

    running(check)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_w1_large_messages_are_what_was_sent(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            for size in (65_535, 65_536, 1_000_003):
                data = random.Random(size).randbytes(size)
                await client.send([data[:7], data[7:70_000], data[70_000:]])  # in fragments
                assert await client.recv() == data

    running(check, loop, Limits(max_body_bytes=2_000_000))


def test_w1_the_next_message_waits_for_the_answer_and_pings_do_not() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await client.send("next")
            await run.came.wait()
            await (await client.ping())
            assert run.seen == ["hold"]
            run.go.set()
            assert [await client.recv(), await client.recv()] == ["hold", "next"]

    running(check)


WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
VERSION, KEY = b"Sec-WebSocket-Version: 13\r\n", b"Sec-WebSocket-Key: cmVmbGV4LWJlbmNoLTEyMw==\r\n"
HANDSHAKES = {
    "no key": (VERSION, "missing Sec-WebSocket-Key header"),
    "short key": (VERSION + b"Sec-WebSocket-Key: eA==\r\n", "invalid Sec-WebSocket-Key header: eA=="),
    "two keys": (VERSION + KEY + KEY, "invalid Sec-WebSocket-Key header: multiple values"),
    "version": (b"Sec-WebSocket-Version: 7\r\n" + KEY, "invalid Sec-WebSocket-Version header: 7"),
    "long header": (
        VERSION + KEY + b"X: " + b"a" * 9000 + b"\r\n",
        "read 9005 bytes, expected no more than 8192 bytes",
    ),
    "body": (VERSION + KEY + b"Content-Length: 5\r\n", "did not receive a valid HTTP request"),
    "chunks": (VERSION + KEY + b"Transfer-Encoding: chunked\r\n", "did not receive a valid HTTP request"),
}


async def handshake(run: Running, head: bytes, start: bytes = b"GET /echo HTTP/1.1") -> bytes:
    """All that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    writer.write(start + b"\r\nHost: localhost\r\nConnection: close\r\n" + head + b"\r\n")
    data = await reader.read()
    writer.close()
    return data


@pytest.mark.parametrize("name", HANDSHAKES)
def test_w1_a_bad_handshake_is_answered_400_in_the_form_of_errors(name: str) -> None:
    async def check(run: Running) -> None:
        head, message = HANDSHAKES[name]
        (answer,) = parse_answers(await handshake(run, WEBSOCKET + head))
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert answer.json["message"] == f"no websocket can be opened: {message}"

    running(check)


def test_w1_a_plain_request_is_answered_as_one() -> None:
    async def check(run: Running) -> None:
        assert b" 404 " in await handshake(run, b"")
        assert b" 404 " in await handshake(run, WEBSOCKET + VERSION + KEY, b"GET /echo HTTP/1.0")

    running(check)


def test_w1_a_frame_behind_the_handshake_is_answered() -> None:
    async def check(run: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        frame = Frame(Opcode.TEXT, b"early").serialize(mask=True)
        writer.write(b"GET /echo HTTP/1.1\r\nHost: localhost\r\n" + WEBSOCKET + VERSION + KEY + b"\r\n" + frame)
        assert (await reader.readuntil(b"early")).endswith(b"hello you\x81\x05early")
        writer.close()

    running(check)


def test_w2_the_key_is_asked_for_in_either_scheme() -> None:
    async def check(run: Running) -> None:
        with pytest.raises(InvalidStatus) as info:
            async with run.connected():
                raise AssertionError("it was let in")
        assert info.value.response.status_code == 401
        assert b"unauthorized" in info.value.response.body
        for headers in ({"Authorization": "Api-Key secret"}, {"X-Reflex-Key": "secret"}):
            async with run.connected(additional_headers=headers) as client:
                assert await client.recv() == "hello you"

    running(check, api_key="secret")


def test_w2_a_page_of_another_site_gets_no_websocket() -> None:
    async def check(run: Running) -> None:
        with pytest.raises(InvalidStatus) as info:
            async with run.connected(origin="https://evil.example"):
                raise AssertionError("it was let in")
        assert info.value.response.status_code == 403
        async with run.connected(origin="http://localhost:3000") as client:
            assert await client.recv() == "hello you"

    running(check)


def test_w2_a_refused_handshake_is_one_warning_for_each_status(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        for path in ("/echo", "/nowhere", "/echo", "/nowhere"):
            headers = {} if path == "/echo" else {"X-Reflex-Key": "secret"}
            with pytest.raises(InvalidStatus):
                async with run.connected(path, additional_headers=headers):
                    raise AssertionError("it was let in")

    with caplog.at_level(logging.WARNING, "reflex"):
        running(check, api_key="secret")
    told = [record.message for record in caplog.records if "a websocket was refused" in record.message]
    assert [line.split(": ")[1][:3] for line in told] == ["401", "404"]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([Frame(Opcode.TEXT, b"\xff\xfe")], 1007),
        ([b"\x82\x01x"], 1002),  # not masked
        ([Frame(Opcode.CONT, b"x")], 1002),
    ],
    ids=["no UTF-8", "not masked", "a continuation of nothing"],
)
def test_w3_what_breaks_the_protocol_is_told_by_the_close_code(frames: list[Frame | bytes], code: int) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await raw(client, *frames)
            assert await closed_with(client) == code
        await run.gone.wait()
        assert run.app.active == run.app.bodies.held == 0

    running(check)


@pytest.mark.parametrize("sizes", [[MOST + 1], [40 * MOST], [MOST, 2], [3] + [MOST // 2] * 9, [2 * MOST, 1, 3 * MOST]])
def test_w3_a_message_that_is_too_large_closes_its_socket_with_1009_which_arrives(sizes: list[int]) -> None:
    """In fragments, too, and while the peer still sends."""

    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            last = len(sizes) - 1
            for i, size in enumerate(sizes):
                await raw(client, Frame(Opcode.CONT if i else Opcode.BINARY, bytes(size), fin=i == last))
            assert await closed_with(client) == 1009
        await run.gone.wait()

    running(check)


def test_w3_a_peer_that_reads_only_when_it_has_sent_all_gets_its_1009(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", PATIENCE)  # on a busy machine it takes its time

    async def check(run: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(b"GET /echo HTTP/1.1\r\nHost: localhost\r\n" + WEBSOCKET + VERSION + KEY + b"\r\n")
        await reader.readuntil(b"hello you")
        writer.write(Frame(Opcode.BINARY, bytes(200 * MOST)).serialize(mask=True))
        await writer.drain()
        await reader.readuntil((1009).to_bytes(2))
        writer.close()

    running(check, uvloop.new_event_loop)


def test_w3_bytes_behind_a_message_too_large_cost_no_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that goes on to send until its socket is closed takes no time from others."""
    behind: list[int] = []
    parse = ServerProtocol.receive_data

    def noting(conn: ServerProtocol, data: bytes) -> None:
        if conn.parser_exc is not None:
            behind.append(len(data))
        parse(conn, data)

    monkeypatch.setattr(ServerProtocol, "receive_data", noting)

    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await raw(client, *[Frame(Opcode.BINARY, bytes(MOST + 1))] * 50)
            assert await closed_with(client) == 1009
        await run.gone.wait()

    running(check)
    assert behind == []


def test_w3_a_bug_of_a_session_is_logged_and_closes_its_socket_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as other, run.connected() as client:
            await other.recv()
            await client.recv()
            await client.send("raise")
            assert await closed_with(client) == 1011
            await other.send("on")
            assert await other.recv() == "on"

    running(check)
    assert "a bug" in caplog.text


def test_w4_a_peer_that_vanishes_cancels_what_it_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await run.came.wait()
            assert run.app.active == 1
            client.transport.abort()
            await run.gone.wait()  # although nothing lets its message go
        assert run.app.active == run.app.bodies.held == 0

    with caplog.at_level(logging.INFO):
        running(check)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_w4_a_peer_that_closes_cancels_what_it_asked() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await run.came.wait()
            await client.close()
        await run.gone.wait()
        assert run.app.active == 0

    running(check)


def test_w4_a_silent_websocket_is_closed_and_one_that_pings_is_not() -> None:
    async def check(run: Running) -> None:
        async with run.connected(ping_interval=None) as pings, run.connected(ping_interval=None) as silent:
            await pings.recv()
            await silent.recv()
            for _ in range(5):
                moved(0.1)
                await (await pings.ping())
            assert await closed_with(silent) == 1001
            await pings.send("on")
            assert await pings.recv() == "on"

    running(check, StillLoop, Limits(idle_timeout_s=0.4))


def test_w4_who_waits_for_the_first_frame_or_an_answer_is_not_idle() -> None:
    async def check(run: Running) -> None:
        async with run.connected("/echo?late", ping_interval=None) as waits, run.connected(ping_interval=None) as asks:
            await asks.recv()
            await asks.send("hold")
            await run.came.wait()
            async with run.connected(ping_interval=None) as silent:
                await silent.recv()
                moved(1.0)
                assert await closed_with(silent) == 1001
            run.go.set()
            assert await waits.recv() == "hello you"
            assert await asks.recv() == "hold"

    running(check, StillLoop, Limits(idle_timeout_s=0.3))


def test_w4_with_too_many_bytes_held_the_newest_is_asked_to_come_later() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as first, run.connected() as second:
            await first.recv()
            await second.recv()
            await first.send("hold")
            await run.came.wait()
            held = run.app.bodies.held
            run.app.bodies.most = held + 1000
            await second.send(bytes(1001))
            assert await closed_with(second) == 1013
            assert run.app.bodies.held == held

    running(check)


def test_w4_half_messages_count_among_the_bytes_held() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as first, run.connected() as second:
            await first.recv()
            await second.recv()
            run.app.bodies.most = 50_000
            part = Frame(Opcode.BINARY, bytes(20_000), fin=False)
            await raw(first, part, Frame(Opcode.CONT, bytes(20_000), fin=False))
            await (await first.ping())
            held = run.app.bodies.held
            assert held >= 40_000
            await raw(second, Frame(Opcode.BINARY, bytes(30_000)).serialize(mask=True)[:20_000])
            assert await closed_with(second) == 1013
            assert run.app.bodies.held == held
            await raw(first, Frame(Opcode.CONT, b""))
            assert await first.recv() == bytes(40_000)
            await (await first.ping())
            assert run.app.bodies.held == 0

    running(check)


def test_w4_with_too_many_connections_the_newest_is_refused() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as first:
            await first.recv()
            with pytest.raises(InvalidStatus) as info:
                async with run.connected():
                    raise AssertionError("it was let in")
            assert (info.value.response.status_code, info.value.response.headers["retry-after"]) == (503, "1")
            await first.send("on")
            assert await first.recv() == "on"

    running(check, limits=Limits(max_connections=1))


def test_w4_a_peer_that_sends_ahead_of_its_answers_is_not_read_from() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await run.came.wait()
            sent = asyncio.ensure_future(_flood(client))
            for _ in range(200):
                await asyncio.sleep(0)
            assert not sent.done()
            run.go.set()
            assert await client.recv() == "hold"
            assert [len(await client.recv()) for _ in range(500)] == [50_000] * 500
            await sent

    running(check)


async def _flood(client: ClientConnection) -> None:
    for _ in range(500):
        await client.send(bytes(50_000))


def test_w5_at_the_end_the_last_answer_comes_and_then_1001() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await run.came.wait()
            run.app.close()
            run.go.set()
            assert await client.recv() == "hold"
            assert await closed_with(client) == 1001

    running(check)


@pytest.mark.parametrize("kind", [Opcode.PING, Opcode.PONG, Opcode.CONT, Opcode.TEXT])
def test_w6_others_are_served_between_frames_that_came_at_once(kind: Opcode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_S", 0.0)

    async def check(run: Running) -> None:
        async with run.connected(ping_interval=None) as client:
            await client.recv()
            parsed: list[int] = []
            server = run.connection()
            handle = server.handle_events

            def handle_events() -> None:
                parsed.append(len(server.conn.events))
                handle()

            server.handle_events = handle_events  # type: ignore[method-assign]
            begin = [Frame(Opcode.TEXT, b"", fin=False)] if kind is Opcode.CONT else []
            await raw(client, *begin, *[Frame(kind, b"", fin=kind is not Opcode.CONT)] * 3000)
            end = [Frame(Opcode.CONT, b"end")] if kind is Opcode.CONT else [Frame(Opcode.TEXT, b"end")]
            await raw(client, *end)
            while await client.recv() != "end":
                pass
            assert sum(parsed) > 3000
            assert max(parsed) <= FRAMES / len(Frame(kind, b"").serialize(mask=True)) + 1
            assert run.app.bodies.held == 0

    running(check)


def test_w6_messages_wait_as_bytes_while_one_is_answered() -> None:
    async def check(run: Running) -> None:
        async with run.connected(ping_interval=None) as client:
            await client.recv()
            await client.send("hold")
            await run.came.wait()
            server = run.connection()
            await raw(client, *[Frame(Opcode.TEXT, b"a")] * 5000)
            for _ in range(200):
                await asyncio.sleep(0)
            assert server.queue.qsize() <= FRAMES / 7 + 2  # a message of one byte has seven
            run.go.set()
            assert await client.recv() == "hold"
            assert [await client.recv() for _ in range(5000)] == ["a"] * 5000

    running(check)


def test_w6_parts_of_a_byte_are_held_in_one_buffer() -> None:
    async def check(run: Running) -> None:
        async with run.connected(ping_interval=None) as client:
            await client.recv()
            server = run.connection()
            await raw(client, Frame(Opcode.TEXT, b"a", fin=False), *[Frame(Opcode.CONT, b"b", fin=False)] * 1000)
            await (await client.ping())
            assert [len(part) for part in server.frames] == [1001]
            await raw(client, Frame(Opcode.CONT, b"c"))
            assert await client.recv() == "a" + 1000 * "b" + "c"

    running(check)


def test_w6_half_a_message_goes_with_its_connection() -> None:
    async def check(run: Running) -> None:
        async with run.connected(ping_interval=None) as client:
            await client.recv()
            server = run.connection()
            await raw(client, Frame(Opcode.BINARY, bytes(30_000), fin=False))
            await raw(client, Frame(Opcode.CONT, bytes(60_000)).serialize(mask=True)[:40_000])
            while run.app.bodies.held < 70_000:  # noqa: ASYNC110
                await asyncio.sleep(0)
            client.transport.abort()
            await run.gone.wait()
        assert (len(server.conn.reader.buffer), server.frames) == (0, [])

    running(check)
