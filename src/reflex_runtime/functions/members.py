"""The fields within a type: unknown ones in a body are refused, and errors list what a field may hold.

msgspec drops fields that a dataclass or TypedDict does not have; a misspelled one would silently be its default. Of a
Struct and a model of pydantic, the class's own setting decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec.inspect import (
    DataclassType,
    DictType,
    Metadata,
    StructType,
    Type,
    TypedDictType,
    UnionType,
    type_info,
)

from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.fields import fields_of, invalid, printable, suggestion, types_at

_CLOSED: Final = (DataclassType, TypedDictType)


class Members:
    """The fields of a type. closed: names of the dataclasses and TypedDicts in it."""

    def __init__(self, hint: Any) -> None:
        self._hint, self._kind = hint, _plain(type_info(hint))
        self.closed = {one.cls.__name__ for one in _closed_in(self._kind)}
        known = self._kind.fields if isinstance(self._kind, _CLOSED) else ()
        self._nested = {field.encode_name: field.type for field in known if _closed_in(field.type)}

    def check(self, body: bytes, decode: Callable[..., Any]) -> None:
        """The 422 for a field in a valid body that is not in the type. Only fields with fields are built."""
        if not isinstance(self._kind, _CLOSED):
            _check(self._kind, decode(body), "")
            return
        found = decode(body, type=dict[str, msgspec.Raw])
        self.check_names(found)
        for name, kind in self._nested.items():
            if name in found:
                _check(kind, decode(found[name]), name)

    def check_names(self, found: Any) -> None:
        """The same for the fields of a form."""
        if isinstance(self._kind, _CLOSED):
            _check_names(self._kind, found, "")

    def told(self, error: msgspec.ValidationError) -> str:
        """The end of an error: what is allowed there."""
        text = str(error)
        if text.startswith("Expected `object`"):
            names = [name for one in types_at(text, self._hint) for name in fields_of(one)]
            return f"; its fields are {', '.join(names)}" if names else ""
        return suggestion(text, self._hint)


def _plain(kind: Type) -> Type:
    return _plain(kind.type) if isinstance(kind, Metadata) else kind


def _arms(kind: Type) -> Iterator[Type]:
    kind = _plain(kind)
    if isinstance(kind, UnionType):
        for arm in kind.types:
            yield from _arms(arm)
    else:
        yield kind


def _elements(kind: Type) -> list[Type]:
    """The types of what a list or a dict holds."""
    single = (getattr(kind, name, None) for name in ("item_type", "value_type"))
    return [one for one in (*single, *getattr(kind, "item_types", ())) if one is not None]


def _closed_in(kind: Type) -> list[Any]:
    """The dataclasses and TypedDicts within a type, itself included."""
    seen: dict[int, Type] = {}  # types may hold themselves
    rest = [kind]
    while rest:
        for one in _arms(rest.pop()):
            if id(one) not in seen:
                seen[id(one)] = one
                rest += [*_elements(one), *(field.type for field in getattr(one, "fields", ()))]
    return [one for one in seen.values() if isinstance(one, _CLOSED)]


def _check_names(kind: Any, found: Any, path: str) -> None:
    names = {field.encode_name for field in kind.fields}
    for name in found:
        if name not in names:
            whole = f"{path}.{name}" if path else name
            raise invalid(
                printable(whole.partition(".")[0].partition("[")[0]),
                printable(f"unknown field {whole}") + did_you_mean(name, names),
            )


def _check(kind: Type, value: Any, path: str) -> None:
    """`Members.check` for a built value."""
    for arm in _arms(kind):
        if isinstance(value, dict):
            if isinstance(arm, DictType):
                for one in value.values():
                    _check(arm.value_type, one, f"{path}[...]")
                continue
            if isinstance(arm, StructType) and arm.tag is not None and value.get(arm.tag_field) != arm.tag:
                continue  # of a union, another one
            if isinstance(arm, _CLOSED):
                _check_names(arm, value, path)
            for field in getattr(arm, "fields", ()):
                if field.encode_name in value:
                    _check(field.type, value[field.encode_name], f"{path}.{field.encode_name}".lstrip("."))
        elif isinstance(value, list):
            if items := getattr(arm, "item_types", ()):
                for i, (one, of) in enumerate(zip(value, items, strict=False)):
                    _check(of, one, f"{path}[{i}]")
            elif (of_each := getattr(arm, "item_type", None)) is not None and _closed_in(of_each):
                for i, one in enumerate(value):
                    _check(of_each, one, f"{path}[{i}]")
