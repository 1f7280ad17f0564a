"""The frames of vla-eval: msgpack maps {type, payload, seq, timestamp}. Bytes in, a message out, and back.

    {"__ndarray__": True, "data": bytes, "dtype": "<f4", "shape": [7]}
    {"__image__": True, "format": "png", "data": bytes, "shape": [256, 256, 3]}    or jpeg, or raw with a dtype
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from reflex_runtime.policies.wires.arrays import array_in
from reflex_runtime.policies.wires.bounded_msgpack import unpack
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.json import printable


@dataclass(frozen=True, slots=True)
class EvalMessage:
    """One message. seq: number of the sender; an answer repeats it."""

    type: str
    payload: dict[str, Any]
    seq: int = 0


def decode(frame: bytes) -> EvalMessage:
    """The message in a frame, arrays as views of it; ClientError when there is none. PNG and JPEG stay encoded."""
    value = unpack(frame, _array)
    if not isinstance(value, dict):
        raise ClientError("the frame must be a map with type, payload and seq")
    for name, kind in (("type", str), ("payload", dict), ("seq", int)):
        if type(value.get(name)) is not kind:
            raise ClientError(f"the frame needs `{name}`, and it must be {_KINDS[kind]}")
    return EvalMessage(value["type"], value["payload"], value["seq"])


_KINDS: Mapping[type, str] = {str: "a text", dict: "a map", int: "a whole number"}


def encode(message: EvalMessage) -> bytes:
    """A frame."""
    value = {"type": message.type, "payload": message.payload, "seq": message.seq, "timestamp": time.time()}
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
    raise NotImplementedError(f"{type(value).__name__} is not written")


def _array(found: dict[str, Any]) -> Any:
    """The array or encoded picture that a map represents, otherwise the map."""
    if "__image__" in found and found.get("format") != "raw":
        data, form = found.get("data"), found.get("format")
        if form not in ("png", "jpeg") or not isinstance(data, memoryview):
            raise ClientError(printable(f"an image needs data, and a format: png, jpeg or raw, not {str(form)[:40]!r}"))
        return data
    if "__image__" in found or "__ndarray__" in found:
        return array_in(found.get("data"), found.get("dtype"), found.get("shape"))
    return found
