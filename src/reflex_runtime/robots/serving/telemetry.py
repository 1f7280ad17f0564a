"""What journals, spans and the log get of the requests of a policy server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.journal import PolicyHead
from reflex_runtime.observe.journal_writer import RequestRecord, SentImage, hardware
from reflex_runtime.observe.spans import RequestSpan, Spans
from reflex_runtime.robots import InvalidRequest, Observation, seed_of
from reflex_runtime.robots.serving.decode_pool import pixels_in
from reflex_runtime.robots.serving.pending import PendingRequest
from reflex_runtime.robots.serving.question import Array, Question, array_of
from reflex_runtime.robots.serving.served import ServedPolicy

log = logging.getLogger("reflex.server")

# -- journals: references to what was asked and answered, made on the event loop, and the header -----------------------


def asked_and_answered(
    pending: PendingRequest, slot: str, now: float, error: ReflexError | None, deadline_ms: float
) -> RequestRecord:
    """One request that could be read. error: of anything but a 200.

    deadline_ms: what requests are given that bring none; 0 is none.
    """
    question, ticket, routing = pending.question, pending.ticket, pending.routing
    assert question is not None
    state = question.state
    found = RequestRecord(
        pending.request_id,
        question.episode_id,
        question.robot_id,
        question.instruction,
        _array(state, "state") if isinstance(state, Array) else state,
        _seed(pending, question),
        _images(question) if question.images else {},
        pending.received,
        question.deadline_ms if question.deadline_ms is not None else deadline_ms or None,
        question.executed,
        slot=slot,
        total_s=now - pending.received,
    )
    if pending.version is not None:
        found.model_hash = pending.version.policy.spec.model_hash
    if ticket is not None:
        started = ticket.started
        found.arrived = ticket.arrived
        found.queue_s = (now if started is None else started) - ticket.arrived
        found.batch_s = 0.0 if started is None else now - started
        found.measured_ms = ticket.shared * 1e3
        found.batch = ticket.admission
        if isinstance(ticket.request.payload, Observation):
            found.past = ticket.request.payload.past
    answer = pending.answer
    if answer is not None and error is None:
        found.actions, found.denoising_steps = answer.actions, answer.denoising_steps
        found.inference_mode, found.cache, found.guard = answer.inference_mode, answer.cache, answer.guard
        found.rtc = None if answer.rtc is None else dict(answer.rtc)
    if error is not None:
        found.error = (error.code, error.message)
    if routing is not None and routing.key:
        told = {"routing_key": routing.key, "degraded": routing.degraded, "cached": routing.cached}
        found.routing = {"slot": slot, **told}
    return found


def header_of(policies: Sequence[ServedPolicy]) -> dict[str, Any]:
    """What a policy server adds to the first line of a journal: of several policies the first, and each by its name."""
    first = _head_of(policies[0]) | {"hardware": hardware()}
    if len(policies) == 1:
        return first
    slots = [dict(told, slot=f"{one.name}.{told['slot']}") for one in policies for told in _slots_of(one)]
    served = {one.name: PolicyHead(**_head_of(one)) for one in policies}
    return first | {"policies": slots, "split": None, "served": served}


def _slots_of(served: ServedPolicy) -> list[dict[str, str]]:
    return [
        {"slot": name, "model_id": slot.policy.spec.model_id, "model_hash": slot.policy.spec.model_hash}
        for name, slot in served.slots.items()
    ]


def _head_of(served: ServedPolicy) -> dict[str, Any]:
    slots, first = served.slots, served.policy
    spec = first.spec
    robot = spec.embodiment
    return {
        "model_hash": spec.model_hash,
        "config_hash": spec.config_hash,
        "export_dir": spec.source,
        "model_type": spec.model_type,
        "export_kind": spec.inference_mode,
        "embodiment": robot.name,
        "control_rate_hz": robot.control_rate_hz,
        "state_names": robot.state_names,
        "action_names": robot.action_names,
        "providers": [first.describe()["provider"]],
        "policies": _slots_of(served) if len(slots) > 1 else None,
        "split": served.config.split if "b" in slots else None,
    }


def _seed(pending: PendingRequest, question: Question) -> int:
    if question.seed is not None:
        return question.seed
    seen = None if pending.ticket is None else pending.ticket.request.payload
    if isinstance(seen, Observation):  # worked out already
        return seen.seed
    return seed_of(pending.request_id)


def _images(question: Question) -> dict[str, SentImage]:
    return {
        name: read
        for name, _, image in question.images
        if (read := image if isinstance(image, str | bytes) else _array(image, name)) is not None
    }


def _array(sent: Array | NDArray[Any], name: str) -> NDArray[Any] | None:
    """None when it is none: that is why the request was refused."""
    try:
        return array_of(sent, name) if isinstance(sent, Array) else pixels_in(sent, name)
    except InvalidRequest:
        return None


# -- spans -------------------------------------------------------------------------------------------------------------


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
    if pending.served is not None:
        found["gen_ai.action.embodiment"] = pending.served.spec.embodiment.name or "unknown"
    if question.robot_id is not None:
        found["reflex.robot.id"] = question.robot_id
    if question.episode_id is not None:
        found["reflex.episode.id"] = question.episode_id
    spans.joined(ticket, span)
