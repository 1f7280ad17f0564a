"""One request to the served policies, from its first byte to its answer."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Protocol

from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.spans import RequestSpan
from reflex_runtime.robots.serving.question import ActAnswer, Question
from reflex_runtime.robots.serving.served import ServedPolicy
from reflex_runtime.robots.versions.router import Routing
from reflex_runtime.robots.versions.slots import Version


class HasHeaders(Protocol):
    """What a request came on: a call, or the connection of several. headers: names in lower case."""

    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class PendingRequest:
    """One request; `RequestHandler` fills it in.

    wire: one of `WIRES`. client: whose fair share it takes where it names neither robot nor episode.
    started: when it reached this machine; received: when all of it had been read, answered: when its answer was made,
    0.0 before (`time.monotonic`). source: what has its headers; None on a wire without any. span: of its trace; None
    where the server makes none.
    question, served, routing, version, ticket, answer: None before they are known.
    """

    __slots__ = (
        "answer", "answered", "client", "question", "received", "request_id", "routing", "served", "source", "span",
        "started", "ticket", "version", "wire",
    )  # fmt: skip

    def __init__(
        self,
        wire: str,
        request_id: str,
        client: Hashable,
        started: float | None = None,
        source: HasHeaders | None = None,
    ) -> None:
        self.wire, self.request_id, self.client, self.source = wire, request_id, client, source
        self.started = time.monotonic() if started is None else started
        self.received = self.answered = 0.0
        self.span: RequestSpan | None = None
        self.question: Question | None = None
        self.served: ServedPolicy | None = None
        self.routing: Routing | None = None
        self.version: Version | None = None
        self.ticket: Ticket | None = None
        self.answer: ActAnswer | None = None

    def rows(self, size: int) -> list[PendingRequest]:
        """The requests of a message of several. Rows without a name are not one robot that asks again."""
        ids = [(f"{self.request_id}.{row}", (self.client, row)) for row in range(size)]
        return [PendingRequest(self.wire, *own, self.started, self.source) for own in ids]
