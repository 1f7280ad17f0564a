"""The states a server goes through, and how it ends: nothing admitted is lost, everybody is answered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from reflex_runtime.demo import POLICY
from serving.exports import write_tiny
from serving.harness import PATIENCE, STATE, Server, encode, parse_answers, read_all
from serving.requests import busy, check_error, numbered, observe, queued, refused_by_id, right


@contextlib.contextmanager
def gated(tiny: Path, tmp_path: Path, function: str) -> Iterator[tuple[Server, int]]:
    """A server whose `PolicyRuntime.FUNCTION` waits until a byte is written to a pipe; (server, the pipe)."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    before = f"""
from reflex_runtime.robots.serving.runtime import PolicyRuntime
inner = PolicyRuntime.{function}
def wait(self):
    with open({str(gate)!r}, "rb") as pipe:
        pipe.read(1)
    return inner(self)
PolicyRuntime.{function} = wait
"""
    with Server(tiny, before=before, until="listening on") as server:
        pipe = os.open(gate, os.O_RDWR)
        try:
            yield server, pipe
        finally:
            os.close(pipe)


@pytest.mark.parametrize(("function", "state"), [("_load", "loading"), ("_warm", "warming")])
def test_h6_while_loading_health_tells_it_and_requests_are_told_to_come_back(
    tiny: Path, tmp_path: Path, function: str, state: str
) -> None:
    with gated(tiny, tmp_path, function) as (server, pipe):
        health = server.get("/health")
        while health.json["state"] != state:  # loading is over in no time
            health = server.get("/health")
        assert health.status == 503
        assert health.json["model_loaded"] is False
        refused = server.act()
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "not_ready", "1")
        assert (refused.json["retry_safe"], refused.json["state"]) == (True, state)
        for named in (server.act(request_id="mine"), server.act_with({"X-Request-Id": "mine"})):
            assert check_error(named, 503, "not_ready")["request_id"] == "mine"
        named = server.ask("POST", "/act", b"{", {"X-Request-Id": "theirs"})
        assert check_error(named, 503, "not_ready")["request_id"] == "theirs"
        server.reach(lambda m: m("reflex_requests_total", outcome="rejected") == 4)
        refused = refused_by_id(server, "tiny")
        assert refused >= {"/act", "/reset", "/episodes/{id}/outcome", "/v2/models/{model}/ready", "/admin/load"}
        assert server.get("/diagnostics/cost-model").status == 503
        assert server.get("/config").json["policy"] is None
        os.write(pipe, b"x")
        server.wait_log("ready on")
        assert server.get("/health").json["state"] == "ready"
        assert server.act().status == 200


GIVES_BACK = """
import sys, reflex_runtime.web.serve as serve
class Freed:
    def give_back(self, large: int):
        print("given back", file=sys.stderr, flush=True)
serve.freed_memory = Freed
"""


def test_an_idle_server_gives_back_what_it_has_freed(tiny: Path) -> None:
    with Server(tiny, before=GIVES_BACK) as server:
        server.wait_log("given back")
        assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b20_a_signal_while_loading_ends_it_at_once(tiny: Path, tmp_path: Path, number: int) -> None:
    with gated(tiny, tmp_path, "_load") as (server, _):
        assert server.stop(number) == 0  # although the load never ends
    assert server.log[-2].endswith("the policy is still being loaded or warmed up; leaving without it")
    assert not any("a batch is still running" in line for line in server.log)


def test_b20_sigterm_with_32_in_flight_is_32_right_answers_and_no_process(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server):
        process = psutil.Process(server.process.pid)
        with server.burst(numbered(32)) as burst:
            burst.send()
            server.reach(lambda m: m("reflex_in_flight_requests") == 33)
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("draining: 33 requests")
            server.release()
            answers = burst.answers()
        assert all(right(a, i) for i, a in enumerate(answers))
        assert server.wait() == 0
        assert not process.is_running()
        assert not psutil.pid_exists(process.pid)


def test_b20_what_reached_the_machine_before_the_signal_counts_as_received(tiny: Path) -> None:
    """Sent and signalled in one breath: whatever the server has read of it by then."""
    with Server(tiny, "--inject-latency-ms", "200") as server:
        with server.burst(numbered(32)) as burst:
            burst.send()
            server.process.send_signal(signal.SIGTERM)
            answers = burst.answers()
        assert all(right(a, i) for i, a in enumerate(answers))
        assert server.wait() == 0


def test_an_idle_server_ends_without_a_line_about_requests(tiny: Path) -> None:
    with Server(tiny) as server:
        server.stop()
    assert not [line for line in server.log if "draining" in line]


def test_b20_two_stages_are_finished_as_well() -> None:
    with Server(POLICY, held=True) as server:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(observe(server, 5, request_id="plug")))
        assert server.metrics()("reflex_prepare_seconds_count") == 0
        thread.start()
        server.reach(lambda m: m("reflex_prepare_seconds_count") == 1)  # its picture is decoded
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining: 1 requests")
        for _ in range(100):  # its steps, and some to spare
            server.release()
        assert server.wait() == 0
        thread.join()
    assert len(found) == 1  # `observe` asserts a 200


def test_b20_while_it_drains_new_requests_are_refused_and_health_says_so(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server) as plug, server.connect() as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # a connection that was there before
        assert b"200 OK" in kept.recv(65536)
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining: 1 requests")
        refused = server.act()
        assert (refused.status, refused.code, refused.json["retry_safe"]) == (503, "shutting_down", True)
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        kept.sendall(encode({"state": STATE}))
        (on_kept,) = parse_answers(read_all(kept))
        assert on_kept.code == "shutting_down"
        health = server.get("/health")
        assert (health.status, health.json["state"]) == (503, "draining")
        assert server.metrics()("reflex_requests_total", outcome="rejected") == 2
        server.release()
        (answer,) = plug.answers()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert server.wait() == 0


@pytest.mark.parametrize("seconds", ["0", "0.3"])
def test_b20_when_the_time_is_over_the_rest_is_answered(tiny: Path, seconds: str) -> None:
    """The batch never ends: nothing here waits for it."""
    options = ("--drain-timeout-s", seconds)
    with Server(tiny, *options, held=True) as server, busy(server) as plug, server.burst(numbered(5)) as burst:
        burst.send()
        server.reach(queued(5))
        server.process.send_signal(signal.SIGTERM)
        waiting, (running,) = burst.answers(), plug.answers()
        assert {(a.status, a.code, a.json["retry_safe"]) for a in waiting} == {(503, "shutting_down", True)}
        assert (running.status, running.code, running.json["retry_safe"]) == (503, "shutting_down", False)  # it ran
        assert server.wait() == 0


def test_b20_drain_timeout_s_is_how_long_what_runs_may_take(tiny: Path) -> None:
    """The batch ends within the default, and not within this."""
    with Server(tiny, "--drain-timeout-s", "0.3", "--inject-latency-ms", "8000") as server, busy(server) as plug:
        server.process.send_signal(signal.SIGTERM)
        (answer,) = plug.answers()
        assert (answer.status, answer.code) == (503, "shutting_down")
        assert server.wait() == 0


def test_h14_a_request_that_is_never_completed_is_answered_at_the_end(tiny: Path) -> None:
    """It may not use up the time that others need to be finished."""
    with Server(tiny, "--drain-timeout-s", "600") as server, server.connect() as slow:
        slow.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        server.get("/health")  # the server has read it by now
        server.process.send_signal(signal.SIGTERM)
        (answer,) = parse_answers(read_all(slow))
        assert (answer.status, answer.code) == (503, "shutting_down")
        assert server.wait() == 0


def test_b20_a_request_completed_while_it_drains_is_served(tiny: Path) -> None:
    body = encode(numbered(1)[0])
    patient = "import reflex_runtime.web.serve as serve; serve.READING_GRACE = 60.0"
    with Server(tiny, held=True, before=patient) as server, busy(server), server.connect() as slow:
        slow.sendall(body[:-5])
        server.get("/health")
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining: 2 requests")
        slow.sendall(body[-5:])
        server.reach(queued(1))
        server.release()
        (answer,) = parse_answers(read_all(slow))
        assert right(answer, 0)
        assert server.wait() == 0


def test_b20_idle_connections_and_readers_that_do_not_read_do_not_keep_it(tiny: Path) -> None:
    with Server(tiny, "--drain-timeout-s", "600") as server, server.connect() as idle, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)  # and never reads
        assert server.get("/health").status == 200
        idle.sendall(b"GET /hea")
        assert server.stop() == 0


def test_h6_it_answers_many_times_while_a_batch_runs(tmp_path: Path) -> None:
    """The model has the device thread; the loop is never its."""
    heavy = write_tiny(tmp_path / "heavy", weight=200)
    with Server(heavy) as server:
        answers = 0
        end = time.monotonic() + PATIENCE
        while answers <= 2:  # one at most, were the loop kept: how many more depends on the machine
            assert time.monotonic() < end
            with server.burst([{"state": STATE}]) as asked:
                asked.send()
                answers = 0
                while not asked.answered:
                    assert server.get("/health").status == 200
                    answers += 1
                assert asked.answers()[0].status == 200


# -- a second Ctrl-C ---------------------------------------------------------------------------------------------------

# `reflex serve` of the toy, whose model never comes back from the step of a request.
STUCK = """
import sys, threading
from functools import partial
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.server.local_model import open_model
from reflex_runtime.web.supervisor import bind
from reflex_runtime.llm.server.model_host import ModelPlan
from reflex_runtime.llm.app import serving
from reflex_runtime.web.serve import serve

class Stuck(ToyRunner):
    served = False
    def forward(self, step):
        if self.served:
            print("inside", file=sys.stderr, flush=True)
            threading.Event().wait()
        return super().forward(step)

runner, sock = Stuck(), bind("127.0.0.1", 0)
def ready(model):
    runner.served = True
    print(f"ready on http://127.0.0.1:{sock.getsockname()[1]}", file=sys.stderr, flush=True)

import logging
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
config = LLMServeConfig()
make = partial(serving, ModelPlan("toy", config), partial(open_model, lambda plan: (runner, ByteTokenizer())))
import asyncio
asyncio.run(serve(make, [sock], config, None, ready))
"""


def test_a_batch_that_hangs_at_the_end_is_named(tiny: Path) -> None:
    with Server(tiny, "--inject-fault", "prod:hang:1", "--watchdog-s", "0", "--drain-timeout-s", "1") as server:
        with server.burst([{"state": STATE}]) as burst:
            burst.send()
            server.reach(lambda m: m("reflex_in_flight_requests", policy_slot="prod") == 1)
            server.stop()
    assert server.log[-2].endswith("a batch is still running; leaving without it")


def test_a_second_ctrl_c_ends_a_server_of_policies_at_once(tiny: Path) -> None:
    with Server(tiny, "--inject-fault", "prod:hang:1", "--watchdog-s", "0", "--drain-timeout-s", "600") as server:
        with server.burst([{"state": STATE}]) as burst:
            burst.send()
            server.reach(lambda m: m("reflex_in_flight_requests", policy_slot="prod") == 1)
            server.process.send_signal(signal.SIGINT)
            server.wait_log("draining")
            server.process.send_signal(signal.SIGTERM)  # whoever stops services says it again: that is no hurry
            assert server.stop(signal.SIGINT) == 130
    assert server.log[-2].endswith("interrupted again: leaving at once")


def test_a_second_ctrl_c_ends_a_server_of_a_model_at_once() -> None:
    with Server("", before=STUCK) as server:
        body = json.dumps({"model": "toy", "prompt": "x"}).encode()
        with server.connect() as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            server.wait_log("inside")
            server.process.send_signal(signal.SIGINT)
            server.wait_log("draining")
            assert server.stop(signal.SIGINT) == 130
