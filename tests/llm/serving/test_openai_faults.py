"""What goes wrong around generation: callers that leave, read slowly or ask too much, models that hang or die, and
the end of the server. The toy model stops where a test wants it to; what is awaited is an event, never time.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from reflex_runtime.core.batch import BatchScheduled, RequestPreempted, RequestQueued, RequestSettled
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Priority
from reflex_runtime.llm import LLMEngine, SamplingParams
from serving.openai_toy import PATIENCE, Model, Toy
from serving.requests import refused_by_id


def alone(prompt: str, max_tokens: int) -> str:
    """What a request says that shares nothing with anybody."""
    (output,) = LLMEngine().generate([prompt], SamplingParams.greedy(max_tokens))
    return output.text


def held_blocks(toy: Toy) -> int:
    return int(toy.pool.num_blocks - toy.pool.free_blocks)


def watched(toy: Toy, hangs_s: float, given_up_s: float) -> None:
    """From now on a step hangs after so many seconds, and is given up so many later."""

    def set_limits() -> None:
        toy.batcher.device.watchdog, toy.generator._watchdog = hangs_s, given_up_s
        toy.batcher.flush()  # it sets its timer anew

    toy.on_loop(set_limits)


# -- callers that leave ------------------------------------------------------------------------------------------------


def test_l9_blocks_of_a_caller_gone_mid_stream_are_free_within_a_step_and_neighbours_unchanged() -> None:
    runner = Model()
    with Toy(runner) as toy:
        runner.stop()
        ask = {"max_tokens": 60, "stream": True}
        with toy.open("a" * 40, name="gone", **ask) as gone, toy.open("b" * 20, name="stays", **ask) as stays:
            runner.wait_inside()
            ticket = toy.ticket("gone")
            toy.ticket("stays")
            for _ in range(5):
                runner.step()
            gone.read_until(b"data: ")
            stays.read_until(b"data: ")
            steps = len(runner.sizes)
            gone.hang_up()
            toy.until(lambda: ticket.cancel_requested)
            runner.step()
            assert len(runner.sizes) == steps + 1
            assert runner.sizes[-1] == 1  # the neighbour alone
            sequence = toy.ticket("stays").request.payload
            assert held_blocks(toy) == len(sequence.blocks)
            assert toy.settled("gone").outcome.error.code == "cancelled"
            runner.go()
            stays.read()
            assert stays.text == alone("b" * 20, 60)
        assert held_blocks(toy) == 0


def test_l9_a_caller_that_waits_and_leaves_is_never_computed() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open("a" * 8, name="runs", max_tokens=3) as runs:
            runner.wait_inside()
            waits = toy.open("b" * 8, name="waits", max_tokens=3)
            ticket = toy.ticket("waits")
            waits.hang_up()
            assert toy.settled("waits").outcome.error.code == "cancelled"  # the step still runs
            assert runner.inside
            runner.go()
            body = json.loads(runs.read_until(b"}}}").partition(b"\r\n\r\n")[2])
            assert body["choices"][0]["text"] == alone("a" * 8, 3)
        assert ticket.batches == 0


def test_l9_a_caller_gone_in_the_middle_of_its_prompt() -> None:
    runner = Model()
    with Toy(runner, max_num_batched_tokens=16) as toy:
        runner.stop()
        gone = toy.open("a" * 100, name="gone", max_tokens=3)
        runner.wait_inside()
        runner.step()
        runner.step()
        ticket = toy.ticket("gone")
        assert held_blocks(toy) == 3
        gone.hang_up()
        toy.until(lambda: ticket.cancel_requested)
        runner.go()
        toy.settled("gone")
        assert held_blocks(toy) == 0
        assert ticket.granted == 48


def test_l9_closing_the_sending_side_is_leaving() -> None:
    runner = Model()
    with Toy(runner) as toy, toy.open(name="half", max_tokens=8000, stream=True) as half:
        half.read_until(b"data: ")
        half.sock.shutdown(socket.SHUT_WR)
        assert toy.settled("half").outcome.error.code == "cancelled"
        assert half.sock.recv(1 << 20) is not None
    assert held_blocks(toy) == 0


def test_l9_a_caller_gone_while_it_is_preempted() -> None:
    runner = Model(num_blocks=8)
    with Toy(runner) as toy:
        runner.stop()
        with (
            toy.open("a" * 40, name="first", max_tokens=80, stream=True) as first,
            toy.open("b" * 40, name="second", max_tokens=80, stream=True) as second,
        ):
            runner.wait_inside()
            toy.ticket("first")
            toy.ticket("second")
            while not toy.log.of(RequestPreempted):
                runner.step()
                toy.flush()
            preempted = toy.log.of(RequestPreempted)[0].ticket
            out, stays = (first, second) if preempted.id == "first" else (second, first)
            out.hang_up()
            assert toy.settled(preempted.id).outcome.error.code == "cancelled"
            runner.go()
            stays.read()
            assert stays.text == alone(("b" if stays is second else "a") * 40, 80)
    assert held_blocks(toy) == 0


def test_l9_a_preempted_stream_says_the_same() -> None:
    runner = Model(num_blocks=8)
    with Toy(runner) as toy:
        runner.stop()
        ask = {"max_tokens": 60, "stream": True}
        with toy.open("a" * 40, name="a", **ask) as a, toy.open("b" * 40, name="b", **ask) as b:
            toy.ticket("a")
            toy.ticket("b")
            runner.go()
            a.read()
            b.read()
        assert (a.text, b.text) == (alone("a" * 40, 60), alone("b" * 40, 60))
        assert toy.metrics()("reflex_num_preemptions_total") >= 1


# -- callers that read slowly ------------------------------------------------------------------------------------------


@pytest.mark.timing  # memory
def test_l9_a_slow_reader_is_held_alone_and_its_memory_bounded() -> None:
    runner = Model()
    with Toy(runner, send_buffer=4096) as toy:
        ask = {"max_tokens": 2000, "stream": True, "logprobs": 20}
        with toy.open("a" * 20, name="slow", receive_buffer=4096, **ask) as slow:
            ticket = toy.ticket("slow")
            toy.until(lambda: ticket.held and ticket.state.value == "resident")
            made = ticket.granted
            stream = toy.on_loop(lambda: toy.generator._streams[ticket])
            with toy.open("b" * 20, max_tokens=300, stream=True) as fast:
                fast.read()
            assert fast.text == alone("b" * 20, 300)
            assert ticket.granted == made  # not one token while its neighbour made 300
            assert stream.held
            assert stream.unread < 1000  # 64, and the steps made until the loop turned
            assert toy.metrics()("reflex_stream_holds_total") >= 1
            slow.read()
        assert slow.text == alone("a" * 20, 2000)
    assert held_blocks(toy) == 0


def test_l9_a_held_reader_that_leaves_frees_its_blocks() -> None:
    with Toy(send_buffer=4096) as toy:
        ask = {"max_tokens": 2000, "stream": True, "logprobs": 20}
        with toy.open("a" * 20, name="slow", receive_buffer=4096, **ask) as slow:
            ticket = toy.ticket("slow")
            toy.until(lambda: ticket.held and ticket.state.value == "resident")
            slow.hang_up()
            assert toy.settled("slow").outcome.error.code == "cancelled"
        assert held_blocks(toy) == 0


# -- too much ----------------------------------------------------------------------------------------------------------


def test_l9_a_full_queue_is_429_with_a_hint_when_to_come_again() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1, max_queue=2) as toy:
        runner.stop()
        with toy.open(name="a", max_tokens=2):
            runner.wait_inside()
            with toy.open(name="b", max_tokens=2), toy.open(name="c", max_tokens=2) as c:
                toy.ticket("b")
                toy.ticket("c")
                answer = toy.complete()
                assert answer.status == 429
                error = toy.error(answer)
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert "2" in error["message"]
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-should-retry"] == "true"
                runner.go()
                c.read_until(b"}}}")
        assert toy.complete().status == 200


def test_l9_choices_enter_together_or_not_at_all() -> None:
    runner = Model()
    with Toy(runner, max_queue=3, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open(name="runs", max_tokens=2) as runs, toy.open(name="waits", max_tokens=2) as waits:
            runner.wait_inside()
            toy.until(lambda: toy.generator.waiting == 1)
            assert toy.complete("a", n=3).status == 429
            runner.go()
            runs.read_until(b"}}}")
            waits.read_until(b"}}}")
        assert toy.complete("a", n=3, max_tokens=2).status == 200
        toy.flush()
        queued, settled = toy.log.of(RequestQueued), toy.log.of(RequestSettled)
        assert len(queued) == len(settled) == 2 + 2 + 3
        assert held_blocks(toy) == 0


def test_l9_more_choices_than_may_ever_wait_are_refused_for_good_before_anything_is_made_of_them() -> None:
    with Toy(max_queue=3) as toy:
        for asked in (toy.complete(["a", "b"], n=2), toy.complete(["a"] * 4), toy.chat("hi", n=4)):
            assert (asked.status, toy.error(asked)["param"]) == (400, "n")
            assert "4 choices" in toy.error(asked)["message"]
            assert "at most 3" in toy.error(asked)["message"]
            assert asked.headers["x-should-retry"] == "false"
        toy.flush()
        assert toy.log.of(RequestQueued) == []
    with Toy(max_queued_tokens=50) as toy:
        asked = toy.complete("a" * 20, n=3)
        assert (asked.status, toy.error(asked)["param"]) == (400, "n")
        assert "60 prompt tokens" in toy.error(asked)["message"]
        assert "at most 50" in toy.error(asked)["message"]
        assert toy.complete("a" * 20, n=2, max_tokens=1).status == 200
        assert toy.complete("a" * 60, max_tokens=1).status == 200  # alone it may


def test_l9_a_deadline_that_passes_while_it_waits_is_504() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open(name="a", max_tokens=2):
            runner.wait_inside()
            answer = toy.complete(deadline_ms=20)
            assert (answer.status, toy.error(answer)["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "true"
            assert runner.inside


def test_l2_a_request_is_queued_with_the_gap_it_asks_for() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open(name="runs", max_tokens=2, max_gap_ms=250):
            runner.wait_inside()
            assert toy.ticket("runs").request.max_gap == 0.25
            with toy.open(name="waits", max_tokens=2):
                assert toy.ticket("waits").request.max_gap is None
            runner.go()


def test_l9_urgent_goes_before_who_waited_longer() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open(name="runs", max_tokens=2, priority="urgent") as runs:
            runner.wait_inside()
            with toy.open(name="waits", max_tokens=2) as waits:
                toy.ticket("waits")
                with toy.open(name="urgent", max_tokens=2, priority="urgent") as urgent:
                    toy.ticket("urgent")
                    runner.go()
                    for caller in (runs, urgent, waits):
                        caller.read_until(b"}}}")
        toy.flush()
        order = [ticket.id for event in toy.log.of(BatchScheduled) for ticket in event.batch.admitted]
        assert order == ["runs", "urgent", "waits"]


def test_l9_urgent_takes_the_place_of_background_work_on_a_full_engine() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open("b" * 40, name="background", max_tokens=50, priority="background", stream=True) as background:
            for _ in range(10):
                runner.wait_inside()
                runner.step()
            with toy.open("u" * 20, name="urgent", max_tokens=5, priority="urgent", stream=True) as urgent:
                toy.ticket("urgent")
                seen = len(runner.sizes)
                runner.step()
                runner.step()
                urgent.read_until(b"data: ")  # its first token, within three steps
                assert len(runner.sizes) <= seen + 3
                runner.go()
                urgent.read()
                background.read()
            assert urgent.text == alone("u" * 20, 5)
            assert background.text == alone("b" * 40, 50)
        order = [event.ticket.id for event in toy.log.of(RequestSettled)]
        assert order == ["urgent", "background"]


@pytest.mark.parametrize("name", ["urgent", "default", "background"])
def test_l9_the_priority_is_the_requests(name: str) -> None:
    with Toy() as toy:
        assert toy.complete(priority=name, user="me", max_tokens=1).status == 200
        request = toy.log.wait(RequestQueued).ticket.request
        assert request.priority is Priority[name.upper()]
        assert request.client == "me"


@pytest.mark.parametrize("mapped", [True, False])
def test_h10_default_tiers_put_streams_before_others_and_batches_behind_them(mapped: bool) -> None:
    asked: dict[str, dict[str, Any]] = {
        "stream": {"stream": True},
        "whole": {},
        "batch": {"prompt": ["a", "b"]},
        "batch that streams": {"prompt": ["a", "b"], "stream": True},
        "named": {"stream": True, "priority": "background"},
        "named default": {"stream": True, "priority": "default"},
    }
    found = {}
    with Toy(default_tiers=mapped) as toy:
        for kind, fields in asked.items():
            before = len(toy.log.of(RequestQueued))
            assert toy.complete(**{"prompt": "a", "max_tokens": 1} | fields).status == 200
            toy.log.wait(RequestQueued, before + len(fields.get("prompt", "a")))
            found[kind] = {event.ticket.request.priority.name for event in toy.log.of(RequestQueued)[before:]}
    told = {"stream": "URGENT", "batch": "BACKGROUND", "batch that streams": "BACKGROUND"} if mapped else {}
    assert found == {kind: {told.get(kind, "DEFAULT")} for kind in asked} | {"named": {"BACKGROUND"}}


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_l9_a_body_over_the_limit_is_413_announced_or_not() -> None:
    with Toy(max_body_bytes=2000) as toy:
        answer = toy.complete("x" * 2000)
        assert (answer.status, toy.error(answer)["code"]) == (413, "too_large")
        assert "2000" in toy.error(answer)["message"]
        with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            sock.sendall(b"7d1\r\n" + b"x" * 2001 + b"\r\n0\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")
        assert toy.complete("x" * 1000).status == 200


def test_l9_what_is_not_http_is_answered_and_closed() -> None:
    with Toy() as toy, socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        sock.sendall(b"hello\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")
        assert toy.get("/health").status == 200


# -- the model ---------------------------------------------------------------------------------------------------------


def test_l9_health_answers_while_a_long_prompt_is_prefilled() -> None:
    runner = Model()
    with Toy(runner, max_num_batched_tokens=512) as toy:
        runner.stop()
        with toy.open("x" * 4000, name="long", max_tokens=1) as long:
            runner.wait_inside()
            assert [toy.get(path).status for path in ("/health", "/metrics")] == [200, 200]
            assert toy.get("/health").json["running"] == 1
            runner.go()
            long.read_until(b"}}}")
        assert toy.ticket("long").batches >= 8


def test_b19_a_step_that_hangs_is_answered_and_what_waits_runs_once_it_is_back() -> None:
    runner = Model()
    with Toy(runner, watchdog_s=0.2, max_num_seqs=1) as toy:
        toy.on_loop(lambda: setattr(toy.generator, "_watchdog", PATIENCE))
        runner.stop()
        with toy.open("a" * 20, name="hangs") as hangs, toy.open("b" * 20, name="waits", max_tokens=5) as waits:
            runner.wait_inside()
            toy.ticket("waits")
            hangs.read_until(b'"code":')
            assert b"HTTP/1.1 500" in hangs.data
            hangs.read_until(b'"processor_hung"')
            watched(toy, PATIENCE, PATIENCE)
            health = toy.get("/health")
            assert (health.status, health.json["status"], health.json["hung_steps"]) == (503, "degraded", 1)
            runner.go()
            waits.read_until(b"}}}")
            assert alone("b" * 20, 5).encode() in waits.data
        assert toy.get("/health").status == 200
        assert held_blocks(toy) == 0
    assert (toy.status, toy.clean) == (0, True)


def test_b19_a_model_that_never_comes_back_is_given_up_and_everybody_answered() -> None:
    runner = Model()
    with Toy(runner, drain_timeout_s=0.1, max_num_seqs=1) as toy:
        runner.stop()
        with toy.open(name="hangs") as hangs, toy.open(name="waits") as waits:
            runner.wait_inside()
            toy.ticket("waits")
            watched(toy, 0.05, 0.05)
            hangs.read_until(b"processor_hung")
            waits.read_until(b"shutting_down")
            assert b"HTTP/1.1 503" in waits.data
            toy.join()
        assert (toy.status, toy.clean) == (1, False)


def test_b19_a_model_that_never_comes_back_is_given_up_also_when_its_callers_left_before_it_was_told() -> None:
    runner = Model()
    with Toy(runner, drain_timeout_s=0.1) as toy:
        runner.stop()
        with toy.open(name="leaves") as leaves:
            runner.wait_inside()
            ticket = toy.ticket("leaves")
            leaves.hang_up()
            toy.until(lambda: ticket.cancel_requested)
        watched(toy, 0.05, 0.05)
        toy.settled("leaves")
        toy.join()
        assert (toy.status, toy.clean) == (1, False)


def test_b19_a_model_whose_thread_dies_ends_the_server() -> None:
    runner = Model()
    with Toy(runner) as toy:
        runner.fails = lambda step: SystemExit("dead")  # type: ignore[return-value]
        answer = toy.complete()
        assert (answer.status, toy.error(answer)["code"]) == (500, "processor_failed")
        toy.join()
    assert toy.status == 1


# -- the beginning and the end -----------------------------------------------------------------------------------------


class Loads(Toy):
    """A server whose model is not there before `loaded` is set, or never: `error`."""

    def __init__(self, error: BaseException | None = None, **config: Any) -> None:
        super().__init__(wait_ready=False, **config)
        self.loaded, self.error_ = threading.Event(), error

    def load(self, plan: Any) -> Any:
        assert self.loaded.wait(PATIENCE)
        if self.error_ is not None:
            raise self.error_
        return super().load(plan)


def test_l9_before_the_model_is_there_it_says_so() -> None:
    with Loads() as toy:
        health = toy.get("/health")
        assert (health.status, health.json["state"], health.json["model_loaded"]) == (503, "loading", False)
        answer = toy.complete()
        assert (answer.status, toy.error(answer)["code"]) == (503, "not_ready")
        assert answer.headers["retry-after"] == "1"
        named = toy.post("/v1/completions", {"model": "toy", "prompt": "x"}, **{"X-Request-Id": "mine"})
        assert (named.status, named.headers["x-request-id"]) == (503, "mine")
        asks = {"completions", "chat/completions", "responses", "messages", "messages/count_tokens"}
        assert refused_by_id(toy, "toy") == {f"/v1/{ask}" for ask in asks} | {"/tokenize", "/detokenize", "/health"}
        assert toy.get("/v1/models").status == 200
        assert toy.get("/metrics").status == 200
        toy.loaded.set()
        assert toy._ready.wait(PATIENCE)
        assert toy.complete().status == 200


def test_l9_a_wrong_directory_ends_it_with_2_and_a_broken_model_waits_for_the_signal() -> None:
    with Loads(ConfigError("config.json: wrong")) as toy:
        toy.loaded.set()
        toy.join()
    assert toy.status == 2
    with Loads(RuntimeError("out of luck")) as toy:
        toy.loaded.set()
        assert toy._ready.wait(PATIENCE)
        health = toy.get("/health")
        assert (health.status, health.json["state"]) == (503, "warmup_failed")
        assert "out of luck" in health.json["error"]
        assert toy.error(toy.complete())["code"] == "not_ready"
    assert toy.status == 1


def test_l9_a_library_that_wants_to_end_the_process_while_it_loads_is_a_model_that_cannot_be_loaded() -> None:
    with Loads(SystemExit("no such device")) as toy:
        toy.loaded.set()
        assert toy._ready.wait(PATIENCE)
        health = toy.get("/health")
        assert (health.status, health.json["state"]) == (503, "warmup_failed")
        assert "no such device" in health.json["error"]
    assert toy.status == 1


def test_l9_a_signal_while_it_loads_ends_it() -> None:
    with Loads() as toy:
        toy.end()
        assert (toy.status, toy.clean) == (0, False)
        toy.loaded.set()


def test_b20_what_runs_and_waits_is_finished_and_what_comes_is_refused() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1, drain_timeout_s=PATIENCE) as toy:
        runner.stop()
        with toy.open("a" * 9, name="runs", max_tokens=4, stream=True) as runs:
            runner.wait_inside()
            with toy.open("b" * 9, name="waits", max_tokens=4, stream=True) as waits:
                toy.ticket("waits")
                toy.stop()
                toy.until(lambda: toy.model.state == "draining")
                answer = toy.complete()
                assert (answer.status, toy.error(answer)["code"]) == (503, "shutting_down")
                assert answer.headers["connection"] == "close"
                assert toy.get("/health").json["state"] == "draining"
                runner.go()
                for caller, prompt in ((runs, "a" * 9), (waits, "b" * 9)):
                    caller.read()
                    assert caller.text == alone(prompt, 4)
        toy.join()
    assert (toy.status, toy.clean) == (0, True)


def test_b20_when_the_time_is_over_streams_end_with_an_error() -> None:
    runner = Model()
    with Toy(runner, max_num_seqs=1, drain_timeout_s=0.1) as toy:
        with toy.open("a" * 9, name="runs", max_tokens=8000, stream=True) as runs:
            runs.read_until(b"data: ")
            runner.stop()
            runner.wait_inside()
            with toy.open(name="waits", stream=True) as waits:
                toy.ticket("waits")
                toy.stop()
                runs.read()
                assert runs.said[-1]["error"]["code"] == "shutting_down"
                assert b"[DONE]" not in runs.data
                waits.read_until(b'"shutting_down"')
                assert b"HTTP/1.1 503" in waits.data
        toy.join()
    assert (toy.status, toy.clean) == (0, False)


def test_b20_what_is_still_tokenised_when_the_server_ends_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.web.serve.READING_GRACE", PATIENCE)
    with Toy(drain_timeout_s=PATIENCE) as toy:
        assert toy.model is not None
        assert toy.model.host is not None
        inside, go = threading.Event(), threading.Event()
        tokenizer: Any = toy.model.host.texts.tokenizer

        def encode(text: str, most: int | None = None) -> list[int]:
            inside.set()
            assert go.wait(PATIENCE)
            return list(text.encode())

        monkeypatch.setattr(tokenizer, "encode", encode)
        with toy.open("x" * 3000, max_tokens=2) as caller:
            assert inside.wait(PATIENCE)
            toy.stop()
            toy.until(lambda: toy.model is not None and toy.model.state == "draining")
            go.set()
            assert caller.read_until(b'"finish_reason"').startswith(b"HTTP/1.1 200 OK")


def test_b20_a_request_that_does_not_come_to_its_end_is_answered() -> None:
    with Toy() as toy, socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        toy.get("/health")  # a turn of the loop later
        toy.stop()
        data = b""
        while part := sock.recv(65536):
            data += part
        assert data.startswith(b"HTTP/1.1 503")
        assert b"shutting_down" in data
        toy.join()
    assert toy.status == 0


def test_h5_a_key_guards_everything_but_health_and_metrics_of_a_model() -> None:
    with Toy(api_key="secret") as toy:
        for path in ("/v1/models", "/v1/models/toy", "/nothing"):
            answer = toy.get(path)
            assert (answer.status, toy.error(answer)["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert toy.complete().status == 401
        assert toy.ask("GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status == 200
        assert toy.ask("GET", "/v1/models", headers={"X-Reflex-Key": "secret"}).status == 200
        assert toy.ask("GET", "/v1/models", headers={"Authorization": "Bearer secre"}).status == 401
        assert toy.get("/health").status == toy.get("/metrics").status == 200


def test_l9_many_streams_at_once_say_what_each_says_alone() -> None:
    with Toy(max_num_batched_tokens=64) as toy:
        prompts = [f"prompt {i} " * (1 + i % 5) for i in range(24)]
        callers = [toy.open(prompt, max_tokens=10 + i, stream=True) for i, prompt in enumerate(prompts)]
        try:
            for i, (caller, prompt) in enumerate(zip(callers, prompts, strict=True)):
                caller.read()
                assert caller.text == alone(prompt, 10 + i)
        finally:
            for caller in callers:
                caller.hang_up()
    assert held_blocks(toy) == 0



@pytest.mark.long  # waits for the end of a drain
def test_l9_a_reader_that_takes_nothing_at_the_end_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Toy(send_buffer=4096, drain_timeout_s=0.2) as toy:
        with toy.open("slow", max_tokens=6000, stream=True, receive_buffer=2048) as slow:
            slow.read_until(b"data: ")
            toy.complete("x", max_tokens=1000)  # by then its socket and the buffers before it are full
            toy.stop()
            toy.join()
        assert (toy.status, toy.clean) == (0, True)
    told = [record for record in caplog.records if record.exc_info]
    assert not told, told
    assert "a client does not read its answer" in caplog.text
