"""--otel of a policy server: spans of requests and batches, at a real OTLP receiver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.sync.client import connect

from reflex_runtime.cli import main
from serving.collector import Collector, Got
from serving.harness import PATIENCE, STATE, Burst, Metrics, Server
from serving.place import Place

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
UNSET, ERROR = 0, 2
SERVER = 2
PATIENT = """
from reflex_runtime.observe.spans import SpanExport
_close = SpanExport.close
SpanExport.close = lambda self, timeout: _close(self, 60.0)
"""  # at its end a server waits for a busy collector


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(collector: Collector, tiny: Path) -> Iterator[Server]:
    own = ("--otel", collector.url, "--max-queue", "4", "--oip-grpc", "127.0.0.1:0", "--api-key", "s3cret-key")
    with Server(tiny, *own, held=True) as made:
        yield made


KEY = {"X-Reflex-Key": "s3cret-key"}


def parent(number: int, flags: str = "01") -> tuple[str, str]:
    """A traceparent of a trace of its own, and the id of the trace."""
    trace = f"{number:032x}"
    return f"00-{trace}-{SPAN}-{flags}", trace


def queued(server: Server, names: list[str], later: Sequence[Any] = ()) -> Burst:
    """Connections whose requests wait behind a plug, which is the first. later: requests that are not sent yet."""
    asked = [{"state": STATE, "request_id": name} for name in ["plug", *names]]
    burst = server.burst([*asked, *later], KEY)
    burst.send(0, 1)
    server.reach(lambda m: m("reflex_in_flight_requests") == 1 and not m("reflex_policy_runtime_queue_depth"))
    burst.send(1, len(asked))
    server.reach(lambda m: m("reflex_policy_runtime_queue_depth") == len(names))
    return burst


def test_x6_a_batch_of_four_is_linked_to_the_spans_of_its_requests(collector: Collector, server: Server) -> None:
    names = [f"four-{i}" for i in range(4)]
    with queued(server, names) as burst:
        server.release()
        assert [answer.status for answer in burst.answers()] == [200] * 5
    spans = {s.attributes["reflex.request.id"]: s for s in collector.wait(5, lambda s: s.name == "infer act")}
    (batch,) = collector.wait(1, lambda s: s.attributes.get("reflex.batch.size") == 4 and s.name == "batch prod")
    assert sorted(batch.links) == sorted(spans[name].ids for name in names)
    assert batch.attributes["reflex.batch.unlinked"] == 0
    for name in names:
        assert spans[name].links == [batch.ids]
        assert spans[name].start <= batch.start <= batch.end <= spans[name].end
        assert spans[name].attributes["reflex.batch.size"] == 4
    assert len({span.trace for span in (batch, *spans.values())}) == len(spans) + 1


def test_x6_the_parent_of_a_request_is_its_callers_span(collector: Collector, server: Server) -> None:
    server.act_with({"traceparent": PARENT, "tracestate": "a=1,b=2"} | KEY)
    (span,) = collector.wait(1, lambda s: s.trace == TRACE)
    assert (span.parent, span.state, span.kind, span.status) == (SPAN, "a=1,b=2", SERVER, UNSET)
    assert span.attributes["reflex.outcome"] == "ok"
    assert span.attributes["gen_ai.action.embodiment"] == "unknown"
    assert set(span.moments) == {"reflex.queued", "reflex.started"}
    assert span.resource["service.name"] == "reflex"


def test_x6_a_websocket_has_the_parent_of_its_handshake(collector: Collector, server: Server) -> None:
    header, trace = parent(0x77)
    with connect(
        f"ws://127.0.0.1:{server.port}/", additional_headers=KEY | {"traceparent": header}, proxy=None
    ) as socket:
        socket.recv(PATIENCE)
        for _ in range(2):
            socket.send(msgpack_numpy.packb({"observation/state": np.array(STATE), "prompt": "go"}))
            assert b"actions" in socket.recv(PATIENCE)
    spans = collector.wait(2, lambda s: s.trace == trace)
    assert {(s.name, s.parent) for s in spans} == {("infer openpi", SPAN)}
    assert len({s.span for s in spans}) == 2


def test_x6_a_call_of_grpc_has_its_own_parent(collector: Collector, server: Server) -> None:
    address = re.search(r"127\.0\.0\.1:\d+", server.wait_log("clients of OIP over gRPC"))
    assert address is not None
    header, trace = parent(0x99)
    with grpc.insecure_channel(address[0]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError):  # a model of no name
            call(b"", metadata=[("traceparent", header), ("x-reflex-key", "s3cret-key")], timeout=PATIENCE)
    (span,) = collector.wait(1, lambda s: s.trace == trace)
    assert (span.name, span.parent) == ("infer oip", SPAN)
    assert span.attributes["reflex.outcome"] == "client_error"


def _ended_once(outcome: str, m: Metrics) -> bool:
    return m("reflex_requests_total", outcome=outcome, wire="act") == 1


def ends(collector: Collector, name: str) -> tuple[str, str, int]:
    """(outcome, error, status of the span) of a request."""
    (span,) = collector.wait(1, lambda s: s.attributes.get("reflex.request.id") == name)
    return span.attributes["reflex.outcome"], span.attributes.get("error.type", ""), span.status


def test_x6_each_way_a_request_can_end_stays_different(collector: Collector, server: Server) -> None:
    late = {"state": STATE, "request_id": "late", "deadline_ms": 300.0}
    with queued(server, ["gone", "second", "third", "fourth"], [late]) as burst:
        full, full_trace = parent(0x503)
        assert server.act_with({"traceparent": full} | KEY).code == "queue_full"
        wrong, wrong_trace = parent(0x422)
        assert server.post({"state": [float("nan"), 0.0]}, {"traceparent": wrong} | KEY).status == 422
        key, key_trace = parent(0x401)
        assert server.act_with({"traceparent": key, "X-Reflex-Key": "another-key"}).status == 401
        burst.hang_up([1])
        server.reach(partial(_ended_once, "cancelled"))
        burst.send(5)
        server.reach(partial(_ended_once, "expired"))
        server.release()
        burst.answers([0, 2, 3, 4, 5])

    def of(trace: str) -> Got:
        return collector.wait(1, lambda s: s.trace == trace)[0]

    def told(span: Got) -> tuple[str, str, int]:
        return span.attributes["reflex.outcome"], span.attributes["error.type"], span.status

    assert told(of(full_trace)) == ("rejected", "queue_full", ERROR)
    assert told(of(wrong_trace)) == ("client_error", "invalid_request", UNSET)
    assert told(of(key_trace)) == ("client_error", "unauthorized", UNSET)
    assert ends(collector, "gone") == ("cancelled", "cancelled", UNSET)
    assert ends(collector, "late") == ("expired", "deadline_exceeded", ERROR)
    assert ends(collector, "third") == ("ok", "", UNSET)


def test_x6_no_key_is_in_a_span(collector: Collector, server: Server) -> None:
    server.act_with(KEY)
    server.act_with({"X-Reflex-Key": "another-key"})
    collector.wait(1, lambda s: s.attributes.get("error.type") == "unauthorized")
    assert collector.spans
    told = repr(collector.spans) + repr(collector.headers)
    assert "s3cret" not in told
    assert "another-key" not in told


def test_x6_the_sampler_of_the_environment_is_for_requests_whose_caller_does_not_say(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that is not recorded has no recorded child, one that is has."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with Collector() as collector:
        own = ("--inject-fault", "prod:raise:1", "--log-format", "json")
        with Server(tiny, "--otel", collector.url, *own, before=PATIENT) as server:
            server.act()
            server.act_with({"traceparent": parent(0x10, "00")[0]})
            wanted, trace = parent(0x11)
            assert server.act_with({"traceparent": wanted}).status == 500
            server.stop()
            lines = [json.loads(line) for line in server.log if line != "<end>"]
    spans = collector.spans
    assert {s.trace for s in spans if s.kind == SERVER} == {trace}
    (batch,) = [s for s in spans if s.kind != SERVER]
    assert batch.attributes["error.type"] == "processor_failed"
    (span,) = [s for s in spans if s.kind == SERVER]
    assert batch.links == [span.ids]
    assert (span.attributes["reflex.outcome"], span.attributes["error.type"]) == ("failed", "processor_failed")
    assert (span.status, batch.status) == (ERROR, ERROR)
    failed = [line for line in lines if "failed" in line["message"] and "trace_id" in line]
    assert failed  # also of requests that are not recorded
    assert all(re.fullmatch("[0-9a-f]{32}", line["trace_id"]) for line in failed)


def test_x6_a_collector_that_is_down_costs_spans_and_no_answer(tiny: Path) -> None:
    soon = {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "0.2"}
    with Place() as place, Server(tiny, "--otel", f"http://127.0.0.1:{place.port}", env=soon) as server:
        assert server.act().status == 200
        server.reach(lambda m: m("reflex_spans_total", result="failed") == 2)
        assert server.act().status == 200
        assert server.stop() == 0
    told = [line for line in server.log if "takes no spans" in line]
    assert len(told) == 1


def test_x6_a_collector_that_does_not_answer_holds_neither_answers_nor_the_end(tiny: Path) -> None:
    with Collector(held=True) as collector, Server(tiny, "--otel", collector.url) as server:
        assert server.act().status == 200
        collector.wait_asked()
        assert [server.act().status for _ in range(8)] == [200] * 8
        assert server.stop() == 0
        assert any("were not sent within 2 s" in line for line in server.log)


def test_x6_what_was_not_sent_is_sent_at_the_end(tiny: Path) -> None:
    with Collector() as collector, Server(tiny, "--otel", collector.url + "/v1/traces", before=PATIENT) as server:
        assert server.act(request_id="last").status == 200
        assert server.stop() == 0
        assert {s.name for s in collector.spans} == {"infer act", "batch prod"}


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("localhost:4318", "must be http"),
        ("http://", "must be http"),
        ("http://a:99999", "must be http"),
        ("http://user:s3cret@host:4318", "must have no user"),
        ("http://host:4318?key=s3cret", "must have no user"),
    ],
)
def test_x6_a_wrong_endpoint_is_refused_without_its_secrets(
    tiny: Path, endpoint: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny), "--otel", endpoint]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert "s3cret" not in told


def test_x6_the_missing_extra_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from reflex_runtime.observe import tracing

    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    assert main(["serve", str(tiny), "--no-supervise", "--port", "0", "--otel", "http://localhost:4318"]) == 2
    assert "pip install '.[otel]'" in capsys.readouterr().err
