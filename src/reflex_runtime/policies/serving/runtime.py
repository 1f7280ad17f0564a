"""What the server serves: policies in slots on one device, its batcher, metrics and state; everything but HTTP.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded`; `draining`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.adapt import Affine, Planner
from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Closed, ConfigError, ProcessorError
from reflex_runtime.core.events import BatchFinished, Event, RequestAnswered, RequestSettled
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.request import Ticket
from reflex_runtime.drivers.audience import Audience
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.policies import Export, Policy
from reflex_runtime.policies.export.memory import Weight, check_two_policies
from reflex_runtime.policies.policy.base import WarmUp
from reflex_runtime.policies.policy.observation import warm_decoders
from reflex_runtime.policies.rollout.breaker import Breaker
from reflex_runtime.policies.rollout.comparison import Comparison
from reflex_runtime.policies.rollout.ramp import Ramp, RampGuard
from reflex_runtime.policies.rollout.rollout import Change, Placement, Rollout
from reflex_runtime.policies.rollout.shadow import Difference
from reflex_runtime.policies.rollout.shadowing import Shadowing
from reflex_runtime.policies.rollout.slo import Objective, SloTracker
from reflex_runtime.policies.rollout.versions import Version
from reflex_runtime.policies.serving.ask import WIRES
from reflex_runtime.policies.serving.failures import FailureLog
from reflex_runtime.policies.serving.images import cameras_of
from reflex_runtime.policies.serving.preparing import Preparing
from reflex_runtime.policies.serving.recorded import header_of
from reflex_runtime.policies.serving.slots import PROVIDERS, SHADOW, Slot, check_alike, faults_of, group_of, load
from reflex_runtime.sources import environment
from reflex_runtime.telemetry.journal_head import warmed
from reflex_runtime.telemetry.journal_writer import JournalWriter, Recording
from reflex_runtime.telemetry.lines import turn_all
from reflex_runtime.telemetry.metrics import Metrics
from reflex_runtime.web.errors import Conflict, NotFound, NotReady, SloViolated
from reflex_runtime.web.supervisor import Lives

log = logging.getLogger("reflex.server")

T = TypeVar("T")

WARM_SIZES = (1, 2, 4)
TICK = 1.0  # seconds between looks at the ramp, the guards and what may be unloaded


class Budget(Planner):
    """The planner, and what `--slo-mode degrade` takes off its budget."""

    def __init__(self, slo: SloTracker | None) -> None:
        super().__init__()
        self._slo = slo

    def policy(self, base: FlushPolicy, affine: Affine, now: float, partition: Hashable) -> FlushPolicy:
        planned = super().policy(base, affine, now, partition)
        factor = 1.0 if self._slo is None else self._slo.factor
        return planned if factor >= 1.0 else replace(planned, max_batch_cost=planned.max_batch_cost * factor)


class PolicyRuntime:
    """The served policies. `start` returns when they are ready or have failed; `place` says who answers a request.

    exports: by slot, served ones first: prod, or a and b, and perhaps shadow.
    """

    def __init__(
        self, config: ServeConfig, exports: Mapping[str, Export], on_fatal: Callable[[], None] | None = None
    ) -> None:
        self.config = config
        self.exports = dict(exports)
        self.served = tuple(slot for slot in exports if slot != SHADOW)
        self.state = "initializing"
        self.error = ""
        self.lives: Lives | None = None  # what its supervisor knows, where there is one
        self.unusable = False  # an export itself is wrong: there is nothing to wait for
        self.metrics = Metrics()
        self.slo = SloTracker(Objective.parse(config.slo), config.slo_mode) if config.slo else None
        self.trace: JournalWriter | None = None
        self.recorder: JournalWriter | None = None
        self.preparing = Preparing()
        self.cameras = cameras_of(exports.values())  # also of what was exchanged: callers follow one by one
        self.rollout = self._rollout()
        self._verdict = _Verdict(self.rollout)
        self.audience = Audience([self.metrics, self._verdict, FailureLog()])  # answers come before there is a batcher
        if self.slo is not None:
            self.audience.add(self.slo)
        self.slots: dict[str, Slot] = {}
        self.shadow: Shadowing | None = None
        self.on_drain: Callable[[], None] = lambda: None
        self._on_fatal = on_fatal
        for slot, export in exports.items():
            name = export.embodiment.name or "unknown"
            wires = WIRES if slot in self.served else ("",)
            self.metrics.add_slot(slot, name, partial(self._queued, slot), partial(self._in_flight, slot), wires)
            if slot in self.served:
                self.metrics.add_verdict(slot, partial(self._drained, slot))
        self._batcher: Batcher | None = None
        self._loading = 0  # policies being loaded beside the others
        self._watch_until: dict[str, float] = {}
        self._started = False
        self._over = False  # `start` is
        self._waiting: set[Callable[[], None]] = set()
        self._clean = True
        self._stopped = False

    @property
    def policy(self) -> Policy:
        """What new requests of the first slot are asked of."""
        return self.slots[self.served[0]].policy

    @property
    def export(self) -> Export:
        """The first slot's."""
        return self.slots[self.served[0]].policy.export if self.slots else self.exports[self.served[0]]

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
        """The state as /health tells it."""
        return "degraded" if self.state == "ready" and self.rollout.breaker.verdict == "degraded" else self.state

    async def start(self) -> None:
        """Load, warm up, serve. What goes wrong ends in `warmup_failed` with the error kept.

        Cancelling it leaves the thread that loads behind: nothing can stop a model file being read.
        """
        self._clean = False
        try:
            self.state = "loading"
            policies = await _in_thread(self._load)
            self.state = "warming"
            self._batcher = self._build(policies)
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
            self._clean = ended and not self.batcher.device.hung and not self._loading
        for journal in self.journals:
            journal.close()
        self.preparing.close()
        return self._clean

    def drain(self) -> None:
        """Say that the end has begun; the door turns away what comes."""
        if self.state != "warmup_failed":
            self.state = "draining"
        if self.shadow is not None:
            self.shadow.close()
        self.on_drain()

    @property
    def journals(self) -> list[JournalWriter]:
        """What it writes: a trace, a recording, both or neither."""
        return [journal for journal in (self.trace, self.recorder) if journal is not None]

    def note(self, kind: str, **fields: object) -> None:
        """Write a note into every journal."""
        for journal in self.journals:
            journal.note(kind, **fields)

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
        """Raise when there is no policy to ask."""
        if not self._started:
            if self.state == "draining":
                raise Closed("the server is shutting down", retry_after=1.0)
            if self.state == "warmup_failed":  # waiting does not help
                raise NotReady(f"the policy could not be started: {self.error}", state=self.state)
            raise NotReady(f"the server is {self.state}", retry_after=1.0, state=self.state)

    # -- requests ------------------------------------------------------------------------------------------------------

    def place(self, episode_id: str | None, request_id: str) -> Placement:
        """Who answers the request. Raises when nobody may be asked now, for its crashes or for its latency."""
        if self.slo is not None and not self.slo.admits():
            raise SloViolated("the latency objective is violated", retry_after=1.0, value_ms=self.slo.value_ms)
        return self.rollout.place(episode_id, request_id, time.monotonic())

    # -- the operator --------------------------------------------------------------------------------------------------

    def inject(self, texts: Sequence[str]) -> None:
        """From the next batch on these faults, and no others. ConfigError naming what is wrong."""
        for slot, faults in faults_of(texts, tuple(self.slots), "faults").items():
            self.slots[slot].inject(faults)
        log.warning("FAULT INJECTION: %s", ", ".join(texts) or "none any more")

    @property
    def faults(self) -> list[str]:
        """Those in force."""
        return [str(fault) for slot in self.slots.values() for fault in slot.faults]

    async def exchange(self, slot: str, path: Path) -> Version:
        """Put another policy into a slot: load it beside, warm it, switch. ConfigError leaves everything as it is."""
        if slot not in self.slots:
            raise NotFound(f"no slot {slot[:20]!r}: {', '.join(self.slots)}")
        if self.config.captured_sizes:
            raise Conflict("with --cuda-graphs no policy can be exchanged: graphs belong to the thread that made them")
        self.rollout.may_exchange()
        holder = self.slots[slot]
        await _in_thread(lambda: self._has_room(path))
        export = await _in_thread(lambda: Export.load(path))
        self._fits(holder, export)
        self._loading += 1  # of one that is given up, the thread goes on
        try:
            policy = await _in_thread(lambda: load(self.config, slot, export))
            version = holder.made(policy)
            warm = await _in_thread(lambda: _warmed(policy))
        except Exception:
            self._loading -= 1
            raise
        self._loading -= 1
        self.batcher.device.input(lambda scheduler, now: warm.teach(scheduler.cost_model(slot)))
        now, guarded = time.monotonic(), bool(self.config.guard) and slot in self.served
        holder.exchange(version, keep=guarded)
        self.cameras |= cameras_of([export])
        self.rollout.exchanged(slot, now)
        if guarded:
            self.rollout.watch(slot)
            self._watch_until[slot] = now + Ramp.every_of(self.config.ramp_every)
        if self.shadow is not None and slot == SHADOW:
            self.shadow.resume()
        numbers = {"slot": slot, "version": version.name, "path": str(export.path)}
        self.rollout.changed(now, "load", f"slot {slot} is now {version.name}", numbers)
        return version

    def _fits(self, holder: Slot, export: Export) -> None:
        """ConfigError when an export cannot take the place of what the slot has."""
        others = {slot: held.policy.export for slot, held in self.slots.items()}
        check_alike({**others, holder.name: export})
        if export.export_kind != holder.policy.export.export_kind:
            raise ConfigError(
                f"{export.path}: export_kind: found {export.export_kind!r}, expected "
                f"{holder.policy.export.export_kind!r} as in slot {holder.name}: what its batches cost was learned so"
            )

    def _has_room(self, path: Path) -> None:
        """ConfigError when the policies would not fit the memory with the one of this path, by the sizes of files."""
        provider = PROVIDERS.get(self.config.provider, self.config.provider)
        loaded = [held.policy.export for held in self.slots.values()]
        there = sum(held.loaded for held in self.slots.values())
        check_two_policies([*loaded, Weight.of(path)], environment(), provider, policies=there + 1)

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
        check_alike(self.exports)
        if any(export.images for export in self.exports.values()):
            warm_decoders()
        return {slot: load(self.config, slot, export) for slot, export in self.exports.items()}

    def _build(self, policies: Mapping[str, Policy]) -> Batcher:
        config = self.config
        faults = faults_of(config.inject_fault, tuple(policies), "--inject-fault")
        self.slots = {slot: Slot(slot, config, policy, faults[slot]) for slot, policy in policies.items()}
        slo = self.slo if config.slo_mode == "degrade" else None
        groups = [group_of(config, slot, policy, Budget(slo)) for slot, policy in policies.items()]
        processors = {slot: holder.processor for slot, holder in self.slots.items()}
        batcher = Batcher(
            processors, groups, self.audience, config.watchdog_s, on_fatal=self._on_fatal, expendable={SHADOW}
        )
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
        """Once a second, whatever happens."""
        if self._stopped:
            return
        try:
            self._look(time.monotonic())
        except Exception:
            log.exception("what happens once a second failed")
        asyncio.get_running_loop().call_later(TICK, self._tick)

    def _look(self, now: float) -> None:
        if self.slo is not None:
            self.slo.check(now)
        for slot in self.rollout.evaluate(now):
            back = self.slots[slot].go_back()
            if back is not None:
                self.rollout.exchanged(slot, now)
                numbers = {"slot": slot, "version": back.name}
                self.rollout.changed(now, "load", f"slot {slot} is {back.name} again: the guard tripped", numbers)
        for slot, until in list(self._watch_until.items()):
            if now >= until and self.rollout.watched_enough(slot):
                del self._watch_until[slot]
                self.rollout.unwatch(slot, now)
                self.slots[slot].settle()
        for slot, holder in self.slots.items():
            if holder.loaded > 1:
                for version in holder.let_go(self._active(slot)):
                    log.info("slot %s: %s is unloaded", slot, version.name)

    def _active(self, slot: str) -> list[Hashable]:
        """Partitions of the slot's group that hold tickets; the device thread changes them."""
        found: list[Hashable] = self.batcher.device.input(lambda scheduler, now: scheduler.partitions(slot))
        return found

    def _changed(self, change: Change) -> None:
        self.note("decision", action=change.kind, why=change.why, numbers=change.numbers)

    def _compared(self, request_id: str, slot: str, found: Difference) -> None:
        self.note("shadow", request_id=request_id, slot=slot, **asdict(found))

    def _moved(self, episodes: Sequence[str]) -> None:
        """They go on elsewhere: what they had carried over would be a jump there."""
        for slot in self.slots.values():
            tails = getattr(slot.policy, "tails", None)
            if tails is not None:
                for episode in episodes:
                    tails.forget(episode)

    def _drained(self, slot: str) -> bool:
        return self.rollout.breaker.verdicts[slot] != "ok"

    def _queued(self, slot: str) -> float:
        return self._batcher.scheduler.queued(slot) if self._batcher is not None else 0.0

    def _in_flight(self, slot: str) -> float:
        return self._batcher.scheduler.unsettled(slot) if self._batcher is not None else 0.0


class _Verdict:
    """The sink that tells the rollout of answers, and its breaker of crashed and of clean calls.

    A clean call is one that answered somebody: a prefix that worked before a denoise step that crashed proves nothing.
    A request that failed while others were answered is to blame itself; how many those are is told with each crash.
    """

    events = frozenset({BatchFinished, RequestSettled, RequestAnswered})

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._clean = ""  # the slot whose batch came back and has not answered yet
        self._counted: BatchFinished | None = None  # the last one

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestAnswered):
            if event.ticket is not None or event.outcome == "ok":
                self._rollout.answered(event.slot, event.outcome, event.latency)
        elif isinstance(event, RequestSettled):
            if event.ticket.request.group in self._rollout.poison:
                self._settled(event.ticket, event.at)
        elif isinstance(event, BatchFinished):
            self._count(event)

    def notes(self, event: BatchFinished) -> dict[str, str]:
        """What trace and recording say of a finished batch: the verdict with it counted, whichever sink comes first."""
        self._count(event)
        verdict = self._rollout.breaker.verdict
        return {} if verdict == "ok" else {"verdict": verdict}

    def _count(self, event: BatchFinished) -> None:
        """Count a batch once: its event comes to several sinks, and any of them may be the first."""
        if event is self._counted:
            return
        self._counted = event
        slot, part = event.batch.group, event.batch.part
        self._clean = "" if event.crashed else slot
        if event.crashed and slot in self._rollout.poison:
            by_chance = part is not None and part.origin.served  # all of them were, once they ran apart
            self._rollout.crashed(slot, event.at, 0.0 if by_chance else self._rollout.poison[slot].share)

    def _settled(self, ticket: Ticket, now: float) -> None:
        slot, outcome = ticket.request.group, ticket.outcome
        if isinstance(outcome, Done):
            self._rollout.poison[slot].answered(ticket.request.client)
            if slot == self._clean:
                self._rollout.computed(slot, now)
                self._clean = ""
        elif isinstance(outcome.error, ProcessorError):
            self._rollout.poison[slot].failed(ticket.request.client)



def _warmed(policy: Policy) -> WarmUp:
    """A policy that cannot answer noise is a wrong export, whatever it says."""
    try:
        return policy.warm_up(WARM_SIZES)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{policy.export.path}: it does not answer: {error}") from error


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
