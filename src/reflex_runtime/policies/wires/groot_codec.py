"""The messages of GR00T's clients: msgpack, with arrays in one of two forms. Bytes in, values out, and back.

    {"__ndarray_class__": True, "as_npy": bytes}                           numpy.save: until the release of N1.7
    {"nd": True, "type": "<f4", "kind": "", "shape": [8], "data": bytes}   msgpack-numpy: N1.7 as it is now

The keys of these maps may be text or bytes. Answers have the first form, which all of them read. No array is unpickled:
neither form is read by numpy or msgpack-numpy.
"""

from __future__ import annotations

import io
import re
from typing import Any, Final

import msgspec
import numpy as np

from reflex_runtime.policies.wires.arrays import array_in, nd_in
from reflex_runtime.policies.wires.bounded_msgpack import unpack
from reflex_runtime.web.errors import ClientError

_MAGIC: Final = b"\x93NUMPY"
_LENGTHS: Final = {1: 2, 2: 4, 3: 4}  # bytes of the header's length, by version
_MAX_HEADER: Final = 1024
_HEADER: Final = re.compile(
    rb"\{'descr': '([^']{2,20})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,200})\), \}\s*"
)


def decode(frame: bytes) -> dict[str, Any]:
    """The map in a message, arrays as read-only views of it; ClientError when there is none."""
    value = decode_answer(frame)
    if not isinstance(value, dict):
        raise ClientError("the message must be a map with an endpoint")
    return value


def decode_answer(frame: bytes) -> Any:
    """What a server answers, with arrays in either form."""
    return unpack(frame, _array)


def encode(value: Any) -> bytes:
    """A message, as N1.6 writes it."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def modality_config(names: list[str], steps: int, as_text: bool) -> dict[str, Any]:
    """What get_modality_config tells of one modality. as_text: as N1.5 reads it."""
    told = {"delta_indices": list(range(steps)), "modality_keys": names}
    return {"__ModalityConfig_class__": True, "as_json": msgspec.json.encode(told).decode() if as_text else told}


def _array(found: dict[str, Any]) -> Any:
    """The array that a map stands for, else the map."""
    if "__ndarray_class__" in found:
        return _npy(found.get("as_npy"))
    return nd_in(found) if "nd" in found and "data" in found else found


def _npy(data: Any) -> Any:
    """The array in a file of numpy.save."""
    if not isinstance(data, memoryview) or bytes(data[:6]) != _MAGIC or len(data) < 12 or data[6] not in _LENGTHS:
        raise ClientError("as_npy is no file of numpy.save")
    start = 8 + _LENGTHS[data[6]]
    end = start + int.from_bytes(data[8:start], "little")
    header = _HEADER.fullmatch(data[start:end]) if end - start <= _MAX_HEADER else None
    shape = None if header is None else _shape(header[3])
    if header is None or shape is None:
        raise ClientError("as_npy has no header of an array of numbers or texts")
    turned = header[2] == b"True"
    array = array_in(data[end:], header[1].decode("ascii", "replace"), shape[::-1] if turned else shape)
    return array.T if turned else array


def _shape(text: bytes) -> list[int] | None:
    sizes = [size.strip() for size in text.split(b",")]
    if not sizes[-1]:
        del sizes[-1]
    return [int(size) for size in sizes] if all(size.isdigit() and len(size) < 20 for size in sizes) else None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}
    raise NotImplementedError(f"{type(value).__name__} is not written")
