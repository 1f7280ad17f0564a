"""`Client` and `AsyncClient`: they do what a call's generator yields, waiting in the thread or in the task."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import httpx

from reflex_runtime.client.calls import ActFields, Call, Calls, Encoding, T, Wire
from reflex_runtime.client.errors import ClientError
from reflex_runtime.client.exchange import Attempt, Chunk, Network, Reply

log = logging.getLogger("reflex.client")

P = ParamSpec("P")
C = TypeVar("C", bound="BaseClient")


class Method(Generic[P, T]):
    """A call as a method of both clients, and of their episodes: `AsyncClient`'s is awaited."""

    def __init__(self, call: Callable[Concatenate[Any, P], Call[T]]) -> None:
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
            return owner.run(self._call(owner.calls, *args, **fields))

        return method


class BaseClient:
    """What both clients have: where the server is, and how calls are made.

    url: http://HOST:PORT, with an optional path prefix. api_key: sent as Authorization: Bearer.
    timeout: most seconds of a call, pauses and further attempts included.
    retries: most further attempts after a refusal, see `Retries`; 0 is none.
    wire: "msgpack", which carries pictures and numbers as bytes, or "json".
    encoding: of pictures given as arrays: "raw" (uncompressed; over JSON as PNG), "png" (smaller, the same pixels) or
        "jpeg" (smallest, and not quite the same pixels).
    uds: path of the server's Unix socket; `url` then gives only Host and prefix.
    proxy: URL of a proxy; without it, HTTP_PROXY, HTTPS_PROXY and NO_PROXY count, but not for a server on this machine.
    verify: True checks TLS against the system's certificates; an ssl.SSLContext brings others or a client certificate.
    sleep: by default that of `time` or `asyncio`; an `AsyncClient` awaits it.
    """

    _kind: ClassVar[tuple[Any, Any]]  # of httpx
    run: Callable[[Call[Any]], Any]

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 5,
        wire: Wire = "msgpack",
        encoding: Encoding = "raw",
        uds: str | None = None,
        proxy: str | None = None,
        verify: ssl.SSLContext | bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] | None = None,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._network = Network(url, uds, proxy, verify)
        self.calls = Calls(self._network.url, api_key, timeout, retries, wire, encoding, clock, spread)
        self._sleep: Callable[[float], Any] = sleep or (time.sleep if isinstance(self, Client) else asyncio.sleep)
        self._http = self._network.open(*self._kind)

    act = Method(Calls.act)
    predict = Method(Calls.predict)
    health = Method(Calls.health)
    get = Method(Calls.get)
    post = Method(Calls.post)
    report_outcome = Method(Calls.report_outcome)

    def episode(
        self, episode_id: str | None = None, robot_id: str | None = None, instruction: str | None = None
    ) -> Episode[Self]:
        """An episode for a `with` (`async with`) statement: its `act` sends the ids, and its outcome is reported at the
        end of the block."""
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
        old, self._http = self._http, self._network.open(*self._kind)
        old.close()

    def run(self, call: Call[T]) -> T:
        """Carry out the call's attempts and pauses until it returns."""
        came: Reply | ClientError | None = None
        while True:
            try:
                step = call.send(came)
            except StopIteration as done:
                result: T = done.value
                return result
            came = self._attempt(step) if isinstance(step, Attempt) else self._sleep(step)

    def _attempt(self, attempt: Attempt) -> Reply | ClientError | None:
        try:
            with self._http.stream(**attempt.request(attempt.note)) as response:
                attempt.begin(response)
                for part in response.iter_raw():
                    attempt.take(part)
                return attempt.reply(response)
        except (httpx.TransportError, ClientError) as error:
            return attempt.failed(error)


class AsyncClient(BaseClient):
    """`Client` for asyncio; may be used by several tasks at once. Arguments: see `BaseClient`.

    Cancelling a task that waits closes its connection, and the server drops the request.
    """

    _kind = httpx.AsyncClient, httpx.AsyncHTTPTransport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        old, self._http = self._http, self._network.open(*self._kind)
        await old.aclose()

    async def run(self, call: Call[T]) -> T:
        """Carry out the call's attempts and pauses until it returns."""
        came: Reply | ClientError | None = None
        while True:
            try:
                step = call.send(came)
            except StopIteration as done:
                result: T = done.value
                return result
            came = await (self._attempt(step) if isinstance(step, Attempt) else self._sleep(step))

    async def _attempt(self, attempt: Attempt) -> Reply | ClientError | None:
        try:
            async with self._http.stream(**attempt.request(attempt.note_awaited)) as response:
                attempt.begin(response)
                async for part in response.aiter_raw():
                    attempt.take(part)
                return attempt.reply(response)
        except (httpx.TransportError, ClientError) as error:
            return attempt.failed(error)


@dataclass(slots=True)
class Episode(Generic[C]):
    """One episode of a client, for `with` or, of an `AsyncClient`, `async with`.

    success: how it ended; set it in the block. An exception in the block makes an unset one False. None is not
    reported, because the client does not know the outcome. An interrupted episode (KeyboardInterrupt, a cancelled task)
    is not reported either, because that is no failure of the policy.
    reward: reported with it. reported: the server has accepted the report; a report that fails is logged, not raised.
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
    def calls(self) -> Self:
        return self

    @property
    def run(self) -> Callable[[Call[Any]], Any]:
        return self.client.run

    def _act(self, **fields: Unpack[ActFields]) -> Call[Chunk]:
        """POST /act, with the episode's ids and instruction."""
        own: ActFields = {"episode_id": self.episode_id, "robot_id": self.robot_id, "instruction": self.instruction}
        chunk = yield from self.client.calls.act(**own | fields)
        self.changed = self.changed or chunk.policy_changed
        return chunk

    def _ended(self, error: object) -> Call[None]:
        """The block has ended, with this exception or without: report the outcome if there is one."""
        if self.success is None and isinstance(error, Exception):
            self.success = False
        if self.success is None:
            return
        try:
            yield from self.client.calls.report_outcome(self.episode_id, self.success, self.reward, self.robot_id)
            self.reported = True
        except ClientError as lost:
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
