"""Exchanges policies in the slots of a running server: load, warm up, switch, go back, unload."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import Policy, PolicySpec, WarmUp
from reflex_runtime.robots.rollout.rollout import Rollout
from reflex_runtime.robots.rollout.versions import Version
from reflex_runtime.robots.serving.slots import WARM_SIZES, Slot, check_alike, load
from reflex_runtime.robots.sources.load import read_source, weight_of
from reflex_runtime.robots.sources.memory import check_two_policies
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.onnx_session import PROVIDERS
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import ServeConfig
from reflex_runtime.settings.read import environment
from reflex_runtime.web.errors import Conflict, NotFound

log = logging.getLogger("reflex.server")


@dataclass(frozen=True, slots=True)
class LoadedBeside:
    """A version that is ready for a slot, and what running it has taught."""

    version: Version
    warm: WarmUp


class Exchanging:
    """Exchanges what is in the slots of one policy. `KeptExchanges` decides whether it stays.

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
        self.loading = 0

    async def load(self, name: str, source: str) -> LoadedBeside:
        """Load the policy of this source beside what the slot has, and warm it. ConfigError if it does not fit."""
        if name not in self._slots:
            raise NotFound(f"no slot {name[:20]!r}; the slots are {', '.join(self._slots)}")
        if self._config.captured_sizes:
            raise Conflict("with --cuda-graphs no policy can be exchanged; restart the server with the other policy")
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
        return LoadedBeside(version, warm)

    def switch(self, name: str, beside: LoadedBeside, keep: bool) -> None:
        """New requests of the slot go to this version. keep: the one before stays loaded, for `go_back`."""
        slot = self._slots[name]
        self._batcher.device.input(lambda scheduler, now: beside.warm.teach(scheduler.cost_model(slot.group)))
        slot.exchange(beside.version, keep)
        self._rollout.exchanged(name, time.monotonic())

    def go_back(self, name: str) -> str | None:
        """New requests go to the version before again. Returns its name; None if none was kept."""
        back = self._slots[name].go_back()
        if back is None:
            return None
        self._rollout.exchanged(name, time.monotonic())
        return back.name

    def settle(self, name: str) -> None:
        """The version before is needed no more."""
        self._slots[name].settle()

    def unload(self) -> None:
        """Call it once a second: unload versions that no request needs any more."""
        for name, slot in self._slots.items():
            if slot.loaded > 1:
                for version in slot.let_go(self._active(slot.group)):
                    log.info("slot %s: %s is unloaded", name, version.name)

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
