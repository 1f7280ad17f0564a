"""`Client` and `AsyncClient`: they do what a call's generator yields, waiting in the thread or in the task."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

import httpx

from reflex_runtime.client.calls import ActFields, Call, Calls, Encoding, Priority, T, Wire
from reflex_runtime.client.errors import ClientError
from reflex_runtime.client.exchange import Attempt, Chunk, Network, Reply

log = logging.getLogger("reflex.client")


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

    _http: Any

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
        self._calls = Calls(self._network.url, api_key, timeout, retries, wire, encoding, clock, spread)
        self._sleep: Callable[[float], Any] = sleep or (time.sleep if isinstance(self, Client) else asyncio.sleep)
        self._open()

    def _open(self) -> None:
        raise NotImplementedError


class Client(BaseClient):
    """Calls one server over kept connections; may be used by several threads at once. Arguments: see `BaseClient`."""

    def _open(self) -> None:
        self._http = self._network.client()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        old: httpx.Client = self._http
        self._open()
        old.close()

    def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """The next actions for this observation, see `ActFields`.

        Raises the ClientError of the server's error code; ValueError for arguments that no server would accept.
        """
        return self._run(self._calls.act(fields))

    def predict(
        self,
        item: Any,
        function: str = "",
        *,
        deadline_ms: float | None = None,
        priority: Priority | None = None,
        client: str | None = None,
        request_id: str | None = None,
    ) -> Any:
        """The result of a function for one item, see docs/functions.md. function: its name, where there are several.

        Arrays, dataclasses, structs, pydantic models and pictures may be in the item; arrays in a result are arrays
        again. client: whose fair share it takes. Raises the ClientError of the server's error code.
        """
        said = {"deadline_ms": deadline_ms, "priority": priority, "client": client, "request_id": request_id}
        return self._run(self._calls.predict(item, function, said))

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

    def report_outcome(
        self, episode_id: str, success: bool, reward: float | None = None, robot_id: str | None = None
    ) -> dict[str, Any]:
        """Report how an episode ended. `episode` does this by itself. robot_id: if its requests had one."""
        return self._run(self._calls.outcome(episode_id, success, reward, robot_id))

    def episode(
        self, episode_id: str | None = None, robot_id: str | None = None, instruction: str | None = None
    ) -> Episode:
        """An episode for a with statement: its `act` sends the ids, and its outcome is reported at the end of the
        block."""
        return Episode(self, episode_id or f"ep-{uuid.uuid4().hex}", robot_id, instruction)

    def _run(self, call: Call[T]) -> T:
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
    """`Client` for asyncio; may be used by several tasks at once. Arguments: see `BaseClient`."""

    def _open(self) -> None:
        self._http = self._network.async_client()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        old: httpx.AsyncClient = self._http
        self._open()
        await old.aclose()

    async def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """As `Client.act`. Cancelling the task closes the connection, and the server drops the request."""
        return await self._run(self._calls.act(fields))

    async def predict(
        self,
        item: Any,
        function: str = "",
        *,
        deadline_ms: float | None = None,
        priority: Priority | None = None,
        client: str | None = None,
        request_id: str | None = None,
    ) -> Any:
        """The result of a function for one item, see docs/functions.md. function: its name, where there are several.

        Arrays, dataclasses, structs, pydantic models and pictures may be in the item; arrays in a result are arrays
        again. client: whose fair share it takes. Raises the ClientError of the server's error code.
        """
        said = {"deadline_ms": deadline_ms, "priority": priority, "client": client, "request_id": request_id}
        return await self._run(self._calls.predict(item, function, said))

    async def health(self) -> dict[str, Any]:
        return await self._run(self._calls.health())

    async def config(self) -> dict[str, Any]:
        return await self.get("/config")

    async def get(self, path: str) -> dict[str, Any]:
        return await self._run(self._calls.get(path))

    async def post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return await self._run(self._calls.post(path, fields))

    async def report_outcome(
        self, episode_id: str, success: bool, reward: float | None = None, robot_id: str | None = None
    ) -> dict[str, Any]:
        return await self._run(self._calls.outcome(episode_id, success, reward, robot_id))

    def episode(
        self, episode_id: str | None = None, robot_id: str | None = None, instruction: str | None = None
    ) -> AsyncEpisode:
        """As `Client.episode`, for an async with statement."""
        return AsyncEpisode(self, episode_id or f"ep-{uuid.uuid4().hex}", robot_id, instruction)

    async def _run(self, call: Call[T]) -> T:
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
class BaseEpisode:
    """One episode, without I/O.

    success: how it ended; set it in the block. An exception in the block makes an unset one False. None is not
    reported, because the client does not know the outcome. An interrupted episode (KeyboardInterrupt, a cancelled task)
    is not reported either, because that is no failure of the policy.
    reward: reported with it. reported: the server has accepted the report; a report that fails is logged, not raised.
    changed: the server moved the episode to another policy.
    """

    client: Any
    episode_id: str
    robot_id: str | None = None
    instruction: str | None = None
    success: bool | None = None
    reward: float | None = None
    reported: bool = field(default=False, init=False)
    changed: bool = field(default=False, init=False)

    def _ended(self, calls: Calls, error: object) -> Call[None]:
        """The block has ended, with this exception or without: report the outcome if there is one."""
        if self.success is None and isinstance(error, Exception):
            self.success = False
        if self.success is None:
            return
        try:
            yield from calls.outcome(self.episode_id, self.success, self.reward, self.robot_id)
            self.reported = True
        except ClientError as lost:
            log.warning("the outcome of episode %s (success=%s) was not taken: %s", self.episode_id, self.success, lost)

    def _carried(self, fields: ActFields) -> ActFields:
        known: ActFields = {
            "episode_id": self.episode_id, "robot_id": self.robot_id, "instruction": self.instruction
        }  # fmt: skip
        return known | fields

    def _seen(self, chunk: Chunk) -> Chunk:
        self.changed = self.changed or chunk.policy_changed
        return chunk


class Episode(BaseEpisode):
    """One episode of a `Client`, from `Client.episode`."""

    __slots__ = ()
    client: Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
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

    async def __aexit__(self, _kind: object, error: object, _trace: object) -> None:
        await self.client._run(self._ended(self.client._calls, error))

    async def act(self, **fields: Unpack[ActFields]) -> Chunk:
        """As `AsyncClient.act`, with the episode's ids and instruction."""
        return self._seen(await self.client.act(**self._carried(fields)))
