"""The part of a policy server below the wires: its policies on one device, their batcher and sinks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from reflex_runtime.core.events import BatchFinished
from reflex_runtime.observe.journal import PolicyHead, WarmUpLine
from reflex_runtime.observe.journal_writer import JournalWriter, LineTarget, Recording, hardware
from reflex_runtime.observe.logs import leave_stuck
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.observation import warm_decoders
from reflex_runtime.robots.serving.decode_pool import DecodePool
from reflex_runtime.robots.serving.served import PolicyPlan, ServedPolicy
from reflex_runtime.robots.versions.slots import SHADOW, Slot
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import DEFAULT_POLICY, ServeConfig
from reflex_runtime.web.batch_server import BatchServer
from reflex_runtime.web.supervisor import Parent

log = logging.getLogger("reflex.server")

TICK = 1.0  # seconds between looks at the ramp, the guards and what may be unloaded


class PolicyRuntime(BatchServer):
    """The policies of one server. policies: by name, in the order of their plans."""

    what, product = "the policy", "policies"

    def __init__(
        self,
        config: ServeConfig,
        plans: Sequence[PolicyPlan],
        on_fatal: Callable[[], None] | None = None,
        parent: Parent | None = None,
    ) -> None:
        self.config, self._on_fatal = config, on_fatal
        self.metrics = Metrics(several=len(plans) > 1)
        super().__init__(config, self.metrics, self.metrics.registry, parent)
        self.decode_pool = DecodePool()
        self.policies = {plan.name: ServedPolicy(plan, self, alone=len(plans) == 1) for plan in plans}
        self.exchanges = False  # a policy is being loaded into a slot
        self._learned: list[WarmUpLine] = []  # at warm-up
        self._stopped = False

    @property
    def first(self) -> ServedPolicy:
        """The policy of the first plan."""
        return next(iter(self.policies.values()))

    @property
    def default(self) -> ServedPolicy | None:
        """The policy that answers requests that name none: the only one, or the one of that name."""
        return self.first if len(self.policies) == 1 else self.policies.get(DEFAULT_POLICY)

    @property
    def slots(self) -> list[Slot]:
        """Those of all policies."""
        return [slot for served in self.policies.values() for slot in served.slots.values()]

    @property
    def health(self) -> str:
        """Its state, or degraded: none of its policies answers."""
        return self.state if any(served.health == self.state for served in self.policies.values()) else "degraded"

    async def start(self) -> None:
        await super().start()
        if self.loaded:
            for served in self.policies.values():
                served.rollout.begin(time.monotonic())
            asyncio.get_running_loop().call_later(TICK, self._tick)

    async def load(self) -> None:
        policies = await in_thread(self._load)
        self.state = "warming"
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
        for served in self.policies.values():
            served.drain()
        super().drain()

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
        """Of every policy what is in its slots."""
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
            on_fatal=self._on_fatal,
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
        for served in self.policies.values():
            served.join(batcher)
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
    """What a policy server adds to the first line of a journal: of several policies the first, and each by its name."""
    first = _head_of(policies[0]) | {"hardware": hardware()}
    if len(policies) == 1:
        return first
    slots = [dict(told, slot=f"{one.name}.{told['slot']}") for one in policies for told in _slots_of(one)]
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
