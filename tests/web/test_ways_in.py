"""Requests that come whole and in parts, and what our own connection does beside them."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.web.app import App
from serving.harness import STATE, Server, encode
from serving.in_process import Caller, with_app
from web.held import HELD, hold

BODY = json.dumps({"state": STATE, "request_id": "plain"}).encode()


def test_h1_a_path_may_end_in_a_slash(tiny: Path) -> None:
    with Server(tiny) as server:
        asked = server.ask("POST", "/act/", json.dumps({"state": STATE}).encode(), {"Content-Type": "application/json"})
        assert asked.status == 200
        assert server.get("/health/").status == 200
        assert server.get("/nothing/").status == 404


@pytest.mark.parametrize("leaves", [True, False], ids=["our server", "any server"])
def test_a_request_may_come_in_parts(tiny: Path, leaves: bool) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        caller = Caller(app, leaves=leaves)
        caller.say(BODY[:10], more=True)
        caller.say(BODY[10:])
        answer = await caller.answer()
        assert (answer.status, answer.headers["x-request-id"]) == (200, "plain")
        assert len(answer.json["actions"]) > 0
        assert (await Caller(app, "/health", "GET").answer()).status == 200
        assert (await Caller(app, "/nowhere", "GET").answer()).status == 404
        assert app.active == 0

    with_app(tiny, check)


@pytest.mark.parametrize("leaves", [True, False], ids=["our server", "any server"])
def test_b16_a_caller_that_leaves_takes_its_request_back(
    tiny: Path, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        go = hold(monkeypatch)
        first, leaving, early = (Caller(app, leaves=leaves) for _ in range(3))
        for caller in (first, leaving):
            caller.say(BODY)
        early.say(BODY[:10], more=True)
        while runtime.batcher.scheduler.unsettled("prod") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        leaving.leave()
        early.leave()
        await asyncio.wait({leaving.task, early.task})
        go.set()
        assert (await first.answer()).status == 200
        assert leaving.head is None
        assert early.head is None
        app.close()
        await app.wait_idle()
        assert b'outcome="cancelled",policy_slot="prod"} 2.0' in runtime.metrics.render()

    with_app(tiny, check, **HELD)


def test_at_the_end_a_request_that_is_not_complete_is_answered_and_counted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        go = hold(monkeypatch)
        reading, queued = Caller(app), Caller(app)
        queued.say(BODY)
        reading.say(BODY[:10], more=True)
        while not runtime.batcher.scheduler.unsettled("prod"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        app.close()
        app.give_up_entering()
        answer = await reading.answer()
        assert (answer.status, answer.code) == (503, "shutting_down")
        assert "was not complete" in answer.json["message"]
        assert app.active == 1
        go.set()
        assert (await queued.answer()).status == 200
        await app.wait_idle()

    with_app(tiny, check, **HELD)


def test_one_that_does_not_read_its_answer_keeps_no_other_waiting(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        deaf, other = Caller(app), Caller(app)
        deaf.stop_reading()
        deaf.say(BODY)
        other.say(BODY)
        assert (await other.answer()).status == 200
        deaf.leave()
        await asyncio.wait({deaf.task})
        assert app.active == 0

    with_app(tiny, check)


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
    long = b"x" * 4000  # so that the buffers are full of few requests
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nX-Long: " + long + b"\r\n\r\n"
    with Server(tiny) as server, server.connect() as sock:
        sock.setblocking(False)
        sent = stuck = 0
        while stuck < 3:  # both ends have buffers
            try:
                sent += sock.send(request[sent % len(request) :] + request * 20)
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
