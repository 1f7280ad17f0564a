"""POST /act: questions and answers in JSON, msgpack and json-numpy, over HTTP."""

from __future__ import annotations

import asyncio
from functools import partial

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.policies.serving import fields
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.wire_names import ACT, JSON_NUMPY
from reflex_runtime.policies.wires import json_numpy
from reflex_runtime.policies.wires.json_numpy import GrootJson, JsonNumpy
from reflex_runtime.web.bodies import LARGE
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.exchange import Exchange, header_text
from reflex_runtime.web.form import JSON, MSGPACK, Headers


class Act:
    """What HTTP adds to `Asking`: heads, bodies and headers."""

    def __init__(self, asking: Asking) -> None:
        self.asking = asking

    def enter(self, exchange: Exchange) -> None:
        ask = self._begin(exchange)
        exchange.on_left = partial(self.asking.leave, ask)
        self.asking.enter(ask)

    def run(self, exchange: Exchange, body: bytes) -> None:
        home, ask = self.asking.runtime.home, exchange.ask
        if home is not None and ask is not None:
            ask.hand_on = partial(home.hand_on, exchange, body)
        if len(body) > LARGE:
            decoding = exchange.app.bodies.beside(_decode, body, exchange.sent_msgpack)
            decoding.add_done_callback(partial(self._decoded, exchange))
        else:
            self._ask(exchange, _decode(body, exchange.sent_msgpack))

    def reset(self, exchange: Exchange, _: bytes) -> None:
        """What clients of GR00T ask before an episode: nothing is kept of requests that do not name theirs."""
        exchange.answer(200, b"{}")

    def fail(self, exchange: Exchange, error: ReflexError) -> None:
        """The request cannot be read, or must not be."""
        self.asking.fail(exchange.ask or self._begin(exchange), error)

    def _begin(self, exchange: Exchange) -> Ask:
        settle = partial(_settle, exchange)
        ask = exchange.ask = Ask(ACT, exchange.request_id, exchange.client, settle, exchange.started, exchange)
        ask.moved = exchange.moved
        return ask

    def _ask(self, exchange: Exchange, asked: Question | JsonNumpy | GrootJson) -> None:
        ask: Ask = exchange.ask
        if not isinstance(asked, Question):
            ask.wire, ask.settle = JSON_NUMPY, partial(_settle, exchange, as_sent=asked)
            asked = asked.question(self.asking.of(asked.policy).reading(asked.block))
        self.asking.ask(ask, asked, exchange.received)

    def _decoded(self, exchange: Exchange, decoding: asyncio.Future[Question | JsonNumpy | GrootJson]) -> None:
        if exchange.done:
            return
        try:
            if decoding.cancelled():
                raise Closed("the server is shutting down", retry_after=1.0)
            self._ask(exchange, decoding.result())
        except Exception as error:
            self.asking.fail(exchange.ask, error)


def _decode(body: bytes, packed: bool) -> Question | JsonNumpy | GrootJson:
    """What is asked. A body that /act's own fields refuse may be json-numpy: the usual one is looked at once."""
    try:
        return fields.decode(body, packed)
    except InvalidRequest:
        found = json_numpy.decode(body) if not packed and json_numpy.is_json_numpy(body) else None
        if found is None:
            raise
        return found


def _settle(exchange: Exchange, result: ActAnswer | ReflexError, as_sent: JsonNumpy | GrootJson | None = None) -> None:
    ask: Ask = exchange.ask
    exchange.request_id = ask.request_id
    if isinstance(result, ReflexError):
        exchange.fail(result, _routed(ask))
    elif as_sent is not None:
        exchange.answer(200, as_sent.answer(result.actions), JSON, _routed(ask))
    elif exchange.wants_msgpack:
        exchange.answer(200, fields.encode_msgpack(result), MSGPACK, _routed(ask))
    else:
        exchange.answer(200, fields.encode_json(result), JSON, _routed(ask))
    exchange.ask = None  # the two hold each other


def _routed(ask: Ask) -> Headers | None:
    """What the headers say of the policy and the version that answers; None with one of each, or before they are
    known."""
    placement, version, served = ask.placement, ask.version, ask.served
    if placement is None or version is None or served is None:
        return None
    headers = [] if served.alone else [(b"x-reflex-policy", served.name.encode())]
    if placement.routing is None:
        return headers or None
    routing = placement.routing
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
