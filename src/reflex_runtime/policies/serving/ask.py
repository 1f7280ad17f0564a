"""One request to the served policies, from its first byte to its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Ticket
from reflex_runtime.policies.rollout.rollout import Placement
from reflex_runtime.policies.rollout.versions import Version
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.telemetry.spans import RequestSpan

Settle = Callable[[ActAnswer | ReflexError], None]


class HasHeaders(Protocol):
    """What a request came on: a call, or the connection of several. headers: names in lower case."""

    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class Ask:
    """One request; `Asking` moves it along.

    wire: one of `WIRES` (see `wire_names`). client: whose fair share it takes where it names neither robot nor episode.
    settle: called once, with the answer or the error to send. started: when it reached this machine; received: when
    all of it had been read, 0.0 before (`time.monotonic`). source: what has its headers; None on a wire without any.
    span: of its trace; None where the server makes none.
    question, served, placement, version: what is asked, and what answers it; each is None before it is known.
    hand_on: sends the request to the process that serves this caller, where it can be sent.
    entered: it counts as active. left: the caller has gone. ended: it is settled. moved: another server answered its
    episode before.
    """

    __slots__ = (
        "client",
        "ended",
        "entered",
        "hand_on",
        "left",
        "moved",
        "placement",
        "question",
        "received",
        "request_id",
        "served",
        "settle",
        "source",
        "span",
        "started",
        "ticket",
        "version",
        "wire",
    )

    def __init__(
        self,
        wire: str,
        request_id: str,
        client: Hashable,
        settle: Settle,
        started: float | None = None,
        source: HasHeaders | None = None,
    ) -> None:
        self.wire, self.request_id, self.client, self.settle = wire, request_id, client, settle
        self.started = time.monotonic() if started is None else started
        self.received, self.source = 0.0, source
        self.span: RequestSpan | None = None
        self.question: Question | None = None
        self.ticket: Ticket | None = None
        self.served: ServedPolicy | None = None
        self.placement: Placement | None = None
        self.version: Version | None = None
        self.hand_on: Callable[[str, str], bool] | None = None
        self.entered = self.left = self.ended = self.moved = False
