"""POST /act, from its body to its answer, without a coroutine: three calls on the loop for every request.

`enter` when the head is there, `run` when the body is, and the batcher's when the ticket has settled. A task and the
futures it waits for cost more than all of the scheduling. No call raises, every exchange is answered once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Closed, Expired, ReflexError
from reflex_runtime.core.events import RequestAnswered
from reflex_runtime.core.request import Admission, Priority, Request, Ticket
from reflex_runtime.policies import ActionChunk, Observation, Policy
from reflex_runtime.server.bodies import LARGE
from reflex_runtime.server.errors import CallerLeft, TooManyRequests
from reflex_runtime.server.exchange import JSON, LEFT, MSGPACK, Door, Exchange, Headers, header_text, too_large
from reflex_runtime.server.images import Pictures, check_names, has_images
from reflex_runtime.server.preparing import SHADOW_CLIENT, SHADOW_SHARE, SHARES, Job
from reflex_runtime.server.preparing import Done as Made
from reflex_runtime.server.recorded import asked_and_answered
from reflex_runtime.server.runtime import PolicyRuntime
from reflex_runtime.server.wire import act as wire
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.server")

T = TypeVar("T")

_PRIORITIES = {"urgent": Priority.URGENT, "default": Priority.DEFAULT, "background": Priority.BACKGROUND}


class Act:
    """Answers observations with chunks of actions."""

    def __init__(self, runtime: PolicyRuntime, door: Door) -> None:
        self.runtime, self.config, self.door = runtime, runtime.config, door
        self._told: tuple[Admission, dict[str, Any]] | None = None

    def enter(self, exchange: Exchange) -> bool:
        """Let it in, and True: it goes on with its body. Raises what stands against it."""
        door = self.door
        door.enter(exchange)
        if door.closing:
            raise Closed("the server is shutting down", retry_after=1.0)
        limit = self.config.max_concurrent
        if limit and door.active > limit:
            raise TooManyRequests(
                f"{door.active - 1} requests are being answered, at most {limit} may be",
                retry_after=1.0,
                concurrent_requests=door.active - 1,
                max_concurrent=limit,
            )
        self.runtime.need_policy()
        too_large(exchange.headers, self.config.max_body_bytes)
        return True

    def run(self, exchange: Exchange, body: bytes) -> None:
        """The body is there: decode, check, prepare and queue it. A caller that hangs up from now on takes it back."""
        exchange.received = time.monotonic()
        exchange.scope[LEFT] = partial(self.caller_left, exchange)
        try:
            if len(body) > LARGE:
                decoding = self.door.bodies.beside(wire.decode, body, exchange.sent_msgpack)
                decoding.add_done_callback(partial(self._decoded, exchange))
            else:
                self._asked(exchange, wire.decode(body, exchange.sent_msgpack))
        except Exception as error:
            self.fail(exchange, error)

    def _decoded(self, exchange: Exchange, decoding: asyncio.Future[wire.ActFields]) -> None:
        try:
            self._asked(exchange, _result(decoding))
        except Exception as error:
            self.fail(exchange, error)

    def _asked(self, exchange: Exchange, fields: wire.ActFields) -> None:
        """What is asked is known. Raises what stands against it."""
        exchange.fields = fields
        if fields.request_id:
            exchange.request_id = fields.request_id
        placement = exchange.placement = self.runtime.place(fields.episode_id, exchange.request_id)
        version = exchange.version = self.runtime.slots[placement.slot].version
        version.users += 1
        if has_images(fields):
            check_names(fields, self.runtime.cameras)
            self._reserve(exchange, fields, version.policy)
        else:
            self._submit(exchange, fields, self._observe(version.policy, exchange.request_id, fields))

    def caller_left(self, exchange: Exchange) -> None:
        """The caller hung up or closed its sending side."""
        exchange.left = True
        if exchange.ticket is not None and exchange.ticket.outcome is None:
            self.runtime.batcher.cancel(exchange.ticket)

    def fail(self, exchange: Exchange, error: Exception) -> None:
        """Answer with an error; what is none of ours goes into the log, and not into the answer."""
        if not isinstance(error, ReflexError):
            log.error("request %s failed", exchange.request_id, exc_info=error)
            error = ReflexError("internal error; the server's log has the details")
        self._count(exchange, error.outcome, error.http_status, time.monotonic(), error=error)
        if exchange.placement is not None:
            self.runtime.rollout.untold(exchange.placement)
        exchange.scope.pop(LEFT, None)
        exchange.fail(error, _routed(exchange))
        self._leave(exchange)

    def _leave(self, exchange: Exchange) -> None:
        if exchange.version is not None:
            exchange.version.users -= 1
            exchange.version = None
        self.door.leave(exchange)

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

    def _submit(self, exchange: Exchange, fields: wire.ActFields, observation: Observation) -> None:
        assert exchange.version is not None
        request = exchange.version.policy.request(observation, **self._terms(exchange, fields))
        exchange.ticket = self.runtime.batcher.submit(request, partial(self._settled, exchange))

    def _terms(self, exchange: Exchange, fields: wire.ActFields) -> dict[str, Any]:
        if exchange.left:
            raise CallerLeft("the caller left")
        return {
            # Whose share it takes: the robot's, else the episode's, else the connection's.
            "client": fields.robot_id or fields.episode_id or exchange.scope.get("client"),
            "priority": _PRIORITIES[fields.priority],
            "time_limit": self._time_limit(exchange, fields),
        }

    # -- with pictures: admitted first, then decoded, then ready to run ------------------------------------------------

    def _reserve(self, exchange: Exchange, fields: wire.ActFields, policy: Policy) -> None:
        terms = self._terms(exchange, fields)
        done = partial(self._prepared, exchange)
        job = self._job(policy, exchange.request_id, fields, terms["client"], SHARES[terms["priority"]], done)
        request = policy.reservation(job, exchange.request_id, fields.episode_id or "", **terms)
        exchange.ticket = self.runtime.batcher.submit(request, partial(self._settled, exchange), ready=False)
        self.runtime.preparing.add(job)

    def _job(
        self, policy: Policy, request_id: str, fields: wire.ActFields, client: Any, share: float, done: Made
    ) -> Job:
        pictures = Pictures(fields, policy)
        make = partial(self._observe, policy, request_id, fields, pictures)
        return Job(client, share, pictures.look, make, done)

    def _prepared(self, exchange: Exchange, observation: Observation | None, error: Exception | None) -> None:
        ticket, version = exchange.ticket, exchange.version
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
            log.error("request %s failed", exchange.request_id, exc_info=error)
            made = ReflexError("internal error; the server's log has the details")
        self.runtime.batcher.prepared(ticket, made)

    def _time_limit(self, exchange: Exchange, fields: wire.ActFields) -> float | None:
        limit = fields.deadline_ms if fields.deadline_ms is not None else self.config.deadline_ms
        if not limit:
            return None
        left = limit / 1e3 - (time.monotonic() - exchange.started)
        if left <= 0.0:
            raise Expired("its deadline passed while it was read")
        return left

    def _settled(self, exchange: Exchange, ticket: Ticket) -> None:
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            if isinstance(ticket.request.payload, Job):  # its pictures need not be decoded
                self.runtime.preparing.discard(ticket.request.payload)
            self.fail(exchange, outcome.error)
            _forget_frames(outcome.error)
            return
        now = time.monotonic()
        try:
            answer = self._answer(exchange, ticket, outcome.value, now)
            packed = exchange.wants_msgpack
            body = wire.encode_msgpack(answer) if packed else wire.encode_json(answer)
        except Exception as error:
            self.fail(exchange, error)
            return
        self._count(exchange, "ok", 200, now, answer, outcome.value)
        exchange.scope.pop(LEFT, None)
        exchange.answer(200, body, MSGPACK if packed else JSON, _routed(exchange))
        self._leave(exchange)
        shadow = self.runtime.shadow
        if shadow is not None and exchange.fields is not None and shadow.takes(exchange.request_id):
            request_id, fields = exchange.request_id, exchange.fields

            def job(policy: Policy, done: Made) -> Job:
                return self._job(policy, request_id, fields, SHADOW_CLIENT, SHADOW_SHARE, done)

            shadow.ask(request_id, ticket.request.group, outcome.value.actions, job)

    def _answer(self, exchange: Exchange, ticket: Ticket, chunk: ActionChunk, now: float) -> wire.ActAnswer:
        assert ticket.admission is not None
        assert ticket.started is not None
        if self._told is None or self._told[0] is not ticket.admission:  # those of one batch are told the same of it
            self._told = (ticket.admission, _described(ticket.admission))
        total, started = now - exchange.received, ticket.started
        spent, latency = _ms(total), self.config.inject_latency_ms
        assert exchange.version is not None
        mode, model_hash, config_hash = exchange.version.told
        changed = exchange.placement is not None and exchange.placement.changed
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
            request_id=exchange.request_id,
            timing=wire.Timing(_ms(started - ticket.arrived), _ms(now - started), spent, _ms(now - exchange.started)),
            batch=self._told[1],
            cache=chunk.cache,
            guard=chunk.guard.as_dict() if chunk.guard is not None else None,
            rtc=chunk.rtc,
            policy_changed=changed,
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
        exchange: Exchange,
        outcome: str,
        status: int,
        now: float,
        answer: wire.ActAnswer | None = None,
        chunk: ActionChunk | None = None,
        error: ReflexError | None = None,
    ) -> None:
        runtime, placement = self.runtime, exchange.placement
        slot = runtime.served[0] if placement is None else placement.slot
        detail = None
        if runtime.recorder is not None and exchange.fields is not None:
            try:
                detail = asked_and_answered(exchange, slot, now, answer, chunk, error, self.config.deadline_ms)
            except Exception:  # the caller gets the answer whatever becomes of the recording
                log.exception("request %s could not be recorded", exchange.request_id)
        event = RequestAnswered(now, slot, outcome, status, now - exchange.started, exchange.ticket, detail)
        runtime.answered(event, now - exchange.received)


def _routed(exchange: Exchange) -> Headers | None:
    """What the headers say of the version that answers; None with one policy, or before it is known."""
    placement, version = exchange.placement, exchange.version
    if placement is None or placement.routing is None or version is None:
        return None
    routing = placement.routing
    headers = [
        (b"x-reflex-policy-slot", placement.slot.encode()),
        (b"x-reflex-model-version", header_text(version.name)),
        (b"x-reflex-routing-key", header_text(routing.key)),
    ]
    if routing.degraded:
        headers.append((b"x-reflex-routing-degraded", b"true"))
    if placement.verdict != "ok":
        headers.append((b"x-reflex-verdict", placement.verdict.encode()))
    return headers


def _forget_frames(error: BaseException | None) -> None:
    """An error that was told needs no traceback: its frames hold the batch, the batch this ticket, the ticket the
    error, and with a fifth of the requests bad the collector took a twentieth of the server's time."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _result(future: asyncio.Future[T]) -> T:
    """What was computed beside the loop, unless the server closed before."""
    if future.cancelled():
        raise Closed("the server is shutting down", retry_after=1.0)
    return future.result()


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
