"""One end of a connection, on real socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from ipc.engines import PATIENCE, play
from ipc.rpc import answer, call, note, refusal
from reflex_runtime.core.errors import QueueFull, ReflexError
from reflex_runtime.ipc.frames import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    FrameDecoder,
    ProtocolError,
    Reader,
    RpcError,
    RpcMessage,
    encode,
)
from reflex_runtime.ipc.peer import ConnectionLost, Peer

ANY = Reader(Any)


class End:
    """Answers `echo`; `fail`, `break`: raises; `later`: keeps it; `hang up`: closes. Remembers everything."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []
        self.kept: list[RpcMessage] = []
        self.lost_with: list[Exception | None] = []
        self.turns: list[int] = []
        self._news = asyncio.Event()

    def called(self, peer: Peer, request: RpcMessage) -> None:
        params = ANY.read(request.params)
        if request.method == "fail":
            raise QueueFull("full", limit=3)
        if request.method == "fail oddly":
            raise QueueFull("full", limit=object())  # type: ignore[arg-type]
        if request.method == "break":
            raise ZeroDivisionError("secret")
        if request.method == "later":
            self.kept.append(request)
        elif request.method == "hang up":
            peer.close()
        else:
            peer.respond(request, object() if request.method == "odd" else params)
        self._news.set()

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        self.notes.append((note.method, ANY.read(note.params)))
        self._news.set()
        if note.method == "break":
            raise ZeroDivisionError

    def lost(self, peer: Peer, error: Exception | None) -> None:
        self.lost_with.append(error)
        self._news.set()

    async def noted(self, count: int) -> None:
        while len(self.notes) + len(self.kept) < count:
            self._news.clear()
            await self._news.wait()


@contextlib.asynccontextmanager
async def pair(most: int = 1 << 20) -> AsyncIterator[tuple[Peer, Peer, End, End]]:
    loop = asyncio.get_running_loop()
    here, there = End(), End()
    ours, theirs = socket.socketpair()
    _, a = await loop.create_connection(lambda: Peer(here, most), sock=ours)
    _, b = await loop.create_connection(lambda: Peer(there, most), sock=theirs)
    try:
        async with asyncio.timeout(PATIENCE):
            yield a, b, here, there
    finally:
        a.abort()
        b.abort()
        await asyncio.sleep(0)  # their sockets are closed at the end of the turn


@contextlib.asynccontextmanager
async def raw() -> AsyncIterator[tuple[Peer, End, socket.socket]]:
    """A peer, and a socket where another one should be."""
    loop = asyncio.get_running_loop()
    end = End()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, peer = await loop.create_connection(lambda: Peer(end), sock=ours)
    try:
        async with asyncio.timeout(PATIENCE):
            yield peer, end, theirs
    finally:
        peer.abort()
        await asyncio.sleep(0)
        theirs.close()


async def received(sock: socket.socket, count: int) -> list[list[Any]]:
    """So many frames."""
    loop, decoder, frames = asyncio.get_running_loop(), FrameDecoder(), []
    while len(frames) < count:
        decoder.feed(await loop.sock_recv(sock, 1 << 16))
        frames += list(decoder)
    assert decoder.pending == 0
    return frames


async def asked(peer: Peer, method: str, params: Any) -> Any:
    answer = await peer.call(method, params)
    return ANY.read(answer)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_calls_go_both_ways() -> None:
    async def main() -> None:
        async with pair() as (a, b, _, _):
            assert await asyncio.gather(asked(a, "echo", [1]), asked(b, "echo", {"x": "ü"})) == [[1], {"x": "ü"}]

    play(main())


def test_answers_find_their_calls_in_whatever_order_they_come() -> None:
    async def main() -> None:
        async with pair() as (a, b, _, there):
            calls = [a.call("later", n) for n in range(3)]
            await there.noted(3)
            for request in reversed(there.kept):
                b.respond(request, ANY.read(request.params))
            assert [ANY.read(x) for x in await asyncio.gather(*calls)] == [0, 1, 2]

    play(main())


def test_what_is_said_in_one_turn_is_one_frame() -> None:
    async def main() -> None:
        async with raw() as (peer, _, sock):
            calls = [peer.call("later", n) for n in range(3)]
            for n in range(100):
                peer.notify("note", n)
            [messages] = await received(sock, 1)
            assert [message.method for message in messages] == ["later"] * 3 + ["note"] * 100
            assert (peer.frames, peer.calls["later"], peer.notes["note"]) == (1, 3, 100)
            peer.notify("note", 0)
            await received(sock, 1)
            assert peer.frames == 2
            assert not any(call.done() for call in calls)

    play(main())


def test_errors_of_a_handler_are_answered_and_say_no_more_than_they_should(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair() as (a, _, _, there):
            with pytest.raises(QueueFull, match="full") as full:
                await a.call("fail", {})
            assert dict(full.value.details) == {"limit": 3}
            with pytest.raises(ReflexError, match="internal error; the log") as internal:
                await a.call("break", {})
            assert type(internal.value) is ReflexError
            a.notify("break", {})
            assert await asked(a, "echo", 1) == 1  # and the connection lives
            assert len(there.notes) == 1

    play(main())
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_cancelled_call_is_forgotten() -> None:
    async def main() -> None:
        async with pair() as (a, b, _, there):
            call = a.call("later", {})
            await there.noted(1)
            call.cancel()
            b.respond(there.kept[0], "too late")
            assert await asked(a, "echo", 1) == 1
            assert a._waiting == {}

    play(main())


def test_what_was_said_before_the_connection_is_made_is_not_lost() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        peer = Peer(End())
        peer.notify("early", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        await loop.create_connection(lambda: peer, sock=ours)
        async with asyncio.timeout(PATIENCE):
            [[note]] = await received(theirs, 1)
        assert note.method == "early"
        peer.abort()
        await asyncio.sleep(0)
        theirs.close()

    play(main())


# -- what is too much --------------------------------------------------------------------------------------------------


def test_a_message_that_is_too_large_fails_alone() -> None:
    async def main() -> None:
        async with pair(most=2000) as (a, _, _, there):
            a.notify("before", 1)
            large, small = a.call("echo", "x" * 3000), a.call("echo", 2)
            a.notify("lost", "x" * 3000)
            a.notify("after", 3)
            with pytest.raises(ProtocolError, match="at most 2000"):
                await large
            assert ANY.read(await small) == 2
            assert there.notes == [("before", 1), ("after", 3)]

    play(main())


def test_many_messages_that_are_too_large_together_all_come() -> None:
    async def main() -> None:
        async with pair(most=2000) as (a, _, _, _):
            answers = await asyncio.gather(*(asked(a, "echo", str(n) * 300) for n in range(10)))
            assert answers == [str(n) * 300 for n in range(10)]

    play(main())


def test_an_answer_that_cannot_be_written_is_an_error_of_that_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair() as (a, _, _, _):
            odd, odder, even = a.call("odd", 1), a.call("fail oddly", 1), a.call("echo", 2)
            with pytest.raises(ProtocolError, match="cannot be written") as caught:
                await odd
            assert caught.value.rpc_code == INTERNAL_ERROR
            with pytest.raises(ProtocolError, match="an error that cannot be written"):
                await odder
            await even

    play(main())


def test_a_call_that_cannot_be_written_fails_alone() -> None:
    async def main() -> None:
        async with pair() as (a, _, _, _):
            odd, even = a.call("echo", object()), a.call("echo", 2)
            with pytest.raises(ProtocolError, match="cannot be written"):
                await odd
            await even

    play(main())


def test_who_does_not_read_is_congestion_until_he_does() -> None:
    async def main() -> None:
        async with raw() as (peer, _, sock):
            relief = asyncio.Event()
            peer.on_relief = relief.set
            while not peer.congested:
                peer.notify("x", "y" * 100_000)
                peer.flush()
            assert peer.buffered > 0
            loop = asyncio.get_running_loop()
            while not relief.is_set():
                await loop.sock_recv(sock, 1 << 20)
            assert not peer.congested

    play(main())


# -- the end -----------------------------------------------------------------------------------------------------------


def test_calls_that_wait_fail_once_when_the_connection_is_lost() -> None:
    async def main() -> None:
        async with raw() as (peer, end, sock):
            calls = [peer.call("x", n) for n in range(3)]
            await received(sock, 1)
            calls[0].cancel()
            sock.close()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(outcomes[0], asyncio.CancelledError)
            for error in outcomes[1:]:
                assert isinstance(error, ConnectionLost)
                assert (error.written, error.retry_safe, error.http_status) == (True, False, 503)
            assert end.lost_with == [None]
            await peer.ended
            peer.close()
            peer.abort()
            assert end.lost_with == [None]

    play(main())


def test_a_call_says_whether_it_may_have_been_read() -> None:
    async def main() -> None:
        async with raw() as (peer, _, sock):
            sent = peer.call("x", 1)
            await received(sock, 1)
            unsent = peer.call("x", 2)
            peer.abort()
            late = peer.call("x", 3)
            peer.notify("x", 4)
            for call, written in ((sent, True), (unsent, False), (late, False)):
                with pytest.raises(ConnectionLost) as caught:
                    await call
                assert caught.value.written is written

    play(main())


def test_what_was_said_before_close_is_written() -> None:
    async def main() -> None:
        async with raw() as (peer, end, sock):
            peer.notify("last words", {})
            peer.close()
            [[note]] = await received(sock, 1)
            assert note.method == "last words"
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            assert end.lost_with == [None]

    play(main())


def test_abort_also_ends_what_is_closed_and_still_writes() -> None:
    async def main() -> None:
        async with raw() as (peer, _, sock):
            said = 0
            while not peer.congested:
                peer.notify("x", "y" * 100_000)
                peer.flush()
                said += 100_000
            peer.close()
            assert peer.buffered > 0
            peer.abort()
            await asyncio.sleep(0)
            read = 0
            while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
                read += len(data)
            assert read < said

    play(main())


def test_a_connection_that_ends_inside_a_frame_says_so() -> None:
    async def main() -> None:
        async with raw() as (_, end, sock):
            sock.send(encode([note("x")])[:-1])
            sock.close()
            while not end.lost_with:
                await end._news.wait()
                end._news.clear()
            assert isinstance(end.lost_with[0], ProtocolError)
            assert "inside a frame" in str(end.lost_with[0])

    play(main())


def test_nothing_is_delivered_after_it_was_closed() -> None:
    async def main() -> None:
        async with raw() as (peer, end, sock):
            sock.send(encode([call(1, "hang up"), note("x")]) * 2)
            await peer.ended
            await asyncio.sleep(0)
            assert (end.notes, end.lost_with) == ([], [None])

    play(main())


# -- JSON-RPC 2.0 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", PARSE_ERROR),
        (b"J\x00\x00\x00\x01{", PARSE_ERROR),
        (encode([note("x")]) + b'J\x00\x00\x00\x0d[{"id":7}, 3]', INVALID_REQUEST),
    ],
)
def test_who_breaks_the_protocol_is_told_and_the_connection_ends(data: bytes, code: int) -> None:
    async def main() -> None:
        async with raw() as (peer, end, sock):
            waiting = peer.call("x", 1)
            await received(sock, 1)
            sock.send(data)
            [[answer]] = await received(sock, 1)
            assert (answer.id, answer.error.code) == (None, code)
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            assert isinstance(end.lost_with[0], ProtocolError)
            with pytest.raises(ConnectionLost):
                await waiting

    play(main())


def test_notifications_and_answers_are_never_answered() -> None:
    async def main() -> None:
        async with raw() as (_, end, sock):
            strange = [note("break"), note("fail", 1), answer(99, 1), answer("x", 1)]
            sock.send(encode([*strange, refusal(None, RpcError(PARSE_ERROR, "what?"))]))
            sock.send(encode([call(None, "echo", 1), call("é", "echo", 2)]))
            [messages] = await received(sock, 1)
            assert messages == [answer(None, msgspec.Raw(b"1")), answer("é", msgspec.Raw(b"2"))]
            assert len(end.notes) == 2

    play(main())
