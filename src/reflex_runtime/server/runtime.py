"""What the server serves: a policy in a slot, its batcher, metrics and state; everything but HTTP.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded`; `draining`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.adapt import Affine, Planner
from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.core.events import BatchFinished, Event, RequestAnswered
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.policies import ActionGuard, Export, Policy, load_policy, parse_fault, served_by
from reflex_runtime.processors.onnx import CPU, CUDA
from reflex_runtime.server.errors import Degraded, NotReady
from reflex_runtime.server.slo import Objective, SloTracker
from reflex_runtime.telemetry.metrics import Metrics
from reflex_runtime.telemetry.trace import TraceWriter

log = logging.getLogger("reflex.server")

SLOT = "prod"
WARM_SIZES = (1, 2, 4)
PROVIDERS = {"cpu": CPU, "cuda": CUDA}


class Budget(Planner):
    """The planner, and what `--slo-mode degrade` takes off its budget."""

    def __init__(self, slo: SloTracker | None) -> None:
        super().__init__()
        self._slo = slo

    def policy(self, base: FlushPolicy, affine: Affine, now: float) -> FlushPolicy:
        planned = super().policy(base, affine, now)
        factor = 1.0 if self._slo is None else self._slo.factor
        return planned if factor >= 1.0 else replace(planned, max_batch_cost=planned.max_batch_cost * factor)


@dataclass(slots=True)
class Crashes:
    """Crashed batches in a row. One request in a while is let through to find out whether the policy works again.

    A crash is a batch no item of which succeeded; a clean answer resets the count.
    """

    limit: int
    count: int = 0
    cooldown: float = 30.0
    retry_at: float = 0.0

    @property
    def open(self) -> bool:
        """Whether the limit is reached."""
        return self.limit > 0 and self.count >= self.limit

    def finished(self, event: BatchFinished) -> None:
        """Fold in one batch."""
        if not event.crashed:
            self.count, self.cooldown = 0, 30.0
            return
        self.count += 1
        if self.open:
            self.retry_at = event.at + self.cooldown
            self.cooldown = min(480.0, 2.0 * self.cooldown)

    def admits(self, now: float) -> bool:
        """Whether a request may enter now; taking the probe's place if it does so while open."""
        if not self.open:
            return True
        if now < self.retry_at:
            return False
        self.retry_at = now + self.cooldown
        return True


class Runtime:
    """One served policy. `start` returns when the slot is ready or has failed; `admit` says whether it may be asked."""

    def __init__(self, config: ServeConfig, export: Export, on_fatal: Callable[[], None] | None = None) -> None:
        self.config = config
        self.export = export
        self.state = "initializing"
        self.error = ""
        self.metrics = Metrics()
        self.crashes = Crashes(config.max_consecutive_crashes)
        self.slo = SloTracker(Objective.parse(config.slo), config.slo_mode) if config.slo else None
        self.trace: TraceWriter | None = None
        self.workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-worker")
        self.embodiment = export.embodiment.name or "unknown"
        self._on_fatal = on_fatal
        self.metrics.add_slot(SLOT, self.embodiment, self._queued, self._in_flight)
        self._policy: Policy | None = None
        self._batcher: Batcher | None = None

    @property
    def policy(self) -> Policy:
        """The loaded policy."""
        assert self._policy is not None
        return self._policy

    @property
    def batcher(self) -> Batcher:
        """The driver of its device."""
        assert self._batcher is not None
        return self._batcher

    @property
    def loaded(self) -> bool:
        """Whether the policy is there and its device runs."""
        return self.state in ("ready", "draining")

    @property
    def health(self) -> str:
        """The state as /health tells it."""
        return "degraded" if self.state == "ready" and self.crashes.open else self.state

    async def start(self) -> None:
        """Load, warm up, serve. What goes wrong ends in `warmup_failed` with the error kept."""
        loop = asyncio.get_running_loop()
        try:
            self.state = "loading"
            self._policy = await loop.run_in_executor(self.workers, self._load)
            self.state = "warming"
            self._batcher = self._build(self._policy)
            await loop.run_in_executor(self.workers, self._warm)
        except Exception as error:
            self.state, self.error = "warmup_failed", f"{type(error).__name__}: {error}"
            log.exception("the policy could not be started")
            return
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not look at it again
        await self._batcher.start()
        self.state = "ready"

    async def stop(self, timeout: float) -> bool:
        """Drain within `timeout` seconds, answer the rest. Returns whether the device thread ended."""
        ended = True
        if self._batcher is not None and self.state != "warmup_failed":
            ended = await self._batcher.close(drain=True, timeout=timeout)
        if self.trace is not None:
            self.trace.close()
        self.workers.shutdown(wait=False, cancel_futures=True)
        return ended

    def admit(self) -> None:
        """Raise when no request may be asked of the policy now."""
        if self.state == "draining":
            raise Closed("the server is shutting down", retry_after=1.0)
        if self.state != "ready":
            raise NotReady(f"the server is {self.state}", retry_after=1.0, state=self.state)
        if not self.crashes.admits(time.monotonic()):
            raise Degraded(
                f"{self.crashes.count} batches crashed in a row", retry_after=60.0, consecutive_crashes=self.crashes.count
            )

    def answered(self, outcome: str, status: int, latency: float, ticket: Ticket | None) -> None:
        """The server answered a request; goes into the event stream."""
        event = RequestAnswered(time.monotonic(), SLOT, outcome, status, latency, ticket)
        self.metrics(event)
        if self.slo is not None and status == 200:
            self.slo.served(latency, event.at)

    # -- pieces ----------------------------------------------------------------------------------------------------------

    def _load(self) -> Policy:
        config = self.config
        return load_policy(
            self.export,
            slot=SLOT,
            provider=PROVIDERS.get(config.provider, config.provider),
            threads=config.threads,
            cache_bytes=int(config.prefix_cache_mb * 2**20),
            max_age_chunks=config.prefix_max_age_chunks,
        )

    def _build(self, policy: Policy) -> Batcher:
        config = self.config
        group = GroupConfig(
            name=SLOT,
            flush=FlushPolicy.window(
                config.max_batch_cost_ms / 1e3, config.batch_timeout_ms / 1e3, config.max_batch_size
            ),
            capacity=config.max_queue,
            max_in_flight_per_client=config.max_in_flight_per_client,
            latest_only=config.latest_only,
            cost=lambda: policy.cost_model(affine=config.cost_model == "affine"),
            controller=Budget(self.slo if config.slo_mode == "degrade" else None),
        )
        guard = ActionGuard(policy.export.embodiment, SLOT, "hold" if config.on_bad_action == "hold" else "error")
        faults = [parse_fault(text) for text in config.inject_fault]
        processor = served_by(policy, guard, faults, config.inject_latency_ms / 1e3)
        batcher = Batcher(
            {SLOT: processor}, [group], [self.metrics, self._sink], config.watchdog_s, on_fatal=self._on_fatal
        )
        if config.trace:
            self.trace = TraceWriter(config.trace, [group])
            batcher.sinks.append(self.trace)
        return batcher

    def _queued(self) -> float:
        return self._batcher.scheduler.queued(SLOT) if self._batcher is not None else 0.0

    def _in_flight(self) -> float:
        return self._batcher.scheduler.unsettled(SLOT) if self._batcher is not None else 0.0

    def _warm(self) -> None:
        self.policy.warm_up(WARM_SIZES).teach(self.batcher.scheduler.cost_model(SLOT))

    def _sink(self, event: Event) -> None:
        if isinstance(event, BatchFinished):
            self.crashes.finished(event)


def describe_error(error: ReflexError, request_id: str) -> dict[str, Any]:
    """The body of a non-2xx answer."""
    body: dict[str, Any] = {"error": error.code, "message": error.message, "request_id": request_id}
    return body | {"retry_safe": error.retry_safe} | dict(error.details)
