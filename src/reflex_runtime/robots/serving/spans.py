"""What a policy server's requests say in their spans."""

from __future__ import annotations

from reflex_runtime.observe.spans import RequestSpan, Spans
from reflex_runtime.robots.serving.pending import PendingRequest


def begin_span(spans: Spans, pending: PendingRequest) -> RequestSpan:
    """The span of a request, made when it is first needed."""
    span = pending.span
    if span is None:
        headers = None if pending.source is None else pending.source.headers
        span = pending.span = spans.begin(f"infer {pending.wire}", headers)
        span.attributes["reflex.wire"] = pending.wire
    if span.context.sampled:
        span.attributes["reflex.request.id"] = pending.request_id
    return span


def join_span(spans: Spans | None, pending: PendingRequest) -> None:
    """The request has been queued, and what it asks is known."""
    span, ticket, question = pending.span, pending.ticket, pending.question
    if spans is None or span is None or ticket is None or question is None or not span.context.sampled:
        return
    found = span.attributes
    found["reflex.request.id"] = pending.request_id
    if question.robot_id is not None:
        found["reflex.robot.id"] = question.robot_id
    if question.episode_id is not None:
        found["reflex.episode.id"] = question.episode_id
    spans.joined(ticket, span)
