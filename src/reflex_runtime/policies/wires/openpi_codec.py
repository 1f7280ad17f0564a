"""The frames of openpi: msgpack, with arrays and numpy scalars as maps. Bytes in, values out, and back.

    {b"__ndarray__": True, b"data": bytes, b"dtype": "<f8", b"shape": [8]}
    {b"__npgeneric__": True, b"data": 0.5, b"dtype": "<f8"}

The keys of these maps may come as text too. They are written as bytes: stock clients look for nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.wires.packed import unpack
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.json import printable

KINDS: Final = "biufUS"  # of numpy types; not V (structures), O (objects), c, M, m
MAX_DIMENSIONS: Final = 8
_MAX_TYPE: Final = 16  # characters of a type's name


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
    """The array that a map stands for, else the map."""
    if "__ndarray__" in found:
        dtype, shape, data = _type_of(found.get("dtype")), found.get("shape"), found.get("data")
        if not isinstance(data, memoryview) or not _is_shape(shape):
            raise ClientError(f"an array needs data and a shape of at most {MAX_DIMENSIONS} whole numbers")
        return _viewed(data, dtype, shape)
    if "__npgeneric__" in found:
        dtype, data = _type_of(found.get("dtype")), found.get("data")
        if isinstance(data, memoryview):
            data = bytes(data)
        if not isinstance(data, (bool, int, float, str, bytes)):
            raise ClientError("a numpy scalar needs data that is a number or a text")
        return data
    return found


def _viewed(data: memoryview, dtype: np.dtype[Any], shape: Any) -> NDArray[Any]:
    if prod(shape) * dtype.itemsize != len(data):
        raise ClientError(f"{len(data)} bytes do not make an array of shape {shape[:MAX_DIMENSIONS]} and {dtype.str}")
    try:
        return np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError):  # zero bytes fit any shape with a 0, but numpy has a largest one
        raise ClientError(f"shape {shape} is no array") from None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)


def _type_of(name: Any) -> np.dtype[Any]:
    if isinstance(name, memoryview):
        name = bytes(name).decode("ascii", "replace")
    dtype = _known(name) if isinstance(name, str) and len(name) <= _MAX_TYPE else None
    if dtype is None:
        raise ClientError(printable(f"dtype {str(name)[:40]!r}: must be a number or text, as numpy writes it"))
    return dtype


@lru_cache(maxsize=64)
def _known(name: str) -> np.dtype[Any] | None:
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None
    return dtype if dtype.kind in KINDS and dtype.itemsize else None
