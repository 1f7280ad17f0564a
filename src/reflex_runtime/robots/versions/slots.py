"""The slots of a server: versions of a policy, their processors, the faults of a drill, and the hot swap.

Each loaded version of a slot's policy has its own partitions, so two versions never share a batch. Requests that were
prepared for the old version run on it, residents included; new requests go to the new version from the next batch on.
The old version is unloaded when none of its requests is left.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import numpy as np

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.flush import BUDGET, FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.robots.policy.base import Policy, PolicySource, WarmUp
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.policy.processors import ActionGuard, Fault, GuardedProcessor, parse_fault
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.sources.load import load_policy
from reflex_runtime.run.modules import told
from reflex_runtime.run.onnx_session import PROVIDERS
from reflex_runtime.run.processor import may_run_anywhere
from reflex_runtime.settings import ServeConfig

log = logging.getLogger("reflex.server")

SHADOW = "shadow"
SHADOW_QUEUE = 16  # sampled requests that may wait for a gap
GAP_CHANCE = 0.5  # see `GroupConfig`
WARM_SIZES = (1, 2, 4)  # batches of a warm-up


class Version:
    """One loaded policy of a slot and its processor.

    number: counts the slot's versions from 1; from the second on it is part of the policy's shape, so that versions
    share neither batches nor learned costs. users: requests that need it, counted by the server. name:
    `model_id@hash`. origin: fields of every answer: inference mode, model hash and config hash.
    """

    def __init__(self, policy: Policy, processor: GuardedProcessor, number: int = 1) -> None:
        if number > 1:
            policy.shape = f"{policy.shape} #{number}"
        self.policy, self.processor = policy, processor
        self.users = 0
        spec = policy.spec
        self.name = f"{spec.model_id}@{spec.model_hash}"
        self.origin = (spec.inference_mode, spec.model_hash, spec.config_hash)


class Slot:
    """One slot: the version for new requests (`version`), and those of earlier requests.

    It is the processor of its group, and runs each batch on the version that it was prepared for. `start`, `run`,
    `drop` and `stop` run on the device thread, everything else on the event loop; both use one dictionary, which is
    changed by atomic operations only. A later version is started on the device thread before its first batch.
    """

    repeatable = True

    def __init__(self, name: str, config: ServeConfig, policy: Policy, faults: Sequence[Fault]) -> None:
        self.name, self._config = name, config
        self.faults = list(faults)  # of all its versions, also of later ones
        self._made = 0
        self.version = self.made(policy)
        self.previous: Version | None = None  # kept while the guard watches the one that replaced it
        self._versions: dict[Hashable, Version] = {self.version.policy.shape: self.version}  # in memory
        self._started: set[Hashable] = set()

    @property
    def policy(self) -> Policy:
        """The policy for new requests."""
        return self.version.policy

    @property
    def group(self) -> str:
        """The name of its group in the scheduler, metrics and journals."""
        return self.policy.slot

    @property
    def loaded(self) -> int:
        """Versions in memory."""
        return len(self._versions)

    def made(self, policy: Policy) -> Version:
        """Add a version; it gets requests after `exchange`."""
        config = self._config
        self._made += 1
        guard = ActionGuard(policy.spec.embodiment, "hold" if config.on_bad_action == "hold" else "error")
        served = GuardedProcessor(policy, guard, self.faults, config.inject_latency_ms / 1e3)
        return Version(policy, served, self._made)

    def inject(self, faults: Sequence[Fault]) -> None:
        """Replace the faults from the next batch on."""
        self.faults[:] = faults

    def exchange(self, version: Version, keep: bool = False) -> None:
        """New requests go to `version`. keep: the present one stays loaded for `go_back`, as `previous`."""
        self._versions[version.policy.shape] = version
        self.previous, self.version = self.version if keep else None, version

    def go_back(self) -> Version | None:
        """Send new requests to the previous version again; None if there is none."""
        if self.previous is None:
            return None
        self.version, self.previous = self.previous, None
        self.forget()  # chunks and actions from before the exchange
        return self.version

    def forget(self, episode: str | None = None) -> None:
        """Forget what policies and guards keep of an episode, or of every one."""
        for version in list(self._versions.values()):
            version.policy.forget(episode)
            if version.processor.guard is not None:
                version.processor.guard.forget(episode)

    def let_go(self, active: Sequence[Any]) -> list[Version]:
        """Unload unused versions, and return them. active: the group's partitions that hold tickets."""
        kept = self.version, self.previous
        gone = [v for v in self._versions.values() if v not in kept and not v.users and v.policy.shape not in active]
        for version in gone:
            del self._versions[version.policy.shape]
        return gone

    # -- the processor -------------------------------------------------------------------------------------------------

    @property
    def any_thread(self) -> bool:
        """Whether calls of all its versions may run on any thread."""
        return all(may_run_anywhere(version.processor) for version in list(self._versions.values()))

    def start(self) -> None:
        self._started = set(self._versions)
        for version in list(self._versions.values()):
            version.processor.start()

    def run(self, batch: Batch) -> Sequence[Any]:
        key = batch.partition
        version = self._versions.get(key)
        if version is None:
            raise ProcessorError(f"no policy is loaded for {key}")
        if key not in self._started:
            version.processor.start()
            self._started.add(key)
        if others := [ticket for ticket in batch.left if ticket.request.partition != key]:
            self.drop(others)
            batch = replace(batch, left=tuple(t for t in batch.left if t.request.partition == key))
        return version.processor.run(batch)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for key, version in list(self._versions.items()):
            if mine := [ticket for ticket in tickets if ticket.request.partition == key]:
                version.processor.drop(mine)

    def stop(self) -> None:
        for version in list(self._versions.values()):
            version.processor.stop()


# Errors of code: they do not go away. Memory, a device or a file may be there at the next start.
MISTAKES: Final = (NameError, AttributeError, TypeError, ValueError, LookupError, ImportError, ArithmeticError)
GRAPH_MISTAKES: Final = ("InvalidArgument", "NotImplemented")  # onnxruntime, which is not imported here


def warmed_up(policy: Policy, wrong: tuple[type[BaseException], ...] = (Exception,)) -> WarmUp:
    """Warm a policy up; ConfigError for one that raises one of `wrong`, or none of whose answers is finite."""
    source = policy.spec.source
    try:
        ran = policy.warm_up(WARM_SIZES)
    except ConfigError:
        raise
    except Exception as error:  # a policy that fails on noise must not be served
        if type(error) is ProcessorError and error.__cause__ is None:  # its answer has another shape, and always will
            raise ConfigError(error.message) from None
        cause = (isinstance(error, ProcessorError) and error.__cause__) or error
        mistake = isinstance(cause, wrong) or type(cause).__name__ in GRAPH_MISTAKES
        raise (ConfigError if mistake else ProcessorError)(f"{source}: it does not answer: {told(cause)}") from error
    finite = [bool(np.isfinite(t.outcome.value.actions).all()) for t in ran.finished if isinstance(t.outcome, Done)]
    if not any(finite):
        raise ConfigError(f"{source}: NaN or infinity in all its answers to noise; see reflex doctor {source}")
    if not all(finite):
        log.warning("%s: NaN or infinity in some answers to noise; see reflex doctor %s", source, source)
    return ran


def load(config: ServeConfig, slot: str, spec: PolicySource, group: str = "") -> Policy:
    """The policy of a source by the settings. Slow; ConfigError when it is wrong. group: by default the slot."""
    if spec.takes_text and config.default_prompt is not None:
        spec = replace(spec, default_prompt=config.default_prompt)
    rtc = Rtc(config.rtc_schedule, config.rtc_horizon) if config.rtc and slot != SHADOW else None  # type: ignore[arg-type]
    return load_policy(
        spec,
        slot=group or slot,
        device=device_of(config),
        cache_bytes=int(config.prefix_cache_mb * 2**20),
        max_age_chunks=config.prefix_max_age_chunks,
        rtc=rtc,
        adaptive=config.adaptive_steps,
        rows=config.deterministic,
    )


def device_of(config: ServeConfig) -> DeviceOptions:
    """How the settings load models."""
    provider, dtype = PROVIDERS.get(config.provider, config.provider), cast(Any, config.dtype)
    return DeviceOptions(provider, config.threads, config.captured_sizes, dtype, config.compile)


def group_of(config: ServeConfig, slot: str, policy: Policy, weight: float = 1.0, tenant: str = "") -> GroupConfig:
    """A slot's group in the scheduler. Served slots share the device's time evenly; a shadow gets the rest.

    weight, tenant: of one of several policies.
    """
    # Of values alone, so that it keeps no policy in memory.
    cost = partial(TimeCost, policy.stages, sizes=policy.captured_sizes, padded_stages=policy.padded_stages)
    if slot == SHADOW:
        # One request, one step at a time: so long, at most, other groups wait.
        budget = BUDGET if config.max_batch_cost_ms is None else config.max_batch_cost_ms / 1e3
        return GroupConfig(
            name=policy.slot,
            flush=FlushPolicy.window(budget, 0.0, 1),
            capacity=SHADOW_QUEUE,
            weight=0.0,
            gap_chance=GAP_CHANCE,
            cost=partial(cost, affine=config.cost_model == "affine"),
        )
    return config.group(policy.slot, cost, weight, tenant)


def check_alike(specs: Mapping[str, PolicySpec]) -> None:
    """ConfigError unless states and actions have the same sizes: versions behind one router drive the same robot."""
    first_slot, first = next(iter(specs.items()))
    for slot, spec in specs.items():
        for name in ("state_dim", "action_dim"):
            if (found := getattr(spec, name)) != (expected := getattr(first, name)):
                raise ConfigError(
                    f"{spec.source}: {name}: found {found} for slot {slot}, expected {expected} as in {first.source} "
                    f"(slot {first_slot}): policies of one server drive the same robot"
                )


def faults_of(texts: Sequence[str], slots: Sequence[str], option: str) -> dict[str, list[Fault]]:
    """Faults by slot; ConfigError for a slot that is not served. option: the option that gave the texts."""
    found: dict[str, list[Fault]] = {slot: [] for slot in slots}
    for text in texts:
        fault = parse_fault(text, option)
        if fault.slot not in found:
            raise ConfigError(f"{option}={text}: slot {fault.slot} is not served, only {', '.join(slots)}")
        found[fault.slot].append(fault)
    return found
