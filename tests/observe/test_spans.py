"""Spans: the headers of their parents, the bounds of their queue, and what they say."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import Batch, Cause
from reflex_runtime.core.events import BatchFinished, RequestSettled
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.logs import JsonLog
from reflex_runtime.observe.span_export import SpanExport
from reflex_runtime.observe.spans import RequestSpan, Spans, batch_span, request_span
from reflex_runtime.observe.trace_context import Span, SpanContext, parent_of, within
from serving.collector import Collector

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PAGE = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("sent", "sampled"),
    [(HEADER, True), (HEADER[:-2] + b"00", False), (b" " + HEADER, True), (b"01" + HEADER[2:] + b"-more", True)],
)
def test_x6_a_valid_traceparent_is_read(sent: bytes, sampled: bool) -> None:
    assert parent_of(sent) == SpanContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"00", HEADER.upper(), HEADER + b"-more", b"ff" + HEADER[2:], HEADER[:-1], HEADER + b"0",
        HEADER.replace(b"4bf92f3577b34da6a3ce929d0e0e4736", b"0" * 32), HEADER.replace(b"00f067aa0ba902b7", b"0" * 16),
        b"01" + HEADER[2:] + b"-" + b"x" * 300, b"01" + HEADER[2:] + b"-\n", HEADER.replace(b"-", b"_"),
    ],
)  # fmt: skip
def test_x6_another_traceparent_counts_as_none(sent: bytes) -> None:
    assert parent_of(sent) is None


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"a=1, b@c=2 ,", "a=1,b@c=2"),
        (b"a=1,a=2", ""),
        (b"A=1", ""),
        (b"a=1\n", ""),
        (b",".join(b"k%d=1" % i for i in range(33)), ""),
        (b"a=" + b"1" * 600, ""),
    ],
)
def test_x6_a_tracestate_is_kept_only_as_the_standard_has_it(sent: bytes, kept: str) -> None:
    assert parent_of(HEADER, sent) == SpanContext(TRACE, SPAN, True, kept)


def test_x6_what_it_is_read_from_is_written() -> None:
    assert SpanContext(TRACE, SPAN).traceparent.encode() == HEADER


def batch_of(tickets: list[Ticket]) -> Batch:
    return Batch(7, "prod", "", "", Cause.IDLE, 1.0, 0.5, 0.0, dict.fromkeys(tickets, 1.0), tuple(tickets))


def test_x6_links_are_bounded_and_the_rest_is_counted() -> None:
    put: list[Any] = []
    spans = Spans(put.append)
    tickets = [Ticket(Request(), i, 0.0) for i in range(200)]
    for ticket in tickets[:150]:
        spans.joined(ticket, spans.begin("infer act"))
    spans(BatchFinished(2.0, batch_of(tickets), 0.25, False))
    span = put[0]
    assert (len(span.links), span.attributes["reflex.batch.unlinked"]) == (128, 72)
    assert span.end - span.start == 0.25
    for ticket in tickets:
        spans(RequestSettled(3.0, ticket))
    spans(BatchFinished(4.0, batch_of(tickets), 0.25, False))
    assert len(put) == 1  # a batch without a recorded request has no span


def span_named(name: str = "infer act") -> Span:
    return Span(name, SpanContext(TRACE, SPAN), 0, True, 1.0, 2.0, {})


def test_x6_a_full_queue_drops_and_counts_and_what_has_room_is_sent() -> None:
    registry = CollectorRegistry()

    def count(result: str) -> float | None:
        return registry.get_sample_value("reflex_spans_total", {"result": result})

    with Collector(held=True) as collector:
        export = SpanExport(collector.url, registry, capacity=3)
        export.put(span_named())
        collector.wait_asked()
        assert [export.put(span_named(str(i))) for i in range(5)] == [True] * 3 + [False] * 2
        assert count("queue_full") == 2
        collector.release()
        assert export.close(60.0)
        assert [span.name for span in collector.spans] == ["infer act", "0", "1", "2"]
        assert not export.put(span_named())
    assert (count("exported"), count("queue_full"), count("failed")) == (4, 3, 0)


def test_x6_half_a_character_in_the_text_of_an_error_does_not_cost_the_spans_beside_it() -> None:
    asked = RequestSpan("infer act", SpanContext(TRACE, SPAN))
    broken = request_span(asked, 1.0, 2.0, "failed", 500, "internal", "robot \ud800", None)
    registry = CollectorRegistry()
    with Collector() as collector:
        export = SpanExport(collector.url, registry)
        export.put(span_named())
        export.put(broken)
        assert export.close(60.0)
        assert [span.message for span in collector.spans] == ["", "robot \\ud800"]
    assert registry.get_sample_value("reflex_spans_total", {"result": "exported"}) == 2


def test_x6_spans_that_a_collector_refuses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with Collector(answers=400) as collector:
        export = SpanExport(collector.url, registry)
        export.put(span_named())
        assert export.close(60.0)
    assert registry.get_sample_value("reflex_spans_total", {"result": "failed"}) == 1
    (line,) = [record.getMessage() for record in caplog.records if "takes no spans" in record.getMessage()]
    assert "400" in line


def test_x6_the_page_has_every_attribute() -> None:
    ticket = Ticket(Request(), 1, 1.0)
    ticket.arrived, ticket.started = 1.5, 2.0
    batch = Batch(1, "g", "", "s", Cause.IDLE, 1.0, 1.0, 1.0, {ticket: 1.0}, (ticket,), (), "budget")
    batch.notes["NAME"] = 1
    asked = RequestSpan("infer act", SpanContext(TRACE, SPAN))
    request = request_span(asked, 1.0, 2.0, "failed", 500, "x", "", ticket)
    ran = batch_span(BatchFinished(2.0, batch, 1.0, True, True), SpanContext(1, 1), ())
    told = {*request.attributes, *ran.attributes, *(name for name, _ in request.moments)}
    assert {name for name in told if f"`{name}`" not in PAGE} == set()
    assert len(told) == 21


def test_x6_a_line_about_a_request_has_the_ids_of_its_span() -> None:
    record = logging.LogRecord("reflex", logging.INFO, "f", 1, "it failed", (), None)
    with within(SpanContext(TRACE, SPAN)):
        told = json.loads(JsonLog().format(record))
    assert (told["trace_id"], told["span_id"]) == tuple(HEADER.decode().split("-")[1:3])
    assert "trace_id" not in json.loads(JsonLog().format(record))
    assert re.search(r"`trace_id` and `span_id`", PAGE)
