"""Makes of a reply a chunk that is safe to execute, the error of its code, or `BadAnswer`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.client.errors import BY_CODE, BadAnswer, ServerError
from reflex_runtime.client.exchange import Reply

_FLOATS = {"<f4": 4, "<f8": 8, "<f2": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One answer.

    actions: float32 [n, action_dim], finite, in the robot's units, the first to be executed first.
    timing: milliseconds by name (queue_ms, batch_ms, total_ms, age_ms). batch: id, size, reason, cost_ms.
    cache: hit, hit_stale, miss or off. guard: what the action guard changed, or None.
    slot, model_version: which of two policies answered; None from a server with one.
    policy_changed: the episode was moved to another policy; discard plans made before.
    attempts: number of attempts. raw: the whole answer, with all its fields.
    """

    actions: NDArray[np.float32]
    request_id: str
    timing: Mapping[str, float]
    batch: Mapping[str, Any]
    cache: str
    guard: Mapping[str, Any] | None
    slot: str | None
    model_version: str | None
    policy_changed: bool
    attempts: int
    raw: Mapping[str, Any]


def decoded(reply: Reply) -> dict[str, Any]:
    """The object of a body, JSON or msgpack."""
    try:
        if "msgpack" in reply.headers.get("content-type", ""):
            value = msgspec.msgpack.decode(reply.body)
        else:
            value = json.loads(reply.body)
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise BadAnswer(f"the body cannot be read: {error}", status=reply.status) from None
    if not isinstance(value, dict):
        raise BadAnswer(f"the body is {type(value).__name__}, expected an object", status=reply.status)
    return value


def refused(reply: Reply) -> ServerError:
    """The error of a reply that is not 2xx. Only a body in the server's own form can say that a retry is safe."""
    try:
        body = decoded(reply)
    except BadAnswer:
        body = {}
    code, message = body.get("error"), body.get("message")
    if not isinstance(code, str) or not isinstance(message, str):
        start = reply.body[:200].decode(errors="replace")
        code, message, body = f"http_{reply.status}", f"no error of a reflex server: {start!r}", {}
    return BY_CODE.get(code, ServerError)(
        message,
        code=code,
        status=reply.status,
        retry_safe=body.get("retry_safe") is True,
        request_id=_text(body.get("request_id")),
        retry_after=_retry_after(reply.headers.get("retry-after")),
        body=body,
    )


def chunk(reply: Reply, request_id: str, attempts: int) -> Chunk:
    """The validated answer; BadAnswer for anything that is not safe to execute."""
    raw = decoded(reply)
    actions = _actions(raw.get("actions"))
    for name, size in (("num_actions", actions.shape[0]), ("action_dim", actions.shape[1])):
        if raw.get(name, size) != size:
            raise BadAnswer(f"{name} is {raw[name]!r}, and there are {size}", status=200)
    told = _text(raw.get("request_id"))
    if request_id and told not in (None, request_id):
        raise BadAnswer(f"it answers request {told!r}", status=200)
    return Chunk(
        actions=actions,
        request_id=request_id if told is None else told,
        timing={k: float(v) for k, v in _mapping(raw.get("timing")).items() if type(v) in (int, float)},
        batch=_mapping(raw.get("batch")),
        cache=str(raw.get("cache", "off")),
        guard=_mapping(raw.get("guard")) or None,
        slot=_header(reply.headers, "x-reflex-policy-slot"),
        model_version=_header(reply.headers, "x-reflex-model-version"),
        policy_changed=raw.get("policy_changed") is True,
        attempts=attempts,
        raw=raw,
    )


def _actions(value: Any) -> NDArray[np.float32]:
    try:
        if isinstance(value, dict):
            dtype, shape, data = value["dtype"], value["shape"], value["data"]
            if dtype not in _FLOATS or len(shape) != 2 or math.prod(shape) * _FLOATS[dtype] != len(data):
                raise ValueError(f"{len(data)} bytes do not make {shape} of {dtype}")
            actions = np.frombuffer(data, dtype).reshape(shape).astype(np.float32)
        else:
            actions = np.asarray(value, np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"actions: {error}", status=200) from None
    if actions.ndim != 2 or 0 in actions.shape or not np.isfinite(actions).all():
        raise BadAnswer(f"actions: {list(actions.shape)}, expected finite [n, action_dim]", status=200)
    return actions


def _retry_after(text: str | None) -> float | None:
    """The seconds of Retry-After; a date, which proxies may send, counts as none."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """A header's text; the server percent-encodes it if it is not plain ASCII."""
    value = headers.get(name)
    if value is None:
        return None
    text = unquote(value)
    plain = text.isascii() and text.isprintable() and text == text.strip()
    return value if plain else text
