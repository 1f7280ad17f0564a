"""How long a connection may take over what, how many there may be, and what becomes of those that are too many."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
import os
import random
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.web import connections as module
from reflex_runtime.web.app import App
from reflex_runtime.web.connections import (
    STALLED,
    UNREAD,
    ConnectionLimits,
    Connections,
    Phase,
    Seldom,
    most_connections,
)
from reflex_runtime.web.errors import Overloaded, TooSlow
from serving.harness import PATIENCE, STATE, Answer, Server, encode, parse_answers, read_all
from serving.in_process import Caller, connected, with_app
from serving.openai_toy import Toy

from .test_http import NOT_HTTP

COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
LIMITS = ConnectionLimits(most=3, idle=75.0, head=10.0, body=60.0)


# -- in virtual time ---------------------------------------------------------------------------------------------------


class Timer:
    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.cancelled = True

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


class Loop:
    """A clock that jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[..., object], *arguments: Any) -> Timer:
        timer = Timer(at, lambda: call(*arguments))
        heapq.heappush(self.timers, timer)
        return timer

    def until(self, at: float) -> None:
        while self.timers and self.timers[0].at <= at:
            timer = heapq.heappop(self.timers)
            if not timer.cancelled:
                self.now = max(self.now, timer.at)
                timer.call()
        self.now = at

    @property
    def live(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


class Fake:
    """A connection that notes when it was cut, and why."""

    def __init__(self, all: Connections, loop: Loop) -> None:
        self.phase, self.heard, self.loop = Phase.ANSWERED, 0.0, loop
        self.ended: float | None = None
        self.error: ReflexError | None = None
        all.enter(self, loop)  # type: ignore[arg-type]

    def cut(self, error: ReflexError) -> None:
        assert self.ended is None
        self.ended, self.error = self.loop.now, error


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.mark.parametrize(
    ("phase", "seconds"), [(Phase.IDLE, 75.0), (Phase.HEAD, 10.0), (Phase.BODY, 60.0), (Phase.SLOW, UNREAD)]
)
def test_h14_a_connection_is_cut_when_its_time_is_over_and_not_before(loop: Loop, phase: Phase, seconds: float) -> None:
    all = Connections(LIMITS)
    one = Fake(all, loop)
    loop.until(1030.0)
    all.move(one, phase)
    loop.until(1030.0 + seconds - 0.02)
    assert one.ended is None
    loop.until(1030.0 + seconds + 0.02)
    assert one.ended == pytest.approx(1030.0 + seconds, abs=0.02)
    assert isinstance(one.error, TooSlow)
    assert len(all) == loop.live == 0


def test_a_request_starts_its_connections_idle_time_anew_and_one_being_answered_has_none(loop: Loop) -> None:
    all = Connections(LIMITS)
    one = Fake(all, loop)
    for _ in range(5):
        loop.until(loop.now + 74.0)
        all.move(one, Phase.IDLE)
    all.move(one, Phase.ANSWERED)
    loop.until(loop.now + 10_000.0)
    assert one.ended is None
    all.move(one, Phase.IDLE)
    loop.until(loop.now + 75.1)
    assert one.ended is not None


def test_there_is_one_timer_however_many_connections_there_are(loop: Loop) -> None:
    all = Connections(ConnectionLimits(most=10_000, idle=75.0, head=10.0, body=60.0))
    ones = [Fake(all, loop) for _ in range(500)]
    rng = random.Random(1)
    for _ in range(5000):
        all.move(rng.choice(ones), rng.choice(list(Phase)))
        assert loop.live <= 1
        loop.until(loop.now + rng.random() * 0.001)
    for one in ones:
        all.leave(one)
    assert loop.live == len(all) == 0


def test_every_connection_is_cut_at_its_own_time(loop: Loop) -> None:
    limits = ConnectionLimits(most=10_000, idle=7.0, head=1.0, body=6.0)
    times = {Phase.IDLE: 7.0, Phase.HEAD: 1.0, Phase.BODY: 6.0, Phase.SLOW: UNREAD}
    all, rng, due = Connections(limits), random.Random(2), {}
    for _ in range(300):
        loop.until(loop.now + rng.random() * 0.1)
        one = Fake(all, loop)
        due[one] = loop.now + 7.0
        for chosen in rng.sample([k for k in due if k.ended is None], min(3, len(all))):
            phase = rng.choice(list(times))
            if phase is chosen.phase and phase is not Phase.IDLE:
                continue
            all.move(chosen, phase)
            due[chosen] = loop.now + times[phase]
    loop.until(loop.now + 1000.0)
    for one, at in due.items():
        assert one.ended == pytest.approx(at, abs=0.02)


def test_with_too_many_the_one_idle_for_longest_goes_then_slow_senders_then_slow_readers(loop: Loop) -> None:
    all = Connections(ConnectionLimits(most=4, idle=75.0, head=10.0, body=60.0))
    slow, head, body, idle = (Fake(all, loop) for _ in range(4))
    for one, phase in ((slow, Phase.SLOW), (head, Phase.HEAD), (body, Phase.BODY)):
        all.move(one, phase)
    for expected in (idle, head, body, slow):
        newcomer = Fake(all, loop)
        all.move(newcomer, Phase.ANSWERED)
        assert expected.ended is not None
        assert isinstance(expected.error, Overloaded)
        assert len(all) == 4
    with pytest.raises(Overloaded) as caught:
        Fake(all, loop)
    assert (caught.value.http_status, caught.value.retry_after) == (503, 1.0)
    assert len(all) == 4


def test_of_idle_ones_the_first_that_fell_idle_goes(loop: Loop) -> None:
    all = Connections(LIMITS)
    first, second, third = (Fake(all, loop) for _ in range(3))
    all.move(first, Phase.IDLE)  # it was asked something meanwhile
    Fake(all, loop)
    assert (first.ended, third.ended) == (None, None)
    assert second.ended is not None


def test_too_many_connections_is_one_line_in_the_log_when_it_begins(
    loop: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reflex_runtime.web.connections.time.monotonic", loop.time)
    all = Connections(LIMITS)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            Fake(all, loop)
            loop.until(loop.now + 1.0)
        assert len(caplog.records) == 1
        assert "3 connections are open, as many as there may be (--max-connections)" in caplog.text
        loop.until(loop.now + Seldom.QUIET)
        for _ in range(4):
            Fake(all, loop)
        assert len(caplog.records) == 2


def test_slow_senders_are_one_line_in_the_log_when_it_begins(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    all = Connections(ConnectionLimits(most=100, idle=75.0, head=10.0, body=60.0))
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            all.move(Fake(all, loop), Phase.HEAD)
        Fake(all, loop)
        loop.until(loop.now + 200.0)
    assert len(all) == 0
    assert [record.message for record in caplog.records] == [
        "a connection was too slow (head, 10 s) and is closed (repeats are not logged)"
    ]


def test_room_for_a_body_is_made_by_the_oldest_one_that_has_stopped_coming(loop: Loop) -> None:
    all = Connections(LIMITS)
    coming, stopped, later = (Fake(all, loop) for _ in range(3))
    for one in (coming, stopped, later):
        all.move(one, Phase.BODY)
        one.heard = loop.now
    all.cut_stalled()
    assert [one.ended for one in (coming, stopped, later)] == [None] * 3
    loop.until(loop.now + STALLED)
    coming.heard = loop.now
    all.cut_stalled()
    assert [one.ended is None for one in (coming, stopped, later)] == [True, False, True]
    assert len(all) == 2


def test_max_connections_leaves_descriptors_to_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "listdir", lambda path: ["fd"] * 20)
    for allowed, asked, most in ((1024, 4096, 940), (1024, 940, 940), (64, 4096, 16), (resource.RLIM_INFINITY, 9, 9)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, allowed))
        assert most_connections(asked) == most
    assert [record.message for record in caplog.records] == [
        "--max-connections=4096: the process may have 1024 open files, so it is 940",
        "--max-connections=4096: the process may have 64 open files, so it is 16",
    ]


# -- real sockets ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(tiny: Path) -> Iterator[Server]:
    """A server with little time."""
    short = ("--idle-timeout-s", "0.3", "--head-timeout-s", "0.2", "--body-timeout-s", "0.2")
    with Server(tiny, *short, "--max-body-bytes", "2000") as running:
        yield running


def _told(data: bytes) -> Answer:
    (answer,) = parse_answers(data)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert (answer.code, answer.json["retry_safe"]) == ("request_timeout", True)
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    return answer


def test_h10_head_timeout_s_ends_half_a_head(hasty: Server) -> None:
    assert "head of the request did not come within 0.2 s" in _told(hasty.raw(b"GET /health HT")).json["message"]
    line = hasty.wait_log("too slow")
    assert "repeats are not logged" in line
    (first, second) = parse_answers(hasty.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"))
    assert (first.status, second.status) == (200, 408)


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
def test_h10_body_timeout_s_ends_half_a_body(hasty: Server, framing: bytes) -> None:
    answer = _told(hasty.raw(b"POST /act HTTP/1.1\r\nHost: localhost\r\n" + framing))
    assert "body of the request did not come within 0.2 s" in answer.json["message"]
    hasty.reach(lambda m: m("reflex_in_flight_requests") == 0)


def test_the_rest_of_a_refused_body_is_not_waited_for_either(hasty: Server) -> None:
    (answer,) = parse_answers(hasty.raw(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{"))
    assert answer.status == 413


def test_h10_idle_timeout_s_closes_without_a_word(hasty: Server) -> None:
    assert hasty.raw(b"") == b""
    assert [a.status for a in parse_answers(hasty.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))] == [200]


def test_l9_max_connections_is_kept_by_closing_the_one_idle_for_longest() -> None:
    with Toy(max_connections=3) as toy, contextlib.ExitStack() as open_:
        held = [
            open_.enter_context(socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE)) for _ in range(3)
        ]
        assert toy.get("/health").status == 200
        assert held[0].recv(1) == b""
        for sock in held[1:]:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_l9_half_requests_are_ended_in_the_form_of_the_api() -> None:
    with Toy(head_timeout_s=0.2, body_timeout_s=0.25, idle_timeout_s=0.3) as toy:
        for half, says in (b"POST /v1/comp", "the head of the request did not come within 0.2 s"), (
            COMPLETION % 9 + b"{", "the body of the request did not come within 0.25 s",
        ):  # fmt: skip
            with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
                sock.sendall(half)
                (answer,) = parse_answers(read_all(sock))
            error = toy.error(answer)
            assert (answer.status, error["code"], says in error["message"]) == (408, "request_timeout", True), error
            assert answer.headers["x-should-retry"] == "true"
        with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
            assert sock.recv(1) == b""


def test_l9_who_does_not_read_its_answers_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD", 0.3)
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    with Toy(send_buffer=4096) as toy, socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        sock.setblocking(False)

        def send_on() -> None:
            while select.select([], [sock], [], PATIENCE)[1]:
                sock.send(request)

        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_on()
        assert toy.get("/health").status == 200


def test_b19_a_server_with_128_descriptors_answers_beside_150_idle_connections(tiny: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    with Server(tiny, before=limit) as server, contextlib.ExitStack() as open_:
        held = [open_.enter_context(server.connect()) for _ in range(150)]
        assert held[0].recv(1) == b""  # the oldest was closed
        assert server.get("/health").status == server.act().status == 200
        server.wait_log("--max-connections=4096: the process may have 128 open files")
        assert "idle for longest are closed" in server.wait_log("as many as there may be")
        assert sum("as many as there may be" in line for line in server.log) == 1


def test_h10_max_connections_refuses_a_newcomer_only_when_all_are_being_answered(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        (asking, answered), (_, idle) = connected(app), connected(app)
        asking.data_received(encode({"state": STATE}))
        also, _ = connected(app)  # the idle one goes
        assert idle.closed.is_set()
        assert idle.written.empty()
        also.data_received(encode({"state": STATE}))
        _, refused = connected(app)
        assert refused.closed.is_set()
        (answer,) = parse_answers(refused.written.get_nowait())
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "overloaded", "1")
        assert json.loads((await answered.written.get()).partition(b"\r\n\r\n")[2])["num_actions"] > 0
        assert len(app.connections) == 2

    with_app(tiny, check, inject_latency_ms=100.0, max_connections=2)


def test_a_connection_that_was_asked_something_is_not_the_one_idle_for_longest(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        made = [connected(app), connected(app)]
        made[0][0].data_received(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connected(app)
        assert [wire.closed.is_set() for _, wire in made] == [False, True]

    with_app(tiny, check, max_connections=2)


def test_a_connection_that_was_asked_something_in_this_turn_is_not_closed_as_idle(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        made = [connected(app) for _ in range(2)]
        made[1][0].data_received(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        app.connections._most[Phase.IDLE] = -1.0  # all that wait have waited for too long
        app.connections._look()
        assert [answer.status for answer in parse_answers(made[1][1].written.get_nowait())] == [200]
        assert made[0][1].closed.is_set()

    with_app(tiny, check)


def test_what_comes_in_one_turn_is_read_together_and_one_that_breaks_ends_no_other(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    steps: list[str] = []

    async def check(app: App, runtime: PolicyRuntime) -> None:
        made = [connected(app) for _ in range(4)]
        for i, (connection, _) in enumerate(made):
            for step in ("parse", "go_on"):
                monkeypatch.setattr(connection, step, _noting(steps, f"{step} {i}", getattr(connection, step)))
        monkeypatch.setattr(made[1][0], "parse", lambda: [][0])
        for connection, _ in made:
            connection.data_received(get[:9])
            connection.data_received(get[9:])
        made[3][0].connection_lost(None)
        assert not steps
        assert [wire.written.qsize() for _, wire in made] == [0, 0, 0, 0]
        answers = [parse_answers(await made[i][1].written.get()) for i in (0, 2)]
        assert [[answer.status for answer in some] for some in answers] == [[200], [200]]
        assert steps == ["parse 0", "parse 2", "parse 3", "go_on 0", "go_on 2"]
        assert made[1][1].aborted
        assert made[3][1].written.empty()

    with_app(tiny, check)
    assert "IndexError" in caplog.text


def _noting(steps: list[str], name: str, step: Callable[[], Any]) -> Callable[[], Any]:
    def noted() -> Any:
        steps.append(name)
        return step()

    return noted


def test_h4_a_body_that_stopped_coming_makes_room_for_others(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        connection, wire = connected(app)
        connection.data_received(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n")
        connection.data_received(b" " * 900_000)
        assert app.bodies.held == 900_000
        assert connection.heard > 0.0
        connection.heard -= STALLED

        async def ask() -> int:
            caller = Caller(app)
            caller.say(b"{" + b" " * 200_000)
            return (await caller.answer()).status

        assert await ask() == 503
        (answer,) = parse_answers(await wire.written.get())
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert wire.closed.is_set()
        assert app.bodies.held == 0
        assert await ask() == 400  # now it is read

    with_app(tiny, check, max_bodies_mb=1.0)


# -- arrival -----------------------------------------------------------------------------------------------------------


def _while_stopped(pid: int, sock: socket.socket, request: bytes, seconds: float) -> bytes:
    """Send a request to a process that is stopped for so long; what it answers when it goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            pass
        sock.sendall(request)
        assert not select.select([sock], [], [], seconds)[0]  # nobody answers
    finally:
        os.kill(pid, signal.SIGCONT)
    return read_all(sock)


@pytest.mark.parametrize("fresh", [True, False], ids=["new-connection", "open-connection"])
def test_b22_age_counts_from_arrival_at_the_socket_also_while_the_process_is_stopped(tiny: Path, fresh: bool) -> None:
    close = {"Connection": "close"}
    with Server(tiny) as server:
        asked = encode({"state": STATE}, close)
        if fresh:
            with socket.socket() as sock:
                sock.settimeout(PATIENCE)
                sock.connect(("127.0.0.1", server.port))
                (answer,) = parse_answers(_while_stopped(server.process.pid, sock, asked, 0.4))
        else:
            with server.connect() as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
                (answer,) = parse_answers(_while_stopped(server.process.pid, sock, asked, 0.4))
        timing = answer.json["timing"]
        assert 390.0 <= timing["age_ms"] < 390.0 + PATIENCE * 1e3
        assert timing["total_ms"] <= timing["age_ms"] - 300.0
        with server.connect() as sock:
            late = encode({"state": STATE, "deadline_ms": 200}, close)
            (answer,) = parse_answers(_while_stopped(server.process.pid, sock, late, 0.4))
            assert (answer.status, answer.code) == (504, "deadline_exceeded")


def test_l9_a_deadline_counts_from_arrival_at_the_socket() -> None:
    with Toy() as toy, socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go.wait(PATIENCE)

        assert toy.loop is not None
        toy.loop.call_soon_threadsafe(hold)
        assert held.wait(PATIENCE)
        body = json.dumps({"model": "toy", "prompt": "a", "deadline_ms": 200}).encode()
        sock.sendall(COMPLETION % len(body) + body)
        assert not select.select([sock], [], [], 0.4)[0]  # the loop is held
        go.set()
        (answer,) = parse_answers(sock.recv(65536))
        assert (answer.status, toy.error(answer)["code"]) == (504, "deadline_exceeded")


# -- the words of a model's server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOT_HTTP)
def test_l9_what_is_not_http_is_answered_in_the_form_of_the_api(toy: Toy, name: str) -> None:
    with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        try:
            sock.sendall(NOT_HTTP[name].replace(b"/act", b"/v1/completions"))
            data = read_all(sock)
        except (ConnectionResetError, BrokenPipeError):
            assert len(NOT_HTTP[name]) > 10**6  # closed while it was still being sent
            return
    (answer,) = parse_answers(data)
    assert (answer.status, toy.error(answer)["type"]) == (400, "invalid_request_error")
    assert (answer.headers["connection"], answer.headers["x-should-retry"]) == ("close", "false")


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy() as running:
        yield running


def test_a_connection_says_what_it_takes_its_time_over(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        connection, wire = connected(app)
        act = encode({"state": STATE})

        def phase_after(data: bytes) -> Phase:
            connection.data_received(data)
            app.read()
            return connection.phase

        assert connection.phase is Phase.IDLE
        assert phase_after(act[:20]) is Phase.HEAD
        assert phase_after(act[20:-5]) is Phase.BODY
        assert phase_after(act[-5:]) is Phase.ANSWERED
        assert phase_after(b"GET /hea") is Phase.ANSWERED  # it waits behind the first
        assert await wire.written.get()
        assert connection.phase is Phase.HEAD
        assert phase_after(b"lth HTTP/1.1\r\nHost: localhost\r\n\r\n") is Phase.IDLE
        too_large = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
        assert phase_after(too_large) is Phase.BODY
        assert wire.written.qsize() == 2
        assert phase_after(b" ") is Phase.BODY  # it has its answer; the rest is thrown away
        connection.pause_writing()
        assert connection.phase is Phase.SLOW
        connection.resume_writing()
        assert connection.phase is Phase.BODY
        connection.pause_writing()
        connection.cut(TooSlow("it reads nothing"))
        assert wire.aborted

    with_app(tiny, check)


def test_h4_of_the_connections_with_large_bodies_one_is_read_in_each_turn_of_the_loop(tiny: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        made = [connected(app) for _ in range(3)]
        for connection, _ in made:
            connection.data_received(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n")
            app.read()
            assert connection.transport.is_reading()
            connection.data_received(b" " * 100_000)
        assert [wire.reading for _, wire in made] == [False, False, False]
        read = []
        for _ in range(3):
            await asyncio.sleep(0)
            read.append(sum(wire.reading for _, wire in made))
        assert read == [1, 2, 3]
        assert app.bodies.held == 300_000

    with_app(tiny, check)
