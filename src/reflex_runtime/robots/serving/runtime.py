"""A policy server below its wires: policies on one device, each with its own settings, slots, versions and rollout."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reflex_runtime.core.batch import BatchFinished
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.observe.journal import PolicyHead, WarmUpLine, episode_key
from reflex_runtime.observe.journal_writer import JournalWriter, LineTarget, Recording, hardware, warmed
from reflex_runtime.observe.logs import leave_stuck
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.robots.policy.base import Policy, PolicySource, WarmUp
from reflex_runtime.robots.policy.observation import warm_decoders
from reflex_runtime.robots.policy.spec import WIRES, PolicySpec
from reflex_runtime.robots.serving.decode_pool import DecodePool, cameras_of
from reflex_runtime.robots.serving.shadow import Shadowing
from reflex_runtime.robots.sources.load import check_two_policies, directory_of, read_source, weight_of
from reflex_runtime.robots.versions.breaker import Breaker
from reflex_runtime.robots.versions.ramp import Change, Objective, Ramp, RampGuard, SloTracker
from reflex_runtime.robots.versions.rollout import Rollout
from reflex_runtime.robots.versions.slots import (
    MISTAKES,
    SHADOW,
    Slot,
    Version,
    check_alike,
    faults_of,
    group_of,
    load,
    warmed_up,
)
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.onnx_session import PROVIDERS
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import DEFAULT_POLICY, ServeConfig, named
from reflex_runtime.settings.read import environment
from reflex_runtime.web.batch_server import BatchServer
from reflex_runtime.web.errors import Conflict, NotFound
from reflex_runtime.web.fields import printable
from reflex_runtime.web.supervisor import Parent

log = logging.getLogger("reflex.server")

TICK = 1.0  # seconds between two checks of ramps, guards and versions to unload


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """A policy to serve.

    specs: by slot, served ones first: prod, or a and b, and perhaps shadow. config: the settings of this policy.
    weight: its share of the device's time against other policies. where: prefix of errors in its files and settings.
    """

    name: str
    config: ServeConfig
    specs: Mapping[str, PolicySource]
    weight: float = 1.0
    where: str = ""


class ServedPolicy:
    """The versions of one policy, in slots.

    served: the slots that answer requests. groups: by slot, its name in the scheduler, metrics and journals, which
    begins with `prefix`. cameras: names that requests may use for images, also those of versions that were replaced,
    because callers change one by one. slots: empty before `build`.
    """

    def __init__(self, plan: PolicyPlan, server: PolicyRuntime, alone: bool = True) -> None:
        """alone: whether it is the only policy of its server; then groups have the names of slots, without prefix."""
        self.name, self.config, self.weight, self.alone = plan.name, plan.config, plan.weight, alone
        self._sources, self._where = dict(plan.specs), plan.where
        self.served = tuple(slot for slot in plan.specs if slot != SHADOW)
        self.prefix = "" if alone else f"{plan.name}."
        self.groups = {slot: self.prefix + slot for slot in plan.specs}
        slo = self.config.slo
        self.slo = SloTracker(Objective.parse(slo), self.config.slo_mode, self.prefix) if slo else None
        self.cameras = cameras_of(plan.specs.values())
        self._server = server
        guard = RampGuard.parse(self.config.guard) if self.config.guard else None
        ramp = partial(Ramp.parse, self.config.ramp, self.config.ramp_every, guard) if self.config.ramp else None
        breaker = Breaker(self.served, self.config.max_consecutive_crashes, self.config.probe_cooldown_s)
        split, prefix = self.config.split, self.prefix
        self.rollout = Rollout(self.served, breaker, split, ramp, guard, self._changed, self._forget, prefix)
        self.slots: dict[str, Slot] = {}
        self.shadow: Shadowing | None = None
        self.loading = False  # whether a load is in progress, perhaps one that was cancelled
        server.audience.add(self.rollout)
        if self.slo is not None:
            server.audience.add(self.slo)
        for slot, spec in plan.specs.items():
            self._add_series(slot, spec.embodiment.name or "unknown")

    @property
    def policy(self) -> Policy:
        """The policy of the first slot, for new requests."""
        return self.slots[self.served[0]].policy

    @property
    def spec(self) -> PolicySpec:
        return self.slots[self.served[0]].policy.spec if self.slots else self._sources[self.served[0]]

    @property
    def specs(self) -> dict[str, PolicySpec]:
        """The descriptions by slot, also before `build`."""
        return {name: slot.policy.spec for name, slot in self.slots.items()} or {**self._sources}

    @property
    def health(self) -> str:
        """The server's state, or `degraded` if no slot of this policy answers."""
        degraded = self._server.state == "ready" and self.rollout.breaker.verdict == "degraded"
        return "degraded" if degraded else self._server.state

    @property
    def objective(self) -> dict[str, Any]:
        """The state of its latency objective; empty without one."""
        return {} if self.slo is None else {"slo": {"violated": self.slo.violated, "value_ms": self.slo.value_ms}}

    def shown(self) -> dict[str, Any]:
        """Fields for the live view: health, versions and their comparison."""
        found = self.rollout.snapshot(time.monotonic()) | self.objective
        found["state"] = self.health
        found["groups"] = {slot.name: slot.group for slot in self.slots.values()}
        found["versions"] = {name: slot.version.name for name, slot in self.slots.items()}
        if self.shadow is not None:
            found["shadow"] = dict(self.shadow.snapshot())
        return found

    # -- start and end -------------------------------------------------------------------------------------------------

    def load(self) -> dict[str, Policy]:
        """The policies by slot. Slow; ConfigError when one is wrong."""
        with named(self._where):
            check_alike(self._sources)
            return {slot: load(self.config, slot, spec, self.groups[slot]) for slot, spec in self._sources.items()}

    def build(self, policies: Mapping[str, Policy]) -> list[GroupConfig]:
        """Put loaded policies into the slots. Returns their groups for the scheduler."""
        config = self.config
        faults = faults_of(config.inject_fault, tuple(policies), "--inject-fault")
        self.slots = {slot: Slot(slot, config, policy, faults[slot]) for slot, policy in policies.items()}
        if SHADOW in self.slots:
            self.shadow = Shadowing(
                self.slots[SHADOW],
                self._server,
                self._server.decode_pool,
                self._server.metrics,
                config.shadow_sample,
                lambda request_id, slot, found: self.note("shadow", request_id=request_id, slot=slot, **found),
                lambda text: self.rollout.changed(time.monotonic(), "shadow", text, {}),
            )
            self._server.audience.add(self.shadow)
        tenant = "" if self.alone else self.name
        return [group_of(config, slot, policy, self.weight, tenant) for slot, policy in policies.items()]

    def warm(self) -> list[WarmUpLine]:
        """Run every slot's policy, on the device thread, and teach the cost models. Returns lines for journals."""
        found = []
        for holder in self.slots.values():
            with named(self._where):
                ran = warmed_up(holder.policy, MISTAKES)
            ran.teach(self._server.batcher.scheduler.cost_model(holder.group))
            learned = warmed(holder.group, ran.batches, ran.finished)
            found += [] if learned is None else [learned]
        return found

    def look(self, now: float) -> None:
        """Check the objective and guards, and unload unused versions; called once a second."""
        if self.slo is not None:
            self.slo.check(now)
        for name, tripped in self.rollout.evaluate(now).items():
            if not tripped:
                self.slots[name].previous = None
            elif (back := self.slots[name].go_back()) is not None:
                self.rollout.exchanged(name)
                numbers = {"slot": name, "version": back.name}
                self.rollout.changed(now, "load", f"slot {name} is {back.name} again: the guard tripped", numbers)
        for name, slot in self.slots.items():
            if slot.loaded > 1:
                for version in slot.let_go(self._active(slot.group)):
                    log.info("slot %s: %s is unloaded", name, version.name)

    def _active(self, group: str) -> list[Hashable]:
        """Partitions of a group that hold tickets; read under the lock, because the device thread changes them."""
        found: list[Hashable] = self._server.batcher.device.input(lambda scheduler, now: scheduler.partitions(group))
        return found

    # -- episodes ------------------------------------------------------------------------------------------------------

    def ended(self, episode_id: str, success: bool, robot_id: str | None = None, **fields: object) -> dict[str, Any]:
        """End an episode: count it, drop what policies keep of it, and note it in every journal. Returns the note; 404
        for an unknown episode, 409 where several robots have one of that name."""
        outcome = self.rollout.outcome(episode_id, success, robot_id)
        if outcome["counted"]:
            self._server.metrics.slots[self.groups[outcome["slot"]]].episodes[success].inc()
        self._forget([episode_key(outcome.get("robot_id"), episode_id)])  # also if repeated: an id may be used again
        if not outcome["repeated"]:
            self.note("outcome", **outcome, **fields)
        return outcome

    def note(self, kind: str, **fields: object) -> None:
        """Write a note into every journal."""
        self._server.note(kind, **fields, **({} if self.alone else {"policy": self.name}))

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

    # -- hot swap: load the new version, warm it up, switch; unload the old one, or return to it if `--guard` triggers -

    async def exchange(self, name: str, source: str) -> Version:
        """Put the policy of a source into a slot. Conflict while a ramp runs; ConfigError changes nothing."""
        rollout = self.rollout
        rollout.may_exchange()
        if name not in self.slots:
            raise NotFound(f"no slot {name[:20]!r}; the slots are {', '.join(self.slots)}")
        if self.config.captured_sizes:
            raise Conflict("with --cuda-graphs no policy can be exchanged; restart the server with the other policy")
        slot = self.slots[name]
        version, warm = await in_thread(lambda: self._loaded(slot, source))
        now = time.monotonic()
        guarded = bool(self.config.guard) and name != SHADOW
        self._server.batcher.device.input(lambda scheduler, _: warm.teach(scheduler.cost_model(slot.group)))
        slot.exchange(version, keep=guarded)
        rollout.exchanged(name, now + Ramp.every_of(self.config.ramp_every) if guarded else None)
        numbers = {"slot": name, "version": version.name, "path": version.policy.spec.source}
        rollout.changed(now, "load", f"slot {name} is now {version.name}", numbers)
        self.cameras |= cameras_of([version.policy.spec])
        if self.shadow is not None and name == SHADOW:
            self.shadow.resume()
        return version

    def _loaded(self, slot: Slot, source: str) -> tuple[Version, WarmUp]:
        """A version of the source, ready for the slot, and its warm-up. Cancelling does not end it."""
        self.loading = True
        try:
            self._check_room(source)
            spec = read_source(source)
            self._check_fits(slot, spec)
            version = slot.made(load(self.config, slot.name, spec, slot.group))
            return version, warmed_up(version.policy)
        finally:
            self.loading = False

    def _check_fits(self, slot: Slot, spec: PolicySpec) -> None:
        """ConfigError when a policy cannot replace that of the slot."""
        check_alike({**self.specs, f"{slot.name} (new)": spec})
        expected = slot.policy.spec.inference_mode
        if spec.inference_mode != expected:
            raise ConfigError(
                f"{spec.source}: export_kind: found {spec.inference_mode!r}, expected {expected!r} as in slot "
                f"{slot.name}, whose batch costs were learned so: restart the server to serve the other kind"
            )

    def _check_room(self, source: str) -> None:
        """ConfigError if, by file sizes, the policy of a source does not fit into memory beside the others."""
        if not os.path.isdir(directory_of(source)):
            raise NotFound(printable(f"path={source[:200]!r}: there is no such directory"), field="path")
        provider = PROVIDERS.get(self.config.provider, self.config.provider)
        own = list(self.slots.values())
        beside = sum(slot.loaded * slot.policy.spec.model_bytes for slot in self._server.slots if slot not in own)
        loaded, count = [slot.policy.spec for slot in own], sum(slot.loaded for slot in own)
        check_two_policies([*loaded, weight_of(source)], environment(), provider, policies=count + 1, beside=beside)

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _add_series(self, slot: str, embodiment: str) -> None:
        metrics, server, group = self._server.metrics, self._server, self.groups[slot]

        def live(read: Callable[[Batcher], float]) -> Callable[[], float]:
            return lambda: read(server.batcher) if server.loaded else 0.0

        queued, in_flight = live(lambda b: b.scheduler.queued(group)), live(lambda b: b.scheduler.unsettled(group))
        backlog = live(lambda b: b.device.input(lambda s, _: s.queued_seconds(group)))
        wires, policy = tuple(WIRES) if slot in self.served else ("",), "" if self.alone else self.name
        metrics.add_slot(group, embodiment, queued, in_flight, backlog, wires, policy)
        if slot in self.served:
            drained = metrics.series.gauge("reflex_slot_drained", *metrics.slots[group].labels)
            drained.set_function(lambda: self.rollout.breaker.verdicts[slot] != "ok")

    def _changed(self, change: Change) -> None:
        self.note("decision", action=change.kind, why=change.why, numbers=change.numbers)

    def _forget(self, episodes: Sequence[str]) -> None:
        """Forget episodes that ended, or moved: in the new slot the rest of a chunk of the old one would be a jump."""
        for slot in self.slots.values():
            for episode in episodes:
                slot.forget(episode)


class PolicyRuntime(BatchServer):
    """The policies of one server. policies: by name, in the order of their plans."""

    what, product = "the policy", "policies"

    def __init__(self, config: ServeConfig, plans: Sequence[PolicyPlan], parent: Parent | None = None) -> None:
        self.config = config
        self.metrics = Metrics(several=len(plans) > 1)
        super().__init__(config, self.metrics, self.metrics.registry, parent)
        self.decode_pool = DecodePool(lambda group, seconds: self.metrics.slots[group].prepare.observe(seconds))
        self.policies = {plan.name: ServedPolicy(plan, self, alone=len(plans) == 1) for plan in plans}
        self._exchange: asyncio.Task[Version] | None = None  # the last load into a slot
        self.warned: set[str] = set()  # warnings in the log, on whatever path or wire
        self._learned: list[WarmUpLine] = []  # at warm-up
        self._stopped = False

    @property
    def first(self) -> ServedPolicy:
        """The policy of the first plan."""
        return next(iter(self.policies.values()))

    @property
    def default(self) -> ServedPolicy | None:
        """The policy of requests that name none: the only one, or the one named `DEFAULT_POLICY`."""
        return self.first if len(self.policies) == 1 else self.policies.get(DEFAULT_POLICY)

    @property
    def slots(self) -> list[Slot]:
        """The slots of all policies."""
        return [slot for served in self.policies.values() for slot in served.slots.values()]

    @property
    def health(self) -> str:
        """The server's state, or `degraded` if no policy answers."""
        return self.state if any(served.health == self.state for served in self.policies.values()) else "degraded"

    async def start(self) -> None:
        await super().start()
        if self.loaded:
            for served in self.policies.values():
                served.rollout.begin(time.monotonic())
            asyncio.get_running_loop().call_later(TICK, self._tick)

    async def load(self) -> None:
        policies = await in_thread(self._load)
        self._state = "warming"
        self.batcher = self._build(policies)
        await self.batcher.start(self._warm)

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        self._stopped = True
        return await super().stop(until, answered)

    def still_loading(self) -> str:
        return "a policy is still being loaded" if any(served.loading for served in self.policies.values()) else ""

    def close(self) -> None:
        self.decode_pool.close()

    def drain(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()
        for served in self.policies.values():
            if served.shadow is not None:
                served.shadow.close()
        super().drain()

    def exchange(self, served: ServedPolicy, slot: str, source: str) -> asyncio.Task[Version]:
        """Begin to put the policy of a source into a slot. The task goes on if the operator leaves; a drain ends it.
        Conflict while another one runs."""
        if self._exchange is not None and not self._exchange.done():
            raise Conflict("another policy is being loaded")
        self._exchange = task = asyncio.get_running_loop().create_task(served.exchange(slot, source))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its operator may have left
        return task

    def note(self, kind: str, **fields: object) -> None:
        """Write a note into every journal."""
        for journal in self.journals:
            journal.note(kind, **fields)

    def add_journal(self, to: str | Recording | LineTarget) -> JournalWriter:
        writer = super().add_journal(to)
        for learned in self._learned:
            writer.warmed(learned)
        return writer

    def shown(self) -> dict[str, Any]:
        policies = {name: served.shown() for name, served in self.policies.items()}
        return super().shown() | {"unit": self.config.cost_model, "policies": policies}

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, dict[str, Policy]]:
        """The policies by name and slot. Slow."""
        if any(spec.images for served in self.policies.values() for spec in served.specs.values()):
            warm_decoders()
        return {name: served.load() for name, served in self.policies.items()}

    def _build(self, policies: Mapping[str, Mapping[str, Policy]]) -> Batcher:
        config = self.config
        groups = [group for name, served in self.policies.items() for group in served.build(policies[name])]
        batcher = Batcher(
            {slot.group: slot for slot in self.slots},
            groups,
            self.audience,
            config.watchdog_s,
            on_fatal=self.give_up,
            expendable={slot.group for slot in self.slots if slot.name == SHADOW},
            brief=config.brief_ms / 1e3,
            on_stuck=leave_stuck,
        )
        of_group = {slot.group: served for served in self.policies.values() for slot in served.slots.values()}

        def notes(event: BatchFinished) -> dict[str, str]:
            return of_group[event.batch.group].rollout.notes(event)

        header = header_of(list(self.policies.values()))
        self._journal = partial(JournalWriter, groups=groups, header=header, notes=notes)
        images: Any = config.record_images
        gzip, most = not config.record_no_gzip, config.record_max_mb << 20
        self.open_journals(Recording(config.record, gzip, images, most) if config.record else None)
        if (recorder := self.recorder) is not None:
            self.metrics.add_recording(lambda: recorder.dropped, lambda: recorder.error is not None)
        return batcher

    def _warm(self) -> None:
        for served in self.policies.values():
            for learned in served.warm():
                self._learned.append(learned)
                for journal in self.journals:
                    journal.warmed(learned)

    def _tick(self) -> None:
        """Once a second, also after a failure."""
        if self._stopped:
            return
        now = time.monotonic()
        for served in self.policies.values():
            try:
                served.look(now)
            except Exception:
                log.exception("the look at objective, guards and versions failed, and comes again in a second")
        asyncio.get_running_loop().call_later(TICK, self._tick)


def header_of(policies: Sequence[ServedPolicy]) -> dict[str, Any]:
    """The part of a journal's header about policies. Of several: the fields of the first, and `served` with each."""
    first = _head_of(policies[0]) | {"hardware": hardware()}
    if len(policies) == 1:
        return first
    slots = [dict(slot, slot=f"{one.name}.{slot['slot']}") for one in policies for slot in _slots_of(one)]
    served = {one.name: PolicyHead(**_head_of(one)) for one in policies}
    return first | {"policies": slots, "split": None, "served": served}


def _slots_of(served: ServedPolicy) -> list[dict[str, str]]:
    return [
        {"slot": name, "model_id": slot.policy.spec.model_id, "model_hash": slot.policy.spec.model_hash}
        for name, slot in served.slots.items()
    ]


def _head_of(served: ServedPolicy) -> dict[str, Any]:
    slots, first = served.slots, served.policy
    spec = first.spec
    robot = spec.embodiment
    return {
        "model_hash": spec.model_hash,
        "config_hash": spec.config_hash,
        "export_dir": spec.source,
        "model_type": spec.model_type,
        "export_kind": spec.inference_mode,
        "embodiment": robot.name,
        "control_rate_hz": robot.control_rate_hz,
        "state_names": robot.state_names,
        "action_names": robot.action_names,
        "providers": [first.describe()["provider"]],
        "policies": _slots_of(served) if len(slots) > 1 else None,
        "split": served.config.split if "b" in slots else None,
    }
