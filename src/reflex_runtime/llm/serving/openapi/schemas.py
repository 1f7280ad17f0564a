"""JSON Schema in a few words, for /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NULL = {"type": "null"}


def closed(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    """It, or null."""
    return {"anyOf": [schema, NULL]}


def within(low: int, high: int) -> dict[str, Any]:
    """A whole number in these bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def numerals(most: int) -> str:
    """The pattern of whole numbers from 0 to `most`, as names of fields have them."""
    digits = str(most)
    found = ["0", str(most), *(f"[1-9][0-9]{{{n}}}" for n in range(len(digits) - 1))]
    for i, digit in enumerate(digits):  # the same up to here, then a smaller one
        low, high = int(i == 0), int(digit) - 1
        if low <= high:
            found.append(f"{digits[:i]}[{low}-{high}][0-9]{{{len(digits) - i - 1}}}")
    return f"^({'|'.join(found)})$"


def ref(kind: type) -> dict[str, Any]:
    """The schema of this class, which stands under its name."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def without_effect(plain: Mapping[str, tuple[Any, ...]], empty: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Fields that are known and not supported: the values that are taken. empty: those of fields whose type does not
    allow every empty value."""
    return {name: {"enum": [None, *values, *empty.get(name, ["", [], {}])]} for name, values in plain.items()}


def model_named(names: Sequence[str], named: bool) -> dict[str, Any]:
    """The name of a model: one of these, or any where they must not be told."""
    return {"enum": list(names)} if named else {"type": "string", "minLength": 1}
