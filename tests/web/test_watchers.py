"""Watchers over real sockets: one snapshot for all of them, none while nobody looks, and none that is waited for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.journal_writer import JournalWriter
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web import watchers
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import HttpResponse
from reflex_runtime.web.watchers import JOURNAL, MOST, STREAM, JournalStreams, Watchers, dashboard_routes
from web.listening import listening


def other_form(error: ReflexError, request_id: str, packed: bool) -> HttpResponse:
    return HttpResponse(error.http_status, b"in a form that no page reads")


HEAD = "GET /dashboard/stream HTTP/1.1\r\nHost: localhost\r\n"


class Numbers:
    """A fold whose snapshots are numbers, and what the test makes of them."""

    def __init__(self, run: Running) -> None:
        self.run = run

    def __call__(self, event: Any) -> None:
        raise AssertionError("no event is published here")

    def snapshot(self, now: float, server: Mapping[str, Any]) -> dict[str, Any]:
        self.run.taken += 1
        self.run.failed += not self.run.divisor
        return {"number": self.run.taken, "text": self.run.text, "server": server, "never": 1 / self.run.divisor}


class Running:
    """An application with a dashboard on a port."""

    def __init__(self, **options: Any) -> None:
        self.sinks: list[Any] = []
        self.made = self.taken = self.failed = 0
        self.text, self.divisor = "", 1
        self.watchers = Watchers(self.make, self.sinks.append, self.sinks.remove, lambda: {"state": "ready"})
        routes = {route.path: route for route in dashboard_routes(self.watchers)}
        self.app = App(ServeConfig(**options), routes, other_form)
        self.port = 0

    def make(self, now: float) -> Numbers:
        self.made += 1
        return Numbers(self)

    @asynccontextmanager
    async def asking(self, more: str = "") -> AsyncIterator[asyncio.StreamReader]:
        """The answer to one watcher, from its status line on."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        writer.write(f"{HEAD}{more}\r\n".encode())
        try:
            yield reader
        finally:
            writer.close()


def running(check: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        run = Running(**options)
        async with listening(run.app) as run.port:
            await check(run)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "EVERY", 0.005)


async def line(reader: asyncio.StreamReader) -> Any:
    """The next snapshot."""
    while not (found := await reader.readline()).startswith(b"{"):
        assert found
    return json.loads(found)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_x4_all_watchers_get_the_same_snapshots_and_none_is_made_without_them() -> None:
    async def check(run: Running) -> None:
        assert (run.sinks, run.taken) == ([], 0)
        async with run.asking() as one, run.asking() as two:
            first, second = await line(one), await line(two)
            while first["number"] < second["number"]:
                first = await line(one)
            while second["number"] < first["number"]:
                second = await line(two)
            assert first == second
            assert (run.made, len(run.sinks), len(run.watchers)) == (1, 1, 2)
            assert first["server"] == {"state": "ready", "watchers": 2}
        await until(lambda: len(run.watchers) == 0)
        assert run.sinks == []
        taken = run.taken
        async with run.asking() as again:
            await line(again)
        await until(lambda: len(run.watchers) == 0)
        assert (run.made, run.sinks) == (2, [])
        assert run.taken > taken
        assert run.app.active == 0

    running(check)


def test_x4_one_that_does_not_read_misses_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "EVERY", 3600.0)  # the test makes them

    async def check(run: Running) -> None:
        run.text = "x" * 400_000
        async with run.asking() as slow, run.asking() as quick:
            await until(lambda: len(run.watchers) == 2)
            slow._transport.pause_reading()  # type: ignore[attr-defined]
            for number in range(1, 41):
                run.watchers._tell()
                assert (await line(quick))["number"] == number  # the other gets every one
            slow._transport.resume_reading()  # type: ignore[attr-defined]
            got = (await line(slow))["number"]
            while (number := (await line(slow))["number"]) == got + 1:
                got = number
            assert number > got + 1  # it sees by the numbers what it missed

    running(check)


def test_x4_seventeen_are_too_many() -> None:
    async def check(run: Running) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(MOST):
                await line(await stack.enter_async_context(run.asking()))
            late = await stack.enter_async_context(run.asking())
            assert b" 429 " in await late.readline()
            assert b"16 watchers are connected" in await late.read(4096)
        await until(lambda: len(run.watchers) == 0)

    running(check)


def test_x4_a_draining_server_ends_them() -> None:
    async def check(run: Running) -> None:
        async with run.asking() as one:
            await line(one)
            run.watchers.close()
            while (await one.readline()) != b"0\r\n":
                pass
            assert (run.sinks, run.app.active) == ([], 0)

    running(check)


def test_x4_none_comes_to_a_draining_server() -> None:
    async def check(run: Running) -> None:
        run.app.close()
        async with run.asking() as late:
            assert b" 503 " in await late.readline()
            assert json.loads((await late.read()).split(b"\r\n\r\n")[1])["message"] == "the server is shutting down"
        assert (len(run.watchers), run.sinks, run.app.active) == (0, [], 0)

    running(check)


def test_x4_the_connection_of_one_that_has_left_is_closed() -> None:
    async def check(run: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(f"{HEAD}\r\n".encode())
        await line(reader)
        writer.write_eof()  # a program that ends closes both sides, which looks the same here
        await reader.read()  # the server closes it
        await until(lambda: run.app.active == 0)
        assert (len(run.watchers), run.sinks) == (0, [])
        writer.close()

    running(check)


def test_x4_a_snapshot_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    async def check(run: Running) -> None:
        async with run.asking() as one:
            await line(one)
            run.divisor = 0
            await until(lambda: "could not be made" in caplog.text)
            tried = run.failed
            await until(lambda: run.failed > tried + 2)
            assert caplog.text.count("could not be made") == 1
            run.divisor = 1
            assert (await line(one))["number"] > 1

    running(check)


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_h5_the_stream_needs_the_key_and_the_page_does_not(key: str) -> None:
    async def check(run: Running) -> None:
        async with run.asking() as plain:
            assert (b" 401 " if key else b" 200 ") in await plain.readline()
        async with run.asking("X-Reflex-Key: s3cret\r\n") as keyed:
            assert b" 200 " in await keyed.readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(b"GET /dashboard HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = await reader.read()
        writer.close()
        assert b" 200 " in page.split(b"\r\n")[0]
        assert b"default-src 'self'" in page
        assert STREAM.encode() not in page  # it holds no data and no address but those of its files

    running(check, api_key=key)


def test_x4_a_page_of_another_site_is_refused_where_there_is_no_key() -> None:
    async def check(run: Running) -> None:
        async with run.asking("Origin: http://evil.example\r\n") as other:
            assert b" 403 " in await other.readline()
        async with run.asking("Origin: http://localhost\r\n") as own:
            assert b" 200 " in await own.readline()

    running(check)


def test_b20_a_journal_whose_time_is_over_as_a_drain_begins_ends_once() -> None:
    async def main() -> None:
        streams = JournalStreams(lambda pipe: JournalWriter(pipe, []), lambda writer: None)
        app = App(ServeConfig(), {JOURNAL: streams.route}, other_form)
        loop, failed = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda loop, context: failed.append(context["message"]))
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {JOURNAL}?seconds=600 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await reader.readuntil(b"\n\r\n")
            await until(lambda: bool(streams._limits))
            (limit,), over = streams._limits, loop.time() + 0.01
            limit.reschedule(over)
            loop.call_at(over + 1e-6, streams.close)  # in the turn in which its time is over
            assert b'"kind":"footer"' in await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()
        assert failed == []

    asyncio.run(main())
