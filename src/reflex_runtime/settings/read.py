"""Where settings come from. Later ones win: defaults, the TOML file, the environment (`REFLEX_` + name), flags."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import FeedsConfig, FunctionsConfig, LLMServeConfig, OwnSettings, ServeConfig
from reflex_runtime.settings.declare import Places, check_needs, convert, did_you_mean, flag, hints_of, one_line

log = logging.getLogger("reflex.config")

C = TypeVar("C")

POLICIES = "policies"  # the section of a file that has a table for each of several policies


def load(
    kind: type[C],
    section: str,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    beside: tuple[str, ...] = (),
) -> C:
    """The settings from all sources. Raises ConfigError with the source of the value.

    beside: further tables that the file may have, for other parts.
    """
    config, places = read(kind, section, file, environ, flags, beside)
    check_needs(config, places)
    return config


def read(
    kind: type[C],
    section: str,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    beside: tuple[str, ...] = (),
) -> tuple[C, Places]:
    """As `load`, and where each setting was given; `check_needs` is left to the command, which has facts of its own."""
    hints = hints_of(kind)
    metas = {f.name: f.metadata for f in fields(kind)}  # type: ignore[arg-type]
    names = metas.keys()
    values: dict[str, Any] = {}
    places: dict[str, str] = {}

    def give(name: str, value: Any, place: str) -> None:
        values[name], places[name] = convert(value, hints[name], place, metas[name]), place

    for key, value in (_table(file, section, beside) if file is not None else {}).items():
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(f"{file}: [{section}] {key}: is given twice, with - and with _; keep one")
        if name not in names:
            hint = _elsewhere(name) or did_you_mean(name, names)
            raise ConfigError(f"{file}: [{section}] {key}: no such setting{hint}")
        give(name, value, f"{file}: [{section}] {key}")
    for name in names & _settings_in(environ).keys():
        give(name, environ["REFLEX_" + name.upper()], "REFLEX_" + name.upper())
    for name in names & flags.keys():
        give(name, flags[name], flag(name))
    for f in fields(kind):  # type: ignore[arg-type]
        if f.metadata.get("secret") and f.name in values and not values[f.name].strip():
            raise ConfigError(f"{places[f.name]} is empty: give a key, or leave it out", field=f.name)
    return kind(**values), places


def _elsewhere(name: str) -> str:
    """The end of an error about an unknown setting: which other commands have it, if any."""
    kinds = {"policies": ServeConfig, "language models": LLMServeConfig, "functions": FunctionsConfig}
    own = [what for what, kind in kinds.items() if name in {f.name for f in fields(kind)}]
    return f"; it is a setting of {' and '.join(own)}" if own else ""


def own_settings(
    file: Path | None, section: str, name: str, table: Mapping[str, Any], config: C, may: Collection[str]
) -> tuple[OwnSettings, C, Places]:
    """A table [SECTION.NAME]: its own options, and `config` with its settings. may: settings that it may have."""
    values: dict[str, dict[str, Any]] = {"own": {}, "settings": {}}
    places: dict[str, str] = {}
    own = {f.name for f in fields(OwnSettings)}
    hints = {**hints_of(type(config)), **hints_of(OwnSettings)}
    where = f"{file}: [{section}.{name}]"
    for key, value in table.items():
        setting = key.replace("-", "_")
        if setting not in own | set(may):
            if setting in hints:
                raise ConfigError(f"{where} {key}: is a setting of the whole server; write it into [serve]")
            raise ConfigError(f"{where} {key}: no such setting{did_you_mean(setting, own | set(may))}")
        if setting in places:
            raise ConfigError(f"{where} {key}: is given twice, with - and with _; keep one")
        places[setting] = f"{where} {key}"
        found = convert(value, hints[setting], places[setting])
        values["own" if setting in own else "settings"][setting] = found
    try:
        return OwnSettings(**values["own"]), replace(config, **values["settings"]), places  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def tables_of(file: Path | None, section: str) -> dict[str, dict[str, Any]]:
    """The tables [SECTION.NAME] of a file, by name."""
    found = {} if file is None else read_toml(file).get(section, {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise ConfigError(f"{file}: [{section}]: must only have tables [{section}.NAME]")
    return found


OTHERS = frozenset({"SKIP_2POLICY_MEMORY_CHECK", "DISABLE_GENERATE_BATCHING"})  # variables that are no settings
_SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of the environment by name, of any command; warns of unknown variables.

    Kubernetes describes a service called reflex in variables such as REFLEX_PORT=tcp://10.0.0.1:80: they are ignored.
    """
    kinds = (ServeConfig, LLMServeConfig, FeedsConfig, FunctionsConfig)
    known = {f.name for kind in kinds for f in fields(kind)}
    found = {}
    for variable, text in environ.items():
        rest = variable.removeprefix("REFLEX_")
        if rest == variable or rest in OTHERS:
            continue
        if _SERVICE.fullmatch(rest) and (rest != "PORT" or _SERVICE_URL.match(text)):
            continue
        if rest.lower() in known and rest.isupper():
            found[rest.lower()] = text
        else:
            names = [name.upper() for name in known] + list(OTHERS)
            log.warning("%s: no such setting%s", variable, did_you_mean(rest.upper(), names, "REFLEX_"))
    return found


def read_toml(file: Path) -> dict[str, Any]:
    """The file's tables. Raises ConfigError if it cannot be read."""
    try:
        return tomllib.loads(_piped(file, file.stat().st_ino) if file.is_fifo() else file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config={file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config={file}: not TOML: {error}") from error


@cache
def _piped(file: Path, inode: int) -> str:
    """The text of a pipe (`--config <(...)`), kept because it can be read only once."""
    return file.read_text(encoding="utf-8")


def _table(file: Path, section: str, beside: tuple[str, ...]) -> dict[str, Any]:
    tables = read_toml(file)
    stray = next((name for name in tables if name != section and name not in beside), None)
    if stray is not None and not isinstance(tables[stray], dict | list):
        raise ConfigError(f"{file}: {one_line(stray)}: is in no table; write it below [{section}]")
    if stray is not None:  # settings of a misspelt table would silently have their defaults
        known = (section, *beside)
        near = did_you_mean(stray, known)
        raise ConfigError(f"{file}: {one_line(stray)}: no such table; there may be {' and '.join(known)}{near}")
    found = tables.get(section, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: [{section}] must be a table")
    return found


def environment() -> Mapping[str, str]:
    """The process environment, in one place so that tests can pass another."""
    return os.environ
