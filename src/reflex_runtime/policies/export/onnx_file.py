"""Reads the description in an ONNX file without loading the model, for messages about files that do not load.

A few fields of the protocol buffer, found by walking over the rest: weights are never touched, whatever they weigh.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HALF: Final = ("float16", "bfloat16")
_LFS: Final = b"version https://git-lfs."  # how a file begins that Git LFS has not fetched

# Element types by number, and the field numbers used here, as onnx.proto has them.
_TYPES: Final = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
_MODEL_GRAPH, _MODEL_OPSETS = 7, 8
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 5, 11, 12
_TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL = 2, 8, 13
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class NotOnnx(ValueError):
    """The bytes are no ONNX model."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An input or output. dims: with the batch axis; a name if symbolic, None if not given. dims=None: unknown."""

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class External:
    """Where weights lie outside the file. location: relative to its directory; end: bytes the file must have."""

    location: str
    end: int


@dataclass(slots=True)
class OnnxFile:
    """The model's ports, opsets by domain ("" is ONNX itself), external data, and the types of its weights."""

    inputs: dict[str, Declared] = field(default_factory=dict)
    outputs: dict[str, Declared] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=dict)
    external: list[External] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)

    @property
    def half(self) -> bool:
        """Whether it computes in 16 bits somewhere, as far as its ports and weights tell."""
        ports = {port.dtype for port in (*self.inputs.values(), *self.outputs.values())}
        return any(kind in self.weights | ports for kind in HALF)


def read_onnx(path: Path) -> OnnxFile:
    """Read a file; NotOnnx when it is none, or has broken off. OSError when it cannot be read."""
    with path.open("rb") as stream:
        try:
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:
            raise NotOnnx("the file is empty; copy or export it again") from None
    if bytes(data[: len(_LFS)]) == _LFS:
        raise NotOnnx("a pointer of Git LFS, not the model; run git lfs pull where it was cloned")
    try:
        return _model(data)
    except NotOnnx:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:  # bytes that are no such message
        raise NotOnnx("not an ONNX model, or only part of one; copy or export it again") from error


def _model(data: memoryview) -> OnnxFile:
    found, graphs = OnnxFile(), 0
    for number, value in _fields(data):
        if number == _MODEL_OPSETS:
            opset = dict(_fields(value))
            found.opsets[_text(opset.get(1, b""))] = int(opset.get(2, 0))
        elif number == _MODEL_GRAPH:
            graphs += 1
            _graph(value, found)
    if not graphs or not found.outputs or not found.opsets:
        raise NotOnnx("it holds no whole graph; copy or export it again")
    return found


def _graph(data: memoryview, found: OnnxFile) -> None:
    names = set()
    for number, value in _fields(data):
        if number == _GRAPH_INPUT:
            port = _port(value)
            found.inputs[port.name] = port
        elif number == _GRAPH_OUTPUT:
            port = _port(value)
            found.outputs[port.name] = port
        elif number == _GRAPH_INITIALIZER:
            names.add(_tensor(value, found))
    for name in names & set(found.inputs):  # before IR version 4 weights were inputs as well
        del found.inputs[name]


def _port(data: memoryview) -> Declared:
    """ValueInfoProto: name 1, type 2 → tensor_type 1 → elem_type 1, shape 2 → dim 1 → dim_value 1, dim_param 2."""
    info = dict(_fields(data))
    tensor = dict(_fields(dict(_fields(info.get(2, b""))).get(1, b"")))
    dims: tuple[int | str | None, ...] | None = None
    if 2 in tensor:
        dims = tuple(_dim(dict(_fields(value))) for number, value in _fields(tensor[2]) if number == 1)
    return Declared(_text(info[1]), _TYPES.get(tensor.get(1, 0), "another type"), dims)


def _dim(dim: Mapping[int, Any]) -> int | str | None:
    return _text(dim[2]) if 2 in dim else dim.get(1)


def _tensor(data: memoryview, found: OnnxFile) -> str:
    """Note where a weight lies and of what type it is; returns its name."""
    name, entries = "", {}
    for number, value in _fields(data):
        if number == _TENSOR_TYPE:
            found.weights.add(_TYPES.get(value, "another type"))
        elif number == _TENSOR_NAME:
            name = _text(value)
        elif number == _TENSOR_EXTERNAL:
            entry = dict(_fields(value))
            entries[_text(entry[1])] = _text(entry.get(2, b""))
    if "location" in entries:
        offset, length = (int(entries.get(key) or 0) for key in ("offset", "length"))
        found.external.append(External(entries["location"], offset + length))
    return name


def _fields(data: memoryview | bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: an integer, or a view of the bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        value: Any = None
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise NotOnnx("not an ONNX model; copy or export it again")
        if at > end:
            raise NotOnnx("the file breaks off; copy or export it again")
        yield key >> 3, value


def _varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise NotOnnx("not an ONNX model; copy or export it again")


def _text(value: memoryview | bytes) -> str:
    return bytes(value).decode()
