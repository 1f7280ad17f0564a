"""The frames of openpi: msgpack, with arrays and numpy scalars as maps. Bytes in, values out, and back.

    {b"__ndarray__": True, b"data": bytes, b"dtype": "<f8", b"shape": [8]}
    {b"__npgeneric__": True, b"data": 0.5, b"dtype": "<f8"}

The keys of these maps may come as text too. They are written as bytes: stock clients look for nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from reflex_runtime.policies.wires.arrays import array_in, type_of
from reflex_runtime.policies.wires.bounded_msgpack import unpack
from reflex_runtime.web.errors import ClientError


def decode(frame: bytes) -> dict[str, Any]:
    """The map in a frame, arrays as read-only views of it; ClientError when there is none."""
    value = unpack(frame, _array)
    if not isinstance(value, dict):
        raise ClientError("the frame must be a map (an observation)")
    return value


def encode(value: Any) -> bytes:
    """A frame."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    raise NotImplementedError(f"{type(value).__name__} is not written")


def _array(found: dict[str, Any]) -> Any:
    """The array or number that a map represents, otherwise the map."""
    if "__ndarray__" in found:
        return array_in(found.get("data"), found.get("dtype"), found.get("shape"))
    if "__npgeneric__" in found:
        type_of(found.get("dtype"))
        data = found.get("data")
        if isinstance(data, memoryview):
            data = bytes(data)
        if not isinstance(data, (bool, int, float, str, bytes)):
            raise ClientError("a numpy scalar needs data that is a number or a text")
        return data
    return found
