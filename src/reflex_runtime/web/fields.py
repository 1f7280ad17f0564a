"""JSON bodies: writing and checking them; their ids, whole numbers, and the 422 for a wrong field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints, overload

import msgspec

from reflex_runtime.settings.declare import did_you_mean, one_of
from reflex_runtime.web.errors import InvalidRequest

MAX_VALUES: Final = 40_000  # commas in a body whose values are built; all fields of /act at their bounds have fewer
LARGE_JSON: Final = 1 << 20  # bytes; `json` holds the interpreter for 5 ms in each MB
MAX_ID_BYTES: Final = 256
ID: Final = {"type": "string", "maxLength": MAX_ID_BYTES, "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
"""JSON Schema of what `check_id` takes."""


_PATH: Final = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_UNKNOWN: Final = re.compile(r"(?:unknown|missing required) field `(.*?)`(?: - at|$)")
_STRAY: Final = re.compile(r"unknown field `(.*?)`(?: - at|$)")
_STRAY_VALUE: Final = re.compile(r"Invalid enum value '(.*?)'(?: - at|$)")

encode = msgspec.json.Encoder().encode
_skip = msgspec.json.Decoder(msgspec.Raw)

if TYPE_CHECKING:
    Whole = int
else:
    Whole = int | float  # in JSON 3.0 is a whole number too; `whole` makes an int of it


def invalid(field: str, message: str) -> InvalidRequest:
    """The 422 for a field."""
    return InvalidRequest(message, field)


@overload
def whole(name: str, value: int) -> int: ...
@overload
def whole(name: str, value: None) -> None: ...
@overload
def whole(name: str, value: int | None) -> int | None: ...
def whole(name: str, value: Any) -> int | None:
    """A whole number as an int, 3.0 included; the 422 for any other number."""
    if type(value) is not float:
        return value  # type: ignore[no-any-return]
    if not value.is_integer():
        raise invalid(name, f"{name}={value}: must be a whole number")
    return int(value)


def invalid_input(name: str, why: str) -> InvalidRequest:
    """422 for a field or a tensor, under the name that the caller gave it."""
    return invalid(printable(name), printable(f"{name}: {why}"))


def invalid_field(error: msgspec.ValidationError, kind: type[msgspec.Struct] | None = None) -> InvalidRequest:
    """The 422 for an error of msgspec. kind: of the body, for the name that was meant."""
    text = str(error)
    unknown = _UNKNOWN.search(text)
    path = _PATH.search(text)
    field = unknown.group(1) if unknown else path.group(1) if path else "body"
    field = re.split(r"[.\[]", field, maxsplit=1)[0] or "body"
    plain = _PATH.sub("", text)
    meant = suggestion(text, kind) if kind is not None else ""
    return invalid(printable(field), printable(f"{field}: {plain[:1].lower()}{plain[1:]}") + meant)


def suggestion(text: str, kind: type[msgspec.Struct]) -> str:
    """What to append to an error of msgspec on a body of this kind: the nearest field, or the values there are."""
    path = _PATH.search(text)
    names = re.findall(r"[A-Za-z_]\w*", path.group(1)) if path else []
    if unknown := _STRAY.search(text):
        within = _struct_at(kind, names)
        return did_you_mean(unknown.group(1), within.__struct_encode_fields__) if within is not None else ""
    if (value := _STRAY_VALUE.search(text)) and names:
        within = _struct_at(kind, names[:-1])
        choices = _choices(_hints(within).get(names[-1])) if within is not None else []
        return f"; {one_of(value.group(1), choices)}" if choices else ""
    return ""


def _struct_at(kind: type[msgspec.Struct], names: Sequence[str]) -> type[msgspec.Struct] | None:
    """The kind of the object at a path of field names; None where the path leaves what is known."""
    for name in names:
        types = (of for of in _parts(_hints(kind).get(name)) if isinstance(of, type))
        inner = next((of for of in types if issubclass(of, msgspec.Struct)), None)
        if inner is None:
            return None
        kind = inner
    return kind


@lru_cache(32)
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _parts(hint: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _choices(hint: Any) -> list[str]:
    """The texts of the `Literal` in a type."""
    found = next((part for part in _parts(hint) if get_origin(part) is Literal), None)
    return [str(value) for value in get_args(found)]


def check_id(name: str, value: str) -> None:
    """Raises the 422 unless the id is text of up to 256 bytes without control characters."""
    if len(value) <= MAX_ID_BYTES and value.isascii() and value.isprintable():  # nearly all of them
        return
    if not is_unicode(value):
        raise invalid(name, f"{name}: holds text that is not Unicode (a lone surrogate)")
    if len(value.encode()) > MAX_ID_BYTES:
        raise invalid(name, f"{name}: longer than {MAX_ID_BYTES} bytes")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in value):
        raise invalid(name, f"{name}: holds a control character")


def is_json(body: bytes) -> bool:
    """Whether a body is JSON to its end; for bodies with a wrong field. Of a large body nothing is built."""
    decode: Any = _skip.decode if len(body) > LARGE_JSON or body.count(b",") > MAX_VALUES else json.loads
    try:
        decode(body)
    except (json.JSONDecodeError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    except (RecursionError, ValueError):  # too deep or too long a number, but JSON
        return True
    return True


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON can write and nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Text for an error: one line, always encodable, and at most 300 characters."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in text[:300])
    return line.encode("utf-8", "replace").decode("utf-8")


def brief(value: object) -> str:
    """A value from outside for an error: a text is cut, and of a container only the type is shown."""
    if isinstance(value, str | bytes):
        return repr(value[:80])
    plain = value is None or isinstance(value, bool | float) or (type(value) is int and value.bit_length() <= 64)
    return repr(value) if plain else f"<{type(value).__name__}>"
