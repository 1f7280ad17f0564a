"""Protocol buffers as tables: bytes to a dict by field name, and back. Bytes fields are views of the message.

The messages of these wires are few and small. By hand they need no generated code, no package, and no copy of a
picture; names that clash in protobuf's one pool of a process cannot occur.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.web.errors import ClientError

MAX_FIELDS: Final = 20_000  # in a message, those of the messages within it included
MAX_NUMBERS: Final = 2**20  # of repeated fields: a whole number of one byte takes eight here
MAX_DEPTH: Final = 8
FEW: Final = 32  # bytes
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5
_FLOATS: Final = {"float": (_FOUR, "<f4"), "double": (_EIGHT, "<f8")}
_WHOLE: Final = ("bool", "int", "uint")
_NUMBERS: Final = {"bool": np.bool_, "int": np.int64, "uint": np.uint64, "float": np.float32, "double": np.float64}


@dataclass(frozen=True, slots=True)
class Field:
    """A field. kind: bool, int, uint, float, double, text, bytes or a message. many: repeated, numbers as array."""

    name: str
    kind: str | Message
    many: bool = False


Message = Mapping[int, Field]
"""The fields of a message by their numbers."""


def parse(data: bytes | memoryview, message: Message) -> dict[str, Any]:
    """Decode a message into a dict by field name; ClientError if it is malformed. The last of several occurrences
    counts. Unknown fields are skipped."""
    try:
        return _Parser().parse(memoryview(data).toreadonly(), message, 0)
    except (IndexError, UnicodeDecodeError):
        raise ClientError("the message breaks off, or a text in it is not UTF-8") from None


class _Parser:
    def __init__(self) -> None:
        self._fields, self._numbers = MAX_FIELDS, MAX_NUMBERS

    def parse(self, data: memoryview, message: Message, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {field.name: [] for field in message.values() if field.many}
        at = 0
        while at < len(data):
            self._fields -= 1
            if self._fields < 0 or depth > MAX_DEPTH:
                raise ClientError(f"the message has over {MAX_FIELDS} fields, or is nested deeper than {MAX_DEPTH}")
            tag, at = _varint(data, at)
            raw, at = _raw(data, at, tag & 7)
            field = message.get(tag >> 3)
            if field is None:
                continue
            if not field.many:
                found[field.name] = self._one(field, tag & 7, raw, depth)
            elif _is_number(field) and tag & 7 == _SIZED:
                found[field.name].append(self._packed(raw, str(field.kind)))
            else:
                found[field.name].append(self._one(field, tag & 7, raw, depth))
        for field in message.values():
            if field.many and _is_number(field):
                found[field.name] = _joined(found[field.name], _NUMBERS[str(field.kind)])
        return found

    def _packed(self, raw: memoryview, kind: str) -> NDArray[Any]:
        numbers = _floats(raw, kind) if kind in _FLOATS else np.frombuffer(raw, np.uint8)
        self._numbers -= len(numbers)
        if self._numbers < 0:
            raise ClientError(f"the message has over {MAX_NUMBERS} numbers one by one: send tensors as raw bytes")
        if kind in _FLOATS:
            return numbers
        return _whole_numbers(numbers, kind) if len(numbers) > FEW else self._few(raw, kind)

    def _few(self, raw: memoryview, kind: str) -> NDArray[Any]:
        """The same, one number at a time: faster for a few."""
        found, at = [], 0
        while at < len(raw):
            value, at = _varint(raw, at)
            found.append(value)
        return _typed(np.array(found, np.uint64), kind)

    def _one(self, field: Field, wire: int, raw: Any, depth: int) -> Any:
        kind = field.kind
        if not isinstance(kind, str):
            _expect(field, wire, _SIZED)
            return self.parse(raw, kind, depth + 1)
        if kind in ("text", "bytes"):
            _expect(field, wire, _SIZED)
            return raw if kind == "bytes" else bytes(raw).decode()
        if kind in _FLOATS:
            _expect(field, wire, _FLOATS[kind][0])
            return float(_floats(raw, kind)[0])
        _expect(field, wire, _VARINT)
        return bool(raw) if kind == "bool" else raw - 2**64 if kind == "int" and raw >= 2**63 else raw


def _is_number(field: Field) -> bool:
    return isinstance(field.kind, str) and field.kind in _NUMBERS


def _expect(field: Field, wire: int, expected: int) -> None:
    if wire != expected:
        raise ClientError(f"{field.name}: is of another type in this protocol")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
        if shift > 63:
            raise ClientError("the message holds a number of more than 64 bits")


def _raw(data: memoryview, at: int, wire: int) -> tuple[Any, int]:
    """An undecoded field: a number, or a view of its bytes."""
    if wire == _VARINT:
        return _varint(data, at)
    if wire not in (_EIGHT, _SIZED, _FOUR):
        raise ClientError("the message holds a group, and none is known here")
    size, at = _varint(data, at) if wire == _SIZED else (8 if wire == _EIGHT else 4, at)
    if at + size > len(data):
        raise IndexError
    return data[at : at + size], at + size


def _floats(raw: memoryview, kind: str) -> NDArray[Any]:
    dtype = _FLOATS[kind][1]
    if len(raw) % np.dtype(dtype).itemsize:
        raise IndexError
    return np.frombuffer(raw, dtype)


def _joined(parts: list[Any], dtype: type[Any]) -> NDArray[Any]:
    """Packed arrays and single numbers as one array."""
    if len(parts) == 1 and isinstance(parts[0], np.ndarray):
        return parts[0]
    return np.hstack([np.empty(0, dtype), *parts]) if parts else np.empty(0, dtype)


def _whole_numbers(data: NDArray[np.uint8], kind: str) -> NDArray[Any]:
    """Packed numbers: first the first byte of all of them, then the second."""
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise IndexError
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    sizes = ends - starts + 1
    if len(sizes) and sizes.max() > 10:
        raise ClientError("the message holds a number of more than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(sizes.max()) if len(sizes) else 0):
        longer = sizes > place
        values[longer] |= (data[starts[longer] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    return _typed(values, kind)


def _typed(values: NDArray[np.uint64], kind: str) -> NDArray[Any]:
    return values.astype(np.bool_) if kind == "bool" else values.view(np.int64) if kind == "int" else values


# -- writing -----------------------------------------------------------------------------------------------------------


def serialize(values: Mapping[str, Any], message: Message) -> bytes:
    """The bytes of a message. What is not in `values` is left out."""
    parts: list[bytes] = []
    for number, field in message.items():
        if field.name in values:
            for value in values[field.name] if field.many else [values[field.name]]:
                _write(parts, number, field.kind, value)
    return b"".join(parts)


def _write(parts: list[bytes], number: int, kind: str | Message, value: Any) -> None:
    if isinstance(kind, str) and kind in _WHOLE:
        parts += [_number(number << 3 | _VARINT), _number(int(value) % 2**64)]
    elif isinstance(kind, str) and kind in _FLOATS:
        wire, dtype = _FLOATS[kind]
        parts += [_number(number << 3 | wire), struct.pack(dtype[:1] + {"f4": "f", "f8": "d"}[dtype[1:]], value)]
    else:
        data = serialize(value, kind) if not isinstance(kind, str) else value.encode() if kind == "text" else value
        parts += [_number(number << 3 | _SIZED), _number(len(data)), data]


def _number(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
