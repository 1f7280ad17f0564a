"""Arrays from bytes, a type name and a shape, within the same bounds for every codec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.json import printable

MAX_DIMENSIONS: Final = 8
_TYPE: Final = re.compile(r"[<>|=]?[biufUS][1-9][0-9]{0,4}")  # not V (structures), O (objects), c, M, m


def array_in(data: Any, dtype: Any, shape: Any) -> NDArray[Any]:
    """A read-only view of `data` (bytes or a memoryview) as an array; ClientError if the three are inconsistent."""
    known = type_of(dtype)
    if not isinstance(data, (bytes, memoryview)) or not _is_shape(shape):
        raise ClientError(f"an array needs data and a shape of at most {MAX_DIMENSIONS} whole numbers")
    return _viewed(data, known, shape)


def nd_in(found: Mapping[str, Any]) -> Any:
    """The array or number in a map of msgpack-numpy: `nd`, `type`, `kind`, `shape`, `data`. Nothing is unpickled."""
    kind = found.get("kind", b"")
    if kind not in (b"", ""):  # V: structures; O: a pickle
        raise ClientError("an array of kind O or V is not read: send numbers or texts")
    if found["nd"] is True:
        return array_in(found["data"], found.get("type"), found.get("shape"))
    dtype, data = type_of(found.get("type")), found["data"]
    if not isinstance(data, memoryview) or len(data) != dtype.itemsize:
        raise ClientError("a numpy scalar needs as many bytes as its type has")
    return np.ndarray((), dtype, buffer=data).item()


def _viewed(data: bytes | memoryview, dtype: np.dtype[Any], shape: Any) -> NDArray[Any]:
    if prod(shape) * dtype.itemsize != len(data):
        raise ClientError(f"{len(data)} bytes do not make an array of shape {shape[:MAX_DIMENSIONS]} and {dtype.str}")
    try:
        return np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError):  # an empty array may claim a shape beyond numpy's limits
        raise ClientError(f"shape {shape} is no array") from None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)


def type_of(name: Any) -> np.dtype[Any]:
    """The numpy type of a name; ClientError unless it is a number or a text."""
    if isinstance(name, memoryview):
        name = bytes(name).decode("ascii", "replace")
    dtype = _known(name) if isinstance(name, str) and _TYPE.fullmatch(name) else None
    if dtype is None:
        raise ClientError(printable(f"dtype {str(name)[:40]!r}: must be a number or text, as numpy writes it"))
    return dtype


@lru_cache(maxsize=64)
def _known(name: str) -> np.dtype[Any] | None:
    try:
        return np.dtype(name)
    except TypeError:
        return None
