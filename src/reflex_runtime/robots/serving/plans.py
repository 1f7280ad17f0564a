"""What is served, of the policies that are asked for: what is wrong with them is said before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.model import PolicySource
from reflex_runtime.robots.serving.runtime import PolicyPlan
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.load import read_source, weight_of
from reflex_runtime.robots.sources.memory import check_two_policies
from reflex_runtime.robots.versions.ramp import Ramp, RampGuard
from reflex_runtime.robots.versions.slo import Objective
from reflex_runtime.robots.versions.slots import check_alike, device_of, faults_of
from reflex_runtime.run.onnx_session import CPU, CUDA, PROVIDERS, check_provider
from reflex_runtime.settings import PolicyAsked, ServeConfig
from reflex_runtime.settings.declare import Places, check_needs, one_line
from reflex_runtime.settings.read import environment


def plans_of(config: ServeConfig, places: Places, asked: Sequence[PolicyAsked]) -> list[PolicyPlan]:
    """What is served. ConfigError for what can be found before anything is loaded."""
    check_memory(asked)
    plans = []
    for policy in asked:
        with policy.named():
            device = device_of(policy.config)
            specs = {slot: read_source(source, device) for slot, source in policy.sources.items()}
            plans.append(PolicyPlan(policy.name, policy.config, specs, policy.weight))
    check_needs(config, places, _missing([spec for plan in plans for spec in plan.specs.values()]))
    for policy, plan in zip(asked, plans, strict=True):
        check_needs(policy.config, policy.places, _missing(list(plan.specs.values())))
        with policy.named():
            _check_device(policy.config, plan.specs)
            _check(policy.config, plan.specs)
    return plans


def _missing(specs: Sequence[PolicySource]) -> dict[str, str]:
    """The facts that settings need and that do not hold; see `check_needs`."""
    told = ", ".join(spec.source for spec in specs)
    missing = {}
    if not any(spec.staged for spec in specs):
        missing["a decomposed export"] = f"{told} is monolithic"
    if not any(spec.takes_text for spec in specs):
        missing["a policy that takes an instruction"] = f"{told} takes none"
    if all(isinstance(spec, Export) for spec in specs):
        missing["a model in PyTorch"] = f"{told} is an ONNX export"
    return missing


def check_memory(asked: Sequence[PolicyAsked]) -> None:
    """Whether all policies fit, by the sizes of their files: nothing of them has been read yet."""

    def provider_of(policy: PolicyAsked) -> str:
        return PROVIDERS.get(policy.config.provider, policy.config.provider)

    for provider, group in groupby(sorted(asked, key=provider_of), provider_of):
        sizes = [[weight_of(source) for source in policy.sources.values()] for policy in group]
        needs = [len(slots) * max(slot.model_bytes for slot in slots) for slots in sizes]
        if sum(map(len, sizes)) > 1:
            largest = max(range(len(sizes)), key=needs.__getitem__)
            slots, beside = sizes[largest], sum(needs) - needs[largest]
            check_two_policies(slots, environment(), provider, policies=len(slots), beside=beside)


def _check(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    """What of one policy takes more than a range."""
    if config.slo:
        Objective.parse(config.slo)
    if config.guard:
        RampGuard.parse(config.guard)
    Ramp.every_of(config.ramp_every)
    if config.ramp:
        Ramp.shares_of(config.ramp)
    _check_specs(config, specs)


def _check_device(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    provider = PROVIDERS.get(config.provider, config.provider)
    try:
        # ONNX Runtime has no say in policies that it does not run: torch may have CUDA where it has none.
        if provider not in (CPU, CUDA) or any(isinstance(spec, Export) for spec in specs.values()):
            check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    if config.cuda_graphs and provider != CUDA:
        raise ConfigError(
            f"--cuda-graphs={config.cuda_graphs}: {provider} has no graphs to capture; leave the option out"
        )


def _check_specs(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    """What the sources allow."""
    faults_of(config.inject_fault, tuple(specs), "--inject-fault")
    check_alike(specs)
    for spec in specs.values():
        spec.check()
        for flag, given in (("--rtc", config.rtc), ("--adaptive-steps", config.adaptive_steps)):
            if given and not spec.staged:
                why = "only decomposed policies denoise step by step"
                raise ConfigError(f"{flag}: {spec.source} is monolithic, and {why}; leave {flag} out")
