"""What a runtime process asks of a model. It comes as a factory, from above: nothing here knows what a model is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from reflex_runtime.ipc.messages import GenerateParams, LoadModel, Tokenize


class Output(Protocol):
    """One token of output; every name is that of `llm.TokenOutput`."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def held(self) -> int: ...
    @property
    def finish(self) -> str | None: ...


class EngineStream(Protocol):
    """One request's tokens at its engine. unread: they wait to be taken. held: whether it makes no more until some are
    taken. ended: no more will come; the bell has rung since."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    @property
    def unread(self) -> int: ...
    @property
    def held(self) -> bool: ...

    def take(self, most: int) -> Sequence[Output]:
        """What has come, at most so many. Raises the error of a stream that ended with one and is read."""

    def close(self) -> None:
        """Take it back, unless it has ended."""


class Engine(Protocol):
    """A loaded model. Everything is called on the loop."""

    def info(self) -> dict[str, Any]:
        """What `load_model` answers; JSON-safe."""

    def state(self) -> dict[str, Any]:
        """How it is; JSON-safe."""

    def metrics(self) -> str:
        """Prometheus text, or nothing."""

    async def tokenize(self, params: Tokenize) -> list[int]:
        """Token ids of a text or a conversation. Raises ConfigError."""

    async def submit(self, params: GenerateParams, bell: asyncio.Event, leader: Any) -> EngineStream:
        """Take a request. bell: rung when the stream has news. leader: None, or a stream of this engine that has said
        nothing yet and has the same prompt. Raises ReflexError."""

    async def close(self, drain: bool, timeout: float) -> bool:
        """Take nothing more; every stream has ended when it returns. Whether nothing is at work any more."""


Load = Callable[[LoadModel], Awaitable[Engine]]
