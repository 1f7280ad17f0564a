"""A request to the served policies, from its fields to its answer, on whatever wire it came.

Three calls on the event loop and no coroutine: `enter` when a request begins to come, `ask` when its fields are known,
and the batcher's when its ticket has settled. A task and the futures it waits for cost more than all of the scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Expired, ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.core.request import PRIORITIES, Admission, Request, Ticket
from reflex_runtime.policies import ActionChunk, Observation, Policy
from reflex_runtime.policies.rollout.rollout import Placement
from reflex_runtime.policies.rollout.versions import Version
from reflex_runtime.policies.serving import fields as wire
from reflex_runtime.policies.serving.images import Pictures, check_names, has_images
from reflex_runtime.policies.serving.preparing import SHADOW_CLIENT, SHADOW_SHARE, SHARES, Job
from reflex_runtime.policies.serving.preparing import Done as Made
from reflex_runtime.policies.serving.recorded import asked_and_answered
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import CallerLeft, TooManyRequests

log = logging.getLogger("reflex.server")



class Ask:
    """One request.

    peer: whose fair share it takes where it names neither robot nor episode. started: when it reached this machine;
    received: when all of it had been read, 0.0 before (`time.monotonic`). on_answer: called once with the answer of a
    request that succeeded. on_error: called once for any other, unless its end was told by the caller of `fail`.
    fields: what was asked. placement, version: what answers it. Each is None before it is known.
    """

    __slots__ = (
        "active",
        "fields",
        "left",
        "on_answer",
        "on_error",
        "peer",
        "placement",
        "received",
        "request_id",
        "started",
        "ticket",
        "version",
    )

    def __init__(
        self,
        started: float,
        request_id: str,
        peer: Hashable,
        on_answer: Callable[[wire.ActAnswer], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.started, self.request_id, self.peer = started, request_id, peer
        self.on_answer, self.on_error = on_answer, on_error
        self.received = 0.0
        self.fields: wire.ActFields | None = None
        self.ticket: Ticket | None = None
        self.placement: Placement | None = None
        self.version: Version | None = None
        self.active = self.left = False


class Asking:
    """Takes requests for one server's policies. active: requests that have entered and have no answer yet."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self.runtime, self.config = runtime, runtime.config
        self.active = 0
        self._told: tuple[Admission, dict[str, Any]] | None = None

    def enter(self, ask: Ask) -> None:
        """It begins to come. Raises what stands against it."""
        ask.active = True
        self.active += 1
        limit = self.config.max_concurrent
        if limit and self.active > limit:
            raise TooManyRequests(
                f"{self.active - 1} requests are being answered, at most {limit} may be",
                retry_after=1.0,
                concurrent_requests=self.active - 1,
                max_concurrent=limit,
            )
        self.runtime.need_policy()

    def ask(self, ask: Ask, fields: wire.ActFields) -> None:
        """What is asked is known: place, prepare and queue it. Raises what stands against it."""
        ask.fields = fields
        if fields.request_id:
            ask.request_id = fields.request_id
        placement = ask.placement = self.runtime.place(fields.episode_id, ask.request_id)
        version = ask.version = self.runtime.slots[placement.slot].version
        version.users += 1
        if has_images(fields):
            check_names(fields, self.runtime.cameras)
            self._reserve(ask, fields, version.policy)
        else:
            self._submit(ask, fields, self._observe(version.policy, ask.request_id, fields))

    def leave(self, ask: Ask) -> None:
        """Its caller has gone: take it back."""
        ask.left = True
        if ask.ticket is not None and ask.ticket.outcome is None:
            self.runtime.batcher.cancel(ask.ticket)

    def failed(self, ask: Ask, error: ReflexError) -> None:
        """It is answered with an error: count it."""
        self._count(ask, error.outcome, error.http_status, time.monotonic(), error=error)
        if ask.placement is not None:
            self.runtime.rollout.untold(ask.placement)

    def end(self, ask: Ask) -> None:
        """It has its answer."""
        if ask.version is not None:
            ask.version.users -= 1
            ask.version = None
        if ask.active:
            ask.active = False
            self.active -= 1

    def _observe(
        self, policy: Policy, request_id: str, fields: wire.ActFields, pictures: Pictures | None = None
    ) -> Observation:
        return policy.prepare(
            images=None if pictures is None else pictures.sent,
            instruction=fields.instruction,
            state=wire.state_of(fields),
            episode_id=fields.episode_id or "",
            request_id=request_id,
            seed=fields.seed,
            executed=fields.executed,
        )

    def _submit(self, ask: Ask, fields: wire.ActFields, observation: Observation) -> None:
        assert ask.version is not None
        request = ask.version.policy.request(observation, **self._terms(ask, fields))
        ask.ticket = self.runtime.batcher.submit(request, partial(self._settled, ask))

    def _terms(self, ask: Ask, fields: wire.ActFields) -> dict[str, Any]:
        if ask.left:
            raise CallerLeft("the caller left")
        return {
            "client": fields.robot_id or fields.episode_id or ask.peer,
            "priority": PRIORITIES[fields.priority],
            "time_limit": self._time_limit(ask, fields),
        }

    def _time_limit(self, ask: Ask, fields: wire.ActFields) -> float | None:
        limit = fields.deadline_ms if fields.deadline_ms is not None else self.config.deadline_ms
        if not limit:
            return None
        left = limit / 1e3 - (time.monotonic() - ask.started)
        if left <= 0.0:
            raise Expired("its deadline passed while it was read")
        return left

    # -- with pictures: admitted first, then decoded, then ready to run ------------------------------------------------

    def _reserve(self, ask: Ask, fields: wire.ActFields, policy: Policy) -> None:
        terms = self._terms(ask, fields)
        done = partial(self._prepared, ask)
        job = self._job(policy, ask.request_id, fields, terms["client"], SHARES[terms["priority"]], done)
        request = policy.reservation(job, ask.request_id, fields.episode_id or "", **terms)
        ask.ticket = self.runtime.batcher.submit(request, partial(self._settled, ask), ready=False)
        self.runtime.preparing.add(job)

    def _job(
        self, policy: Policy, request_id: str, fields: wire.ActFields, client: Any, share: float, done: Made
    ) -> Job:
        pictures = Pictures(fields, policy)
        make = partial(self._observe, policy, request_id, fields, pictures)
        return Job(client, share, pictures.look, make, done)

    def _prepared(self, ask: Ask, observation: Observation | None, error: Exception | None) -> None:
        ticket, version = ask.ticket, ask.version
        if ticket is None or version is None:  # it has its answer
            return
        made: Request | ReflexError
        if observation is not None:
            admitted = ticket.request
            made = version.policy.request(observation, client=admitted.client, priority=admitted.priority)
            self.runtime.metrics.prepared(admitted.group, time.monotonic() - ticket.arrived)
        elif isinstance(error, ReflexError):
            made = error
        else:
            log.error("request %s failed", ask.request_id, exc_info=error)
            made = ReflexError("internal error; the server's log has the details")
        self.runtime.batcher.prepared(ticket, made)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _settled(self, ask: Ask, ticket: Ticket) -> None:
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            if isinstance(ticket.request.payload, Job):  # its pictures need not be decoded
                self.runtime.preparing.discard(ticket.request.payload)
            ask.on_error(outcome.error)
            _forget_frames(outcome.error)
            return
        now = time.monotonic()
        try:
            answer = self._answer(ask, ticket, outcome.value, now)
            ask.on_answer(answer)
        except Exception as error:
            ask.on_error(error)
            return
        self._count(ask, "ok", 200, now, answer, outcome.value)
        self.end(ask)
        self._ask_shadow(ask, ticket, outcome.value)

    def _ask_shadow(self, ask: Ask, ticket: Ticket, chunk: ActionChunk) -> None:
        shadow = self.runtime.shadow
        if shadow is None or ask.fields is None or not shadow.takes(ask.request_id):
            return
        request_id, fields = ask.request_id, ask.fields

        def job(policy: Policy, done: Made) -> Job:
            return self._job(policy, request_id, fields, SHADOW_CLIENT, SHADOW_SHARE, done)

        shadow.ask(request_id, ticket.request.group, chunk.actions, job)

    def _answer(self, ask: Ask, ticket: Ticket, chunk: ActionChunk, now: float) -> wire.ActAnswer:
        assert ticket.admission is not None
        assert ticket.started is not None
        if self._told is None or self._told[0] is not ticket.admission:  # those of one batch are told the same of it
            self._told = (ticket.admission, _described(ticket.admission))
        total, started = now - ask.received, ticket.started
        spent, latency = _ms(total), self.config.inject_latency_ms
        assert ask.version is not None
        mode, model_hash, config_hash = ask.version.told
        return wire.ActAnswer(
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
            timing=wire.Timing(_ms(started - ticket.arrived), _ms(now - started), spent, _ms(now - ask.started)),
            batch=self._told[1],
            cache=chunk.cache,
            guard=chunk.guard.as_dict() if chunk.guard is not None else None,
            rtc=chunk.rtc,
            policy_changed=ask.placement is not None and ask.placement.changed,
            injected={"latency_ms": latency} if latency else None,
            warnings=self._warnings(ticket),
        )

    def _warnings(self, ticket: Ticket) -> list[str]:
        doubts = ticket.request.payload.doubts
        for doubt in doubts:
            self.runtime.metrics.warned(ticket.request.group, doubt.kind)
        return [doubt.message for doubt in doubts]

    def _count(
        self,
        ask: Ask,
        outcome: str,
        status: int,
        now: float,
        answer: wire.ActAnswer | None = None,
        chunk: ActionChunk | None = None,
        error: ReflexError | None = None,
    ) -> None:
        runtime, placement = self.runtime, ask.placement
        slot = runtime.served[0] if placement is None else placement.slot
        detail = None
        if runtime.recorder is not None and ask.fields is not None:
            try:
                detail = asked_and_answered(ask, slot, now, answer, chunk, error, self.config.deadline_ms)
            except Exception:  # the caller gets the answer whatever becomes of the recording
                log.exception("request %s could not be recorded", ask.request_id)
        event = RequestAnswered(now, slot, outcome, status, now - ask.started, ask.ticket, detail, now - ask.received)
        runtime.audience.publish(event)


def _forget_frames(error: BaseException | None) -> None:
    """An error that was told needs no traceback: its frames hold the batch, the batch this ticket, the ticket the
    error, and with a fifth of the requests bad the collector took a twentieth of the server's time."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _described(admission: Admission) -> dict[str, Any]:
    return {
        "id": admission.id,
        "size": admission.size,
        "reason": admission.reason,
        "cost_ms": round(admission.cost * 1e3, 3),
    }


def _ms(seconds: float) -> float:
    """Milliseconds to three places, at a quarter of what `round` costs."""
    return int(seconds * 1e6 + 0.5) / 1e3
