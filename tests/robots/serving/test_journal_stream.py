"""GET /diagnostics/journal."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reflex_runtime.observe.journal import Journal, read_journal
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.run.process import in_thread
from reflex_runtime.web import watchers
from reflex_runtime.web.app import App
from serving.harness import PATIENCE, STATE, Server
from serving.in_process import Caller, with_app

KEY = {"Authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with Server(tiny, "--api-key", "s3cret", "--max-batch-size", "7") as running:
        yield running


@contextmanager
def journal(server: Server, seconds: str = "1", **headers: str) -> Iterator[http.client.HTTPResponse]:
    """An answer whose head has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        connection.request("GET", f"/diagnostics/journal?seconds={seconds}", headers=headers or KEY)
        yield connection.getresponse()
    finally:
        connection.close()


def read(lines: bytes, tmp_path: Path) -> Journal:
    (tmp_path / "run.jsonl").write_bytes(lines)
    return read_journal(tmp_path / "run.jsonl")


def test_x4_a_running_server_sends_the_journal_of_the_next_seconds(server: Server, tmp_path: Path) -> None:
    assert server.post({"state": STATE, "robot_id": "before"}, KEY).status == 200
    with journal(server, "4") as response:
        assert (response.status, response.getheader("content-type")) == (200, "application/x-ndjson")
        head = response.readline()
        assert server.post({"state": STATE, "robot_id": "arm-7", "instruction": "secret"}, KEY).status == 200
        lines = head + response.read()
    found = read(lines, tmp_path)
    assert found.groups["prod"].max_size == 7
    assert found.warm["prod"].batches  # what a schedule of it begins with
    assert [line.schedule.client for line in found.requests if line.schedule] == ["arm-7"]
    assert [batch.size for batch in found.batches] == [1]
    assert found.footer is not None
    assert (found.footer.total_requests, found.footer.dropped) == (1, 0)
    assert b"secret" not in lines  # no payloads
    assert b"\n\n" in lines  # the blank line of a second


def test_h5_what_is_no_time_or_has_no_key_is_refused(server: Server) -> None:
    assert server.get("/diagnostics/journal").status == 401
    for query, field in (("seconds=0.5", "seconds"), ("seconds=nan", "seconds"), ("second=3", "second")):
        answer = server.get(f"/diagnostics/journal?{query}", **KEY)
        assert (answer.status, answer.code, answer.json["field"]) == (422, "invalid_request", field)


def test_x4_as_many_journals_as_there_may_be_and_a_place_again_for_one_that_left(server: Server) -> None:
    with journal(server, "600") as one, journal(server, "600") as two, journal(server, "600") as three:
        with journal(server, "600") as four:
            assert [other.status for other in (one, two, three, four)] == [200] * watchers.READERS
            with journal(server) as five:
                assert five.status == 429
        server.wait_until(lambda: server.ask("HEAD", "/diagnostics/journal?seconds=1", headers=KEY).status == 200)


LONG = "/diagnostics/journal?seconds=600"


def test_x4_those_that_come_in_one_turn_are_counted_and_one_that_leaves_at_once_has_no_journal(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        callers = [Caller(app, LONG, "GET") for _ in range(watchers.READERS + 1)]
        assert (await callers.pop().answer()).status == 429
        for caller in callers:
            caller.leave()
        _, at_work = await asyncio.wait({caller.task for caller in callers}, timeout=PATIENCE)
        assert not at_work
        assert runtime.journals == []

    with_app(tiny, check)


def test_x4_a_server_that_drains_ends_the_journal_with_its_footer(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny) as server, journal(server, "600") as response:
        head = response.readline()
        server.process.terminate()
        found = read(head + response.read(), tmp_path)
        assert found.footer is not None
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("stops", ["before the drain", "in the drain"])
def test_x4_a_drain_does_not_wait_for_one_that_has_stopped_reading(
    tiny: Path, stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "BLANK_LINE_S", 0.0 if stops == "before the drain" else 600.0)
    monkeypatch.setattr(watchers, "LAST", 0.0)

    async def check(app: App, runtime: PolicyRuntime) -> None:
        caller = Caller(app, LONG, "GET")
        assert await caller.status() == 200
        caller.stop_reading()
        if stops == "before the drain":
            while not caller.unread:  # noqa: ASYNC110
                await asyncio.sleep(0)
        app.close()
        runtime.drain()
        await asyncio.wait_for(caller.task, PATIENCE)

    with_app(tiny, check)


def test_x4_the_journal_waits_for_its_reader() -> None:
    """One that does not read holds the writer, whose queue is bounded, and no memory."""

    class Slow:
        def __init__(self) -> None:
            self.written, self.reads = list[bytes](), asyncio.Event()

        async def write(self, lines: bytes) -> None:
            self.written.append(lines)
            await self.reads.wait()

    async def check() -> None:
        request = Slow()
        pipe = watchers._Pipe(request)  # type: ignore[arg-type]
        writing = asyncio.ensure_future(in_thread(lambda: [pipe.write(b"one\n"), pipe.write(b"two\n")]))
        while not request.written:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (request.written, writing.done()) == ([b"one\n"], False)
        request.reads.set()
        await writing
        assert (request.written, pipe.size) == ([b"one\n", b"two\n"], 8)

    asyncio.run(check())
