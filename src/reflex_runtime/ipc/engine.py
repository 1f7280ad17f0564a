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


class OutputStream(Protocol):
    """One request's tokens, wherever they are made.

    prompt_tokens, cached_tokens: of the prompt, and those of them that the prefix cache had, known once it has begun.
    completion_tokens: so far. ended: whether no more will come, of which the bell has rung; what came may be unread.
    """

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def ended(self) -> bool: ...

    def take(self, most: int | None = None) -> Sequence[Output]:
        """What has come, at most so many, without waiting. Raises the error of a stream that ended with one and is
        read."""

    def close(self) -> None:
        """Take the request back unless it has ended."""


class EngineStream(OutputStream, Protocol):
    """The same at its engine. unread: outputs that wait. held: whether it makes no more until some are taken."""

    @property
    def unread(self) -> int: ...
    @property
    def held(self) -> bool: ...


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
