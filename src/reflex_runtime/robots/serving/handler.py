"""The path of a request through the served policies, the same on every wire.

A wire writes, for each request,

    with handler.admit(pending):
        answer = await handler.infer(pending, question)

`admit` counts and records how a request ended: for metrics, journals, rollout, objectives and spans. `infer` chooses
the version, submits, has the pictures decoded and awaits the batch. When the caller leaves, it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, cast

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import PRIORITIES, AdmittedBatch, Priority, Ticket
from reflex_runtime.observe.journal_writer import RequestRecord, SentImage
from reflex_runtime.robots.policy.observation import ActionChunk, Doubt, Observation, seed_of
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.decode_pool import SHARES, check_names, pixels_in
from reflex_runtime.robots.serving.question import (
    GROOT,
    ActAnswer,
    Array,
    Image,
    ObservationReader,
    Question,
    Timing,
    array_of,
)
from reflex_runtime.robots.serving.runtime import PolicyRuntime, ServedPolicy
from reflex_runtime.robots.versions.router import Routing
from reflex_runtime.robots.versions.slots import Version
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.version import __version__
from reflex_runtime.web.batch_server import HasHeaders, RequestScope, together
from reflex_runtime.web.errors import InvalidRequest, Reported, SloViolated, known
from reflex_runtime.web.fields import invalid, printable

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("reflex.server")

MAX_WARNED = 100  # different warnings in the log
ROWS: Final = 16  # rows of a message that are read in one turn of the loop, 0.2 ms each

Asked = Question | Callable[[], Question]
"""A question, or a function that makes it, called once the request is admitted."""


class PendingRequest(RequestScope):
    """One request, from admission to its end; `RequestHandler` sets its fields.

    wire: one of `WIRES`. counted: the policy that it is counted for until its own is known. question, served, routing,
    version, answer: None until they are known.
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
        """A request for each row of a message. Rows count as different clients, unless their questions name a robot."""
        ids = [(f"{self.request_id}.{row}", (self.client, row)) for row in range(size)]
        return [PendingRequest(self.wire, *own, self.started, self.source) for own in ids]

    @property
    def group(self) -> str:
        served = self.served or self.counted
        return served.groups[served.served[0] if self.routing is None else self.routing.slot]

    def ended(self, error: ReflexError | None) -> None:
        """Publish its end. A message of several requests has neither answer nor error, and nothing is published."""
        served = self.served
        try:
            if error is not None:
                self.refuse(error)
                if self.routing is not None and served is not None:
                    served.rollout.untold(self.routing)
            elif self.answer is not None:
                self.publish(None)
                if (shadow := None if served is None else served.shadow) is not None:
                    assert self.question is not None
                    assert self.ticket is not None
                    slot = self.ticket.request.group
                    shadow.ask(self.request_id, slot, self.answer.actions, self.question, self.received)
        finally:
            if self.version is not None:
                self.version.users -= 1

    # -- journals and spans --------------------------------------------------------------------------------------------

    def record(self, error: ReflexError | None) -> RequestRecord | None:
        question, ticket, routing, answer = self.question, self.ticket, self.routing, self.answer
        if question is None:  # it could not be read
            return None
        config, state = (self.served or self.counted).config, question.state
        found = RequestRecord(
            self.request_id,
            question.episode_id,
            question.robot_id,
            question.instruction,
            cast(Any, _readable(state, "state")) if isinstance(state, Array) else state,
            self._seed(question),
            _images(question) if question.images else {},
            question.deadline_ms if question.deadline_ms is not None else config.deadline_ms or None,
            question.executed,
        )
        if self.version is not None:
            found.model_hash = self.version.policy.spec.model_hash
        if ticket is not None and isinstance(ticket.request.payload, Observation):
            found.past = ticket.request.payload.past
        if answer is not None and error is None:
            found.actions, found.denoising_steps = answer.actions, answer.denoising_steps
            found.inference_mode, found.cache, found.guard = answer.inference_mode, answer.cache, answer.guard
            found.rtc = None if answer.rtc is None else dict(answer.rtc)
        if routing is not None and routing.key:
            told = {"routing_key": routing.key, "degraded": routing.degraded, "cached": routing.cached}
            found.routing = {"slot": self.group, **told}
        return found

    def _seed(self, question: Question) -> int:
        if question.seed is not None:
            return question.seed
        seen = None if self.ticket is None else self.ticket.request.payload
        return seen.seed if isinstance(seen, Observation) else seed_of(self.request_id)

    def begin_span(self) -> Span | None:
        new, span = self.span is None, super().begin_span()
        if self.server.spans is not None and span is not None and new:
            self.server.spans.note(span, {"reflex.wire": self.wire, "reflex.request.id": self.request_id})
        return span

    @property
    def span_name(self) -> str:
        return f"infer {self.wire}"

    def join_span(self) -> None:
        """Describe the queued request in its span."""
        spans, span, ticket, question, served = self.server.spans, self.span, self.ticket, self.question, self.served
        if spans is None or span is None or ticket is None or question is None:
            return
        told = {"reflex.request.id": self.request_id, "reflex.robot.id": question.robot_id}
        told |= {"reflex.episode.id": question.episode_id}
        if served is not None:
            told["gen_ai.action.embodiment"] = served.spec.embodiment.name or "unknown"
        spans.note(span, {name: value for name, value in told.items() if value is not None})
        spans.joined(ticket, span)


class RequestHandler:
    """Handles requests for one policy of a server, or for the policy that each request names.

    config: of the server; `served` has its own. prefix: of the policy's paths; "" if no path names a policy.
    """

    def __init__(self, runtime: PolicyRuntime, policy: str | None = None, prefix: str = "") -> None:
        """policy: of all requests. None: each request names one, or gets the default."""
        self.runtime, self.config, self.prefix = runtime, runtime.config, prefix
        self._fixed = policy is not None
        self._served = runtime.default if policy is None else runtime.policies[policy]
        self._named: dict[str, RequestHandler] = {}  # handlers of one policy each, by its name
        self._readings: dict[str, ObservationReader] = {}  # by wire
        self._read_for: list[PolicySpec] = []

    @property
    def served(self) -> ServedPolicy:
        """The policy of requests that name none; 422 if there are several and no default."""
        if self._served is None:
            names = ", ".join(self.runtime.policies)
            path = f"/policies/{next(iter(self.runtime.policies))}"
            raise invalid("policy", f"policy: missing; served are {names}; name one, or begin the path with {path}")
        return self._served

    @property
    def unnamed(self) -> bool:
        """Whether a request must name its policy."""
        return self._served is None

    def of(self, name: str | None) -> RequestHandler:
        """The handler of the policy of this name; this one for None; 422 for a wrong name."""
        if name is None:
            return self
        if self._fixed:
            if name != self.served.name:
                wrong = f"policy: {name[:100]!r} is named, and {self.served.name!r} by the path or the connection"
                raise invalid("policy", printable(wrong))
            return self
        if name not in self.runtime.policies:
            names = ", ".join(self.runtime.policies)
            near = did_you_mean(name[:100], self.runtime.policies)
            raise invalid("policy", printable(f"policy: {name[:100]!r} is not served, only {names}{near}"))
        if name not in self._named:
            self._named[name] = RequestHandler(self.runtime, name)
        return self._named[name]

    def one(self, name: str | None) -> RequestHandler:
        """The handler of a connection that stays with one policy: later requests on it may name no other."""
        return self.of(self.served.name if name is None else name)

    def reading(self, wire: str) -> ObservationReader:
        """A reader of the wire's observations, for the versions that the slots have now."""
        specs = list(self.served.specs.values())
        if specs != self._read_for:
            self._read_for, self._readings = specs, {}
        if wire not in self._readings:
            first, *others = (ObservationReader(spec, spec.wires.get(wire)) for spec in specs)
            video = "video." if wire == GROOT else ""
            self._readings[wire] = ObservationReader(first.spec, first.wire, others, video)
        return self._readings[wire]

    # -- a request -----------------------------------------------------------------------------------------------------

    def admit(self, pending: PendingRequest) -> PendingRequest:
        """A context manager that admits the request and counts it and its end. An exception in it is the error."""
        pending.server, pending.counted = self.runtime, self._served or self.runtime.first
        return pending

    def refused(self, pending: PendingRequest, error: ReflexError) -> None:
        """Count a request that failed, or was refused before it could be read."""
        self.admit(pending).refuse(error)

    def reported(self, failure: Exception, message: PendingRequest) -> Reported:
        """The error that answers a message. It is counted, unless it comes from one of its requests, which were."""
        if isinstance(failure, Reported):
            return failure
        error = known(failure, message.request_id)
        self.refused(message, error)
        return Reported(error, message.request_id)

    async def infer(self, pending: PendingRequest, asked: Asked, received: float | None = None) -> ActAnswer:
        """The policy's answer. received: when the last byte of the request was read; by default now."""
        pending.received = time.monotonic() if received is None else received
        question = pending.question = asked() if callable(asked) else asked
        if question.request_id:
            pending.request_id = question.request_id
        served = pending.served = self.served if question.policy is None else self.of(question.policy).served
        if served.slo is not None and not served.slo.admits():
            raise SloViolated("the latency objective is violated", retry_after=1.0, value_ms=served.slo.value_ms)
        routing = pending.routing = served.rollout.place(
            question.episode_id, pending.request_id, time.monotonic(), question.robot_id, pending.client
        )
        version = pending.version = served.slots[routing.slot].version
        version.users += 1  # until its end
        if question.instruction is None:
            question.instruction = version.policy.spec.default_prompt
        if question.images:
            check_names(question, served.cameras)
        priority = Priority.DEFAULT if question.priority is None else PRIORITIES[question.priority]
        client = question.robot_id or question.episode_id or pending.client
        limit = pending.time_limit(question.deadline_ms, served.config.deadline_ms)
        ticket, job = self.runtime.decode_pool.submit(
            self.runtime.batcher, version.policy, question, pending.request_id, pending.received, SHARES[priority],
            client=client, priority=priority, time_limit=limit,
        )  # fmt: skip
        pending.ticket = ticket
        if pending.span is not None:
            pending.join_span()
        try:
            chunk: ActionChunk = await self.runtime.batcher.value(ticket)
        finally:
            if job is not None and job.done is not None:
                self.runtime.decode_pool.discard(job)
        pending.answer = self._answer(pending, served, ticket, chunk)
        return pending.answer

    async def infer_row(
        self, pending: PendingRequest, row: int, asked: Asked, received: float | None = None
    ) -> ActAnswer:
        """The answer to one request of a message; an error is raised as Reported.

        A long message does not block the loop: `ROWS` of its rows are read in each turn. All are admitted in the first
        turn, so that a shutdown refuses none of them.
        """
        try:
            with self.admit(pending):
                for _ in range(row // ROWS):
                    await asyncio.sleep(0)
                return await self.infer(pending, asked, received)
        except ReflexError as error:
            raise Reported(error, pending.request_id) from None

    async def infer_all(
        self, message: PendingRequest, questions: Sequence[Asked], received: float | None = None
    ) -> list[ActAnswer]:
        """The answers to the requests of one message. The first error cancels the others, and is raised as Reported; of
        several rows it names its own."""
        if len(questions) == 1:
            return [await self.infer_row(message, 0, questions[0], received)]
        rows = message.rows(len(questions))

        async def one(row: int) -> ActAnswer:
            try:
                return await self.infer_row(rows[row], row, questions[row], received)
            except Reported as reported:
                error = reported.error = copy(reported.error)
                error.message, error.details = f"row {row}: {error.message}", {**error.details, "row": row}
                raise

        return await together(one(row) for row in range(len(rows)))

    def _answer(self, pending: PendingRequest, served: ServedPolicy, ticket: Ticket, chunk: ActionChunk) -> ActAnswer:
        admission, started, version = ticket.admission, ticket.started, pending.version
        assert admission is not None
        assert started is not None
        assert version is not None
        now = pending.answered = time.monotonic()
        total = now - pending.received
        latency, doubts = served.config.inject_latency_ms, ticket.request.payload.doubts
        times = (total, 1e-3 / total if total > 0.0 else 0.0, started - ticket.arrived, now - started)
        # Milliseconds to three places, at a quarter of what `round` costs.
        spent, hz, queued, ran, age = [int(t * 1e6 + 0.5) / 1e3 for t in (*times, now - pending.started)]
        mode, model_hash, config_hash = version.origin
        return ActAnswer(
            actions=chunk.actions,
            num_actions=chunk.actions.shape[0],
            action_dim=chunk.actions.shape[1],
            latency_ms=spent,
            hz=hz,
            denoising_steps=chunk.denoising_steps,
            inference_mode=mode,
            model_hash=model_hash,
            config_hash=config_hash,
            reflex_version=__version__,
            request_id=pending.request_id,
            timing=Timing(queued, ran, spent, age),
            batch=_batch_of(admission),
            cache=chunk.cache,
            guard=chunk.guard,
            rtc=chunk.rtc,
            policy_changed=pending.routing is not None and pending.routing.changed,
            injected={"latency_ms": latency} if latency else None,
            warnings=self._warnings(pending, ticket.request.group, doubts) if doubts else [],
        )

    def _warnings(self, pending: PendingRequest, slot: str, doubts: Sequence[Doubt]) -> list[str]:
        for doubt in doubts:
            self.runtime.metrics.slots[slot].warnings[doubt.kind].inc()
            if doubt.message not in (warned := self.runtime.warned) and len(warned) < MAX_WARNED:
                warned.add(doubt.message)
                log.warning("request %s: %s (repeats are not logged)", pending.request_id, doubt.message)
        return [doubt.message for doubt in doubts]


def _batch_of(admission: AdmittedBatch) -> dict[str, Any]:
    return {
        "id": admission.id,
        "size": admission.size,
        "reason": admission.cause,
        "cost_ms": round(admission.cost * 1e3, 3),
    }


def _images(question: Question) -> dict[str, SentImage]:
    found = {name: _readable(image, name) for name, _, image in question.images}
    return {name: image for name, image in found.items() if image is not None}


def _readable(sent: Image, name: str) -> SentImage | None:
    """None for a malformed array, for which the request was refused."""
    if isinstance(sent, str | bytes):
        return sent
    try:
        return array_of(sent, name) if isinstance(sent, Array) else pixels_in(sent, name)
    except InvalidRequest:
        return None
