"""What `reflex serve` serves: SOURCE, `--policy NAME=SOURCE` and the tables [policies.NAME], each checked by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import policy_source
from reflex_runtime.settings import DEFAULT_POLICY, MAX_POLICIES, OWN_SETTINGS, PolicyAsked, ServeConfig
from reflex_runtime.settings.declare import one_line
from reflex_runtime.settings.read import POLICIES, own_settings, tables_of

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


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
        asked = PolicyAsked(name, {}, settings, places, own.weight, where)
        with asked.named():
            found.append(replace(asked, sources=slots_of(settings, given)))
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
        raise ConfigError(
            "SOURCE is missing: demo or scribe, which are bundled, DIR, FILE.onnx or python:MODULE:NAME; or --policy-a "
            "DIR --policy-b DIR"
        )
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
