"""One request to the served policies, from its first byte to its answer, and what journals and spans have of it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.journal_writer import RequestRecord, SentImage
from reflex_runtime.observe.spans import RequestSpan
from reflex_runtime.robots.policy.observation import Observation, seed_of
from reflex_runtime.robots.serving.decode_pool import SHADOW_CLIENT, SHADOW_SHARE, job_of, pixels_in
from reflex_runtime.robots.serving.question import ActAnswer, Array, Question, array_of
from reflex_runtime.robots.serving.served import ServedPolicy
from reflex_runtime.robots.versions.router import Routing
from reflex_runtime.robots.versions.slots import Version
from reflex_runtime.web.batch_server import HasHeaders, RequestScope, times_of
from reflex_runtime.web.errors import InvalidRequest


class PendingRequest(RequestScope):
    """One request; `RequestHandler` fills it in.

    wire: one of `WIRES`. counted: the policy that it counts for before it is known which one it asks. question, served,
    routing, version, answer: None before they are known.
    """

    __slots__ = ("answer", "counted", "question", "routing", "served", "version")
    counted: ServedPolicy

    def __init__(
        self,
        wire: str,
        request_id: str,
        client: Hashable,
        started: float | None = None,
        source: HasHeaders | None = None,
    ) -> None:
        super().__init__(wire, request_id, client, started, source)
        self.question: Question | None = None
        self.served: ServedPolicy | None = None
        self.routing: Routing | None = None
        self.version: Version | None = None
        self.answer: ActAnswer | None = None

    def rows(self, size: int) -> list[PendingRequest]:
        """The requests of a message of several. Rows without a name are not one robot that asks again."""
        ids = [(f"{self.request_id}.{row}", (self.client, row)) for row in range(size)]
        return [PendingRequest(self.wire, *own, self.started, self.source) for own in ids]

    @property
    def group(self) -> str:
        served = self.served or self.counted
        return served.group(served.served[0] if self.routing is None else self.routing.slot)

    def ended(self, error: ReflexError | None) -> None:
        """One without answer or error turned out to hold several."""
        served = self.served
        try:
            if error is not None:
                self.refuse(error)
                if self.routing is not None and served is not None:
                    served.rollout.untold(self.routing)
            elif self.answer is not None:
                self.publish(None)
                if served is not None and served.shadow is not None:
                    self._ask_shadow(served)
        finally:
            if self.version is not None:
                self.version.users -= 1

    def _ask_shadow(self, served: ServedPolicy) -> None:
        shadow, question, ticket, answer = served.shadow, self.question, self.ticket, self.answer
        assert shadow is not None
        if question is None or ticket is None or answer is None or not shadow.takes(self.request_id):
            return
        job = partial(
            job_of, request_id=self.request_id, question=question, received=self.received, client=SHADOW_CLIENT,
            share=SHADOW_SHARE,
        )  # fmt: skip
        shadow.ask(ticket.request.group, answer.actions, job)

    # -- journals: references to what was asked and answered, made on the event loop -----------------------------------

    def record(self, now: float, error: ReflexError | None) -> RequestRecord | None:
        question, ticket, routing, answer = self.question, self.ticket, self.routing, self.answer
        if question is None:  # it could not be read
            return None
        config = (self.served or self.counted).config
        found = RequestRecord(
            self.request_id,
            question.episode_id,
            question.robot_id,
            question.instruction,
            _array(question.state, "state") if isinstance(question.state, Array) else question.state,
            self._seed(question),
            _images(question) if question.images else {},
            self.received,
            question.deadline_ms if question.deadline_ms is not None else config.deadline_ms or None,
            question.executed,
            slot=self.group,
            total_s=now - self.received,
        )
        if self.version is not None:
            found.model_hash = self.version.policy.spec.model_hash
        if ticket is not None:
            times_of(found, ticket, now)
            if isinstance(ticket.request.payload, Observation):
                found.past = ticket.request.payload.past
        if answer is not None and error is None:
            found.actions, found.denoising_steps = answer.actions, answer.denoising_steps
            found.inference_mode, found.cache, found.guard = answer.inference_mode, answer.cache, answer.guard
            found.rtc = None if answer.rtc is None else dict(answer.rtc)
        if error is not None:
            found.error = (error.code, error.message)
        if routing is not None and routing.key:
            told = {"routing_key": routing.key, "degraded": routing.degraded, "cached": routing.cached}
            found.routing = {"slot": self.group, **told}
        return found

    def _seed(self, question: Question) -> int:
        if question.seed is not None:
            return question.seed
        seen = None if self.ticket is None else self.ticket.request.payload
        return seen.seed if isinstance(seen, Observation) else seed_of(self.request_id)  # worked out already

    # -- spans ---------------------------------------------------------------------------------------------------------

    def begin_span(self) -> RequestSpan | None:
        new, span = self.span is None, super().begin_span()
        if span is not None and new:
            span.attributes["reflex.wire"] = self.wire
        if span is not None and span.context.sampled:
            span.attributes["reflex.request.id"] = self.request_id
        return span

    @property
    def span_name(self) -> str:
        return f"infer {self.wire}"

    def join_span(self) -> None:
        """It has been queued, and what it asks is known."""
        spans, span, ticket, question, served = self.server.spans, self.span, self.ticket, self.question, self.served
        if spans is None or span is None or ticket is None or question is None or not span.context.sampled:
            return
        told = {"reflex.request.id": self.request_id, "reflex.robot.id": question.robot_id}
        told |= {"reflex.episode.id": question.episode_id}
        if served is not None:
            told["gen_ai.action.embodiment"] = served.spec.embodiment.name or "unknown"
        span.attributes.update({name: value for name, value in told.items() if value is not None})
        spans.joined(ticket, span)


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
