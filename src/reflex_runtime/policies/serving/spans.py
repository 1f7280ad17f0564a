"""What a policy server's requests say in their spans."""

from __future__ import annotations

from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.telemetry.spans import RequestSpan, Spans


def begin_span(spans: Spans, ask: Ask) -> RequestSpan:
    """The span of a request, made when it is first needed."""
    span = ask.span
    if span is None:
        span = ask.span = spans.begin(f"infer {ask.wire}", None if ask.source is None else ask.source.headers)
        span.attributes["reflex.wire"] = ask.wire
    if span.context.sampled:
        span.attributes["reflex.request.id"] = ask.request_id
    return span


def join_span(spans: Spans | None, ask: Ask) -> None:
    """The request has been queued, and what it asks is known."""
    span, ticket, question = ask.span, ask.ticket, ask.question
    if spans is None or span is None or ticket is None or question is None or not span.context.sampled:
        return
    found = span.attributes
    found["reflex.request.id"] = ask.request_id
    if question.robot_id is not None:
        found["reflex.robot.id"] = question.robot_id
    if question.episode_id is not None:
        found["reflex.episode.id"] = question.episode_id
    spans.joined(ticket, span)
