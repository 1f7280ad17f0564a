"""The asyncio client: the same calls, awaited."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from reflex_runtime.client.answers import Chunk
from reflex_runtime.client.calls import Call, Calls, Outcome, Pause, T
from reflex_runtime.client.episodes import BaseEpisode, new_id
from reflex_runtime.client.errors import ClientError
from reflex_runtime.client.exchange import Address
from reflex_runtime.client.requests import Encoding, Picture, Priority, Wire, named
from reflex_runtime.client.streams import Streams


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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._connections = Streams(Address.of(url))
        self._calls = Calls(api_key, timeout, retries, wire, encoding, clock, spread)
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        await self._connections.close()

    async def act(
        self,
        image: Picture | None = None,
        images: Mapping[str, Picture] | None = None,
        instruction: str | None = None,
        state: Sequence[float] | NDArray[Any] | None = None,
        episode_id: str | None = None,
        robot_id: str | None = None,
        seed: int | None = None,
        priority: Priority | None = None,
        deadline_ms: float | None = None,
        request_id: str | None = None,
        executed: int | None = None,
    ) -> Chunk:
        """As `Client.act`. Cancelling the task closes the connection, and the server drops the request."""
        return await self._run(self._calls.act(named(locals())))

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
        return AsyncEpisode(self, new_id() if episode_id is None else episode_id, robot_id, instruction)

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

    async def act(self, **fields: Any) -> Chunk:
        """As `AsyncClient.act`, with the episode's ids and instruction."""
        return self._seen(await self.client.act(**self._carried(fields)))
