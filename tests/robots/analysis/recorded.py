"""Recorded runs: real policies behind a real `Batcher` on real time, written into a real journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.journal_writer import JournalWriter, Recording, RequestRecord, warmed
from reflex_runtime.robots import ActionChunk, Policy, served_by
from reflex_runtime.robots.policy.observation import seed_of
from reflex_runtime.run.batcher import Batcher

PATIENCE = 60.0  # seconds until a test that waits is broken


class Served:
    """Policies on one device, and a recorder that is handed what a server would hand over."""

    def __init__(
        self,
        directory: Path,
        policies: Sequence[Policy],
        budget: float = 0.1,
        images: Any = "full",
        gzip: bool = True,
        flush: FlushPolicy | None = None,
        processors: Mapping[str, Any] | None = None,
        capacity: int = 1000,
        hardware: Mapping[str, Any] | None = None,
        trace: Path | None = None,
        max_bytes: int = 0,
    ) -> None:
        self.policies = {policy.slot: policy for policy in policies}
        flush = flush or FlushPolicy.window(budget)
        self.groups = [GroupConfig(p.slot, flush, capacity, cost=p.cost_model) for p in policies]
        first = policies[0]
        header = {
            "model_hash": first.spec.model_hash,
            "export_dir": first.spec.source,
            "hardware": hardware,
            "policies": [
                {"slot": p.slot, "model_id": p.spec.model_id, "model_hash": p.spec.model_hash} for p in policies
            ],
        }
        to = Recording(directory, gzip, images, max_bytes) if trace is None else trace
        self.recorder = JournalWriter(to, self.groups, header=header)
        served = processors or {p.slot: served_by(p) for p in policies}
        self.batcher = Batcher(served, self.groups, [self.recorder])

    async def __aenter__(self) -> Served:
        await self.batcher.start(self._warm)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.batcher.close()
        assert self.recorder.close(PATIENCE), self.recorder.error

    def _warm(self) -> None:
        for slot, policy in self.policies.items():
            done = policy.warm_up((1, 2, 4))
            done.teach(self.batcher.scheduler.cost_model(slot))
            learned = warmed(slot, done.batches, done.finished)
            assert learned is not None
            self.recorder.warmed(learned)

    @property
    def path(self) -> Path:
        assert self.recorder.path is not None
        return self.recorder.path

    async def ask(
        self,
        slot: str = "prod",
        deadline: float | None = None,
        executed: int | None = None,
        give_up: bool = False,
        **sent: Any,
    ) -> ActionChunk | ReflexError:
        """One request, answered and recorded as a server does it. give_up: its caller hangs up at once."""
        policy, arrived = self.policies[slot], time.monotonic()
        ticket: Ticket | None = None
        chunk, error = None, None
        try:
            observation = policy.prepare(**sent, executed=executed)
            request = policy.request(observation, client=sent.get("episode_id") or "", time_limit=deadline)
            ticket = self.batcher.submit(request)
            if give_up:
                self.batcher.cancel(ticket)
            chunk = await ticket.waiter
        except ReflexError as failed:
            error = failed
        now = time.monotonic()
        answered = RequestRecord(
            request_id=sent["request_id"],
            episode_id=sent.get("episode_id"),
            instruction=sent.get("instruction"),
            state=sent.get("state"),
            seed=seed_of(sent["request_id"]) if sent.get("seed") is None else sent["seed"],
            images=sent.get("images") or {},
            deadline_ms=None if deadline is None else deadline * 1e3,
            executed=executed,
            inference_mode=policy.spec.inference_mode,
        )
        if slot != "prod":
            answered.routing = {"slot": slot, "routing_key": "", "degraded": False, "cached": False}
        if ticket is not None:
            answered.past = ticket.request.payload.past
        if chunk is not None:
            answered.actions, answered.denoising_steps = chunk.actions, chunk.denoising_steps
            answered.cache = chunk.cache
            answered.rtc = None if chunk.rtc is None else dict(chunk.rtc)
            answered.guard = chunk.guard
        outcome = "ok" if error is None else error.outcome
        status = 200 if error is None else error.http_status
        took = now - arrived
        self.recorder(RequestAnswered(now, slot, outcome, status, took, ticket, answered, took, error=error))
        return chunk if error is None else error  # type: ignore[return-value]


def serve(served: Served, *callers: Callable[[Served], Awaitable[Any]]) -> Path:
    """Run callers side by side against a server; the recording's path."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), served:
            await asyncio.gather(*(caller(served) for caller in callers))

    asyncio.run(main())
    return served.path
