"""`Client` and `AsyncClient`: they do what a call's generator yields, waiting in the thread or in the task."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from reflex_runtime.client.answers import Chunk
from reflex_runtime.client.calls import Call, Calls, Outcome, Pause, T
from reflex_runtime.client.episodes import BaseEpisode, new_id
from reflex_runtime.client.errors import ClientError
from reflex_runtime.client.exchange import AsyncConnections, Network, SyncConnections
from reflex_runtime.client.requests import ActFields, Encoding, Wire


class Client:
    """Calls one server over kept connections; may be used by several threads at once.

    url: http://HOST:PORT, with an optional path prefix. api_key: sent as Authorization: Bearer.
    timeout: most seconds of a call, pauses and further attempts included.
    retries: most further attempts after a refusal, see `Retries`; 0 is none.
    wire: "msgpack", which carries pictures and numbers as bytes, or "json".
    encoding: of pictures given as arrays: "raw" (uncompressed; over JSON as PNG), "png" (smaller, the same pixels) or
        "jpeg" (smallest, and not quite the same pixels).
    uds: path of the server's Unix socket; `url` then gives only Host and prefix.
    proxy: URL of a proxy; without it, HTTP_PROXY, HTTPS_PROXY and NO_PROXY count, but not for a server on this machine.
    verify: True checks TLS against the system's certificates; an ssl.SSLContext brings others or a client certificate.
    """

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
        sleep: Callable[[float], None] = time.sleep,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._calls = Calls(api_key, timeout, retries, wire, encoding, clock, spread)
        self._connections = SyncConnections(Network(url, uds, proxy, verify), clock)
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        self._connections.close()

    def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """The next actions for this observation, see `ActFields`.

        Raises the ClientError of the server's error code; ValueError for arguments that no server would accept.
        """
        return self._run(self._calls.act(fields))

    def health(self) -> dict[str, Any]:
        """The body of /health, ready or not: `["state"] == "ready"` when the server serves. One attempt."""
        return self._run(self._calls.health())

    def config(self) -> dict[str, Any]:
        """The export's configuration and the server's settings."""
        return self.get("/config")

    def get(self, path: str) -> dict[str, Any]:
        """GET any other path that answers JSON, such as /diagnostics/rollout."""
        return self._run(self._calls.get(path))

    def post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """POST a JSON object to any other path, such as /admin/split {"split": 50}; returns the answer."""
        return self._run(self._calls.post(path, fields))

    def report_outcome(self, episode_id: str, success: bool, reward: float | None = None) -> dict[str, Any]:
        """Report how an episode ended. `episode` does this by itself."""
        return self._run(self._calls.outcome(episode_id, success, reward))

    def episode(
        self, episode_id: str | None = None, robot_id: str | None = None, instruction: str | None = None
    ) -> Episode:
        """An episode for a with statement: its `act` sends the ids, and its outcome is reported at the end of the
        block."""
        return Episode(self, episode_id or new_id(), robot_id, instruction)

    def _run(self, call: Call[T]) -> T:
        """Carry out the call's `Send`s and `Pause`s until it returns."""
        came: Outcome = None
        while True:
            try:
                step = call.send(came)
            except StopIteration as done:
                result: T = done.value
                return result
            came = None
            if isinstance(step, Pause):
                self._sleep(step.seconds)
                continue
            try:
                came = self._connections.exchange(step)
            except ClientError as error:
                came = error


class AsyncClient:
    """`Client` for asyncio; may be used by several tasks at once. Arguments as there; `sleep` is awaited."""

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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._calls = Calls(api_key, timeout, retries, wire, encoding, clock, spread)
        self._connections = AsyncConnections(Network(url, uds, proxy, verify), clock)
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        await self._connections.close()

    async def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """As `Client.act`. Cancelling the task closes the connection, and the server drops the request."""
        return await self._run(self._calls.act(fields))

    async def health(self) -> dict[str, Any]:
        return await self._run(self._calls.health())

    async def config(self) -> dict[str, Any]:
        return await self.get("/config")

    async def get(self, path: str) -> dict[str, Any]:
        return await self._run(self._calls.get(path))

    async def post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return await self._run(self._calls.post(path, fields))

    async def report_outcome(self, episode_id: str, success: bool, reward: float | None = None) -> dict[str, Any]:
        return await self._run(self._calls.outcome(episode_id, success, reward))

    def episode(
        self, episode_id: str | None = None, robot_id: str | None = None, instruction: str | None = None
    ) -> AsyncEpisode:
        """As `Client.episode`, for an async with statement."""
        return AsyncEpisode(self, episode_id or new_id(), robot_id, instruction)

    async def _run(self, call: Call[T]) -> T:
        """Carry out the call's `Send`s and `Pause`s until it returns."""
        came: Outcome = None
        while True:
            try:
                step = call.send(came)
            except StopIteration as done:
                result: T = done.value
                return result
            came = None
            if isinstance(step, Pause):
                await self._sleep(step.seconds)
                continue
            try:
                came = await self._connections.exchange(step)
            except ClientError as error:
                came = error


class Episode(BaseEpisode):
    """One episode of a `Client`, from `Client.episode`."""

    __slots__ = ()
    client: Client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client._run(self._ended(self.client._calls, error))

    def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """As `Client.act`, with the episode's ids and instruction."""
        return self._seen(self.client.act(**self._carried(fields)))


class AsyncEpisode(BaseEpisode):
    """One episode of an `AsyncClient`."""

    __slots__ = ()
    client: AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client._run(self._ended(self.client._calls, error))

    async def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """As `AsyncClient.act`, with the episode's ids and instruction."""
        return self._seen(await self.client.act(**self._carried(fields)))
