"""One attempt over httpx, and what becomes of its reply: a chunk that is safe to execute, or an error.

httpx keeps the connections, with proxies, TLS and Unix sockets. This file adds what a robot needs beside that: one
limit for the whole attempt, a bound on the answer, and one more attempt where a kept connection had been closed.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.client.errors import BadAnswer, ClientError, ServerError, TimedOut, Unreachable, class_of

MAX_ANSWER: Final = 64 << 20  # bytes of an answer that are read at most
_FLOATS = {"<f4": 4, "<f8": 8, "<f2": 2}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Attempt:
    """The state of one attempt, without waiting: its limits for httpx, what came so far, and which error a failure is.

    limit: seconds until its answer must be there. An answer that trickles in ends late, at most after twice the limit:
    httpx bounds a part, not the body.
    """

    url: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    limit: float
    clock: Callable[[], float]
    again: bool = True  # another attempt may follow
    kept: bool = field(default=True, init=False)  # until it connects
    status: int | None = field(default=None, init=False)
    parts: list[bytes] = field(default_factory=list, init=False)
    size: int = field(default=0, init=False)
    until: float = field(init=False)
    timeouts: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.until = self.clock() + self.limit

    def request(self, trace: Callable[..., Any]) -> dict[str, Any]:
        """The arguments of httpx's `stream`. trace: `note`, or that awaited."""
        return {
            "method": self.method, "url": self.url + self.path, "headers": dict(self.headers), "content": self.body,
            "extensions": {"timeout": self.timeouts, "trace": trace},
        }  # fmt: skip

    def note(self, event: str, _: Mapping[str, Any]) -> None:
        """A phase of the request begins or ends: each gets what is left of the attempt's time."""
        left = max(1e-3, self.until - self.clock())
        self.timeouts.update(connect=left, write=left, read=left)
        if event.startswith("connection.connect_"):
            self.kept = False

    async def note_awaited(self, event: str, info: Mapping[str, Any]) -> None:
        self.note(event, info)

    def begin(self, response: httpx.Response) -> None:
        """The head of the answer is there."""
        self.status = response.status_code
        self._bound(int(response.headers.get("content-length", 0)))

    def take(self, part: bytes) -> None:
        self.size += len(part)
        self._bound(self.size)
        self.parts.append(part)
        if self.clock() > self.until:
            raise self._too_late()

    def reply(self, response: httpx.Response) -> Reply:
        return Reply(response.status_code, dict(response.headers), b"".join(self.parts))

    def failed(self, error: httpx.TransportError | ClientError) -> ClientError | None:
        """What is wrong; None where a kept connection was closed, perhaps long ago, before the head of the answer came:
        the request may go out once more."""
        if isinstance(error, ClientError):
            return error
        why = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            kind = TimedOut if isinstance(error, httpx.ConnectTimeout) else Unreachable
            return kind(f"cannot connect to {self.url}: {why}", retry_safe=True)
        if isinstance(error, httpx.TimeoutException):
            return self._too_late()
        if isinstance(error, httpx.RemoteProtocolError) and "connect" not in why:  # neither closed nor disconnected
            return BadAnswer(f"not HTTP/1.1: {why}")
        if self.again and self.kept and self.status is None:
            return None
        return Unreachable(f"{self.url} closed the connection before it had answered: {why}")

    def _too_late(self) -> TimedOut:
        return TimedOut(f"no answer from {self.url} within {self.limit:.3g} s")

    def _bound(self, size: int) -> None:
        if size > MAX_ANSWER:
            raise BadAnswer(f"{size} bytes, at most {MAX_ANSWER} are read", status=self.status)


@lru_cache(1)
def system_certificates() -> ssl.SSLContext:
    """httpx alone would trust the certificates that it brings, and not a robot's own authority."""
    return ssl.create_default_context()


# -- what came ---------------------------------------------------------------------------------------------------------


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


def result(reply: Reply) -> Any:
    """The result in an answer of /predict; bytes and pictures are the body itself."""
    if "msgpack" not in reply.headers.get("content-type", ""):
        return reply.body
    try:
        return _arrays(msgspec.msgpack.decode(reply.body))
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is not msgpack: {error}", status=reply.status) from None


def _arrays(value: Any) -> Any:
    """The same with arrays where it has {dtype, shape, data}."""
    if isinstance(value, list):
        return [_arrays(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "shape", "data"} and isinstance(value["data"], bytes):
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    return {name: _arrays(part) for name, part in value.items()}


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


class _Refusal(msgspec.Struct):
    """A body in the server's own form: only that has `retry_safe`."""

    error: str
    message: str
    retry_safe: Any = False
    request_id: Any = None


def refused(reply: Reply) -> ServerError:
    """The error of a reply that is not 2xx."""
    body: dict[str, Any] = {}
    try:
        body = decoded(reply)
        told = msgspec.convert(body, _Refusal)
    except (BadAnswer, msgspec.ValidationError):
        start = reply.body[:200].decode(errors="replace")
        told, body = _Refusal(f"http_{reply.status}", f"no error of a reflex server: {start!r}"), {}
    return class_of(told.error, reply.status)(
        told.message,
        code=told.error,
        status=reply.status,
        retry_safe=told.retry_safe is True,
        request_id=told.request_id if isinstance(told.request_id, str) else None,
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
    told = raw.get("request_id")
    if request_id and isinstance(told, str) and told != request_id:
        raise BadAnswer(f"it answers request {told!r}", status=200)
    told_of = (raw.get(name) for name in ("timing", "batch", "guard"))
    timing, batch, guard = (value if isinstance(value, dict) else {} for value in told_of)
    return Chunk(
        actions=actions,
        request_id=told if isinstance(told, str) else request_id,
        timing={name: float(value) for name, value in timing.items() if type(value) in (int, float)},
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


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """A header's text; the server percent-encodes it if it is not plain ASCII."""
    value = headers.get(name)
    if value is None:
        return None
    text = unquote(value)
    plain = text.isascii() and text.isprintable() and text == text.strip()
    return value if plain else text
