"""Runs a shadow policy on a sample of the served requests, after they were answered, and measures how far its actions
are from the served ones.

Both policies get the same request with the same noise. Only the ids decide which requests are sampled, so a replay
samples the same ones.

A shadow does not disturb callers. Its requests are prepared after those of callers and run only in idle time. Without
any, they are dropped, and counted as `rejected` answers of the slot `shadow`. A shadow that hangs or ends the device
thread delays the requests behind it by a second or two: it is given up early, and stopped. If it was only late, it runs
again after a rest (`Device.REST`); otherwise after an operator resets it or loads another.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, Done, Event, RequestAnswered, SchedulerPaused
from reflex_runtime.core.errors import Dropped, ReflexError, Rejected
from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.robots.serving.decode_pool import DecodePool, Job
from reflex_runtime.robots.serving.question import Question
from reflex_runtime.robots.versions.slots import Slot, Version
from reflex_runtime.web.batch_server import BatchServer
from reflex_runtime.web.errors import known

log = logging.getLogger("reflex.shadow")

TOLD: Final = 60.0  # seconds between two log lines about a failing shadow
CLIENT: Final = ""  # "" is no client: it has no row on the dashboard
SHARE: Final = 0.01  # weight of its decoding; of a caller 1


def sampled(request_id: str, share: float) -> bool:
    """Whether a request is in the sample, by SHA-256 of its id. share: of all requests, in [0, 1]."""
    digest = hashlib.sha256(b"shadow:" + request_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def difference(served: NDArray[np.float32], shadow: NDArray[np.float32]) -> dict[str, Any] | None:
    """How far one shadow chunk is from the served one, over the steps and joints that both have; None where they have
    none in common, or one is not finite. mean, largest: of the absolute differences, in the robot's units. per_joint,
    per_step: means."""
    steps, joints = min(len(served), len(shadow)), min(served.shape[1], shadow.shape[1])
    apart = np.abs(served[:steps, :joints].astype(np.float64) - shadow[:steps, :joints])
    if not apart.size or not np.isfinite(apart).all():
        return None
    per_joint, per_step = apart.mean(axis=0).tolist(), apart.mean(axis=1).tolist()
    return {"mean": float(apart.mean()), "largest": float(apart.max()), "per_joint": per_joint, "per_step": per_step}


class ShadowDivergence:
    """Sums up how far the shadow's answers are from the served ones. unpaired: requests without two that compare."""

    def __init__(self) -> None:
        self.compared = self.unpaired = 0
        self._largest = 0.0
        self._means = {"per_joint": (0, np.zeros(0)), "per_step": (0, np.zeros(0))}  # rows, and their mean

    def add(self, found: Mapping[str, Any] | None) -> None:
        """Add a difference; None if an answer failed, or if the two cannot be compared."""
        if found is None:
            self.unpaired += 1
            return
        self.compared += 1
        self._largest = max(self._largest, found["largest"])
        for name, (rows, mean) in self._means.items():
            row = np.asarray(found[name])
            if len(mean) != len(row):  # another policy in the slot may have other joints or steps
                rows, mean = 0, np.zeros(len(row))
            self._means[name] = rows + 1, mean + (row - mean) / (rows + 1)

    def snapshot(self) -> dict[str, Any]:
        """Means over all pairs, JSON-safe."""
        return {
            "compared": self.compared,
            "unpaired": self.unpaired,
            "largest": self._largest,
            "mean": float(self._means["per_joint"][1].mean()) if self.compared else None,
            **{name: mean.tolist() for name, (_, mean) in self._means.items()},
        }


class Shadowing:
    """The shadow of a server, and the sink that measures what it costs served requests.

    share: of served requests that are sampled. on_difference: called with every compared pair. on_change: called with
    the reason when it stops or rests.
    """

    events = frozenset({BatchFinished, BatchScheduled, SchedulerPaused})

    def __init__(
        self,
        slot: Slot,
        server: BatchServer,
        decode_pool: DecodePool,
        metrics: Metrics,
        share: float,
        on_difference: Callable[[str, str, Mapping[str, Any]], None],
        on_change: Callable[[str], None],
    ) -> None:
        self._slot, self._server, self._decode_pool, self._metrics = slot, server, decode_pool, metrics
        self._share = share
        self._on_difference, self._on_change = on_difference, on_change
        self.divergence = ShadowDivergence()
        self.dropped = self.failed = 0
        self._error = "its thread was lost"  # of the last request that failed
        self._paused_until = self._told = -inf
        self._waiting: set[Ticket] = set()
        self._closed = False
        self._ran: tuple[float, float] = (0.0, 0.0)  # the shadow batch before: from, to

    def ask(
        self, request_id: str, slot: str, actions: NDArray[np.float32], question: Question, received: float
    ) -> None:
        """Run the shadow, if the request is sampled, on a question that `slot` answered with `actions`."""
        if not sampled(request_id, self._share):
            return
        if self._closed or self.stopped:
            self.dropped += 1
            self._answered("rejected", None)
            return
        version = self._slot.version
        settled = partial(self._settled, slot, actions, version)
        try:
            ticket, _ = self._decode_pool.submit(
                self._server.batcher, version.policy, question, request_id, received, SHARE, settled, client=CLIENT
            )
        except Exception as error:  # no room, shutting down, or the request lacks an input of the shadow
            self._unanswered(known(error, request_id), None)
        else:
            self._waiting.add(ticket)
            version.users += 1

    def resume(self) -> None:
        """Start again, after a reset by an operator or a load."""
        self._paused_until = -inf  # its event comes later
        self._server.batcher.device.resume(self._slot.group)

    def close(self) -> None:
        """Cancel the shadow's requests and accept no more, because the server ends."""
        self._closed = True
        self._cancel()

    def _cancel(self) -> None:
        for ticket in list(self._waiting):
            self._server.batcher.cancel(ticket)

    def _settled(self, slot: str, actions: NDArray[np.float32], version: Version, ticket: Ticket) -> None:
        self._waiting.discard(ticket)
        version.users -= 1
        if isinstance(job := ticket.request.payload, Job):
            self._decode_pool.discard(job)
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            assert outcome is not None
            self._unanswered(outcome.error, ticket)
            return
        self._answered("ok", ticket)
        found = difference(actions, outcome.value.actions)
        self.divergence.add(found)
        if found is not None:
            self._metrics.slots[self._slot.group].divergence.observe(found["mean"])
            self._on_difference(ticket.id, slot, found)

    def _unanswered(self, error: ReflexError, ticket: Ticket | None) -> None:
        refused = isinstance(error, Rejected)
        dropped = refused or isinstance(error, Dropped)
        self.dropped += dropped
        self.failed += not dropped
        self._answered("rejected" if refused else error.outcome, ticket)
        if ticket is not None and not refused:
            self.divergence.add(None)
        if not dropped:
            self._error = str(error)
        now = time.monotonic()
        if (refused or not dropped) and now - self._told >= TOLD:
            self._told = now
            log.warning("the shadow did not answer: %s", error)

    def __call__(self, event: Event) -> None:
        """Measure how long served requests waited for a shadow step that ran when they came, and notice a pause."""
        if isinstance(event, BatchFinished):
            if event.batch.group == self._slot.group:
                self._ran = (event.batch.scheduled_at, event.at)
        elif isinstance(event, SchedulerPaused):
            if event.group == self._slot.group:
                self._paused(event.until, event.until - event.at)
        elif isinstance(event, BatchScheduled) and event.batch.group not in self._server.batcher.device.expendable:
            begun, ended = self._ran
            for ticket in event.batch.admitted:
                if begun < ticket.arrived < ended:
                    self._metrics.slots[self._slot.group].delay.observe(ended - ticket.arrived)

    def _paused(self, until: float, seconds: float) -> None:
        """The shadow was stopped or rests, because it hung or ended its thread; or an operator has ended the pause."""
        self._paused_until = until
        if seconds == inf:
            log.error("the shadow took the device thread with it and is stopped: %s", self._error)
            self._on_change(f"stopped: {self._error}")
            self._cancel()
        elif seconds > 0.0:
            log.warning("the shadow was late and rests for %.0f s", seconds)
            self._on_change(f"was late and rests for {seconds:.0f} s")

    @property
    def stopped(self) -> str:
        """Why it rests or is stopped; "" while it runs."""
        return self._error if time.monotonic() < self._paused_until else ""

    @property
    def verdict(self) -> str:
        return "stopped" if self.stopped else "ok"

    def snapshot(self) -> Mapping[str, Any]:
        """How far apart the actions are, and the number of requests, JSON-safe."""
        policy = self._slot.policy
        return {
            "model": self._slot.version.name,
            "export_dir": policy.spec.source,
            "sample": self._share,
            "verdict": self.verdict,
            "why": self.stopped or None,
            "dropped": self.dropped,
            "failed": self.failed,
            "waiting": len(self._waiting),
            **self.divergence.snapshot(),
        }

    def _answered(self, outcome: str, ticket: Ticket | None) -> None:
        now, status = time.monotonic(), 200 if outcome == "ok" else 500
        latency = 0.0 if ticket is None else now - ticket.arrived
        self._server.audience.publish(RequestAnswered(now, self._slot.group, outcome, status, latency, ticket))
