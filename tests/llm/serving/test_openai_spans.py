"""--otel of a language model's server: spans of requests with their tokens, and of the steps that made them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from serving.collector import Collector
from serving.harness import Server
from serving.openai_toy import Toy

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, SPAN = PARENT.split("-")[1:3]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def toy(collector: Collector) -> Iterator[Toy]:
    with Toy(otel=collector.url, api_key="s3cret") as made:
        yield made


KEY = {"authorization": "Bearer s3cret"}


def test_x6_a_streamed_chat_has_its_tokens_in_its_span(collector: Collector, toy: Toy) -> None:
    said = [{"role": "user", "content": "robots"}]
    asked = {"model": "toy", "messages": said, "stream": True, "max_tokens": 5, "seed": 1}
    toy.post("/v1/chat/completions", asked, traceparent=PARENT, **KEY)
    (span,) = collector.wait(1, lambda s: s.trace == TRACE)
    assert (span.name, span.parent, span.kind, span.status) == ("chat toy", SPAN, 2, 0)
    told = span.attributes
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.usage.input_tokens"] > 6
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["gen_ai.request.stream"], told["gen_ai.request.seed"]) == (True, 1)
    first = span.moments["gen_ai.first_token"]
    assert span.start < first < span.end
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx((first - span.start) / 1e9, abs=1e-3)
    steps = collector.wait(5, lambda s: (TRACE, span.span) in s.links)
    assert len(steps) == 5
    assert {step.attributes["reflex.batch.unlinked"] for step in steps} == {0}


def test_x6_a_request_that_fails_has_its_error_and_no_prompt_is_in_a_span(collector: Collector, toy: Toy) -> None:
    toy.post("/v1/completions", {"model": "another", "prompt": "secret words"}, **KEY)
    (span,) = collector.wait(1, lambda s: s.name == "text_completion toy")
    told = span.attributes
    assert (told["reflex.outcome"], told["error.type"], span.status) == ("client_error", "not_found", 0)
    assert told["http.response.status_code"] == 404
    assert toy.complete("secret words").status == 401
    (refused,) = collector.wait(1, lambda s: s.attributes.get("error.type") == "unauthorized")
    told = refused.attributes
    assert (told["http.route"], told["http.response.status_code"]) == ("/v1/completions", 401)
    assert "secret words" not in repr(collector.spans)
    assert "s3cret" not in repr(collector.spans)


def test_x6_the_sampler_of_a_model_server_is_for_requests_whose_caller_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with Collector() as collector:
        with Toy(otel=collector.url) as toy:
            assert toy.complete(max_tokens=2).status == 200
            asked = {"model": "toy", "prompt": "robots", "max_tokens": 3, "n": 2}
            assert toy.post("/v1/completions", asked, traceparent=PARENT).status == 200
            (request,) = collector.wait(1, lambda s: s.kind == 2)  # they are sent in order
            steps = collector.wait(1, lambda s: s.kind != 2)
    assert (request.trace, request.attributes["gen_ai.usage.output_tokens"]) == (TRACE, 6)
    assert all(set(step.links) == {request.ids} for step in steps)


@pytest.mark.long
def test_x6_steps_of_runtime_processes_are_linked_to_the_requests_of_their_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with Collector() as collector, Server(
        "scribe", "--otel", collector.url, "--workers", "1", "--kv-cache-gb", "0.05"
    ) as server:
        asked = json.dumps({"model": "scribe", "prompt": "Once", "max_tokens": 4, "temperature": 0}).encode()
        assert server.ask("POST", "/v1/completions", asked, {"traceparent": PARENT}).status == 200
        (request,) = collector.wait(1, lambda s: s.kind == 2)
        steps = collector.wait(4, lambda s: s.links == [request.ids])
        assert server.stop() == 0
    assert request.trace == TRACE
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert len(steps) == 4
    assert {step.resource["process.pid"] for step in steps}.isdisjoint({request.resource["process.pid"]})
