"""The frames of XPolicyLab: msgpack maps with an envelope and a payload, arrays as msgpack-numpy writes them.

    {message_type, message_id, evaluation_id, action_case_id, trial_id, repeat_index, step, sent_at, payload}
    {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [8], b"data": bytes}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np

from reflex_runtime.policies.wires.bounded_msgpack import unpack
from reflex_runtime.policies.wires.common import nd_in
from reflex_runtime.web.errors import ClientError

_ENVELOPE: Final = ("message_id", "evaluation_id", "action_case_id", "trial_id", "repeat_index", "step")


@dataclass(frozen=True, slots=True)
class LabFrame:
    """One message. envelope: what it belongs to; an answer repeats it."""

    type: str
    envelope: dict[str, Any]
    payload: dict[str, Any] = field(default_factory=dict)


def decode(data: bytes) -> LabFrame:
    """The message in a frame, arrays as read-only views of it; ClientError when there is none."""
    value = unpack(data, _array)
    if not isinstance(value, dict):
        raise ClientError("the frame must be a map with message_type, message_id and payload")
    kind, payload = value.get("message_type"), value.get("payload") or {}
    if not isinstance(kind, str) or not isinstance(payload, dict):
        raise ClientError("the frame needs message_type, a text, and a payload that is a map")
    envelope = {name: value.get(name) for name in _ENVELOPE} | {"step": value.get("step", 0)}
    for name, found in envelope.items():
        if found is None and name in ("message_id", "evaluation_id"):
            raise ClientError(f"the frame needs {name}")
        if found is not None and type(found) not in (str, int):
            raise ClientError(f"{name} must be a text or a whole number")
    return LabFrame(kind, envelope, payload)


def encode(frame: LabFrame) -> bytes:
    """A frame."""
    sent_at = datetime.now(UTC).isoformat()
    value = {"message_type": frame.type, **frame.envelope, "sent_at": sent_at, "payload": frame.payload}
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _array(found: dict[str, Any]) -> Any:
    return nd_in(found) if "nd" in found and "data" in found else found


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data, dtype = value.tobytes(), value.dtype.str
        return {b"nd": True, b"type": dtype, b"kind": b"", b"shape": value.shape, b"data": data}
    raise NotImplementedError(f"{type(value).__name__} is not written")
