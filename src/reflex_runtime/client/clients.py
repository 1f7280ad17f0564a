"""`Client` and `AsyncClient`: the same coroutines, which suspend in an `AsyncClient` and block in a `Client`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import ssl
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack, overload
from urllib.parse import quote, urlencode

import httpx
import msgspec

from reflex_runtime.client.calls import (
    ActFields,
    Encoding,
    Priority,
    check_deadline,
    observation,
    pause_after,
    plain_item,
)
from reflex_runtime.client.errors import ClientError, Unreachable
from reflex_runtime.client.exchange import (
    AnswerReader,
    Chunk,
    Reply,
    chunk,
    decoded,
    refused,
    result,
    system_certificates,
)

log = logging.getLogger("reflex.client")

GRACE: Final = 0.5  # seconds after the deadline for the server's own error of a late answer to arrive

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="BaseClient")


class Method(Generic[P, T]):
    """A coroutine as a method of both clients, and of their episodes: that of an `AsyncClient` is awaited."""

    def __init__(self, call: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        call.__qualname__ = call.__qualname__.replace("._", ".")  # so that Python's errors have its public name
        self._call = call

    @overload
    def __get__(self, owner: None, kind: Any) -> Self: ...
    @overload
    def __get__(self, owner: Client | Episode[Client], kind: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, owner: AsyncClient | Episode[AsyncClient], kind: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, owner: Any, kind: Any) -> Any:
        if owner is None:
            return self

        @wraps(self._call)
        def method(*args: P.args, **fields: P.kwargs) -> Any:
            return owner.run(self._call(owner, *args, **fields))

        return method


def _host_in(url: str) -> str:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"url={url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > 65535:
        raise ValueError(f"url={url!r}: expected http://HOST:PORT or https://HOST")
    return parts.host


class BaseClient:
    """The options and the calls of both clients.

    url: http://HOST:PORT, with an optional path prefix. api_key: sent as Authorization: Bearer.
    timeout: most seconds of a call, pauses and further attempts included.
    retries: most further attempts after an error that allows them, see `pause_after`.
    encoding: of pictures given as arrays: "raw" (uncompressed), "png" (smaller, the same pixels) or "jpeg" (smallest,
        with loss).
    uds: path of the server's Unix socket; `url` then gives only Host and prefix.
    proxy: URL of a proxy; by default HTTP_PROXY, HTTPS_PROXY and NO_PROXY, except for a server on this machine.
    verify: True checks TLS against the system's certificates; an ssl.SSLContext has others or a client certificate.
    clock, sleep, spread: for tests; an `AsyncClient` awaits `sleep`.
    """

    _kind: ClassVar[tuple[Any, Any]]  # httpx's client and transport
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 5,
        encoding: Encoding = "raw",
        uds: str | None = None,
        proxy: str | None = None,
        verify: ssl.SSLContext | bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] | None = None,
        spread: Callable[[], float] = random.random,
    ) -> None:
        host = _host_in(url)
        if not (isinstance(timeout, int | float) and 0.0 < timeout < math.inf):
            raise ValueError(f"timeout={timeout!r}: must be seconds > 0")
        if not (isinstance(retries, int) and retries >= 0):
            raise ValueError(f"retries={retries!r}: must be >= 0")
        if encoding not in ("raw", "png", "jpeg"):
            raise ValueError(f"encoding={encoding!r}: must be 'raw', 'png' or 'jpeg'")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: must be printable ASCII")
        if not isinstance(verify, bool | ssl.SSLContext):
            raise ValueError(f"verify={verify!r}: must be True, False or an ssl.SSLContext")
        self.url, self._api_key, self._timeout, self._retries = url.rstrip("/"), api_key, timeout, retries
        self._encoding, self._clock, self._spread = encoding, clock, spread
        self._sleep: Callable[[float], Any] = sleep or (time.sleep if isinstance(self, Client) else asyncio.sleep)
        here = host in ("localhost", "::1") or host.startswith("127.")
        self._uds, self._options = uds, {  # the environment's proxies are not for a server on this machine
            "proxy": proxy, "verify": system_certificates() if verify is True else verify, "trust_env": not here,
            "headers": {"Accept-Encoding": "identity"},  # a compressed answer could unfold to any size
        }  # fmt: skip
        self._http = self._open()

    def _open(self) -> Any:
        """A client of httpx."""
        kind, transport = self._kind
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        socket = transport(self._options["verify"], uds=self._uds, limits=limits) if self._uds else None
        return kind(transport=socket, limits=limits, **self._options)

    # -- calls: coroutines that both clients run -----------------------------------------------------------------------

    async def _act(self, **fields: Unpack[ActFields]) -> Chunk:
        """The next actions for this observation, see `ActFields`: POST /act. A later attempt sends the rest of the
        deadline. Raises a ClientError; ValueError or TypeError for arguments that no server would accept.
        """
        began = self._clock()
        request = observation(fields, self._encoding)
        request_id, episode = str(request["request_id"]), request.get("episode_id") or request.get("robot_id")
        try:
            reply, made = await self._ask("POST", "/act", request, request.get("deadline_ms"), episode, began)
            return chunk(reply, request_id, made)
        except ClientError as error:
            error.request_id = error.request_id or request_id
            raise

    async def _predict(
        self,
        item: Any,
        function: str = "",
        *,
        deadline_ms: float | None = None,
        priority: Priority | None = None,
        client: str | None = None,
        request_id: str | None = None,
    ) -> Any:
        """The result of a function for one item: POST /predict, see docs/functions.md.

        item: may have arrays, dataclasses, structs, pydantic models and pictures; arrays in a result are arrays again.
        function: its name, if the server has several. client: in whose fair share it counts. A later attempt sends the
        rest of the deadline.
        """
        request_id = request_id or uuid.uuid4().hex
        options = {"priority": priority, "client": client, "request_id": request_id}
        query = urlencode({name: value for name, value in options.items() if value is not None})
        check_deadline(deadline_ms)
        body = msgspec.msgpack.encode(item, enc_hook=plain_item)
        path = f"/predict/{quote(function, safe='')}" if function else "/predict"
        try:
            reply, _ = await self._ask("POST", f"{path}?{query}", body, deadline_ms)
        except ClientError as error:
            error.request_id = error.request_id or request_id
            raise
        return result(reply)

    async def _get(self, path: str) -> dict[str, Any]:
        """GET a JSON object, such as /config; repeated while the server is unreachable or only a proxy answers."""
        reply, _ = await self._ask("GET", path, kind="json")
        return decoded(reply)

    async def _health(self) -> dict[str, Any]:
        """The body of /health: its "state" is "ready" when the server serves. One attempt."""
        reply = await self._attempt("GET", "/health", self._headers("json"), None, self._timeout)
        if reply.status not in (200, 503):
            raise refused(reply)
        return decoded(reply)

    async def _post(self, path: str, fields: Mapping[str, Any], episode: str | None = None) -> dict[str, Any]:
        """POST a JSON object to a path, such as /admin/split {"split": 50}. episode: its id, for a balancer."""
        body = json.dumps(dict(fields)).encode()
        reply, _ = await self._ask("POST", path, body, episode=episode, kind="json")
        return decoded(reply) if reply.body else {}

    async def _report_outcome(
        self, episode_id: str, success: bool, reward: float | None = None, robot_id: str | None = None
    ) -> dict[str, Any]:
        """Report how an episode ended, which `episode` does by itself. robot_id: that of its requests."""
        if success not in (True, False):
            raise ValueError(f"success={success!r}: must be True or False")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward={reward!r}: must be finite")
        fields = {"success": bool(success), "reward": None if reward is None else float(reward), "robot_id": robot_id}
        body = {name: value for name, value in fields.items() if value is not None}
        return await self._post(f"/episodes/{quote(episode_id, safe='')}/outcome", body, episode_id)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        deadline_ms: float | None = None,
        episode: str | None = None,
        began: float | None = None,
        kind: str = "msgpack",
    ) -> tuple[Reply, int]:
        """Returns a 2xx reply and the number of attempts, or raises the last attempt's error.

        body: fields, to which the rest of the deadline is added; for bytes a header has it. episode: sent as a header,
        by which a balancer sends an episode to one server. began: when the call began, if earlier.
        """
        headers, began = self._headers(kind), self._clock() if began is None else began
        if episode:
            headers["X-Reflex-Episode"] = quote(str(episode), safe="", errors="replace")
        deadline = math.inf if deadline_ms is None else deadline_ms / 1e3
        limit, until, made = min(self._timeout, deadline + GRACE), began + min(self._timeout, deadline), 0
        sent = body if isinstance(body, bytes) else None
        while True:
            now = self._clock()
            left_ms = None if deadline_ms is None else max(1e-3, deadline_ms - (now - began) * 1e3)
            if isinstance(body, Mapping):
                sent = msgspec.msgpack.encode(body if left_ms is None else {**body, "deadline_ms": left_ms})
            elif left_ms is not None:
                headers["X-Reflex-Deadline-Ms"] = f"{left_ms:.3f}"
            try:
                reply = await self._attempt(method, path, headers, sent, max(1e-3, began + limit - now))
                if 200 <= reply.status < 300:
                    return reply, made + 1
                raise refused(reply)
            except ClientError as error:
                if method == "GET" and (isinstance(error, Unreachable) or error.status in (502, 503, 504)):
                    error.retry_safe = True  # a GET changes nothing
                pause = pause_after(error, made, self._spread())
                if pause is None or made >= self._retries or self._clock() + pause >= until:
                    raise
                log.warning("%s %s is repeated in %.1f s: %s", method, path, pause, error)
            made += 1
            await self._pause(pause)

    async def _attempt(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, limit: float
    ) -> Reply:
        """The reply to one request. limit: seconds until the end of the answer."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    def _headers(self, kind: str) -> dict[str, str]:
        headers = dict.fromkeys(("Content-Type", "Accept"), f"application/{kind}")
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    act = Method(_act)
    predict = Method(_predict)
    health = Method(_health)
    get = Method(_get)
    post = Method(_post)
    report_outcome = Method(_report_outcome)

    def episode(
        self, episode_id: str | None = None, robot_id: str | None = None, instruction: str | None = None
    ) -> Episode[Self]:
        """An episode for `with` or `async with`: its `act` sends the ids, its end reports the outcome."""
        return Episode(self, episode_id or f"ep-{uuid.uuid4().hex}", robot_id, instruction)


class Client(BaseClient):
    """Calls one server over kept connections; may be used by several threads at once. Arguments: see `BaseClient`."""

    _kind = httpx.Client, httpx.HTTPTransport

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        old, self._http = self._http, self._open()
        old.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call. The coroutine blocks and never suspends, so that one step ends it."""
        try:
            call.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        raise AssertionError("a call of a Client suspends")

    async def _attempt(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, limit: float
    ) -> Reply:
        answer = AnswerReader(self._uds or self.url, limit, self._clock)
        more = {"timeout": answer.timeouts, "trace": answer.trace}
        stream = self._http.stream(method, self.url + path, headers=headers, content=body, extensions=more)
        with answer, stream as came:
            for part in came.iter_raw():
                answer.take(part)
        return answer.reply(came)

    async def _pause(self, seconds: float) -> None:
        self._sleep(seconds)


class AsyncClient(BaseClient):
    """`Client` for asyncio; may be used by several tasks at once. Arguments: see `BaseClient`. Cancelling a task that
    waits closes its connection, and the server drops the request."""

    _kind = httpx.AsyncClient, httpx.AsyncHTTPTransport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        old, self._http = self._http, self._open()
        await old.aclose()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call."""
        return await call

    async def _attempt(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, limit: float
    ) -> Reply:
        answer = AnswerReader(self._uds or self.url, limit, self._clock)
        more = {"timeout": answer.timeouts, "trace": answer.trace_awaited}
        stream = self._http.stream(method, self.url + path, headers=headers, content=body, extensions=more)
        with answer:
            async with stream as came:
                async for part in came.aiter_raw():
                    answer.take(part)
        return answer.reply(came)

    async def _pause(self, seconds: float) -> None:
        await self._sleep(seconds)


@dataclass(slots=True)
class Episode(Generic[C]):
    """One episode of a client, for `with` or, of an `AsyncClient`, `async with`.

    success: the outcome; set it in the block. If it is unset, an exception makes it False, but no interruption
        (KeyboardInterrupt, a cancelled task), which is no failure of the policy. None is unknown and not reported.
    reward: reported with it. reported: whether the server accepted the report; a failure is logged, not raised.
    changed: the server moved the episode to another policy.
    """

    client: C
    episode_id: str
    robot_id: str | None = None
    instruction: str | None = None
    success: bool | None = None
    reward: float | None = None
    reported: bool = field(default=False, init=False)
    changed: bool = field(default=False, init=False)

    @property
    def run(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        return self.client.run

    async def _act(self, **fields: Unpack[ActFields]) -> Chunk:
        """POST /act, with the episode's ids and instruction."""
        own: ActFields = {"episode_id": self.episode_id, "robot_id": self.robot_id, "instruction": self.instruction}
        chunk = await self.client._act(**own | fields)
        self.changed = self.changed or chunk.policy_changed
        return chunk

    async def _ended(self, error: object) -> None:
        """Report the outcome of the block, which ended with this exception or with None."""
        if self.success is None and isinstance(error, Exception):
            self.success = False
        if self.success is None:
            return
        try:
            await self.client._report_outcome(self.episode_id, self.success, self.reward, self.robot_id)
            self.reported = True
        except (ClientError, ValueError) as lost:
            if error is None and isinstance(lost, ValueError):
                raise
            log.warning("the outcome of episode %s (success=%s) was not taken: %s", self.episode_id, self.success, lost)

    act = Method(_act)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self.run(self._ended(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: object, _trace: object) -> None:
        await self.run(self._ended(error))
