"""msgpack read within bounds: no value is made beyond `MAX_VALUES`, and bytes are views of the frame.

`msgspec` and `msgpack` decode faster, but they bound the length of a container, not the number of values in a frame:
16 MB of empty maps become a gigabyte. A scan that counts them first costs as much as reading them here. The codecs of
the wires differ in how they write an array as a map, which `hook` reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from reflex_runtime.web.errors import ClientError

MAX_VALUES: Final = 20_000  # in a frame, keys included
MAX_DEPTH: Final = 16
MAX_TEXT: Final = 64 * 1024  # bytes

Hook = Callable[[dict[str, Any]], Any]

_NUMBERS: Final = {
    0xCA: struct.Struct(">f"), 0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"), 0xCD: struct.Struct(">H"), 0xCE: struct.Struct(">I"), 0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"), 0xD1: struct.Struct(">h"), 0xD2: struct.Struct(">i"), 0xD3: struct.Struct(">q"),
}  # fmt: skip
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
_BINS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # bytes that their length takes
_TEXTS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}


def unpack(data: bytes, hook: Hook) -> Any:
    """The value of a frame; ClientError when it is none. Maps have keys of text, whether they came as text or bytes,
    and pass through `hook`. Bytes are memoryviews of the frame."""
    reader = _Reader(data, hook)
    try:
        value = reader.value(0)
    except (IndexError, UnicodeDecodeError, struct.error):
        raise _broken() from None
    if reader.at > len(data):
        raise _broken()
    if reader.at < len(data):
        raise ClientError(f"the frame is not msgpack: {len(data) - reader.at} bytes are left behind the value")
    return value


def _broken() -> ClientError:
    return ClientError("the frame is not msgpack: it breaks off, or a text in it is not UTF-8")


class _Reader:
    """Reads one frame. at: how far it is; beyond the end of a frame that breaks off, which `unpack` notices."""

    def __init__(self, data: bytes, hook: Hook) -> None:
        self._data, self._view, self._hook = data, memoryview(data), hook
        self._left = MAX_VALUES
        self.at = 0

    def value(self, depth: int) -> Any:
        """The next value. Ends are not checked here: what is cut short leaves `at` beyond the frame."""
        data, at = self._data, self.at
        tag = data[at]
        self.at = at = at + 1
        if tag <= 0x7F:
            return tag
        if tag <= 0x8F:
            return self._map(tag & 0x0F, depth)
        if tag <= 0x9F:
            return self._list(tag & 0x0F, depth)
        if tag <= 0xBF:
            self.at = end = at + (tag & 0x1F)
            return data[at:end].decode()
        if tag in _NUMBERS:
            form = _NUMBERS[tag]
            self.at = at + form.size
            return form.unpack_from(data, at)[0]
        if tag in _BINS:
            return self._bytes(_BINS[tag])
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag >= 0xE0:
            return tag - 0x100
        if tag in _TEXTS:
            return self._text(_TEXTS[tag])
        if tag in _LISTS:
            return self._list(self._length(_LISTS[tag]), depth)
        if tag in _MAPS:
            return self._map(self._length(_MAPS[tag]), depth)
        raise ClientError("the frame holds a msgpack extension, and none is known here")

    def _length(self, width: int) -> int:
        at = self.at
        self.at = end = at + width
        return int.from_bytes(self._data[at:end], "big")

    def _bytes(self, width: int) -> memoryview:
        size = self._length(width)
        at = self.at
        self.at = end = at + size
        return self._view[at:end]

    def _text(self, width: int) -> str:
        size = self._length(width)
        if size > MAX_TEXT:
            raise ClientError(f"the frame holds a text of over {MAX_TEXT} bytes")
        at = self.at
        self.at = end = at + size
        return self._data[at:end].decode()

    def _list(self, size: int, depth: int) -> list[Any]:
        self._enter(size, depth)
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        self._enter(2 * size, depth)
        found: dict[str, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if type(key) is not str:
                if type(key) is not memoryview:
                    raise ClientError("the frame holds a map whose keys are not texts")
                key = bytes(key).decode()
            found[key] = self.value(depth + 1)
        return self._hook(found)

    def _enter(self, values: int, depth: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ClientError(f"the frame holds over {MAX_VALUES} values: send arrays as arrays")
        if depth >= MAX_DEPTH:
            raise ClientError(f"the frame is nested deeper than {MAX_DEPTH}")
