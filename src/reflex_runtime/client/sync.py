"""The blocking client: carries out calls step by step in the calling thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from reflex_runtime.client.answers import Chunk
from reflex_runtime.client.calls import Call, Calls, Outcome, Pause, T
from reflex_runtime.client.episodes import BaseEpisode, new_id
from reflex_runtime.client.errors import ClientError
from reflex_runtime.client.exchange import Address
from reflex_runtime.client.requests import Encoding, Picture, Priority, Wire, named
from reflex_runtime.client.sockets import Sockets


class Client:
    """Calls one server over kept connections; may be used by several threads at once.

    url: http://HOST:PORT, with an optional path prefix. api_key: sent as Authorization: Bearer.
    timeout: most seconds of a call, pauses and further attempts included.
    retries: most further attempts after a refusal, see `Retries`; 0 is none.
    wire: "msgpack", which carries pictures and numbers as bytes, or "json".
    encoding: of pictures given as arrays: "raw" (uncompressed; over JSON as PNG), "png" (smaller, the same pixels) or
        "jpeg" (smallest, and not quite the same pixels).
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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._connections = Sockets(Address.of(url), clock)
        self._calls = Calls(api_key, timeout, retries, wire, encoding, clock, spread)
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections; a later call opens a new one."""
        self._connections.close()

    def act(
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
        """The next actions for this observation.

        image: the policy's only picture; images: by the policy's names. state: [n], in the robot's units. seed: of the
        noise, else made from request_id. deadline_ms: from this call on, all attempts included. executed: how many
        actions of the last chunk were executed.

        Raises the ClientError of the server's error code; ValueError for arguments that no server would accept.
        """
        return self._run(self._calls.act(named(locals())))

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
        return Episode(self, new_id() if episode_id is None else episode_id, robot_id, instruction)

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

    def act(self, **fields: Any) -> Chunk:
        """As `Client.act`, with the episode's ids and instruction."""
        return self._seen(self.client.act(**self._carried(fields)))
