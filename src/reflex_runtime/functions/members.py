"""Unknown fields in a body are refused, and errors list the fields that are allowed.

msgspec drops fields that a dataclass or TypedDict does not have: a misspelled field would silently have its default.
For a Struct or a model of pydantic, the class's own setting decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any, Final

import msgspec
from msgspec.inspect import DataclassType, Metadata, NamedTupleType, TypedDictType, UnionType, type_info

from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.fields import fields_of, invalid, printable, suggestion, types_at

_CLOSED: Final = (DataclassType, TypedDictType)
_OBJECT: Final = "Expected `object`"
_PARTS: Final = ("type", "types", "item_type", "item_types", "value_type", "fields")


class Members:
    """The fields within a type. closed: names of its dataclasses and TypedDicts."""

    def __init__(self, hint: Any) -> None:
        self._kind = type_info(hint)
        kinds = _within(self._kind)
        self.closed = {one.cls.__name__ for one in kinds if isinstance(one, _CLOSED)}
        self._holders = {id(one) for one in kinds if any(isinstance(part, _CLOSED) for part in _within(one))}

    def check(self, found: Any, kind: Any = None, path: str = "") -> None:
        """Raise the 422 for a field in a valid body that is not in the type. kind, path: of a part."""
        kind = kind or self._kind
        if isinstance(kind, _CLOSED) and isinstance(found, dict):
            names = [field.encode_name for field in kind.fields]
            if (stray := next((name for name in found if name not in names), None)) is not None:
                whole, field = (f"{path}.{stray}", re.split(r"[.\[]", path)[0]) if path else (stray, stray)
                raise invalid(printable(field), printable(f"unknown field {whole}") + did_you_mean(stray, names))
        for where, one, of in _parts(found, kind, path):
            if id(of) in self._holders:  # the type of most values is not: numbers and texts
                self.check(one, of, where)


def _parts(found: Any, kind: Any, path: str) -> Iterable[tuple[str, Any, Any]]:
    """(path, value, type) of each value in `found`. Of a union, `found` is tried as every type."""
    if isinstance(kind, Metadata | UnionType):
        return [(path, found, arm) for arm in (kind.types if isinstance(kind, UnionType) else (kind.type,))]
    fields, each = getattr(kind, "fields", ()), getattr(kind, "value_type", None)
    if isinstance(found, list):
        own = [field.type for field in fields] if isinstance(kind, NamedTupleType) else ()
        types = own or getattr(kind, "item_types", None) or repeat(getattr(kind, "item_type", None))
        return ((f"{path or 'body'}[{i}]", one, of) for i, (one, of) in enumerate(zip(found, types, strict=False)))
    tag = getattr(kind, "tag", None)
    if not isinstance(found, dict) or (tag is not None and found.get(kind.tag_field, tag) != tag):
        return ()
    named = {field.encode_name: field.type for field in fields} or dict.fromkeys(found, each)
    return [(f"{path}.{name}" if path else str(name), found[name], of) for name, of in named.items() if name in found]


def _within(kind: Any) -> list[Any]:
    """The types within a type, itself included."""
    seen, rest = dict[int, Any](), [kind]  # types may hold themselves
    while rest:
        if id(one := rest.pop()) not in seen:
            seen[id(one)] = one
            parts = [getattr(one, name, ()) for name in _PARTS]
            rest += chain.from_iterable(part if isinstance(part, tuple) else (part,) for part in parts)
    return list(seen.values())


def told(error: msgspec.ValidationError, hint: Any) -> str:
    """The end of an error: what is allowed there."""
    text = str(error)
    names = [name for one in types_at(text, hint) for name in fields_of(one)] if text.startswith(_OBJECT) else ()
    return f"; its fields are {', '.join(names)}" if names else suggestion(text, hint)
