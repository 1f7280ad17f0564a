"""Settings that are declared once: a dataclass field has the default, unit and range.

Validation, flags, help and the table at start-up are made from the fields.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from math import inf
from typing import TYPE_CHECKING, Any, get_type_hints

from reflex_runtime.core.errors import ConfigError

if TYPE_CHECKING:
    import argparse

log = logging.getLogger("reflex.config")

LONGEST_WORD = 64  # characters; the search for a near word takes long for longer ones

Places = Mapping[str, str]  # setting → where it was given: --split, REFLEX_SPLIT, or reflex.toml: [serve] split
_HINTS: dict[Any, dict[str, Any]] = {}


def hints_of(kind: type[Any]) -> Mapping[str, Any]:
    """The types of a class of settings, by name. Cached: evaluating the annotations takes milliseconds."""
    return _HINTS.get(kind) or _HINTS.setdefault(kind, get_type_hints(kind))


def option(
    default: Any,
    help: str = "",
    within: tuple[float, float] | tuple[float, float, str] | None = None,
    *,
    above: bool = False,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    bare: str | None = None,
    secret: bool = False,
    repeat: bool = False,
    needs: str = "",
    unless: str = "",
    group: str = "",
) -> Any:
    """A settings field. help: what it does. within: its range: least and most, both allowed, and the unit.

    above: the least itself is not allowed. bare: the value if the flag is given without one. secret: never shown.

    needs, unless: the setting has an effect only with these, and only without those; `check_needs` enforces it.
    Alternatives are joined by `|`; each is a setting that must be on, a setting and its value (`arrivals=closed`), or a
    fact that the command checks, such as `a decomposed export`.

    group: a heading in --help and in docs, for this option and those after it, up to the next heading.
    """
    low, high, unit = (*(within or (None, None)), "")[:3]
    meta = {"help": help, "low": low, "high": high, "above": above, "unit": unit, "choices": choices, "bare": bare}
    meta |= {"metavar": metavar, "secret": secret, "repeat": repeat, "needs": needs, "unless": unless, "group": group}
    return field(default=default, metadata=meta)


def again(kind: type[Any], name: str, default: Any, **changed: str) -> Any:
    """An option of `kind` with another default. changed: `group`, its heading here, and `needs`."""
    return field(default=default, metadata={**kind.__dataclass_fields__[name].metadata, "group": "", **changed})


def headed(kind: type[Any]) -> dict[str, list[Field[Any]]]:
    """The options by heading; headings have the order in which the class itself, not its bases, names them."""
    own = (kind.__dataclass_fields__[name].metadata["group"] for name in vars(kind)["__annotations__"])
    found: dict[str, list[Field[Any]]] = {heading: [] for heading in own if heading}
    heading = ""
    for f in fields(kind):
        heading = f.metadata["group"] or heading
        found.setdefault(heading, []).append(f)
    return found


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def validate(config: Any, name: str = "") -> None:
    """Check every field against its range and choices. Raises ConfigError with setting, value and range.

    name: of the class or section, if settings do not come from flags.
    """
    for f in fields(config):
        value, meta = getattr(config, f.name), f.metadata
        setting = f"{name}.{f.name}" if name else flag(f.name)
        if value is None and (f.default is None or str(f.type).endswith("| None")):
            continue
        if meta.get("low") is not None:
            whole = str(f.type).startswith("int")
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not (number and meta["low"] <= value <= meta["high"]) or (meta["above"] and value == meta["low"]):
                shown = repr(value) if name else f"{value:.10g}"
                kind = "in" if number else "a whole number in" if whole else "a number in"
                raise ConfigError(f"{setting}={shown}: must be {kind} {_range(meta)}", field=f.name)
        if f.type == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{setting}={value!r:.80}: must be True or False", field=f.name)
        if meta.get("choices") and value not in meta["choices"]:
            shown = repr(value) if name else one_line(value)
            raise ConfigError(f"{setting}={shown}: {one_of(str(value), meta['choices'])}", field=f.name)


def _range(meta: Mapping[str, Any]) -> str:
    unit = f" {meta['unit']}" if meta["unit"] else ""
    return f"{'(' if meta['above'] else '['}{meta['low']:g}, {meta['high']:.10g}]{unit}"


def one_line(value: Any) -> str:
    """A value for an error: the text if it is one short line, else the repr of its first 200 characters."""
    text = str(value)
    return text if text.isprintable() and len(text) <= 200 else repr(text[:200])


def whole(setting: str, text: str, low: int, high: float = inf) -> int:
    """A whole number in that range from its text. Raises ConfigError with the setting."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        wanted = f">= {low}" if high == inf else f"in [{low}, {high}]"
        raise ConfigError(f"{setting}={one_line(text)}: must be a whole number {wanted}")
    return value


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, *units: str) -> float:
    """The seconds in a text such as 150ms or 1.5h, with one of these units; 0 for any other text."""
    found = re.fullmatch(rf"([0-9]{{0,9}}\.?[0-9]{{1,9}})({'|'.join(units)})", text.strip())
    return 0.0 if found is None else float(found[1]) * _SECONDS[found[2]]


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error about an unknown word: a known word that is near, if any. Case and dashes do not matter."""
    if len(word) > LONGEST_WORD:
        return ""
    plain, names = word.lower().lstrip("-"), {name.lower().lstrip("-"): name for name in sorted(known)}
    near = [name for name in difflib.get_close_matches(plain, names, 3, 0.66) if name[:1] == plain[:1]]  # fsp: fps
    near = near or difflib.get_close_matches(plain, names, 3, 0.7)  # stop: not top_p
    words = set(plain.split("_"))
    near.sort(key=lambda name: not words <= set(name.split("_")))  # max_tokens: max_output_tokens, not min_tokens
    return f"; did you mean {prefix}{names[near[0]]}?" if near else ""


def one_of(word: str, choices: Iterable[str]) -> str:
    """The end of an error about a value that is not one of the choices."""
    known = list(choices)
    return f"must be one of {', '.join(known)}{did_you_mean(word, known)}"


def convert(value: Any, kind: Any, where: str, meta: Mapping[str, Any] | None = None) -> Any:
    """A value of the type `kind` from TOML, a flag or the environment. meta: of the field, for its range."""
    try:
        if kind in (bool, bool | None):
            if isinstance(value, bool):
                return value
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(value).lower()]
        if isinstance(value, (bool, dict)):
            raise ValueError
        if kind is int:
            if isinstance(value, float) and not value.is_integer():
                raise ValueError
            return int(value)
        if kind in (float, float | None):
            number = float(value)
            if number != number:
                raise ValueError
            return number
        if kind in (str, str | None):
            if isinstance(value, list):
                raise ValueError
            return str(value)
        return tuple(value.split(",")) if isinstance(value, str) else tuple(str(v) for v in value)
    except (ValueError, KeyError, TypeError, OverflowError):
        wanted = {bool: "true or false", bool | None: "true or false", int: "a whole number"}.get(
            kind, "a number" if kind in (float, float | None) else "text"
        )
        if meta and meta["low"] is not None:
            wanted += f" in {_range(meta)}"
        raise ConfigError(f"{where}={one_line(value)}: must be {wanted}") from None


# -- flags, help and tables --------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add a flag for each field. Flags that are not given stay out of the namespace: file and environment count."""
    hints = hints_of(kind)
    for heading, options in headed(kind).items():
        group = parser.add_argument_group(heading) if heading else parser
        for f in options:
            _add_flag(group, f, hints[f.name])


def _add_flag(group: Any, f: Field[Any], kind: Any) -> None:
    from argparse import SUPPRESS, BooleanOptionalAction  # imported late: most programs parse no command line

    meta = f.metadata
    text = described(f).replace("%", "%%") + _suffix(f)
    common: dict[str, Any] = {"dest": f.name, "default": SUPPRESS, "help": text}
    if kind is bool and "_no_" in f.name:  # --no-… of it would be a double negative
        group.add_argument(flag(f.name), action="store_true", **common)
    elif kind in (bool, bool | None):
        group.add_argument(flag(f.name), action=BooleanOptionalAction, **common)
    elif meta["repeat"]:
        group.add_argument(flag(f.name), action="append", metavar=meta["metavar"], **common)
    else:
        shown = meta["metavar"] or (meta["unit"].upper() if meta["unit"] else None)
        if meta["choices"]:
            shown = "{" + ",".join(meta["choices"]) + "}"
        shown = shown or ("N" if kind in (int, float) else "TEXT")
        alone = {} if meta["bare"] is None else {"nargs": "?", "const": meta["bare"]}
        group.add_argument(flag(f.name), metavar=shown, **alone, **common)


def described(f: Field[Any]) -> str:
    """The description of a setting, with the options that it needs."""
    needs, unless = f.metadata["needs"], f.metadata["unless"]
    words = [f"needs {_in_words(needs)}"] * bool(needs) + [f"not with {_in_words(unless)}"] * bool(unless)
    return str(f.metadata["help"]) + (f" ({'; '.join(words)})" if words else "")


def _suffix(f: Field[Any]) -> str:
    if f.metadata["secret"] or f.default in ("", (), None, MISSING):
        return ""
    default = f.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, float):
        default = f"{default:g}"
    unit = f" {f.metadata['unit']}" if f.metadata["unit"] else ""
    low, high = f.metadata["low"], f.metadata["high"]
    bounds = f", range {low:g} to {high:.10g}" if low is not None else ""
    return f" (default {default}{unit}{bounds})"


def table(config: Any) -> list[tuple[str, str]]:
    """(flag, value) of every setting; secrets are hidden."""
    rows = []
    for f in (f for options in headed(type(config)).values() for f in options):
        value = getattr(config, f.name)
        if f.metadata["secret"]:
            shown = "set" if value else "not set"
        elif value is False or value is None or value == "" or value == ():
            shown = "off" if value is False else "-"
        else:
            shown = "on" if value is True else ",".join(value) if isinstance(value, tuple) else str(value)
            shown = f"{value:.10g}" if isinstance(value, float) else shown
        rows.append((flag(f.name), f"{shown} {f.metadata['unit']}".strip() if shown != "-" else "-"))
    return rows


def settings(config: Any) -> dict[str, Any]:
    """Every setting by name, JSON-safe; secrets are hidden."""
    found = {f.name: getattr(config, f.name) for f in fields(config)}
    return {f.name: "set" if f.metadata["secret"] and found[f.name] else found[f.name] for f in fields(config)}


# -- settings without effect -------------------------------------------------------------------------------------------


def check_needs(config: Any, places: Places, missing: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a flag that has no effect, and warn of such a setting in the file or the environment.

    missing: facts that settings need, but that do not hold, each with the reason.
    """
    missing = {} if missing is None else missing
    for f in fields(config):
        place = places.get(f.name)
        if place is None or getattr(config, f.name) is False:  # a setting that is off is harmless
            continue
        why = _without_effect(config, f.name, missing)
        if why and place == flag(f.name):
            raise ConfigError(f"{place} {why}", field=f.name)
        if why:
            log.warning("%s has no effect: it %s", place, why)


def _without_effect(config: Any, name: str, missing: Mapping[str, str]) -> str:
    """Why a setting has no effect; "" if it has one."""
    meta = {f.name: f for f in fields(config)}[name].metadata
    needs, unless = str(meta.get("needs", "")), str(meta.get("unless", ""))
    there = [need for need in unless.split("|") if need and not _lacks(config, need, missing)]
    if there:
        return f"has no effect with {_in_words('|'.join(there))}"
    if not needs:
        return ""
    lacking = [_lacks(config, need, missing) for need in needs.split("|")]
    if not all(lacking):
        return ""
    return lacking[0] if len(lacking) == 1 else f"needs {_in_words(needs)}"


def _lacks(config: Any, need: str, missing: Mapping[str, str]) -> str:
    """Why a need is not met; "" if it is met."""
    name, equals, wanted = need.partition("=")
    found = {f.name: f for f in fields(config)}.get(name)
    if found is None:
        return f"needs {need}: {missing[need]}" if need in missing else ""
    value = getattr(config, name)
    off = value != wanted if equals else value is False or value in ("", (), None, found.metadata["low"])
    return f"needs {_in_words(need)}" if off else _without_effect(config, name, missing)


def _in_words(needs: str) -> str:
    return " or ".join(need if " " in need else flag(need) for need in needs.split("|"))
