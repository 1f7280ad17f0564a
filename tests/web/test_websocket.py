"""Websockets on the server's port, whatever a session says: against a session that echoes, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web import connections
from reflex_runtime.web.app import App
from reflex_runtime.web.connections import Phase
from reflex_runtime.web.errors import NotFound
from reflex_runtime.web.exchange import Route
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.incoming import LARGE_PAYLOAD, PIECE
from reflex_runtime.web.websocket import SocketMessage, WebSocket
from web.listening import listening

MOST = 100_000


class Echo:
    """Answers each message with itself: at once, or when the test says so (`hold`)."""

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.held: list[SocketMessage] = []
        self.came, self.gone = asyncio.Event(), asyncio.Event()

    def opened(self) -> None:
        self.socket.owe("late" in self.socket.query)
        self.socket.send("hello " + self.socket.query.get("name", "you"))

    def asked(self, message: SocketMessage) -> None:
        if message.data == "raise":
            raise RuntimeError("a bug")
        if message.data == "hold":
            self.held.append(message)
            self.came.set()
        elif message.data == "quiet":
            self.socket.answer()
        else:
            self.socket.answer(message.data)

    def failed(self, message: SocketMessage, error: ReflexError) -> str:
        return f"{error.code}: {error.message}"

    def left(self) -> None:
        self.gone.set()


class Running:
    """An application with /echo on a port."""

    def __init__(self, most: int = MOST, **options: Any) -> None:
        self.sessions: list[Echo] = []
        route = Route("/echo", self._plain, most=most, socket=self._session)
        self.app = App(ServeConfig(**options), {"/echo": route}, PLAIN)
        self.port = 0

    def _plain(self, exchange: Any, body: bytes) -> None:
        raise NotFound("a websocket is spoken here")

    def _session(self, socket: WebSocket) -> Echo:
        self.sessions.append(Echo(socket))
        return self.sessions[-1]

    def url(self, path: str = "/echo") -> str:
        return f"ws://127.0.0.1:{self.port}{path}"

    @asynccontextmanager
    async def connected(self, path: str = "/echo", **options: Any) -> AsyncIterator[ClientConnection]:
        async with connect(self.url(path), compression=None, max_size=None, **options) as client:
            yield client


def running(
    check: Callable[[Running], Coroutine[Any, Any, None]],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **options: Any,
) -> None:
    async def main() -> None:
        run = Running(**options)
        async with listening(run.app) as run.port:
            await check(run)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def closed_with(client: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as info:
        await client.recv()
    assert info.value.rcvd is not None
    return info.value.rcvd.code


async def until(what: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def raw(client: ClientConnection, *frames: Frame | bytes) -> None:
    """Send frames as they are."""
    data = b"".join(f if isinstance(f, bytes) else f.serialize(mask=True) for f in frames)
    client.transport.write(data)


def test_w1_text_and_binary_go_both_ways_in_their_order_and_the_query_is_known() -> None:
    async def check(run: Running) -> None:
        async with run.connected("/echo?name=arm%201") as client:
            assert await client.recv() == "hello arm 1"
            big = bytes(range(256)) * 390
            for sent in ("ä", b"\x00\xff", big, ""):
                await client.send(sent)
            assert [await client.recv() for _ in range(4)] == ["ä", b"\x00\xff", big, ""]
            await client.send(iter(["in ", "", "three"]))
            assert await client.recv() == "in three"
            await client.send("quiet")
            await client.send("next")
            assert await client.recv() == "next"
        await run.sessions[0].gone.wait()
        assert run.app.bodies.held == run.app.active == 0

    running(check)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_w1_large_messages_are_what_was_sent(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Whatever their length, whatever comes behind them, in one frame or in several."""
    draw = random.Random(14)

    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            sizes = (LARGE_PAYLOAD, LARGE_PAYLOAD + 1, 300_000, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7)
            sent = [part for size in sizes for part in (draw.randbytes(size), "small")]
            await raw(client, *(Frame(Opcode.TEXT if x == "small" else Opcode.BINARY, _bytes(x)) for x in sent))
            assert [await client.recv() for _ in sent] == sent
            parts = [draw.randbytes(size) for size in (300_000, 10, PIECE + 1)]
            await client.send(iter(parts))
            assert await client.recv() == b"".join(parts)
        await run.sessions[0].gone.wait()
        assert run.app.bodies.held == 0

    running(check, loop, most=4 * PIECE)


def _bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


def test_w4_a_length_that_is_announced_takes_no_memory() -> None:
    async def check(run: Running) -> None:
        async with run.connected(close_timeout=0.1) as client:  # its frame never ends, so there is no goodbye
            await client.recv()
            await raw(client, Frame(Opcode.BINARY, bytes(20 * PIECE)).serialize(mask=True)[: LARGE_PAYLOAD + 14])
            socket = run.sessions[0].socket
            await until(lambda: socket.held > 0)
            reader = socket._protocol.reader
            await until(lambda: reader.held == socket.held == LARGE_PAYLOAD)
            assert reader.room is not None
            assert len(reader.room) == PIECE - LARGE_PAYLOAD
        await run.sessions[0].gone.wait()
        assert run.app.bodies.held == 0
        assert reader.room is None

    running(check, most=20 * PIECE)


def test_w1_the_next_message_waits_for_the_answer_and_pings_do_not() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await run.sessions[0].came.wait()
            await client.send("second")
            await (await client.ping())
            assert run.app.active == 1
            run.sessions[0].socket.answer("first")
            assert [await client.recv(), await client.recv()] == ["first", "second"]

    running(check)


def test_w1_a_plain_request_is_answered_as_one_and_a_bad_handshake_is_400() -> None:
    async def check(run: Running) -> None:
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        upgrade += "Sec-WebSocket-Key: short\r\n"
        for path, head, status in (("/echo", "", b"404"), ("/echo", upgrade, b"400"), ("/other", upgrade, b"404")):
            reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
            assert (await reader.readline()).split()[1] == status
            writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b'"no such path: /nothing"' in await reader.read()  # it goes on as HTTP
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(f"POST /other HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n{upgrade}\r\n".encode())
        assert (await reader.readline()).split()[1] == b"404"
        writer.write(b"hello" + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b'"no such path: /nothing"' in await reader.read()
        writer.close()
        with pytest.raises(InvalidStatus) as info:
            async with run.connected("/other"):
                pass
        assert info.value.response.status_code == 404

    running(check)


def test_w2_the_key_is_asked_for_in_either_scheme() -> None:
    async def check(run: Running) -> None:
        for scheme in ("Bearer", "Api-Key", "api-key"):
            async with run.connected(additional_headers={"Authorization": f"{scheme} secret"}) as client:
                await client.recv()
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": "Basic secret"}):
            with pytest.raises(InvalidStatus) as info:
                async with run.connected(additional_headers=headers):
                    pass
            assert info.value.response.status_code == 401

    running(check, api_key="secret")


def test_w2_a_page_of_another_site_gets_no_websocket() -> None:
    async def check(run: Running) -> None:
        async with run.connected(origin="http://localhost") as client:
            await client.recv()
        with pytest.raises(InvalidStatus) as info:
            async with run.connected(origin="http://evil.example"):
                pass
        assert info.value.response.status_code == 403

    running(check)


def test_w2_a_refused_handshake_is_one_warning_for_each_status(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        for path, key in (("/echo", "wrong"), ("/echo?name=arm", "wrong"), ("/other", "secret")):
            with pytest.raises(InvalidStatus):
                async with run.connected(path, additional_headers={"Authorization": f"Bearer {key}"}):
                    pass
        async with run.connected(additional_headers={"Authorization": "Bearer secret"}) as client:
            await client.recv()

    running(check, api_key="secret")
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "reflex.server"] == [
        ("WARNING", "a websocket was refused: 401 unauthorized: send the key as Authorization: Bearer KEY, "
         "X-Reflex-Key or x-api-key (repeats are not logged)"),
        ("WARNING", "a websocket was refused: 404 not_found: no such path: /other (repeats are not logged)"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([Frame(Opcode.CONT, b"x")], 1002),
        ([Frame(Opcode.BINARY, b"x", fin=False), Frame(Opcode.TEXT, b"x")], 1002),
        ([b"\xc2\x80\0\0\0\0"], 1002),  # compressed, which was not agreed on
        ([b"\x82\0"], 1002),  # not masked
        ([Frame(Opcode.TEXT, b"\xff")], 1007),
        ([Frame(Opcode.TEXT, b"\xc3", fin=False), Frame(Opcode.CONT, b"(")], 1007),
        ([Frame(Opcode.BINARY, bytes(MOST + 1))], 1009),
        ([Frame(Opcode.BINARY, bytes(MOST), fin=False), Frame(Opcode.CONT, b"x")], 1009),
    ],
)
def test_w3_what_breaks_the_protocol_is_told_by_the_close_code(frames: list[Frame | bytes], code: int) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await raw(client, *frames)
            assert await closed_with(client) == code
        assert run.app.bodies.held == 0

    running(check)


def test_w3_an_error_is_a_frame_and_the_socket_stays_open(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("raise")
            assert "internal error" in str(await client.recv())
            await client.send("again")
            assert await client.recv() == "again"

    running(check)
    assert "a bug" in caplog.text


def test_w4_a_peer_that_vanishes_is_an_event_and_not_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        async with run.connected() as client:
            await client.recv()
            await client.send("hold")
            await run.sessions[0].came.wait()
            client.transport.abort()
            await run.sessions[0].gone.wait()
            assert run.app.active == 1  # what it asked is not settled yet
            run.sessions[0].socket.answer("too late")
            assert run.app.active == 0

    with caplog.at_level(logging.INFO):
        running(check)
    assert not caplog.records


def test_w4_a_silent_websocket_is_closed_and_one_that_pings_is_not() -> None:
    async def check(run: Running) -> None:
        async with run.connected(ping_interval=0.05) as lively, run.connected(ping_interval=None) as silent:
            await lively.recv()
            await silent.recv()
            assert await closed_with(silent) == 1001
            await lively.send("still there")
            assert await lively.recv() == "still there"

    running(check, idle_timeout_s=0.5)


def test_w4_who_waits_for_the_first_frame_is_not_idle() -> None:
    async def check(run: Running) -> None:
        async with run.connected("/echo?late", ping_interval=None) as waiting:
            async with run.connected(ping_interval=None) as idle:
                await waiting.recv()
                await idle.recv()
                assert await closed_with(idle) == 1001
            await waiting.send("still there")
            assert await waiting.recv() == "still there"
            run.sessions[0].socket.owe(False)
            assert await closed_with(waiting) == 1001

    running(check, idle_timeout_s=0.5)


def test_w4_half_a_message_is_not_waited_for_forever() -> None:
    async def check(run: Running) -> None:
        async with run.connected(ping_interval=None) as client:
            await client.recv()
            await raw(client, Frame(Opcode.BINARY, b"half", fin=False))
            assert await closed_with(client) == 1008

    running(check, body_timeout_s=0.3)


def test_w4_with_too_many_bytes_held_the_newest_is_asked_to_come_later() -> None:
    async def check(run: Running) -> None:
        run.app.bodies.most = 50_000
        async with run.connected() as first, run.connected() as second:
            await first.recv()
            await second.recv()
            await raw(first, Frame(Opcode.BINARY, bytes(40_000), fin=False))
            await until(lambda: run.app.bodies.held >= 40_000)
            await raw(second, Frame(Opcode.BINARY, bytes(20_000)))
            assert await closed_with(second) == 1013
            await raw(first, Frame(Opcode.CONT, b"end"))
            assert await first.recv() == bytes(40_000) + b"end"

    running(check)


def test_w4_who_is_told_to_come_later_holds_nothing_from_then_on_and_may_send_the_rest() -> None:
    async def check(run: Running) -> None:
        run.app.bodies.most = 50_000
        async with run.connected() as first:
            await first.recv()
            await raw(first, Frame(Opcode.BINARY, bytes(40_000), fin=False))
            await until(lambda: run.app.bodies.held >= 40_000)
            held = run.app.bodies.held
            reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
            await upgraded(reader, writer)
            whole = _masked(Opcode.BINARY, bytes(90_000))
            writer.write(whole[:9000])
            await until(lambda: run.app.bodies.held > held)
            writer.write(whole[9000:60_000])
            assert (await reader.readexactly(4))[2:] == (1013).to_bytes(2, "big")
            assert run.app.bodies.held == held
            await reader.read()  # its reason and its end
            writer.write(whole[60_000:] + whole)
            await writer.drain()
            await (await first.ping())
            assert run.app.bodies.held == held
            writer.close()

    running(check)


def test_w4_with_too_many_connections_the_one_idle_for_longest_is_closed() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as first, run.connected() as second:
            await first.recv()
            await second.recv()
            await (await first.ping())
            async with run.connected() as third:
                await third.recv()
                assert await closed_with(second) == 1001
                await first.send("still there")
                assert await first.recv() == "still there"

    running(check, max_connections=2)


def test_w4_a_peer_that_does_not_read_is_not_read_from() -> None:
    async def check(run: Running) -> None:
        async with run.connected(max_queue=1, write_limit=2**20) as client:
            await client.recv()
            sending = asyncio.create_task(_send_many(client))
            await until(lambda: run.sessions[0].socket.phase is Phase.SLOW)
            assert not run.sessions[0].socket.transport.is_reading()
            for _ in range(200):
                assert len(await client.recv()) == 90_000
            await sending
        assert run.app.bodies.held == 0

    running(check)


async def _send_many(client: ClientConnection) -> None:
    for _ in range(200):
        await client.send(bytes(90_000))


def test_w5_at_the_end_the_last_answer_comes_and_then_1001() -> None:
    async def check(run: Running) -> None:
        async with run.connected() as busy, run.connected() as idle, run.connected() as late:
            for client in (busy, idle, late):
                await client.recv()
            await busy.send("hold")
            await run.sessions[0].came.wait()
            run.app.close()
            await late.send("more")
            assert str(await late.recv()).startswith("shutting_down")
            assert await closed_with(late) == 1001
            with pytest.raises(InvalidStatus) as info:
                async with run.connected():
                    pass
            assert info.value.response.status_code == 503
            for connection in run.app.connections.all():
                connection.shutdown()
            assert await closed_with(idle) == 1001
            run.sessions[0].socket.answer("the last")
            assert await busy.recv() == "the last"
            assert await closed_with(busy) == 1001
            await run.app.wait_idle()
            await run.app.connections.wait_empty()

    running(check)


def _masked(opcode: Opcode, data: bytes) -> bytes:
    return Frame(opcode, data).serialize(mask=True)


async def _longest_turn(stop: asyncio.Event) -> float:
    """The longest time that this loop took from one turn to the next, in seconds of the processor."""
    longest, before = 0.0, time.thread_time()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


@pytest.mark.long
@pytest.mark.parametrize("opcode", [Opcode.BINARY, Opcode.PING, Opcode.CONT])
def test_w1_thousands_of_empty_frames_do_not_hold_the_loop(opcode: Opcode) -> None:
    async def check(run: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        await upgraded(reader, writer)
        stop = asyncio.Event()
        longest = asyncio.create_task(_longest_turn(stop))
        if opcode is Opcode.CONT:
            writer.write(Frame(Opcode.BINARY, b"", fin=False).serialize(mask=True))
        part = Frame(opcode, b"", fin=opcode is not Opcode.CONT).serialize(mask=True)
        writer.write(part * 100_000)
        writer.write(_masked(Opcode.CLOSE, b""))
        while await reader.read(65_536):
            pass
        stop.set()
        assert await longest < 0.1
        assert run.app.bodies.held == 0
        writer.close()

    running(check)


def test_w4_small_messages_wait_unparsed_behind_the_one_that_is_answered() -> None:
    async def check(run: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        await upgraded(reader, writer)
        writer.write(_masked(Opcode.TEXT, b"hold"))
        writer.write(b"".join(_masked(Opcode.TEXT, b"%d" % i) for i in range(20_000)))
        session = run.sessions[0]
        await session.came.wait()
        await until(lambda: not session.socket.transport.is_reading())
        assert len(session.socket._waiting) < 1000
        session.socket.answer("held")
        answers = b"".join([Frame(Opcode.TEXT, b"%d" % i).serialize(mask=False) for i in range(20_000)])
        expected = Frame(Opcode.TEXT, b"held").serialize(mask=False) + answers
        assert await reader.readexactly(len(expected)) == expected
        assert run.app.bodies.held == 0
        writer.close()

    running(check)


@pytest.mark.parametrize("how", ["the server closes", "the protocol is broken"])
def test_w4_what_comes_on_a_closing_websocket_is_not_kept_and_not_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CLOSES", 0.5)

    async def check(run: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        await upgraded(reader, writer)
        socket = run.sessions[0].socket
        writer.write(_masked(Opcode.TEXT, b"hold") + _masked(Opcode.TEXT, bytes(1000)) * 3)
        await run.sessions[0].came.wait()
        assert run.app.bodies.held > 3000
        if how == "the server closes":
            socket.close(1001, "enough")
        else:
            writer.write(_masked(Opcode.CONT, b"of nothing"))
        await until(lambda: socket.phase is Phase.CLOSING)
        assert run.sessions[0].gone.is_set()  # its answer could not be sent
        assert run.app.bodies.held == len(b"hold")
        for _ in range(20):
            writer.write(_masked(Opcode.BINARY, bytes(50_000)))
            await writer.drain()
        await until(lambda: run.app.bodies.held < 100_000 and not socket._protocol.events)
        await until(lambda: not len(run.app.connections))  # although the other side never closes
        writer.close()

    running(check)


async def upgraded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for a websocket by hand, and read as far as the greeting."""
    writer.write(
        b"GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    await reader.readexactly(2 + len("hello you"))
