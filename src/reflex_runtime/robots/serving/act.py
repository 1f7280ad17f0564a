"""POST /act: requests and answers in JSON, msgpack and json-numpy, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.serving import fields
from reflex_runtime.robots.serving.handler import Asked, RequestHandler
from reflex_runtime.robots.serving.pending import PendingRequest
from reflex_runtime.robots.serving.question import ACT, JSON_NUMPY, Question
from reflex_runtime.robots.wires import json_numpy
from reflex_runtime.robots.wires.json_numpy import GrootJson, JsonNumpy
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import JSON, MSGPACK, CallerLeft, Headers, InvalidRequest, NotReady, Reported
from reflex_runtime.web.request import HttpRequest, HttpResponse, header_text


class Act:
    """What HTTP adds to `RequestHandler`: bodies and headers."""

    def __init__(self, handler: RequestHandler) -> None:
        self.handler = handler

    async def run(self, request: HttpRequest) -> HttpResponse:
        pending = _pending(request)
        try:
            with self.handler.admit(pending):
                asked = await _read(request)
                questions = [asked] if isinstance(asked, Question) else self._questions(pending, asked)
                if len(questions) == 1:
                    answers = [await self.handler.infer(pending, questions[0], request.received)]
            if len(questions) > 1:  # robots whose observations came as one: each is a request, and the message is none
                answers = await self.handler.infer_all(pending, questions, request.received)
        except CallerLeft:
            raise
        except Reported as reported:
            request.request_id = reported.request_id
            return request.app.refuse(request, reported.error)
        except ReflexError as error:
            if isinstance(error, NotReady) and not request.received:  # robots that wait for a load tell answers by id
                with suppress(ReflexError):
                    asked = await _read(request)
                    pending.request_id = (isinstance(asked, Question) and asked.request_id) or pending.request_id
            request.request_id = pending.request_id
            return request.app.refuse(request, error, _routed(pending))
        request.request_id = pending.request_id
        if not isinstance(asked, Question):
            return HttpResponse(200, asked.answer([answer.actions for answer in answers]), JSON, _routed(pending))
        if request.wants_msgpack:
            return HttpResponse(200, fields.encode_msgpack(answers[0]), MSGPACK, _routed(pending))
        return HttpResponse(200, fields.encode_json(answers[0]), JSON, _routed(pending))

    def _questions(self, pending: PendingRequest, sent: JsonNumpy | GrootJson) -> Sequence[Asked]:
        pending.wire = JSON_NUMPY
        return sent.questions(self.handler.of(sent.policy).reading(sent.block))

    async def reset(self, request: HttpRequest) -> HttpResponse:
        """What clients of GR00T ask before an episode: nothing is kept of requests that do not name theirs."""
        self.handler.runtime.need_policy()
        await request.body()
        return HttpResponse(200, b"{}")

    def refused(self, request: HttpRequest, error: ReflexError) -> None:
        """Count a request that may not be asked."""
        self.handler.refused(_pending(request), error)


def _pending(request: HttpRequest) -> PendingRequest:
    return PendingRequest(ACT, request.request_id, request.client, request.started, request)


async def _read(request: HttpRequest) -> Question | JsonNumpy | GrootJson:
    """What is asked; the body itself is not kept."""
    body = await request.body()
    request.refuse_query()
    if len(body) > LARGE:
        request.preparing = True
        asked = await request.app.bodies.beside(_decode, body, request.sent_msgpack)
        request.preparing = False  # it is queued in this turn
        return asked
    return _decode(body, request.sent_msgpack)


def _decode(body: bytes, packed: bool) -> Question | JsonNumpy | GrootJson:
    """What is asked. A body that /act's own fields refuse may be json-numpy: the usual one is looked at once."""
    try:
        return fields.decode(body, packed)
    except InvalidRequest:
        found = json_numpy.decode(body) if not packed and json_numpy.is_json_numpy(body) else None
        if found is None:
            raise
        return found


def _routed(pending: PendingRequest) -> Headers:
    """What the headers say of the policy and the version that answers; nothing with one of each, or before they are
    known."""
    placement, served = pending.placement, pending.served
    if placement is None or served is None:
        return []
    headers = [] if served.alone else [(b"x-reflex-policy", served.name.encode())]
    if placement.routing is None:
        return headers
    routing = placement.routing
    version = pending.version or served.slots[placement.slot].version
    headers += [
        (b"x-reflex-policy-slot", placement.slot.encode()),
        (b"x-reflex-model-version", header_text(version.name)),
        (b"x-reflex-routing-key", header_text(routing.key)),
    ]
    if routing.degraded:
        headers.append((b"x-reflex-routing-degraded", b"true"))
    if placement.verdict != "ok":
        headers.append((b"x-reflex-verdict", placement.verdict.encode()))
    return headers
