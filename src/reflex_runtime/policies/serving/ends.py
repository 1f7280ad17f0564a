"""The ends of requests: each has an answer or an error once, is counted, recorded, and copied to the shadow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.core.request import AdmittedBatch, Ticket
from reflex_runtime.policies import ActionChunk, Policy
from reflex_runtime.policies.policy.observation import Doubt
from reflex_runtime.policies.rollout.shadowing import Shadowing
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.images import job_of
from reflex_runtime.policies.serving.preparing import SHADOW_CLIENT, SHADOW_SHARE, Job
from reflex_runtime.policies.serving.preparing import Done as Made
from reflex_runtime.policies.serving.question import ActAnswer, Timing
from reflex_runtime.policies.serving.recorded import asked_and_answered
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.policies.serving.spans import begin_span
from reflex_runtime.telemetry.trace_context import within
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import known

log = logging.getLogger("reflex.server")

T = TypeVar("T")


class Ends:
    """Ends the requests that an `Asking` has taken. served: counts the errors that name no policy."""

    def __init__(self, runtime: PolicyRuntime, served: ServedPolicy) -> None:
        self.runtime, self._served = runtime, served
        self._described: tuple[AdmittedBatch, dict[str, Any]] | None = None
        self._over: list[tuple[Ask, Ticket]] = []  # settled, and not answered yet

    def fail(self, ask: Ask, failure: Exception) -> None:
        """Settle the request with an error, unless it is settled."""
        if ask.ended:
            return
        spans = self.runtime.spans
        if spans is None:
            self._failed(ask, failure)
            return
        with within(begin_span(spans, ask).context):
            self._failed(ask, failure)

    def leave(self, ask: Ask) -> None:
        """The caller has gone: take the request back."""
        ask.left = True
        if ask.ticket is not None and ask.ticket.outcome is None:
            self.runtime.batcher.cancel(ask.ticket)

    def _failed(self, ask: Ask, failure: Exception) -> None:
        error = known(failure, ask.request_id)
        self._publish(ask, error.outcome, error.http_status, time.monotonic(), error=error)
        if ask.placement is not None and ask.served is not None:
            ask.served.rollout.untold(ask.placement)
        ask.settle(error)
        self.end(ask)

    def end(self, ask: Ask) -> None:
        """It has its end, and takes no more place."""
        ask.ended = True
        if ask.version is not None:
            ask.version.users -= 1
            ask.version = None
        if ask.entered:
            ask.entered = False
            self.runtime.active -= 1

    def attempt(self, step: Callable[..., T], ask: Ask, *arguments: Any) -> T | None:
        """A step of one request; None if that fails the request."""
        try:
            return step(ask, *arguments)
        except Exception as error:
            self._fail_alone(ask, error)
            return None

    def _fail_alone(self, ask: Ask, error: Exception) -> None:
        """Settle one of several with an error. One that cannot be told it ends nevertheless, and touches no other."""
        try:
            self.fail(ask, error)
        except Exception:
            log.exception("request %s: its error could not be delivered", ask.request_id)
            self.end(ask)
        self.leave(ask)  # it may be queued

    def settled(self, ask: Ask, ticket: Ticket) -> None:
        """Its ticket has settled: answer it with all others that settle now."""
        if not self._over:
            self.runtime.audience.then(self._answer)
        self._over.append((ask, ticket))

    def _answer(self) -> None:
        """Answer those whose requests have settled."""
        over, self._over = self._over, []
        now = time.monotonic()
        made = [(*one, answer) for one in over if (answer := self.attempt(self._made, *one, now)) is not None]
        for ask, _, answer in made:
            try:
                ask.settle(answer)
            except Exception as error:
                self._fail_alone(ask, error)
        for ask, ticket, answer in made:
            try:
                self._answered(ask, ticket, answer, now)
            except Exception:
                log.exception("request %s: its answer was sent, and could not be counted", ask.request_id)

    def _answered(self, ask: Ask, ticket: Ticket, answer: ActAnswer, now: float) -> None:
        if ask.ended:  # it could not be written
            return
        try:
            self._publish(ask, "ok", 200, now, answer, ticket.outcome.value)
        finally:
            self.end(ask)
        if ask.served is not None and ask.served.shadow is not None:
            self._ask_shadow(ask.served.shadow, ask, ticket, ticket.outcome.value)

    def _made(self, ask: Ask, ticket: Ticket, now: float) -> ActAnswer | None:
        """The answer; None if the request has none and was told so."""
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            if isinstance(ticket.request.payload, Job):  # its pictures need not be decoded
                self.runtime.preparing.discard(ticket.request.payload)
            self.fail(ask, outcome.error)
            _forget_frames(outcome.error)
            return None
        chunk: ActionChunk = outcome.value
        admission, started, version, served = ticket.admission, ticket.started, ask.version, ask.served
        assert admission is not None
        assert started is not None
        assert version is not None
        assert served is not None
        if self._described is None or self._described[0] is not admission:  # the same for all of one batch
            self._described = (admission, _batch_of(admission))
        total = now - ask.received
        spent, latency, doubts = _ms(total), served.config.inject_latency_ms, ticket.request.payload.doubts
        mode, model_hash, config_hash = version.told
        return ActAnswer(
            actions=chunk.actions,
            num_actions=chunk.actions.shape[0],
            action_dim=chunk.actions.shape[1],
            latency_ms=spent,
            hz=_ms(1e-3 / total) if total > 0 else 0.0,
            denoising_steps=chunk.denoising_steps,
            inference_mode=mode,
            model_hash=model_hash,
            config_hash=config_hash,
            reflex_version=__version__,
            request_id=ask.request_id,
            timing=Timing(_ms(started - ticket.arrived), _ms(now - started), spent, _ms(now - ask.started)),
            batch=self._described[1],
            cache=chunk.cache,
            guard=chunk.guard.as_dict() if chunk.guard is not None else None,
            rtc=chunk.rtc,
            policy_changed=ask.moved or (ask.placement is not None and ask.placement.changed),
            injected={"latency_ms": latency} if latency else None,
            warnings=self._warnings(ticket.request.group, doubts) if doubts else [],
        )

    def _warnings(self, slot: str, doubts: Sequence[Doubt]) -> list[str]:
        for doubt in doubts:
            self.runtime.metrics.warned(slot, doubt.kind)
        return [doubt.message for doubt in doubts]

    def _ask_shadow(self, shadow: Shadowing, ask: Ask, ticket: Ticket, chunk: ActionChunk) -> None:
        if ask.question is None or not shadow.takes(ask.request_id):
            return
        request_id, question, received = ask.request_id, ask.question, ask.received

        def job(policy: Policy, done: Made) -> Job:
            return job_of(policy, request_id, question, received, SHADOW_CLIENT, SHADOW_SHARE, done)

        shadow.ask(request_id, ticket.request.group, chunk.actions, job)

    def _publish(
        self,
        ask: Ask,
        outcome: str,
        status: int,
        now: float,
        answer: ActAnswer | None = None,
        chunk: ActionChunk | None = None,
        error: ReflexError | None = None,
    ) -> None:
        runtime, placement = self.runtime, ask.placement
        served = ask.served or self._served  # an error that names no policy counts somewhere
        slot = served.group(served.served[0] if placement is None else placement.slot)
        detail = None
        if runtime.journals and ask.question is not None:
            try:
                detail = asked_and_answered(ask, slot, now, answer, chunk, error, served.config.deadline_ms)
            except Exception:  # the caller gets the answer all the same
                log.exception("request %s could not be recorded", ask.request_id)
        times = now - ask.started, now - ask.received
        fields = now, slot, outcome, status, times[0], ask.ticket, detail, times[1], ask.wire, error, ask.span
        runtime.audience.publish(tuple.__new__(RequestAnswered, fields))  # its own constructor takes twice the time


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that was sent: their frames hold the batch, the batch this ticket, the ticket the
    error. With a fifth of the requests bad the collector took a twentieth of the server's time."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _batch_of(admission: AdmittedBatch) -> dict[str, Any]:
    return {
        "id": admission.id,
        "size": admission.size,
        "reason": admission.reason,
        "cost_ms": round(admission.cost * 1e3, 3),
    }


def _ms(seconds: float) -> float:
    """Milliseconds to three places, at a quarter of what `round` costs."""
    return int(seconds * 1e6 + 0.5) / 1e3
