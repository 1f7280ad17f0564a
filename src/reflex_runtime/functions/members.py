"""Unknown fields in a body are refused, and errors list the fields that are allowed.

msgspec drops fields that a dataclass or TypedDict does not have: a misspelled field would silently have its default.
For a Struct or a model of pydantic, the class's own setting decides.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints, is_typeddict

import msgspec
from msgspec.inspect import type_info

from reflex_runtime.web.fields import arms_of, fields_of, invalid, printable, suggestion, types_at

_info: Any = cache(type_info)


def closed_in(hint: Any) -> set[str]:
    """The names of the dataclasses and TypedDicts within a type, itself included."""
    seen: dict[int, Any] = {}  # types may hold themselves
    rest = [hint]
    while rest:
        for one in arms_of(rest.pop()):
            if id(one) not in seen and isinstance(one, type):
                seen[id(one)] = one
                rest += (get_type_hints(one) if hasattr(one, "_fields") else fields_of(one)).values()
    return {one.__name__ for one in seen.values() if is_dataclass(one) or is_typeddict(one)}


def check_members(found: Any, value: Any, hint: Any, path: str = "") -> None:
    """Raise the 422 for a field in a body that is not in the value made of it. hint: the type of the body."""
    if isinstance(found, list) and isinstance(value, list | tuple):
        for i, (one, kept) in enumerate(zip(found, value, strict=False)):
            check_members(one, kept, hint, f"{path or 'body'}[{i}]")
    if not isinstance(found, dict):
        return
    if isinstance(value, dict):  # of a TypedDict if names are missing; else its keys may be numbers, in the same order
        there = value if len(value) < len(found) else dict(zip(found, value.values(), strict=True))
    elif (fields := getattr(_info(type(value)), "fields", None)) is not None:
        there = {field.encode_name: getattr(value, field.name) for field in fields}
    else:
        return
    for name, one in found.items():
        whole = f"{path}.{name}" if path else name
        if name in there:
            check_members(one, there[name], hint, whole)
        elif not isinstance(value, msgspec.Struct):
            meant = suggestion(f"unknown field `{name}` - at `$.{path}`", hint)
            field = re.split(r"[.\[]", whole, maxsplit=1)[0]
            raise invalid(printable(field), printable(f"unknown field {whole}") + meant)


def told(error: msgspec.ValidationError, hint: Any) -> str:
    """The end of an error: what is allowed there."""
    text = str(error)
    if text.startswith("Expected `object`"):
        names = [name for one in types_at(text, hint) for name in fields_of(one)]
        return f"; its fields are {', '.join(names)}" if names else ""
    return suggestion(text, hint)
