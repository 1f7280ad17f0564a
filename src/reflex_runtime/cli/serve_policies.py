"""What `reflex serve` serves: SOURCE, `--policy NAME=SOURCE` and the tables [policies.NAME], each checked by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reflex_runtime.cli.serving import told_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import policy_source
from reflex_runtime.settings import DEFAULT_POLICY, MAX_POLICIES, OWN_SETTINGS, ServeConfig
from reflex_runtime.settings.declare import Places, check_needs, one_line
from reflex_runtime.settings.read import POLICIES, environment, own_settings, tables_of

if TYPE_CHECKING:
    from reflex_runtime.robots import PolicySource
    from reflex_runtime.robots.serving.served import PolicyPlan

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class PolicyAsked:
    """One policy as the command line and the file ask for it.

    sources: by slot, served ones first. config: with its own settings; places: where those were given. where: begins
    its errors, "" where there is no other policy.
    """

    name: str
    sources: Mapping[str, str]
    config: ServeConfig
    places: Places
    weight: float
    where: str


def policies_of(config: ServeConfig, source: str | None, file: Path | None = None) -> list[PolicyAsked]:
    """Every policy, that of SOURCE first; ConfigError when the options contradict each other."""
    tables = tables_of(file, POLICIES)
    plain = source is not None or bool(config.policy_a or config.policy_b)
    named = _named(config.policy)
    if plain and DEFAULT_POLICY in named:
        raise ConfigError(f"--policy={DEFAULT_POLICY}=…: SOURCE has this name already; leave one of the two out")
    names = list(dict.fromkeys([*([DEFAULT_POLICY] if plain else []), *named, *tables])) or [DEFAULT_POLICY]
    if len(names) > MAX_POLICIES:
        raise ConfigError(f"--policy: {len(names)} policies are named, at most {MAX_POLICIES} are served")
    found = []
    for name in names:
        where = f"policy {_checked_name(name)}: " if len(names) > 1 else ""
        base = config
        if not (plain and name == DEFAULT_POLICY):
            base = replace(config, policy_a="", policy_b="", shadow_policy="")
        own, settings, places = own_settings(file, POLICIES, name, tables.get(name, {}), base, OWN_SETTINGS)
        settings = replace(settings, inject_fault=_faults(config.inject_fault, name, names))
        given = source if plain and name == DEFAULT_POLICY else named.get(name) or own.source or None
        with told_of(where):
            found.append(PolicyAsked(name, slots_of(settings, given), settings, places, own.weight, where))
    return found


def _named(texts: Sequence[str]) -> dict[str, str]:
    """The sources of --policy, by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not (equals and name and source):
            raise ConfigError(f"--policy={one_line(text)}: must be NAME=SOURCE, such as arm=./my-export")
        if _checked_name(name) in found:
            raise ConfigError(f"--policy={one_line(text)}: {name} is named twice")
        found[name] = source
    return found


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--policy={one_line(name)}=…: the name must be 1 to 32 letters, digits, - and _, not begin with - or _"
        )
    return name


def _faults(texts: Sequence[str], name: str, names: Sequence[str]) -> tuple[str, ...]:
    """The faults of one policy, whose slots are NAME.SLOT where there are several."""
    if len(names) == 1:
        return tuple(texts)
    for text in texts:
        of = text.partition(".")[0] if "." in text.partition(":")[0] else ""
        if of not in names:
            raise ConfigError(f"--inject-fault={one_line(text)}: must begin with NAME.SLOT, NAME of {', '.join(names)}")
    return tuple(text.partition(".")[2] for text in texts if text.startswith(f"{name}."))


def slots_of(config: ServeConfig, source: str | None) -> dict[str, str]:
    """The source of every slot, served ones first; ConfigError when the options contradict each other."""
    from reflex_runtime.robots.sources.load import directory_of

    a, b, shadow = map(policy_source, (config.policy_a, config.policy_b, config.shadow_policy))
    if bool(a) != bool(b):
        missing, given = ("--policy-b", "--policy-a") if a else ("--policy-a", "--policy-b")
        raise ConfigError(f"{given} needs {missing}: two policies are served side by side, or one as SOURCE")
    if b and shadow:
        raise ConfigError("--shadow-policy does not go with --policy-b: serve a and b, or one policy and its shadow")
    if not a and source is None:
        raise ConfigError("SOURCE is missing: reflex serve DIR, or --policy-a DIR --policy-b DIR")
    if a and source is not None and not _same(source, a):
        raise ConfigError(f"SOURCE={source}: must be that of --policy-a={a}, or left out")
    for flag, given in (("--policy-a", a), ("--policy-b", b), ("--shadow-policy", shadow)):
        if given and not os.path.isdir(directory_of(given)):
            raise ConfigError(f"{flag}={one_line(given)}: no such directory, expected an export (docs/exports.md)")
    if b and config.rtc is None:
        raise ConfigError(
            "two policies need --no-rtc, or --rtc with --rtc-per-episode: a chunk carried over from one policy to the "
            "other would be a jump"
        )
    if b and config.rtc and not config.rtc_per_episode:
        raise ConfigError("--rtc with two policies needs --rtc-per-episode: nothing may be carried over between them")
    found = {"a": a, "b": b} if b else {"prod": policy_source(source or "")}
    return found | ({"shadow": shadow} if shadow else {})


def _same(one: str, other: str) -> bool:
    """Whether two sources are the same, however their directory is written."""
    from reflex_runtime.robots.sources.load import directory_of

    return one == other or directory_of(one).resolve() == directory_of(other).resolve()


# -- before anything is loaded -----------------------------------------------------------------------------------------


def plans_of(
    config: ServeConfig, places: Places, asked: Sequence[PolicyAsked]
) -> list[PolicyPlan]:
    """What is served. ConfigError for what can be found before anything is loaded."""
    from reflex_runtime.robots import read_source
    from reflex_runtime.robots.serving.served import PolicyPlan
    from reflex_runtime.robots.versions.slots import device_of

    check_memory(asked)
    plans = []
    for policy in asked:
        with told_of(policy.where):
            device = device_of(policy.config)
            specs = {slot: read_source(source, device) for slot, source in policy.sources.items()}
            plans.append(PolicyPlan(policy.name, policy.config, specs, policy.weight))
    check_needs(config, places, _missing([spec for plan in plans for spec in plan.specs.values()]))
    for policy, plan in zip(asked, plans, strict=True):
        check_needs(policy.config, policy.places, _missing(list(plan.specs.values())))
        with told_of(policy.where):
            _check_device(policy.config, plan.specs)
            _check(policy.config, plan.specs)
    return plans


def _missing(specs: Sequence[PolicySource]) -> dict[str, str]:
    """The facts that settings need and that do not hold; see `check_needs`."""
    from reflex_runtime.robots import Export

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
    from reflex_runtime.robots.sources.load import weight_of
    from reflex_runtime.robots.sources.memory import check_two_policies
    from reflex_runtime.run.onnx_session import PROVIDERS

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
    from reflex_runtime.robots.versions.ramp import Ramp, RampGuard
    from reflex_runtime.robots.versions.slo import Objective

    if config.slo:
        Objective.parse(config.slo)
    if config.guard:
        RampGuard.parse(config.guard)
    Ramp.every_of(config.ramp_every)
    if config.ramp:
        Ramp.shares_of(config.ramp)
    _check_specs(config, specs)


def _check_device(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    from reflex_runtime.robots import Export
    from reflex_runtime.run.onnx_session import CPU, CUDA, PROVIDERS, check_provider

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
    from reflex_runtime.robots.versions.slots import check_alike, faults_of

    faults_of(config.inject_fault, tuple(specs), "--inject-fault")
    check_alike(specs)
    for spec in specs.values():
        spec.check()
        for flag, given in (("--rtc", config.rtc), ("--adaptive-steps", config.adaptive_steps)):
            if given and not spec.staged:
                why = "only decomposed policies denoise step by step"
                raise ConfigError(f"{flag}: {spec.source} is monolithic, and {why}; leave {flag} out")
