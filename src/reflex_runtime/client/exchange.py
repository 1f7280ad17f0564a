"""Reads a server's answer, bounded in size and time, as a chunk that is safe to execute, a result, or an error.

httpx keeps the connections, and handles proxies, TLS and Unix sockets.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.client.errors import BadAnswer, ServerError, TimedOut, Unreachable, class_of

MAX_ANSWER: Final = 64 << 20  # bytes of an answer at most
_FLOATS = {"<f4": 4, "<f8": 8, "<f2": 2}


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class AnswerReader:
    """Collects the answer to one attempt, bounded in size and time. As a context it turns errors of httpx into ours.

    limit: seconds from now until the last part. timeouts: for httpx; always the rest of the limit.
    """

    def __init__(self, url: str, limit: float, clock: Callable[[], float]) -> None:
        self._url, self._limit, self._clock = url, limit, clock
        self._until, self._body = clock() + limit, bytearray()
        self.timeouts = dict.fromkeys(("connect", "write", "read"), limit)

    def trace(self, event: str, info: object) -> None:
        """Called by httpx when a phase begins or ends: the next one gets the rest of the limit, not all of it."""
        self.timeouts.update(dict.fromkeys(self.timeouts, max(1e-3, self._until - self._clock())))

    async def trace_awaited(self, event: str, info: object) -> None:
        self.trace(event, info)

    def take(self, part: bytes) -> None:
        self._body += part
        if len(self._body) > MAX_ANSWER:
            raise BadAnswer(f"{len(self._body)} bytes, at most {MAX_ANSWER} are read")
        if self._clock() > self._until:
            raise self._too_late()

    def reply(self, response: httpx.Response) -> Reply:
        return Reply(response.status_code, dict(response.headers), bytes(self._body))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, httpx.TransportError):
            return
        why = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            failed = TimedOut if isinstance(error, httpx.ConnectTimeout) else Unreachable
            raise failed(f"cannot connect to {self._url}: {why}", retry_safe=True) from None
        if isinstance(error, httpx.TimeoutException):
            raise self._too_late() from None
        if isinstance(error, httpx.RemoteProtocolError) and "connect" not in why:  # neither closed nor disconnected
            raise BadAnswer(f"not HTTP/1.1: {why}") from None
        raise Unreachable(f"{self._url} closed the connection before it had answered: {why}") from None

    def _too_late(self) -> TimedOut:
        return TimedOut(f"no answer from {self._url} within {self._limit:.3g} s")


@lru_cache(1)
def system_certificates() -> ssl.SSLContext:
    """The system's certificates, which may include a robot's own authority; httpx would use a list of its own."""
    return ssl.create_default_context()


# -- its content -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One answer.

    actions: float32 [n, action_dim], finite, in the robot's units, in their order of execution.
    timing: milliseconds by name (queue_ms, batch_ms, total_ms, age_ms). batch: id, size, reason, cost_ms.
    cache: hit, hit_stale, miss or off. guard: the changes of the action guard, or None.
    slot, model_version: of the policy that answered; None if the server does not send them.
    policy_changed: the server moved the episode to another policy; discard earlier plans.
    raw: the whole answer.
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


def result(reply: Reply) -> Any:
    """The result in an answer of /predict; for bytes and pictures the body as it is."""
    if "msgpack" not in reply.headers.get("content-type", ""):
        return reply.body
    try:
        return _arrays(msgspec.msgpack.decode(reply.body))
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is not msgpack: {error}", status=reply.status) from None


def _arrays(value: Any) -> Any:
    """The value with arrays in place of {dtype, shape, data}."""
    if isinstance(value, list):
        return [_arrays(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "shape", "data"} and isinstance(value["data"], bytes):
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    return {name: _arrays(part) for name, part in value.items()}


def decoded(reply: Reply) -> dict[str, Any]:
    """The object in a body of JSON or msgpack."""
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


class _Refusal(msgspec.Struct):
    """The body of an error in the server's own form."""

    error: str
    message: str
    retry_safe: Any = False
    request_id: Any = None


def refused(reply: Reply) -> ServerError:
    """The error of a reply that is not 2xx."""
    body: dict[str, Any] = {}
    try:
        body = decoded(reply)
        refusal = msgspec.convert(body, _Refusal)
    except (BadAnswer, msgspec.ValidationError):
        start = reply.body[:200].decode(errors="replace")
        refusal, body = _Refusal(f"http_{reply.status}", f"no error of a reflex server: {start!r}"), {}
    return class_of(refusal.error, reply.status)(
        refusal.message,
        code=refusal.error,
        status=reply.status,
        retry_safe=refusal.retry_safe is True,
        request_id=refusal.request_id if isinstance(refusal.request_id, str) else None,
        retry_after=_retry_after(reply.headers.get("retry-after")),
        body=body,
    )


def chunk(reply: Reply, request_id: str, attempts: int) -> Chunk:
    """The validated answer; BadAnswer if its actions are not safe to execute."""
    raw = decoded(reply)
    actions = _actions(raw.get("actions"))
    for name, size in (("num_actions", actions.shape[0]), ("action_dim", actions.shape[1])):
        if raw.get(name, size) != size:
            raise BadAnswer(f"{name} is {raw[name]!r}, but there are {size}", status=200)
    answered = raw.get("request_id")
    if request_id and isinstance(answered, str) and answered != request_id:
        raise BadAnswer(f"it is the answer to request {answered!r}", status=200)
    parts = (raw.get(name) for name in ("timing", "batch", "guard"))
    timing, batch, guard = (value if isinstance(value, dict) else {} for value in parts)
    return Chunk(
        actions=actions,
        request_id=answered if isinstance(answered, str) else request_id,
        timing={name: float(ms) for name, ms in timing.items() if type(ms) in (int, float) and abs(ms) < 1e300},
        batch=batch,
        cache=str(raw.get("cache", "off")),
        guard=guard or None,
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
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadAnswer(f"actions: {error}", status=200) from None
    if actions.ndim != 2 or 0 in actions.shape or not np.isfinite(actions).all():
        raise BadAnswer(f"actions: {list(actions.shape)}, expected finite [n, action_dim]", status=200)
    return actions


def _retry_after(text: str | None) -> float | None:
    """The seconds in Retry-After; None for a date, which proxies may send."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """The text of a header, which the server percent-encodes unless it is plain ASCII."""
    value = headers.get(name)
    if value is None:
        return None
    text = unquote(value)
    plain = text.isascii() and text.isprintable() and text == text.strip()
    return value if plain else text
