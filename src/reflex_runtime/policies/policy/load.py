"""Loads an export directory into a processor that a driver runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.export.directory import Export
from reflex_runtime.policies.policy.base import Policy
from reflex_runtime.policies.policy.decomposed import CACHE_BYTES, DecomposedPolicy
from reflex_runtime.policies.policy.faults import Fault, FaultyProcessor
from reflex_runtime.policies.policy.guard import ActionGuard, GuardedProcessor
from reflex_runtime.policies.policy.monolithic import MonolithicPolicy
from reflex_runtime.policies.policy.rtc import Rtc
from reflex_runtime.processors.base import Processor
from reflex_runtime.processors.onnx import CPU


def load_policy(
    export: Export | str | Path,
    slot: str = "prod",
    *,
    cache_bytes: int = CACHE_BYTES,
    max_age_chunks: int = 0,
    provider: str = CPU,
    threads: int = 1,
    captured_sizes: Sequence[int] = (),
    rtc: Rtc | None = None,
    adaptive: bool = False,
) -> Policy:
    """The policy of an export, of the kind it is. cache_bytes and max_age_chunks matter to decomposed ones only.

    provider, threads, captured_sizes: as in `OnnxSession`. rtc, adaptive: as in `DecomposedPolicy`; a monolithic export
    denoises inside its graph, so it has neither.

    ConfigError if the directory or a graph is wrong, or if they do not match.
    """
    if not isinstance(export, Export):
        export = Export.load(export)
    if export.export_kind == "monolithic":
        for flag, given in (("--rtc", rtc is not None), ("--adaptive-steps", adaptive)):
            if given:
                raise ConfigError(f"{flag}: {export.path} is monolithic; only decomposed exports denoise step by step")
        return MonolithicPolicy(export, slot, provider=provider, threads=threads, captured_sizes=captured_sizes)
    return DecomposedPolicy(
        export,
        slot,
        cache_bytes=cache_bytes,
        max_age_chunks=max_age_chunks,
        provider=provider,
        threads=threads,
        captured_sizes=captured_sizes,
        rtc=rtc,
        adaptive=adaptive,
    )


def served_by(
    policy: Policy, guard: ActionGuard | None = None, faults: Iterable[Fault] = (), latency: float = 0.0
) -> Processor:
    """The processor to serve: the policy, then the faults of its slot, then the guard.

    guard: by default one for the export's embodiment that answers bad actions with errors. faults: only those of this
    slot are used. latency: seconds added to every batch.
    """
    mine = [fault for fault in faults if fault.slot == policy.slot]
    inner: Processor = FaultyProcessor(policy, mine, latency) if mine or latency else policy
    return GuardedProcessor(inner, guard or ActionGuard(policy.export.embodiment, policy.slot))
