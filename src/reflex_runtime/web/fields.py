"""JSON bodies: writing and checking them, their ids and whole numbers, and the 422 for a wrong field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import EnumType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints, is_typeddict, overload

import msgspec

from reflex_runtime.settings.declare import did_you_mean, one_of
from reflex_runtime.web.errors import InvalidJson, InvalidRequest

MAX_VALUES: Final = 40_000  # commas in a body that is decoded; all fields of /act at their bounds have fewer
LARGE_JSON: Final = 1 << 20  # bytes; `json` blocks the interpreter for 5 ms in each MB
MAX_ID_BYTES: Final = 256
ID: Final = {"type": "string", "maxLength": MAX_ID_BYTES, "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
"""JSON Schema of what `check_id` takes."""

_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")
_UNKNOWN: Final = re.compile(r"(?:unknown|missing required) field `(.*?)`(?: - at|$)")
_STRAY: Final = re.compile(r"unknown field `(.*?)`(?: - at|$)")
_STRAY_VALUE: Final = re.compile(r"Invalid enum value '?(.*?)'?(?: - at|$)")

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
    """The 422 for a field or a tensor whose name the caller chose."""
    return invalid(printable(name), printable(f"{name}: {why}"))


def invalid_field(error: msgspec.ValidationError, kind: type[msgspec.Struct] | None = None) -> InvalidRequest:
    """The 422 for an error of msgspec. kind: the struct of the body, for a suggestion."""
    path, unknown, why = parts_of_error(error)
    place = re.sub(r"^(?=\[|$)", "body", ".".join(part for part in (path, unknown) if part))
    field = re.split(r"[.\[]", place, maxsplit=1)[0]
    meant = suggestion(str(error), kind) if kind is not None else ""
    return invalid(printable(field), printable(f"{place}: {why}") + meant)


def parts_of_error(error: msgspec.ValidationError) -> tuple[str, str, str]:
    """(path of the value, unknown or missing field in it, what is wrong) of an error; "" where there is none."""
    text = _ends(str(error))
    unknown, path, plain = _UNKNOWN.search(text), _PATH.search(text), _PATH.sub("", text)
    why = "is missing" if "missing required" in plain else plain[:1].lower() + plain[1:]
    return path[1] if path else "", unknown[1] if unknown else "", why


def _ends(text: str) -> str:
    """The ends of an error with a caller's long name or value: the patterns' time grows with the square of a text."""
    return text if len(text) <= 1000 else text[:500] + text[-500:]


@contextmanager
def client_errors(kind: type[msgspec.Struct] | None = None, form: str = "JSON") -> Iterator[None]:
    """Errors of msgspec within become the 422 of `invalid_field`, or the 400 for a body that is not of this form."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidJson(printable(f"the body is not {form}: {error}")) from None


def suggestion(text: str, kind: Any) -> str:
    """The end of the text of an error: the nearest field of the type, or the allowed values of the field."""
    text = _ends(text)
    unknown, value = _STRAY.search(text), _STRAY_VALUE.search(text)
    if not (unknown or value):
        return ""
    kinds = types_at(text, kind)
    if unknown:
        return did_you_mean(unknown[1], [name for one in kinds for name in fields_of(one)])
    choices = [str(choice) for one in kinds for choice in _choices(one)]
    return f"; {one_of(value[1], choices)}" if value and choices else ""


def types_at(text: str, kind: Any) -> list[Any]:
    """The types that are allowed at the place of the error."""
    path, kinds = _PATH.search(text), list(arms_of(kind))
    for name in re.findall(r"(?:^|\.)(\w+)", path[1]) if path else ():  # a name that no type has is a key of a dict
        kinds = [arm for one in kinds if name in fields_of(one) for arm in arms_of(fields_of(one)[name])] or kinds
    return kinds


def fields_of(kind: Any) -> dict[str, Any]:
    """The types of the fields of a Struct, dataclass or TypedDict, by their names in JSON."""
    if hasattr(kind, "__struct_fields__"):
        hints, names = get_type_hints(kind), zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        return {encoded: hints[name] for encoded, name in names}
    return get_type_hints(kind) if is_dataclass(kind) or is_typeddict(kind) else {}


def arms_of(hint: Any) -> Iterator[Any]:
    """The types that a union, list or dict is made of; any other type itself."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for arm in get_args(hint):
            yield from arms_of(arm)


def _choices(kind: Any) -> Iterable[Any]:
    if isinstance(kind, EnumType):
        return [one.value for one in kind]  # type: ignore[var-annotated]
    return get_args(kind) if get_origin(kind) is Literal else ()


def check_id(name: str, value: str) -> None:
    """Raise the 422 unless the id is text of up to 256 bytes without control characters."""
    if len(value) <= MAX_ID_BYTES and value.isascii() and value.isprintable():  # nearly all of them
        return
    if not is_unicode(value):
        raise invalid(name, f"{name}: holds text that is not Unicode (a lone surrogate)")
    if len(value.encode()) > MAX_ID_BYTES:
        raise invalid(name, f"{name}: longer than {MAX_ID_BYTES} bytes")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in value):
        raise invalid(name, f"{name}: holds a control character")


def is_json(body: bytes) -> bool:
    """Whether a body with a wrong field is JSON to its end. A large one is scanned, not decoded."""
    decode: Any = _skip.decode if len(body) > LARGE_JSON or body.count(b",") > MAX_VALUES else json.loads
    try:
        decode(body)
    except (json.JSONDecodeError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    except (RecursionError, ValueError):  # too deep or too long a number, but JSON
        return True
    return True


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate: JSON can contain it, and UTF-8 cannot encode it."""
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
    """A caller's value for an error: a text is cut, of a container only the type is shown."""
    if isinstance(value, str | bytes):
        return repr(value[:80])
    plain = value is None or isinstance(value, bool | float) or (type(value) is int and value.bit_length() <= 64)
    return repr(value) if plain else f"<{type(value).__name__}>"
