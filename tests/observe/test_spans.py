"""Spans: the headers of their parents, the bounds of their queue, and what they say."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import Batch, BatchFinished, Cause, RequestSettled
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe import spans as spans_module
from reflex_runtime.observe.logs import JsonLog
from reflex_runtime.observe.spans import SpanExport, Spans, batch_span, end_request
from reflex_runtime.observe.tracing import within
from serving.collector import Collector

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PAGE = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")


class Kept(SpanExport):
    """Keeps the spans that end, in place of sending them."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", CollectorRegistry())
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    assert made.close(60.0)


def parent_in(kept: Kept, sent: bytes, tracestate: bytes = b"") -> tuple[int, int, bool, str] | None:
    """The parent of the span of a request with these headers; None without one."""
    span = Spans(kept).begin("infer act", {b"traceparent": sent, b"tracestate": tracestate}, 1.0)
    span.end()
    if (parent := kept.ended[-1].parent) is None:
        return None
    state = span.get_span_context().trace_state.to_header()
    return parent.trace_id, parent.span_id, parent.trace_flags.sampled, state


@pytest.mark.parametrize("sent", [HEADER, b" " + HEADER, b"01" + HEADER[2:] + b"-more"])
def test_x6_a_valid_traceparent_is_read(kept: Kept, sent: bytes) -> None:
    assert parent_in(kept, sent) == (TRACE, SPAN, True, "")


def test_x6_the_child_of_a_span_that_is_not_recorded_is_not_recorded(kept: Kept) -> None:
    span = Spans(kept).begin("infer act", {b"traceparent": HEADER[:-2] + b"00"}, 1.0)
    assert not span.is_recording()
    assert span.get_span_context().trace_id == TRACE
    assert Spans.traceparent(span) == ""


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"00", HEADER.upper(), HEADER + b"-more", b"ff" + HEADER[2:], HEADER[:-1], HEADER + b"0",
        HEADER.replace(b"4bf92f3577b34da6a3ce929d0e0e4736", b"0" * 32), HEADER.replace(b"00f067aa0ba902b7", b"0" * 16),
        HEADER.replace(b"-", b"_"), b"\xff" * 55,
    ],
)  # fmt: skip
def test_x6_another_traceparent_counts_as_none(kept: Kept, sent: bytes) -> None:
    assert parent_in(kept, sent) is None


@pytest.mark.parametrize(
    ("sent", "kept_state"),
    [
        (b"a=1, b@c=2 ,", "a=1,b@c=2"), (b"A=1", ""), (b",".join(b"k%d=1" % i for i in range(33)), ""), (b"\xff=1", ""),
        (b",".join(b"k%d=%s" % (i, b"1" * 250) for i in range(3)), ""),  # every span that waits would hold it
    ],
)  # fmt: skip
def test_x6_a_tracestate_is_kept_only_as_the_standard_has_it(
    kept: Kept, sent: bytes, kept_state: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert parent_in(kept, HEADER, sent) == (TRACE, SPAN, True, kept_state)
    assert not caplog.records  # a caller's header writes no line


def test_x6_a_span_is_written_as_the_parent_of_others(kept: Kept) -> None:
    span = Spans(kept).begin("infer act", {b"traceparent": HEADER}, 1.0)
    assert parent_in(kept, Spans.traceparent(span).encode()) == (TRACE, span.get_span_context().span_id, True, "")


def batch_of(tickets: list[Ticket]) -> Batch:
    return Batch(7, "prod", "", "", Cause.IDLE, 1.0, 0.5, 0.0, dict.fromkeys(tickets, 1.0), tuple(tickets))


def test_x6_links_are_bounded_and_the_rest_is_counted(kept: Kept) -> None:
    spans = Spans(kept)
    tickets = [Ticket(Request(), i, 0.0) for i in range(200)]
    for ticket in tickets[:150]:
        spans.joined(ticket, spans.begin("infer act", {}, 0.0))
    spans(BatchFinished(2.0, batch_of(tickets), 0.25, False))
    (span,) = kept.ended
    assert span.attributes is not None
    assert (len(span.links), span.attributes["reflex.batch.unlinked"]) == (128, 72)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 250_000_000
    for ticket in tickets:
        spans(RequestSettled(3.0, ticket))
    spans(BatchFinished(4.0, batch_of(tickets), 0.25, False))
    assert len(kept.ended) == 1  # a batch without a recorded request has no span


def test_x6_a_batch_of_a_request_that_ended_before_it_writes_no_line(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that left while its batch ran: its answer is published before the end of the batch."""
    spans, ticket = Spans(kept), Ticket(Request(), 1, 0.0)
    spans.joined(ticket, span := spans.begin("infer act", {}, 0.0))
    end_request(span, 1.0, "cancelled", 499, None, None)
    spans(BatchFinished(2.0, batch_of([ticket]), 0.25, False))
    assert len(kept.ended) == 2
    assert not caplog.records


@pytest.mark.parametrize("early", [1, 2])
def test_x6_a_pause_between_the_two_clocks_does_not_move_a_span(monkeypatch: pytest.MonkeyPatch, early: int) -> None:
    """A thread may lose the interpreter for milliseconds between two calls."""
    readings = chain(range(early), count(79_000_000, 100))
    clocks = SimpleNamespace(monotonic_ns=lambda: next(readings), time_ns=lambda: next(readings) + 10**18)
    monkeypatch.setattr(spans_module, "time", clocks)
    assert abs(spans_module._ns(1.0) - 10**18 - 10**9) < 1000


def end(export: SpanExport, name: str = "infer act") -> None:
    Spans(export).begin(name, {}, 1.0).end()


def test_x6_a_full_queue_drops_and_counts_and_what_has_room_is_sent() -> None:
    registry = CollectorRegistry()

    def count(result: str) -> float | None:
        return registry.get_sample_value("reflex_spans_total", {"result": result})

    with Collector(held=True) as collector:
        export = SpanExport(collector.url, registry, capacity=3)
        end(export)
        collector.wait_asked()
        for i in range(5):
            end(export, str(i))
        assert count("queue_full") == 2
        collector.release()
        assert export.close(60.0)
        assert [span.name for span in collector.spans] == ["infer act", "0", "1", "2"]
        end(export)
    assert (count("exported"), count("queue_full"), count("failed")) == (4, 3, 0)


def test_x6_half_a_character_in_the_text_of_an_error_does_not_cost_the_spans_beside_it() -> None:
    registry = CollectorRegistry()
    with Collector() as collector:
        export = SpanExport(collector.url, registry)
        end(export)
        broken = Spans(export).begin("infer act", {}, 1.0)
        end_request(broken, 2.0, "failed", 500, ReflexError("robot \ud800"), None)
        assert export.close(60.0)
        assert [span.message for span in collector.spans] == ["", "robot \\ud800"]
    assert registry.get_sample_value("reflex_spans_total", {"result": "exported"}) == 2


def test_x6_spans_that_a_collector_refuses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with Collector(answers=400) as collector:
        export = SpanExport(collector.url, registry)
        end(export)
        assert export.close(60.0)
    assert registry.get_sample_value("reflex_spans_total", {"result": "failed"}) == 1
    (line,) = [record.getMessage() for record in caplog.records if "takes no spans" in record.getMessage()]
    assert "400" in line


def test_x6_the_page_has_every_attribute(kept: Kept) -> None:
    ticket = Ticket(Request(), 1, 1.0)
    ticket.arrived, ticket.started = 1.5, 2.0
    batch = Batch(1, "g", "", "s", Cause.IDLE, 1.0, 1.0, 1.0, {ticket: 1.0}, (ticket,), (), "budget")
    batch.notes["NAME"] = 1
    end_request(Spans(kept).begin("infer act", {}, 1.0), 2.0, "failed", 500, ReflexError("x"), ticket)
    batch_span(kept.tracer(ALWAYS_ON), BatchFinished(2.0, batch, 1.0, True, True), ())
    told = {name for span in kept.ended for name in span.attributes or ()}
    told |= {event.name for span in kept.ended for event in span.events}
    assert {name for name in told if f"`{name}`" not in PAGE} == set()
    assert len(told) == 21


def test_x6_a_line_about_a_request_has_the_ids_of_its_span(kept: Kept) -> None:
    record = logging.LogRecord("reflex", logging.INFO, "f", 1, "it failed", (), None)
    span = Spans(kept).begin("infer act", {b"traceparent": HEADER}, 1.0).get_span_context()
    with within(span):
        told = json.loads(JsonLog().format(record))
    assert (told["trace_id"], told["span_id"]) == (f"{TRACE:032x}", f"{span.span_id:016x}")
    assert "trace_id" not in json.loads(JsonLog().format(record))
    assert re.search(r"`trace_id` and `span_id`", PAGE)
