"""Fields of JSON bodies that several products have: ids, whole numbers, and the 422 for a wrong field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, overload

import msgspec

from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.json import is_unicode, printable

MAX_ID_BYTES: Final = 256
_PATH: Final = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_UNKNOWN: Final = re.compile(r"(?:unknown|missing required) field `(.*)`")

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


def invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    """The 422 for an error of msgspec."""
    text = str(error)
    unknown = _UNKNOWN.search(text)
    path = _PATH.search(text)
    field = unknown.group(1) if unknown else path.group(1) if path else "body"
    field = re.split(r"[.\[]", field, maxsplit=1)[0] or "body"
    plain = _PATH.sub("", text)
    return invalid(printable(field), printable(f"{field}: {plain[:1].lower()}{plain[1:]}"))


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
