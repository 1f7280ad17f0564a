"""The slots of a running server: each a policy that can be exchanged, its processor, and the faults of a drill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import BUDGET, TIMES_FIXED, FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.robots import (
    ActionGuard,
    Fault,
    FaultyProcessor,
    GuardedProcessor,
    Policy,
    PolicySource,
    PolicySpec,
    load_policy,
    parse_fault,
)
from reflex_runtime.robots.policy.guard import OnBadAction
from reflex_runtime.robots.policy.rtc import Rtc
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.rollout.versions import SlotProcessor, Version
from reflex_runtime.run.onnx_session import PROVIDERS
from reflex_runtime.settings import ServeConfig

SHADOW = "shadow"
SHADOW_QUEUE = 16  # sampled requests that may wait for a gap
GAP_CHANCE = 0.5
WARM_SIZES = (1, 2, 4)
WATCHED = 4.0  # times what a batch is planned to take that a watchdog must give it


class Slot:
    """One slot: the version for new requests (`version`), and those that earlier requests still run on.

    Everything but `processor.run` happens on the event loop.
    """

    def __init__(self, name: str, config: ServeConfig, policy: Policy, faults: Sequence[Fault]) -> None:
        self.name, self._config = name, config
        self.faults = tuple(faults)
        self._faulty: WeakKeyDictionary[Version, FaultyProcessor] = WeakKeyDictionary()  # also of those to come
        self._made = 0
        self.version = self.made(policy)
        self.previous: Version | None = None  # kept while the guard watches the one that replaced it
        self.processor = SlotProcessor(self.version)
        self._leaving: list[Version] = []

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
        return 1 + (self.previous is not None) + len(self._leaving)

    def made(self, policy: Policy) -> Version:
        """Add a version; it gets requests after `exchange`."""
        config = self._config
        self._made += 1
        faulty = FaultyProcessor(policy, self.faults, config.inject_latency_ms / 1e3)
        on_bad_action: OnBadAction = "hold" if config.on_bad_action == "hold" else "error"
        guard = ActionGuard(policy.spec.embodiment, self.name, on_bad_action)
        version = Version(policy, GuardedProcessor(faulty, guard), self._made)
        self._faulty[version] = faulty
        return version

    def inject(self, faults: Sequence[Fault]) -> None:
        """From the next batch on these faults, and no others."""
        self.faults = tuple(faults)
        for faulty in self._faulty.values():
            faulty.faults = self.faults

    def exchange(self, version: Version, keep: bool = False) -> None:
        """New requests go to `version`. keep: the one before stays loaded, for `go_back`."""
        self.settle()
        self.processor.add(version)
        before, self.version = self.version, version
        if keep:
            self.previous = before
        else:
            self._leaving.append(before)

    def go_back(self) -> Version | None:
        """Send new requests to the version before again; None if there is none.

        Its stored chunks are from before the exchange.
        """
        if self.previous is None:
            return None
        before, self.previous = self.previous, None
        self._leaving.append(self.version)
        self.version = before
        before.policy.forget_all()
        return before

    def settle(self) -> None:
        """Give up the version before."""
        if self.previous is not None:
            self._leaving.append(self.previous)
            self.previous = None

    def let_go(self, active: Sequence[Any]) -> list[Version]:
        """Unload versions that are not in use, and return them. active: the group's partitions that hold tickets."""
        gone = [v for v in self._leaving if not v.users and v.policy.shape not in active]
        for version in gone:
            self._leaving.remove(version)
            self.processor.remove(version)
        return gone


def load(config: ServeConfig, slot: str, spec: PolicySource, group: str = "") -> Policy:
    """The policy of a source as the settings say. For a thread that may take long; ConfigError when it is wrong.

    group: of its requests, where it is not called as the slot.
    """
    rtc = Rtc(config.rtc_schedule, config.rtc_horizon) if config.rtc and slot != SHADOW else None  # type: ignore[arg-type]
    return load_policy(
        spec,
        slot=group or slot,
        device=device_of(config),
        cache_bytes=int(config.prefix_cache_mb * 2**20),
        max_age_chunks=config.prefix_max_age_chunks,
        rtc=rtc,
        adaptive=config.adaptive_steps,
    )


def device_of(config: ServeConfig) -> DeviceOptions:
    """How the settings say that models are loaded."""
    provider = PROVIDERS.get(config.provider, config.provider)
    dtype: Any = config.dtype
    return DeviceOptions(provider, config.threads, config.captured_sizes, dtype, config.compile)


def group_of(config: ServeConfig, slot: str, policy: Policy, weight: float = 1.0, tenant: str = "") -> GroupConfig:
    """How the scheduler is to treat a slot. Served slots share the device's time evenly; a shadow gets what is left.

    weight, tenant: of the policy, where there are several.
    """
    affine = config.cost_model == "affine"
    # Values alone, so that it keeps no policy.
    cost = partial(TimeCost, policy.stages, affine, policy.captured_sizes, padded_stages=policy.padded_stages)
    budget = None if config.max_batch_cost_ms is None else config.max_batch_cost_ms / 1e3
    hold = inf if config.batch_timeout_ms is None else config.batch_timeout_ms / 1e3
    if slot == SHADOW:
        # One request, one step at a time: what the others may wait for.
        alone = FlushPolicy.window(budget or BUDGET, 0.0, 1)
        return GroupConfig(
            name=policy.slot, flush=alone, capacity=SHADOW_QUEUE, weight=0.0, gap_chance=GAP_CHANCE, cost=cost
        )
    flush = FlushPolicy.window(budget, hold, config.max_batch_size)
    if budget is None:
        flush = replace(flush, times_fixed=_times_fixed(config, alone=not tenant))
    return GroupConfig(
        name=policy.slot,
        flush=flush,
        capacity=config.max_queue,
        max_queued_seconds=config.max_queue_s or inf,
        max_in_flight_per_client=config.max_in_flight_per_client,
        weight=weight,
        tenant=tenant,
        latest_only=config.latest_only,
        cost=cost,
        controller=Planner(),
    )


def _times_fixed(config: ServeConfig, alone: bool) -> float:
    """How many times its fixed part a batch may take. alone: whether there is no other policy, which would wait for
    it."""
    if 0.0 < config.watchdog_s < WATCHED * Planner.LONGEST:
        return 0.0
    return TIMES_FIXED if alone else Planner.SHARED


def check_alike(specs: Mapping[str, PolicySpec]) -> None:
    """Versions behind one router drive the same robot: ConfigError unless states and actions have the same sizes."""
    first_slot, first = next(iter(specs.items()))
    for slot, spec in specs.items():
        for name in ("state_dim", "action_dim"):
            if (found := getattr(spec, name)) != (expected := getattr(first, name)):
                raise ConfigError(
                    f"{spec.source}: {name}: found {found} for slot {slot}, expected {expected} as in {first.source} "
                    f"(slot {first_slot}): policies of one server drive the same robot"
                )


def faults_of(texts: Sequence[str], slots: Sequence[str], option: str) -> dict[str, list[Fault]]:
    """Faults by slot; ConfigError for a slot that is not served. option: what the texts were given as."""
    found: dict[str, list[Fault]] = {slot: [] for slot in slots}
    for text in texts:
        fault = parse_fault(text)
        if fault.slot not in found:
            raise ConfigError(f"{option}={text}: slot {fault.slot} is not served, only {', '.join(slots)}")
        found[fault.slot].append(fault)
    return found
