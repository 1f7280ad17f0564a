"""The part of a policy server below the wires: policies in slots on one device, their batcher and sinks, and state.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded`; `draining`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.drivers.audience import Audience
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.policies import Policy, PolicySource, PolicySpec
from reflex_runtime.policies.policy.observation import warm_decoders
from reflex_runtime.policies.rollout.breaker import Breaker
from reflex_runtime.policies.rollout.comparison import Comparison
from reflex_runtime.policies.rollout.ramp import Ramp, RampGuard
from reflex_runtime.policies.rollout.rollout import Change, Placement, Rollout
from reflex_runtime.policies.rollout.shadow import Difference
from reflex_runtime.policies.rollout.shadowing import Shadowing
from reflex_runtime.policies.rollout.slo import Objective, SloTracker
from reflex_runtime.policies.rollout.verdict import VerdictSink
from reflex_runtime.policies.rollout.versions import Version
from reflex_runtime.policies.serving.ask import WIRES
from reflex_runtime.policies.serving.exchanging import Exchanging
from reflex_runtime.policies.serving.failures import FailureLog
from reflex_runtime.policies.serving.images import cameras_of
from reflex_runtime.policies.serving.preparing import Preparing
from reflex_runtime.policies.serving.recorded import header_of
from reflex_runtime.policies.serving.slots import SHADOW, WARM_SIZES, Slot, check_alike, faults_of, group_of, load
from reflex_runtime.telemetry.journal_head import warmed
from reflex_runtime.telemetry.journal_writer import JournalWriter, Recording
from reflex_runtime.telemetry.lines import turn_all
from reflex_runtime.telemetry.metrics import Metrics
from reflex_runtime.web.errors import NotReady, SloViolated
from reflex_runtime.web.supervisor import Lives

log = logging.getLogger("reflex.server")

T = TypeVar("T")

TICK = 1.0  # seconds between looks at the ramp, the guards and what may be unloaded


class PolicyRuntime:
    """The served policies. `start` returns when they are ready or have failed; `place` chooses the slot of a request.

    exports: by slot, served ones first: prod, or a and b, and perhaps shadow.
    """

    def __init__(
        self, config: ServeConfig, specs: Mapping[str, PolicySource], on_fatal: Callable[[], None] | None = None
    ) -> None:
        self.config = config
        self.specs = dict(specs)
        self.served = tuple(slot for slot in specs if slot != SHADOW)
        self.state = "initializing"
        self.error = ""
        self.lives: Lives | None = None  # what its supervisor knows, where there is one
        self.unusable = False  # an export itself is wrong: there is nothing to wait for
        self.metrics = Metrics()
        self.slo = SloTracker(Objective.parse(config.slo), config.slo_mode) if config.slo else None
        self.trace: JournalWriter | None = None
        self.recorder: JournalWriter | None = None
        self.preparing = Preparing()
        self.cameras = cameras_of(specs.values())  # also of what was exchanged: callers follow one by one
        self.rollout = self._rollout()
        self._verdict = VerdictSink(self.rollout)
        self.audience = Audience([self.metrics, self._verdict, FailureLog()])  # answers come before there is a batcher
        if self.slo is not None:
            self.audience.add(self.slo)
        self.slots: dict[str, Slot] = {}
        self.shadow: Shadowing | None = None
        self.on_drain: list[Callable[[], None]] = []
        self._on_fatal = on_fatal
        for slot, spec in specs.items():
            name = spec.embodiment.name or "unknown"
            wires = WIRES if slot in self.served else ("",)
            self.metrics.add_slot(slot, name, partial(self._queued, slot), partial(self._in_flight, slot), wires)
            if slot in self.served:
                self.metrics.add_verdict(slot, partial(self._drained, slot))
        self._batcher: Batcher | None = None
        self._started = False
        self._over = False  # `start` is
        self._waiting: set[Callable[[], None]] = set()
        self._clean = True
        self._stopped = False

    @property
    def policy(self) -> Policy:
        """The first slot's policy for new requests."""
        return self.slots[self.served[0]].policy

    @property
    def spec(self) -> PolicySpec:
        return self.slots[self.served[0]].policy.spec if self.slots else self.specs[self.served[0]]

    @property
    def all_specs(self) -> list[PolicySpec]:
        """Those of all slots, the first slot's first."""
        if not self.slots:
            return list(self.specs.values())
        return [slot.policy.spec for slot in self.slots.values()]

    @property
    def batcher(self) -> Batcher:
        """The driver of the device."""
        assert self._batcher is not None
        return self._batcher

    @property
    def loaded(self) -> bool:
        """Whether the policies are there and their device runs."""
        return self._started

    @property
    def health(self) -> str:
        """The body of /health."""
        return "degraded" if self.state == "ready" and self.rollout.breaker.verdict == "degraded" else self.state

    async def start(self) -> None:
        """Load, warm up, serve. A failure ends in the state `warmup_failed`, with its error.

        Cancelling does not end the thread that loads: reading a model file cannot be interrupted.
        """
        self._clean = False
        try:
            self.state = "loading"
            policies = await in_thread(self._load)
            self.state = "warming"
            self._batcher = self._build(policies)
            await self._batcher.start(self._warm)
        except Exception as error:
            self.state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)  # the message says what to mend, so no stack is logged
            self.error = str(error) if self.unusable else f"{type(error).__name__}: {error}"
            if not self.unusable:
                log.exception("the policy could not be started")
            if self._batcher is not None:
                await self._batcher.close(drain=False)
            self._clean = True
            self._tell_started()
            return
        self._clean = True
        self._started = True
        self.state = "ready"
        self.rollout.begin(time.monotonic())
        asyncio.get_running_loop().call_later(TICK, self._tick)
        self._tell_started()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        """Answer what was asked until then, by the loop's clock, and end the rest. Returns whether no thread is left.

        answered: returns when every request has its answer.
        """
        self._stopped = True
        if self._started:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await answered()
            left = max(0.0, until - asyncio.get_running_loop().time())
            ended = await self.batcher.close(drain=True, timeout=left)
            self._clean = ended and not self.batcher.device.hung and not self.exchanging.loading
        for journal in self.journals:
            journal.close()
        self.preparing.close()
        return self._clean

    def drain(self) -> None:
        """The end has begun: new requests are refused."""
        if self.state != "warmup_failed":
            self.state = "draining"
        if self.shadow is not None:
            self.shadow.close()
        for tell in self.on_drain:
            tell()

    @property
    def journals(self) -> list[JournalWriter]:
        """What it writes: a trace, a recording, both or neither."""
        return [journal for journal in (self.trace, self.recorder) if journal is not None]

    def note(self, kind: str, **fields: object) -> None:
        """Write a note into every journal."""
        for journal in self.journals:
            journal.note(kind, **fields)

    def ended(self, episode_id: str, success: bool, **fields: object) -> dict[str, Any]:
        """An episode has ended: count it, and write it into every journal. Returns what came of it; 404 for one that is
        not known."""
        told = self.rollout.outcome(episode_id, success)
        if told["counted"]:
            self.metrics.ended(told["slot"], success)
        if not told["repeated"]:
            self.note("outcome", **told, **fields)
        return told

    @property
    def writes_files(self) -> bool:
        """Whether it writes a trace or a recording."""
        return bool(self.config.trace or self.config.record)

    def turn_files(self) -> None:
        """Go on in new files."""
        turn_all()

    def when_started(self, tell: Callable[[], None]) -> None:
        """Call it once `start` has returned; at once if it has."""
        if self._over:
            tell()
        else:
            self._waiting.add(tell)

    def forget(self, tell: Callable[[], None]) -> None:
        """It need not be called any more."""
        self._waiting.discard(tell)

    def _tell_started(self) -> None:
        self._over = True
        waiting, self._waiting = self._waiting, set()
        for tell in waiting:
            tell()

    def need_policy(self) -> None:
        """Raise NotReady unless a policy is loaded."""
        if not self._started:
            if self.state == "draining":
                raise Closed("the server is shutting down", retry_after=1.0)
            if self.state == "warmup_failed":  # waiting does not help
                raise NotReady(f"the policy could not be started: {self.error}", state=self.state)
            raise NotReady(f"the server is {self.state}", retry_after=1.0, state=self.state)

    # -- requests ------------------------------------------------------------------------------------------------------

    def place(self, episode_id: str | None, request_id: str) -> Placement:
        """Which slot answers the request. Raises when none may, because of its crashes or the latency objective."""
        if self.slo is not None and not self.slo.admits():
            raise SloViolated("the latency objective is violated", retry_after=1.0, value_ms=self.slo.value_ms)
        return self.rollout.place(episode_id, request_id, time.monotonic())

    # -- the operator --------------------------------------------------------------------------------------------------

    def inject(self, texts: Sequence[str]) -> None:
        """Replace the injected faults from the next batch on. ConfigError for a wrong one."""
        for slot, faults in faults_of(texts, tuple(self.slots), "faults").items():
            self.slots[slot].inject(faults)
        log.warning("FAULT INJECTION: %s", ", ".join(texts) or "none any more")

    @property
    def faults(self) -> list[str]:
        """The injected faults in force."""
        return [str(fault) for slot in self.slots.values() for fault in slot.faults]

    async def exchange(self, slot: str, source: str) -> Version:
        """Put another policy into a slot; see `Exchanging`."""
        version = await self.exchanging.exchange(slot, source)
        self.cameras |= cameras_of([version.policy.spec])
        if self.shadow is not None and slot == SHADOW:
            self.shadow.resume()
        return version

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _rollout(self) -> Rollout:
        config = self.config
        guard = RampGuard.parse(config.guard) if config.guard else None
        ramp = None
        if config.ramp:
            shares, every = Ramp.shares_of(config.ramp), Ramp.every_of(config.ramp_every)

            def ramp(comparison: Comparison, now: float) -> Ramp:
                return Ramp(shares, every, guard, comparison if config.ramp_evidence else None, now)

        return Rollout(
            self.served,
            Breaker(self.served, config.max_consecutive_crashes, config.probe_cooldown_s),
            config.split,
            ramp,
            guard,
            config.ramp_margin / 100.0,
            on_change=self._changed,
            on_moved=self._moved,
        )

    def _load(self) -> dict[str, Policy]:
        check_alike(self.specs)
        if any(spec.images for spec in self.specs.values()):
            warm_decoders()
        return {slot: load(self.config, slot, spec) for slot, spec in self.specs.items()}

    def _build(self, policies: Mapping[str, Policy]) -> Batcher:
        config = self.config
        faults = faults_of(config.inject_fault, tuple(policies), "--inject-fault")
        self.slots = {slot: Slot(slot, config, policy, faults[slot]) for slot, policy in policies.items()}
        slo = self.slo if config.slo_mode == "degrade" else None
        groups = [group_of(config, slot, policy, slo) for slot, policy in policies.items()]
        processors = {slot: holder.processor for slot, holder in self.slots.items()}
        batcher = Batcher(
            processors, groups, self.audience, config.watchdog_s, on_fatal=self._on_fatal, expendable={SHADOW}
        )
        self.exchanging = Exchanging(config, self.slots, batcher, self.rollout)
        journal = partial(
            JournalWriter, groups=groups, header=header_of(config, self.slots), notes=self._verdict.notes
        )
        if config.trace:
            self.trace = journal(config.trace)
        if config.record:
            images, gzip = config.record_images, not config.record_no_gzip
            to = Recording(config.record, gzip, images, config.record_max_mb << 20)  # type: ignore[arg-type]
            recorder = self.recorder = journal(to)
            self.metrics.add_recording(lambda: recorder.dropped, lambda: recorder.error is not None)
        for one in self.journals:
            self.audience.add(one)
        if SHADOW in self.slots:
            self.shadow = Shadowing(
                self.slots[SHADOW],
                batcher,
                self.preparing,
                config.shadow_sample,
                self.metrics,
                self.audience.publish,
                self._compared,
                lambda why: self.rollout.changed(time.monotonic(), "shadow", f"stopped: {why}", {}),
            )
            self.audience.add(self.shadow)
        return batcher

    def _warm(self) -> None:
        for slot, holder in self.slots.items():
            ran = holder.policy.warm_up(WARM_SIZES)
            ran.teach(self.batcher.scheduler.cost_model(slot))
            learned = warmed(slot, ran.batches, ran.finished)
            if learned is not None:
                for journal in self.journals:
                    journal.warmed(learned)

    def _tick(self) -> None:
        """Once a second, also after a failure."""
        if self._stopped:
            return
        now = time.monotonic()
        try:
            if self.slo is not None:
                self.slo.check(now)
            self.exchanging.look(now)
        except Exception:
            log.exception("the look at objective, guards and versions failed, and comes again in a second")
        asyncio.get_running_loop().call_later(TICK, self._tick)

    def _changed(self, change: Change) -> None:
        self.note("decision", action=change.kind, why=change.why, numbers=change.numbers)

    def _compared(self, request_id: str, slot: str, found: Difference) -> None:
        self.note("shadow", request_id=request_id, slot=slot, **asdict(found))

    def _moved(self, episodes: Sequence[str]) -> None:
        """The episodes go on in the other slot: what is carried over from this one would be a jump there."""
        for slot in self.slots.values():
            for episode in episodes:
                slot.policy.forget(episode)

    def _drained(self, slot: str) -> bool:
        return self.rollout.breaker.verdicts[slot] != "ok"

    def _queued(self, slot: str) -> float:
        return self._batcher.scheduler.queued(slot) if self._batcher is not None else 0.0

    def _in_flight(self, slot: str) -> float:
        return self._batcher.scheduler.unsettled(slot) if self._batcher is not None else 0.0
