"""Arrays of bodies: bytes, type and shape must agree. And the bounds of JSON, checked before it is decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.fields import MAX_VALUES, brief, printable

MAX_DIMENSIONS: Final = 8
_TYPE: Final = re.compile(  # not V (structures), O (objects), c, M, m
    r"[<>|=]?[biufUS][1-9][0-9]{0,4}|bool|u?int(?:8|16|32|64)|float(?:16|32|64)"
)


def check_keys(found: Iterable[str], *known: str) -> None:
    """ClientError for a key that this form of an array does not have."""
    for key in found:
        if key not in known:
            raise ClientError(printable(f"an array has no {brief(key)}: it has {', '.join(known)}"))


def array_in(data: Any, dtype: Any, shape: Any) -> NDArray[Any]:
    """`data` (bytes or a memoryview) as a read-only array, not copied; ClientError if the three disagree."""
    known = type_of(dtype)
    few = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    if not isinstance(data, (bytes, memoryview)) or not few or not all(type(n) is int and n >= 0 for n in shape):
        raise ClientError(f"an array needs data and a shape of at most {MAX_DIMENSIONS} whole numbers")
    if prod(shape) * known.itemsize != len(data):
        raise ClientError(f"{len(data)} bytes do not make an array of shape {shape} and {known.str}")
    try:
        return np.ndarray(shape, known, buffer=data)
    except (ValueError, TypeError):  # an empty array may claim a shape beyond numpy's limits
        raise ClientError(f"shape {shape} is no array") from None


def type_of(name: Any) -> np.dtype[Any]:
    """The numpy type of a name; ClientError unless it is a number or a text."""
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    dtype = _known(name) if isinstance(name, str) and _TYPE.fullmatch(name) else None
    if dtype is None:
        raise ClientError(printable(f"dtype {brief(name)}: must be a number or text, such as float32 or <f4"))
    return dtype


@lru_cache(maxsize=64)
def _known(name: str) -> np.dtype[Any] | None:
    try:
        return np.dtype(name)
    except TypeError:
        return None


MAX_JSON: Final = 2 << 20  # bytes; decoding one MB blocks the interpreter for up to 50 ms
MAX_LISTS: Final = 70_000  # a picture of 256 × 256 has 65,793


def check_json(text: bytes) -> None:
    """ClientError for JSON with more values than the fields of a request and one picture as nested lists have."""
    if text.count(b",") > MAX_VALUES and (
        len(text) > MAX_JSON or text.count(b"[") > MAX_LISTS or text.count(b"{") > MAX_VALUES
    ):
        raise ClientError(f"the JSON is over {MAX_JSON >> 20} MB or {MAX_LISTS} lists: send arrays as binary data")
