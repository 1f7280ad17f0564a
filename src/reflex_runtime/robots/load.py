"""Loads a policy of any source into a processor that a driver runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import Policy
from reflex_runtime.robots.policy.decomposed import CACHE_BYTES, DecomposedPolicy
from reflex_runtime.robots.policy.faults import Fault, FaultyProcessor
from reflex_runtime.robots.policy.guard import ActionGuard, GuardedProcessor
from reflex_runtime.robots.policy.model import PolicySource, WholeModel
from reflex_runtime.robots.policy.monolithic import MonolithicPolicy
from reflex_runtime.robots.policy.rtc import Rtc
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.robots.source import read_source
from reflex_runtime.run.processor import Processor


def load_policy(
    source: PolicySource | str | Path,
    slot: str = "prod",
    *,
    device: DeviceOptions | None = None,
    cache_bytes: int = CACHE_BYTES,
    max_age_chunks: int = 0,
    rtc: Rtc | None = None,
    adaptive: bool = False,
) -> Policy:
    """The policy of a source, of the kind it is. source: as in `read_source`.

    device: how the model is loaded. cache_bytes, max_age_chunks, rtc, adaptive: as in `DecomposedPolicy`. A whole
    model has no prefix and denoises inside its call, so it has no cache and refuses the other two.

    ConfigError if the files or the model are wrong, or if they do not match.
    """
    spec = source if isinstance(source, PolicySource) else read_source(source)
    if not spec.staged:
        for flag, given in (("--rtc", rtc is not None), ("--adaptive-steps", adaptive)):
            if given:
                raise ConfigError(
                    f"{flag}: {spec.source} is {spec.inference_mode}; only decomposed policies denoise step by step"
                )
    model = spec.open(device or DeviceOptions())
    if isinstance(model, WholeModel):
        return MonolithicPolicy(model, slot)
    return DecomposedPolicy(
        model, slot, cache_bytes=cache_bytes, max_age_chunks=max_age_chunks, rtc=rtc, adaptive=adaptive
    )


def served_by(
    policy: Policy, guard: ActionGuard | None = None, faults: Iterable[Fault] = (), latency: float = 0.0
) -> Processor:
    """The processor to serve: the policy, then the faults of its slot, then the guard.

    guard: by default one for the policy's embodiment that answers bad actions with errors. faults: only those of this
    slot are used. latency: seconds added to every batch.
    """
    mine = [fault for fault in faults if fault.slot == policy.slot]
    inner: Processor = FaultyProcessor(policy, mine, latency) if mine or latency else policy
    return GuardedProcessor(inner, guard or ActionGuard(policy.spec.embodiment, policy.slot))
