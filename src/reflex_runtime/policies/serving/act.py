"""POST /act: the bodies and headers of `Asking` over HTTP."""

from __future__ import annotations

import asyncio
from functools import partial

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.policies.serving import fields as wire
from reflex_runtime.policies.serving.asking import Ask, Asking
from reflex_runtime.web.bodies import LARGE, Bodies
from reflex_runtime.web.exchange import JSON, MSGPACK, Exchange, Headers, header_text


class Act:
    """Answers observations with chunks of actions. `bodies` is set before the first request."""

    bodies: Bodies

    def __init__(self, asking: Asking) -> None:
        self.asking = asking

    def enter(self, exchange: Exchange) -> None:
        """Its head has come. Raises what stands against it."""
        self.asking.enter(self._begun(exchange))

    def run(self, exchange: Exchange, body: bytes) -> None:
        """Its body has come. A caller that hangs up from now on takes the request back."""
        ask: Ask = exchange.ask
        ask.received = exchange.received
        exchange.on_left = partial(self.asking.leave, ask)
        if len(body) > LARGE:
            decoding = self.bodies.beside(wire.decode, body, exchange.sent_msgpack)
            decoding.add_done_callback(partial(self._decoded, exchange))
        else:
            self.asking.ask(ask, wire.decode(body, exchange.sent_msgpack))

    def failed(self, exchange: Exchange, error: ReflexError) -> Headers | None:
        """Count an error that is about to be sent. Returns further headers."""
        ask: Ask = exchange.ask or self._begun(exchange)
        exchange.request_id = ask.request_id
        self.asking.failed(ask, error)
        headers = _routed(ask)
        self.asking.end(ask)
        exchange.ask = None  # breaks the circle of the two
        return headers

    def _begun(self, exchange: Exchange) -> Ask:
        ask = exchange.ask = Ask(
            exchange.started,
            exchange.request_id,
            exchange.client,
            partial(self._answer, exchange),
            partial(exchange.app.fail, exchange),
        )
        return ask

    def _decoded(self, exchange: Exchange, decoding: asyncio.Future[wire.ActFields]) -> None:
        try:
            if decoding.cancelled():
                raise Closed("the server is shutting down", retry_after=1.0)
            self.asking.ask(exchange.ask, decoding.result())
        except Exception as error:
            exchange.app.fail(exchange, error)

    @staticmethod
    def _answer(exchange: Exchange, answer: wire.ActAnswer) -> None:
        packed = exchange.wants_msgpack
        body = wire.encode_msgpack(answer) if packed else wire.encode_json(answer)
        exchange.request_id = answer.request_id
        exchange.answer(200, body, MSGPACK if packed else JSON, _routed(exchange.ask))
        exchange.ask = None


def _routed(ask: Ask) -> Headers | None:
    """What the headers say of the version that answers; None with one policy, or before it is known."""
    placement, version = ask.placement, ask.version
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
