"""One request to the served policies, from its first byte to its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Final

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Ticket
from reflex_runtime.policies.rollout.rollout import Placement
from reflex_runtime.policies.rollout.versions import Version
from reflex_runtime.policies.serving.question import ActAnswer, Question

ACT: Final = "act"
OPENPI: Final = "openpi"
JSON_NUMPY: Final = "json-numpy"
OIP: Final = "oip"
VLA_EVAL: Final = "vla-eval"
XPOLICYLAB: Final = "xpolicylab"
GROOT: Final = "gr00t"
LEROBOT: Final = "lerobot"
WIRES: Final = (ACT, OPENPI, JSON_NUMPY, OIP, VLA_EVAL, GROOT, LEROBOT, XPOLICYLAB)
"""The protocols that requests come on, as metrics and recordings name them."""

Settle = Callable[[ActAnswer | ReflexError], None]


class Ask:
    """One request; `Asking` moves it along.

    wire: one of `WIRES`. client: whose fair share it takes where it names neither robot nor episode.
    settle: called once, with the answer or the error to send. started: when it reached this machine; received: when
    all of it had been read, 0.0 before (`time.monotonic`).
    question, placement, version: what is asked, and what answers it; each is None before it is known.
    entered: it counts as active. left: the caller has gone. ended: it is settled.
    """

    __slots__ = (
        "client",
        "ended",
        "entered",
        "left",
        "placement",
        "question",
        "received",
        "request_id",
        "settle",
        "started",
        "ticket",
        "version",
        "wire",
    )

    def __init__(
        self, wire: str, request_id: str, client: Hashable, settle: Settle, started: float | None = None
    ) -> None:
        self.wire, self.request_id, self.client, self.settle = wire, request_id, client, settle
        self.started = time.monotonic() if started is None else started
        self.received = 0.0
        self.question: Question | None = None
        self.ticket: Ticket | None = None
        self.placement: Placement | None = None
        self.version: Version | None = None
        self.entered = self.left = self.ended = False
