"""A server that is lost is started again, and its callers wait meanwhile (contract B19, B20, H6, H14)."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.web.grpc_listener import check_free
from reflex_runtime.web.supervisor import bind, url_of
from serving.exports import write_tiny
from serving.harness import PATIENCE, STATE, Answer, Latch, Server, encode, parse_answers, read_all, refusal
from serving.pair import Pair, episodes
from serving.requests import busy, numbered, right

# Run first: a loop counts as hung after two seconds until one was, so that a pause of the next server is none.
HANGS_ONCE = """
import reflex_runtime.web.supervisor as s
end_hung = s._Supervisor._end_hung
def end_once(self, worker):
    end_hung(self, worker)
    self._hung_after = 60.0
s._Supervisor._end_hung = end_once
"""
NO_LOOP_HANGS = "import reflex_runtime.web.supervisor as s; s.LEAST_WATCH = 60.0\n"
OFTEN = "import reflex_runtime.web.supervisor as s; s.FIRST = s.LONGEST = 0.01"


def below(server: Server) -> psutil.Process:
    """The server proper."""
    (child,) = psutil.Process(server.process.pid).children()
    return child


def ready_again(server: Server, times: int) -> Answer:
    """Its health once it is ready for the so-manieth time."""
    server.wait_log_while_fewer("ready on", times)
    return server.get("/health")


def held(latch: Latch) -> str:
    """Python to run first, by which a server waits at the latch before it loads."""
    return f"""
from reflex_runtime.robots import Export
inner = Export.load
def load(path):
    {latch.wait}
    return inner(path)
Export.load = load
"""


@pytest.fixture
def latch(tmp_path: Path) -> Iterator[Latch]:
    made = Latch(tmp_path / "latch")
    yield made
    made.close()


# -- lost and started again --------------------------------------------------------------------------------------------


# What an instruction makes of the server, in its event loop.
ENDS = """
import os, re, time
import reflex_runtime.robots.wires.act as act
inner_decode = act.decode
def stand_still():
    while True:
        time.sleep(1000)
def decode(body, packed):
    asked = re.search(rb'"(exit|stand still) ?([0-9]*)"', body)
    if asked and asked[1] == b"exit":
        os._exit(int(asked[2]))
    if asked:
        stand_still()
    return inner_decode(body, packed)
act.decode = decode
"""
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("instruction", "told"),
    [("", "was ended by SIGSEGV"), ("exit 0", "exited with status 0"), ("exit 7", "exited with status 7")],
)
def test_b19_a_server_that_ends_unasked_comes_back_and_keeps_its_socket(
    tiny: Path, latch: Latch, instruction: str, told: str
) -> None:
    with (
        Server(tiny, "--inject-latency-ms", "60000", before=held(latch) + ENDS, supervised=True) as server,
        server.connect() as waiting,
        server.connect() as last,
    ):
        assert server.get("/health").json["restarts"] == 0
        waiting.sendall(encode({"state": STATE}))
        server.reach(lambda m: m("reflex_in_flight_requests") == 1)
        latch.shut()  # the next one waits before it accepts
        if instruction:
            last.sendall(encode({"state": STATE, "instruction": instruction}))
        else:
            below(server).send_signal(signal.SIGSEGV)
        with contextlib.suppress(ConnectionResetError):
            assert read_all(waiting) == b""  # the kernel closes what the server had open
        server.wait_log(f"{told}; restart 1 in")
        with server.connect() as early:  # it waits in the socket's backlog
            early.sendall(HEALTH)
            latch.open()
            (answer,) = parse_answers(read_all(early))
        assert answer.json["restarts"] == 1
        health = ready_again(server, 2)
        assert (health.status, health.json["state"]) == (200, "ready")
        assert (health.json["restarts"], health.json["last_exit"]) == (1, told)


def test_b19_a_loop_that_stands_still_is_killed_with_its_stacks_in_the_log_and_replaced(tiny: Path) -> None:
    with (
        Server(tiny, "--watchdog-s", "0.1", before=ENDS + HANGS_ONCE, supervised=True) as server,
        server.connect() as stuck,
    ):
        stuck.sendall(encode({"state": STATE, "instruction": "stand still"}))
        server.wait_log("worker 0: its event loop has stood still for 2 s; its stacks follow, and it is killed")
        with contextlib.suppress(ConnectionResetError):
            assert read_all(stuck) == b""
        health = ready_again(server, 2)
        assert (health.json["restarts"], health.json["last_exit"]) == (1, "was ended by SIGABRT")
        assert any(" in stand_still" in line for line in server.log)
        assert sum(line.startswith(("Thread 0x", "Current thread 0x")) for line in server.log) > 1
        assert server.act().status == 200


def test_b19_a_worker_that_cannot_say_its_last_words_is_killed(tiny: Path) -> None:
    with Server(tiny, "--watchdog-s", "0.1", before=HANGS_ONCE, supervised=True) as server:
        below(server).suspend()  # as by a debugger: SIGABRT waits until it goes on
        server.wait_log("worker 0: its event loop has stood still for 2 s; its stacks follow, and it is killed")
        health = ready_again(server, 2)
        assert (health.json["restarts"], health.json["last_exit"]) == (1, "was ended by SIGKILL")


def test_b19_a_worker_that_goes_on_after_a_pause_says_its_last_words(tiny: Path) -> None:
    with Server(tiny, "--watchdog-s", "0.1", before=HANGS_ONCE + "s.LAST_WORDS = 60.0", supervised=True) as server:
        below(server).suspend()
        server.wait_log("worker 0: its event loop has stood still for 2 s; its stacks follow, and it is killed")
        below(server).resume()  # which the kernel tells the supervisor, with the signal that tells of an end
        assert ready_again(server, 2).json["last_exit"] == "was ended by SIGABRT"


def test_b19_the_second_hang_ends_the_server_and_another_takes_over(tiny: Path) -> None:
    options = ("--inject-fault", "prod:hang:1", "--watchdog-s", "0.3")
    with Server(tiny, *options, before=NO_LOOP_HANGS, supervised=True) as server:
        first = below(server)
        for _ in range(2):
            answer = server.act()
            assert (answer.status, answer.code) == (500, "processor_hung")
        health = ready_again(server, 2)
        assert (health.json["restarts"], health.json["last_exit"]) == (1, "exited with status 1")
        assert health.json["hung_batches"] == 0
        assert not first.is_running()
        assert server.act().code == "processor_hung"


def test_b19_two_policies_come_back_as_well(pair: Pair) -> None:
    options = ("--policy-a", str(pair.v1), "--policy-b", str(pair.v2), "--no-rtc")
    with Server(pair.v1, *options, supervised=True) as server:
        below(server).send_signal(signal.SIGKILL)
        assert ready_again(server, 2).json["slots"].keys() == {"a", "b"}
        for slot in "ab":
            answer = server.act(episode_id=episodes(slot, 1)[0])
            assert (answer.status, answer.headers["x-reflex-policy-slot"]) == (200, slot)


def test_restarts_are_bounded(tiny: Path) -> None:
    with Server(tiny, before=OFTEN + "; s.MOST = 3", supervised=True) as server:
        for lives in (1, 2, 3):
            server.wait_log_while_fewer("ready on", lives)
            below(server).send_signal(signal.SIGABRT)
        assert server.wait() == 1
        assert server.wait_log("was ended by SIGABRT; that was loss 3 in a row, giving up")


def test_a_server_that_is_lost_before_it_was_ready_is_not_started_again(tiny: Path) -> None:
    crash = "import os, signal\nfrom reflex_runtime.robots.serving.runtime import PolicyRuntime\n"
    crash += "PolicyRuntime._load = lambda self: os.kill(os.getpid(), signal.SIGSEGV)"
    with Server(tiny, before=crash, until="before it was ready", supervised=True) as server:
        assert server.wait() == 1
        assert "was ended by SIGSEGV before it was ready" in server.wait_log("the server was")
        assert not any("restart " in line for line in server.log)


# -- ended on purpose --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b20_a_signal_drains_the_server_below_and_ends_both(tiny: Path, number: signal.Signals) -> None:
    with Server(tiny, held=True, supervised=True) as server, busy(server), server.burst(numbered(8)) as burst:
        child = below(server)
        burst.send()
        server.reach(lambda m: m("reflex_in_flight_requests") == 9)
        server.process.send_signal(number)
        server.wait_log("draining: 9 requests")
        server.release()
        assert all(right(a, i) for i, a in enumerate(burst.answers()))
        assert server.wait() == 0
        assert not child.is_running()
        with pytest.raises(ConnectionRefusedError):
            server.connect()


def test_b20_a_signal_while_there_is_no_server_ends_it_at_once(tiny: Path) -> None:
    wait = "import reflex_runtime.web.supervisor as s; s.FIRST = s.LONGEST = 600.0"
    with Server(tiny, before=wait, supervised=True) as server:
        below(server).send_signal(signal.SIGKILL)
        server.wait_log("restart 1 in")
        assert server.stop() == 0


def test_b20_a_signal_before_the_server_is_ready_ends_both(tiny: Path, latch: Latch) -> None:
    latch.shut()
    before = held(latch).replace("    with", "    print('loads', flush=True, file=__import__('sys').stderr)\n    with")
    with Server(tiny, before=before, until="loads", supervised=True) as server:
        child = below(server)
        assert server.stop() == 0
        assert not child.is_running()


def test_b2_what_is_wrong_ends_both_with_2_and_one_line(tmp_path: Path, tiny: Path) -> None:
    assert "nothing" in refusal(tmp_path / "nothing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refusal(tiny, "--port", port)
        assert line.endswith("cannot be bound: Address already in use; use --port N, or --port 0 for a free one")
        assert "not found, expected an export" in refusal(tmp_path / "nothing", "--port", port)
        assert "--provider=NoSuch: " in refusal(tiny, "--port", port, "--provider", "NoSuch")
        assert "--max-model-len=999999: " in refusal("scribe", "--port", port, "--max-model-len", "999999")


def test_b2_an_export_that_turns_out_wrong_ends_both_with_2(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "broken", inputs={"state": "no_such_input", "noise": "x"})
    with Server(export, until="not serving on", supervised=True) as server:
        assert server.wait() == 2
        assert not any("restart " in line for line in server.log)


def test_a_killed_supervisor_leaves_nothing_behind(tiny: Path) -> None:
    with Server(tiny, supervised=True) as server:
        child = below(server)
        server.kill()
        gone, alive = psutil.wait_procs([child], timeout=PATIENCE)
        assert (gone, alive) == ([child], [])


def test_hangup_is_passed_on_and_is_no_end(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "batches.jsonl"
    with Server(tiny, "--trace", str(file), supervised=True) as server:
        assert server.act().status == 200
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: (tmp_path / "batches.jsonl.1").exists())
        assert server.act().status == 200
        below(server).send_signal(signal.SIGKILL)
        assert ready_again(server, 2).json["restarts"] == 1
        assert server.stop() == 0, "\n".join(server.log)


def test_b20_a_parent_that_ignores_its_children_passes_that_to_no_supervisor(tiny: Path) -> None:
    with Server(tiny, supervised=True, before="import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)") as server:
        below(server).send_signal(signal.SIGKILL)
        assert ready_again(server, 2).json["restarts"] == 1
        assert server.stop() == 0, "\n".join(server.log)


def test_b19_a_supervisor_that_was_paused_goes_on(tiny: Path) -> None:
    with Server(tiny, "--watchdog-s", "0", supervised=True, before=f"{OFTEN}; s.LONG = 0.05") as server:
        child, above = below(server), psutil.Process(server.process.pid)
        for _ in range(5):
            above.send_signal(signal.SIGSTOP)
            resume = time.monotonic() + 0.1  # its wait is over by then
            while time.monotonic() < resume:
                assert server.get("/health").status == 200
            above.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGKILL)
        assert ready_again(server, 2).json["restarts"] == 1
        assert server.stop() == 0, "\n".join(server.log)


def test_an_address_is_taken_before_its_server_has_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with bind("127.0.0.1", 0) as port, bind("", 0, path):
        number = port.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port={number}: cannot be bound: Address already in use"):
            bind("127.0.0.1", number)
        with pytest.raises(OSError, match="Address already in use"):
            check_free(f"127.0.0.1:{number}")
        with pytest.raises(ConfigError, match=r"--uds=.*: cannot be bound: Address already in use"):
            bind("", 0, path)


def test_without_a_supervisor_the_process_is_the_server(tiny: Path) -> None:
    options = ("--inject-fault", "prod:hang:1", "--watchdog-s", "0.3")
    with Server(tiny, "--no-supervise", *options, supervised=True) as server:
        assert psutil.Process(server.process.pid).children() == []
        assert "restarts" not in server.get("/health").json
        for _ in range(2):
            assert server.act().code == "processor_hung"
        assert server.wait() == 1


def test_the_supervisor_imports_little(tiny: Path) -> None:
    with Server(tiny, supervised=True, cold=True) as server:
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "onnxruntime" not in maps
        assert "onnxruntime" in Path(f"/proc/{below(server).pid}/maps").read_text()
        assert psutil.Process(server.process.pid).memory_info().rss < 80 << 20


# -- of language models ------------------------------------------------------------------------------------------------

SMALL = ("--kv-cache-gb", "0.05")
ASKED = {"model": "scribe", "prompt": "Once there was", "max_tokens": 2000, "ignore_eos": True, "stream": True}
BEFORE_IT_ACCEPTS = """
from reflex_runtime.llm.engine.tokenizer import HFTokenizer
inner = HFTokenizer.load
def load(path, quiet=False):
    {wait}
    return inner(path, quiet)
HFTokenizer.load = load
"""
BEFORE_A_SECOND_TOKEN = """
from reflex_runtime.llm.engine.processor import LLMProcessor
inner_run = LLMProcessor.run
def run(self, batch):
    if set(batch.grants.values()) == {{1}}:
        {wait}
    return inner_run(self, batch)
LLMProcessor.run = run
"""
IN_A_STEP = """
from reflex_runtime.llm.runners.openvino_runner import OpenVinoRunner
inner = OpenVinoRunner.forward
def forward(self, step):
    {wait}
    return inner(self, step)
OpenVinoRunner.forward = forward
"""


def complete(server: Server, **fields: Any) -> Answer:
    body = json.dumps(ASKED | {"max_tokens": 2, "stream": False} | fields).encode()
    return server.ask("POST", "/v1/completions", body, {"X-Request-Id": "mine"})


def pools(pid: int) -> int:
    """Pools of malloc beside the first one: 64 MB of addresses, of which the beginning has memory."""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    areas = [(*(int(end, 16) for end in place.split("-")), access) for place, access, *_ in maps]
    return sum(
        begin % (64 << 20) == 0 and end == rest and last == begin + (64 << 20) and access == "rw-p" and kept == "---p"
        for (begin, end, access), (rest, last, kept) in pairwise(areas)
    )


def test_b19_a_model_server_that_crashes_comes_back_and_keeps_its_socket(latch: Latch) -> None:
    openai = pytest.importorskip("openai")
    before = (BEFORE_IT_ACCEPTS + BEFORE_A_SECOND_TOKEN).format(wait=latch.wait)
    with Server("scribe", *SMALL, before=before, supervised=True) as server:
        assert server.get("/health").json["restarts"] == 0
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as client:
            extra = {"extra_body": {"ignore_eos": True}}
            latch.shut()  # it waits before the second token, and the next one before it accepts
            stream = client.completions.create(**{k: v for k, v in ASKED.items() if k != "ignore_eos"}, **extra)
            next(iter(stream))
            below(server).send_signal(signal.SIGSEGV)
            with pytest.raises(openai.APIConnectionError):
                list(stream)
            server.wait_log("was ended by SIGSEGV; restart 1 in")
            with server.connect() as early:  # it waits in the socket's backlog
                early.sendall(HEALTH)
                latch.open()
                (answer,) = parse_answers(read_all(early))
            assert answer.json["restarts"] == 1
            assert client.models.list().data
        health = ready_again(server, 2)
        assert (health.status, health.json["state"]) == (200, "ready")
        assert (health.json["restarts"], health.json["last_exit"]) == (1, "was ended by SIGSEGV")
        assert complete(server).status == 200
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "openvino" not in maps
        assert pools(below(server).pid) == 0
        assert server.stop() == 0


@pytest.mark.long  # waits for a watchdog
def test_b19_a_model_that_hangs_for_good_ends_its_server_and_another_takes_over(latch: Latch) -> None:
    before = NO_LOOP_HANGS + IN_A_STEP.format(wait=latch.wait)
    with Server("scribe", *SMALL, "--watchdog-s", "1", before=before, supervised=True) as server:
        latch.shut()
        answer = complete(server)
        assert (answer.status, answer.json["error"]["code"]) == (500, "processor_hung")
        server.wait_log("the server exited with status 1; restart 1 in")
        latch.open()
        assert ready_again(server, 2).json["last_exit"] == "exited with status 1"
        assert complete(server).status == 200


def test_b19_the_front_of_runtime_processes_comes_back_with_new_ones() -> None:
    with Server("scribe", *SMALL, "--workers", "1", supervised=True) as server:
        first = below(server)
        runtimes = first.children(recursive=True)
        assert len(runtimes) == 1
        first.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(runtimes, timeout=PATIENCE)[1] == []
        health = ready_again(server, 2).json
        assert (health["restarts"], health["last_exit"]) == (1, "was ended by SIGKILL")
        assert health["workers"][0]["restarts"] == 0
        assert complete(server).status == 200
        runtimes = below(server).children(recursive=True)
        assert server.stop() == 0
        assert psutil.wait_procs(runtimes, timeout=PATIENCE)[1] == []


def test_b20_a_signal_drains_a_model_server_and_hangup_is_no_end_of_it(tmp_path: Path, latch: Latch) -> None:
    file = tmp_path / "steps.jsonl"
    before = IN_A_STEP.format(wait=latch.wait)
    with Server("scribe", *SMALL, "--trace", str(file), before=before, supervised=True) as server:
        child = below(server)
        assert complete(server).status == 200
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: (tmp_path / "steps.jsonl.1").exists())
        latch.shut()
        body = json.dumps(ASKED | {"max_tokens": 4, "stream": False}).encode()
        with server.connect() as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            server.wait_until(lambda: server.get("/health").json["running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("draining: 1 requests")
            latch.open()
            (answer,) = parse_answers(read_all(sock))
            assert answer.json["usage"]["completion_tokens"] == 4
        assert server.wait() == 0
        assert not child.is_running()


def test_b2_what_is_wrong_with_a_model_ends_both_with_2_and_one_line(tmp_path: Path) -> None:
    assert "--max-model-len=99999: must be at most" in refusal("scribe", "--max-model-len", "99999")
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refusal(tmp_path)


def test_without_a_supervisor_the_process_is_the_model_server() -> None:
    with Server("scribe", "--no-supervise", *SMALL, supervised=True) as server:
        assert psutil.Process(server.process.pid).children() == []
        assert "restarts" not in server.get("/health").json


def test_the_address_of_a_server_on_all_addresses_is_one_that_answers() -> None:
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    bound: Any = SimpleNamespace(getsockname=lambda: ("::", 8000, 0, 0))  # not every machine has IPv6
    assert url_of(bound) == "http://[::1]:8000"
