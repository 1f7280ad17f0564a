"""The way of a request through the served policies, the same on every wire.

A wire makes an `Ask` when a request begins to come, and calls

    enter   at once: whether the request may enter
    ask     with the `Question` it has read: version, place in the queue, pictures decoded, batch, answer
    take    the two at once, where all of the request comes at once
    fail    instead of `ask`, where the request cannot be read
    leave   when the caller has gone

and `Ask.settle` is called once, with the answer or the error. Admission, versions, deadlines, shadow, recording and
counting happen here for all of them. Nothing is a coroutine: a task costs more than all of the scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Closed, Expired, ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.core.request import AdmittedBatch, Request, Ticket
from reflex_runtime.options import did_you_mean
from reflex_runtime.placing import identity_of
from reflex_runtime.policies import ActionChunk, Observation, Policy
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.images import Pictures, check_names
from reflex_runtime.policies.serving.preparing import SHADOW_CLIENT, SHADOW_SHARE, SHARES, Job
from reflex_runtime.policies.serving.preparing import Done as Made
from reflex_runtime.policies.serving.question import ActAnswer, Question, Timing
from reflex_runtime.policies.serving.recorded import asked_and_answered
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.policies.serving.spans import begin_span, join_span
from reflex_runtime.policies.wires.observations import Reading, Readings
from reflex_runtime.telemetry.trace_context import within
from reflex_runtime.version import __version__
from reflex_runtime.web.errors import CallerLeft, TooManyRequests, known
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.json import printable

log = logging.getLogger("reflex.server")


class Asking:
    """Takes requests for one policy of a server, or for the one that each request names.

    config: of the server; `served` has its own. prefix: of the paths that ask this policy, "" where no path names one.
    """

    def __init__(self, runtime: PolicyRuntime, policy: str | None = None, prefix: str = "") -> None:
        """policy: the one that is asked, whatever a request says; None for the default where a request says nothing."""
        self.runtime, self.config, self.prefix = runtime, runtime.config, prefix
        self._fixed = policy is not None
        self._served = runtime.default if policy is None else runtime.policies[policy]
        self._named: dict[tuple[str, bool], Asking] = {}  # others, by policy and whether they are fixed to it
        self._readings: dict[str, Readings] = {}
        self._described: tuple[AdmittedBatch, dict[str, Any]] | None = None

    @property
    def served(self) -> ServedPolicy:
        """The policy that is asked; 422 where there are several, and none is named."""
        if self._served is None:
            names = ", ".join(self.runtime.policies)
            path = f"/policies/{next(iter(self.runtime.policies))}/act"
            raise invalid("policy", f"policy: missing, and several are served: {names}; name one, or ask {path}")
        return self._served

    @property
    def unnamed(self) -> bool:
        """Whether a request must name its policy."""
        return self._served is None

    def of(self, name: str | None) -> Asking:
        """What takes requests for the policy of this name; itself where there is none. 422 for a wrong one."""
        return self if name is None else self._at(name, self._fixed)

    def one(self, name: str | None) -> Asking:
        """The same for a robot that asks one policy from now on: what its requests name is checked against it."""
        return self._at(self.served.name if name is None else name, True)

    def _at(self, name: str, fixed: bool) -> Asking:
        if self._fixed:
            if name != self.served.name:
                wrong = f"policy: {name[:100]!r} is named, and {self.served.name!r} by the path or the connection"
                raise invalid("policy", printable(wrong))
            return self
        if name not in self.runtime.policies:
            names = ", ".join(self.runtime.policies)
            near = did_you_mean(name[:100], self.runtime.policies)
            wrong = f"policy: {name[:100]!r} is not served, only {names}{near}"
            raise invalid("policy", printable(wrong))
        found = self._named.get((name, fixed))
        if found is None:
            found = self._named[name, fixed] = Asking(self.runtime, name)
            found._fixed = fixed
        return found

    def reading(self, wire: str) -> Reading:
        """Reads the wire's observations for what the policy's slots have now."""
        return self.readings(wire).now

    def readings(self, wire: str) -> Readings:
        """The same for whatever they will have."""
        found = self._readings.get(wire)
        if found is None:
            found = self._readings[wire] = Readings(self.served, wire)
        return found

    def enter(self, ask: Ask) -> bool:
        """The request begins to come. Whether it may enter; otherwise it is settled."""
        ask.entered = True
        self.runtime.active += 1
        if self.runtime.spans is not None:
            begin_span(self.runtime.spans, ask)
        try:
            self._check_open()
        except ReflexError as error:
            self.fail(ask, error)
        return not ask.ended

    def ask(self, ask: Ask, question: Question, received: float | None = None) -> None:
        """The request has been read: place, prepare and queue it. received: when its last byte was read, else now."""
        if ask.ended:
            return
        ask.received = time.monotonic() if received is None else received
        ask.question = question
        if question.request_id:
            ask.request_id = question.request_id
        if ask.hand_on is not None and self._elsewhere(ask, question):
            return
        try:
            self.of(question.policy)._queue(ask, question)
        except Exception as error:
            self.fail(ask, error)

    def _elsewhere(self, ask: Ask, question: Question) -> bool:
        """Whether another replica serves this caller, and has the request now."""
        home, hand_on = self.runtime.home, ask.hand_on
        ask.hand_on = None  # it has the body
        if home is None or hand_on is None:
            return False
        robot, episode = question.robot_id, question.episode_id
        identity = identity_of(robot, episode)
        if not identity or home.serves(identity, episode or "") or not hand_on(identity, episode or ""):
            return False
        self._end(ask)
        return True

    def take(self, ask: Ask, read: Callable[[], Question], received: float | None = None) -> None:
        """Enter, read and ask at once, where all of the request has come. What `read` raises fails it."""
        if self.enter(ask):
            self.read(ask, read, received)

    def read(self, ask: Ask, read: Callable[[], Question], received: float | None = None) -> None:
        """Read and ask a request that has entered."""
        if ask.ended:
            return
        try:
            question = read()
        except Exception as error:
            self.fail(ask, error)
        else:
            self.ask(ask, question, received)

    def leave(self, ask: Ask) -> None:
        """The caller has gone: take the request back."""
        ask.left = True
        if ask.ticket is not None and ask.ticket.outcome is None:
            self.runtime.batcher.cancel(ask.ticket)

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

    def _failed(self, ask: Ask, failure: Exception) -> None:
        error = known(failure, ask.request_id)
        self._publish(ask, error.outcome, error.http_status, time.monotonic(), error=error)
        if ask.placement is not None and ask.served is not None:
            ask.served.rollout.untold(ask.placement)
        ask.settle(error)
        self._end(ask)

    def _check_open(self) -> None:
        limit, others = self.config.max_concurrent, self.runtime.active - 1
        if limit and others >= limit:
            raise TooManyRequests(
                f"{others} requests are being answered, at most {limit} may be",
                retry_after=1.0,
                concurrent_requests=others,
                max_concurrent=limit,
            )
        self.runtime.need_policy()
        if self.runtime.state == "draining":
            raise Closed("the server is shutting down", retry_after=1.0)

    def _end(self, ask: Ask) -> None:
        ask.ended = True
        if ask.version is not None:
            ask.version.users -= 1
            ask.version = None
        if ask.entered:
            ask.entered = False
            self.runtime.active -= 1

    # -- queueing ------------------------------------------------------------------------------------------------------

    def _queue(self, ask: Ask, question: Question) -> None:
        """Submit it: ready to run, or with its pictures to be decoded once it is admitted."""
        ask.served = self.served
        placement = ask.placement = self.served.place(question.episode_id, ask.request_id)
        version = ask.version = self.served.slots[placement.slot].version
        version.users += 1
        policy, priority = version.policy, question.priority
        if question.images:
            check_names(question, self.served.cameras)
        if ask.left:
            raise CallerLeft("the caller left")
        client, limit = question.robot_id or question.episode_id or ask.client, self._time_limit(ask, question)
        settled = partial(self._settled, ask)
        if not question.images:
            observation = _observe(policy, ask.request_id, question, ask.received)
            request = policy.request(observation, client=client, priority=priority, time_limit=limit)
            ask.ticket = self.runtime.batcher.submit(request, settled)
            if ask.span is not None:
                join_span(self.runtime.spans, ask)
            return
        done = partial(self._prepared, ask)
        job = _job(policy, ask.request_id, question, ask.received, client, SHARES[priority], done)
        request = policy.reservation(
            job, ask.request_id, question.episode_id or "", client=client, priority=priority, time_limit=limit
        )
        ask.ticket = self.runtime.batcher.submit(request, settled, ready=False)
        self.runtime.preparing.add(job)
        if ask.span is not None:
            join_span(self.runtime.spans, ask)

    def _time_limit(self, ask: Ask, question: Question) -> float | None:
        limit = question.deadline_ms if question.deadline_ms is not None else self.served.config.deadline_ms
        if not limit:
            return None
        left = limit / 1e3 - (time.monotonic() - ask.started)
        if left <= 0.0:
            raise Expired("its deadline passed while it was read")
        return left

    def _prepared(self, ask: Ask, observation: Observation | None, error: Exception | None) -> None:
        ticket, version = ask.ticket, ask.version
        if ticket is None or version is None:  # it is settled
            return
        made: Request | ReflexError
        if observation is not None:
            admitted = ticket.request
            made = version.policy.request(observation, client=admitted.client, priority=admitted.priority)
            self.runtime.metrics.prepared(admitted.group, time.monotonic() - ticket.arrived)
        else:
            assert error is not None
            made = known(error, ask.request_id)
        self.runtime.batcher.prepared(ticket, made)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _settled(self, ask: Ask, ticket: Ticket) -> None:
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            if isinstance(ticket.request.payload, Job):  # its pictures need not be decoded
                self.runtime.preparing.discard(ticket.request.payload)
            self.fail(ask, outcome.error)
            _forget_frames(outcome.error)
            return
        now = time.monotonic()
        try:
            answer = self._answer(ask, ticket, outcome.value, now)
            ask.settle(answer)
        except Exception as error:
            self.fail(ask, error)
            return
        self._publish(ask, "ok", 200, now, answer, outcome.value)
        self._end(ask)
        self._ask_shadow(ask, ticket, outcome.value)

    def _answer(self, ask: Ask, ticket: Ticket, chunk: ActionChunk, now: float) -> ActAnswer:
        assert ticket.admission is not None
        assert ticket.started is not None
        if self._described is None or self._described[0] is not ticket.admission:  # the same for all of one batch
            self._described = (ticket.admission, _batch_of(ticket.admission))
        total, started = now - ask.received, ticket.started
        spent, latency = _ms(total), self.served.config.inject_latency_ms
        assert ask.version is not None
        mode, model_hash, config_hash = ask.version.told
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
            warnings=self._warnings(ticket),
        )

    def _warnings(self, ticket: Ticket) -> list[str]:
        doubts = ticket.request.payload.doubts
        for doubt in doubts:
            self.runtime.metrics.warned(ticket.request.group, doubt.kind)
        return [doubt.message for doubt in doubts]

    def _ask_shadow(self, ask: Ask, ticket: Ticket, chunk: ActionChunk) -> None:
        shadow = self.served.shadow
        if shadow is None or ask.question is None or not shadow.takes(ask.request_id):
            return
        request_id, question, received = ask.request_id, ask.question, ask.received

        def job(policy: Policy, done: Made) -> Job:
            return _job(policy, request_id, question, received, SHADOW_CLIENT, SHADOW_SHARE, done)

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
        served = ask.served or self._served or runtime.first  # an error that names no policy counts somewhere
        slot = served.group(served.served[0] if placement is None else placement.slot)
        detail = None
        if ask.question is not None and runtime.journals:
            try:
                detail = asked_and_answered(ask, slot, now, answer, chunk, error, served.config.deadline_ms)
            except Exception:  # the caller gets the answer all the same
                log.exception("request %s could not be recorded", ask.request_id)
        latency, served_in = now - ask.started, now - ask.received
        event = RequestAnswered(
            now, slot, outcome, status, latency, ask.ticket, detail, served_in, ask.wire, error, ask.span
        )
        runtime.audience.publish(event)


def _job(
    policy: Policy, request_id: str, question: Question, received: float, client: Any, share: float, done: Made
) -> Job:
    pictures = Pictures(question, policy)
    return Job(client, share, pictures.look, partial(_observe, policy, request_id, question, received, pictures), done)


def _observe(
    policy: Policy, request_id: str, question: Question, received: float, pictures: Pictures | None = None
) -> Observation:
    return policy.prepare(
        images=None if pictures is None else pictures.sent,
        instruction=question.instruction,
        state=question.state_vector(),
        episode_id=question.episode_id or "",
        request_id=request_id,
        seed=question.seed,
        executed=question.executed,
        received=received,
    )


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
