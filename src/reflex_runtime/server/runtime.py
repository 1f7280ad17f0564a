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
from contextlib import suppress
from dataclasses import replace
from math import inf
from threading import Thread
from typing import TypeVar

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.adapt import Affine, Planner
from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.core.events import BatchFinished, Event, RequestAnswered, RequestSettled
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.policies import ActionGuard, Export, Policy, load_policy, parse_fault, served_by
from reflex_runtime.processors.onnx import CPU, CUDA
from reflex_runtime.server.errors import Degraded, NotReady, SloViolated
from reflex_runtime.server.failures import FailureLog
from reflex_runtime.server.slo import Objective, SloTracker
from reflex_runtime.telemetry.metrics import Metrics
from reflex_runtime.telemetry.trace import TraceWriter

log = logging.getLogger("reflex.server")

T = TypeVar("T")

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


class Crashes:
    """Crashed batches in a row. From `limit` of them on, one request per cool-down is let in to see if it works again.

    A crash is a batch no member of which succeeded; an answer resets the count. cooldown: seconds until the first such
    request; doubled each time that one crashes as well, up to 16 times as long.
    """

    def __init__(self, limit: int, cooldown: float = 30.0) -> None:
        self.limit, self.cooldown = limit, cooldown
        self.count = 0
        self._wait = cooldown
        self._retry_at = inf
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether the limit is reached."""
        return self.limit > 0 and self.count >= self.limit

    def crashed(self, now: float) -> None:
        """A batch crashed."""
        self.count += 1
        if self.count == self.limit:
            self._wait, self._retry_at = self.cooldown, now + self.cooldown
        elif self._probing:  # others were queued before the limit was reached, and prove nothing new
            self._wait = min(2.0 * self._wait, 16.0 * self.cooldown)
            self._retry_at = now + self._wait
        self._probing = False

    def answered(self) -> None:
        """A request was answered."""
        self.count, self._probing = 0, False

    def admits(self, now: float) -> bool:
        """Whether a request may enter now. While open it is the probe; if nothing comes of it, another follows."""
        if not self.open:
            return True
        if now < self._retry_at:
            return False
        self._probing, self._retry_at = True, now + self._wait
        return True


class Runtime:
    """One served policy. `start` returns when the slot is ready or has failed; `admit` says whether it may be asked."""

    def __init__(self, config: ServeConfig, export: Export, on_fatal: Callable[[], None] | None = None) -> None:
        self.config = config
        self.export = export
        self.state = "initializing"
        self.error = ""
        self.unusable = False  # the export itself is wrong: there is nothing to wait for
        self.metrics = Metrics()
        self.crashes = Crashes(config.max_consecutive_crashes, config.probe_cooldown_s)
        self.slo = SloTracker(Objective.parse(config.slo), config.slo_mode) if config.slo else None
        self.trace: TraceWriter | None = None
        self.failures = FailureLog()
        self.workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-worker")
        self.embodiment = export.embodiment.name or "unknown"
        self._on_fatal = on_fatal
        self.metrics.add_slot(SLOT, self.embodiment, self._queued, self._in_flight)
        self._policy: Policy | None = None
        self._batcher: Batcher | None = None
        self._started = False
        self._clean = True

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
        return self._started

    @property
    def health(self) -> str:
        """The state as /health tells it."""
        return "degraded" if self.state == "ready" and self.crashes.open else self.state

    async def start(self) -> None:
        """Load, warm up, serve. What goes wrong ends in `warmup_failed` with the error kept.

        Cancelling it leaves the thread that loads behind: nothing can stop a model file being read.
        """
        self._clean = False
        try:
            self.state = "loading"
            self._policy = await _in_thread(self._load)
            self.state = "warming"
            self._batcher = self._build(self._policy)
            await self._batcher.start(self._warm)
        except Exception as error:
            self.state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)  # the message says what to mend: nobody needs a stack
            self.error = str(error) if self.unusable else f"{type(error).__name__}: {error}"
            if not self.unusable:
                log.exception("the policy could not be started")
            if self._batcher is not None:
                await self._batcher.close(drain=False)
            self._clean = True
            return
        self._clean = True
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not look at it again
        self._started = True
        self.state = "ready"
        if self.slo is not None:
            self._check_slo(self.slo)

    async def stop(self, timeout: float) -> bool:
        """Drain within `timeout` seconds, answer the rest. Returns whether no thread of the runtime is left."""
        if self._started:
            ended = await self.batcher.close(drain=True, timeout=timeout)
            self._clean = ended and not self.batcher.device.hung
        if self.trace is not None:
            self.trace.close()
        self.workers.shutdown(wait=False, cancel_futures=True)
        return self._clean

    def drain(self) -> None:
        """Say that the end has begun; the door turns away what comes."""
        if self.state != "warmup_failed":
            self.state = "draining"

    def need_policy(self) -> None:
        """Raise when there is no policy to ask."""
        if not self._started:
            if self.state == "draining":
                raise Closed("the server is shutting down", retry_after=1.0)
            if self.state == "warmup_failed":  # waiting does not help
                raise NotReady(f"the policy could not be started: {self.error}", state=self.state)
            raise NotReady(f"the server is {self.state}", retry_after=1.0, state=self.state)

    def admit(self) -> None:
        """Raise when the policy may not be asked now, for its crashes or for its latency."""
        if not self.crashes.admits(time.monotonic()):
            raise Degraded(
                f"{self.crashes.count} batches crashed in a row",
                retry_after=60.0,
                consecutive_crashes=self.crashes.count,
            )
        if self.slo is not None and not self.slo.admits():
            raise SloViolated("the latency objective is violated", retry_after=1.0, value_ms=self.slo.value_ms)

    def answered(self, outcome: str, status: int, latency: float, served_in: float, ticket: Ticket | None) -> None:
        """The server answered a request; goes into the event stream.

        latency: seconds from its head to its answer; served_in: from its last byte.
        """
        event = RequestAnswered(time.monotonic(), SLOT, outcome, status, latency, ticket)
        self.metrics(event)
        if self.slo is not None and status == 200:
            self.slo.served(served_in, event.at)
        if outcome == "failed" and ticket is not None and isinstance(ticket.outcome, Failed):
            self.failures.tell(event.at, ticket.id, ticket.outcome.error)

    def _check_slo(self, slo: SloTracker) -> None:
        slo.check(time.monotonic())
        asyncio.get_running_loop().call_later(slo.PERIOD, self._check_slo, slo)

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _load(self) -> Policy:
        config = self.config
        return load_policy(
            self.export,
            slot=SLOT,
            provider=PROVIDERS.get(config.provider, config.provider),
            threads=config.threads,
            cache_bytes=int(config.prefix_cache_mb * 2**20),
            max_age_chunks=config.prefix_max_age_chunks,
            captured_sizes=config.captured_sizes,
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
            batcher.add_sink(self.trace)
        return batcher

    def _queued(self) -> float:
        return self._batcher.scheduler.queued(SLOT) if self._batcher is not None else 0.0

    def _in_flight(self) -> float:
        return self._batcher.scheduler.unsettled(SLOT) if self._batcher is not None else 0.0

    def _warm(self) -> None:
        self.policy.warm_up(WARM_SIZES).teach(self.batcher.scheduler.cost_model(SLOT))

    def _sink(self, event: Event) -> None:
        was_open = self.crashes.open
        if isinstance(event, BatchFinished):
            if event.crashed:
                self.crashes.crashed(event.at)
        elif isinstance(event, RequestSettled) and isinstance(event.ticket.outcome, Done):
            self.crashes.answered()
        if self.crashes.open and not was_open:
            log.warning("degraded: %d batches crashed in a row; only a probe is let in", self.crashes.count)
        elif was_open and not self.crashes.open:
            log.warning("no longer degraded: a request was answered")


async def _in_thread(function: Callable[[], T]) -> T:
    """Run it in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(error: Exception | None, value: T | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, failure, value)

    Thread(target=run, name="reflex-load", daemon=True).start()
    return await done
