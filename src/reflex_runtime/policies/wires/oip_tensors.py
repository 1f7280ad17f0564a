"""Tensors of the Open Inference Protocol, from raw bytes or from lists of values, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.wires.arrays import MAX_DIMENSIONS, array_in
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.json import printable

_DTYPES: Final = {
    "BOOL": "|b1", "UINT8": "|u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "|i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip

MAX_TEXTS: Final = 4096  # elements of a tensor of BYTES

Values = NDArray[Any] | list[bytes]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input. values: an array of `shape`, or of BYTES each element in C order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values


def tensor_of_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """A tensor from raw little-endian bytes; elements of BYTES have a length prefix."""
    size = _size(name, shape)
    if datatype == "BYTES":
        _check_texts(name, size)
        return Tensor(name, datatype, tuple(shape), _texts(name, size, memoryview(data)))
    try:
        values = array_in(data, _dtype(name, datatype), list(shape))
    except ClientError as error:
        raise invalid(printable(name), printable(f"{name}: {error.message}")) from None
    return Tensor(name, datatype, tuple(shape), values)


def tensor_of_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """A tensor from numbers or texts in C order: a list, which may be nested."""
    size = _size(name, shape)
    flat = _flat(name, values)
    if len(flat) != size:
        raise invalid(printable(name), printable(f"{name}: {len(flat)} values do not make shape {list(shape)}"))
    if datatype == "BYTES":
        _check_texts(name, size)
        if not all(isinstance(value, (str, bytes)) for value in flat):
            raise invalid(printable(name), printable(f"{name}: BYTES must be texts"))
        return Tensor(name, datatype, tuple(shape), [_bytes(value) for value in flat])
    dtype = np.dtype(_dtype(name, datatype))
    try:
        return Tensor(name, datatype, tuple(shape), _array(name, datatype, flat, dtype).reshape(shape))
    except ValueError:  # an empty tensor may claim a shape beyond numpy's limits
        raise invalid(printable(name), f"{name}: shape {list(shape)} is no array") from None


def _array(name: str, datatype: str, flat: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    kinds = {bool} if dtype.kind == "b" else {int, float} if dtype.kind == "f" else {int}
    if set(map(type, flat)) <= kinds:
        with suppress(OverflowError):
            return np.array(flat, dtype)
    raise invalid(printable(name), printable(f"{name}: holds what is no {datatype}"))


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _flat(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise invalid(printable(name), printable(f"{name}: its data must be a list"))
    flat: list[Any] = values
    for _ in range(MAX_DIMENSIONS):
        if not flat or not all(isinstance(value, list) for value in flat):
            break
        flat = [value for part in flat for value in part]
    return flat


def _size(name: str, shape: Sequence[int]) -> int:
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise invalid(printable(name), printable(f"{name}: shape must have at most {MAX_DIMENSIONS} whole numbers"))
    return prod(shape)


def _check_texts(name: str, size: int) -> None:
    if size > MAX_TEXTS:
        raise invalid(printable(name), printable(f"{name}: has {size} BYTES, at most {MAX_TEXTS} are read"))


def _dtype(name: str, datatype: str) -> str:
    if datatype not in _DTYPES:
        known = ", ".join((*_DTYPES, "BYTES"))
        raise invalid(printable(name), printable(f"{name}: datatype {datatype[:40]!r} is not one of {known}"))
    return _DTYPES[datatype]


def _texts(name: str, size: int, data: memoryview) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at + 4 <= len(data) and len(found) < size:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            break
        found.append(bytes(data[at + 4 : end]))
        at = end
    if at != len(data) or len(found) != size:
        raise invalid(printable(name), printable(f"{name}: {len(data)} bytes do not make {size} BYTES with lengths"))
    return found
