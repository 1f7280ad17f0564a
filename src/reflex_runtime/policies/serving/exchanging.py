"""Exchanges policies in the slots of a running server: load, warm up, switch, go back, unload."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

from reflex_runtime.config import ServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.policies import Policy, PolicySpec, WarmUp
from reflex_runtime.policies.export.memory import check_two_policies
from reflex_runtime.policies.rollout.ramp import Ramp
from reflex_runtime.policies.rollout.rollout import Rollout
from reflex_runtime.policies.rollout.versions import Version
from reflex_runtime.policies.serving.slots import SHADOW, WARM_SIZES, Slot, check_alike, load
from reflex_runtime.policies.source import read_source, weight_of
from reflex_runtime.processors.onnx import PROVIDERS
from reflex_runtime.sources import environment
from reflex_runtime.web.errors import Conflict, NotFound

log = logging.getLogger("reflex.server")


class Exchanging:
    """Exchanges what is in the slots of one policy.

    in_memory: the slots of the whole server. loading: number of loads in progress, abandoned ones included.
    """

    def __init__(
        self,
        config: ServeConfig,
        slots: Mapping[str, Slot],
        batcher: Batcher,
        rollout: Rollout,
        in_memory: Callable[[], Sequence[Slot]],
    ) -> None:
        self._config, self._slots, self._batcher, self._rollout = config, slots, batcher, rollout
        self._in_memory = in_memory
        self._watch_until: dict[str, float] = {}
        self.loading = 0

    async def exchange(self, name: str, source: str) -> Version:
        """Load the policy of this source beside, warm it, switch. ConfigError leaves everything as it is."""
        if name not in self._slots:
            raise NotFound(f"no slot {name[:20]!r}; the slots are {', '.join(self._slots)}")
        if self._config.captured_sizes:
            raise Conflict("with --cuda-graphs no policy can be exchanged; restart the server with the other policy")
        self._rollout.may_exchange()
        slot = self._slots[name]
        await in_thread(lambda: self._has_room(source))
        spec = await in_thread(lambda: read_source(source))
        self._check_fits(slot, spec)
        self.loading += 1  # if this is cancelled, the thread goes on
        try:
            policy = await in_thread(lambda: load(self._config, name, spec, slot.group))
            version = slot.made(policy)
            warm = await in_thread(lambda: _warmed(policy))
        except Exception:
            self.loading -= 1
            raise
        self.loading -= 1
        self._batcher.device.input(lambda scheduler, now: warm.teach(scheduler.cost_model(slot.group)))
        self._switch(slot, version)
        return version

    def look(self, now: float) -> None:
        """Call it once a second: go back if a guard triggered, unload versions that are no longer needed."""
        for name in self._rollout.evaluate(now):
            back = self._slots[name].go_back()
            if back is not None:
                self._rollout.exchanged(name, now)
                numbers = {"slot": name, "version": back.name}
                self._rollout.changed(now, "load", f"slot {name} is {back.name} again: the guard tripped", numbers)
        for name, until in list(self._watch_until.items()):
            if now >= until and self._rollout.watched_enough(name):
                del self._watch_until[name]
                self._rollout.unwatch(name, now)
                self._slots[name].settle()
        for name, slot in self._slots.items():
            if slot.loaded > 1:
                for version in slot.let_go(self._active(slot.group)):
                    log.info("slot %s: %s is unloaded", name, version.name)

    def _switch(self, slot: Slot, version: Version) -> None:
        name, now = slot.name, time.monotonic()
        guarded = bool(self._config.guard) and name != SHADOW
        slot.exchange(version, keep=guarded)
        self._rollout.exchanged(name, now)
        if guarded:
            self._rollout.watch(name)
            self._watch_until[name] = now + Ramp.every_of(self._config.ramp_every)
        numbers = {"slot": name, "version": version.name, "path": version.policy.spec.source}
        self._rollout.changed(now, "load", f"slot {name} is now {version.name}", numbers)

    def _check_fits(self, slot: Slot, spec: PolicySpec) -> None:
        """ConfigError when a policy cannot take the place of what the slot has."""
        others = {name: held.policy.spec for name, held in self._slots.items()}
        check_alike({**others, f"{slot.name} (new)": spec})
        expected = slot.policy.spec.inference_mode
        if spec.inference_mode != expected:
            raise ConfigError(
                f"{spec.source}: export_kind: found {spec.inference_mode!r}, expected {expected!r} as in slot "
                f"{slot.name}, whose batch costs were learned so: restart the server to serve the other kind"
            )

    def _has_room(self, source: str) -> None:
        """ConfigError when the policy of this source does not fit the memory beside the others, by file sizes."""
        provider = PROVIDERS.get(self._config.provider, self._config.provider)
        own = list(self._slots.values())
        beside = sum(slot.loaded * slot.policy.spec.model_bytes for slot in self._in_memory() if slot not in own)
        loaded, count = [slot.policy.spec for slot in own], sum(slot.loaded for slot in own)
        check_two_policies([*loaded, weight_of(source)], environment(), provider, policies=count + 1, beside=beside)

    def _active(self, group: str) -> list[Hashable]:
        """Partitions of a slot's group that hold tickets; the device thread changes them."""
        found: list[Hashable] = self._batcher.device.input(lambda scheduler, now: scheduler.partitions(group))
        return found


def _warmed(policy: Policy) -> WarmUp:
    try:
        return policy.warm_up(WARM_SIZES)
    except ConfigError:
        raise
    except Exception as error:  # a policy that fails on noise must not be served
        raise ConfigError(f"{policy.spec.source}: it does not answer: {error}") from error
