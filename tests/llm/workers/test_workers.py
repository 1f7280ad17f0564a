"""The server in front of runtime processes: the same answers, and what becomes of them when a process dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forked import Forked
from reflex_runtime.cli import main
from reflex_runtime.ipc.client import ClientConfig, WorkerUnavailable
from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig
from reflex_runtime.ipc.messages import BATCH_GENERATE, GenerateParams
from reflex_runtime.ipc.peer import Handler
from reflex_runtime.ipc.spawn import Link, Opener, Process, _peer_on
from reflex_runtime.llm.engine.toy import ByteTokenizer
from reflex_runtime.llm.server.local_model import WorkerEngine
from reflex_runtime.llm.server.model_host import ModelPlan, Open, trace_of
from reflex_runtime.llm.server.workers import Workers, WorkersConfig, labelled, open_workers
from reflex_runtime.observe import live
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.settings import LLMServeConfig
from serving.harness import Server, changed
from serving.openai_toy import Toy

CHILD = Path(__file__).with_name("toy_worker.py")
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _every_process_answers_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.llm.server.workers.ANSWER_S", PATIENCE)


def forked(env: Mapping[str, str]) -> Opener:
    """As `spawned`, for the toy's runtime process, without the half second that its imports take."""

    async def opened(handler: Handler) -> Link:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"import runpy; runpy.run_path({str(CHILD)!r}, run_name='__main__')"
            child: Any = Forked(code, env=env, stdin=theirs.fileno(), stdout=2, stderr=2)
            return Link(await _peer_on(ours, handler), Process(child))

    return opened


class Fleet(Toy):
    """The toy in runtime processes. step_ms: that a step of theirs takes."""

    def __init__(
        self,
        count: int = 1,
        step_ms: float = 0.0,
        batcher: GenerateBatcherConfig | None = None,
        client: ClientConfig | None = None,
        options: Callable[[LLMServeConfig, int, int], dict[str, Any]] = lambda config, number, restarts: {},
        **config: Any,
    ) -> None:
        super().__init__(workers=count, **config)
        self.workers: Workers | None = None
        self._made = WorkersConfig(
            lambda number: forked({**os.environ, "TOY_STEP_MS": str(step_ms)}),
            options,
            batcher or GenerateBatcherConfig(),
            client or ClientConfig(backoff_s=0.05),
        )

    def opening(self) -> Open:
        return partial(open_workers, self._made, ByteTokenizer())

    def plan(self) -> ModelPlan:
        return ModelPlan("toy", self.config, adapters=("poet",))

    def come(self, product: Any) -> None:
        self.workers = product.host

    def health(self) -> Any:
        return self.get("/health").json

    def status_page(self) -> Any:
        return self.get("/status").json

    def line(self) -> Any:
        return self.status_page()["lines"][0]

    def reach(self, holds: Callable[[Any], bool]) -> Any:
        """Ask /health until it says so."""
        end = time.monotonic() + PATIENCE
        while not holds(found := self.health()):
            assert time.monotonic() < end, found
            changed()
        return found

    def kill(self, number: int = 0, how: int = signal.SIGKILL) -> int:
        pid = int(self.health()["workers"][number]["pid"])
        os.kill(pid, how)
        return pid


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Each in a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        found[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def without_names(answer: Any) -> Any:
    body = answer.json
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def test_g1_answers_through_workers_are_those_of_one_process() -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": "robots", "max_tokens": 12},
        {"prompt": ["one", "two", "three"], "max_tokens": 5},
        {"prompt": "x" * 40, "max_tokens": 7, "n": 3, "temperature": 0.8, "seed": 5},
        {"prompt": "stop here", "max_tokens": 30, "stop": ["e", "qq"]},
        {"prompt": "how likely", "max_tokens": 6, "logprobs": 3},
        {"prompt": [1, 2, 3], "max_tokens": 4, "priority": "urgent"},
        {"prompt": "x", "max_tokens": 40, "structured_outputs": {"choice": ["left", "right"]}, "seed": 4},
        {"prompt": "x", "max_tokens": 9, "presence_penalty": 1.5, "logit_bias": {"97": 4}, "repetition_penalty": 1.4},
    ]
    with Toy() as one, Fleet(2) as several:
        for fields in asked:
            expected, found = one.complete(**fields), several.complete(**fields)
            assert (expected.status, found.status) == (200, 200), (expected.body, found.body)
            assert without_names(expected) == without_names(found)
        expected, found = (server.chat("hello", max_tokens=9) for server in (one, several))
        assert without_names(expected) == without_names(found)
        texts = []
        for server in (one, several):
            with server.open("stream", max_tokens=9, stream=True) as stream:
                stream.read()
                texts.append(stream.text)
        assert texts[0] == texts[1] != ""


def test_g1_what_can_never_run_is_refused_in_front() -> None:
    with Fleet() as fleet:
        answer = fleet.complete("x" * 8000, max_tokens=4000)
        assert (answer.status, fleet.error(answer)["code"]) == (400, "context_length_exceeded")
        answer = fleet.complete("x", structured_outputs={"regex": "("})
        assert (answer.status, fleet.error(answer)["param"]) == (400, "structured_outputs")
        assert fleet.status_page()["lines"][0]["client"]["sent"].get("batch_generate", 0) == 0


def test_g1_a_request_is_told_to_the_runtime_as_it_was_asked() -> None:
    with Fleet() as fleet:
        assert fleet.workers is not None
        client, said = fleet.workers.lines[0].client, []
        call = client.call

        def heard(method: str, params: Any) -> Any:
            said.extend(params["requests"] if method == BATCH_GENERATE else [])
            return call(method, params)

        client.call = heard  # type: ignore[method-assign]
        fields = {"n": 2, "max_tokens": 2, "priority": "urgent", "user": "u", "deadline_ms": 90_000}
        fields["max_gap_ms"] = 250
        assert fleet.complete("x" * 40, **fields).status == 200
        first, second = said
        assert [(one.priority, one.client, one.model_id) for one in said] == [("urgent", "u", "toy")] * 2
        assert (first.follows, second.follows) == (None, first.stream_id)  # the prompt is computed once
        assert (first.request_id[-2:], second.request_id[-2:]) == ("#0", "#1")
        assert all(30_000.0 < one.timeout_ms <= 90_000.0 for one in said)
        assert [one.max_gap_ms for one in said] == [250.0] * 2


def test_g6_who_waits_for_a_place_is_told_as_waiting() -> None:
    with Fleet(step_ms=2, batcher=GenerateBatcherConfig(stream_limit=1)) as fleet:
        with fleet.open("runs", max_tokens=8000, stream=True) as runs, fleet.open("waits", stream=True):
            runs.read_until(b"data: ")
            health = fleet.reach(lambda health: health["waiting"] == 1)
            assert (health["running"], health["workers"][0]["waiting"]) == (1, 1)
        fleet.reach(lambda health: (health["running"], health["waiting"]) == (0, 0))


def test_g7_who_leaves_in_the_turn_he_came_is_never_told_of() -> None:
    with Fleet() as fleet:
        assert fleet.workers is not None
        workers = fleet.workers

        def comes_and_goes() -> None:
            generator = workers
            request = generator.request([1, 2, 3], GenerateParams(max_tokens=9, request_id="brief"))
            (stream,) = generator.submit_alike([request], asyncio.Event())
            stream.close()

        fleet.on_loop(comes_and_goes)
        assert fleet.complete(max_tokens=2).status == 200
        line = fleet.line()
        assert (line["streams"]["registered"], line["client"]["sent"][BATCH_GENERATE]) == (0, 1)


def test_x4_the_page_shows_the_steps_of_all_processes_and_who_asks() -> None:
    """Tokens do not go past the server's own events: each process counts its own while somebody looks."""
    with Fleet(2) as fleet:
        url = f"http://127.0.0.1:{fleet.port}/dashboard/stream"
        with urllib.request.urlopen(url, timeout=PATIENCE) as lines:
            for line in lines:
                told = json.loads(line)
                clients = {client["name"]: client["answers"] for client in told["clients"]}
                groups = [group for group in told["groups"] if group["first_p50"] is not None]
                if clients.get("arm", 0) >= 4 and groups and told["batches"]:
                    break
                at_once([lambda: fleet.complete("robots", max_tokens=6, user="arm").status] * 2)
    assert [group["name"] for group in told["groups"]] == ["default"]
    assert groups[0]["tokens"] > 0.0
    assert groups[0]["gap_p50"] is not None
    assert {member[0] for batch in told["batches"] for member in batch["members"]} == {"arm"}
    assert {"default", "worker-0", "worker-1"} == set(told["server"]["queues"])
    assert told["server"]["model"]["kv_cache_usage"] >= 0.0


def test_x4_a_process_counts_nothing_once_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "UNSEEN", 0.0)
    sinks: list[Any] = []
    model = Mock(add_sink=sinks.append, remove_sink=sinks.remove, queues=dict, health=dict)

    async def check() -> None:
        engine = WorkerEngine(model)
        for _ in range(2):
            engine.live()
            assert [engine.live().number, len(sinks)] == [2, 1]
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            loop.call_later(0.0, over.set)
            await over.wait()
            assert sinks == []

    asyncio.run(check())


def test_g12_concurrent_requests_share_messages() -> None:
    with Fleet() as fleet:
        prompts = [f"robot {i}" for i in range(12)]
        assert fleet.complete(prompts, max_tokens=3).status == 200
        page = fleet.status_page()
        assert page["lines"][0]["client"]["sent"]["batch_generate"] == 1
        lane = page["lines"][0]["generate"]["partitions"][0]
        assert (lane["last_batch"], lane["model_id"]) == (12, "toy")
        assert lane["priority_mix"] == {"urgent": 0, "default": 12, "background": 0}


@pytest.mark.parametrize("callers", [16, 32])
def test_g12_closed_loop_callers_on_connections_of_their_own_save_most_messages(callers: int) -> None:
    """They ask, read and ask again, one by one, with answers of one length: four messages in five are saved where
    nothing else runs, three are wanted here. Three tries: a machine may stop a thread of theirs for longer."""
    rounds = 10
    with Fleet(step_ms=8) as fleet:

        def ask_again() -> list[int]:
            connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=PATIENCE)
            body = json.dumps({"model": "toy", "prompt": "robots", "max_tokens": 4, "temperature": 0})
            found = []
            for _ in range(rounds):
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                found.append(response.status)
            connection.close()
            return found

        most = 0.4 * rounds * callers
        messages = [0]
        while len(messages) <= 3 and (len(messages) == 1 or messages[-1] - messages[-2] > most):
            assert at_once([ask_again] * callers) == [[200] * rounds] * callers
            sent = fleet.line()["client"]["sent"]
            messages.append(sent.get("generate", 0) + sent[BATCH_GENERATE])
        assert messages[-1] - messages[-2] <= most, messages


def test_g7_a_caller_that_hangs_up_frees_its_place_at_the_worker() -> None:
    with Fleet(step_ms=2) as fleet:
        with fleet.open("leaves", max_tokens=8000, stream=True) as caller:
            caller.read_until(b"data: ")
            assert fleet.health()["running"] == 1
        fleet.reach(lambda health: health["running"] == 0)
        fleet.reach(lambda _: fleet.line()["engine"]["model"]["running"] == 0)  # a step later
        assert fleet.line()["client"]["sent"]["cancel"] == 1


def test_g8_a_slow_reader_holds_its_own_producer_alone() -> None:
    with Fleet(send_buffer=4096) as fleet:
        with fleet.open("slow", max_tokens=6000, stream=True, receive_buffer=2048) as slow:
            slow.read_until(b"data: ")
            for _ in range(3):
                assert fleet.complete("fast", max_tokens=200).status == 200
            page = fleet.status_page()["lines"][0]
            assert page["streams"]["unread_tokens"] <= 64
            assert page["streams"]["active"] == 1
        fleet.reach(lambda health: health["running"] == 0)


def test_g14_a_killed_process_fails_its_own_callers_and_is_started_again() -> None:
    with Fleet(2, step_ms=5) as fleet:
        with fleet.open("a", max_tokens=6000, stream=True) as a:
            a.read_until(b"data: ")
            with fleet.open("b", max_tokens=300, stream=True) as b:
                b.read_until(b"data: ")
                killed = fleet.kill(0)
                a.read()
                assert a.said[-1]["error"]["code"] == "worker_lost"
                during = fleet.health()
                assert during["status"] == "ok"
                b.read()
                assert b.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        after = fleet.reach(lambda health: all(worker["state"] == "ready" for worker in health["workers"]))
        assert after["workers"][0]["pid"] != killed
        assert [worker["restarts"] for worker in after["workers"]] == [1, 0]
        assert [answer.status for answer in at_once([lambda: fleet.complete(max_tokens=3)] * 4)] == [200] * 4


def test_g14_without_any_process_requests_are_refused_and_health_says_so() -> None:
    with Fleet(1, client=ClientConfig(backoff_s=30.0, backoff_max_s=30.0)) as fleet:
        fleet.kill()
        health = fleet.reach(lambda health: health["state"] == "restarting")
        assert (health["status"], health["model_loaded"]) == ("restarting", False)
        assert fleet.get("/health").status == 503
        answer = fleet.complete()
        assert (answer.status, fleet.error(answer)["code"]) == (503, "worker_unavailable")
        assert answer.headers["x-should-retry"] == "true"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (fleet.status, fleet.clean) == (0, True)


def test_g14_who_asks_is_told_when_the_first_of_them_is_tried_again() -> None:
    with Fleet(2, client=ClientConfig(backoff_s=30.0, backoff_max_s=30.0)) as fleet:
        for number in (0, 1):
            fleet.kill(number)
        fleet.reach(lambda health: all(worker["pid"] is None for worker in health["workers"]))  # reaped, and waits
        assert fleet.workers is not None
        soon = WorkerUnavailable("worker-1 is being started again", retry_after=2.0)
        fleet.workers.lines[1].client.unavailable = lambda: soon  # type: ignore[method-assign]
        assert fleet.complete().headers["retry-after"] == "2"


def test_g14_a_deadline_holds_at_the_engine_too() -> None:
    with Fleet(step_ms=2, options=lambda _, number, restarts: {"max_num_seqs": 1}) as fleet:
        with fleet.open("long", max_tokens=8000, stream=True) as long:
            long.read_until(b"data: ")
            late = fleet.complete("late", max_tokens=3, deadline_ms=300)
            assert (late.status, fleet.error(late)["code"]) == (504, "deadline_exceeded")
            fleet.reach(lambda health: health["running"] == 1)
        assert fleet.complete("in time", max_tokens=3, deadline_ms=60_000).status == 200


def test_g14_a_deadline_that_passes_while_the_message_is_out_is_told_as_one() -> None:
    with Fleet() as fleet:
        pid = fleet.kill(how=signal.SIGSTOP)
        try:
            late = fleet.complete("late", max_tokens=3, deadline_ms=100)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (late.status, fleet.error(late)["code"]) == (504, "deadline_exceeded")
        fleet.reach(lambda health: health["running"] == 0)  # the runtime was told


def test_g14_what_does_not_finish_in_the_time_to_drain_is_ended_then() -> None:
    with Fleet(step_ms=5, drain_timeout_s=0.5) as fleet:
        with fleet.open("endless", max_tokens=8000, stream=True) as caller:
            caller.read_until(b"data: ")
            fleet.stop()
            caller.read()
            assert caller.said[-1]["error"]["code"] == "shutting_down"
        fleet.join()
        assert (fleet.status, fleet.clean) == (0, True)


def test_g14_a_process_that_hangs_does_not_keep_the_server_from_ending() -> None:
    with Fleet(2, drain_timeout_s=0.5) as fleet:
        fleet.kill(how=signal.SIGSTOP)
        fleet.stop()
        fleet.join()
        assert (fleet.status, fleet.clean) == (0, True)


def test_g14_shutdown_lets_streams_finish_and_leaves_no_process() -> None:
    with Fleet(2, step_ms=2, drain_timeout_s=PATIENCE) as fleet:
        pids = [worker["pid"] for worker in fleet.health()["workers"]]
        with fleet.open("long", max_tokens=150, stream=True) as caller:
            caller.read_until(b"data: ")
            fleet.stop()
            caller.read()
            assert "choices" in caller.said[-1], caller.said[-1]
            assert caller.said[-1]["choices"][0]["finish_reason"] == "length"
        fleet.join()
        assert (fleet.status, fleet.clean) == (0, True)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_g9_a_long_prompt_is_counted_in_the_front_and_not_sent() -> None:
    with Fleet() as fleet:
        text, long = "robots " * 1000, "r" * 30_000  # the second is more than the model holds
        assert fleet.complete(text, max_tokens=3).json["usage"]["prompt_tokens"] == len(text)
        answer = fleet.complete(long, max_tokens=3)
        assert (answer.status, fleet.error(answer)["code"]) == (400, "context_length_exceeded")
        assert "30000" in fleet.error(answer)["message"]
        assert fleet.complete([text, long], max_tokens=3).status == 400
        assert fleet.line()["client"]["sent"][BATCH_GENERATE] == 1
        assert fleet.complete(text, max_tokens=3).status == 200


def test_g13_the_page_and_the_series_say_which_process() -> None:
    with Fleet(2) as fleet:
        assert fleet.complete(["a", "b", "c"], max_tokens=3).status == 200
        text = fleet.get("/metrics").body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        steps = next(f for name, f in families.items() if name.startswith("reflex_generation_tokens"))
        assert {sample.labels["worker"] for sample in steps.samples} == {"worker-0", "worker-1"}
        assert sum(s.value for s in steps.samples if s.name.endswith("_total")) == 9
        sizes = families["reflex_generate_batcher_batch_size"].samples
        assert sum(s.value for s in sizes if s.name.endswith("_sum")) == 3
        assert families["reflex_generate_batcher_queue_wait_ms"]
        mix = families["reflex_generate_batcher_priority_mix"].samples
        assert sum(s.value for s in mix if s.labels.get("priority") == "default") == 3


def test_g13_reflex_top_once_asks_the_running_server(capsys: pytest.CaptureFixture[str]) -> None:
    with Fleet(2, api_key="secret") as fleet:
        url = f"http://127.0.0.1:{fleet.port}"
        assert main(["top", "--once", url]) == 2
        assert "needs a key" in capsys.readouterr().err
        assert main(["top", "--once", url, "--api-key", "secret"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^toy: 0 running", shown, re.MULTILINE)
        assert all(re.search(rf"^worker-{number} +ready ", shown, re.MULTILINE) for number in (0, 1))
    assert main(["top", "--once", url]) == 2
    assert "nothing listens there; start a server with reflex serve" in capsys.readouterr().err


def test_g14_a_model_that_cannot_be_loaded_ends_the_start() -> None:
    with Fleet(2, options=lambda _, number, restarts: {"max_num_seqs": -1 if number else 4}, wait_ready=False) as fleet:
        fleet.join()
    assert (fleet.status, fleet.clean) == (2, True)


def test_g14_the_command_with_two_workers_one_of_which_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """`reflex serve scribe --workers 2`, the `openai` client, `reflex top --once`: as a user would."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("openvino")
    with Server("scribe", "--workers", "2", "--kv-cache-gb", "0.1") as server:
        url = f"http://127.0.0.1:{server.port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            def complete(prompt: str) -> str:
                done = client.completions.create(model="scribe", prompt=prompt, max_tokens=8, temperature=0)
                return str(done.choices[0].text)

            before = at_once([lambda: complete("Once there was")] * 6)
            assert len(set(before)) == 1
            assert before[0]
            workers = server.get("/health").json["workers"]
            assert [worker["state"] for worker in workers] == ["ready", "ready"]
            os.kill(workers[0]["pid"], signal.SIGKILL)
            server.wait_log("worker-0 was lost")
            server.wait_log("worker-0: its process was ended by SIGKILL")
            assert complete("Once there was") == before[0]  # by the other one
            assert main(["top", "--once", url]) == 0
            assert re.search(r"^worker-1 +ready +\d+ +0 +\d+ MB +\d", capfd.readouterr().out, re.MULTILINE)
            stream = client.chat.completions.create(
                model="scribe", messages=[{"role": "user", "content": "hello"}], max_tokens=5, stream=True
            )
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
        pids = [worker["pid"] for worker in server.get("/health").json["workers"]]
        assert server.stop() == 0
    for pid in filter(None, pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_g14_a_process_that_was_started_again_leaves_the_trace_of_the_lost_one_alone(tmp_path: Path) -> None:
    def options(_: LLMServeConfig, number: int, restarts: int) -> dict[str, Any]:
        return {"trace": trace_of(str(tmp_path / "steps.jsonl"), number, restarts)}

    with Fleet(options=options) as fleet:
        assert fleet.complete(max_tokens=3).status == 200
        killed = fleet.kill()
        fleet.reach(lambda health: health["status"] == "ok" and health["workers"][0]["pid"] != killed)
        assert fleet.complete(max_tokens=3).status == 200
    assert sorted(file.name for file in tmp_path.iterdir()) == ["steps.worker-0.1.jsonl", "steps.worker-0.jsonl"]


def test_pages_of_processes_become_one() -> None:
    page = '# HELP a_total About a\n# TYPE a_total counter\na_total{x="1"} %d\n'
    texts = {"w0": page % 2, "w1": page % 3}
    text = labelled("worker", texts).decode()
    assert text.count("# TYPE a_total counter") == 1
    assert 'a_total{worker="w0",x="1"} 2.0' in text
    assert 'a_total{worker="w1",x="1"} 3.0' in text
    assert labelled("worker", {}) == b""


@pytest.mark.parametrize("workers", [0, 1])
def test_g14_at_sighup_the_trace_goes_on_in_a_new_file(workers: int, tmp_path: Path) -> None:
    """Of a model in the server's own process, and of one in a runtime process, to which the signal is passed on."""
    trace = tmp_path / "steps.jsonl"
    options = ["--workers", str(workers)] if workers else []
    file = Path(trace_of(str(trace), 0)) if workers else trace
    kept = Path(f"{file}.1")
    body = json.dumps({"model": "scribe", "prompt": "hello", "max_tokens": 2}).encode()
    with Server("scribe", "--trace", str(trace), *options) as server:
        head = {"Content-Type": "application/json"}
        assert server.ask("POST", "/v1/completions", body, head).status == 200
        server.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + PATIENCE
        while not (kept.exists() and '"footer"' in kept.read_text()):
            assert time.monotonic() < until
            changed()
        assert server.ask("POST", "/v1/completions", body, head).status == 200
        assert server.stop() == 0
    assert [bool(read_journal(path).batches) for path in (kept, file)] == [True, True]


def test_l9_an_adapter_is_asked_for_in_a_runtime_process_too() -> None:
    with Fleet() as fleet:
        assert fleet.complete(model="toy:poet", max_tokens=3).json["choices"][0]["text"] == "aaa"
        assert fleet.complete(max_tokens=3).json["choices"][0]["text"] != "aaa"
